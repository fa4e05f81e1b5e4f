"""What ranks can be asked to do, as plain data. Without torch, so that a launcher can build and send it.

All ranks of a group perform the same job at the same time; each returns its own result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from runtime.records import RankRecord
from tasp_lab.schedule import Schedule


@dataclass(frozen=True)
class RunSchedule:
    """Execute a schedule `repeats` times after `warm_ups` untimed ones, and check the result.

    `transport` is ``auto``, ``p2p``, ``batched`` or ``all-to-all``. With `flops_per_s` a kernel call is a wait of as
    long as it takes at that rate; without, it is real. Blocks are checked bit for bit, those that are overwritten on
    the way while warming up; a result of real attention against the float64 reference, while warming up. Every rank
    returns a list of `RankRecord`.
    """

    schedule: Schedule
    transport: str
    repeats: int
    warm_ups: int = 0
    flops_per_s: float | None = None


@dataclass(frozen=True)
class MeasureCompute:
    """Make all kernel calls of a schedule, on all ranks at once, and send nothing.

    Every rank returns the median seconds of `repeats`.
    """

    schedule: Schedule
    repeats: int


@dataclass(frozen=True)
class MeasurePair:
    """Time messages from rank `source` to rank `destination`; the other ranks stay idle.

    For each of `sizes_bytes`, `repeats` messages one after the other, each answered with one byte; then `tiny`
    one-byte messages answered one by one, and `tiny` posted back to back. `source` returns `PairTimes`.
    """

    source: int
    destination: int
    sizes_bytes: tuple[int, ...]
    repeats: int
    tiny: int = 50


class PairTimes(NamedTuple):
    """Seconds until the answer was back, for each (size, repeat); for one-byte messages; and per message posted."""

    answered_s: tuple[tuple[int, float], ...]
    tiny_answered_s: tuple[float, ...]
    tiny_posted_s: tuple[float, ...]


Job = RunSchedule | MeasureCompute | MeasurePair
Result = list[RankRecord] | PairTimes | float | None


Value = TypeVar("Value")


class Ranks(Protocol):
    """A group of ranks that perform jobs together, wherever they run."""

    @property
    def world_size(self) -> int: ...

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        """The results of all ranks. Raises `RunError` when a rank dies, or is silent for longer than given."""
        ...

    def agree(self, value: Value) -> Value:
        """The value of rank 0 where every rank has come to one of its own, else the value."""
        ...
