"""Max-min fair sharing of constraints by flows, apart from any simulation.

A flow passes some constraints; the rates of the flows under a constraint may not exceed its capacity together.
Rates are *max-min fair* when no flow could be faster without slowing one that is not faster than itself;
equivalently, every flow has a *bottleneck*: a constraint that is full and under which no flow is faster
(Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2). Progressive filling finds them: raise all rates
together, freeze the flows of each constraint that fills up, go on with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasp_lab.quantities import Number

OWN_LIMIT = 2**62
"""The number of a flow's own limit, behind those of all constraints."""


def max_min_rates(
    flows: Sequence[Sequence[int]],
    capacity_bytes_per_s: Mapping[int, Number] | Sequence[Number],
    limits_bytes_per_s: Sequence[Number | None] = (),
) -> tuple[list[Number], list[int]]:
    """The max-min fair rate of every flow in bytes/s, and the constraint that is its bottleneck.

    Parameters
    ----------
    flows : for each flow, the constraints it passes, at least one, each once.
    capacity_bytes_per_s : the capacity by constraint.
    limits_bytes_per_s : for each flow, a limit of its own or None; may be left out where there are none. Such a limit
        is one more constraint, that of the flow alone, and is called `OWN_LIMIT`.

    Among constraints that fill up at the same moment, a flow's bottleneck is the one with the lowest number.
    Takes a number of rounds that is at most the number of constraints, each linear in the sizes given.

    Two flows meet at constraint 0, one of them is held back by constraint 1:

    >>> max_min_rates([(0,), (0, 1)], [10, 4])
    ([6.0, 4.0], [0, 1])
    >>> max_min_rates([(0,), (0,)], [10], [None, 3]) == ([7, 3], [0, OWN_LIMIT])
    True
    """
    members: dict[int, list[int]] = {}
    for flow, constraints in enumerate(flows):
        for constraint in constraints:
            members.setdefault(constraint, []).append(flow)
    left = {constraint: capacity_bytes_per_s[constraint] for constraint in sorted(members)}
    own: dict[int, int] = {}
    for flow, limit in enumerate(limits_bytes_per_s):
        if limit is not None:
            own[flow] = OWN_LIMIT + flow
            members[own[flow]], left[own[flow]] = [flow], limit
    growing = {constraint: len(members[constraint]) for constraint in left}
    rates: list[Number] = [0] * len(flows)
    bottleneck = [-1] * len(flows)
    while growing:
        level = min(left[constraint] / count for constraint, count in growing.items())
        for full in [constraint for constraint, count in growing.items() if left[constraint] / count == level]:
            for flow in members[full]:
                if bottleneck[flow] < 0:
                    rates[flow], bottleneck[flow] = level, min(full, OWN_LIMIT)
                    for constraint in (*flows[flow], *([own[flow]] if flow in own else ())):
                        left[constraint] -= level
                        growing[constraint] -= 1
        growing = {constraint: count for constraint, count in growing.items() if count}
    return rates, bottleneck
