"""Samples of a machine: its constants varied together within their intervals.

Each constant has a Latin hypercube column of its own: of `count` equally likely values each occurs once, in an order
that follows from the seed and the constant's name alone. So equal seeds give equal samples on every machine, whatever
other constants there are. Values are log-normal, with the two halves of the interval apart. Constants that are
proportional to another follow it, and impossible values are clamped (`tasp_lab.machines.parameters.changed`).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import msgspec
import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import QuantityError
from tasp_lab.machines.change import change
from tasp_lab.machines.compute import COMPUTE_RATES
from tasp_lab.machines.intervals import default_width, log_ends
from tasp_lab.machines.kernel_model.constants import KernelConstant, constants_in
from tasp_lab.machines.kernel_model.kernel import AttentionKernel
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.parameters import Change

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
        # a column depends on no other name, so one more constant leaves the samples of the rest as they are
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
    known = machine.parameters
    parameters = (each for name, each in known.items() if name in known.numbers and name not in COMPUTE_RATES)
    ends = {each.name: log_ends(each) for each in parameters}
    uncertain = {name: pair for name, pair in ends.items() if pair != (0.0, 0.0)}
    if machine.system is None or not uncertain:
        return MachineSamples(machine, sampling, ())
    drawn = {name: np.exp(log_normal(sampling.normals(name), *pair)) for name, pair in uncertain.items()}
    samples = (
        {name: Change(float(column[index])) for name, column in drawn.items()} for index in range(sampling.samples)
    )
    return MachineSamples(machine, sampling, tuple(change(machine, changes) for changes in samples))


def log_normal(normals: FloatArray, low: float, high: float) -> FloatArray:
    """Logarithms of factors whose 5 and 95 % points are `low` and `high`."""
    # the halves apart: intervals are seldom as wide below the value as above it
    return np.where(normals < 0, normals * -low, normals * high) / NORMAL_95


def rate_ends(machine: Machine, rate: ComputeRate, dtype: str, passing: str) -> tuple[float, float]:
    """The ends of a compute rate, as logarithms: its kernel's, the constant's if it is that, else by its source.

    A kernel taken from another GPU states 25 % more than it had there: of 55 kernels of tables, predicted from other
    GPUs, the mean errors of 53 are inside (`experiments/results/kernel_accuracy.json`, ``left_out``).
    """
    if rate.interval is not None:
        return rate.interval
    kind = ("fp32" if dtype == "fp32" else "bf16", passing)
    for parameter in machine.parameters.values():
        if COMPUTE_RATES.get(parameter.name) == kind and parameter.source == rate.source:
            return log_ends(parameter)
    width = math.log1p(default_width("compute", f"assumed: {rate.source}" if rate.assumed else rate.source))
    return -width, width


@lru_cache(64)
def kernel_samples(kernel: AttentionKernel, sampling: Sampling) -> tuple[AttentionKernel, ...]:
    """The kernel with each sample of its constants; those of the GPU, which are counts and peaks, stay.

    Equal seeds give equal samples.
    """
    drawn = []
    for variant in kernel.file.variants:
        # one column of normal values for each constant, the same in all passes
        columns = {name: _values(constant, name, sampling) for name, constant in constants_in(variant).items()}
        drawn.append(
            [
                msgspec.structs.replace(variant, **{name: column[index] for name, column in columns.items()})
                for index in range(sampling.samples)
            ]
        )
    files = (msgspec.structs.replace(kernel.file, variants=variants) for variants in zip(*drawn, strict=True))
    return tuple(AttentionKernel(kernel.gpu, file, kernel.note) for file in files)


def _values(constant: KernelConstant, name: str, sampling: Sampling) -> list[KernelConstant]:
    """Log-normal where its ends allow it; else, as for a cost that may be 0, normal between them."""
    value, low, high = constant.value, constant.low, constant.high
    if low == high:
        return [constant] * sampling.samples
    normals = sampling.normals(f"kernel {name}")
    if low > 0:
        found = value * np.exp(log_normal(normals, math.log(low / value), math.log(high / value)))
    else:
        found = np.maximum(value + log_normal(normals, low - value, high - value), 0.0)
    return [KernelConstant(float(each), float(each), float(each), constant.source) for each in found]
