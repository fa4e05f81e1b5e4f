"""Two schedules at values of an axis: who is faster there, by how much, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.prediction.interval import EQUAL, Interval
from tasp_lab.study.find.groups import filled
from tasp_lab.study.find.moved import moved
from tasp_lab.study.point import Point
from tasp_lab.study.rows import Row

Evaluate = Callable[[Point], Row]
IntervalOf = Callable[[Point], Interval | None]

Lead = Literal["first", "second", "neither"]
"""Which of two schedules is faster, by more than a margin."""


@dataclass
class Contest:
    """Two schedules along one axis.

    Parameters
    ----------
    point : any point of the two; it has everything but axis and schedule.
    schedules : the first and the second.
    axis, values : the axis and the values it may have, ascending.
    evaluate : the row of a point; called once for each.
    interval_of : the interval of a point's time, with the samples of its constants; None for none.
    margin : times that differ by less than this share count as equal.
    """

    point: Point
    schedules: tuple[str, str]
    axis: str
    values: Sequence[float]
    evaluate: Evaluate
    interval_of: IntervalOf | None = None
    margin: float = 0.0
    evaluated: int = 0
    sampled: int = 0
    _rows: dict[tuple[str, int], Row] = field(default_factory=dict)
    _ratios: dict[int, tuple[float, float] | None] = field(default_factory=dict)

    def row(self, schedule: str, index: int) -> Row:
        """The row of a schedule at a value."""
        if (schedule, index) not in self._rows:
            self.evaluated += 1
            self._rows[schedule, index] = self._evaluated(schedule, index)
        return self._rows[schedule, index]

    def _evaluated(self, schedule: str, index: int) -> Row:
        try:
            point = self.at(schedule, index)
        except TaspLabError as error:  # a layer or a machine that does not exist
            return {"status": "does not apply", "error": first_line(error)}
        return self.evaluate(point)

    def at(self, schedule: str, index: int) -> Point:
        """The point of a schedule at a value."""
        there = moved(self.point, self.axis, self.values[index])
        return replace(there, schedule=filled(schedule, there))

    def log_ratio(self, index: int) -> float | None:
        """The logarithm of the second time over the first; None where one of them does not apply."""
        times = [self.row(schedule, index).get("time_s") for schedule in self.schedules]
        if not all(isinstance(time_s, float | int) and time_s > 0 for time_s in times):
            return None
        return math.log(float(times[1] or 0)) - math.log(float(times[0] or 0))

    def time_s(self, schedule: str, index: int) -> float:
        """The time of a schedule at a value where both apply."""
        found = self.row(schedule, index)["time_s"]
        assert isinstance(found, float | int), "it applies there"
        return float(found)

    def lead(self, index: int) -> Lead | None:
        """Which one is faster at a value, by more than the margin."""
        ratio = self.log_ratio(index)
        return None if ratio is None else lead_of(ratio, self.margin)

    def refusal(self, indices: Sequence[int]) -> str:
        """Why one of the schedules has no time at these values: the first reason; empty if none has one."""
        rows = [(name, self.row(name, index)) for index in indices for name in self.schedules]
        reasons = (f"{name}: {row.get('error') or row.get('status')}" for name, row in rows if not row.get("time_s"))
        return next(reasons, "")

    def side(self, index: int, threshold: float) -> int:
        """1 if the logarithm of the ratio is more than a threshold with 95 %, -1 if it is less, 0 if neither is sure.

        It is not sure either where there are no intervals.
        """
        ends = self._log_ends(index)
        if ends is None:
            return 0
        return (ends[0] > threshold) - (ends[1] < threshold)

    def _log_ends(self, index: int) -> tuple[float, float] | None:
        """The 5 and 95 % points of the logarithm of the ratio, on the same samples."""
        if index not in self._ratios:
            self._ratios[index] = self._sampled(index)
        return self._ratios[index]

    def _sampled(self, index: int) -> tuple[float, float] | None:
        if self.interval_of is None or self.log_ratio(index) is None:
            return None
        self.sampled += 1
        first, second = (self.interval_of(self.at(schedule, index)) for schedule in self.schedules)
        if first is None or second is None:
            return None
        low, _, high = second.over(first)
        return math.log(low), math.log(high)


def lead_of(log_ratio: float, margin: float) -> Lead:
    """Who is faster by more than a margin.

    >>> lead_of(math.log(1.1), 0.05), lead_of(math.log(1.1), 0.2), lead_of(-math.log(1.1), 0.0)
    ('first', 'neither', 'second')
    """
    if abs(log_ratio) <= max(math.log1p(margin), EQUAL):
        return "neither"
    return "first" if log_ratio > 0 else "second"


def threshold_between(before: Lead, after: Lead, margin: float) -> float:
    """The logarithm of the ratio that is passed where one lead ends and another begins.

    >>> threshold_between("first", "second", 0.05), threshold_between("neither", "first", 0.0)
    (0.0, 1e-09)
    """
    end = max(math.log1p(margin), EQUAL)
    leads = {before, after}
    return 0.0 if leads == {"first", "second"} else end if "first" in leads else -end
