"""Classes of flows in progress: their shared constraints, rates and finish times.

A flow in progress has a row of `Sharing.flows`, its *slot*. The *uses* of a constraint, which are passes of flows, form
a linked list: use ``slot * width + k`` is pass k of the flow in that slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.array.compiled import compilable, table
from sim.array.event_queue import EventQueue, put
from sim.array.max_min import SAME, Sharing, share
from tasp_lab.arrays import Int32Array, IntArray, Table


class Flows(NamedTuple):
    """All flows in progress.

    Attributes
    ----------
    sharing : what they share; flow f is that in slot f.
    progress : a table by slot: the `number` of the operation; the `rate` in bytes/s (0: none yet) and the `bottlenecks`
        since time `since_s`, and the `bytes_left` then; `last_bound`, its latest row in the log, or -1; `seen`, the
        last round that met the flow.
    users : a table by constraint: its `first_use`, or -1; and `seen`.
    width : the maximum number of passes of a flow.
    uses : a table: the `next` and the `previous` use of the same constraint, -1 for none.
    free, begun, freed : slots without a flow; flows that began, and constraints that a flow left, since `settle`.
    component, constraints : the flows of a component, and their constraints, during `settle`.
    sizes : int array; see `_FREE`.
    log : a table of what bounded operations: the `number`, the `bottlenecks` and for how many `seconds`. Empty if this
        is not recorded.
    """

    sharing: Sharing
    progress: Table
    users: Table
    width: int
    uses: Table
    free: Int32Array
    begun: Int32Array
    freed: Int32Array
    component: Int32Array
    constraints: Int32Array
    sizes: IntArray
    log: Table

    @classmethod
    def of(cls, width: int, sharing: Sharing) -> Flows:
        """No flows yet, of at most `width` passes each."""
        slots, constraints = len(sharing.flows), len(sharing.constraints)
        free = np.arange(slots, dtype=np.int32)
        users = table(constraints, first_use="i4", seen="i8")
        users["first_use"] = -1
        by_slot, by_constraint = np.zeros(slots, dtype=np.int32), np.zeros(constraints, dtype=np.int32)
        return cls(
            sharing=sharing,
            progress=table(
                slots,
                number="i4",
                last_bound="i4",
                rate="f8",
                bottlenecks="i8",
                since_s="f8",
                bytes_left="f8",
                seen="i8",
            ),
            users=users,
            width=width,
            uses=table(slots * width, next="i4", previous="i4"),
            free=free,
            begun=by_slot,
            freed=by_constraint,
            component=by_slot.copy(),
            constraints=by_constraint.copy(),
            sizes=np.array([slots, 0, 0, 1, 0]),
            log=log_table(0),
        )


_FREE, _BEGUN, _FREED, ROUND, LOGGED = range(5)
"""Sizes of the stacks, the number of the present round, which `settle` raises at its start and at its end, and the
number of rows of the log."""


def log_table(rows: int) -> Table:
    """A log with room for so many rows."""
    log: Table = table(rows, number="i4", bottlenecks="i8", seconds="f8")
    return log


@compilable
def begin(flows: Flows, number: int, first_pass: int, end_pass: int, limit: float, wire_bytes: float) -> int:
    """Begin the flow of an operation with a limit in bytes/s; returns its slot."""
    flows.sizes[_FREE] -= 1
    assert flows.sizes[_FREE] >= 0, "a lane has one flow at a time"
    slot: int = flows.free[flows.sizes[_FREE]]
    flow, progress = flows.sharing.flows[slot], flows.progress[slot]
    flow.first_pass, flow.end_pass, flow.limit = first_pass, end_pass, limit
    progress.number, progress.bytes_left, progress.rate, progress.last_bound = number, wire_bytes, 0.0, -1
    for at in range(end_pass - first_pass):
        users, use = flows.users[flows.sharing.passes[first_pass + at].constraint], slot * flows.width + at
        flows.uses[use].next, flows.uses[use].previous = users.first_use, -1
        if users.first_use >= 0:
            flows.uses[users.first_use].previous = use
        users.first_use = use
    flows.begun[flows.sizes[_BEGUN]] = slot
    flows.sizes[_BEGUN] += 1
    return slot


@compilable
def end(flows: Flows, slot: int, now_s: float) -> None:
    """End a flow that has sent its last byte."""
    _advance(flows, slot, now_s)
    flow = flows.sharing.flows[slot]
    for at in range(flow.end_pass - flow.first_pass):
        constraint = flows.sharing.passes[flow.first_pass + at].constraint
        users, use = flows.users[constraint], flows.uses[slot * flows.width + at]
        if use.previous < 0:
            users.first_use = use.next
        else:
            flows.uses[use.previous].next = use.next
        if use.next >= 0:
            flows.uses[use.next].previous = use.previous
        if users.seen != flows.sizes[ROUND]:
            users.seen = flows.sizes[ROUND]
            flows.freed[flows.sizes[_FREED]] = constraint
            flows.sizes[_FREED] += 1
    flows.free[flows.sizes[_FREE]] = slot
    flows.sizes[_FREE] += 1


@compilable
def settle(flows: Flows, queue: EventQueue, now_s: float) -> None:
    """Update the shares affected by flows that began or ended, and put the ends of these flows into the queue.

    Shares are max-min fair if no constraint is overloaded and every flow is at its limit or has a bottleneck: a full
    constraint that no flow passes faster. So most flows come and go without an effect on other rates.
    """
    flows.sizes[ROUND] += 1
    for at in range(flows.sizes[_FREED]):
        users = flows.users[flows.freed[at]]
        is_known = users.seen == flows.sizes[ROUND] or users.first_use < 0
        if not is_known and not _release(flows, flows.freed[at], now_s):
            _update(flows, queue, users.first_use // flows.width, now_s)
    for at in range(flows.sizes[_BEGUN]):
        slot = flows.begun[at]
        if flows.progress[slot].seen != flows.sizes[ROUND] and not _join(flows, queue, slot, now_s):
            _update(flows, queue, slot, now_s)
    flows.sizes[_BEGUN], flows.sizes[_FREED] = 0, 0
    flows.sizes[ROUND] += 1


@compilable
def _release(flows: Flows, constraint: int, now_s: float) -> bool:
    """A flow has left a constraint, which is full no more. False if that was the only bottleneck of another flow."""
    use = flows.users[constraint].first_use
    while use >= 0:
        slot = use // flows.width
        flow = flows.progress[slot]
        is_limited = flow.rate >= flows.sharing.flows[slot].limit * (1 - SAME)
        if flow.rate and flow.bottlenecks == 1 << use % flows.width and not is_limited:
            return False
        use = flows.uses[use].next
    use = flows.users[constraint].first_use
    while use >= 0:
        _set_bottleneck(flows, use, False, now_s)
        use = flows.uses[use].next
    return True


@compilable
def _join(flows: Flows, queue: EventQueue, slot: int, now_s: float) -> bool:
    """Give a flow that has begun what is left of its constraints; False if that is not its fair share."""
    sharing, progress = flows.sharing, flows.progress[slot]
    flow, rate, is_bound = sharing.flows[slot], sharing.flows[slot].limit, True
    for one in range(flow.first_pass, flow.end_pass):
        passed = sharing.passes[one]
        _sum_up(flows, passed.constraint)
        left = sharing.constraints[passed.constraint].left / passed.count
        if left < rate:
            rate, is_bound = left, False
    for one in range(flow.first_pass, flow.end_pass):
        passed = sharing.passes[one]
        constraint = sharing.constraints[passed.constraint]
        constraint.is_full = constraint.left / passed.count <= rate * (1 + SAME)
        if constraint.is_full and constraint.fastest <= rate * (1 + SAME):
            is_bound = True
            if constraint.fastest >= rate * (1 - SAME):
                rate = constraint.fastest  # without the rounding of the sum
    if not is_bound or rate <= 0:
        return False
    progress.rate, progress.bottlenecks, progress.since_s = rate, 0, now_s
    for one in range(flow.first_pass, flow.end_pass):
        constraint = sharing.constraints[sharing.passes[one].constraint]
        use = flows.users[sharing.passes[one].constraint].first_use
        while constraint.is_full and use >= 0:
            if flows.progress[use // flows.width].rate >= max(rate, constraint.fastest) * (1 - SAME):
                _set_bottleneck(flows, use, True, now_s)
            use = flows.uses[use].next
    put(queue, progress.number, now_s + progress.bytes_left / rate)
    return True


@compilable
def _sum_up(flows: Flows, constraint_number: int) -> None:
    """Find what is left of a constraint, and the rate of the fastest flow that passes it."""
    constraint, use = flows.sharing.constraints[constraint_number], flows.users[constraint_number].first_use
    constraint.left, constraint.fastest = constraint.capacity, 0.0
    while use >= 0:
        slot = use // flows.width
        passed = flows.sharing.passes[flows.sharing.flows[slot].first_pass + use % flows.width]
        constraint.left -= flows.progress[slot].rate * passed.count
        constraint.fastest = max(constraint.fastest, flows.progress[slot].rate)
        use = flows.uses[use].next


@compilable
def _set_bottleneck(flows: Flows, use: int, is_bottleneck: bool, now_s: float) -> None:
    """Record that a flow with a rate has a bottleneck on its path from now on, or has it no more."""
    slot, bit = use // flows.width, 1 << use % flows.width
    flow = flows.progress[slot]
    if flow.rate and (flow.bottlenecks & bit != 0) != is_bottleneck:
        _advance(flows, slot, now_s)
        flow.bottlenecks ^= bit


@compilable
def _update(flows: Flows, queue: EventQueue, slot: int, now_s: float) -> None:
    """Update the shares of the connected component of flows, by shared constraints, that contains this one."""
    sharing, now = flows.sharing, flows.sizes[ROUND]
    flows.component[0] = slot
    flows.progress[slot].seen = now
    done, flow_count, constraint_count = 0, 1, 0
    while done < flow_count:
        flow = sharing.flows[flows.component[done]]
        done += 1
        for one in range(flow.first_pass, flow.end_pass):
            constraint = sharing.passes[one].constraint
            if flows.users[constraint].seen != now:
                flows.users[constraint].seen = now
                flows.constraints[constraint_count] = constraint
                constraint_count += 1
                use = flows.users[constraint].first_use
                while use >= 0:
                    other = use // flows.width
                    if flows.progress[other].seen != now:
                        flows.progress[other].seen = now
                        flows.component[flow_count] = other
                        flow_count += 1
                    use = flows.uses[use].next
    share(sharing, flows.component, flow_count, flows.constraints, constraint_count)
    for at in range(flow_count):
        slot = flows.component[at]
        found, progress = sharing.flows[slot], flows.progress[slot]
        if found.rate != progress.rate or found.bottlenecks != progress.bottlenecks:
            _advance(flows, slot, now_s)
            progress.rate, progress.bottlenecks = found.rate, found.bottlenecks
            put(queue, progress.number, now_s + progress.bytes_left / found.rate)


@compilable
def _advance(flows: Flows, slot: int, now_s: float) -> None:
    """Account for the bytes moved since the flow has its share, if it has one."""
    flow = flows.progress[slot]
    elapsed_s = now_s - flow.since_s
    if flow.rate and elapsed_s > 0:
        flow.bytes_left -= flow.rate * elapsed_s
        if flow.last_bound >= 0 and flows.log[flow.last_bound].bottlenecks == flow.bottlenecks:
            flows.log[flow.last_bound].seconds += elapsed_s
        elif len(flows.log):
            flow.last_bound = flows.sizes[LOGGED]
            row = flows.log[flow.last_bound]
            row.number, row.bottlenecks, row.seconds = flow.number, flow.bottlenecks, elapsed_s
            flows.sizes[LOGGED] += 1
    flow.since_s = now_s
