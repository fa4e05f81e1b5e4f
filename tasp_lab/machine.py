"""A machine: a topology and what the communication library adds to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasp_lab.errors import QuantityError
from tasp_lab.quantities import Number
from tasp_lab.topology import Topology
from tasp_lab.transport import IDEAL as IDEAL
from tasp_lab.transport import Transport as Transport


@dataclass(frozen=True)
class Compute:
    """How fast a rank computes: so many FLOP/s, whatever the shapes; None when computing takes no time."""

    flops_per_s: Number | None = None

    def __post_init__(self) -> None:
        if self.flops_per_s is not None and not (math.isfinite(self.flops_per_s) and self.flops_per_s > 0):
            raise QuantityError(f"compute rate: {self.flops_per_s} FLOP/s, expected more than 0")

    def time_s(self, flops: int) -> Number:
        """How long a kernel call with so many FLOPs takes."""
        return 0 if self.flops_per_s is None else flops / self.flops_per_s


INSTANT = Compute()
"""Computing takes no time: what remains is communication."""


@dataclass(frozen=True)
class Constant:
    """A constant of a machine and where it comes from. `value` as people write it, like ``450GB/s``."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Machine:
    """A topology, its transport, how fast its ranks compute, and the constants that describe it with their sources."""

    topology: Topology
    transport: Transport = IDEAL
    compute: Compute = INSTANT
    summary: str = ""
    constants: tuple[Constant, ...] = ()
