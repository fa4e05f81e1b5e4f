"""A machine: a topology, its communication library and how fast its ranks compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tasp_lab.errors import QuantityError
from tasp_lab.libraries.library import IDEAL as IDEAL
from tasp_lab.libraries.library import CommLibrary as CommLibrary
from tasp_lab.topology.graph import Topology
from tasp_lab.units import Number
from tasp_lab.workload.kernel_shapes import KernelShape

if TYPE_CHECKING:
    from tasp_lab.schedule.calls import Task

Kind = tuple[str, str]
"""A dtype (``bf16``, ``fp16`` or ``fp32``) and a pass (``forward`` or ``backward``)."""


class Compute(Protocol):
    """How long the kernel calls of a rank take: a rate, rates by dtype and pass, or kernels by the shape of a call."""

    def time_s(self, shape: KernelShape) -> Number:
        """The time of one call, alone on its GPU."""

    def rate(self, dtype: str, passing: str) -> ComputeRate:
        """The fastest rate that a call of any shape reaches in a dtype and a pass, for bounds and reports."""

    def scaled(self, factor: float) -> Compute:
        """All rates times a factor."""

    def as_assumed(self, what: str) -> Compute:
        """The same, marked as an assumption; `what` begins the sources."""


@dataclass(frozen=True)
class ComputeRate:
    """A compute rate in FLOP/s, independent of shapes; None if computing takes no time.

    `source` is the origin of the rate, and `assumed` whether it is an assumption.
    """

    flops_per_s: Number | None = None
    source: str = "given"
    assumed: bool = False

    def __post_init__(self) -> None:
        if self.flops_per_s is not None and not (math.isfinite(self.flops_per_s) and self.flops_per_s > 0):
            raise QuantityError(f"compute rate: {self.flops_per_s} FLOP/s, expected more than 0")

    def time_s(self, shape: KernelShape) -> Number:
        """The time of a kernel call: that of its FLOPs."""
        return self.flops_time_s(shape.flops)

    def flops_time_s(self, flops: int) -> Number:
        """The time of `flops` FLOPs."""
        return 0 if self.flops_per_s is None else flops / self.flops_per_s

    def rate(self, dtype: str, passing: str) -> ComputeRate:
        """The rate of a dtype and a pass: the same for all."""
        return self

    def scaled(self, factor: float) -> ComputeRate:
        """The rate times a factor."""
        if self.flops_per_s is None:
            return self
        return ComputeRate(self.flops_per_s * factor, f"{self.source}, times {factor:.3g}", self.assumed)

    def as_assumed(self, what: str) -> ComputeRate:
        """The rate as an assumption."""
        source = self.source if self.source.startswith(what) else f"{what} ({self.source})"
        return replace(self, source=source, assumed=True)


@dataclass(frozen=True)
class ComputeRates:
    """ComputeRate rates by dtype and pass, made from constants by `tasp_lab.machines.compute_rates`."""

    rates: Mapping[Kind, ComputeRate]

    def time_s(self, shape: KernelShape) -> Number:
        """The time of a kernel call: that of its FLOPs at the rate of its dtype and pass."""
        return self.rates[shape.dtype, shape.passing].time_s(shape)

    def rate(self, dtype: str, passing: str) -> ComputeRate:
        """The rate of a dtype and a pass."""
        return self.rates[dtype, passing]

    def scaled(self, factor: float) -> ComputeRates:
        """All rates times a factor."""
        return ComputeRates({kind: rate.scaled(factor) for kind, rate in self.rates.items()})

    def as_assumed(self, what: str) -> ComputeRates:
        """All rates as assumptions."""
        return ComputeRates({kind: rate.as_assumed(what) for kind, rate in self.rates.items()})


INSTANT = ComputeRate()
"""Computing takes no time, so predictions are those of communication."""


@dataclass(frozen=True)
class Constant:
    """A constant of a machine with its source. `value` is a text with a unit, like ``450GB/s``.

    A constant that depends on another has this `value` `at` a value of the other, like ``nic_bandwidth = 400Gbit/s``,
    and is proportional to it.
    """

    name: str
    value: str
    source: str
    at: str = ""


@dataclass(frozen=True)
class Machine:
    """A topology, its communication library, how fast its ranks compute, and its constants with their sources."""

    topology: Topology
    comm_library: CommLibrary = IDEAL
    compute: Compute = INSTANT
    summary: str = ""
    constants: tuple[Constant, ...] = ()

    @property
    def has_accelerators(self) -> bool:
        """Whether its ranks are known GPUs or other accelerators: those of a profile or of a machine file."""
        return isinstance(self.compute, ComputeRates)

    def rate_of(self, task: Task | None) -> ComputeRate:
        """The fastest compute rate of the calls of a task; `INSTANT` without one."""
        return INSTANT if task is None else self.compute.rate(task.dtype, task.passing)
