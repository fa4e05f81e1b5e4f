"""Samples of a machine: its constants varied together within their intervals.

Each constant has a Latin hypercube column of its own: of `count` equally likely values each occurs once, in an order
that follows from the seed and the constant's name alone. So equal seeds give equal samples on every machine, whatever
other constants there are. Values are log-normal, with the two halves of the interval apart. Constants that are
proportional to another follow it (`Profile.number`), and impossible values are clamped (`Profile.clamped`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import ProfileError, QuantityError
from tasp_lab.machines.compute_rates import COMPUTE_RATES
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import WIRES, default_width, log_ends
from tasp_lab.machines.machine import ComputeRate, Constant, Machine

NORMAL_95 = NormalDist().inv_cdf(0.95)
"""Standard deviations from the middle of a normal distribution to its 95 % point: 1.645."""

_COMPUTE = "compute"
MAX_SAMPLES = 4096


@dataclass(frozen=True)
class Sampling:
    """How many samples of the constants are simulated, 0 for none and no interval, and the seed of their order."""

    samples: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (("samples", self.samples, MAX_SAMPLES), ("seed", self.seed, 2**32 - 1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise QuantityError(f"{name}: {value!r}, expected a whole number")
            if not 0 <= value <= most:
                raise QuantityError(f"{name}: {value}, expected a whole number from 0 to {most}")

    def of(self, count: int) -> Sampling:
        """As many samples as this, but no more than `count`."""
        return replace(self, samples=min(self.samples, max(count, 0)))

    def normals(self, name: str) -> FloatArray:
        """Standard normal values of a constant, shape (samples,): the middles of equally likely strata, permuted.

        >>> Sampling(4).normals("nic_payload").round(2).tolist() == Sampling(4).normals("nic_payload").round(2).tolist()
        True
        """
        # RandomState is the one generator whose stream numpy promises to keep (NEP 19)
        order = np.random.RandomState([self.seed, zlib.crc32(name.encode())]).permutation(self.samples)
        return _strata(self.samples)[order]


DEFAULT_SAMPLING = Sampling()
NO_SAMPLES = Sampling(0)
FEW_SAMPLES = Sampling(8)
"""For commands that predict dozens of schedules or hundreds of rows."""


@lru_cache
def _strata(count: int) -> FloatArray:
    return np.array([NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)])


@dataclass(frozen=True)
class MachineSamples:
    """A machine and its samples, none where none of its constants is uncertain; rates of kernels are apart."""

    machine: Machine
    sampling: Sampling
    machines: tuple[Machine, ...]

    def of_rate(self, rate: ComputeRate, dtype: str, passing: str) -> FloatArray:
        """Factors of a compute rate, shape (samples,); one draw moves all rates of a machine together."""
        low, high = rate_ends(self.machine, rate, dtype, passing)
        return np.exp(log_normal(self.sampling.normals(_COMPUTE), low, high))


def machine_samples(machine: Machine, sampling: Sampling) -> MachineSamples:
    """The samples of a machine by the intervals of its constants."""
    return MachineSamples(machine, sampling, tuple(_sampled(machine, sampling)))


def _sampled(machine: Machine, sampling: Sampling) -> Iterator[Machine]:
    ends = {each.name: log_ends(each) for each in machine.constants if each.name not in COMPUTE_RATES}
    uncertain = {name: pair for name, pair in ends.items() if pair != (0.0, 0.0)}
    if machine.recipe is None or not uncertain or not sampling.samples:
        return
    drawn = {name: np.exp(log_normal(sampling.normals(name), *pair)) for name, pair in uncertain.items()}
    for index in range(sampling.samples):
        yield varied(machine, {name: float(factors[index]) for name, factors in drawn.items()})


def varied(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine with some constants times factors, as its recipe makes it; its ranks compute as fast as before.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> slow = varied(load_machine("h100-8"), {"message_launch": 2.0})
    >>> slow.comm_library.media[0].launch_s / load_machine("h100-8").comm_library.media[0].launch_s
    2.0

    Raises `ProfileError` for a machine without a recipe, whose constants are fixed.
    """
    if machine.recipe is None:
        raise ProfileError(f"{machine.topology.name}: its constants are fixed, expected a machine of a profile")
    constants = tuple(_times(each, factors.get(each.name, 1.0)) for each in machine.constants)
    topology = machine.recipe.topology(constants) if any(name in WIRES for name in factors) else machine.topology
    return replace(machine, topology=topology, comm_library=machine.recipe.comm_library(constants))


def log_normal(normals: FloatArray, low: float, high: float) -> FloatArray:
    """Logarithms of factors whose 5 and 95 % points are `low` and `high`."""
    return np.where(normals < 0, normals * -low, normals * high) / NORMAL_95


def _times(constant: Constant, factor: float) -> Constant:
    if factor == 1:
        return constant
    spec = CONSTANTS[constant.name]
    value = min(spec.parse(constant.value) * factor, spec.quantity.max_value)
    return replace(constant, value=spec.format(value, 17))


def rate_ends(machine: Machine, rate: ComputeRate, dtype: str, passing: str) -> tuple[float, float]:
    """The ends of a compute rate, as logarithms: its kernel's, the constant's if it is that, else by its source."""
    if rate.interval is not None and not rate.assumed:
        return rate.interval
    kind = ("fp32" if dtype == "fp32" else "bf16", passing)
    own = [each for each in machine.constants if COMPUTE_RATES.get(each.name) == kind and each.source == rate.source]
    if own:
        return log_ends(own[0])
    width = math.log1p(default_width("compute", f"assumed: {rate.source}" if rate.assumed else rate.source))
    return -width, width
