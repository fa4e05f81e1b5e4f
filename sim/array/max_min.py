"""Max-min fair rates of classes of flows that come and go, the counterpart of `sim.max_min` for single flows.

Classes are those of `sim.array.symmetry`: each constraint of a class is passed by equally many flows of each class.
Progressive filling raises all rates together, so the constraints of a class saturate together.

A flow belongs to the *group* of its bottleneck: a full constraint through which no flow is faster, whose *level* is the
rate of its group, or the flow's own limit. A constraint is *balanced* if its group, at its level, and the other flows
that pass it, at their rates, fill it; if none of these is faster; and if no flow of its group would be slower in
another group. If all constraints are balanced, rates are max-min fair, since every flow has a bottleneck.

`fill` balances only what is not: the constraints of flows that joined or left, then those that flows pass whose rates
have changed, those of low levels first. So a constraint that no change reaches is never looked at. Balancing one by
one, in any order, comes to an end: the constraint of the lowest level has that level once it is balanced after all
others, and keeps it; then the next one (Charny, Clark & Jain, Congestion control with explicit rate indication, ICC
1995).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sim.array.event_queue import EventQueue, first_due, pop, put
from tasp_lab.core.arrays import FloatArray, Int32Array, IntArray, Table
from tasp_lab.core.compiled import compilable, table

SAME = 1e-12
"""Relative tolerance within which rates, and times, are considered equal up to rounding."""

LIMITED, NEW = -1, -2
"""In place of a group: the flow has the rate of its own limit, or had no rate yet."""

CHANGED, MOVED = range(2)
"""The numbers of changed constraints and of moved flows, in `Sharing.sizes`."""

_MAX_CHANGES = 16
"""The rates that a constraint counts are summed up afresh after so many changes, lest rounding errors add up."""


class Sharing(NamedTuple):
    """Flows, the constraints that they share, and their rates.

    Pass k of the flow in slot s is its *use* ``s * width + k`` of a constraint.

    Attributes
    ----------
    flows : a table by slot: the number of `passes`, the `limit` in bytes/s or infinity, the `rate` and the `group`;
        whether it `is_moved`, and its group `before` the last `fill`.
    uses : a table: the `slot`, the `constraint`, the `count` of flows of the class that pass it, the `place` in
        `users`.
    constraints : a table: the `capacity` in bytes/s; its users are `size` entries from `first` on, first the `members`
        of its group, of `weight` flows. `rest` is the sum of the rates of the others. The `level`, infinity without a
        group; whether it `is_changed`, and its level `before` that; whether it `is_joined` by new flows; the number of
        `changes` since `rest` was summed up.
    users : int array, the uses of each constraint.
    width : the maximum number of passes of a flow.
    changed, moved : int arrays, constraints and flows; the last `fill` has changed no others.
    sizes : int array; see `CHANGED`.
    queue : constraints that may not be balanced, by level.
    """

    flows: Table
    uses: Table
    constraints: Table
    users: Int32Array
    width: int
    changed: Int32Array
    moved: Int32Array
    sizes: IntArray
    queue: EventQueue

    @classmethod
    def of(cls, slots: int, width: int, most_users: IntArray, capacity_bytes_per_s: FloatArray) -> Sharing:
        """No flows, with room for so many, and for so many users of each constraint."""
        count = len(capacity_bytes_per_s)
        constraints = table(
            count,
            capacity="f8",
            rest="f8",
            level="f8",
            before="f8",
            first="i4",
            size="i4",
            members="i4",
            weight="i4",
            is_changed="i4",
            is_joined="i4",
            changes="i4",
        )
        constraints["capacity"], constraints["level"] = capacity_bytes_per_s, math.inf
        constraints["first"] = np.cumsum(most_users) - most_users
        queued = table(count, due="f8", place="i4")
        queued["place"] = -1
        return cls(
            flows=table(slots, limit="f8", rate="f8", passes="i4", group="i4", before="i4", is_moved="i4"),
            uses=table(slots * width, slot="u4", constraint="u4", count="f8", place="u4"),
            constraints=constraints,
            users=np.zeros(int(most_users.sum()), dtype=np.int32),
            width=width,
            changed=np.zeros(count, dtype=np.int32),
            moved=np.zeros(slots, dtype=np.int32),
            sizes=np.zeros(2, dtype=np.int64),
            queue=EventQueue.of(queued),
        )


@compilable
def join(sharing: Sharing, slot: int, passes: Table, first_pass: int, end_pass: int, limit: float) -> None:
    """Add a flow with the passes from `first_pass` to `end_pass` in a table of `constraint` and `count`."""
    flow = sharing.flows[slot]
    flow.passes, flow.limit, flow.rate, flow.group = end_pass - first_pass, limit, 0.0, LIMITED
    lowest = limit
    for at in range(flow.passes):
        number, use = passes[first_pass + at].constraint, slot * sharing.width + at
        one, constraint = sharing.uses[use], sharing.constraints[number]
        one.slot, one.constraint, one.count = slot, number, passes[first_pass + at].count
        one.place = constraint.first + constraint.size
        sharing.users[one.place] = use
        constraint.size += 1
        level = (constraint.capacity - constraint.rest) / (constraint.weight + one.count)
        level = min(level, constraint.level)  # see `_balance`: a group that rises takes none in
        if level < lowest:
            lowest, flow.group = level, number
    if flow.group == LIMITED:
        _set_rate(sharing, slot, LIMITED, limit)
    else:
        _enter(sharing, slot)
    _note_move(sharing, slot, NEW)


@compilable
def leave(sharing: Sharing, slot: int) -> None:
    """Remove a flow."""
    flow = sharing.flows[slot]
    for use in range(slot * sharing.width, slot * sharing.width + flow.passes):
        one = sharing.uses[use]
        constraint = sharing.constraints[one.constraint]
        if one.constraint == flow.group:
            _dismiss(sharing, use)
        constraint.rest -= one.count * flow.rate
        constraint.size -= 1
        _swap(sharing.uses, sharing.users, one.place, constraint.first + constraint.size)
        _change(sharing, one.constraint, flow.rate)


@compilable
def fill(sharing: Sharing) -> None:
    """Find the rates of all flows, given those before flows joined and left."""
    queue = sharing.queue
    while queue.size[0]:
        due = first_due(queue)
        number = pop(queue)
        level = _level(sharing.constraints[number])
        if queue.size[0] and due < level < math.inf and level > first_due(queue):
            put(queue, number, level)
        else:
            _balance(sharing, number)
    for at in range(sharing.sizes[CHANGED]):
        constraint = sharing.constraints[sharing.changed[at]]
        if constraint.changes > _MAX_CHANGES or constraint.members == constraint.size:
            constraint.rest, constraint.changes = 0.0, 0
            for place in range(constraint.first + constraint.members, constraint.first + constraint.size):
                one = sharing.uses[sharing.users[place]]
                constraint.rest += one.count * sharing.flows[one.slot].rate


@compilable
def accept(sharing: Sharing) -> None:
    """Forget what has changed."""
    for at in range(sharing.sizes[CHANGED]):
        sharing.constraints[sharing.changed[at]].is_changed = False
    for at in range(sharing.sizes[MOVED]):
        sharing.flows[sharing.moved[at]].is_moved = False
    sharing.sizes[CHANGED] = sharing.sizes[MOVED] = 0


@compilable
def _balance(sharing: Sharing, number: int) -> None:
    """Balance a constraint: find its group and its level, given the rates and the levels of others."""
    constraint = sharing.constraints[number]
    before, level = constraint.level, _level(constraint)
    if not constraint.members and constraint.rest > constraint.capacity * (1 + SAME):
        _take_in(sharing, number, _fastest(sharing, number) * (1 - SAME))
        level = _level(constraint)
    if before * (1 - SAME) <= level <= before * (1 + SAME):
        level = before
    is_rising = level > before or constraint.is_joined
    if level < before and _take_in(sharing, number, level * (1 + SAME)):
        level, is_rising = _level(constraint), True
    while is_rising and constraint.members and _send_off(sharing, number, level * (1 - SAME)):
        level = _level(constraint)
    if level != before or constraint.is_joined:
        constraint.level, constraint.is_joined = level, False
        for at in range(constraint.first, constraint.first + constraint.members):
            slot = sharing.uses[sharing.users[at]].slot
            if sharing.flows[slot].rate != level:
                _set_rate(sharing, slot, number, level)


@compilable
def _level(constraint: Any) -> float:
    """The rate at which the group of a constraint fills it; infinity without a group."""
    level: float = (constraint.capacity - constraint.rest) / constraint.weight if constraint.members else math.inf
    return level


@compilable
def _fastest(sharing: Sharing, number: int) -> float:
    """The rate of the fastest flow that passes a constraint."""
    constraint, fastest = sharing.constraints[number], 0.0
    for at in range(constraint.first, constraint.first + constraint.size):
        fastest = max(fastest, sharing.flows[sharing.uses[sharing.users[at]].slot].rate)
    return fastest


@compilable
def _take_in(sharing: Sharing, number: int, level: float) -> bool:
    """Take the flows into the group of a constraint that are faster than a level; whether there are any."""
    constraint, taken = sharing.constraints[number], False
    for at in range(constraint.first + constraint.members, constraint.first + constraint.size):
        slot = sharing.uses[sharing.users[at]].slot
        if sharing.flows[slot].rate > level:
            _move(sharing, slot, number)
            taken = True
    return taken


@compilable
def _send_off(sharing: Sharing, number: int, level: float) -> bool:
    """Send flows of the group of a constraint to groups that are slower than a level; whether there are any."""
    constraint, sent_off = sharing.constraints[number], False
    at = constraint.first
    while at < constraint.first + constraint.members:
        slot = sharing.uses[sharing.users[at]].slot
        flow = sharing.flows[slot]
        lowest, group = flow.limit, LIMITED
        for use in range(slot * sharing.width, slot * sharing.width + flow.passes):
            other = sharing.uses[use].constraint
            if other != number and sharing.constraints[other].level < lowest:
                lowest, group = sharing.constraints[other].level, other
        if lowest < level:
            _move(sharing, slot, group)
            _set_rate(sharing, slot, group, lowest)
            sent_off = True
        else:
            at += 1
    return sent_off


@compilable
def _move(sharing: Sharing, slot: int, group: int) -> None:
    """Take a flow from its group to another one, at its rate."""
    flow = sharing.flows[slot]
    if flow.group != LIMITED:
        for use in range(slot * sharing.width, slot * sharing.width + flow.passes):
            if sharing.uses[use].constraint == flow.group:
                _dismiss(sharing, use)
        _change(sharing, flow.group, flow.rate)
    _note_move(sharing, slot, flow.group)
    flow.group = group
    if group != LIMITED:
        _enter(sharing, slot)


@compilable
def _note_move(sharing: Sharing, slot: int, before: int) -> None:
    flow = sharing.flows[slot]
    if not flow.is_moved:
        flow.is_moved, flow.before = True, before
        sharing.moved[sharing.sizes[MOVED]] = slot
        sharing.sizes[MOVED] += 1


@compilable
def _enter(sharing: Sharing, slot: int) -> None:
    """Let a flow be one of its group."""
    flow = sharing.flows[slot]
    for use in range(slot * sharing.width, slot * sharing.width + flow.passes):
        one = sharing.uses[use]
        if one.constraint == flow.group:
            constraint = sharing.constraints[one.constraint]
            constraint.rest -= one.count * flow.rate
            constraint.weight += one.count
            _swap(sharing.uses, sharing.users, one.place, constraint.first + constraint.members)
            constraint.members += 1
            constraint.is_joined = True
    _change(sharing, flow.group, flow.rate)


@compilable
def _dismiss(sharing: Sharing, use: int) -> None:
    """Let a flow be none of the group of a constraint any more, at its rate."""
    one = sharing.uses[use]
    constraint = sharing.constraints[one.constraint]
    constraint.members -= 1
    _swap(sharing.uses, sharing.users, one.place, constraint.first + constraint.members)
    constraint.weight -= one.count
    constraint.rest += one.count * sharing.flows[one.slot].rate


@compilable
def _set_rate(sharing: Sharing, slot: int, group: int, rate: float) -> None:
    """Set the rate of a flow of a group, also in the constraints that count it."""
    flow = sharing.flows[slot]
    more = rate - flow.rate
    flow.rate = rate
    for use in range(slot * sharing.width, slot * sharing.width + flow.passes):
        one = sharing.uses[use]
        if one.constraint != group:
            constraint = sharing.constraints[one.constraint]
            constraint.rest += one.count * more
            if sharing.queue.operations[one.constraint].place < 0:
                _change(sharing, one.constraint, rate)


@compilable
def _change(sharing: Sharing, number: int, rate: float) -> None:
    """Record that a constraint may not be balanced, because of a flow of this rate."""
    constraint = sharing.constraints[number]
    constraint.changes += 1
    if not constraint.is_changed:
        constraint.is_changed, constraint.before = True, constraint.level
        sharing.changed[sharing.sizes[CHANGED]] = number
        sharing.sizes[CHANGED] += 1
    if constraint.members or constraint.level < math.inf or constraint.rest > constraint.capacity * (1 + SAME):
        level = min(constraint.level, _level(constraint))
        put(sharing.queue, number, level if level < math.inf else rate)


@compilable
def _swap(uses: Table, users: Int32Array, place: int, other: int) -> None:
    users[place], users[other] = users[other], users[place]
    uses[users[place]].place = place
    uses[users[other]].place = other
