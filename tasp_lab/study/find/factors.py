"""The uncertain constants of a machine as factors: how far each may be from its value, and what would settle it.

All compute rates and constants of kernels are one factor, `COMPUTE`, as they are in samples of a machine
(`tasp_lab.machines.sampling`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import StudyError
from tasp_lab.core.units import format_flops
from tasp_lab.machines.compute import COMPUTE_RATES
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import default_width, dimension, log_ends, source_kind
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.parameters import Parameter
from tasp_lab.machines.sampling import rate_ends, varied
from tasp_lab.study.find.crossover_question import parse_share
from tasp_lab.workload.kernel_shapes import Passing
from tasp_lab.workload.layer import Workload

COMPUTE = "compute.rate"
SETTLES_COMPUTE = "a table of kernel times: calibrate --kernels"

BY_SOURCE = "source interval"
_BY = re.compile(rf"{BY_SOURCE}(?:, else (?P<width>[0-9.]+%))?|(?P<all>[0-9.]+%)")

PASSES: Mapping[Pass, tuple[Passing, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


@dataclass(frozen=True)
class Factor:
    """One constant.

    Parameters
    ----------
    name : of the constant.
    low, high : the logarithms of factors at its 5 and 95 % points, at most 0 and at least 0.
    text : its interval for people.
    source : where its value comes from.
    assumed : whether that is an assumption.
    settled_by : the measurement that identifies it; empty where none is known.
    """

    name: str
    low: float
    high: float
    text: str
    source: str
    assumed: bool
    settled_by: str = ""

    @property
    def low_factor(self) -> float:
        """The factor at its 5 % point."""
        return math.exp(self.low)

    @property
    def high_factor(self) -> float:
        """The factor at its 95 % point."""
        return math.exp(self.high)


@dataclass(frozen=True)
class Width:
    """Which intervals constants have: those that their files state or their sources give, or one width.

    `otherwise` is the relative width of constants whose file states no interval, None for that of the kind of their
    source; with `all` it is that of all uncertain ones.

    >>> Width.parse("source interval, else 20%"), Width.parse("20%").all
    (Width(otherwise=0.2, all=False), True)
    """

    otherwise: float | None = None
    all: bool = False

    @staticmethod
    def parse(text: str) -> Width:
        """The width of a text. Raises `StudyError`."""
        found = _BY.fullmatch(" ".join(text.split()))
        if found is None:
            raise StudyError(f"by {text!r}: expected {BY_SOURCE!r}, '{BY_SOURCE}, else 20%', or a width like 20%")
        share = found["width"] or found["all"]
        return Width(None if share is None else parse_share("by", share), found["all"] is not None)

    def ends(self, own: tuple[float, float], stated: bool) -> tuple[float, float]:
        """The ends of a constant that has these by its source."""
        if self.otherwise is None or (stated and not self.all):
            return own
        return -math.log1p(self.otherwise), math.log1p(self.otherwise)


OWN_WIDTHS = Width()
"""Each constant has the interval that its file states or its source gives."""


def factors_of(machine: Machine, layer: Workload, passes: Pass, width: Width = OWN_WIDTHS) -> list[Factor]:
    """The uncertain constants on which a machine depends, as its recipe makes it, and its compute rate.

    A constant that leaves topology and library as they are is left out: the machine does not use it.
    """
    return [*_of_constants(machine, width), *_of_compute(machine, layer, passes, width)]


def changed(machine: Machine, logs: Mapping[str, float]) -> Machine:
    """The machine with constants times factors, which are given as logarithms."""
    constants = {name: math.exp(log) for name, log in logs.items() if name != COMPUTE and log}
    found = varied(machine, constants) if constants else machine
    rate = logs.get(COMPUTE, 0.0)
    return replace(found, compute=found.compute.scaled(math.exp(rate))) if rate else found


def _of_constants(machine: Machine, width: Width) -> Iterator[Factor]:
    if machine.system is None:
        return
    for constant in machine.parameters.values():
        if constant.name in COMPUTE_RATES or constant.name not in CONSTANTS:
            continue
        own = log_ends(constant)
        uncertain = own != (0.0, 0.0) or (_has_width(constant) and width.otherwise is not None)
        low, high = width.ends(own, constant.low is not None) if uncertain else own
        if (low, high) != (0.0, 0.0) and _matters(machine, constant, low, high):
            yield _of_constant(constant, low, high)


def _has_width(constant: Parameter) -> bool:
    """Whether a constant is uncertain by what it is and by its source, though it may state no interval."""
    found = dimension(CONSTANTS[constant.name])
    return found is not None and default_width(found, constant.source) > 0


def _matters(machine: Machine, constant: Parameter, low: float, high: float) -> bool:
    ends = (changed(machine, {constant.name: end}) for end in (low, high))
    return any(end.topology != machine.topology or end.comm_library != machine.comm_library for end in ends)


def _of_constant(constant: Parameter, low: float, high: float) -> Factor:
    spec, value = CONSTANTS[constant.name], constant.number
    ends = [spec.format(value * math.exp(end), 4) for end in (low, high)]
    assumed = source_kind(constant.source) == "assumed"
    return Factor(constant.name, low, high, " to ".join(ends), constant.source, assumed, spec.identified_by)


def _of_compute(machine: Machine, layer: Workload, passes: Pass, width: Width) -> Iterator[Factor]:
    """The widest interval of the rates of the passes, which move together."""
    rates = {passing: machine.rate_of(layer, passing) for passing in PASSES[passes]}
    ends = [
        width.ends(rate_ends(machine, rate, layer.dtype, passing), _is_stated(machine, rate))
        for passing, rate in rates.items()
        if rate.flops_per_s is not None
    ]
    low, high = min((end for end, _ in ends), default=0.0), max((end for _, end in ends), default=0.0)
    if (low, high) != (0.0, 0.0):
        sources = "; ".join(dict.fromkeys(rate.source for rate in rates.values()))
        assumed = any(rate.assumed for rate in rates.values())
        yield Factor(
            COMPUTE, low, high, _rate_text(next(iter(rates.values())), low, high), sources, assumed, SETTLES_COMPUTE
        )


def _is_stated(machine: Machine, rate: ComputeRate) -> bool:
    """Whether a file states the interval of a rate: that of its kernel, or that of the machine's constant."""
    return rate.interval is not None or any(
        each.low is not None and each.source == rate.source for each in machine.parameters.values()
    )


def _rate_text(rate: ComputeRate, low: float, high: float) -> str:
    """The interval of the first rate."""
    assert rate.flops_per_s is not None, "it has an interval"
    value = float(rate.flops_per_s)
    return " to ".join(format_flops(value * math.exp(end)) for end in (low, high))
