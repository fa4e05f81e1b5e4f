"""Max-min fair sharing of constraints by flows.

A flow passes some constraints; the sum of the rates of the flows through a constraint may not exceed its capacity.
Rates are *max-min fair* if no flow could be faster without slowing a flow that is no faster than itself; equivalently,
every flow has a *bottleneck*: a saturated constraint through which no flow is faster (Bertsekas & Gallager, Data
Networks, 2nd ed., section 6.5.2). Progressive filling computes them: raise all rates together, freeze the flows of each
constraint that saturates, continue with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasp_lab.core.units import Number

OWN_LIMIT = 2**62
"""The constraint number of a flow's own limit, higher than all others."""


def max_min_rates(
    flows: Sequence[Sequence[int]],
    capacity_bytes_per_s: Mapping[int, Number] | Sequence[Number],
    limits_bytes_per_s: Sequence[Number | None] = (),
) -> tuple[list[Number], list[int]]:
    """The max-min fair rate of every flow in bytes/s, and the constraint that is its bottleneck.

    Parameters
    ----------
    flows : for each flow, the constraints it passes, one or more, each once.
    capacity_bytes_per_s : the capacity of each constraint.
    limits_bytes_per_s : for each flow, its own rate limit or None; empty for no limits. A limit acts as one more
        constraint, of this flow only, and is reported as `OWN_LIMIT`.

    If several constraints saturate simultaneously, a flow's bottleneck is the one with the lowest number.
    Takes at most as many rounds as there are constraints, each linear in the input size.

    Two flows share constraint 0; constraint 1 limits one of them:

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
    limit_of_flow: dict[int, int] = {}
    for flow, limit in enumerate(limits_bytes_per_s):
        if limit is not None:
            limit_of_flow[flow] = OWN_LIMIT + flow
            members[limit_of_flow[flow]], left[limit_of_flow[flow]] = [flow], limit
    growing = {constraint: len(members[constraint]) for constraint in left}
    rates: list[Number] = [0] * len(flows)
    bottleneck = [-1] * len(flows)
    while growing:
        level = min(left[constraint] / count for constraint, count in growing.items())
        for full in [constraint for constraint, count in growing.items() if left[constraint] / count == level]:
            for flow in members[full]:
                if bottleneck[flow] < 0:
                    rates[flow], bottleneck[flow] = level, min(full, OWN_LIMIT)
                    for constraint in (*flows[flow], *([limit_of_flow[flow]] if flow in limit_of_flow else ())):
                        left[constraint] -= level
                        growing[constraint] -= 1
        growing = {constraint: count for constraint, count in growing.items() if count}
    return rates, bottleneck
