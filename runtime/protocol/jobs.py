"""Jobs that ranks perform, as plain data without torch, so that a launcher can construct and send them.

All ranks of a group perform the same job at the same time; each returns its own result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from runtime.protocol.records import RankRecord
from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True)
class RunSchedule:
    """Execute a schedule `repeats` times after `warm_ups` untimed runs, and check the result.

    `transport` is ``auto``, ``p2p``, ``batched`` or ``all-to-all``. With `flops_per_s` a kernel call is replaced by a
    wait of its duration at that rate. Blocks are checked bit for bit; those that are later overwritten only in warm-up
    runs. In warm-up runs the result of real attention is compared with the float64 reference. Every rank returns a list
    of `RankRecord`.
    """

    schedule: Schedule
    transport: str
    repeats: int
    warm_ups: int = 0
    flops_per_s: float | None = None


@dataclass(frozen=True)
class MeasureCompute:
    """Make all kernel calls of a schedule on all ranks at once, without communication.

    Every rank returns the median time of `repeats` runs in seconds.
    """

    schedule: Schedule
    repeats: int


@dataclass(frozen=True)
class MeasurePair:
    """Time messages from rank `source` to rank `destination` while the other ranks are idle.

    For each of `sizes_bytes`, `repeats` messages are sent in sequence, each answered with one byte; then `tiny`
    one-byte messages, each answered, and `tiny` posted back to back. `source` returns `PairTimes`.
    """

    source: int
    destination: int
    sizes_bytes: tuple[int, ...]
    repeats: int
    tiny: int = 50


class PairTimes(NamedTuple):
    """Round-trip times in s per (size, repeat) and of one-byte messages, and the time to post a message."""

    answered_s: tuple[tuple[int, float], ...]
    tiny_answered_s: tuple[float, ...]
    tiny_posted_s: tuple[float, ...]


Job = RunSchedule | MeasureCompute | MeasurePair
Result = list[RankRecord] | PairTimes | float | None


Value = TypeVar("Value")


class Ranks(Protocol):
    """A group of ranks that perform jobs together."""

    @property
    def world_size(self) -> int: ...

    @property
    def is_reporter(self) -> bool:
        """Whether this process prints and writes results: one process for all ranks."""
        ...

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        """The results of all ranks. Raises `RunError` if a rank dies or makes no progress for `longest_silence_s`."""
        ...

    def agree(self, value: Value) -> Value:
        """The value of rank 0 if every rank runs the program and has a value of its own, else the value."""
        ...
