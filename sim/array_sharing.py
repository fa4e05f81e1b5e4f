"""Max-min fair rates of classes of flows: `sim.fairness` where each flow stands for many.

Classes are those of `sim.array_classes`: each constraint of a class is passed by equally many flows of each class.
Filling raises the rates of all flows together, so constraints of a class fill up together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.array_program import Way

SAME = 1e-12
"""Rates, and instants, that differ by no more than this share are the same: floats that are equal but for rounding."""


class Traffic(NamedTuple):
    """What matters of a class of flows: the constraints passed, and the most bytes/s that each flow takes."""

    way: Way
    most_bytes_per_s: float | None


class Share(NamedTuple):
    """The rate of a class of flows, and the classes of constraints that are its bottleneck; none: its own limit."""

    bytes_per_s: float
    bottlenecks: tuple[int, ...]


def fair_shares(flows: Sequence[Traffic], capacity_bytes_per_s: Sequence[float]) -> list[Share]:
    """The max-min fair share of each class of flows.

    Two classes meet in constraints 0, of which each is passed by 3 flows of the first and 1 of the second:

    >>> first, second = Traffic(((0, 3),), None), Traffic(((0, 1), (1, 1)), None)
    >>> [share.bytes_per_s for share in fair_shares([first, second], [10.0, 1.0])]
    [3.0, 1.0]
    """
    growing: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    passed = [(*traffic.way, *_own_limit(flow, traffic)) for flow, traffic in enumerate(flows)]
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
                found[flow] = Share(level, tuple([each for each, _ in flows[flow].way if each in full]))
                for constraint, count in passed[flow]:
                    left[constraint] -= level * count
                    growing[constraint] -= count
                    if not growing[constraint]:
                        emptied.add(constraint)
        for constraint in full | emptied:
            del growing[constraint]
    return [share for share in found if share is not None]


def _own_limit(flow: int, traffic: Traffic) -> Way:
    """A limit of its own is one more constraint, with a negative number."""
    return () if traffic.most_bytes_per_s is None else ((-1 - flow, 1),)
