"""Which schedule is the fastest: measured groups of the same work, and whether predictions name it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tasp_lab.measure.accuracy.judged import WorkRow

TIE = 0.03
"""Measured times closer than this are a tie: what the same code takes twice differs by as much (USP's tables)."""


class Times(NamedTuple):
    """The least measured and the predicted time of a schedule, in seconds."""

    measured_s: float
    predicted_s: float


Group = dict[str, Times]
"""The schedules that do the same work, by name."""


def groups_of(rows: Sequence[WorkRow]) -> list[Group]:
    """The groups that are no ties: of each work that several schedules do, those rows that count."""
    found: defaultdict[tuple[object, ...], Group] = defaultdict(dict)
    for row in rows:
        if row.in_scope and row.work and row.measured_s is not None and row.predicted_s is not None:
            known = found[row.work].get(row.schedule)
            measured_s = row.measured_s if known is None else min(known.measured_s, row.measured_s)
            found[row.work][row.schedule] = Times(measured_s, row.predicted_s)
    return [group for group in found.values() if any(not is_fastest(group, name) for name in group)]


def is_fastest(group: Group, name: str) -> bool:
    """Whether a schedule was measured to be the fastest, or in a tie with it.

    >>> group = {"ring": Times(1.2, 1.0), "ulysses": Times(1.0, 1.1), "usp": Times(1.02, 1.3)}
    >>> [is_fastest(group, name) for name in group]
    [False, True, True]
    """
    return group[name].measured_s <= (1 + TIE) * min(times.measured_s for times in group.values())


def is_right(group: Group) -> bool:
    """Whether the schedule that is predicted to be the fastest was."""
    return is_fastest(group, min(group, key=lambda name: group[name].predicted_s))


def ranking(rows: Sequence[WorkRow]) -> tuple[float | None, int]:
    """The share of groups whose fastest schedule is predicted to be the fastest, None without any; their number."""
    groups = groups_of(rows)
    return (sum(map(is_right, groups)) / len(groups) if groups else None), len(groups)
