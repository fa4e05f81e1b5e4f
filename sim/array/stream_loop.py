"""The loops of `sim.array.stream`: the messages of some steps, and the times of the operations of a few more.

Large schedules run as machine code (`tasp_lab.core.compiled`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sim.array.event_queue import EventQueue, first_due, pop, put
from sim.array.flows import Flows, begin, end, end_due, settle
from sim.array.max_min import SAME
from tasp_lab.core.arrays import BoolArray, FloatArray, Int32Array, IntArray, Table
from tasp_lab.core.compiled import compilable, table

DONE, UNSUPPORTED, FULL, LATE = range(4)
"""How a step ends: well; the schedule has something that this module does not derive; there is no room for it; or a
message starts before something that it affects has ended already."""

_STATUS, OPEN, NEXT, LANDINGS, STEP_LANDINGS, _RELEASES, _STACK, _ISSUED = range(8)
"""Places in `Window.sizes`: the status; how many operations are tracked and have not ended; the next step of the batch
to be issued; how many landings the table has, and how many before the latest step; how many releases there were so far;
the height of the stack; and from here on how many operations the latest step of even number has, and that of odd."""


class Pool(NamedTuple):
    """A table whose rows are taken and given back.

    Rows are taken one after the other in chunks of `_CHUNK`, and a chunk is free again once all its rows came back. So
    rows that are taken together lie side by side: what takes time is to fetch rows into the cache of the processor.

    Attributes
    ----------
    rows : the table.
    chunks : a table by chunk: how many of its rows are `left`, taken or to be taken, and the `next` free chunk.
    free : int array (3,): the next row, which is in a new chunk if it is a multiple of `_CHUNK`; the first free chunk;
        how many there are.
    """

    rows: Table
    chunks: Table
    free: IntArray

    @classmethod
    def of(cls, rows: int, **columns: str) -> Pool:
        """A pool with at least so many free rows, and these columns."""
        return cls(table(0, **columns), table(0, left="i4", next="i4"), np.zeros(3, dtype=np.int64)).with_room(rows)

    def with_room(self, rows: int) -> Pool:
        """A pool with these rows and at least so many more, which are free."""
        old, more = len(self.chunks), -(-rows // _CHUNK)
        chunks = _longer(self.chunks, more)
        chunks["next"][old:] = np.arange(old + 1, old + more + 1)
        if self.free[2]:
            chunks["next"][-1] = self.free[1]
        free = np.array([self.free[0], old, self.free[2] + more])
        return Pool(_longer(self.rows, more * _CHUNK), chunks, free)


_CHUNK = 64
"""Rows of a chunk of a pool, a power of 2."""


def _longer(rows: Table, more: int) -> Table:
    """A table with so many more rows, of zeros, which take no memory until they are written.

    It begins where a cache line does: a row of 64 bytes is in one line, not in two.
    """
    size = (len(rows) + more) * rows.dtype.itemsize
    room = np.zeros(size + _LINE, dtype=np.uint8)
    at = -room.ctypes.data % _LINE
    longer: Table = room[at : at + size].view(rows.dtype)
    longer[: len(rows)] = rows
    return longer


_LINE = 64
"""Bytes of a cache line."""


class Window(NamedTuple):
    """The operations of the steps in progress, and what they wait for.

    Attributes
    ----------
    operations : a pool: the `first` edge of those that wait for its arrival, or -1; the one that `follows` on its lane,
        or -1; the release of the buffer that it `reads`, and of the one that it
        `fills`, or -1; the `next` one that waits for the same release; whether it `is_call`, whether it `is_done`,
        whether it is the last one on its lane so far, `is_last`, and of the latest two steps, `is_recent`: until then
        others may be found that wait for it; its `step`; the ranks that it `leaves` and `enters`; its `cost`; when its
        last byte left, `sent_s`, and its `end_s`. Of a message that may share bandwidth the `route`, else -1. A row
        takes 64 bytes, as most of the time goes by until it is in a cache.
    starts : a table by operation: for how many others it `waits`, and the earliest time at which it can start, `at_s`.
        It is small, as each of the others comes by.
    edges : a pool: who waits `after`, and the `next` edge of the same operation.
    releases : a table, one for each rank and step at which a buffer was filled: for how many uses it `waits`, the end
        of the latest one, `time_s`; the `first` operation that waits for it, or -1.
    costs : a table: `launch_s`, `wire_bytes`, the greatest rate `limit`, `latency_s`, `channels`. Of calls, `launch_s`
        is their time.
    landings : a table of what came to copies at the steps of a batch, and at the step before these: the `step`, `rank`
        and `block`; the message and the last call that brought something, `by_message` and `by_call`, or -1; the
        `release` of its buffer, or -1; whether the copy `is_away`, which is in a buffer; whether it `is_free` of calls
        that read it; where it `goes`; what came `first` and `last`; its `place` in the buffer in bytes; the `transfer`
        of the step that brought it, or -1.
    lane, call : int arrays, the last message on each lane, and the last call of each rank; or -1.
    filled : a table by rank and buffer: the latest `release` and its `step`, and the one `before` it; or -1.
    ranks : a table: the `running` call, or -1; its `start_s`; whether its end `is_stale`; `done_s`, the end of the last
        call; the channels `sending` and `receiving` then; the range of its `changes` after that, `begin` and `end`; how
        far the running call is known: the next change `at` which it goes on, at `now_s` with `left_s` to compute alone
        and with the channels `sends` and `receives`; how many tracked messages it sends or receives, `open`, and those
        that are `coming`; and the columns of `EventQueue`.
    changes : a table of changes of channels, equally many for each rank, in the order of `time_s`: `sending`,
        `receiving`.
    issued : int array, the operations of the latest two steps, those of a step of odd number in the second half.
    queue : the ranks by the end of their running calls.
    events : messages that may share bandwidth by when they begin or end to flow; `instant` those that end now. Their
        table of operations has the `slot` in `flows`, or -1, besides.
    flows : those that flow. `passes` are what each route passes, from `first_pass` of the route on.
    flowed_s : float array (1,), the time up to which rates are known.
    stack : int array, operations that wait for nothing.
    sizes : int array, see `OPEN`.
    share : float array (2,): what a channel takes of a GPU, and how many channels take something.
    end_s : float array (1,), the end of the last operation so far.
    """

    operations: Pool
    starts: Table
    edges: Pool
    releases: Table
    costs: Table
    landings: Table
    lane: Int32Array
    call: Int32Array
    filled: Table
    ranks: Table
    changes: Table
    issued: Int32Array
    queue: EventQueue
    events: EventQueue
    instant: EventQueue
    flows: Flows
    passes: Table
    first_pass: IntArray
    flowed_s: FloatArray
    stack: Int32Array
    sizes: IntArray
    share: FloatArray
    end_s: FloatArray

    @classmethod
    def of(
        cls, ranks: int, lanes: int, buffers: int, fills: int, rows: int, share: FloatArray,
        flows: Flows, passes: Table, first_pass: IntArray,
    ) -> Window:  # fmt: skip
        """No operations yet, and room for `rows`; `fills`: how often buffers are filled at most."""
        operations = Pool.of(
            0, first="i4", follows="i4", reads="i4", fills="i4", next="i4", is_call="i1", is_done="i1", is_last="i1",
            is_recent="i1", step="i4", leaves="i4", enters="i4", cost="i4", route="i4", sent_s="f8", end_s="f8",
        )  # fmt: skip
        flowing = table(0, due="f8", place="i4", slot="i4")
        filled = table(ranks * buffers, release="i4", step="i4", before="i4")
        filled["release"] = filled["step"] = filled["before"] = -1
        of_ranks = table(
            ranks, due="f8", place="i4", running="i4", start_s="f8", is_stale="i4", done_s="f8", sending="f8",
            receiving="f8", begin="i4", end="i4", at="i4", now_s="f8", left_s="f8", sends="f8", receives="f8",
            open="i4", coming="i4",
        )  # fmt: skip
        of_ranks["place"] = of_ranks["running"] = -1
        nothing = np.zeros(0, dtype=np.int32)
        return cls(
            operations=operations,
            starts=table(0, waits="i4", at_s="f8"),
            edges=Pool.of(0, after="i4", next="i4"),
            releases=table(fills, waits="i4", first="i4", time_s="f8"),
            costs=cost_table([]),
            landings=landing_table(0),
            lane=np.full(ranks * lanes, -1, dtype=np.int32),
            call=np.full(ranks, -1, dtype=np.int32),
            filled=filled,
            ranks=of_ranks,
            changes=table(0, time_s="f8", sending="f8", receiving="f8"),
            issued=nothing,
            queue=EventQueue.of(of_ranks),
            events=EventQueue.of(flowing),
            instant=EventQueue.of(flowing),
            flows=flows,
            passes=passes,
            first_pass=first_pass,
            flowed_s=np.zeros(1),
            stack=nothing,
            sizes=np.zeros(_ISSUED + 2, dtype=np.int64),
            share=share,
            end_s=np.zeros(1),
        ).with_room(rows)

    def with_room(self, rows: int) -> Window:
        """A window with these operations and room for so many more, and for edges and changes in proportion."""
        operations = self.operations.with_room(rows)
        size, half, ranks = len(operations.rows), len(self.issued) // 2, len(self.call)
        issued = np.zeros((2, size), dtype=np.int32)
        issued[:, :half] = self.issued.reshape(2, half)
        more = size - len(self.starts)
        flowing = _longer(self.events.operations, more)
        old = self.changes.reshape(ranks, -1)
        changes = np.zeros((ranks, _CHANGES * size // ranks if self.share[0] else 0), dtype=old.dtype)
        changes[:, : old.shape[1]] = old
        return self._replace(
            operations=operations,
            starts=_longer(self.starts, more),
            edges=self.edges.with_room(_EDGES * rows),
            changes=changes.ravel(),
            issued=issued.ravel(),
            events=EventQueue(flowing, np.resize(self.events.heap, size), self.events.size),
            instant=EventQueue.of(flowing),
            stack=np.zeros(size, dtype=np.int32),
        )


_EDGES, _CHANGES = 4, 8
"""Room for edges and for changes of channels per operation."""


def landing_table(rows: int) -> Table:
    """The table of landings, see `Window`."""
    landings: Table = table(
        rows, step="i4", rank="i4", block="i4", by_message="i4", by_call="i4", release="i4", is_away="i4", is_free="i4",
        goes="i4", first="i4", last="i4", transfer="i4", place="i8",
    )  # fmt: skip
    return landings


def cost_table(costs: Sequence[tuple[float, ...]]) -> Table:
    """The table of costs, see `Window`."""
    rows: Table = table(len(costs), launch_s="f8", wire_bytes="f8", limit="f8", latency_s="f8", channels="f8")
    rows[:] = costs
    return rows


class Shape(NamedTuple):
    """The numbers of lanes and of buffers per rank, and how many places a rank has in `_place_found`, a power of 2."""

    lanes: int
    buffers: int
    spread: int


class Bounds(NamedTuple):
    """Where what each step does begins in the arrays of a batch of steps: int arrays (steps + 2,).

    The last but one is the step after the batch, whose transfers and reads are looked at ahead, the last one the end.
    """

    moved: IntArray
    reads: IntArray
    adds: IntArray
    calls: IntArray


class Moved(NamedTuple):
    """The transfers of a batch of steps, arrays (transfers,).

    `stays`: whether the copy at the destination is resident; `lies`: the place of a resident copy at the source in
    bytes, -1 if it is none or a tensor of the caller. To be filled in: the landings that are `read`, those of the step
    before, or -1; those that are `made`; and the `message`, the number of its first transfer.
    """

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray
    stays: BoolArray
    lies: IntArray
    read: IntArray
    made: IntArray
    message: IntArray


class Used(NamedTuple):
    """What calls read, or add to, arrays (uses,): the `call` of the batch, the copy, and its `landing`, to be filled.

    `stays`: whether the copy is resident; of reads it is not looked at.
    """

    call: IntArray
    rank: IntArray
    block: IntArray
    stays: BoolArray
    landing: IntArray


class Issued(NamedTuple):
    """The messages and calls of a batch of steps: int arrays. `message` is the message of each transfer, of `Moved`.

    The messages of a step begin at `first`, an array (steps + 1,). `route` is -1 of messages that share no bandwidth.
    """

    first: IntArray
    message: IntArray
    source: IntArray
    destination: IntArray
    lane: IntArray
    cost: IntArray
    route: IntArray
    rank: IntArray
    call_cost: IntArray


# ------------------------------------------------------------------------------------------------ messages of steps


def find_messages(
    step: int, bounds: Bounds, moved: Moved, reads: Used, adds: Used, size_bytes: IntArray, order: IntArray,
    starts: IntArray, found: Int32Array, window: Window, shape: Shape,
) -> int:  # fmt: skip
    """Find what the transfers and calls from `step` on read and where arrivals land; join transfers to messages.

    `order` has room for all landings of a step, `starts` for all ranks and two more. `found` has room for more than
    twice as many numbers of landings, all -1. Returns how it ended.
    """
    for number in range(window.sizes[LANDINGS]):
        landing = window.landings[number]
        found[_place_found(window, landing.rank, landing.block, step - 1, 0, found, shape)] = number
    for at in range(len(bounds.moved) - 2):
        if not _find(step + at, at, bounds, moved, reads, adds, found, window, shape):
            return UNSUPPORTED
        first_landing = window.sizes[STEP_LANDINGS]
        _look_ahead(step + at, at + 1, bounds, moved, reads, found, window, shape)
        count = window.sizes[LANDINGS] - first_landing
        _place(window, first_landing, count, order, starts, size_bytes)
        _join(window, count, order, moved, size_bytes)
    return int(window.sizes[_STATUS])


@compilable
def _find(
    step: int, at_step: int, bounds: Bounds, moved: Moved, reads: Used, adds: Used, found: Int32Array, window: Window,
    shape: Shape,
) -> bool:  # fmt: skip
    """Find what a step reads and where arrivals land; whether each block arrives once."""
    first, end, before = bounds.moved[at_step], bounds.moved[at_step + 1], window.sizes[STEP_LANDINGS]
    for at in range(first, end):
        moved.read[at] = _landing(window, moved.source[at], moved.block[at], step - 1, before, found, shape)
        moved.message[at] = at
    for at in range(bounds.reads[at_step], bounds.reads[at_step + 1]):
        reads.landing[at] = _landing(window, reads.rank[at], reads.block[at], step - 1, before, found, shape)
    landings = window.sizes[LANDINGS]
    window.sizes[STEP_LANDINGS] = landings
    for at in range(first, end):
        rank, block = moved.destination[at], moved.block[at]
        place = _place_found(window, rank, block, step, landings, found, shape)
        if found[place] >= landings:
            return False
        name = -1 - (moved.source[at] * shape.lanes + moved.lane[at])
        found[place] = moved.made[at] = _land(window, step, rank, block, not moved.stays[at], name, at)
    for at in range(bounds.adds[at_step], bounds.adds[at_step + 1]):
        rank, block = adds.rank[at], adds.block[at]
        place = _place_found(window, rank, block, step, landings, found, shape)
        if found[place] >= landings:
            window.landings[found[place]].last = adds.call[at]
            adds.landing[at] = found[place]
        elif adds.stays[at]:
            adds.landing[at] = -1
        else:
            found[place] = adds.landing[at] = _land(window, step, rank, block, True, adds.call[at], -1)
    return True


@compilable
def _look_ahead(
    step: int, at_step: int, bounds: Bounds, moved: Moved, reads: Used, found: Int32Array, window: Window, shape: Shape
) -> None:
    """Note of the landings of a step what the next one, which is number `at_step` of the batch, does with them."""
    landings = window.sizes[STEP_LANDINGS]
    for at in range(bounds.reads[at_step], bounds.reads[at_step + 1]):
        number = found[_place_found(window, reads.rank[at], reads.block[at], step, landings, found, shape)]
        if number >= landings:
            window.landings[number].is_free = 0
    for at in range(bounds.moved[at_step], bounds.moved[at_step + 1]):
        number = found[_place_found(window, moved.source[at], moved.block[at], step, landings, found, shape)]
        if number >= landings and window.landings[number].goes < 0:
            window.landings[number].goes = moved.destination[at] * shape.lanes + moved.lane[at]


@compilable
def _place_found(window: Window, rank: int, block: int, step: int, first: int, found: Int32Array, shape: Shape) -> int:
    """Where in `found` a landing of a step is, or will be, which has landings from `first` on.

    `found` is a hash table with linear probing for steps of even number and one for the others, each with a part for
    each rank, as a step goes from rank to rank. Landings of earlier steps count as free places.
    """
    half = len(found) // 2
    at, start = (rank * shape.spread + (block * _MIXES & (shape.spread - 1))) & (half - 1), step % 2 * half
    while found[start + at] >= first:
        landing = window.landings[found[start + at]]
        if landing.rank == rank and landing.block == block:
            break
        at = (at + 1) & (half - 1)
    return start + at


_MIXES = 40503
"""An odd number near the golden ratio of 2^16: multiples of it are spread evenly (Knuth, section 6.4)."""


@compilable
def _landing(window: Window, rank: int, block: int, step: int, first: int, found: Int32Array, shape: Shape) -> int:
    """The landing of a copy at a step, which has landings from `first` on; -1 for none."""
    number: int = found[_place_found(window, rank, block, step, first, found, shape)]
    if number < first:
        return -1
    if not window.landings[number].is_away:
        window.sizes[_STATUS] = UNSUPPORTED  # a resident copy changes
    return number


@compilable
def _land(window: Window, step: int, rank: int, block: int, is_away: bool, name: int, transfer: int) -> int:
    number: int = window.sizes[LANDINGS]
    window.sizes[LANDINGS] += 1
    landing = window.landings[number]
    landing.step, landing.rank, landing.block, landing.is_away = step, rank, block, is_away
    landing.by_message = landing.by_call = landing.release = landing.goes = -1
    landing.is_free, landing.first, landing.last, landing.transfer = 1, name, name, transfer
    return number


@compilable
def _place(window: Window, first: int, count: int, order: IntArray, starts: IntArray, size_bytes: IntArray) -> None:
    """Put the landings of a step in the order in which they lie in the buffer of each rank, ranks in ascending order.

    The order is that of `tasp_lab.schedule.buffer_layout`.
    """
    for at in range(len(starts)):
        starts[at] = 0
    for number in range(first, first + count):
        starts[window.landings[number].rank + 2] += 1
    for at in range(2, len(starts)):
        starts[at] += starts[at - 1]
    for number in range(first, first + count):
        rank = window.landings[number].rank
        order[starts[rank + 1]] = number
        starts[rank + 1] += 1
    # Those of a rank are few, and almost in order.
    for rank in range(len(starts) - 2):
        place = 0
        for one in range(starts[rank], starts[rank + 1]):
            number, at = order[one], one
            while at > starts[rank] and _is_before(window, number, order[at - 1]):
                order[at] = order[at - 1]
                at -= 1
            order[at] = number
        for one in range(starts[rank], starts[rank + 1]):
            landing = window.landings[order[one]]
            landing.place = place
            place += size_bytes[landing.block]


@compilable
def _is_before(window: Window, one: int, other: int) -> bool:
    """Whether a landing lies before an earlier one at the same rank."""
    a, b = window.landings[one], window.landings[other]
    if a.is_free != b.is_free:
        return bool(a.is_free < b.is_free)
    if not a.is_free:
        return False
    if a.goes != b.goes:
        return bool(a.goes < b.goes)
    return bool(a.first < b.first or (a.first == b.first and a.last < b.last))


@compilable
def _join(window: Window, count: int, order: IntArray, moved: Moved, size_bytes: IntArray) -> None:
    """Join the transfers whose blocks lie side by side at both ends and become ready together."""
    begin = 0
    for at in range(1, count + 1):
        if at < count:
            before, after = window.landings[order[at - 1]], window.landings[order[at]]
            arrived = before.rank == after.rank and before.transfer >= 0 and after.transfer >= 0
            if arrived and _are_one(window, before.transfer, after.transfer, moved, size_bytes):
                continue
        if at - begin > 1:
            lowest = window.landings[order[begin]].transfer
            for one in range(begin, at):
                lowest = min(lowest, window.landings[order[one]].transfer)
            for one in range(begin, at):
                moved.message[window.landings[order[one]].transfer] = lowest
        begin = at


@compilable
def _are_one(window: Window, one: int, other: int, moved: Moved, size_bytes: IntArray) -> bool:
    """Whether two transfers, whose arrivals lie side by side, are of one message."""
    if moved.source[one] != moved.source[other] or moved.lane[one] != moved.lane[other]:
        return False
    size = size_bytes[moved.block[one]]
    if moved.read[one] < 0 or moved.read[other] < 0:
        if moved.read[one] >= 0 or moved.read[other] >= 0 or moved.lies[one] < 0 or moved.lies[other] < 0:
            return False
        return bool(moved.lies[other] == moved.lies[one] + size)
    a, b = window.landings[moved.read[one]], window.landings[moved.read[other]]
    return bool(a.step == b.step and a.first == b.first and a.last == b.last and b.place == a.place + size)


# ------------------------------------------------------------------------------------------------ times of steps


def issue(
    step: int, bounds: Bounds, moved: Moved, reads: Used, adds: Used, issued: Issued, window: Window, shape: Shape
) -> int:
    """Track the messages and calls from `step` on, and find the times of all that wait for no call; how it ended.

    `FULL`: there is no room for the step `NEXT` of the batch, at which it goes on if it is called again.
    """
    while window.sizes[NEXT] < len(bounds.moved) - 2:
        at_step = window.sizes[NEXT]
        if not _has_room(at_step, bounds, issued, window):
            return FULL
        _issue(step + at_step, at_step, bounds, moved, reads, adds, issued, window, shape)
        window.sizes[NEXT] += 1
        _advance(window)
        if window.sizes[_STATUS] != DONE:
            break
    return int(window.sizes[_STATUS])


@compilable
def _has_room(at_step: int, bounds: Bounds, issued: Issued, window: Window) -> bool:
    """Whether there is room for the operations of a step, and for all edges and changes that may come of them."""
    first, end = issued.first[at_step], issued.first[at_step + 1]
    operations = end - first + bounds.calls[at_step + 1] - bounds.calls[at_step]
    # What is read waits for a message and for a call at most.
    edges = 2 * (bounds.moved[at_step + 1] - bounds.moved[at_step] + bounds.reads[at_step + 1] - bounds.reads[at_step])
    has_room = _free_rows(window.operations) >= operations and _free_rows(window.edges) >= edges
    if window.share[0]:
        for at in range(first, end):
            window.ranks[issued.source[at]].coming += 1
            window.ranks[issued.destination[at]].coming += 1
        for number in range(len(window.ranks)):
            rank = window.ranks[number]
            # A message changes the channels of a rank when it begins and when it ends. With room for twice as many
            # changes, moving them to the front takes little time.
            changes = rank.end - rank.begin + 2 * (rank.open + rank.coming)
            has_room = has_room and 2 * changes <= len(window.changes) // len(window.ranks)
            rank.coming = 0
    return bool(has_room)


@compilable
def _issue(
    step: int, at_step: int, bounds: Bounds, moved: Moved, reads: Used, adds: Used, issued: Issued, window: Window,
    shape: Shape,
) -> None:  # fmt: skip
    """Track the messages and calls of a step."""
    first_message, first_call = issued.first[at_step], bounds.calls[at_step]
    messages, calls = issued.first[at_step + 1] - first_message, bounds.calls[at_step + 1] - first_call
    base = step % 2 * (len(window.issued) // 2)
    for number in range(messages + calls):
        row = _take_row(window.operations)
        window.issued[base + number] = row
        operation = window.operations.rows[row]
        window.starts[row].waits, window.starts[row].at_s = 1, 0.0
        operation.is_done, operation.is_last, operation.is_recent = 0, 1, 1
        operation.first = operation.follows = operation.reads = operation.fills = operation.next = -1
        operation.step, operation.route = step, -1
        if number < messages:
            at = first_message + number
            operation.is_call, operation.cost, operation.route = 0, issued.cost[at], issued.route[at]
            if operation.route >= 0:
                flowing = window.events.operations[row]
                flowing.slot = flowing.place = -1
            operation.leaves, operation.enters = issued.source[at], issued.destination[at]
            window.ranks[operation.leaves].open += 1
            window.ranks[operation.enters].open += 1
            lane = issued.source[at] * shape.lanes + issued.lane[at]
            _follow(window, row, window.lane[lane])
            window.lane[lane] = row
        else:
            at = first_call + number - messages
            operation.is_call, operation.cost = 1, issued.call_cost[at]
            operation.leaves = operation.enters = issued.rank[at]
            _follow(window, row, window.call[issued.rank[at]])
            window.call[issued.rank[at]] = row
    window.sizes[OPEN] += messages + calls
    to_message, to_call = base - first_message, base + messages - first_call
    for at in range(bounds.moved[at_step], bounds.moved[at_step + 1]):
        row = window.issued[to_message + issued.message[at]]
        _read(window, row, moved.read[at])
        window.landings[moved.made[at]].by_message = row
        _fill(window, row, moved.made[at], shape)
    for at in range(bounds.reads[at_step], bounds.reads[at_step + 1]):
        _read(window, window.issued[to_call + reads.call[at]], reads.landing[at])
    for at in range(bounds.adds[at_step], bounds.adds[at_step + 1]):
        if adds.landing[at] >= 0:
            row = window.issued[to_call + adds.call[at]]
            window.landings[adds.landing[at]].by_call = row
            if not adds.stays[at]:
                _fill(window, row, adds.landing[at], shape)
    _forget_step(window, step - 1)
    window.sizes[_ISSUED + step % 2] = messages + calls
    for number in range(base, base + messages + calls):
        _let_go(window, window.issued[number], 0.0)


@compilable
def _forget_step(window: Window, step: int) -> None:
    """Give back the operations of a step for which none of a later step will wait, or only the next one of its lane."""
    base = step % 2 * (len(window.issued) // 2)
    for number in range(base, base + window.sizes[_ISSUED + step % 2]):
        window.operations.rows[window.issued[number]].is_recent = 0
        _forget(window, window.issued[number])


@compilable
def _forget(window: Window, row: int) -> None:
    """Give back an operation unless it is needed."""
    operation = window.operations.rows[row]
    if operation.is_done and not operation.is_last and not operation.is_recent:
        _give_row(window.operations, row)


@compilable
def _free_rows(pool: Pool) -> int:
    """How many rows can be taken."""
    free: int = pool.free[2] * _CHUNK + -pool.free[0] % _CHUNK
    return free


@compilable
def _take_row(pool: Pool) -> int:
    row: int = pool.free[0]
    if row % _CHUNK == 0:
        chunk = pool.free[1]
        pool.free[1] = pool.chunks[chunk].next
        pool.free[2] -= 1
        pool.chunks[chunk].left = _CHUNK
        row = chunk * _CHUNK
    pool.free[0] = row + 1
    return row


@compilable
def _give_row(pool: Pool, row: int) -> None:
    chunk = pool.chunks[row // _CHUNK]
    chunk.left -= 1
    if not chunk.left:
        chunk.next = pool.free[1]
        pool.free[1] = row // _CHUNK
        pool.free[2] += 1


@compilable
def _follow(window: Window, row: int, before: int) -> None:
    """Let an operation wait until the one before it on its lane, if there is one, has been sent."""
    if before >= 0:
        start, other = window.starts[row], window.operations.rows[before]
        if other.is_done:
            start.at_s = max(start.at_s, other.sent_s)
        else:
            start.waits += 1
            other.follows = row
        other.is_last = 0
        _forget(window, before)


@compilable
def _wait(window: Window, row: int, before: int) -> None:
    """Let an operation wait for the arrival of another one."""
    start, other = window.starts[row], window.operations.rows[before]
    if other.is_done:
        start.at_s = max(start.at_s, other.end_s)
    elif other.first < 0 or window.edges.rows[other.first].after != row:  # else it waits for another block of the same
        number = _take_row(window.edges)
        edge = window.edges.rows[number]
        edge.after, edge.next = row, other.first
        start.waits += 1
        other.first = number


@compilable
def _read(window: Window, row: int, landing_number: int) -> None:
    """Let an operation wait for a copy that it reads, and its buffer for the operation.

    All copies in buffers that it reads lie in the same one: they came to its rank at the step before.
    """
    if landing_number >= 0:
        landing, operation = window.landings[landing_number], window.operations.rows[row]
        if landing.by_message >= 0:
            _wait(window, row, landing.by_message)
        if landing.by_call >= 0:
            _wait(window, row, landing.by_call)
        if operation.reads < 0:
            operation.reads = landing.release
            window.releases[landing.release].waits += 1


@compilable
def _fill(window: Window, row: int, landing_number: int, shape: Shape) -> None:
    """Let an operation wait for the buffer in which something lands, whose release waits for it."""
    landing, operation = window.landings[landing_number], window.operations.rows[row]
    buffer = window.filled[landing.rank * shape.buffers + landing.step % shape.buffers]
    if buffer.step != landing.step:
        buffer.before, buffer.release, buffer.step = buffer.release, window.sizes[_RELEASES], landing.step
        window.releases[buffer.release].first = -1
        window.sizes[_RELEASES] += 1
    landing.release = buffer.release
    if operation.fills < 0:
        operation.fills = buffer.release
        window.releases[buffer.release].waits += 1
        if buffer.before >= 0:
            before = window.releases[buffer.before]
            if before.waits:
                window.starts[row].waits += 1
                operation.next, before.first = before.first, row
            else:
                window.starts[row].at_s = max(window.starts[row].at_s, before.time_s)


def run_events(step: int, window: Window) -> int:
    """End calls, begin and end messages that may share bandwidth, in the order of time; returns how it ended.

    Up to the first event of a step after `step`.
    """
    while window.sizes[_STATUS] == DONE:
        now_s, flow_s, call_s = window.flowed_s[0], math.inf, math.inf
        if window.events.size[0]:
            flow_s = first_due(window.events)
        if flow_s > now_s * (1 + SAME):
            settle(window.flows, window.events, now_s)  # an instant has ended
            if window.events.size[0]:
                flow_s = first_due(window.events)
        if window.queue.size[0]:
            call_s = window.ranks[window.queue.heap[0]].due
        if flow_s < call_s:
            if window.operations.rows[window.events.heap[0]].step > step:
                break
            window.flowed_s[0] = max(now_s, flow_s) if flow_s > now_s * (1 + SAME) else now_s
            _take_flow(window)
        elif window.queue.size[0]:
            number = window.queue.heap[0]
            rank = window.ranks[number]
            if rank.is_stale:
                rank.is_stale = 0
                put(window.queue, number, _call_end_s(window, number))
                continue
            if window.operations.rows[rank.running].step > step:
                break
            _take_call(window)
        else:
            break
        _advance(window)
    return int(window.sizes[_STATUS])


@compilable
def _take_call(window: Window) -> None:
    """End the call that ends first."""
    number = pop(window.queue)
    rank, first = window.ranks[number], number * (len(window.changes) // len(window.ranks))
    row = rank.running
    rank.running, rank.done_s = -1, rank.due
    while rank.begin < rank.end and window.changes[first + rank.begin].time_s <= rank.due:
        change = window.changes[first + rank.begin]
        rank.sending += change.sending
        rank.receiving += change.receiving
        rank.begin += 1
    if rank.begin >= rank.end - rank.begin:  # so each change is moved about once, and few are in use at a time
        _move_to_front(window, number)
    operation = window.operations.rows[row]
    operation.sent_s = operation.end_s = rank.due
    _end(window, row)


@compilable
def _take_flow(window: Window) -> None:
    """Begin to send a message, or end it and all others that end with it."""
    now_s, row = window.flowed_s[0], pop(window.events)
    operation, flowing = window.operations.rows[row], window.events.operations[row]
    if flowing.slot < 0:
        first, last = window.first_pass[operation.route], window.first_pass[operation.route + 1]
        cost = window.costs[operation.cost]
        flowing.slot = begin(
            window.flows, row, window.passes, first, last, cost.limit, cost.wire_bytes, now_s
        )  # fmt: skip
        return
    put(window.instant, row, float(row))
    end_due(window.flows, flowing.slot, window.instant, 0, now_s)
    while window.instant.size[0]:
        row = pop(window.instant)
        operation = window.operations.rows[row]
        cost = window.costs[operation.cost]
        end(window.flows, window.events.operations[row].slot, now_s)
        operation.sent_s, operation.end_s = now_s, now_s + cost.latency_s
        _occupy(window, row, operation.end_s, -cost.channels)
        _end(window, row)


@compilable
def _begin_call(window: Window, number: int) -> None:
    """Begin to find when the running call of a rank ends, from its start on."""
    rank = window.ranks[number]
    rank.at, rank.now_s, rank.sends, rank.receives = rank.begin, rank.start_s, rank.sending, rank.receiving
    rank.left_s = window.costs[window.operations.rows[rank.running].cost].launch_s


@compilable
def _call_end_s(window: Window, number: int) -> float:
    """When the running call of a rank ends beside the messages that are known so far.

    What happens from now on, which is when it was due, changes nothing before: the next time it goes on from here.
    """
    rank, first = window.ranks[number], number * (len(window.changes) // len(window.ranks))
    at, is_past = rank.at, True
    now_s, left_s, sends, receives = rank.now_s, rank.left_s, rank.sends, rank.receives
    while at < rank.end:
        change = window.changes[first + at]
        if is_past and change.time_s > rank.due:
            rank.at, rank.now_s, rank.left_s, rank.sends, rank.receives = at, now_s, left_s, sends, receives
            is_past = False
        if change.time_s > now_s:
            speed = 1.0 - min(max(sends, receives), window.share[1]) * window.share[0]
            if left_s <= (change.time_s - now_s) * speed:
                break
            left_s -= (change.time_s - now_s) * speed
            now_s = change.time_s
        sends += change.sending
        receives += change.receiving
        at += 1
    end_s: float = now_s + left_s / (1.0 - min(max(sends, receives), window.share[1]) * window.share[0])
    return end_s


@compilable
def _let_go(window: Window, row: int, time_s: float) -> None:
    """Let an operation go on after this time, if it waits for nothing else."""
    start = window.starts[row]
    start.at_s = max(start.at_s, time_s)
    start.waits -= 1
    if not start.waits:
        window.stack[window.sizes[_STACK]] = row
        window.sizes[_STACK] += 1


@compilable
def _advance(window: Window) -> None:
    """Find the times of operations that wait for nothing; calls beside which there may be messages begin to run."""
    while window.sizes[_STACK] and window.sizes[_STATUS] == DONE:
        window.sizes[_STACK] -= 1
        row = window.stack[window.sizes[_STACK]]
        operation = window.operations.rows[row]
        cost = window.costs[operation.cost]
        start_s = window.starts[row].at_s
        launched_s = start_s + cost.launch_s
        if operation.is_call and cost.launch_s and window.share[0]:
            rank = window.ranks[operation.leaves]
            rank.running, rank.start_s, rank.is_stale = row, start_s, 1
            _begin_call(window, operation.leaves)
            put(window.queue, operation.leaves, launched_s)
            continue
        operation.sent_s = operation.end_s = launched_s
        if cost.wire_bytes:
            latest_s = 0.0
            if cost.channels and window.share[0]:
                latest_s = max(window.ranks[operation.leaves].done_s, window.ranks[operation.enters].done_s)
            if operation.route >= 0:
                latest_s = max(latest_s, window.flowed_s[0])
            if launched_s < latest_s * (1 - SAME):
                window.sizes[_STATUS] = LATE  # something has ended as if the message were not there
            _occupy(window, row, launched_s, cost.channels)
            if operation.route >= 0:
                put(window.events, row, launched_s)
                continue
            operation.sent_s = launched_s + cost.wire_bytes / cost.limit
            operation.end_s = operation.sent_s + cost.latency_s
            _occupy(window, row, operation.end_s, -cost.channels)
        _end(window, row)


@compilable
def _occupy(window: Window, row: int, time_s: float, channels: float) -> None:
    """Let a message take channels at both ends, or give them back if negative."""
    if channels and window.share[0]:
        operation = window.operations.rows[row]
        ends_early = channels < 0 and operation.route >= 0
        _change(window, operation.leaves, time_s, channels, True, ends_early)
        _change(window, operation.enters, time_s, channels, False, ends_early)


@compilable
def _change(window: Window, number: int, time_s: float, channels: float, sends: bool, ends_early: bool) -> None:
    """Note that the channels of a rank change; `ends_early`: it was not known when those of a message come back."""
    room = len(window.changes) // len(window.ranks)
    rank, first = window.ranks[number], number * room
    if rank.end == room:
        _move_to_front(window, number)
    at = rank.end
    rank.end += 1
    while at > rank.begin and window.changes[first + at - 1].time_s > time_s:
        _copy(window.changes[first + at], window.changes[first + at - 1])
        at -= 1
    change = window.changes[first + at]
    change.time_s = time_s
    change.sending, change.receiving = (channels, 0.0) if sends else (0.0, channels)
    if rank.running >= 0 and time_s < rank.due:
        rank.is_stale = 1
        if at < rank.at:
            _begin_call(window, number)
        if ends_early:
            put(window.queue, number, time_s)  # it ends later than that, but earlier than it seemed to


@compilable
def _move_to_front(window: Window, number: int) -> None:
    """Move the changes of a rank to the front of their part of the table."""
    rank, first = window.ranks[number], number * (len(window.changes) // len(window.ranks))
    for at in range(rank.begin, rank.end):
        _copy(window.changes[first + at - rank.begin], window.changes[first + at])
    rank.end -= rank.begin
    rank.at -= rank.begin
    rank.begin = 0


@compilable
def _copy(change: Any, other: Any) -> None:
    change.time_s, change.sending, change.receiving = other.time_s, other.sending, other.receiving


@compilable
def _end(window: Window, row: int) -> None:
    """End an operation, and release what waits for it."""
    operation = window.operations.rows[row]
    operation.is_done = 1
    window.sizes[OPEN] -= 1
    if not operation.is_call:
        window.ranks[operation.leaves].open -= 1
        window.ranks[operation.enters].open -= 1
    window.end_s[0] = max(window.end_s[0], operation.end_s)
    if operation.follows >= 0:
        _let_go(window, operation.follows, operation.sent_s)
    if operation.reads >= 0:
        _free(window, operation.reads, operation.sent_s)
    if operation.fills >= 0:
        _free(window, operation.fills, operation.end_s)
    number = operation.first
    while number >= 0:
        edge = window.edges.rows[number]
        following = edge.next
        _let_go(window, edge.after, operation.end_s)
        _give_row(window.edges, number)
        number = following
    _forget(window, row)


@compilable
def _free(window: Window, number: int, time_s: float) -> None:
    """End a use of a buffer; after the last one, what is to land there goes on."""
    release = window.releases[number]
    release.time_s = max(release.time_s, time_s)
    release.waits -= 1
    if not release.waits:
        row = release.first
        while row >= 0:
            _let_go(window, row, release.time_s)
            row = window.operations.rows[row].next
