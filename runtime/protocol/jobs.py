"""Jobs that ranks perform, as plain data without torch, so that a launcher can construct and send them.

All ranks of a group perform the same job at the same time; each returns its own result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from runtime.protocol.records import RankRecord
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True)
class RunSchedule:
    """Execute a schedule `repeats` times after `warm_ups` untimed runs, and check the result.

    `transport` is ``auto``, ``p2p``, ``batched``, ``all-to-all`` or ``symmetric-memory``. With `compute` a kernel
    call is replaced by a wait of the time that it takes there, divided by the speed of its rank if there are
    `rank_speeds`. In warm-up runs blocks are checked bit for bit, and the
    result of real attention is compared with the float64 reference. Repeats follow each other without checks, as a GPU
    that is idle meanwhile loses its clock; blocks that are not overwritten are checked after the last one. Every rank
    returns a list of `RankRecord`.
    """

    schedule: Schedule
    transport: str
    repeats: int
    warm_ups: int = 0
    compute: Compute | None = None
    rank_speeds: tuple[Number, ...] = ()

    def compute_of(self, rank: int) -> Compute | None:
        """How long the kernel calls of a rank take, if they are waits."""
        if self.compute is None or not self.rank_speeds:
            return self.compute
        return self.compute.scaled(float(self.rank_speeds[rank]))


@dataclass(frozen=True)
class MeasureCompute:
    """Make all kernel calls of a schedule on all ranks at once, without communication.

    Every rank returns the `KernelTimes` of the median of `repeats` runs.
    """

    schedule: Schedule
    repeats: int


@dataclass(frozen=True)
class MeasurePair:
    """Time messages from rank `source` to rank `destination` while the other ranks are idle.

    For each of `sizes_bytes`, `repeats` messages are sent in sequence, each answered with one byte; then `tiny`
    one-byte messages, each answered, and `tiny` posted back to back. On GPUs each of these is the mean of many, and
    batches of several one-byte messages are timed, too. `source` returns `PairTimes`.
    """

    source: int
    destination: int
    sizes_bytes: tuple[int, ...]
    repeats: int
    tiny: int = 50


class KernelTimes(NamedTuple):
    """The time of kernel calls in seconds and, on a GPU, that which the host takes to make them."""

    time_s: float
    host_s: float | None = None


class BatchTime(NamedTuple):
    """The time of a batch of one-byte messages on the device, answered with one byte, and that to post it."""

    messages: int
    answered_s: float
    posted_s: float


class PairTimes(NamedTuple):
    """Round-trip times in s per (size, repeat) and of one-byte messages, and the host's time to post a message.

    `batches` are those of several one-byte messages, on GPUs, where round trips are timed by the device's clock.
    """

    answered_s: tuple[tuple[int, float], ...]
    tiny_answered_s: tuple[float, ...]
    tiny_posted_s: tuple[float, ...]
    batches: tuple[BatchTime, ...] = ()


Job = RunSchedule | MeasureCompute | MeasurePair
Result = list[RankRecord] | PairTimes | KernelTimes | None


Value = TypeVar("Value")


class Ranks(Protocol):
    """A group of ranks that perform jobs together."""

    @property
    def world_size(self) -> int: ...

    @property
    def is_reporter(self) -> bool:
        """Whether this process prints and writes results: one process for all ranks."""
        ...

    @property
    def environment(self) -> Mapping[str, object]:
        """What the ranks of a measurement run on: `backend`, `device`, and on GPUs the versions of their libraries."""
        ...

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        """The results of all ranks. Raises `RunError` if a rank dies or makes no progress for `longest_silence_s`."""
        ...

    def agree(self, value: Value) -> Value:
        """The value of rank 0 if every rank runs the program and has a value of its own, else the value."""
        ...


# The set-up of a launched rank, as plain data that a launcher without torch can construct.


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank: its network interface, and its namespaces (descriptors, -1 for none)."""

    interface: str = "lo"
    network_namespace: int = -1
    user_namespace: int = -1


@dataclass(frozen=True)
class RankSetup:
    """The set-up of one rank. `channel`, `store`, `log` and `heartbeat` are inherited descriptors.

    `store` is the in-memory file for the rendezvous of the process group, `log` the one for the rank's output.
    """

    rank: int
    world_size: int
    location: RankLocation
    channel: int
    store: int
    log: int
    heartbeat: int


def our_module(name: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules, independently of modules in the current directory."""
    root = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {root!r}); import runpy; runpy.run_module({name!r}, run_name='__main__')"
    return [sys.executable, "-P", "-c", program, *arguments]
