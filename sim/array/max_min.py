"""Max-min fair rates of classes of flows, the counterpart of `sim.max_min` for single flows.

Classes are those of `sim.array.symmetry`: each constraint of a class is passed by equally many flows of each class.
Progressive filling raises all rates together, so the constraints of a class saturate together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.array.quotient import Path

SAME = 1e-12
"""Relative tolerance within which rates, and times, are considered equal up to rounding."""


class FlowDemand(NamedTuple):
    """The demand of a class of flows: the constraints passed, and the maximum bytes/s of each flow."""

    path: Path
    max_bytes_per_s: float | None


class Share(NamedTuple):
    """The rate of a class of flows, and its bottleneck classes of constraints; empty: its own limit."""

    bytes_per_s: float
    bottlenecks: tuple[int, ...]


def fair_shares(flows: Sequence[FlowDemand], capacity_bytes_per_s: Sequence[float]) -> list[Share]:
    """The max-min fair share of each class of flows.

    Each constraint of class 0 is passed by 3 flows of the first class and 1 of the second:

    >>> first, second = FlowDemand(((0, 3),), None), FlowDemand(((0, 1), (1, 1)), None)
    >>> [share.bytes_per_s for share in fair_shares([first, second], [10.0, 1.0])]
    [3.0, 1.0]
    """
    growing: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    passed = [(*traffic.path, *_own_limit(flow, traffic)) for flow, traffic in enumerate(flows)]
    for flow, passes in enumerate(passed):
        for constraint, count in passes:
            growing[constraint] = growing.get(constraint, 0) + count
            members.setdefault(constraint, []).append(flow)
    left = {each: capacity_bytes_per_s[each] for each in growing if each >= 0}
    left |= {-1 - flow: limit for flow, (_, limit) in enumerate(flows) if limit is not None}
    found: list[Share | None] = [None] * len(flows)
    while growing:
        levels = {constraint: left[constraint] / count for constraint, count in growing.items()}
        level = min(levels.values())
        full = {constraint for constraint, each in levels.items() if each <= level * (1 + SAME)}
        emptied: set[int] = set()
        for flow in [flow for constraint in full for flow in members[constraint]]:
            if found[flow] is None:
                found[flow] = Share(level, tuple([each for each, _ in flows[flow].path if each in full]))
                for constraint, count in passed[flow]:
                    left[constraint] -= level * count
                    growing[constraint] -= count
                    if not growing[constraint]:
                        emptied.add(constraint)
        for constraint in full | emptied:
            del growing[constraint]
    return [share for share in found if share is not None]


def _own_limit(flow: int, traffic: FlowDemand) -> Path:
    """The flow's own limit as one more constraint, with a negative number."""
    return () if traffic.max_bytes_per_s is None else ((-1 - flow, 1),)
