"""The loops of `sim.array.stream`: the messages of some steps, and the times of the operations of a few more.

Large schedules run as machine code (`tasp_lab.core.compiled`).

Operations are numbered as they come, step by step, messages before calls. Tables have room for the latest ones:
operation n is in row ``n & mask``, which the next one takes once n has ended and nothing refers to it any more. So rows
that are used together lie side by side: what takes time is to fetch them into the cache of the processor.
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
from tasp_lab.core.compiled import table
from tasp_lab.schedule.calls import ranges

DONE, UNSUPPORTED, FULL, LATE = range(4)
"""How a step ends: well; the schedule has something that this module does not derive; there is no room for it; or a
message starts before something that it affects has ended already."""

(
    _STATUS, OPEN, NEXT, LANDINGS, STEP_LANDINGS, _RELEASES, _STACK, OLDEST, COUNT, _STEP_BEFORE, EDGES, _UNUSED_EDGE,
) = range(12)  # fmt: skip
"""Places in `Window.sizes`: the status; how many operations are tracked and have not ended; the next step of the batch
to be issued; how many landings the table has, and how many before the latest step; how many releases there were so far;
the height of the stack; the first operation whose row is not free; how many operations came so far, and before the
latest step; how many edges are in use, and the first row of those that are not any more, -1 for none."""


class Window(NamedTuple):
    """The operations of the steps in progress, and what they wait for.

    Attributes
    ----------
    operations : a table: the `first` edge of those that wait for its arrival, or -1; the one that `follows` on its
        `lane`, or -1; the release of the buffer that it `reads`, and of the one that it `fills`, or -1; the `next` one
        that waits for the same release; whether it `is_call`, and whether it `is_done`; its `step`; the ranks that it
        `leaves` and `enters`; its `cost`; when its last byte left, `sent_s`, and its `end_s`. Of a message that may
        share bandwidth the `route`, else -1. A row takes 64 bytes, a cache line.
    starts : a table by operation: for how many others it `waits`, and the earliest time at which it can start, `at_s`.
        It is small, as each of the others comes by.
    mask : one less than the number of rows of both, a power of two.
    edges : a table: who waits `after`, and the `next` edge of the same operation, or the next row that is free again.
        A further release that an operation reads is -2 less its number.
    releases : a table, one for each rank and step at which a buffer was filled: for how many uses it `waits`, the end
        of the latest one, `time_s`; the `first` operation that waits for it, or -1.
    costs : a table: `launch_s`, `wire_bytes`, the greatest rate `limit`, `latency_s`, `channels`. Of calls, `launch_s`
        is their time.
    landings : a table of what came to copies at the steps of a batch, and at the step before these: the `step`, `rank`
        and `block`, and the `pool` of it; the message and the last call that brought something, `by_message` and
        `by_call`, or -1; the `release` of its buffer, or -1; whether the copy `is_away`, which is in a buffer; whether
        it `is_free` of calls that read it; where it `goes`; what came `first` and `last`; its `place` in the buffer in
        bytes; the `transfer` of the step that brought it, or -1.
    lanes : a table by rank and lane, the calls of a rank behind its lanes: the `last` operation so far, or -1; whether
        it `is_sent`, and when it was, `sent_s`.
    lanes_of_rank : one more than a rank has lanes for messages.
    filled : a table by rank, pool and buffer: the latest `release` and its `step`, and the one `before` it; or -1.
    pool : int array (blocks,), the pool of each block.
    pools, buffers : how many pools there are, and how many buffers a rank has of each.
    ranks : a table: the `running` call, or -1; its `start_s`; whether its end `is_stale`; `done_s`, the end of the last
        call; the channels `sending` and `receiving` then; the numbers of its `changes` after that, from `begin` to
        `end`; how far the running call is known: the next change `at` which it goes on, at `now_s` with `left_s` to
        compute alone and with the channels `sends` and `receives`; how many tracked messages it sends or receives,
        `open`, and those that are `coming`; and the columns of `EventQueue`.
    changes : a table of changes of channels, equally many for each rank, in the order of `time_s`: `sending`,
        `receiving`. Change n of a rank is in row ``n & changes_mask`` of these.
    queue : the ranks by the end of their running calls.
    events : the rows of messages that may share bandwidth by when they begin or end to flow; `instant` those that end
        now. Their table of operations has the `slot` in `flows`, or -1, besides.
    flows : those that flow. `passes` are what each route passes, from `first_pass` of the route on.
    flowed_s : float array (1,), the time up to which rates are known.
    stack : int array, operations that wait for nothing.
    sizes : int array, see `OPEN`.
    share : float array (2,): what a channel takes of a GPU, and how many channels take something.
    end_s : float array (1,), the end of the last operation so far.
    """

    operations: Table
    starts: Table
    mask: int
    edges: Table
    releases: Table
    costs: Table
    landings: Table
    lanes: Table
    lanes_of_rank: int
    filled: Table
    pool: Int32Array
    pools: int
    buffers: int
    ranks: Table
    changes: Table
    changes_mask: int
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
        cls, ranks: int, lanes: int, pool: IntArray, pools: int, buffers: int, steps: int, rows: int,
        share: FloatArray, flows: Flows, passes: Table, first_pass: IntArray,
    ) -> Window:  # fmt: skip
        """No operations yet, and room for `rows`; in each of the `steps` buffers are filled."""
        rows = power_of_2(rows)
        operations = table(
            0, first="i4", follows="i4", lane="i4", reads="i4", fills="i4", next="i4", is_call="i2", is_done="i2",
            step="i4", leaves="i4", enters="i4", cost="i4", route="i4", sent_s="f8", end_s="f8",
        )  # fmt: skip
        filled = table(ranks * pools * buffers, release="i4", step="i4", before="i4")
        filled["release"] = filled["step"] = filled["before"] = -1
        of_ranks = table(
            ranks, due="f8", place="i4", running="i4", start_s="f8", is_stale="i4", done_s="f8", sending="f8",
            receiving="f8", begin="i4", end="i4", at="i4", now_s="f8", left_s="f8", sends="f8", receives="f8",
            open="i4", coming="i4",
        )  # fmt: skip
        of_ranks["place"] = of_ranks["running"] = -1
        of_lanes = table(ranks * (lanes + 1), last="i4", is_sent="i4", sent_s="f8")
        of_lanes["last"] = -1
        changes = power_of_2(_CHANGES * rows // ranks) if share[0] else 0
        flowing = table(rows, due="f8", place="i4", slot="i4")
        sizes = np.zeros(_UNUSED_EDGE + 1, dtype=np.int64)
        sizes[_UNUSED_EDGE] = -1
        return cls(
            operations=_lined_up(rows, operations.dtype),
            starts=table(rows, waits="i4", at_s="f8"),
            mask=rows - 1,
            edges=table(_EDGES * rows, after="i4", next="i4"),
            releases=table(ranks * pools * steps + 1, waits="i4", first="i4", time_s="f8"),
            costs=cost_table([]),
            landings=landing_table(0),
            lanes=of_lanes,
            lanes_of_rank=lanes + 1,
            filled=filled,
            pool=pool.astype(np.int32),
            pools=pools,
            buffers=buffers,
            ranks=of_ranks,
            changes=table(ranks * changes, time_s="f8", sending="f8", receiving="f8"),
            changes_mask=changes - 1,
            queue=EventQueue.of(of_ranks),
            events=EventQueue.of(flowing),
            instant=EventQueue.of(flowing),
            flows=flows,
            passes=passes,
            first_pass=first_pass,
            flowed_s=np.zeros(1),
            stack=np.zeros(rows, dtype=np.int32),
            sizes=sizes,
            share=share,
            end_s=np.zeros(1),
        )

    def with_room(self) -> Window:
        """A window with these operations and room for twice as many, and for edges and changes."""
        rows, ranks = 2 * len(self.operations), len(self.ranks)
        longer = _lined_up(rows, self.operations.dtype), _zeros(rows, self.starts), _zeros(rows, self.events.operations)
        row = np.zeros(self.mask + 1, dtype=np.int32)  # queues and flows name operations by their rows
        oldest, count = int(self.sizes[OLDEST]), int(self.sizes[COUNT])
        while oldest < count:  # at most twice: rows are in order up to the last one of the table
            size = min(count - oldest, self.mask + 1 - (oldest & self.mask))
            before, now = (slice(at, at + size) for at in (oldest & self.mask, oldest & rows - 1))
            for new, old in zip(longer, (self.operations, self.starts, self.events.operations), strict=True):
                new[now] = old[before]
            row[before] = np.arange(now.start, now.stop)
            oldest += size
        operations, starts, flowing = longer
        heap, queued = np.zeros(rows, dtype=np.int32), self.events.size[0]
        heap[:queued] = row[self.events.heap[:queued]]
        self.flows.progress["number"] = row[self.flows.progress["number"]]
        edges = _zeros(2 * len(self.edges), self.edges)
        edges[: len(self.edges)] = self.edges
        changes, changes_mask = _zeros(2 * len(self.changes), self.changes), 2 * self.changes_mask + 1
        rank, change = ranges(self.ranks["begin"], self.ranks["end"])
        of_ranks = self.changes.reshape(ranks, -1)[rank, change & self.changes_mask]
        changes.reshape(ranks, -1)[rank, change & changes_mask] = of_ranks
        return self._replace(
            operations=operations,
            starts=starts,
            mask=rows - 1,
            edges=edges,
            changes=changes,
            changes_mask=changes_mask,
            events=EventQueue(flowing, heap, self.events.size),
            instant=EventQueue.of(flowing),
            stack=np.zeros(rows, dtype=np.int32),
        )


def _zeros(rows: int, like: Table) -> Table:
    return np.zeros(rows, dtype=like.dtype)


def _lined_up(rows: int, dtype: Any) -> Table:
    """A table of zeros that begins where a cache line does: a row of 64 bytes is in one line, not in two."""
    size = rows * dtype.itemsize
    room = np.zeros(size + _LINE, dtype=np.uint8)
    at = -room.ctypes.data % _LINE
    lined_up: Table = room[at : at + size].view(dtype)
    return lined_up


_LINE = 64
"""Bytes of a cache line."""

_EDGES, _CHANGES = 4, 4
"""Room for edges and for changes of channels per operation."""


def power_of_2(number: int) -> int:
    """The least power of 2 that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def landing_table(rows: int) -> Table:
    """The table of landings, see `Window`."""
    landings: Table = table(
        rows, step="i4", rank="i4", block="i4", by_message="i4", by_call="i4", release="i4", is_away="i4", is_free="i4",
        goes="i4", first="i4", last="i4", transfer="i4", pool="i4", place="i8",
    )  # fmt: skip
    return landings


def cost_table(costs: Sequence[tuple[float, ...]]) -> Table:
    """The table of costs, see `Window`."""
    rows: Table = table(len(costs), launch_s="f8", wire_bytes="f8", limit="f8", latency_s="f8", channels="f8")
    rows[:] = costs
    return rows


class Moved(NamedTuple):
    """The transfers of a batch of steps, arrays (transfers,), those of step k from ``first[k]`` on.

    `stays`: whether the copy at the destination is resident; `lies`: the place of a resident copy at the source in
    bytes, -1 if it is none or a tensor of the caller. To be filled in: the landings that are `read`, those of the step
    before, or -1; those that are `made`; and the `message`, the number of its first transfer.
    """

    first: IntArray
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
    """What calls read, or add to, arrays (uses,), that of step k from ``first[k]`` on.

    The `call` of the batch, the copy, and its `landing`, to be filled in. `stays`: whether the copy is resident; of
    reads it is not looked at.
    """

    first: IntArray
    call: IntArray
    rank: IntArray
    block: IntArray
    stays: BoolArray
    landing: IntArray


class Batch(NamedTuple):
    """The transfers and calls of `steps` steps from `first` on. What follows at one step more is at the ends of
    `moved` and `reads`: what lies beside what in a buffer depends on where it goes next.
    """

    first: int
    steps: int
    moved: Moved
    reads: Used
    adds: Used


class Landed(NamedTuple):
    """Room to find landings: `found` is a hash table of their numbers, all -1, see `_place_found`.

    It has a part of `spread` places for each rank, a power of 2. `order` has room for all landings of a step, `starts`
    for all ranks and two more.
    """

    found: Int32Array
    spread: int
    order: IntArray
    starts: IntArray


class Issued(NamedTuple):
    """The messages and calls of a batch of steps: int arrays; those of step k are from ``first[k]`` and
    ``first_call[k]`` on.

    `message` is the message of each transfer of `Moved`. `route` is -1 of messages that share no bandwidth.
    """

    first: IntArray
    message: IntArray
    source: IntArray
    destination: IntArray
    lane: IntArray
    cost: IntArray
    route: IntArray
    first_call: IntArray
    rank: IntArray
    call_cost: IntArray


# ------------------------------------------------------------------------------------------------ messages of steps


def find_messages(batch: Batch, size_bytes: IntArray, landed: Landed, window: Window) -> int:
    """Find what transfers and calls read and where arrivals land; join transfers to messages. Returns how it ended."""
    for number in range(window.sizes[LANDINGS]):
        landing = window.landings[number]
        landed.found[_place_found(window, landing.rank, landing.block, batch.first - 1, 0, landed)] = number
    for at in range(batch.steps):
        if not _find(batch, at, landed, window):
            return UNSUPPORTED
        _look_ahead(batch, at, landed, window)
        _place(window, landed, size_bytes)
        _join(window, landed.order, batch.moved, size_bytes)
    return int(window.sizes[_STATUS])


def _find(batch: Batch, at_step: int, landed: Landed, window: Window) -> bool:
    """Find what a step of the batch reads and where arrivals land; whether each block comes to a buffer once.

    Several sums that come home at a step lie at a place each, as one copy: all are known by what comes first and last.
    """
    moved, reads, adds, found = batch.moved, batch.reads, batch.adds, landed.found
    step, before = batch.first + at_step, window.sizes[STEP_LANDINGS]
    first, end = moved.first[at_step], moved.first[at_step + 1]
    for at in range(first, end):
        moved.read[at] = _landing(window, moved.source[at], moved.block[at], step - 1, before, landed)
        moved.message[at] = at
    for at in range(reads.first[at_step], reads.first[at_step + 1]):
        reads.landing[at] = _landing(window, reads.rank[at], reads.block[at], step - 1, before, landed)
    landings = window.sizes[LANDINGS]
    window.sizes[STEP_LANDINGS] = landings
    several = False
    for at in range(first, end):
        rank, block = moved.destination[at], moved.block[at]
        place = _place_found(window, rank, block, step, landings, landed)
        name = -1 - (moved.source[at] * window.lanes_of_rank + moved.lane[at])
        moved.made[at] = _land(window, step, rank, block, not moved.stays[at], name, at)
        if found[place] < landings:
            found[place] = moved.made[at]
        elif moved.stays[at]:
            window.landings[found[place]].last = name
            several = True
        else:
            return False
    for at in range(adds.first[at_step], adds.first[at_step + 1]):
        rank, block = adds.rank[at], adds.block[at]
        place = _place_found(window, rank, block, step, landings, landed)
        if found[place] >= landings:
            window.landings[found[place]].last = adds.call[at]
            adds.landing[at] = found[place]
        elif adds.stays[at]:
            adds.landing[at] = -1
        else:
            found[place] = adds.landing[at] = _land(window, step, rank, block, True, adds.call[at], -1)
    if several:
        for at in range(first, end):
            landing = window.landings[moved.made[at]]
            one = window.landings[found[_place_found(window, landing.rank, landing.block, step, landings, landed)]]
            landing.first, landing.last = one.first, one.last
    return True


def _look_ahead(batch: Batch, at_step: int, landed: Landed, window: Window) -> None:
    """Note of the landings of a step of the batch what the next one does with them."""
    moved, reads, found, lanes = batch.moved, batch.reads, landed.found, window.lanes_of_rank
    step, landings = batch.first + at_step, window.sizes[STEP_LANDINGS]
    for at in range(reads.first[at_step + 1], reads.first[at_step + 2]):
        number = found[_place_found(window, reads.rank[at], reads.block[at], step, landings, landed)]
        if number >= landings:
            window.landings[number].is_free = 0
    for at in range(moved.first[at_step + 1], moved.first[at_step + 2]):
        number = found[_place_found(window, moved.source[at], moved.block[at], step, landings, landed)]
        if number >= landings and window.landings[number].goes < 0:
            window.landings[number].goes = moved.destination[at] * lanes + moved.lane[at]


def _place_found(window: Window, rank: int, block: int, step: int, first: int, landed: Landed) -> int:
    """Where in `found` a landing of a step is, or will be, which has landings from `first` on.

    `found` is a hash table with linear probing for steps of even number and one for the others, each with a part for
    each rank, as a step goes from rank to rank. Landings of earlier steps count as free places.
    """
    found, spread = landed.found, landed.spread
    half = len(found) // 2
    at, start = (rank * spread + (block * _MIXES & (spread - 1))) & (half - 1), step % 2 * half
    while found[start + at] >= first:
        landing = window.landings[found[start + at]]
        if landing.rank == rank and landing.block == block:
            break
        at = (at + 1) & (half - 1)
    return start + at


_MIXES = 40503
"""An odd number near the golden ratio of 2^16: multiples of it are spread evenly (Knuth, section 6.4)."""


def _landing(window: Window, rank: int, block: int, step: int, first: int, landed: Landed) -> int:
    """The landing of a copy at a step, which has landings from `first` on; -1 for none."""
    number: int = landed.found[_place_found(window, rank, block, step, first, landed)]
    if number < first:
        return -1
    if not window.landings[number].is_away:
        window.sizes[_STATUS] = UNSUPPORTED  # a resident copy changes
    return number


def _land(window: Window, step: int, rank: int, block: int, is_away: bool, name: int, transfer: int) -> int:
    number: int = window.sizes[LANDINGS]
    window.sizes[LANDINGS] += 1
    landing = window.landings[number]
    landing.step, landing.rank, landing.block, landing.is_away = step, rank, block, is_away
    landing.pool = window.pool[block]
    landing.by_message = landing.by_call = landing.release = landing.goes = -1
    landing.is_free, landing.first, landing.last, landing.transfer = 1, name, name, transfer
    return number


def _place(window: Window, landed: Landed, size_bytes: IntArray) -> None:
    """Put the landings of the latest step in the order in which they lie in the buffers of each rank, rank by rank.

    The order is that of `tasp_lab.schedule.buffer_layout`.
    """
    order, starts, first, end = landed.order, landed.starts, window.sizes[STEP_LANDINGS], window.sizes[LANDINGS]
    for at in range(len(starts)):
        starts[at] = 0
    for number in range(first, end):
        starts[window.landings[number].rank + 2] += 1
    for at in range(2, len(starts)):
        starts[at] += starts[at - 1]
    for number in range(first, end):
        rank = window.landings[number].rank
        order[starts[rank + 1]] = number
        starts[rank + 1] += 1
    # Those of a rank are few, and almost in order.
    for rank in range(len(starts) - 2):
        place, pool = 0, -1
        for one in range(starts[rank], starts[rank + 1]):
            number, at = order[one], one
            while at > starts[rank] and _is_before(window, number, order[at - 1]):
                order[at] = order[at - 1]
                at -= 1
            order[at] = number
        for one in range(starts[rank], starts[rank + 1]):
            landing = window.landings[order[one]]
            if landing.pool != pool:
                place, pool = 0, landing.pool
            landing.place = place
            place += size_bytes[landing.block]


def _is_before(window: Window, one: int, other: int) -> bool:
    """Whether a landing lies before an earlier one at the same rank."""
    a, b = window.landings[one], window.landings[other]
    if a.pool != b.pool:
        return bool(a.pool < b.pool)
    if a.is_free != b.is_free:
        return bool(a.is_free < b.is_free)
    if not a.is_free:
        return False
    if a.goes != b.goes:
        return bool(a.goes < b.goes)
    return bool(a.first < b.first or (a.first == b.first and a.last < b.last))


def _join(window: Window, order: IntArray, moved: Moved, size_bytes: IntArray) -> None:
    """Join the transfers of the latest step whose blocks lie side by side at both ends and become ready together."""
    begin, count = 0, window.sizes[LANDINGS] - window.sizes[STEP_LANDINGS]
    for at in range(1, count + 1):
        if at < count:
            before, after = window.landings[order[at - 1]], window.landings[order[at]]
            arrived = before.rank == after.rank and before.transfer >= 0 and after.transfer >= 0
            arrived = arrived and before.pool == after.pool
            if arrived and _are_one(window, before.transfer, after.transfer, moved, size_bytes):
                continue
        if at - begin > 1:
            lowest = window.landings[order[begin]].transfer
            for one in range(begin, at):
                lowest = min(lowest, window.landings[order[one]].transfer)
            for one in range(begin, at):
                moved.message[window.landings[order[one]].transfer] = lowest
        begin = at


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
    is_ready_with = a.step == b.step and a.first == b.first and a.last == b.last
    return bool(is_ready_with and a.pool == b.pool and b.place == a.place + size)


# ------------------------------------------------------------------------------------------------ times of steps


def issue(batch: Batch, issued: Issued, window: Window) -> int:
    """Track the messages and calls of a batch, and find the times of all that wait for no call; how it ended.

    `FULL`: there is no room for the step `NEXT` of the batch, at which it goes on if it is called again.
    """
    while window.sizes[NEXT] < batch.steps:
        if not _has_room(batch, issued, window):
            return FULL
        _issue(batch, issued, window)
        window.sizes[NEXT] += 1
        _advance(window)
        if window.sizes[_STATUS] != DONE:
            break
    return int(window.sizes[_STATUS])


def _has_room(batch: Batch, issued: Issued, window: Window) -> bool:
    """Whether there is room for the operations of the next step, and for all edges and changes that may come of them.

    The rows of operations are free up to the first one that has not ended, or belongs to the latest step: those of the
    next one may wait for it.
    """
    at_step, oldest = window.sizes[NEXT], window.sizes[OLDEST]
    while oldest < window.sizes[_STEP_BEFORE] and window.operations[oldest & window.mask].is_done:
        oldest += 1
    window.sizes[OLDEST] = oldest
    first, end = issued.first[at_step], issued.first[at_step + 1]
    operations = end - first + issued.first_call[at_step + 1] - issued.first_call[at_step]
    # What is read waits for a message and for a call at most, and its buffer for the end of the operation.
    moved, reads = batch.moved.first, batch.reads.first
    edges = 3 * (moved[at_step + 1] - moved[at_step] + reads[at_step + 1] - reads[at_step])
    has_room = window.sizes[COUNT] + operations - oldest <= len(window.operations)
    has_room = has_room and window.sizes[EDGES] + edges <= len(window.edges)
    if window.share[0]:
        for at in range(first, end):
            window.ranks[issued.source[at]].coming += 1
            window.ranks[issued.destination[at]].coming += 1
        for number in range(len(window.ranks)):
            rank = window.ranks[number]
            # A message changes the channels of a rank when it begins and when it ends.
            changes = rank.end - rank.begin + 2 * (rank.open + rank.coming)
            has_room = has_room and changes <= window.changes_mask + 1
            rank.coming = 0
    return bool(has_room)


def _issue(batch: Batch, issued: Issued, window: Window) -> None:
    """Track the messages and calls of the next step of the batch."""
    moved, reads, adds, at_step = batch.moved, batch.reads, batch.adds, window.sizes[NEXT]
    first_message, first_call = issued.first[at_step], issued.first_call[at_step]
    messages, calls = issued.first[at_step + 1] - first_message, issued.first_call[at_step + 1] - first_call
    base = window.sizes[COUNT]
    window.sizes[_STEP_BEFORE] = base
    window.sizes[COUNT] += messages + calls
    window.sizes[OPEN] += messages + calls
    for number in range(base, base + messages + calls):
        operation, start = window.operations[number & window.mask], window.starts[number & window.mask]
        start.waits, start.at_s = 1, 0.0  # for the end of this function
        operation.first = operation.follows = operation.reads = operation.fills = operation.next = -1
        operation.is_done, operation.step, operation.route = 0, batch.first + at_step, -1
        if number < base + messages:
            at = first_message + number - base
            operation.is_call, operation.cost, operation.route = 0, issued.cost[at], issued.route[at]
            if operation.route >= 0:
                flowing = window.events.operations[number & window.mask]
                flowing.slot = flowing.place = -1
            operation.leaves, operation.enters = issued.source[at], issued.destination[at]
            window.ranks[operation.leaves].open += 1
            window.ranks[operation.enters].open += 1
            operation.lane = operation.leaves * window.lanes_of_rank + issued.lane[at]
        else:
            at = first_call + number - base - messages
            operation.is_call, operation.cost = 1, issued.call_cost[at]
            operation.leaves = operation.enters = issued.rank[at]
            operation.lane = (operation.leaves + 1) * window.lanes_of_rank - 1
        _follow_lane(window, number, operation.lane)
    to_message, to_call = base - first_message, base + messages - first_call
    for at in range(moved.first[at_step], moved.first[at_step + 1]):
        number = to_message + issued.message[at]
        _read(window, number, moved.read[at])
        window.landings[moved.made[at]].by_message = number
        _fill(window, number, moved.made[at])
    for at in range(reads.first[at_step], reads.first[at_step + 1]):
        _read(window, to_call + reads.call[at], reads.landing[at])
    for at in range(adds.first[at_step], adds.first[at_step + 1]):
        if adds.landing[at] >= 0:
            number = to_call + adds.call[at]
            window.landings[adds.landing[at]].by_call = number
            if not adds.stays[at]:
                _fill(window, number, adds.landing[at])
    for number in range(base, base + messages + calls):
        _let_go(window, number, 0.0)


def _follow_lane(window: Window, number: int, lane_number: int) -> None:
    """Let an operation wait until the one before it on its lane, if there is one, has been sent."""
    lane = window.lanes[lane_number]
    if lane.last >= 0:
        if lane.is_sent:
            window.starts[number & window.mask].at_s = lane.sent_s
        else:
            window.starts[number & window.mask].waits += 1
            window.operations[lane.last & window.mask].follows = number
    lane.last, lane.is_sent = number, 0


def _wait(window: Window, number: int, before: int) -> None:
    """Let an operation wait for the arrival of another one, of the step before."""
    start, other = window.starts[number & window.mask], window.operations[before & window.mask]
    if other.is_done:
        start.at_s = max(start.at_s, other.end_s)
    elif other.first < 0 or window.edges[other.first].after != number:  # else it waits for another block of the same
        _link(window, before, number)
        start.waits += 1


def _link(window: Window, before: int, after: int) -> None:
    """Add an edge from an operation to one that waits for its arrival, or to a release, see `Window.edges`."""
    row = window.sizes[_UNUSED_EDGE]
    if row >= 0:
        window.sizes[_UNUSED_EDGE] = window.edges[row].next
    else:
        row = window.sizes[EDGES]
    window.sizes[EDGES] += 1
    edge, operation = window.edges[row], window.operations[before & window.mask]
    edge.after, edge.next = after, operation.first
    operation.first = row


def _read(window: Window, number: int, landing_number: int) -> None:
    """Let an operation wait for a copy that it reads, and its buffer for the operation.

    All copies in buffers that it reads came to its rank at the step before, so they lie in one buffer of each pool.
    """
    if landing_number >= 0:
        landing, operation = window.landings[landing_number], window.operations[number & window.mask]
        if landing.by_message >= 0:
            _wait(window, number, landing.by_message)
        if landing.by_call >= 0:
            _wait(window, number, landing.by_call)
        if operation.reads < 0:
            operation.reads = landing.release
            window.releases[landing.release].waits += 1
        elif operation.reads != landing.release:
            _link(window, number, -2 - landing.release)
            window.releases[landing.release].waits += 1


def _fill(window: Window, number: int, landing_number: int) -> None:
    """Let an operation wait for the buffer in which something lands, whose release waits for it."""
    landing, operation = window.landings[landing_number], window.operations[number & window.mask]
    pool = landing.rank * window.pools + landing.pool
    buffer = window.filled[pool * window.buffers + landing.step % window.buffers]
    # With two buffers steps 0, 2 and 4 share one: what lands at step 4 waits until step 2 is released. If nothing came
    # at step 2 the buffer still has the release of step 0.
    if buffer.step != landing.step:
        buffer.before, buffer.release, buffer.step = buffer.release, window.sizes[_RELEASES], landing.step
        window.releases[buffer.release].first = -1
        window.sizes[_RELEASES] += 1
    landing.release = buffer.release
    if operation.fills < 0:
        operation.fills = buffer.release
        window.releases[buffer.release].waits += 1
        if buffer.before >= 0:
            before, start = window.releases[buffer.before], window.starts[number & window.mask]
            if before.waits:
                start.waits += 1
                operation.next, before.first = before.first, number
            else:
                start.at_s = max(start.at_s, before.time_s)
    elif operation.fills != buffer.release:
        window.sizes[_STATUS] = UNSUPPORTED  # it fills buffers of two pools


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
            if window.operations[window.events.heap[0]].step > step:
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
            if window.operations[rank.running & window.mask].step > step:
                break
            _take_call(window)
        else:
            break
        _advance(window)
    return int(window.sizes[_STATUS])


def _take_call(window: Window) -> None:
    """End the call that ends first."""
    number = pop(window.queue)
    rank, changes = window.ranks[number], number * (window.changes_mask + 1)
    called = rank.running
    rank.running, rank.done_s = -1, rank.due
    while rank.begin < rank.end and window.changes[changes + (rank.begin & window.changes_mask)].time_s <= rank.due:
        change = window.changes[changes + (rank.begin & window.changes_mask)]
        rank.sending += change.sending
        rank.receiving += change.receiving
        rank.begin += 1
    operation = window.operations[called & window.mask]
    operation.sent_s = operation.end_s = rank.due
    _end(window, called)


def _take_flow(window: Window) -> None:
    """Begin to send a message, or end it and all others that end with it."""
    now_s, row = window.flowed_s[0], pop(window.events)
    operation, flowing = window.operations[row], window.events.operations[row]
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
        operation = window.operations[row]
        cost = window.costs[operation.cost]
        end(window.flows, window.events.operations[row].slot, now_s)
        operation.sent_s, operation.end_s = now_s, now_s + cost.latency_s
        _occupy(window, operation, operation.end_s, -cost.channels)
        _end(window, window.sizes[OLDEST] + (row - window.sizes[OLDEST] & window.mask))


def _begin_call(window: Window, number: int) -> None:
    """Begin to find when the running call of a rank ends, from its start on."""
    rank = window.ranks[number]
    rank.at, rank.now_s, rank.sends, rank.receives = rank.begin, rank.start_s, rank.sending, rank.receiving
    rank.left_s = window.costs[window.operations[rank.running & window.mask].cost].launch_s


def _call_end_s(window: Window, number: int) -> float:
    """When the running call of a rank ends beside the messages that are known so far.

    What happens from now on, which is when it was due, changes nothing before: the next time it goes on from here.
    """
    rank, changes = window.ranks[number], number * (window.changes_mask + 1)
    at, is_past = rank.at, True
    now_s, left_s, sends, receives = rank.now_s, rank.left_s, rank.sends, rank.receives
    while at < rank.end:
        change = window.changes[changes + (at & window.changes_mask)]
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


def _let_go(window: Window, number: int, time_s: float) -> None:
    """Let an operation go on after this time, if it waits for nothing else."""
    start = window.starts[number & window.mask]
    start.at_s = max(start.at_s, time_s)
    start.waits -= 1
    if not start.waits:
        window.stack[window.sizes[_STACK]] = number
        window.sizes[_STACK] += 1


def _advance(window: Window) -> None:
    """Find the times of operations that wait for nothing; calls beside which there may be messages begin to run."""
    while window.sizes[_STACK] and window.sizes[_STATUS] == DONE:
        window.sizes[_STACK] -= 1
        number = window.stack[window.sizes[_STACK]]
        row = number & window.mask
        operation = window.operations[row]
        cost = window.costs[operation.cost]
        start_s = window.starts[row].at_s
        launched_s = start_s + cost.launch_s
        if operation.is_call and cost.launch_s and window.share[0]:
            rank = window.ranks[operation.leaves]
            rank.running, rank.start_s, rank.is_stale = number, start_s, 1
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
            _occupy(window, operation, launched_s, cost.channels)
            if operation.route >= 0:
                put(window.events, row, launched_s)
                continue
            operation.sent_s = launched_s + cost.wire_bytes / cost.limit
            operation.end_s = operation.sent_s + cost.latency_s
            _occupy(window, operation, operation.end_s, -cost.channels)
        _end(window, number)


def _occupy(window: Window, operation: Any, time_s: float, channels: float) -> None:
    """Let a message take channels at both ends, or give them back if negative."""
    if channels and window.share[0]:
        ends_early = channels < 0 and operation.route >= 0
        _change(window, operation.leaves, time_s, channels, True, ends_early)
        _change(window, operation.enters, time_s, channels, False, ends_early)


def _change(window: Window, number: int, time_s: float, channels: float, sends: bool, ends_early: bool) -> None:
    """Note that the channels of a rank change; `ends_early`: it was not known when those of a message come back."""
    rank, changes = window.ranks[number], number * (window.changes_mask + 1)
    at = rank.end
    rank.end += 1
    # Changes come almost in the order of time: the new one is sifted down from the end.
    while at > rank.begin and window.changes[changes + (at - 1 & window.changes_mask)].time_s > time_s:
        before = window.changes[changes + (at - 1 & window.changes_mask)]
        change = window.changes[changes + (at & window.changes_mask)]
        change.time_s, change.sending, change.receiving = before.time_s, before.sending, before.receiving
        at -= 1
    change = window.changes[changes + (at & window.changes_mask)]
    change.time_s = time_s
    change.sending, change.receiving = channels if sends else 0.0, 0.0 if sends else channels
    if rank.running >= 0 and time_s < rank.due:
        rank.is_stale = 1
        if at < rank.at:
            _begin_call(window, number)
        if ends_early:
            put(window.queue, number, time_s)  # it ends later than that, but earlier than it seemed to


def _end(window: Window, number: int) -> None:
    """End an operation, and release what waits for it."""
    operation = window.operations[number & window.mask]
    operation.is_done = 1
    window.sizes[OPEN] -= 1
    if not operation.is_call:
        window.ranks[operation.leaves].open -= 1
        window.ranks[operation.enters].open -= 1
    window.end_s[0] = max(window.end_s[0], operation.end_s)
    if operation.follows >= 0:
        _let_go(window, operation.follows, operation.sent_s)
    else:  # the next one of the lane, which is not tracked yet, finds the time there: the row may be gone by then
        lane = window.lanes[operation.lane]
        lane.is_sent, lane.sent_s = 1, operation.sent_s
    if operation.reads >= 0:
        _free(window, operation.reads, operation.sent_s)
    if operation.fills >= 0:
        _free(window, operation.fills, operation.end_s)
    row = operation.first
    while row >= 0:
        edge = window.edges[row]
        if edge.after >= 0:
            _let_go(window, edge.after, operation.end_s)
        else:
            _free(window, -2 - edge.after, operation.sent_s)
        following = edge.next
        edge.next, window.sizes[_UNUSED_EDGE] = window.sizes[_UNUSED_EDGE], row
        window.sizes[EDGES] -= 1
        row = following


def _free(window: Window, number: int, time_s: float) -> None:
    """End a use of a buffer; after the last one, what is to land there goes on."""
    release = window.releases[number]
    release.time_s = max(release.time_s, time_s)
    release.waits -= 1
    if not release.waits:
        waiting = release.first
        while waiting >= 0:
            _let_go(window, waiting, release.time_s)
            waiting = window.operations[waiting & window.mask].next
