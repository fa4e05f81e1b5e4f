"""A schedule: who sends which block to whom at which step. Data, proven valid when it is built.

**Blocks** are numbered; each has a size in bytes. At the start a rank holds some blocks (`initial`), at the end
every rank must hold what the collective promises (`final`). A **step** is a set of transfers that may run at the
same time; they use only what the sender held when the step began. A **lane** is one of the concurrent ways blocks
take: a rank's transfers on one lane go one after the other, those on different lanes do not wait for each other.
There is no barrier between steps.

Steps are produced when they are asked for (a 511-ring AllGather on 512 ranks has 134 million transfers), each as
arrays. Building a `Schedule` replays all of them once; what breaks a rule raises `ScheduleError` with step, rank
and block, so a schedule that exists is valid:

- a rank sends only what it held when the step began, and never to itself;
- no block is delivered to a rank twice, or to one that has it from the start;
- in the end every rank holds exactly what the collective promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tasp_lab.errors import ScheduleError
from tasp_lab.topology import Topology

MOST_HOLDINGS = 2**30
"""Ranks times blocks that a proof has room for: three bytes each."""

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """The transfers of one step, as four arrays of equal length.

    >>> print(Step.of([(0, 1, 0, 5)]))
    0->1 lane 0 block 5
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray

    def __post_init__(self) -> None:
        lengths = {len(self.source), len(self.destination), len(self.lane), len(self.block)}
        if len(lengths) != 1:
            raise ScheduleError(f"a step's arrays have lengths {sorted(lengths)}, expected one length")
        for values in (self.source, self.destination, self.lane, self.block):
            values.flags.writeable = False

    @classmethod
    def of(cls, transfers: Iterable[tuple[int, int, int, int]]) -> Step:
        """A step from (source, destination, lane, block) rows."""
        rows = np.array(list(transfers), dtype=np.int64).reshape(-1, 4)
        return cls(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3])

    def __len__(self) -> int:
        return len(self.source)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """The transfers as (source, destination, lane, block) rows."""
        columns = (self.source.tolist(), self.destination.tolist(), self.lane.tolist(), self.block.tolist())
        return list(zip(*columns, strict=True))

    def __str__(self) -> str:
        return "\n".join(f"{s}->{d} lane {lane} block {block}" for s, d, lane, block in self.rows())


@dataclass(frozen=True, eq=False)
class Schedule:
    """A proven schedule.

    Parameters
    ----------
    name : the schedule's name, as on the command line.
    world_size : number of ranks.
    lanes : number of lanes.
    block_bytes : int array (blocks,), the size of each block.
    initial : bool array (world_size, blocks), what each rank holds at the start.
    final : bool array (world_size, blocks), what each rank must hold at the end.
    steps : the steps, lazily; any sequence of `Step`.

    Attributes
    ----------
    transfers : how many transfers there are in all.
    peak_blocks : the largest number of blocks that a rank holds at any time.
    """

    name: str
    world_size: int
    lanes: int
    block_bytes: IntArray
    initial: BoolArray
    final: BoolArray
    steps: Sequence[Step]
    transfers: int = field(init=False)
    peak_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps) if isinstance(self.steps, list) else self.steps)
        for values in (self.block_bytes, self.initial, self.final):
            values.flags.writeable = False
        proof = _Replay(self)
        object.__setattr__(self, "transfers", proof.run())
        object.__setattr__(self, "peak_blocks", int(proof.held.sum(axis=1).max()))

    def bytes_sent(self) -> npt.NDArray[np.int64]:
        """The ledger: bytes that each rank sends on each lane at each step, as an array (steps, world_size, lanes)."""
        ledger = np.zeros((len(self.steps), self.world_size, self.lanes), dtype=np.int64)
        for index, step in enumerate(self.steps):
            np.add.at(ledger[index], (step.source, step.lane), self.block_bytes[step.block])
        return ledger

    def check_routes(self, topology: Topology) -> None:
        """Raise `ScheduleError` unless the topology has these ranks and a route for every transfer."""
        if topology.world_size != self.world_size:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.world_size} ranks, {topology.name} has {topology.world_size}"
            )
        linked = topology.linked_pairs
        if linked.sum() == self.world_size * (self.world_size - 1):
            return
        for index, step in enumerate(self.steps):
            missing = ~linked[step.source, step.destination]
            if missing.any():
                at = int(missing.argmax())
                raise ScheduleError(
                    f"step {index}: rank {step.source[at]} sends to rank {step.destination[at]}, "
                    f"but {topology.name} has no such link"
                )


class _Replay:
    """Replays a schedule symbolically: who holds what, step by step."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.blocks = len(schedule.block_bytes)
        shape = (schedule.world_size, self.blocks)
        if schedule.initial.shape != shape or schedule.final.shape != shape:
            raise ScheduleError(f"schedule {schedule.name!r}: initial and final must have the shape {shape}")
        if self.blocks and schedule.block_bytes.min() < 1:
            block = int(schedule.block_bytes.argmin())
            raise ScheduleError(f"schedule {schedule.name!r}: block {block} has no bytes")
        self.held = schedule.initial.copy()

    def run(self) -> int:
        """Replay every step; returns the number of transfers."""
        count = 0
        expected = int(self.held.sum())
        for index, step in enumerate(self.schedule.steps):
            self._check_range(index, step)
            self._check_held_by_source(index, step)
            self._deliver(index, step)
            count += len(step)
        if int(self.held.sum()) != expected + count:
            self._name_doubled_within_step()
        self._check_final()
        return count

    def _check_range(self, index: int, step: Step) -> None:
        n = self.schedule.world_size
        limits = ((step.source, n), (step.destination, n), (step.lane, self.schedule.lanes), (step.block, self.blocks))
        for values, limit in limits:
            if len(values) and (values.min() < 0 or values.max() >= limit):
                at = int(((values < 0) | (values >= limit)).argmax())
                raise ScheduleError(f"step {index}: {_say(step, at)}: there are {n} ranks, "
                                    f"{self.schedule.lanes} lanes and {self.blocks} blocks")  # fmt: skip
        to_itself = step.source == step.destination
        if to_itself.any():
            raise ScheduleError(f"step {index}: {_say(step, int(to_itself.argmax()))}: a rank sends to itself")

    def _check_held_by_source(self, index: int, step: Step) -> None:
        missing = ~self.held[step.source, step.block]
        if missing.any():
            at = int(missing.argmax())
            raise ScheduleError(
                f"step {index}: {_say(step, at)}: "
                f"rank {step.source[at]} does not hold block {step.block[at]} when the step begins"
            )

    def _deliver(self, index: int, step: Step) -> None:
        present = self.held[step.destination, step.block]
        if present.any():
            at = int(present.argmax())
            raise ScheduleError(
                f"step {index}: {_say(step, at)}: rank {step.destination[at]} already holds block {step.block[at]}"
            )
        self.held[step.destination, step.block] = True

    def _name_doubled_within_step(self) -> None:
        """Two transfers of one step brought the same block to the same rank: find and name them."""
        for index, step in enumerate(self.schedule.steps):
            key = step.destination * self.blocks + step.block
            order = np.argsort(key, kind="stable")
            doubled = np.flatnonzero(np.diff(key[order]) == 0)
            if len(doubled):
                at = int(order[doubled[0] + 1])
                raise ScheduleError(
                    f"step {index}: {_say(step, at)}: "
                    f"rank {step.destination[at]} gets block {step.block[at]} twice in this step"
                )

    def _check_final(self) -> None:
        wrong = np.argwhere(self.held != self.schedule.final)
        if len(wrong):
            rank, block = (int(value) for value in wrong[0])
            verb = "never received" if self.schedule.final[rank, block] else "should not have received"
            raise ScheduleError(f"after step {len(self.schedule.steps) - 1}: rank {rank} {verb} block {block}")


def _say(step: Step, at: int) -> str:
    return f"rank {step.source[at]} sends block {step.block[at]} to rank {step.destination[at]} on lane {step.lane[at]}"
