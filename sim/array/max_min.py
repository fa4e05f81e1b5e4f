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

Where `MANY` flows pass a constraint, each that begins or ends changes all others a little, and these all others at
their other ends. So a constraint of many flows is left as it is while its group fills it but for `NEARLY`: rates are
max-min fair on a network some of whose capacities differ by that much.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sim.array.event_queue import EventQueue, first_due, pop, put
from tasp_lab.core.arrays import FloatArray, Int32Array, IntArray, Table
from tasp_lab.core.compiled import table

SAME = 1e-12
"""Relative tolerance within which rates, and times, are considered equal up to rounding."""

LIMITED, NEW = -1, -2
"""In place of a group: the flow has the rate of its own limit, or had no rate yet."""

_LEVEL = -1.0
"""In place of a rate: that of the group, its level."""

CHANGED, MOVED = range(2)
"""The numbers of changed constraints and of moved flows, in `Sharing.sizes`."""

MANY, NEARLY = 100, 1e-3
"""From so many flows on a constraint may be filled up to this share of its capacity more or less."""

_MAX_CHANGES = 16
"""After so many changes for each flow that passes a constraint, the rates that it counts are summed up afresh, lest
rounding errors add up."""


class Sharing(NamedTuple):
    """Flows, the constraints that they share, and their rates.

    Pass k of the flow in slot s is its *use* ``(s << width_bits) + k`` of a constraint.

    Most of the time goes into new levels of groups of many members. So these take no more than a sum for each other
    constraint of a member: rates of members are not kept one by one, and what is read of a use stands together. Members
    are visited in the order of `users`, in which slots are scattered: so `beside` has what all members pass in a row.

    Attributes
    ----------
    flows : a table by slot: the `limit` in bytes/s or infinity, the `group`, and the `rate`, see `rate_of`; whether it
        `is_moved`, and its group `before` the last `fill`.
    uses : a table: the `constraint`, the `count` of flows of the class that pass it, which is 0 if the flow has no such
        pass, and the `place` in `users`.
    constraints : a table: the `capacity` in bytes/s; its users are `size` entries from `first` on, first the `members`
        of its group, of `weight` flows, whose last ones have `joined` since it was balanced. `rest` is the sum of the
        rates of the others. The `level`, infinity without a group; whether it `is_changed`, and its level `before`
        that; the number of `changes` since `rest` was summed up. None of the others is faster than `fastest`, none of
        the members has a limit below `limit`: mostly that tells that no flow has to change its group.
    users : int array, the uses of each constraint.
    beside : a table as `uses`: of the user at place p, the uses of its flow are from ``p << width_bits`` on.
    width_bits : with so many bits passes of a flow are counted.
    changed, moved : int arrays, constraints and flows; the last `fill` has changed no others.
    sizes : int array; see `CHANGED`.
    queue : constraints that may not be balanced, by level.
    """

    flows: Table
    uses: Table
    constraints: Table
    users: Int32Array
    beside: Table
    width_bits: int
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
            fastest="f8",
            limit="f8",
            level="f8",
            before="f8",
            first="i4",
            size="i4",
            members="i4",
            weight="i4",
            is_changed="i4",
            joined="i4",
            changes="i4",
        )
        constraints["capacity"] = capacity_bytes_per_s
        constraints["level"] = constraints["limit"] = math.inf
        constraints["first"] = np.cumsum(most_users) - most_users
        width_bits = (width - 1).bit_length()
        queued = table(count, due="f8", place="i4")
        queued["place"] = -1
        uses = {"constraint": "i4", "count": "i4", "place": "i4"}
        return cls(
            flows=table(slots, limit="f8", rate="f8", group="i4", before="i4", is_moved="i4"),
            uses=table(slots << width_bits, **uses),
            constraints=constraints,
            users=np.zeros(int(most_users.sum()), dtype=np.int32),
            beside=table(int(most_users.sum()) << width_bits, **uses),
            width_bits=width_bits,
            changed=np.zeros(count, dtype=np.int32),
            moved=np.zeros(slots, dtype=np.int32),
            sizes=np.zeros(2, dtype=np.int64),
            queue=EventQueue.of(queued),
        )


def join(sharing: Sharing, slot: int, passes: Table, first_pass: int, end_pass: int, limit: float) -> None:
    """Add a flow with the passes from `first_pass` to `end_pass` in a table of `constraint` and `count`."""
    flow = sharing.flows[slot]
    flow.limit, flow.rate, flow.group = limit, 0.0, LIMITED
    lowest = limit
    for use in range(slot << sharing.width_bits, (slot + 1) << sharing.width_bits):
        sharing.uses[use].count = 0
    for at in range(end_pass - first_pass):
        number, use = passes[first_pass + at].constraint, (slot << sharing.width_bits) + at
        one, constraint = sharing.uses[use], sharing.constraints[number]
        one.constraint, one.count = number, passes[first_pass + at].count
        one.place = constraint.first + constraint.size
        sharing.users[one.place] = use
        constraint.size += 1
        level = (constraint.capacity - constraint.rest) / (constraint.weight + one.count)
        level = min(level, constraint.level)  # see `_balance`: a group that rises takes none in
        if level < lowest:
            lowest, flow.group = level, number
    first = slot << sharing.width_bits
    for use in range(first, first + end_pass - first_pass):
        for at in range(1 << sharing.width_bits):
            other = sharing.beside[(sharing.uses[use].place << sharing.width_bits) + at]
            other.constraint, other.count = sharing.uses[first + at].constraint, sharing.uses[first + at].count
    if flow.group == LIMITED:
        flow.rate = limit
        _raise(sharing, sharing.uses, first, LIMITED, limit, limit)
    else:
        _enter(sharing, slot)
    _note_move(sharing, slot, NEW)


def leave(sharing: Sharing, slot: int) -> None:
    """Remove a flow."""
    flow, rate = sharing.flows[slot], rate_of(sharing, slot)
    for use in range(slot << sharing.width_bits, (slot + 1) << sharing.width_bits):
        one = sharing.uses[use]
        if one.count:
            constraint = sharing.constraints[one.constraint]
            if one.constraint == flow.group:
                _dismiss(sharing, use)
            constraint.rest -= one.count * rate
            constraint.size -= 1
            _swap(sharing, one.place, constraint.first + constraint.size)
            _change(sharing, one.constraint, rate)


def rate_of(sharing: Sharing, slot: int) -> float:
    """The rate of a flow in bytes/s: the level of its group, but that before if it joined the group since."""
    flow = sharing.flows[slot]
    rate: float = flow.rate if flow.rate != _LEVEL else sharing.constraints[flow.group].level
    return rate


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
        if constraint.changes > _MAX_CHANGES * constraint.size or constraint.members == constraint.size:
            constraint.rest, constraint.changes = 0.0, 0
            for place in range(constraint.first + constraint.members, constraint.first + constraint.size):
                use = sharing.users[place]
                constraint.rest += sharing.uses[use].count * rate_of(sharing, use >> sharing.width_bits)


def accept(sharing: Sharing) -> None:
    """Forget what has changed."""
    for at in range(sharing.sizes[CHANGED]):
        sharing.constraints[sharing.changed[at]].is_changed = False
    for at in range(sharing.sizes[MOVED]):
        sharing.flows[sharing.moved[at]].is_moved = False
    sharing.sizes[CHANGED] = sharing.sizes[MOVED] = 0


def _balance(sharing: Sharing, number: int) -> None:
    """Balance a constraint: find its group and its level, given the rates and the levels of others."""
    constraint = sharing.constraints[number]
    before, level = constraint.level, _level(constraint)
    if not constraint.members and constraint.rest > constraint.capacity * (1 + SAME):
        _take_in(sharing, number, _fastest(sharing, number) * (1 - SAME))
        level = _level(constraint)
    if before * (1 - SAME) <= level <= before * (1 + SAME):
        level = before
    is_rising = level > before or constraint.joined > 0
    if level < before and _take_in(sharing, number, level * (1 + SAME)):
        level, is_rising = _level(constraint), True
    slowest = _set_level(sharing, number, level)
    while is_rising and slowest < level * (1 - SAME) and _send_off(sharing, number, level * (1 - SAME)):
        level = _level(constraint)
        slowest = _set_level(sharing, number, level)


def _set_level(sharing: Sharing, number: int, level: float) -> float:
    """Set the level of a group; if it is another one, returns one that no other group of a member is slower than."""
    constraint = sharing.constraints[number]
    slowest: float = constraint.limit
    joined = constraint.first + constraint.members - constraint.joined
    if level != constraint.level:
        for at in range(constraint.first, joined):
            more = level - constraint.level
            slowest = min(slowest, _raise(sharing, sharing.beside, at << sharing.width_bits, number, more, level))
    for at in range(joined, constraint.first + constraint.members):
        slot = sharing.users[at] >> sharing.width_bits
        more = level - sharing.flows[slot].rate
        slowest = min(slowest, _raise(sharing, sharing.beside, at << sharing.width_bits, number, more, level))
        sharing.flows[slot].rate = _LEVEL
    constraint.level, constraint.joined = level, 0
    return slowest


def _level(constraint: Any) -> float:
    """The rate at which the group of a constraint fills it; infinity without a group."""
    level: float = (constraint.capacity - constraint.rest) / constraint.weight if constraint.members else math.inf
    return level


def _fastest(sharing: Sharing, number: int) -> float:
    """The rate of the fastest flow that passes a constraint."""
    constraint, fastest = sharing.constraints[number], 0.0
    for at in range(constraint.first, constraint.first + constraint.size):
        fastest = max(fastest, rate_of(sharing, sharing.users[at] >> sharing.width_bits))
    return fastest


def _take_in(sharing: Sharing, number: int, level: float) -> bool:
    """Take the flows into the group of a constraint that are faster than a level; whether there are any."""
    constraint, taken = sharing.constraints[number], False
    if constraint.fastest > level:
        constraint.fastest = 0.0
        for at in range(constraint.first + constraint.members, constraint.first + constraint.size):
            slot = sharing.users[at] >> sharing.width_bits
            rate = rate_of(sharing, slot)
            if rate > level:
                _move(sharing, slot, number)
                taken = True
            else:
                constraint.fastest = max(constraint.fastest, rate)
    return taken


def _send_off(sharing: Sharing, number: int, level: float) -> bool:
    """Send flows of the group of a constraint to groups that are slower than a level; whether there are any."""
    constraint, sent_off = sharing.constraints[number], False
    constraint.limit, at = math.inf, constraint.first
    while at < constraint.first + constraint.members:
        slot = sharing.users[at] >> sharing.width_bits
        lowest, group = sharing.flows[slot].limit, LIMITED
        for use in range(slot << sharing.width_bits, (slot + 1) << sharing.width_bits):
            other = sharing.uses[use].constraint
            if sharing.uses[use].count and other != number and sharing.constraints[other].level < lowest:
                lowest, group = sharing.constraints[other].level, other
        if lowest < level:
            _move(sharing, slot, group)
            more = lowest - sharing.flows[slot].rate
            _raise(sharing, sharing.uses, slot << sharing.width_bits, group, more, lowest)
            sharing.flows[slot].rate = lowest
            sent_off = True
        else:
            constraint.limit = min(constraint.limit, sharing.flows[slot].limit)
            at += 1
    return sent_off


def _move(sharing: Sharing, slot: int, group: int) -> None:
    """Take a flow from its group to another one, at its rate."""
    flow = sharing.flows[slot]
    before = flow.group
    if before != LIMITED:
        for use in range(slot << sharing.width_bits, (slot + 1) << sharing.width_bits):
            if sharing.uses[use].count and sharing.uses[use].constraint == before:
                _dismiss(sharing, use)
        _change(sharing, before, flow.rate)
    _note_move(sharing, slot, before)
    flow.group = group
    if group != LIMITED:
        _enter(sharing, slot)


def _note_move(sharing: Sharing, slot: int, before: int) -> None:
    flow = sharing.flows[slot]
    if not flow.is_moved:
        flow.is_moved, flow.before = True, before
        sharing.moved[sharing.sizes[MOVED]] = slot
        sharing.sizes[MOVED] += 1


def _enter(sharing: Sharing, slot: int) -> None:
    """Let a flow join its group, at its rate."""
    flow = sharing.flows[slot]
    for use in range(slot << sharing.width_bits, (slot + 1) << sharing.width_bits):
        one = sharing.uses[use]
        if one.count and one.constraint == flow.group:
            constraint = sharing.constraints[one.constraint]
            constraint.rest -= one.count * flow.rate
            constraint.weight += one.count
            constraint.limit = min(constraint.limit, flow.limit)
            _swap(sharing, one.place, constraint.first + constraint.members)
            constraint.members += 1
            constraint.joined += 1
    _change(sharing, flow.group, flow.rate)


def _dismiss(sharing: Sharing, use: int) -> None:
    """Let a flow be none of the group of a constraint any more, at its rate."""
    one, slot = sharing.uses[use], use >> sharing.width_bits
    constraint = sharing.constraints[one.constraint]
    sharing.flows[slot].rate = rate_of(sharing, slot)
    joined = constraint.first + constraint.members - constraint.joined
    if one.place < joined:
        _swap(sharing, one.place, joined - 1)
    else:
        constraint.joined -= 1
    constraint.members -= 1
    _swap(sharing, one.place, constraint.first + constraint.members)
    constraint.weight -= one.count
    constraint.rest += one.count * sharing.flows[slot].rate
    constraint.fastest = max(constraint.fastest, sharing.flows[slot].rate)


def _raise(sharing: Sharing, uses: Table, first: int, group: int, more: float, rate: float) -> float:
    """Count a higher rate in the constraints that a flow passes but that of its group; returns their lowest level.

    The uses of the flow are from row `first` on, of `Sharing.uses` or `Sharing.beside`.
    """
    lowest = math.inf
    for use in range(first, first + (1 << sharing.width_bits)):
        one = uses[use]
        if one.count and one.constraint != group:
            constraint = sharing.constraints[one.constraint]
            constraint.rest += one.count * more
            constraint.fastest = max(constraint.fastest, rate)
            lowest = min(lowest, constraint.level)
            if sharing.queue.operations[one.constraint].place < 0 and not _is_nearly_filled(constraint):
                _change(sharing, one.constraint, rate)
    return lowest


def _is_nearly_filled(constraint: Any) -> bool:
    """Whether a constraint of many flows may stay as it is, whose group has a level."""
    if constraint.size < MANY or not constraint.members or constraint.joined:
        return False
    room, slack = constraint.capacity - constraint.rest, constraint.capacity * NEARLY
    is_filled = room - slack <= constraint.weight * constraint.level <= room + slack
    return bool(is_filled and constraint.fastest <= constraint.level * (1 + NEARLY))


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


def _swap(sharing: Sharing, place: int, other: int) -> None:
    users, uses = sharing.users, sharing.uses
    users[place], users[other] = users[other], users[place]
    uses[users[place]].place = place
    uses[users[other]].place = other
    for at in range(1 << sharing.width_bits):
        one, another = (
            sharing.beside[(place << sharing.width_bits) + at],
            sharing.beside[(other << sharing.width_bits) + at],
        )
        one.constraint, another.constraint = another.constraint, one.constraint
        one.count, another.count = another.count, one.count
