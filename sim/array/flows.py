"""Classes of flows in progress: how much they have moved, when they end, and what bounds them.

A flow in progress has a *slot*. All flows of a group (`sim.array.max_min`) have the same rate, so they move the same
number of bytes in any time. The *clock* of a constraint reads how many bytes each flow of its group has moved, and a
flow ends at a reading that stays the same while it is in the group. So a new rate of a group costs no more than moving
the end of its earliest flow, the only one in the queue of events.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sim.array.event_queue import EventQueue, put, remove
from sim.array.max_min import CHANGED, LIMITED, MOVED, NEW, SAME, Sharing, accept, fill, join, leave, rate_of
from tasp_lab.core.arrays import Int32Array, IntArray, Table
from tasp_lab.core.compiled import table


class Flows(NamedTuple):
    """All flows in progress.

    Attributes
    ----------
    sharing : what they share, and their rates.
    progress : a table by slot: the `number` of the operation; the reading of its group's clock at its `end`; if it is
        limited, its bytes left at `since_s`. The `bottlenecks` since `bound_s`, and `last_bound`, its latest row in the
        log, or -1.
    clocks : a table by constraint: the `reading` at `since_s`, and the slot of the `earliest` flow to end, or -1.
    free : slots without a flow.
    sizes : int array; see `_FREE`.
    log : a table of what bounded operations: the `number`, the `bottlenecks` and for how many `seconds`. Empty if this
        is not recorded.
    """

    sharing: Sharing
    progress: Table
    clocks: Table
    free: Int32Array
    sizes: IntArray
    log: Table

    @classmethod
    def of(cls, sharing: Sharing, log_rows: int) -> Flows:
        """No flows yet; `log_rows`: the room in the log, 0 to keep none."""
        slots = len(sharing.flows)
        progress = table(slots, number="i4", last_bound="i4", end="f8", since_s="f8", bottlenecks="i8", bound_s="f8")
        clocks = table(len(sharing.constraints), reading="f8", since_s="f8", earliest="i4")
        clocks["earliest"] = -1
        free = np.arange(slots, dtype=np.int32)
        return cls(sharing, progress, clocks, free, np.array([slots, 0]), log_table(log_rows))


_TIED = 10 * SAME
"""Relative tolerance within which a constraint is full, and a flow as fast as another: rates may be off by `SAME`."""

_FREE, LOGGED = range(2)
"""The number of free slots, and of rows of the log."""


def log_table(rows: int) -> Table:
    """A log with room for so many rows."""
    log: Table = table(rows, number="i4", bottlenecks="i8", seconds="f8")
    return log


def begin(
    flows: Flows,
    number: int,
    passes: Table,
    first_pass: int,
    end_pass: int,
    limit: float,
    wire_bytes: float,
    now_s: float,
) -> int:
    """Begin the flow of an operation, with some of the passes and a limit in bytes/s; returns its slot."""
    flows.sizes[_FREE] -= 1
    assert flows.sizes[_FREE] >= 0, "a lane has one flow at a time"
    slot: int = flows.free[flows.sizes[_FREE]]
    progress = flows.progress[slot]
    progress.number, progress.end = number, wire_bytes
    progress.bottlenecks, progress.bound_s, progress.last_bound = 0, now_s, -1
    join(flows.sharing, slot, passes, first_pass, end_pass, limit)
    return slot


def end(flows: Flows, slot: int, now_s: float) -> None:
    """End a flow that has sent its last byte."""
    _log(flows, slot, now_s)
    group = flows.sharing.flows[slot].group
    if group != LIMITED and flows.clocks[group].earliest == slot:
        flows.clocks[group].earliest = -1
    leave(flows.sharing, slot)
    flows.free[flows.sizes[_FREE]] = slot
    flows.sizes[_FREE] += 1


def end_due(flows: Flows, slot: int, instant: EventQueue, offset: int, now_s: float) -> None:
    """Put the flows into a queue that are in the same group and end now, too; in the order of numbers from `offset`."""
    group = flows.sharing.flows[slot].group
    if group != LIMITED:
        constraint = flows.sharing.constraints[group]
        reading = _reading(flows, group, constraint.level, now_s * (1 + SAME))
        for at in range(constraint.first, constraint.first + constraint.members):
            other = flows.sharing.users[at] >> flows.sharing.width_bits
            is_new = flows.sharing.flows[other].is_moved  # its end is no reading of the clock before `settle`
            if other != slot and not is_new and flows.progress[other].end <= reading:
                put(instant, flows.progress[other].number, float(offset + flows.progress[other].number))


def settle(flows: Flows, queue: EventQueue, now_s: float) -> None:
    """Update the rates after flows began or ended, and put the ends of the affected groups into the queue."""
    sharing = flows.sharing
    if not sharing.sizes[CHANGED] + sharing.sizes[MOVED]:
        return
    fill(sharing)
    for at in range(sharing.sizes[MOVED]):
        _move(flows, queue, sharing.moved[at], now_s)
    for at in range(sharing.sizes[CHANGED]):
        number = sharing.changed[at]
        constraint, clock = sharing.constraints[number], flows.clocks[number]
        if constraint.level != constraint.before:
            # Until now flows have moved at the level before: ends are readings, so only the clock has to know.
            clock.reading, clock.since_s = _reading(flows, number, constraint.before, now_s), now_s
        if constraint.members:
            if clock.earliest < 0:
                clock.earliest = _earliest(flows, number)
            progress = flows.progress[clock.earliest]
            left = progress.end - clock.reading
            put(queue, progress.number, max(now_s, clock.since_s + left / constraint.level))
        else:
            clock.reading = 0.0
        if len(flows.log):
            _note_bottlenecks(flows, number, now_s)
    accept(sharing)


def _reading(flows: Flows, number: int, level: float, now_s: float) -> float:
    """The clock of a constraint whose group has had this level; infinity: there was no group."""
    clock = flows.clocks[number]
    reading: float = clock.reading
    if level < math.inf:
        reading += level * (now_s - clock.since_s)
    return reading


def _move(flows: Flows, queue: EventQueue, slot: int, now_s: float) -> None:
    """Take a flow from its group before to its group now."""
    flow, progress = flows.sharing.flows[slot], flows.progress[slot]
    if flow.before == flow.group:
        return
    left = progress.end
    if flow.before == LIMITED:
        left -= flow.limit * (now_s - progress.since_s)
    elif flow.before != NEW:
        left -= _reading(flows, flow.before, flows.sharing.constraints[flow.before].before, now_s)
        if flows.clocks[flow.before].earliest == slot:
            flows.clocks[flow.before].earliest = -1
    if queue.operations[progress.number].place >= 0:
        remove(queue, progress.number)
    progress.end, progress.since_s = left, now_s
    if flow.group == LIMITED:
        put(queue, progress.number, max(now_s, now_s + left / flow.limit))
    else:
        progress.end += _reading(flows, flow.group, flows.sharing.constraints[flow.group].before, now_s)
        earliest = flows.clocks[flow.group].earliest
        if earliest >= 0 and progress.end < flows.progress[earliest].end:
            if queue.operations[flows.progress[earliest].number].place >= 0:
                remove(queue, flows.progress[earliest].number)
            flows.clocks[flow.group].earliest = slot


def _earliest(flows: Flows, number: int) -> int:
    """The flow of a group that ends first."""
    constraint, earliest = flows.sharing.constraints[number], -1
    for at in range(constraint.first, constraint.first + constraint.members):
        slot = flows.sharing.users[at] >> flows.sharing.width_bits
        if earliest < 0 or flows.progress[slot].end < flows.progress[earliest].end:
            earliest = slot
    return earliest


def _note_bottlenecks(flows: Flows, number: int, now_s: float) -> None:
    """Record of which flows a constraint is a bottleneck: it is full, and no flow there is faster."""
    sharing, constraint = flows.sharing, flows.sharing.constraints[number]
    fastest = constraint.level if constraint.members else 0.0
    is_full = constraint.members > 0 or constraint.rest >= constraint.capacity * (1 - _TIED)
    if is_full and not constraint.members:
        for at in range(constraint.first, constraint.first + constraint.size):
            fastest = max(fastest, rate_of(sharing, sharing.users[at] >> sharing.width_bits))
    for at in range(constraint.first, constraint.first + constraint.size):
        slot = sharing.users[at] >> sharing.width_bits
        bit = 1 << sharing.users[at] - (slot << sharing.width_bits)
        is_bottleneck = is_full and rate_of(sharing, slot) >= fastest * (1 - _TIED)
        if (flows.progress[slot].bottlenecks & bit != 0) != is_bottleneck:
            _log(flows, slot, now_s)
            flows.progress[slot].bottlenecks ^= bit


def _log(flows: Flows, slot: int, now_s: float) -> None:
    """Record for how long a flow has had its bottlenecks."""
    flow = flows.progress[slot]
    elapsed_s = now_s - flow.bound_s
    if elapsed_s > 0 and len(flows.log):
        if flow.last_bound >= 0 and flows.log[flow.last_bound].bottlenecks == flow.bottlenecks:
            flows.log[flow.last_bound].seconds += elapsed_s
        else:
            flow.last_bound = flows.sizes[LOGGED]
            row = flows.log[flow.last_bound]
            row.number, row.bottlenecks, row.seconds = flow.number, flow.bottlenecks, elapsed_s
            flows.sizes[LOGGED] += 1
    flow.bound_s = now_s
