"""One rank's part of a schedule: messages, kernel calls and joins, where their data lie, and what they wait for.

Operations have the numbers of `tasp_lab.schedule.dependencies` for this rank. A **join** is a further operation: what
came to a copy at one step, but does not lie in its place, is joined to it. It waits for all that came and, if the copy
is resident, until earlier readers have ended. Whatever waits for one of the parts waits for their join.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.buffer_layout import OUTSIDE, Key, Layouts, RankLayout, parts_of
from tasp_lab.schedule.dependencies import (
    ARRIVED,
    BLOCK,
    LANE,
    RESIDENT,
    SENT,
    Dependencies,
    Uses,
    dependencies,
    steps_of,
)
from tasp_lab.schedule.messages import joint_messages
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.kernel_shapes import KernelShape

SCATTERED = -2
"""In place of the offset of an operand: its blocks do not lie side by side."""


Condition = tuple[int, int]
"""An operation and its event, `SENT` or `ARRIVED`. For calls, joins and releases of buffers it is always `ARRIVED`."""


class Row(NamedTuple):
    """A message that a rank sends or receives.

    `offset` is where its data lie in the rank's memory, in bytes, or `OUTSIDE`: the caller's tensors, and resident
    copies that are wider than on the wire, are gathered before they are sent. `since` is the step at which the copy
    comes into its buffer, or `RESIDENT`; `gives` whether the source of a send keeps nothing.
    """

    operation: int
    step: int
    lane: int
    peer: int
    block: int
    offset: int
    since: int
    gives: bool = False


class Place(NamedTuple):
    """A copy: a block, its offset in the rank's memory, or `OUTSIDE`, and the step at which it comes, or `RESIDENT`."""

    block: int
    offset: int
    since: int

    @property
    def key(self) -> Key:
        return self.block, self.since


class Operand(NamedTuple):
    """An operand of a kernel call: `size_bytes` of the rank's memory from `offset` on, or `OUTSIDE`.

    `since` has an entry per block. Blocks that do not lie side by side are `SCATTERED`: they are gathered from the
    operands in `pieces` before the call.
    """

    blocks: tuple[int, ...]
    since: tuple[int, ...]
    offset: int
    size_bytes: int
    pieces: tuple[Operand, ...] = ()


class CallRow(NamedTuple):
    """A kernel call. It adds a part, or several, to each of `adds`; `block` names it in records."""

    operation: int
    step: int
    lane: int
    kernel: str
    operands: tuple[Operand, ...]
    params: tuple[int, ...]
    adds: tuple[Place, ...]
    flops: int
    block: int
    shape: KernelShape

    @property
    def reads(self) -> tuple[Key, ...]:
        """The copies that it reads."""
        return tuple(key for each in self.operands for key in zip(each.blocks, each.since, strict=True))


class Join(NamedTuple):
    """What came to a copy at a step and is to be joined to it.

    `place` is the copy, `operations` are the arrivals and calls; `received` are the offsets of arrivals that lie
    elsewhere, `begun` is whether another one lies in the place itself.
    """

    operation: int
    step: int
    place: Place
    received: tuple[int, ...]
    operations: tuple[int, ...]
    begun: bool


@dataclass(frozen=True, eq=False)
class RankPart:
    """One rank's part of a schedule; rows are in the order of steps, and of lanes within a step.

    `messages_out` and `messages_in` are `sends` and `receives` as they are sent: the rows of a message lie side by side
    in the memories of both ends, in their order (`tasp_lab.schedule.messages`).
    `resident` maps the blocks with a resident copy in the memory to their offsets. `waits` maps operations to their
    conditions; buffers are released when theirs hold. Operations are numbered: messages, calls, buffers, joins.
    """

    rank: int
    resident: Mapping[int, int]
    sends: tuple[Row, ...]
    receives: tuple[Row, ...]
    messages_out: tuple[tuple[Row, ...], ...]
    messages_in: tuple[tuple[Row, ...], ...]
    calls: tuple[CallRow, ...]
    joins: tuple[Join, ...]
    waits: Mapping[int, tuple[Condition, ...]]
    memory_bytes: int
    first_call: int
    first_buffer: int
    first_join: int


def rank_part(schedule: Schedule, rank: int) -> RankPart:
    """One rank's part of a schedule."""
    steps = steps_of(schedule, rank)
    derived = dependencies(schedule, rank, steps)
    layouts = Layouts(schedule, [rank], derived)
    layout = layouts.of(rank)
    joins = _joins(derived, layout)
    sends, receives = _messages(rank, derived, layouts)
    joint: list[int] = joint_messages(schedule, rank, derived.transfers).tolist()
    return RankPart(
        rank,
        {block: offset for (block, since), offset in layout.copies.items() if since == RESIDENT},
        _by_lane(sends),
        _by_lane(receives),
        _together(sends, joint),
        _together(receives, joint),
        tuple(_call_rows(schedule, rank, steps, derived, layout)),
        joins,
        waits_of(derived, joins),
        layout.memory_bytes,
        derived.first_call,
        derived.first_buffer,
        len(derived),
    )


def _messages(rank: int, derived: Dependencies, layouts: Layouts) -> tuple[list[Row], list[Row]]:
    """What a rank sends and what it receives."""
    sent = _places(derived.reads, layouts.sent(derived.reads))
    received = _places(derived.parts, layouts.received)
    sends, receives = [], []
    columns = (column.tolist() for column in derived.transfers)
    for operation, (step, source, destination, lane, block, gives) in enumerate(zip(*columns, strict=True)):
        if source == rank:
            sends.append(Row(operation, step, lane, destination, block, *sent[operation], gives))
        else:
            receives.append(Row(operation, step, lane, source, block, *received[operation]))
    return sends, receives


def _places(uses: Uses, offsets: IntArray) -> dict[int, tuple[int, int]]:
    """Where the copies of messages lie, and when they came, by operation."""
    places = zip(offsets.tolist(), uses.since.tolist(), strict=True)
    return dict(zip(uses.operation.tolist(), places, strict=True))


def _since(derived: Dependencies) -> dict[tuple[int, int], int]:
    """When the copy came that an operation reads, by operation and block."""
    reads = derived.reads
    keys = zip(reads.operation.tolist(), reads.block.tolist(), strict=True)
    return dict(zip(keys, reads.since.tolist(), strict=True))


def _by_lane(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (row.step, row.lane)))


def _together(rows: Sequence[Row], joint: Sequence[int]) -> tuple[tuple[Row, ...], ...]:
    """The rows of each message in the order of their offsets; messages in the order of steps, lanes and first rows."""
    groups: dict[int, list[Row]] = {}
    for row in _by_lane(rows):
        groups.setdefault(joint[row.operation], []).append(row)
    return tuple(tuple(sorted(each, key=lambda row: row.offset)) for each in groups.values())


def _call_rows(
    schedule: Schedule, rank: int, steps: Sequence[Step], derived: Dependencies, layout: RankLayout
) -> Iterator[CallRow]:
    """The kernel calls of a rank, in their order."""
    table, since = derived.calls, _since(derived)
    sizes = _Sizes(schedule.block_bytes.tolist(), schedule.blocks.home_bytes.tolist())
    added = {(part.operation, part.block): part.since for part in parts_of(derived)}
    rows = ((index, each, row) for index, step in enumerate(steps) for each in step.calls for row in each.rows())
    for number, (index, group, (_, operands, params)) in enumerate(rows):
        operation = derived.first_call + number
        adds = [(block, added[operation, block]) for block in table.adds[number].tolist()]
        places = [
            [Place(block, layout.offset(block, came), came) for block in blocks for came in [since[operation, block]]]
            for blocks in operands
        ]
        yield CallRow(
            operation,
            index,
            group.lane,
            group.kernel,
            tuple(_operand(operand, sizes) for operand in places),
            tuple(params),
            tuple(Place(block, layout.offset(block, came), came) for block, came in adds),
            int(table.flops[number]),
            int(table.block[number]),
            table.shapes[table.shape[number]],
        )


class _Sizes(NamedTuple):
    """The size of each block in a buffer, and of its resident copy."""

    buffered: Sequence[int]
    resident: Sequence[int]

    def of(self, place: Place) -> int:
        return (self.resident if place.since == RESIDENT else self.buffered)[place.block]

    def are_alike(self, before: Place, after: Place) -> bool:
        """Whether two copies have the same dtypes, as far as it depends on where they are."""
        is_wide = self.buffered[after.block] != self.resident[after.block]
        return not is_wide or (before.since == RESIDENT) == (after.since == RESIDENT)


def _operand(places: Sequence[Place], sizes: _Sizes) -> Operand:
    """The copies of an operand, in runs that lie side by side."""
    runs: list[list[Place]] = []
    for place in places:
        if runs and _follows(runs[-1][-1], place, sizes):
            runs[-1].append(place)
        else:
            runs.append([place])
    operands = [_run(each, sizes) for each in runs] or [Operand((), (), 0, 0)]
    if len(operands) == 1:
        return operands[0]
    blocks = tuple(block for each in operands for block in each.blocks)
    since = tuple(step for each in operands for step in each.since)
    return Operand(blocks, since, SCATTERED, sum(each.size_bytes for each in operands), tuple(operands))


def _follows(before: Place, after: Place, sizes: _Sizes) -> bool:
    """Whether two copies lie side by side; tensors of the caller have their blocks in the order of numbers."""
    if before.offset == OUTSIDE:
        return after.offset == OUTSIDE and after.block == before.block + 1
    return after.offset == before.offset + sizes.of(before) and sizes.are_alike(before, after)


def _run(places: Sequence[Place], sizes: _Sizes) -> Operand:
    blocks = tuple(place.block for place in places)
    since = tuple(place.since for place in places)
    return Operand(blocks, since, places[0].offset, sum(map(sizes.of, places)))


def _joins(derived: Dependencies, layout: RankLayout) -> tuple[Join, ...]:
    """All joins, in the order of what comes first to each."""
    together: dict[tuple[int, int, int], list[int]] = {}
    for part in parts_of(derived):
        arrives = part.operation < derived.first_call
        if part.since != RESIDENT or (
            arrives and layout.received[part.operation] != layout.offset(part.block, RESIDENT)
        ):
            together.setdefault((part.block, part.since, part.step), []).append(part.operation)
    joins: list[Join] = []
    for (block, since, step), operations in together.items():
        offset = layout.offset(block, since)
        calls = tuple(operation for operation in operations if operation >= derived.first_call)
        received = [layout.received[operation] for operation in operations if operation < derived.first_call]
        elsewhere = tuple(each for each in received if each != offset)
        if elsewhere or calls:
            number = len(derived) + len(joins)
            begun = len(elsewhere) < len(received)
            joins.append(Join(number, step, Place(block, offset, since), elsewhere, tuple(operations), begun))
    return tuple(joins)


# What each operation of a rank waits for: the edges of its dependencies, with joins in place of what they join.


def waits_of(derived: Dependencies, joins: Sequence[Join]) -> Mapping[int, tuple[Condition, ...]]:
    """What each operation waits for: the edges of its dependencies, with joins in place of what they join.

    Example: a rank adds an arrival (operation 4) and the result of a call (9) to one copy by join 12, and sends the
    copy on (2). The edges are 4 -> 2 and 9 -> 2; here 12 waits for 4 and 9, and 2 waits for 12 alone.
    """
    joined = {(operation, join.place.block): join.operation for join in joins for operation in join.operations}
    joins_of: defaultdict[int, list[int]] = defaultdict(list)
    for (operation, _), number in joined.items():
        joins_of[operation].append(number)
    waits: defaultdict[int, dict[Condition, None]] = defaultdict(dict)
    adds, reads = _blocks_of(derived, derived.parts), _blocks_of(derived, derived.reads)
    edges = derived.edges
    chosen = edges.cause != LANE
    columns = (column[chosen].tolist() for column in (edges.before, edges.after, edges.event, edges.cause))
    for before, after, event, cause in zip(*columns, strict=True):
        if cause == BLOCK:
            numbers = [joined.get((before, block), before) for block in adds[before] & reads[after]]
        else:
            numbers = joins_of.get(before, [before]) if event == ARRIVED else [before]
        for number in numbers:
            waits[after][_condition(derived, number, event)] = None
    readers = _readers_of_residents(derived)
    for join in joins:
        waits[join.operation] |= {(operation, ARRIVED): None for operation in join.operations}
        if join.place.since == RESIDENT:
            for step, reader in readers.get(join.place.block, ()):
                if step <= join.step:
                    waits[join.operation][_condition(derived, reader, SENT)] = None
    for part in parts_of(derived):
        if (
            part.since == RESIDENT
            and part.operation < derived.first_call
            and (part.operation, part.block) not in joined
        ):
            for step, reader in readers.get(part.block, ()):
                if step < part.step:
                    waits[part.operation][_condition(derived, reader, SENT)] = None
    return {operation: tuple(conditions) for operation, conditions in waits.items()}


def _condition(derived: Dependencies, operation: int, event: int) -> Condition:
    return operation, event if operation < derived.first_call else ARRIVED


def _blocks_of(derived: Dependencies, uses: Uses) -> Mapping[int, set[int]]:
    blocks: defaultdict[int, set[int]] = defaultdict(set)
    for operation, block in zip(uses.operation.tolist(), uses.block.tolist(), strict=True):
        blocks[operation].add(block)
    return blocks


def _readers_of_residents(derived: Dependencies) -> Mapping[int, list[tuple[int, int]]]:
    """By block: the operations that read its resident copy, each with its step."""
    reads, readers = derived.reads, defaultdict(list)
    resident = reads.since == RESIDENT
    columns = (reads.block[resident].tolist(), reads.step[resident].tolist(), reads.operation[resident].tolist())
    for block, step, operation in zip(*columns, strict=True):
        readers[block].append((step, operation))
    return readers
