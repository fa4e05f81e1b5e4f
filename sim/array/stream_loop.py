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
"""How a step ends: well; the schedule has something that this module does not derive; a table was too small; or a
message starts before something that it affects has ended already."""

SENT, ARRIVED = 0, 1
"""What a follower waits for: the last byte has left, or has arrived."""

_STATUS, _FREE_EDGE, OPEN, _COUNT, _LANDINGS, _RELEASES, _STACK, _STEP_LANDINGS = range(8)
"""Places in `Window.sizes`: the status; the first free edge; how many operations have begun to be tracked and not
ended; how many operations, landings and releases there were so far; the height of the stack; how many landings there
were before the latest step."""


class Window(NamedTuple):
    """The operations of the steps in progress; operation k is in row k modulo the number of rows, a power of 2.

    Attributes
    ----------
    operations : a table: the `number`; for how many others it `waits`; its `first` edge, or -1; whether it `is_call`
        and whether it `is_done`; its `step`; the ranks that it `leaves` and `enters`; its `cost`; `sent_s` is when its
        last byte left, and before it is done the earliest time at which it can start; `end_s`. Of a message that may
        share bandwidth the `route`, else -1; its `slot` in `flows`, or -1; and the columns of `EventQueue`.
    edges : a table: who waits `after`, for which `event`, and the `next` edge of the same operation. Number -2 - r
        stands for release r.
    releases : a table, one for each rank and step at which a buffer was filled: for how many uses it `waits`, the end
        of the latest one, `time_s`; its `first` edge; the `last` operation that uses it.
    costs : a table: `launch_s`, `wire_bytes`, the greatest rate `limit`, `latency_s`, `channels`. Of calls, `launch_s`
        is their time.
    landings : a table of what came to copies at one step: the `step`, `rank` and `block`; the message and the last call
        that brought something, `by_message` and `by_call`, or -1; the `release` of its buffer, or -1; whether the copy
        `is_away`, which is in a buffer; whether it `is_free` of calls that read it; where it `goes`; what came `first`
        and `last`; its `place` in the buffer in bytes; the `transfer` of the step that brought it, or -1.
    landing : int array (copies,), the latest landing of each copy, or -1.
    lane, call : int arrays, the last message on each lane, and the last call of each rank; or -1.
    filled : a table by rank and buffer: the latest `release` and its `step`, and the one `before` it; or -1.
    ranks : a table: the `running` call, or -1; its `start_s`; whether its end `is_stale`; `done_s`, the end of the last
        call; the channels `sending` and `receiving` then; the range of its `changes` after that, `begin` and `end`; and
        the columns of `EventQueue`.
    changes : a table (ranks * room,) of changes of channels, in the order of `time_s`: `sending`, `receiving`.
    queue : the ranks by the end of their running calls.
    events : messages that may share bandwidth by when they begin or end to flow; `instant` those that end now.
    flows : those that flow. `passes` are what each route passes, from `first_pass` of the route on.
    flowed_s : float array (1,), the time up to which rates are known.
    stack : int array, operations that wait for nothing.
    sizes : int array, see `OPEN`.
    share : float array (2,): what a channel takes of a GPU, and how many channels take something.
    end_s : float array (1,), the end of the last operation so far.
    """

    operations: Table
    edges: Table
    releases: Table
    costs: Table
    landings: Table
    landing: Int32Array
    lane: Int32Array
    call: Int32Array
    filled: Table
    ranks: Table
    changes: Table
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
        cls, ranks: int, lanes: int, blocks: int, buffers: int, fills: int, rows: int, room: int, share: FloatArray,
        flows: Flows, passes: Table, first_pass: IntArray,
    ) -> Window:  # fmt: skip
        """No operations yet; `fills`: how often buffers are filled at most; `room`: changes of channels of a rank."""
        operations = table(
            rows, number="i4", waits="i4", first="i4", is_call="i4", is_done="i4", step="i4", leaves="i4", enters="i4",
            cost="i4", sent_s="f8", end_s="f8", route="i4", slot="i4", due="f8", place="i4",
        )  # fmt: skip
        operations["is_done"], operations["number"], operations["place"] = 1, -1, -1
        edges = table(8 * rows, after="i4", event="i4", next="i4")
        edges["next"] = np.arange(1, len(edges) + 1)
        edges["next"][-1] = -1
        landings = table(
            rows, step="i4", rank="i4", block="i4", by_message="i4", by_call="i4", release="i4", is_away="i4",
            is_free="i4", goes="i4", first="i4", last="i4", transfer="i4", place="i8",
        )  # fmt: skip
        landings["rank"] = -1
        filled = table(ranks * buffers, release="i4", step="i4", before="i4")
        filled["release"] = filled["step"] = filled["before"] = -1
        of_ranks = table(
            ranks, due="f8", place="i4", running="i4", start_s="f8", is_stale="i4", done_s="f8", sending="f8",
            receiving="f8", begin="i4", end="i4",
        )  # fmt: skip
        of_ranks["place"] = of_ranks["running"] = -1
        return cls(
            operations=operations,
            edges=edges,
            releases=table(fills, waits="i4", first="i4", last="i4", time_s="f8"),
            costs=cost_table([]),
            landings=landings,
            landing=np.full(ranks * blocks, -1, dtype=np.int32),
            lane=np.full(ranks * lanes, -1, dtype=np.int32),
            call=np.full(ranks, -1, dtype=np.int32),
            filled=filled,
            ranks=of_ranks,
            changes=table(ranks * room, time_s="f8", sending="f8", receiving="f8"),
            queue=EventQueue.of(of_ranks),
            events=EventQueue.of(operations),
            instant=EventQueue.of(operations),
            flows=flows,
            passes=passes,
            first_pass=first_pass,
            flowed_s=np.zeros(1),
            stack=np.zeros(rows, dtype=np.int32),
            sizes=np.zeros(8, dtype=np.int64),
            share=share,
            end_s=np.zeros(1),
        )


def cost_table(costs: Sequence[tuple[float, ...]]) -> Table:
    """The table of costs, see `Window`."""
    rows: Table = table(len(costs), launch_s="f8", wire_bytes="f8", limit="f8", latency_s="f8", channels="f8")
    rows[:] = costs
    return rows


class Shape(NamedTuple):
    """The numbers of blocks, lanes, buffers per rank, and changes per rank."""

    blocks: int
    lanes: int
    buffers: int
    room: int


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
    bytes, -1 if it is none or a tensor of the caller. To be filled in: the landings that are `read`, or -1, and those
    that are `made`; and the `message`, the number of its first transfer.
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
    starts: IntArray, window: Window, shape: Shape,
) -> int:  # fmt: skip
    """Find what the transfers and calls from `step` on read and where arrivals land; join transfers to messages.

    `order` has room for all landings of a step, `starts` for all ranks and two more. Returns how it ended.
    """
    before = window.sizes[_LANDINGS]
    for at in range(len(bounds.moved) - 2):
        if not _find(step + at, at, bounds, moved, reads, adds, window, shape):
            return UNSUPPORTED
        # Half of the table, as the landings of the step before this batch are still needed.
        if 2 * (window.sizes[_LANDINGS] - before) > len(window.landings):
            return FULL
        first_landing = window.sizes[_STEP_LANDINGS]
        _look_ahead(at + 1, bounds, moved, reads, window, shape)
        count = window.sizes[_LANDINGS] - first_landing
        _place(window, first_landing, count, order, starts, size_bytes)
        _join(window, count, order, moved, size_bytes)
    return int(window.sizes[_STATUS])


@compilable
def _find(
    step: int, at_step: int, bounds: Bounds, moved: Moved, reads: Used, adds: Used, window: Window, shape: Shape
) -> bool:
    """Find what a step reads and where arrivals land; whether each block arrives once."""
    first, end = bounds.moved[at_step], bounds.moved[at_step + 1]
    for at in range(first, end):
        moved.read[at] = _landing(window, moved.source[at], moved.block[at], step, shape)
        moved.message[at] = at
    for at in range(bounds.reads[at_step], bounds.reads[at_step + 1]):
        reads.landing[at] = _landing(window, reads.rank[at], reads.block[at], step, shape)
    window.sizes[_STEP_LANDINGS] = window.sizes[_LANDINGS]
    for at in range(first, end):
        rank, block = moved.destination[at], moved.block[at]
        before = _latest(window, rank, block, shape)
        if before >= 0 and window.landings[before & (len(window.landings) - 1)].step == step:
            return False
        name = -1 - (moved.source[at] * shape.lanes + moved.lane[at])
        moved.made[at] = _land(window, step, rank, block, not moved.stays[at], name, at, shape)
    for at in range(bounds.adds[at_step], bounds.adds[at_step + 1]):
        rank, block = adds.rank[at], adds.block[at]
        number = _latest(window, rank, block, shape)
        if number >= 0 and window.landings[number & (len(window.landings) - 1)].step == step:
            window.landings[number & (len(window.landings) - 1)].last = adds.call[at]
        elif adds.stays[at]:
            number = -1
        else:
            number = _land(window, step, rank, block, True, adds.call[at], -1, shape)
        adds.landing[at] = number
    return True


@compilable
def _look_ahead(at_step: int, bounds: Bounds, moved: Moved, reads: Used, window: Window, shape: Shape) -> None:
    """Note of the latest landings what the step after them does with them."""
    first_landing = window.sizes[_STEP_LANDINGS]
    for at in range(bounds.reads[at_step], bounds.reads[at_step + 1]):
        number = _latest(window, reads.rank[at], reads.block[at], shape)
        if number >= first_landing:
            window.landings[number & (len(window.landings) - 1)].is_free = 0
    for at in range(bounds.moved[at_step], bounds.moved[at_step + 1]):
        number = _latest(window, moved.source[at], moved.block[at], shape)
        if number >= first_landing and window.landings[number & (len(window.landings) - 1)].goes < 0:
            goes = moved.destination[at] * shape.lanes + moved.lane[at]
            window.landings[number & (len(window.landings) - 1)].goes = goes


@compilable
def _latest(window: Window, rank: int, block: int, shape: Shape) -> int:
    """The latest landing of a copy, if it is still in the table; else -1."""
    number: int = window.landing[rank * shape.blocks + block]
    if number >= 0:
        landing = window.landings[number & (len(window.landings) - 1)]
        if landing.rank != rank or landing.block != block:
            return -1
    return number


@compilable
def _landing(window: Window, rank: int, block: int, step: int, shape: Shape) -> int:
    """The landing of a copy that is read at a step; -1 for one that is as it was at the start."""
    number: int = window.landing[rank * shape.blocks + block]
    if number >= 0:
        landing = window.landings[number & (len(window.landings) - 1)]
        # What is read later than at the next step may be grouped otherwise in its buffer, and a resident copy changes.
        if landing.rank != rank or landing.block != block or not landing.is_away or landing.step != step - 1:
            window.sizes[_STATUS] = UNSUPPORTED
    return number


@compilable
def _land(
    window: Window, step: int, rank: int, block: int, is_away: bool, name: int, transfer: int, shape: Shape
) -> int:
    number: int = window.sizes[_LANDINGS]
    window.sizes[_LANDINGS] += 1
    landing = window.landings[number & (len(window.landings) - 1)]
    landing.step, landing.rank, landing.block, landing.is_away = step, rank, block, is_away
    landing.by_message = landing.by_call = landing.release = landing.goes = -1
    landing.is_free, landing.first, landing.last, landing.transfer = 1, name, name, transfer
    window.landing[rank * shape.blocks + block] = number
    return number


@compilable
def _place(window: Window, first: int, count: int, order: IntArray, starts: IntArray, size_bytes: IntArray) -> None:
    """Put the landings of a step in the order in which they lie in the buffer of each rank, ranks in ascending order.

    The order is that of `tasp_lab.schedule.buffer_layout`.
    """
    mask = len(window.landings) - 1
    for at in range(len(starts)):
        starts[at] = 0
    for number in range(first, first + count):
        starts[window.landings[number & mask].rank + 2] += 1
    for at in range(2, len(starts)):
        starts[at] += starts[at - 1]
    for number in range(first, first + count):
        rank = window.landings[number & mask].rank
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
            landing = window.landings[order[one] & mask]
            landing.place = place
            place += size_bytes[landing.block]


@compilable
def _is_before(window: Window, one: int, other: int) -> bool:
    """Whether a landing lies before an earlier one at the same rank."""
    a, b = window.landings[one & (len(window.landings) - 1)], window.landings[other & (len(window.landings) - 1)]
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
    mask, begin = len(window.landings) - 1, 0
    for at in range(1, count + 1):
        if at < count:
            before, after = window.landings[order[at - 1] & mask], window.landings[order[at] & mask]
            arrived = before.rank == after.rank and before.transfer >= 0 and after.transfer >= 0
            if arrived and _are_one(window, before.transfer, after.transfer, moved, size_bytes):
                continue
        if at - begin > 1:
            lowest = window.landings[order[begin] & mask].transfer
            for one in range(begin, at):
                lowest = min(lowest, window.landings[order[one] & mask].transfer)
            for one in range(begin, at):
                moved.message[window.landings[order[one] & mask].transfer] = lowest
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
    mask = len(window.landings) - 1
    a, b = window.landings[moved.read[one] & mask], window.landings[moved.read[other] & mask]
    return bool(a.step == b.step and a.first == b.first and a.last == b.last and b.place == a.place + size)


# ------------------------------------------------------------------------------------------------ times of steps


def issue(
    step: int, bounds: Bounds, moved: Moved, reads: Used, adds: Used, issued: Issued, window: Window, shape: Shape
) -> int:
    """Track the messages and calls from `step` on, and find the times of all that wait for no call; how it ended."""
    for at in range(len(bounds.moved) - 2):
        if not _issue(step + at, at, bounds, moved, reads, adds, issued, window, shape):
            return FULL
        _advance(window, shape)
        if window.sizes[_STATUS] != DONE:
            break
    return int(window.sizes[_STATUS])


@compilable
def _issue(
    step: int, at_step: int, bounds: Bounds, moved: Moved, reads: Used, adds: Used, issued: Issued, window: Window,
    shape: Shape,
) -> bool:  # fmt: skip
    """Track the messages and calls of a step; whether there is room for them."""
    base, first_call, first_message = window.sizes[_COUNT], bounds.calls[at_step], issued.first[at_step]
    messages, calls = issued.first[at_step + 1] - first_message, bounds.calls[at_step + 1] - first_call
    mask = len(window.operations) - 1
    for number in range(base, base + messages + calls):
        operation = window.operations[number & mask]
        if not operation.is_done:
            return False
        operation.number, operation.waits, operation.first, operation.is_done = number, 1, -1, 0
        operation.step, operation.sent_s, operation.route, operation.slot = step, 0.0, -1, -1
        if number < base + messages:
            at = first_message + number - base
            operation.is_call, operation.cost, operation.route = 0, issued.cost[at], issued.route[at]
            operation.leaves, operation.enters = issued.source[at], issued.destination[at]
            lane = issued.source[at] * shape.lanes + issued.lane[at]
            _wait(window, number, window.lane[lane], SENT)
            window.lane[lane] = number
        else:
            at = first_call + number - base - messages
            operation.is_call, operation.cost = 1, issued.call_cost[at]
            operation.leaves = operation.enters = issued.rank[at]
            _wait(window, number, window.call[issued.rank[at]], ARRIVED)
            window.call[issued.rank[at]] = number
    window.sizes[_COUNT] += messages + calls
    window.sizes[OPEN] += messages + calls
    to_message, to_call = base - first_message, base + messages - first_call
    for at in range(bounds.moved[at_step], bounds.moved[at_step + 1]):
        number = to_message + issued.message[at]
        _read(window, number, moved.read[at])
        window.landings[moved.made[at] & (len(window.landings) - 1)].by_message = number
        _fill(window, number, moved.made[at], shape)
    for at in range(bounds.reads[at_step], bounds.reads[at_step + 1]):
        _read(window, to_call + reads.call[at], reads.landing[at])
    for at in range(bounds.adds[at_step], bounds.adds[at_step + 1]):
        if adds.landing[at] >= 0:
            number = to_call + adds.call[at]
            window.landings[adds.landing[at] & (len(window.landings) - 1)].by_call = number
            if not adds.stays[at]:
                _fill(window, number, adds.landing[at], shape)
    for number in range(base, base + messages + calls):
        _release(window, number & mask)
    return True


@compilable
def _wait(window: Window, number: int, before: int, event: int) -> None:
    """Let an operation wait for another one, if there is one."""
    if before < 0:
        return
    mask = len(window.operations) - 1
    operation, other = window.operations[number & mask], window.operations[before & mask]
    if other.number != before:
        window.sizes[_STATUS] = FULL
    elif other.is_done:
        operation.sent_s = max(operation.sent_s, other.sent_s if event == SENT else other.end_s)
    else:
        operation.waits += 1
        other.first = _edge(window, number, event, other.first)


@compilable
def _edge(window: Window, after: int, event: int, following: int) -> int:
    """A new edge, in front of a list; returns its number."""
    number: int = window.sizes[_FREE_EDGE]
    edge = window.edges[number]
    if edge.next < 0:
        window.sizes[_STATUS] = FULL
        return following
    window.sizes[_FREE_EDGE] = edge.next
    edge.after, edge.event, edge.next = after, event, following
    return number


@compilable
def _read(window: Window, number: int, landing_number: int) -> None:
    """Let an operation wait for a copy that it reads, and its buffer for the operation."""
    if landing_number >= 0:
        landing = window.landings[landing_number & (len(window.landings) - 1)]
        _wait(window, number, landing.by_message, ARRIVED)
        _wait(window, number, landing.by_call, ARRIVED)
        _use(window, number, landing.release, SENT)


@compilable
def _use(window: Window, number: int, release_number: int, event: int) -> bool:
    """Let the release of a buffer wait for an operation; returns whether it did not yet."""
    release = window.releases[release_number]
    if release.last == number:
        return False
    release.last = number
    release.waits += 1
    operation = window.operations[number & (len(window.operations) - 1)]
    operation.first = _edge(window, -2 - release_number, event, operation.first)
    return True


@compilable
def _fill(window: Window, number: int, landing_number: int, shape: Shape) -> None:
    """Let an operation wait for the buffer in which something lands, whose release waits for it."""
    landing = window.landings[landing_number & (len(window.landings) - 1)]
    buffer = window.filled[landing.rank * shape.buffers + landing.step % shape.buffers]
    if buffer.step != landing.step:
        buffer.before, buffer.release, buffer.step = buffer.release, window.sizes[_RELEASES], landing.step
        release = window.releases[buffer.release]
        release.first = release.last = -1
        window.sizes[_RELEASES] += 1
    landing.release = buffer.release
    if _use(window, number, buffer.release, ARRIVED) and buffer.before >= 0:
        before, operation = window.releases[buffer.before], window.operations[number & (len(window.operations) - 1)]
        if before.waits:
            operation.waits += 1
            before.first = _edge(window, number, ARRIVED, before.first)
        else:
            operation.sent_s = max(operation.sent_s, before.time_s)


def run_events(step: int, window: Window, shape: Shape) -> int:
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
            _take_flow(window, shape)
        elif window.queue.size[0]:
            number = window.queue.heap[0]
            rank = window.ranks[number]
            if rank.is_stale:
                rank.is_stale = 0
                put(window.queue, number, _call_end_s(window, number, shape))
                continue
            if window.operations[rank.running & (len(window.operations) - 1)].step > step:
                break
            _take_call(window, shape)
        else:
            break
        _advance(window, shape)
    return int(window.sizes[_STATUS])


@compilable
def _take_call(window: Window, shape: Shape) -> None:
    """End the call that ends first."""
    number = pop(window.queue)
    rank, first = window.ranks[number], number * shape.room
    operation = window.operations[rank.running & (len(window.operations) - 1)]
    rank.running, rank.done_s = -1, rank.due
    while rank.begin < rank.end and window.changes[first + rank.begin].time_s <= rank.due:
        change = window.changes[first + rank.begin]
        rank.sending += change.sending
        rank.receiving += change.receiving
        rank.begin += 1
    operation.sent_s = operation.end_s = rank.due
    _end(window, operation.number & (len(window.operations) - 1))


@compilable
def _take_flow(window: Window, shape: Shape) -> None:
    """Begin to send a message, or end it and all others that end with it."""
    now_s, row = window.flowed_s[0], pop(window.events)
    operation = window.operations[row]
    if operation.slot < 0:
        first, last = window.first_pass[operation.route], window.first_pass[operation.route + 1]
        cost = window.costs[operation.cost]
        operation.slot = begin(
            window.flows, row, window.passes, first, last, cost.limit, cost.wire_bytes, now_s
        )  # fmt: skip
        return
    put(window.instant, row, float(row))
    end_due(window.flows, operation.slot, window.instant, 0, now_s)
    while window.instant.size[0]:
        row = pop(window.instant)
        operation = window.operations[row]
        cost = window.costs[operation.cost]
        end(window.flows, operation.slot, now_s)
        operation.sent_s, operation.end_s = now_s, now_s + cost.latency_s
        _occupy(window, row, operation.end_s, -cost.channels, shape)
        _end(window, row)


@compilable
def _call_end_s(window: Window, number: int, shape: Shape) -> float:
    """When the running call of a rank ends beside the messages that are known so far."""
    rank = window.ranks[number]
    left_s: float = window.costs[window.operations[rank.running & (len(window.operations) - 1)].cost].launch_s
    now_s: float = rank.start_s
    sending, receiving = rank.sending, rank.receiving
    for at in range(number * shape.room + rank.begin, number * shape.room + rank.end):
        change = window.changes[at]
        if change.time_s > now_s:
            speed = 1.0 - min(max(sending, receiving), window.share[1]) * window.share[0]
            if left_s <= (change.time_s - now_s) * speed:
                break
            left_s -= (change.time_s - now_s) * speed
            now_s = change.time_s
        sending += change.sending
        receiving += change.receiving
    end_s: float = now_s + left_s / (1.0 - min(max(sending, receiving), window.share[1]) * window.share[0])
    return end_s


@compilable
def _release(window: Window, row: int) -> None:
    """Let an operation wait for one other less."""
    operation = window.operations[row]
    operation.waits -= 1
    if not operation.waits:
        window.stack[window.sizes[_STACK]] = row
        window.sizes[_STACK] += 1


@compilable
def _advance(window: Window, shape: Shape) -> None:
    """Find the times of operations that wait for nothing; calls beside which there may be messages begin to run."""
    while window.sizes[_STACK] and window.sizes[_STATUS] == DONE:
        window.sizes[_STACK] -= 1
        row = window.stack[window.sizes[_STACK]]
        operation = window.operations[row]
        cost = window.costs[operation.cost]
        start_s = operation.sent_s
        launched_s = start_s + cost.launch_s
        if operation.is_call and cost.launch_s and window.share[0]:
            rank = window.ranks[operation.leaves]
            rank.running, rank.start_s, rank.is_stale = operation.number, start_s, 1
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
            _occupy(window, row, launched_s, cost.channels, shape)
            if operation.route >= 0:
                put(window.events, row, launched_s)
                continue
            operation.sent_s = launched_s + cost.wire_bytes / cost.limit
            operation.end_s = operation.sent_s + cost.latency_s
            _occupy(window, row, operation.end_s, -cost.channels, shape)
        _end(window, row)


@compilable
def _occupy(window: Window, row: int, time_s: float, channels: float, shape: Shape) -> None:
    """Let a message take channels at both ends, or give them back if negative."""
    if channels and window.share[0]:
        operation = window.operations[row]
        ends_early = channels < 0 and operation.route >= 0
        _change(window, operation.leaves, time_s, channels, True, ends_early, shape)
        _change(window, operation.enters, time_s, channels, False, ends_early, shape)


@compilable
def _change(
    window: Window, number: int, time_s: float, channels: float, sends: bool, ends_early: bool, shape: Shape
) -> None:
    """Note that the channels of a rank change; `ends_early`: it was not known when those of a message come back."""
    rank, first = window.ranks[number], number * shape.room
    if rank.end == shape.room:
        if not rank.begin:
            window.sizes[_STATUS] = FULL
            return
        for at in range(rank.begin, rank.end):
            _copy(window.changes[first + at - rank.begin], window.changes[first + at])
        rank.end -= rank.begin
        rank.begin = 0
    at = first + rank.end
    rank.end += 1
    while at > first + rank.begin and window.changes[at - 1].time_s > time_s:
        _copy(window.changes[at], window.changes[at - 1])
        at -= 1
    change = window.changes[at]
    change.time_s = time_s
    change.sending, change.receiving = (channels, 0.0) if sends else (0.0, channels)
    if rank.running >= 0 and time_s < rank.due:
        rank.is_stale = 1
        if ends_early:
            put(window.queue, number, time_s)  # it ends later than that, but earlier than it seemed to


@compilable
def _copy(change: Any, other: Any) -> None:
    change.time_s, change.sending, change.receiving = other.time_s, other.sending, other.receiving


@compilable
def _end(window: Window, row: int) -> None:
    """End an operation, and release what waits for it."""
    operation = window.operations[row]
    operation.is_done = 1
    window.sizes[OPEN] -= 1
    window.end_s[0] = max(window.end_s[0], operation.end_s)
    mask, number = len(window.operations) - 1, operation.first
    while number >= 0:
        edge = window.edges[number]
        time_s = operation.sent_s if edge.event == SENT else operation.end_s
        if edge.after >= 0:
            after = window.operations[edge.after & mask]
            after.sent_s = max(after.sent_s, time_s)
            _release(window, edge.after & mask)
        else:
            release = window.releases[-2 - edge.after]
            release.time_s = max(release.time_s, time_s)
            release.waits -= 1
            if not release.waits:
                _free(window, release)
        following = edge.next
        edge.next = window.sizes[_FREE_EDGE]
        window.sizes[_FREE_EDGE] = number
        number = following


@compilable
def _free(window: Window, release: Any) -> None:
    """Free a buffer: let what is to land there go on."""
    mask, number = len(window.operations) - 1, release.first
    while number >= 0:
        edge = window.edges[number]
        after = window.operations[edge.after & mask]
        after.sent_s = max(after.sent_s, release.time_s)
        _release(window, edge.after & mask)
        following = edge.next
        edge.next = window.sizes[_FREE_EDGE]
        window.sizes[_FREE_EDGE] = number
        number = following
    release.first = -1
