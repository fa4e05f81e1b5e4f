"""The points of a study that are nearest to a crossover: those that a measurement would tell most about."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tasp_lab.study.find.crossovers import Searched
from tasp_lab.study.point import Point, Value


@dataclass(frozen=True)
class NearPoint:
    """Two schedules at one value of the axis.

    Parameters
    ----------
    points : of the first and of the second schedule.
    labels : of their group.
    value : of the axis.
    times_s : the predicted times of both.
    distance : the logarithm of how far the value is from the nearest crossing; infinite where nothing crosses.
    """

    points: tuple[Point, Point]
    labels: tuple[tuple[str, Value], ...]
    value: float
    times_s: tuple[float, float]
    distance: float

    @property
    def speedup(self) -> float:
        """The second time over the first."""
        return self.times_s[1] / self.times_s[0]


def nearest(groups: Iterable[Searched], count: int) -> list[NearPoint]:
    """As many points, those nearest to a crossing first; of equally near ones those whose times are closest.

    Where nothing crosses, points are ranked by the closeness of their times alone.
    """
    found = [each for group in groups for each in _of_group(group)]
    return sorted(found, key=lambda each: (each.distance, abs(math.log(each.speedup))))[:count]


def _of_group(searched: Searched) -> list[NearPoint]:
    contest = searched.contest
    first, second = contest.schedules
    return [
        NearPoint(
            (contest.at(first, index), contest.at(second, index)),
            searched.group.labels,
            contest.values[index],
            (contest.time_s(first, index), contest.time_s(second, index)),
            min((abs(math.log(contest.values[index] / each.value)) for each in searched.result.found.crossings),
                default=math.inf),
        )
        for index in searched.scan
        if contest.log_ratio(index) is not None
    ]  # fmt: skip
