"""Per-rank buffer layout, block lifetimes and reference counts.

Each rank has one memory. Without buffers every block has a fixed place in it, in the order of block numbers. With
buffers, the memory holds in this order:

1. the *resident* blocks, the circulating blocks held at the start: the rank's own in the order of their numbers, then
   copies of others in the order in which the first step reads them;
2. in a backward pass, the gradients of the rank's own blocks;
3. the buffers, each sized for the largest step: the step's arrivals in their order, then the gradients to which the
   rank contributes first.

In a reduction (`tasp_lab.schedule.reduction`) every block has a fixed place. Each contribution arrives at its own
staging offset behind all blocks; contributions are added when the last of them has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.reduction import Reduction
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.workload.kernel_calls import Call

INITIAL = -1
"""In place of an arrival step: the rank holds the block from the start."""


class Place(NamedTuple):
    """The offset of a block in a rank's memory, in bytes, and its arrival step, or `INITIAL`."""

    block: int
    offset: int
    since: int

    @property
    def key(self) -> tuple[int, int]:
        """Identifies one lifetime of a block at this rank: the block and its arrival step."""
        return self.block, self.since


class Row(NamedTuple):
    """One message that a rank sends or receives.

    `offset` is the block's offset in the rank's memory, in bytes. `since` is the step at which the block arrives there
    (for a locally computed gradient, the step that computed it), or `INITIAL`.
    """

    step: int
    lane: int
    peer: int
    block: int
    offset: int
    since: int


class CallRow(NamedTuple):
    """One kernel call of a rank.

    `reads` are its circulating blocks as (block, since) pairs, contiguous in the rank's memory: `size_bytes` from
    `offset` on. `adds` are the places of their gradients, in the same order; the call adds one part to each.
    """

    step: int
    call: Call
    reads: tuple[tuple[int, int], ...]
    offset: int
    size_bytes: int
    flops: int
    adds: tuple[Place, ...] = ()

    @property
    def away(self) -> tuple[Place, ...]:
        """The places in `adds` of gradients that the rank does not own."""
        return tuple(place for place in self.adds if place.since != INITIAL)

    @property
    def since(self) -> set[int]:
        """The steps whose buffers the call uses."""
        return {since for _, since in self.reads if since != INITIAL} | {self.step for _ in self.away}


class Sum(NamedTuple):
    """A sum accumulated at one place in memory.

    `arrives` is whether a partial sum arrives at `offset` itself, `computed` the number of parts computed here,
    and `staging_offsets` the offsets of the contributions that arrive elsewhere and are added.
    """

    block: int
    since: int
    offset: int
    arrives: bool
    computed: int
    staging_offsets: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        return self.arrives + self.computed + len(self.staging_offsets)


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a schedule, in the order of steps, and of lanes within a step.

    `resident` maps the blocks that its memory of `memory_bytes` holds at the start, `kept` those that it holds at the
    end, `gradients` its own gradients, to their offsets in bytes. `staging_offsets` maps the (block, since) of a sum
    to the offsets of the contributions added to it.
    """

    rank: int
    resident: Mapping[int, int]
    kept: Mapping[int, int]
    gradients: Mapping[int, int]
    sends: tuple[Row, ...]
    receives: tuple[Row, ...]
    calls: tuple[CallRow, ...]
    memory_bytes: int
    first_gradient: int
    staging_offsets: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def pending_uses(self) -> Counter[int]:
        """Per step, how many arrivals, sends and calls must finish before the buffer of that step is free."""
        arrivals = [row.since for row in self.receives]
        uses = [row.since for row in self.sends] + [since for row in self.calls for since in row.since]
        return Counter(since for since in arrivals + uses if since != INITIAL)

    @cached_property
    def sums(self) -> Mapping[tuple[int, int], Sum]:
        """The sums accumulated at this rank, by (block, since)."""
        arriving = {(row.block, row.since): row.offset for row in self.receives if row.block >= self.first_gradient}
        computed = [place for row in self.calls for place in row.away]
        offsets = arriving | {place.key: place.offset for place in computed}
        parts = Counter(place.key for place in computed)
        gradients = {key: Sum(*key, offset, key in arriving, parts[key]) for key, offset in offsets.items()}
        blocks = {
            key: Sum(*key, self.kept[key[0]], False, 0, staging_offsets)
            for key, staging_offsets in self.staging_offsets.items()
        }
        return gradients | blocks


def rank_part(schedule: Schedule, rank: int) -> RankPart:
    """One rank's part of a schedule. Raises `ScheduleError` if a call reads blocks that are not contiguous."""
    memory = _Memory(schedule, rank)
    resident = {block: memory.place[block].offset for block in resident_blocks(schedule, rank)}
    sends: list[Row] = []
    receives: list[Row] = []
    calls: list[CallRow] = []
    for index, step in enumerate(schedule.steps):
        sends += _by_lane(
            Row(index, lane, peer, *memory.place[block])
            for peer, lane, block in _columns(step, step.source == rank, step.destination)
        )
        own_calls = [call for call in step.calls if call.rank == rank]
        rows = [memory.call_row(index, call) for call in own_calls]
        arrivals = _columns(step, step.destination == rank, step.source)
        begun = _gradients_begun(schedule, own_calls, [block for _, _, block in arrivals])
        places = memory.take_in(index, [*(block for _, _, block in arrivals), *begun])
        calls += [row._replace(adds=memory.gradients_of(row.call)) for row in rows]
        receives += _by_lane(Row(index, lane, peer, *places[block]) for peer, lane, block in arrivals)
    kept = resident if schedule.buffers is not None else resident | {row.block: row.offset for row in receives}
    own = {place.block: place.offset for place in memory.own_gradients}
    first_gradient = len(schedule.block_bytes) if schedule.task is None else schedule.task.first_gradient
    size = memory.size_bytes
    part = RankPart(rank, resident, kept, own, tuple(sends), tuple(receives), tuple(calls), size, first_gradient)
    return part if schedule.reduction is None else _with_staging(part, schedule.reduction, schedule.block_bytes)


def _with_staging(part: RankPart, reduction: Reduction, block_bytes: IntArray) -> RankPart:
    """The same part with each contribution at a staging offset; all those of a sum take the step of the last one."""
    last = {row.block: row.step for row in part.receives if reduction.adds(row.step, row.block)}
    staging_offsets: dict[tuple[int, int], tuple[int, ...]] = {}
    receives: list[Row] = []
    end = part.memory_bytes
    for row in part.receives:
        if reduction.adds(row.step, row.block):
            row = row._replace(offset=end, since=last[row.block])
            key = row.block, row.since
            staging_offsets[key] = (*staging_offsets.get(key, ()), end)
            end += int(block_bytes[row.block])
        receives.append(row)
    return replace(part, receives=tuple(receives), memory_bytes=end, staging_offsets=staging_offsets)


def resident_blocks(schedule: Schedule, rank: int) -> list[int]:
    """The blocks in a rank's memory at the start, in layout order; the stationary side is excluded."""
    task, held = schedule.task, schedule.initial[rank]
    if task is None:
        found: list[int] = np.flatnonzero(held).tolist()
        return found
    circulating = task.circulating[held[task.circulating]].tolist()
    own = [block for block in circulating if task.owner[block] == rank]
    copies = [block for block in circulating if task.owner[block] != rank]
    if copies:
        calls = (call for call in schedule.steps[0].calls if call.rank == rank)
        used = [block for call in calls for block in task.sides(call)[0].tolist() if task.owner[block] != rank]
        copies = list(dict.fromkeys(used + copies))
    return own + copies


def _own_gradients(schedule: Schedule, rank: int) -> list[int]:
    """The gradient blocks that end at a rank."""
    task = schedule.task
    if task is None or not task.is_backward:
        return []
    found: list[int] = task.gradient_blocks(task.circulating[task.owner[task.circulating] == rank]).tolist()
    return found


def _gradients_begun(schedule: Schedule, calls: Iterable[Call], arriving: Sequence[int]) -> list[int]:
    """Gradients owned by other ranks that the calls of one step add to and that do not arrive at that step."""
    task = schedule.task
    if task is None or not task.is_backward:
        return []
    added = dict.fromkeys(block for call in calls for block in task.gradients_away(call))
    coming = set(arriving)
    return [block for block in added if block not in coming]


def memory_bytes(schedule: Schedule) -> IntArray:
    """The size of each rank's memory in bytes, as an int array (world_size,)."""
    ranks = range(schedule.world_size)
    if schedule.buffers is None:
        return np.full(schedule.world_size, schedule.block_bytes.sum()) + _staging_bytes(schedule)
    layout = [resident_blocks(schedule, rank) + _own_gradients(schedule, rank) for rank in ranks]
    resident = np.array([schedule.block_bytes[blocks].sum() for blocks in layout], dtype=np.int64)
    return resident + schedule.buffers * _buffer_bytes(schedule)


def _staging_bytes(schedule: Schedule) -> IntArray:
    """The bytes of all contributions that each rank receives, as an int array (world_size,)."""
    found = np.zeros(schedule.world_size, dtype=np.int64)
    for index, step in enumerate(schedule.steps if schedule.reduction is not None else ()):
        assert schedule.reduction is not None
        adds = schedule.reduction.adds(index, step.block)
        np.add.at(found, step.destination[adds], schedule.block_bytes[step.block[adds]])
    return found


class _Memory:
    """One rank's memory as its steps are processed: the current place of each block."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule = schedule
        self._sizes: list[int] = schedule.block_bytes.tolist()
        self._buffers = schedule.buffers
        if self._buffers is None:
            starts = np.cumsum(schedule.block_bytes) - schedule.block_bytes
            self.place = {block: Place(block, start, INITIAL) for block, start in enumerate(starts.tolist())}
            self.own_gradients: list[Place] = []
            self.size_bytes = sum(self._sizes)
            return
        blocks = resident_blocks(schedule, rank) + _own_gradients(schedule, rank)
        self.place = self._contiguous(blocks, 0, INITIAL)
        self.own_gradients = [self.place[block] for block in _own_gradients(schedule, rank)]
        self._resident_bytes = sum(self._sizes[block] for block in blocks)
        self._buffer_bytes = int(_buffer_bytes(schedule)[rank])
        self.size_bytes = self._resident_bytes + self._buffers * self._buffer_bytes

    def take_in(self, step: int, blocks: list[int]) -> dict[int, Place]:
        """Place blocks into the buffer of a step, in order; returns their places. Own gradients keep theirs."""
        if self._buffers is None:
            places = {block: Place(block, self.place[block].offset, step) for block in blocks}
        else:
            places = self._contiguous(blocks, self._resident_bytes + step % self._buffers * self._buffer_bytes, step)
        self.place |= places | {place.block: place for place in self.own_gradients}
        return places

    def _contiguous(self, blocks: list[int], offset: int, since: int) -> dict[int, Place]:
        """Contiguous places from `offset` on."""
        places = {}
        for block in blocks:
            places[block] = Place(block, offset, since)
            offset += self._sizes[block]
        return places

    def call_row(self, step: int, call: Call) -> CallRow:
        """The row of a call, without its gradients."""
        assert self._schedule.task is not None, "a schedule with calls has a task"
        blocks = self._schedule.task.sides(call)[0].tolist()
        first = end = self.place[blocks[0]].offset
        for block in blocks:
            if self.place[block].offset != end:
                raise ScheduleError(f"step {step}: rank {call.rank} computes with block {block}, which is not "
                                    "contiguous with the other blocks of the call")  # fmt: skip
            end += self._sizes[block]
        held = tuple(self.place[block].key for block in blocks)
        return CallRow(step, call, held, first, end - first, self._schedule.call_flops(call))

    def gradients_of(self, call: Call) -> tuple[Place, ...]:
        """The places of the gradients that a call adds to."""
        task = self._schedule.task
        if task is None or not task.is_backward:
            return ()
        return tuple(self.place[block] for block in task.gradient_blocks(task.sides(call)[0]).tolist())


@lru_cache(maxsize=8)
def _buffer_bytes(schedule: Schedule) -> IntArray:
    """The largest number of bytes that one step places into a buffer of each rank."""
    largest = np.zeros(schedule.world_size, dtype=np.int64)
    for step in schedule.steps:
        arriving = np.zeros_like(largest)
        np.add.at(arriving, step.destination, schedule.block_bytes[step.block])
        for rank, calls in _calls_by_rank(schedule, step).items():
            begun = _gradients_begun(schedule, calls, step.block[step.destination == rank].tolist())
            arriving[rank] += schedule.block_bytes[begun].sum()
        largest = np.maximum(largest, arriving)
    return largest


def _calls_by_rank(schedule: Schedule, step: Step) -> Mapping[int, list[Call]]:
    """The calls of a step of a backward pass by rank; empty for other schedules."""
    found: dict[int, list[Call]] = {}
    if schedule.task is not None and schedule.task.is_backward:
        for call in step.calls:
            found.setdefault(call.rank, []).append(call)
    return found


def _columns(step: Step, mine: BoolArray, peers: IntArray) -> list[tuple[int, int, int]]:
    """(peer, lane, block) of the selected transfers of a step, in their order."""
    return list(zip(peers[mine].tolist(), step.lane[mine].tolist(), step.block[mine].tolist(), strict=True))


def _by_lane(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.lane)
