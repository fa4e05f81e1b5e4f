"""A schedule: who sends which block to whom at which step, and who computes what with it. Data, proven valid.

**Blocks** are numbered; each has a size in bytes. At the start a rank holds some blocks (`initial`), at the end
every rank must hold what the collective promises (`final`). A **step** is a set of transfers and kernel calls that may
run at the same time; they use only what the rank held when the step began. A **lane** is one of the concurrent ways
blocks take: a rank's transfers on one lane go one after the other, those on different lanes do not wait for each other.
A rank's kernel calls go one after the other. There is no barrier between steps.

**Rooms** are how long blocks stay. Without rooms a block that has arrived stays for good. With b rooms, what arrives
at step s lies in room s mod b until what arrives at step s + b takes its place: it may be sent and computed with at
steps s + 1 to s + b - 1, and the transfers of step s + b wait until it was. So b - 1 is how many steps communication
may run ahead of what is done with it, and b = 2 is double buffering. What a rank holds at the start stays.
What a rank computes of a gradient at step s lies in room s mod b too, added to what arrives of it at that step.

Steps are produced when they are asked for (a 511-ring AllGather on 512 ranks has 134 million transfers), each as
arrays. Building a `Schedule` replays all of them once, unless their form proves them; what breaks a rule raises
`ScheduleError` with step, rank and block, so a schedule that exists is valid:

- a rank sends only what it held when the step began, and never to itself;
- no block is delivered to a rank that holds it;
- a rank computes only with blocks that it held when the step began;
- the calls compute what the schedule's attention task asks for, each part once (`tasp_lab.coverage`);
- gradient blocks take along all that a rank has of them, one step behind, and all of it ends at their owners;
- blocks that are sums are complete in the end (`tasp_lab.reduction` has the rules that they follow instead);
- in the end every rank holds exactly what the collective promises; what is in rooms does not count.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, overload

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention_task import AttentionTask
from tasp_lab.calls import Call
from tasp_lab.coverage import Coverage, Leaving
from tasp_lab.errors import ScheduleError
from tasp_lab.reduction import Parts, Reduction
from tasp_lab.timeline import ATTEND, DIFFERENTIATE
from tasp_lab.topology import Topology

MOST_HOLDINGS = 2**30
"""Ranks times blocks that a proof has room for: three bytes each, about twenty with kernel calls."""


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One step: its transfers as four arrays of equal length, and its kernel calls, each rank's in their order.

    What arrives at a rank lies in its room in the order of these arrays.

    >>> print(Step.of([(0, 1, 0, 5)]))
    0->1 lane 0 block 5
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray
    calls: tuple[Call, ...] = ()

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


class Proof(NamedTuple):
    """What is known of a valid schedule: how many transfers there are, and the most blocks that a rank ever holds."""

    transfers: int
    peak_blocks: int


class LazySteps(Sequence[Step]):
    """Steps that are made when they are asked for: `__len__` and `step` are all that a schedule has to write."""

    hops_repeat: ClassVar[bool] = False
    """Whether every step has the hops of the first one, whatever it sends."""

    @abstractmethod
    def step(self, index: int) -> Step:
        """The step number `index`, which is in range."""

    def prove(self, schedule: Schedule) -> Proof | None:
        """That a schedule of these steps is valid, where their form shows it; None: a replay has to find out."""
        return None

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        return self.step(index % len(self))


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
    rooms : how many steps' arrivals a rank has room for, 2 or more; None when it keeps all (not in a backward pass).
    task : what the kernel calls must compute; None for a schedule without any.
    fused : whether all steps are one call of the communication library, as its own collectives are; else each step is.
    reduction : which transfers add up sums, where blocks are sums; such a schedule has neither rooms nor a task.

    Attributes
    ----------
    transfers : how many transfers there are in all.
    peak_blocks : the largest number of blocks that a rank holds at any time, gradients not counted.
    """

    name: str
    world_size: int
    lanes: int
    block_bytes: IntArray
    initial: BoolArray
    final: BoolArray
    steps: Sequence[Step]
    rooms: int | None = None
    task: AttentionTask | None = None
    fused: bool = False
    reduction: Reduction | None = None
    transfers: int = field(init=False)
    peak_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps) if isinstance(self.steps, list) else self.steps)
        for values in (self.block_bytes, self.initial, self.final):
            values.flags.writeable = False
        proof = self.steps.prove(self) if isinstance(self.steps, LazySteps) else None
        transfers, peak_blocks = proof or _replayed(self)
        object.__setattr__(self, "transfers", transfers)
        object.__setattr__(self, "peak_blocks", peak_blocks)

    def bytes_sent(self) -> IntArray:
        """The ledger: bytes that each rank sends on each lane at each step, as an array (steps, world_size, lanes)."""
        ledger = np.zeros((len(self.steps), self.world_size, self.lanes), dtype=np.int64)
        for index, step in enumerate(self.steps):
            np.add.at(ledger[index], (step.source, step.lane), self.block_bytes[step.block])
        return ledger

    @cached_property
    def digest(self) -> str:
        """A short text that two schedules share only if they are the same, step by step."""
        head = (self.name, self.lanes, self.rooms, self.fused, self.task and self.task.workload)
        found = hashlib.sha256(repr(head).encode())
        found.update(self.block_bytes.tobytes())
        for row in (*self.initial, *self.final):
            found.update(row.tobytes())
        if self.reduction is not None:
            found.update(self.reduction.copied_from.tobytes())
        for step in self.steps:
            found.update(repr((len(step), len(step.calls))).encode())
            for values in (step.source, step.destination, step.lane, step.block):
                found.update(values.tobytes())
            for call in step.calls:
                found.update(repr((call.rank, call.queries.tolist(), call.keys.tolist(), call.low, call.high)).encode())
        return found.hexdigest()[:16]

    def flops(self) -> IntArray:
        """What each rank computes at each step, in FLOPs, as an array (steps, world_size)."""
        ledger = np.zeros((len(self.steps), self.world_size), dtype=np.int64)
        for index, step in enumerate(self.steps):
            for call in step.calls:
                ledger[index, call.rank] += self.call_flops(call)
        return ledger

    @property
    def call_kind(self) -> str:
        """The kind of its kernel calls in a timeline."""
        return DIFFERENTIATE if self.task is not None and self.task.is_backward else ATTEND

    def call_flops(self, call: Call) -> int:
        """What a kernel call computes, in FLOPs."""
        assert self.task is not None, "a schedule with calls has a task"
        return self.task.flops(call)

    def check_routes(self, topology: Topology) -> None:
        """Raise `ScheduleError` unless the topology has these ranks and a route for every transfer."""
        if topology.world_size != self.world_size:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.world_size} ranks, {topology.name} has {topology.world_size}"
            )
        if topology.is_complete:
            return
        repeat = isinstance(self.steps, LazySteps) and self.steps.hops_repeat
        for index, step in enumerate(self.steps[:1] if repeat else self.steps):
            missing = ~topology.have_routes(step.source, step.destination)
            if missing.any():
                at = int(missing.argmax())
                raise ScheduleError(
                    f"step {index}: rank {step.source[at]} sends to rank {step.destination[at]}, "
                    f"but {topology.name} has no such link"
                )


class _Data(NamedTuple):
    """The transfers of a step that copy blocks; those of gradients, which add up, are another matter."""

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray

    @classmethod
    def of(cls, step: Step, first_gradient: int) -> _Data:
        whole = cls(step.source, step.destination, step.lane, step.block)
        copies = step.block < first_gradient
        return whole if copies.all() else cls(*(values[copies] for values in whole))

    @property
    def size(self) -> int:
        return len(self.block)


def _replayed(schedule: Schedule) -> Proof:
    replay = _Replay(schedule)
    return Proof(replay.run(), replay.peak)


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
        if schedule.rooms is not None and schedule.rooms < 2:
            raise ScheduleError(f"schedule {schedule.name!r}: {schedule.rooms} rooms, expected 2 or more")
        task = schedule.task
        if schedule.rooms is None and task is not None and task.is_backward:
            raise ScheduleError(f"schedule {schedule.name!r}: a backward pass without rooms, expected 2 or more")
        if task is not None and not np.array_equal(schedule.block_bytes, task.block_bytes):
            raise ScheduleError(f"schedule {schedule.name!r}: block_bytes are not those of its task")
        if task is not None:
            self._check_owned(task)
        if schedule.reduction is not None and (schedule.rooms is not None or task is not None):
            raise ScheduleError(f"schedule {schedule.name!r}: a reduction with rooms or a task, expected neither")
        if schedule.world_size * self.blocks > MOST_HOLDINGS:
            raise ScheduleError(
                f"schedule {schedule.name!r}: {schedule.world_size} ranks and {self.blocks} blocks are too many to "
                f"replay, expected at most {MOST_HOLDINGS} pairs of them"
            )
        self.held = schedule.initial.copy()
        self.peak = 0
        self._in_rooms: deque[_Data] = deque()
        self._coverage = Coverage(task) if task is not None else None
        self._first_gradient = self.blocks if task is None else task.first_gradient

    def _check_owned(self, task: AttentionTask) -> None:
        """A backward pass may start with copies of others' blocks, which a forward pass has left there."""
        schedule, owned = self.schedule, task.owned
        copied, missing = schedule.initial & ~owned, owned & ~schedule.initial
        allowed = task.travelling if task.is_backward else task.travelling[:0]
        if missing.any() or np.delete(copied, allowed, axis=1).any():
            raise ScheduleError(f"schedule {schedule.name!r}: initial is not what its task says who owns")

    def run(self) -> int:
        """Replay every step; returns the number of transfers."""
        if self.schedule.reduction is not None:
            return self._reduce(self.schedule.reduction)
        count = 0
        holdings = int(self.held.sum())
        for index, step in enumerate(self.schedule.steps):
            if len(self._in_rooms) == self.schedule.rooms:
                holdings -= self._empty_oldest_room()
            self._check_range(index, step)
            data = _Data.of(step, self._first_gradient)
            self._check_held_by_source(index, data)
            leaving = self._leaving(index, step)
            self._check_calls(index, step)
            self._deliver(index, data)
            if self._coverage is not None and leaving is not None:
                self._coverage.move(leaving)
            count += len(step)
            holdings += data.size
            if self.schedule.rooms is not None:
                self._in_rooms.append(data)
                self._count(holdings)
        self._count(holdings)
        while self._in_rooms:
            self._empty_oldest_room()
        self._check_final()
        if self._coverage is not None:
            self._coverage.finish()
        return count

    def _reduce(self, reduction: Reduction) -> int:
        """Replay every step of a reduction; returns the number of transfers."""
        parts, count = Parts(reduction, self.schedule.initial), 0
        self.peak = int(parts.held.max())
        for index, step in enumerate(self.schedule.steps):
            self._check_range(index, step)
            self._check_calls(index, step)
            parts.move(index, step)
            count += len(step)
            self.peak = max(self.peak, int(parts.held.max()))
        parts.finish(self.schedule.final)
        return count

    def _leaving(self, index: int, step: Step) -> Leaving | None:
        """What of gradients leaves at a step: parts that were there when it began."""
        if self._coverage is None or self._first_gradient == self.blocks:
            return None
        gradients = step.block >= self._first_gradient
        return self._coverage.leaving(index, step.source[gradients], step.destination[gradients], step.block[gradients])

    def _empty_oldest_room(self) -> int:
        """What arrived so many steps ago as there are rooms is overwritten; returns how many blocks that is."""
        step = self._in_rooms.popleft()
        self.held[step.destination, step.block] = False
        return step.size

    def _count(self, holdings: int) -> None:
        """Check that so many blocks are held in all: a block that came twice in one step counts once."""
        held = self.held.sum(axis=1)
        if int(held.sum()) != holdings:
            self._name_doubled_within_step()
        self.peak = max(self.peak, int(held.max()))

    def _check_calls(self, index: int, step: Step) -> None:
        for call in step.calls:
            blocks = np.concatenate([call.queries, call.keys])
            if self._coverage is None:
                raise ScheduleError(f"step {index}: rank {call.rank} computes, but there is no task to compute")
            if not 0 <= call.rank < self.schedule.world_size or not self._are_blocks(call):
                raise ScheduleError(f"step {index}: rank {call.rank} computes with blocks {blocks.tolist()}, expected "
                                    "queries and keys of the task, one or more of each")  # fmt: skip
            missing = ~self.held[call.rank, blocks]
            if missing.any():
                raise ScheduleError(
                    f"step {index}: rank {call.rank} computes with block {blocks[missing.argmax()]}, "
                    "which it does not hold when the step begins"
                )
            self._coverage.add(index, call)

    def _are_blocks(self, call: Call) -> bool:
        """Whether a call names query blocks and key blocks of the task."""
        assert self.schedule.task is not None
        first_query = self.schedule.task.first_query
        return (
            len(call.queries) > 0
            and len(call.keys) > 0
            and bool(((call.queries >= first_query) & (call.queries < self._first_gradient)).all())
            and bool(((call.keys >= 0) & (call.keys < first_query)).all())
        )

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

    def _check_held_by_source(self, index: int, step: _Data) -> None:
        missing = ~self.held[step.source, step.block]
        if missing.any():
            at = int(missing.argmax())
            raise ScheduleError(
                f"step {index}: {_say(step, at)}: "
                f"rank {step.source[at]} does not hold block {step.block[at]} when the step begins"
            )

    def _deliver(self, index: int, step: _Data) -> None:
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


def _say(step: Step | _Data, at: int) -> str:
    return f"rank {step.source[at]} sends block {step.block[at]} to rank {step.destination[at]} on lane {step.lane[at]}"
