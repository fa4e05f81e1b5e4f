"""What waits for what: the one derivation that both engines and the executor share.

The *operations* of a schedule are its transfers, its kernel calls and the releases of buffers, numbered in this order,
each in the order of steps. A **part** is an arrival of a block at a rank, or what a call adds there. A reader (a
transfer at its source, a call) waits for the parts that come to its copy at earlier steps, and for nothing later:

- for a resident copy, all parts of earlier steps;
- for a copy in a buffer, those of the step at which it came: the most recent one with a part of the block.

A buffer holds what comes to a rank's pool at one step. The next step that fills the same buffer waits until all of it
has arrived and all transfers and calls that read it have ended. A sum that arrives at a resident copy lands in the
buffer of its step, too, and is added from there when those that read the copy at this step or before have ended.

A resident sum changes when a part joins it, so a part waits for those that read what was there before: a call that adds
to it waits until transfers of earlier steps have left; what arrives lands beside it, and later readers wait for both.

Transfers of a lane follow one another when the previous one has been sent; so do the calls of a compute lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, distinct, positions, stable_order
from tasp_lab.schedule.calls import BlockLists, Calls, Task, ranges
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import OncePerSchedule, Schedule
from tasp_lab.workload.kernel_shapes import KernelName, KernelShape, ShapeRows, distinct_shapes

SENT, ARRIVED, HANDED_OUT = 0, 1, 2
"""The event that an edge waits for: the last byte has left, or has arrived; for calls and releases both coincide. Or a
call leaves multiprocessors to other kernels (`tasp_lab.machines.host`; no edge of a schedule)."""

LANE, BLOCK, BUFFER, HOST = 0, 1, 2, 3
"""The cause of an edge: the previous operation on the lane, a block, memory that is in use, or a host that has not
issued it yet (`tasp_lab.machines.host`; no edge of a schedule)."""

RESIDENT = -1
"""In place of an arrival step: the copy is resident."""


class Transfers(NamedTuple):
    """All transfers in the order of steps, arrays (transfers,); `gives` as in `Step`."""

    step: IntArray
    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray
    gives: BoolArray

    def select(self, chosen: IntArray) -> Transfers:
        """The transfers with these numbers, in this order."""
        step, source, destination, lane, block = (column[chosen] for column in self[:5])
        return Transfers(step, source, destination, lane, block, self.gives[chosen])


class CallTable(NamedTuple):
    """All kernel calls in the order of steps, arrays (calls,). `block` names a call in events: see `Dependencies`.

    `kernel` are indices in `kernels`, and `shape` in `shapes`, which are distinct. `reads` and `adds` list the blocks
    that each call reads and adds to.
    """

    step: IntArray
    rank: IntArray
    lane: IntArray
    kernel: IntArray
    flops: IntArray
    block: IntArray
    reads: BlockLists
    adds: BlockLists
    kernels: tuple[str, ...]
    shape: IntArray
    shapes: tuple[KernelShape, ...]


class Buffers(NamedTuple):
    """The buffers that are filled, arrays (releases,): what comes to `pool` of `rank` at `step`."""

    rank: IntArray
    pool: IntArray
    step: IntArray


class Edges(NamedTuple):
    """Int arrays (edges,): operation `after` waits for `event` of operation `before`. May be of small types."""

    before: IntArray
    after: IntArray
    event: IntArray
    cause: IntArray

    @classmethod
    def of(cls, before: IntArray, after: IntArray, event: int, cause: int) -> Edges:
        return cls(before, after, *(np.full(len(before), value, dtype="i1") for value in (event, cause)))

    @classmethod
    def joined(cls, parts: Sequence[Edges]) -> Edges:
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Uses(NamedTuple):
    """Operations that deliver or read a block at a rank at a step. Arrays of equal length.

    `since` is the step at which the copy came into its buffer, or `RESIDENT`. `first` is the first part that comes to
    the copy at the same step as the part itself, or as the last parts before it is read: an index in the parts; -1 if
    there are none.
    """

    operation: IntArray
    rank: IntArray
    block: IntArray
    step: IntArray
    since: IntArray
    first: IntArray

    def select(self, chosen: IntArray) -> Uses:
        """The uses with these numbers, in this order."""
        return Uses(*(column[chosen] for column in self))


@dataclass(frozen=True, eq=False)
class Accesses:
    """The transfers and calls of a schedule, and the copies that they change and read.

    `parts` are all deliveries, transfers before calls, `reads` all readings.
    """

    transfers: Transfers
    calls: CallTable
    parts: Uses
    reads: Uses

    @property
    def first_call(self) -> int:
        return len(self.transfers.step)


@dataclass(frozen=True, eq=False)
class Dependencies(Accesses):
    """The operations of a schedule and their edges.

    The `block` of a call is the first one of its first operand that circulates, that is of a kind with buffers; else
    the first one of its first operand.
    """

    buffers: Buffers
    edges: Edges

    @property
    def first_buffer(self) -> int:
        return self.first_call + len(self.calls.step)

    def __len__(self) -> int:
        return self.first_buffer + len(self.buffers.step)


def steps_of(schedule: Schedule, *ranks: int) -> list[Step]:
    """What some ranks have to do with each step: their sends, receives and calls, in their order."""
    chosen = np.zeros(schedule.world_size, dtype=bool)
    chosen[list(ranks)] = True
    return [_step_of(step, chosen) for step in schedule.steps]


def _step_of(step: Step, ranks: BoolArray) -> Step:
    mine = np.flatnonzero(ranks[step.source] | ranks[step.destination])
    of_ranks = ((calls, np.flatnonzero(ranks[calls.rank])) for calls in step.calls)
    calls = tuple(calls.select(chosen) for calls, chosen in of_ranks if len(chosen))
    return Step(step.source[mine], step.destination[mine], step.lane[mine], step.block[mine], step.gives[mine], calls)


def dependencies(schedule: Schedule, rank: int | None = None, steps: Sequence[Step] | None = None) -> Dependencies:
    """The operations of a schedule, and what waits for what.

    For one `rank`: only the operations that it takes part in, and what it waits for itself, so that its sends wait for
    what its copies need, and its receives for its buffers. `steps` are then `steps_of` it, if they are known.
    """
    if rank is not None and steps is None:
        steps = steps_of(schedule, rank)
    transfers, calls = operations_of(schedule, schedule.steps if steps is None else steps)
    copies = Copies(schedule, transfers, calls, None if rank is None else [rank])
    sent = np.arange(len(transfers.step)) if rank is None else np.flatnonzero(transfers.source == rank)
    on_lanes = in_order(sent, (transfers.source * schedule.lanes + transfers.lane)[sent])
    operations = np.arange(len(transfers.step) + len(calls.step) + len(copies.buffers.step))
    edges = copies.edges_between(operations, on_lanes)
    return Dependencies(transfers, calls, copies.parts, copies.reads, copies.buffers, edges)


def accesses(schedule: Schedule, ranks: Sequence[int], steps: Sequence[Step]) -> Accesses:
    """What some ranks change and read; `steps` are `steps_of` them."""
    transfers, calls = operations_of(schedule, steps)
    copies = Copies(schedule, transfers, calls, ranks)
    return Accesses(transfers, calls, copies.parts, copies.reads)


def _uses(operation: IntArray, rank: IntArray, block: IntArray, step: IntArray, ranks: Sequence[int] | None) -> Uses:
    """Deliveries or readings at some ranks, or at all; `since` and `first` are filled in by `Copies`."""
    columns = operation, rank, block, step
    if ranks is not None:
        mine = np.flatnonzero(np.isin(rank, ranks))
        operation, rank, block, step = (column[mine] for column in columns)
    return Uses(operation, rank, block, step, step, step)


def operations_of(schedule: Schedule, steps: Sequence[Step]) -> tuple[Transfers, CallTable]:
    """All transfers and calls, in the order of steps."""
    nothing = np.zeros(0, dtype=np.int64)
    transfers = [Transfers(nothing, nothing, nothing, nothing, nothing, np.zeros(0, dtype=bool))]
    calls: list[tuple[int, Calls]] = []
    for index, step in enumerate(steps):
        number = np.full(len(step), index)
        transfers.append(Transfers(number, step.source, step.destination, step.lane, step.block, step.gives))
        calls += ((index, group) for group in step.calls if len(group))
    columns = (np.concatenate(column) for column in zip(*transfers, strict=True))
    table = _call_table(schedule, calls)
    if steps is schedule.steps:
        keep_shapes(schedule, [(table.rank, table.shape)], table.shapes)
    return Transfers._make(columns), table


def _call_table(schedule: Schedule, calls: Sequence[tuple[int, Calls]]) -> CallTable:
    task, blocks = schedule.task, len(schedule.blocks)
    kernels = tuple(dict.fromkeys(group.kernel for _, group in calls))
    joined = _joined([group for _, group in calls])
    shapes = call_shapes(task, joined)
    nothing = np.zeros(0, dtype=np.int64)
    rows: list[tuple[IntArray, ...]] = [(nothing,) * 4]
    reads, adds = [(nothing, nothing)], [(nothing, nothing)]
    for group in joined:
        assert task is not None, "a schedule with calls has a task"
        count = len(group)
        constants = (np.full(count, value) for value in (group.lane, kernels.index(group.kernel)))
        rows.append((*constants, group.rank, _named_block(schedule, group)))
        reads.append(_interleaved(group.operands))
        for _, batch in group.batches():
            effects = task.effects(batch)
            added = distinct(effects.call * blocks + effects.block)
            adds.append((np.bincount(added // blocks, minlength=len(batch)), added % blocks))
    lane, kernel, rank, block = (np.concatenate(column) for column in zip(*rows, strict=True))
    step = np.repeat(np.array([index for index, _ in calls], dtype=np.int64), [len(group) for _, group in calls])
    read, added_to = (
        BlockLists.of_sizes(*(np.concatenate(column) for column in zip(*lists, strict=True))) for lists in (reads, adds)
    )
    return CallTable(
        step, rank, lane, kernel, shapes.flops, block, read, added_to, kernels, shapes.number, shapes.distinct
    )


def _joined(calls: Sequence[Calls]) -> list[Calls]:
    """The same calls in the same order, those of several steps as one group where kernel, lane and columns are alike.

    Steps have few calls, and NumPy takes about as long for those of a hundred.
    """
    alike = groupby(calls, key=lambda group: (group.kernel, group.lane, len(group.operands), group.params.shape[1]))
    return [Calls.joined(list(groups)) for _, groups in alike]


def _interleaved(operands: Sequence[BlockLists]) -> tuple[IntArray, IntArray]:
    """The sizes of the lists of all operands of each call, and their blocks, operand by operand."""
    order = np.argsort(np.concatenate([operand.owner for operand in operands]), kind="stable")
    sizes: IntArray = np.sum([operand.sizes for operand in operands], axis=0)
    return sizes, np.concatenate([operand.block for operand in operands])[order]


def _named_block(schedule: Schedule, calls: Calls) -> IntArray:
    firsts = [operand.first for operand in calls.operands]
    named = firsts[0]
    for first in reversed(firsts):
        named = np.where(schedule.blocks.buffers[first] > 0, first, named)
    return named


def in_order(operations: IntArray, lane: IntArray) -> Edges:
    """Each operation waits until the previous one on its lane has been sent."""
    order = stable_order(lane)
    follows = np.flatnonzero(np.diff(lane[order]) == 0)
    return Edges.of(operations[order[follows]], operations[order[follows + 1]], SENT, LANE)


def compute_in_order(calls: CallTable, first_call: int) -> Edges:
    """Each call, numbered from `first_call` on, waits for the previous one on its compute lane."""
    lanes = calls.rank * (int(calls.lane.max(initial=0)) + 1) + calls.lane
    return in_order(first_call + np.arange(len(lanes)), lanes)


_ROWS_AT_ONCE = 2**15
"""Parts and readers whose edges are derived at once: their arrays fit into a cache."""

_CAUSE_BITS = HOST.bit_length()
_CODE_BITS = HANDED_OUT.bit_length() + _CAUSE_BITS
"""Bits of the cause of an edge, and of its event and cause."""


class Copies:
    """Parts and readers of copies at some ranks, or at all, the buffers in which they lie, and their edges.

    `parts` and `reads` are in the order of operations; `buffers` are those that are filled.
    """

    # A part has the key (rank * blocks + block) * steps + step. So the parts of a copy lie side by side in the order of
    # their steps, and a binary search finds those before a step. With 2 blocks and `_steps` = 5, block 0 of rank 1 has
    # the keys 10 to 14; a reader of it at step 3 reads the parts with the keys 10 to 12, if the copy is resident, or
    # those with the largest of these keys, if it is in a buffer.

    def __init__(
        self, schedule: Schedule, transfers: Transfers, calls: CallTable, ranks: Sequence[int] | None = None
    ) -> None:
        self._schedule, self._calls, self._steps = schedule, calls, len(schedule.steps) + 1
        self._first_call, self._first_buffer = len(transfers.step), len(transfers.step) + len(calls.step)
        moves = np.arange(self._first_call)
        parts, reads = (
            _uses(
                np.concatenate([moves, self._first_call + lists.owner]),
                np.concatenate([end, calls.rank[lists.owner]]),
                np.concatenate([transfers.block, lists.block]),
                np.concatenate([transfers.step, calls.step[lists.owner]]),
                ranks,
            )
            for end, lists in ((transfers.destination, calls.adds), (transfers.source, calls.reads))
        )
        self._is_sum = schedule.blocks.are_sums
        part_stays = schedule.is_resident(parts.rank, parts.block)
        read_stays = schedule.is_resident(reads.rank, reads.block)
        part_keys, start = self._first_key(parts) + parts.step, self._first_key(reads)
        # Parts in the order of their keys: those of a copy, step by step. Parts with the same key come together.
        self._order = stable_order(part_keys)
        keys = part_keys[self._order]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        begin = np.repeat(begins, np.diff(np.append(begins, len(keys))))
        # A reader waits for the parts from position `first` to `end`: for all of a resident copy that come before its
        # step, for the last ones that come to a buffer.
        self._end = positions(keys, start + reads.step)
        delivered = np.append(keys, -1)[self._end - 1] >= start  # else the copy is as it was at the start
        began = np.append(begin, 0)[self._end - 1]
        self._first = np.where(delivered, began, self._end)
        all_parts = np.flatnonzero(delivered & read_stays)
        self._first[all_parts] = positions(keys, start[all_parts])
        together = np.empty_like(begin)
        together[self._order] = self._order[begin]
        came = np.where(delivered, np.append(self._order, -1)[began], -1)
        self._last_part_step = np.where(came >= 0, np.append(parts.step, -1)[came], -1)
        sums = np.flatnonzero(read_stays & self._is_sum[reads.block])
        sum_read_keys = (self._first_key(reads) + reads.step)[sums]
        by_key = stable_order(sum_read_keys)
        self._sum_reads, self._sum_read_keys = sums[by_key], sum_read_keys[by_key]
        self.parts = parts._replace(since=np.where(part_stays, RESIDENT, parts.step), first=together)
        self.reads = reads._replace(since=np.where(read_stays, RESIDENT, self._last_part_step), first=came)
        self._release, self._release_before = self._releases()
        step, rank, pool = np.nonzero(self._release >= 0)
        self.buffers = Buffers(rank, pool, step)

    def _first_key(self, uses: Uses) -> IntArray:
        return (uses.rank * len(self._schedule.blocks) + uses.block) * self._steps

    def _lands(self, parts: Uses) -> BoolArray:
        """Which parts land in buffers: also a sum that arrives at a resident copy, but not what a call adds to it."""
        arrives = parts.operation < self._first_call
        lands: BoolArray = (parts.since != RESIDENT) | (arrives & self._is_sum[parts.block])
        lands &= self._schedule.blocks.pool[parts.block] >= 0
        return lands

    def _releases(self) -> tuple[IntArray, IntArray]:
        """The number of the release of each buffer that is filled, and of the release that must precede.

        Two int arrays (steps, ranks, pools), -1 for none.
        """
        blocks, filling = self._schedule.blocks, self.parts.select(np.flatnonzero(self._lands(self.parts)))
        filled = np.zeros((self._steps, self._schedule.world_size, len(blocks.pools)), dtype=bool)
        filled[filling.step, filling.rank, blocks.pool[filling.block]] = True
        number = np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, -1)
        # With two buffers, steps 0, 2 and 4 share one: if nothing came at step 2, before step 4 is the release of 0.
        before = np.full_like(number, -1)
        for at, pool in enumerate(blocks.pools):
            for step in range(pool.buffers, self._steps):
                last = step - pool.buffers
                before[step, :, at] = np.where(filled[last, :, at], number[last, :, at], before[last, :, at])
        return number, before

    def edges(self) -> Iterator[Edges]:
        """All edges but those of lanes; some several times."""
        for parts, reads in zip(self._pieces(self.parts), self._pieces(self.reads), strict=True):
            yield self._arrivals(reads)
            if self._schedule.blocks.pools:
                yield from self._buffer_edges(parts, reads)
            yield from self._changes(parts, reads)

    def edges_between(self, operations: IntArray, on_lanes: Edges) -> Edges:
        """The edges of a schedule with other numbers of operations, each once, in small types: there are many.

        First those of messages `on_lanes`, which have the other numbers already.
        """
        # An edge is one number, of its ends and the code of its event and cause: sorting finds what is there twice.
        width = len(operations).bit_length()
        numbers = [np.zeros(0, dtype=np.int64)]
        for edges in (compute_in_order(self._calls, self._first_call), *self.edges()):
            ends = operations[edges.before] << width | operations[edges.after]
            numbers.append(distinct(ends << _CODE_BITS | edges.event << _CAUSE_BITS | edges.cause))
        number, start = distinct(np.concatenate(numbers)), len(on_lanes.before)
        before, after = (np.empty(start + len(number), dtype="i4") for _ in range(2))
        event, cause = (np.empty(start + len(number), dtype="i1") for _ in range(2))
        for column, of_lanes, shift, bits in (
            (before, on_lanes.before, _CODE_BITS + width, width),
            (after, on_lanes.after, _CODE_BITS, width),
            (event, on_lanes.event, _CAUSE_BITS, _CODE_BITS - _CAUSE_BITS),
            (cause, on_lanes.cause, 0, _CAUSE_BITS),
        ):
            column[:start] = of_lanes
            column[start:] = number >> shift & (1 << bits) - 1
        return Edges(before, after, event, cause)

    def _pieces(self, uses: Uses) -> Iterator[IntArray]:
        """The uses of some steps after another, as many for parts as for readers."""
        count = 1 + (len(self.parts.step) + len(self.reads.step)) // _ROWS_AT_ONCE
        steps = np.arange(count + 1) * self._steps // count
        by_calls = int(np.searchsorted(uses.operation, self._first_call))
        sent = np.searchsorted(uses.step[:by_calls], steps).tolist()
        called = np.searchsorted(uses.step[by_calls:], steps).tolist()
        for piece, following in pairwise(range(count + 1)):
            of_calls = np.arange(by_calls + called[piece], by_calls + called[following])
            yield np.concatenate([np.arange(sent[piece], sent[following]), of_calls])

    def _arrivals(self, reads: IntArray) -> Edges:
        """Edges from parts to the readers of their copies."""
        reader, position = ranges(self._first[reads], self._end[reads])
        operations = self.parts.operation[self._order[position]]
        return Edges.of(operations, self.reads.operation[reads[reader]], ARRIVED, BLOCK)

    def _buffer_edges(self, parts: IntArray, reads: IntArray) -> list[Edges]:
        """The edges to and from the releases of buffers.

        Example: a ring that passes one block per step, through a pool of two buffers. What rank 1 receives at step 0
        it sends on at step 1, and the arrival of step 2 is to take the same buffer. The release of that buffer waits
        for the arrival of step 0 and for the send of step 1; the arrival of step 2 waits for the release.
        """
        blocks, landing = self._schedule.blocks, self.parts.select(parts)
        landing = landing.select(np.flatnonzero(self._lands(landing)))
        buffer = landing.step, landing.rank, blocks.pool[landing.block]
        fills, taken = self._first_buffer + self._release[buffer], self._release_before[buffer]
        takes = taken >= 0
        away = self.reads.select(reads[self.reads.since[reads] != RESIDENT])
        reading = self._release[away.since, away.rank, blocks.pool[away.block]]
        return [
            Edges.of(landing.operation, fills, ARRIVED, BUFFER),
            Edges.of(away.operation, self._first_buffer + reading, SENT, BUFFER),
            Edges.of(self._first_buffer + taken[takes], landing.operation[takes], ARRIVED, BUFFER),
        ]

    def _joins(self, parts: IntArray) -> Edges:
        """A buffer is in use until a sum has been added from it to its resident copy, once earlier readers ended."""
        landing = self.parts.select(parts)
        staged = landing.select(np.flatnonzero((landing.since == RESIDENT) & self._lands(landing)))
        which, readers = self._readers_of_sums(staged, staged.step + 1)
        fills = self._release[staged.step, staged.rank, self._schedule.blocks.pool[staged.block]]
        return Edges.of(readers, self._first_buffer + fills[which], SENT, BUFFER)

    def _changes(self, parts: IntArray, reads: IntArray) -> Iterator[Edges]:
        """Edges from readers of resident sums to calls that add to them, buffers, and readers of what they became.

        Example: rank 1 sends its sum at step 3, and more comes to it at step 5. If a call adds it, the call waits until
        the send of step 3 has left. If it arrives, it lands in a buffer and is joined after the send of step 3; a
        reader of the sum at step 6 needs the join, so it waits for the send, too.
        """
        if not len(self._sum_reads):
            return
        if self._schedule.blocks.pools:
            yield self._joins(parts)
        adds = (self.parts.since[parts] == RESIDENT) & (self.parts.operation[parts] >= self._first_call)
        changing = self.parts.select(parts[adds])
        later = (self.reads.since[reads] == RESIDENT) & self._is_sum[self.reads.block[reads]]
        later &= self._last_part_step[reads] >= 0
        changed = self.reads.select(reads[later])
        for uses, end in ((changing, changing.step), (changed, self._last_part_step[reads[later]] + 1)):
            which, readers = self._readers_of_sums(uses, end)
            yield Edges.of(readers, uses.operation[which], SENT, BUFFER)

    def _readers_of_sums(self, uses: Uses, end: IntArray) -> tuple[IntArray, IntArray]:
        """Who reads the same resident sums as some uses at steps before `end`: the index of the use, the operation."""
        which, position = ranges(
            np.searchsorted(self._sum_read_keys, self._first_key(uses)),
            np.searchsorted(self._sum_read_keys, self._first_key(uses) + end),
        )
        return which, self.reads.operation[self._sum_reads[position]]


class CallShapes(NamedTuple):
    """The distinct shapes of calls; int arrays (calls,): the index of each call's shape, and its FLOPs."""

    distinct: tuple[KernelShape, ...]
    number: IntArray
    flops: IntArray


def call_shapes(task: Task | None, calls: Sequence[Calls]) -> CallShapes:
    """The shapes of calls, in their order. Each distinct shape occurs once: its time may take long to find."""
    if task is None or not calls:
        return CallShapes((), *np.zeros((2, 0), dtype=np.int64))
    kernels = list(dict.fromkeys(group.kernel for group in calls))
    names = [KernelName(kernel, task.kernels[kernel], task.dtype) for kernel in kernels]
    name = np.repeat([kernels.index(group.kernel) for group in calls], [len(group) for group in calls])
    rows = ShapeRows.joined([task.shapes(group) for group in calls])
    return CallShapes(*distinct_shapes(names, name, rows), rows.flops)


@OncePerSchedule
def shapes_by_rank(schedule: Schedule) -> list[dict[KernelShape, int]]:
    """For each rank, how many calls it makes of each shape; one object for ranks that make the same calls."""
    if schedule.reordered is not None:
        of, order = schedule.reordered
        found = shapes_by_rank(of)
        return [found[rank] for rank in np.argsort(order).tolist()]
    steps, shapes = schedule.steps, dict[KernelShape, int]()
    at_once, counted = max(_ROWS_AT_ONCE // schedule.world_size, 1), []
    for first in range(0, len(steps), at_once):
        some = range(first, min(first + at_once, len(steps)))
        calls = [steps.calls(index) if isinstance(steps, LazySteps) else steps[index].calls for index in some]
        groups = _joined([group for each in calls for group in each if len(group)])
        distinct_here, number, _ = call_shapes(schedule.task, groups)
        if len(number):
            named = np.array([shapes.setdefault(shape, len(shapes)) for shape in distinct_here])
            counted.append((np.concatenate([group.rank for group in groups]), named[number]))
    return _counted(schedule, counted, tuple(shapes))


def keep_shapes(schedule: Schedule, calls: Sequence[tuple[IntArray, IntArray]], shapes: Sequence[KernelShape]) -> None:
    """Keep the shapes of the calls of all steps for `shapes_by_rank`: the ranks and the shapes of some after others."""
    shapes_by_rank.keep(schedule, lambda: _counted(schedule, calls, shapes))


def _counted(
    schedule: Schedule, calls: Sequence[tuple[IntArray, IntArray]], shapes: Sequence[KernelShape]
) -> list[dict[KernelShape, int]]:
    counts_of_rank: list[dict[KernelShape, int]] = [{} for _ in range(schedule.world_size)]
    pairs = [rank.astype(np.int64) * len(shapes) + shape for rank, shape in calls]
    counts = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *pairs]))
    for pair in np.flatnonzero(counts).tolist():
        counts_of_rank[pair // len(shapes)][shapes[pair % len(shapes)]] = int(counts[pair])
    alike: dict[frozenset[tuple[KernelShape, int]], dict[KernelShape, int]] = {}
    return [alike.setdefault(frozenset(each.items()), each) for each in counts_of_rank]


# Which lanes share a batch of messages where a library sends batches, as NCCL does.
#
# A batch ends when all its messages have ended, so lanes of one batch wait for each other. That costs nothing if what
# they bring is needed at once: the next step waits for all of it anyway. It does where one lane's messages are needed
# only steps later, as those of the outer ring of a ring of rings, or never again, as gradients that have come home.
#
# So lanes are one **channel** if what they bring is needed equally soon: if the fewest steps from an arrival to its
# first use at its rank, by a transfer or a kernel call, are the same. All rings of TASP are one channel. Every rank
# derives the same channels.


@lru_cache(maxsize=16)
def channels(schedule: Schedule) -> tuple[int, ...]:
    """The channel of each lane, numbered from 0 on."""
    derived = accesses(schedule, range(schedule.world_size), schedule.steps)
    steps = len(schedule.steps) + 1
    arrives = np.flatnonzero(derived.parts.operation < derived.first_call)
    parts = Uses(*(column[arrives] for column in derived.parts))
    read, arrived = (
        (uses.rank * len(schedule.blocks) + uses.block) * steps + uses.step for uses in (derived.reads, parts)
    )
    later = np.append(np.sort(read), -1)[np.searchsorted(np.sort(read), arrived, side="right")]
    used = later // steps == arrived // steps
    soonest: IntArray = np.full(schedule.lanes, steps)
    np.minimum.at(soonest, derived.transfers.lane[parts.operation[used]], (later - arrived)[used])
    channel: tuple[int, ...] = tuple(np.unique(soonest, return_inverse=True)[1].tolist())
    return channel
