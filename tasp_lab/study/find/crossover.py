"""Crossovers: the values of an axis at which one schedule stops being faster than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasp_lab.study.find.bisection import Change, bisected, changes
from tasp_lab.study.find.contest import Contest, Lead, threshold_between
from tasp_lab.study.find.lattice import TOLERANCE

Verdict = Literal["crosses", "first", "second", "neither", "too close", "does not apply"]
"""What is found along an axis. ``first`` and ``second``: that schedule is always faster; ``neither``: they never differ
by more than the margin; ``too close``: one is always faster, but not with 95 % anywhere."""

Binds = tuple[str | None, str | None]
"""The largest part of the critical path of the first and of the second schedule."""


@dataclass(frozen=True)
class Crossing:
    """A value at which the lead changes.

    Parameters
    ----------
    last : the last value that was tried at which `before` holds.
    value : the first one at which it does not hold any more; they differ by the tolerance, or by the lattice.
    before, after : who leads below and above.
    low, high : where it is not sure, 5 to 95 %, whether the value is reached; None where that goes on beyond the axis.
    has_interval : whether intervals were asked for.
    binds_below, binds_above : of both schedules, at `last` and at `value`.
    """

    last: float
    value: float
    before: Lead
    after: Lead
    low: float | None
    high: float | None
    has_interval: bool
    binds_below: Binds
    binds_above: Binds


@dataclass(frozen=True)
class Crossover:
    """What is found along the axis of a contest.

    `speedups` are the times of the second schedule over those of the first at the ends, None where they do not apply;
    `binds` are those at the lowest value that applies. `evaluated` counts rows of points, `sampled` pairs with samples.
    """

    verdict: Verdict
    crossings: tuple[Crossing, ...]
    speedups: tuple[float | None, float | None]
    binds: Binds
    reason: str
    evaluated: int
    sampled: int


def crossover(contest: Contest, scan: Sequence[int], tolerance: float = TOLERANCE) -> Crossover:
    """All crossings of a contest that the scanned indices of its values tell apart.

    With n scanned values and c crossings it predicts both schedules at n + c log2(n') values, n' being the values of
    the lattice between two scanned ones.
    """
    there = [index for index in scan if contest.lead(index) is not None]
    seen: list[Change[Lead]] = changes(contest.values, there, contest.lead, tolerance)
    found = [_crossing(contest, there, change, tolerance) for change in seen]
    return Crossover(
        _verdict(contest, there, found),
        tuple(found),
        (_speedup(contest, there[:1]), _speedup(contest, there[-1:])),
        _binds(contest, there[0]) if there else (None, None),
        contest.refusal(scan),
        contest.evaluated,
        contest.sampled,
    )


def _verdict(contest: Contest, there: Sequence[int], found: Sequence[Crossing]) -> Verdict:
    if len(there) < 2:
        return "does not apply"
    if found:
        return "crosses"
    lead = contest.lead(there[0])
    assert lead is not None, "it applies there"
    clearest = max(there, key=lambda index: abs(contest.log_ratio(index) or 0.0))
    sure = contest.interval_of is None or contest.side(clearest, 0.0)
    return lead if lead == "neither" or sure else "too close"


def _crossing(contest: Contest, there: Sequence[int], change: Change[Lead], tolerance: float) -> Crossing:
    values = contest.values
    low, high = (_sure_end(contest, there, change, tolerance, down) for down in (True, False))
    return Crossing(
        values[change.low],
        values[change.high],
        change.before,
        change.after,
        low,
        high,
        contest.interval_of is not None,
        _binds(contest, change.low),
        _binds(contest, change.high),
    )


def _sure_end(
    contest: Contest, there: Sequence[int], change: Change[Lead], tolerance: float, down: bool
) -> float | None:
    """The value nearest to a change from which on its side is sure with 95 %; None if it is nowhere.

    Scanned values are tried outwards until one is sure, then it is bisected.
    """
    if contest.interval_of is None:
        return None
    threshold = threshold_between(change.before, change.after, contest.margin)
    rises = _rank(change.after) > _rank(change.before)
    wanted, start = (-1 if down == rises else 1), change.low if down else change.high
    outwards = [each for each in there if each < start][::-1] if down else [each for each in there if each > start]
    inside = start
    for outside in [start, *outwards]:
        if contest.side(outside, threshold) == wanted:
            return contest.values[_between(contest, inside, outside, threshold, wanted, tolerance)]
        inside = outside
    return None


def _between(contest: Contest, inside: int, outside: int, threshold: float, wanted: int, tolerance: float) -> int:
    """The sure index nearest to the one inside."""
    if inside == outside:
        return outside
    low, high = min(inside, outside), max(inside, outside)

    def holds(index: int) -> bool:
        return (contest.side(index, threshold) == wanted) == (outside < inside)

    last, first = bisected(contest.values, low, high, holds, tolerance)
    return last if outside < inside else first


def _rank(lead: Lead) -> int:
    """Leads by the ratio at which they hold."""
    return ("second", "neither", "first").index(lead)


def _speedup(contest: Contest, indices: Sequence[int]) -> float | None:
    ratios = [contest.log_ratio(index) for index in indices]
    return math.exp(ratios[0]) if ratios and ratios[0] is not None else None


def _binds(contest: Contest, index: int) -> Binds:
    first, second = (contest.row(schedule, index).get("bottleneck") for schedule in contest.schedules)
    return (None if first is None else str(first)), (None if second is None else str(second))
