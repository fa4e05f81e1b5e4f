"""The crossovers of a study: one for each group of points that differ in axis and schedule only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tasp_lab.core.errors import StudyError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.study.find.contest import Contest, Evaluate, IntervalOf
from tasp_lab.study.find.crossover import crossover
from tasp_lab.study.find.crossover_question import CrossoverQuestion
from tasp_lab.study.find.crossovers_report import Crossovers, GroupCrossover, axis_text
from tasp_lab.study.find.groups import Group, check_schedules, groups_along
from tasp_lab.study.find.lattice import lattice
from tasp_lab.study.point import Point


def find_crossovers(
    points: Iterable[Point],
    question: CrossoverQuestion,
    evaluate: Evaluate,
    interval_of: IntervalOf | None = None,
    progress: ProgressCallback = no_progress,
) -> Crossovers:
    """The crossovers of two schedules in every group of a study's points.

    Raises `StudyError` for a schedule that the study lacks, and where no group has two values of the axis.
    """
    found = searched(points, question, evaluate, interval_of, progress)
    return Crossovers(question, tuple(each.result for each in found))


@dataclass(frozen=True)
class Searched:
    """A group, its contest with all rows that were needed, and what was found; `scan` are indices of its values."""

    group: Group
    contest: Contest
    scan: tuple[int, ...]
    result: GroupCrossover


def searched(
    points: Iterable[Point],
    question: CrossoverQuestion,
    evaluate: Evaluate,
    interval_of: IntervalOf | None = None,
    progress: ProgressCallback = no_progress,
) -> Iterator[Searched]:
    """Every group with what was found; see `find_crossovers`. Groups of one value are left out if others have more."""
    points = list(points)
    check_schedules(points, question.between)
    every = groups_along(points, question.along, question.between)
    known = [group for group in every if len(scanned(group.values, question)) > 1]
    if not known:
        raise StudyError(_one_value(every[0], question))
    for number, group in enumerate(known, start=1):
        progress(f"crossover {number} of {len(known)}: {group.text}")
        yield _of_group(group, question, evaluate, interval_of)


def _of_group(
    group: Group, question: CrossoverQuestion, evaluate: Evaluate, interval_of: IntervalOf | None
) -> Searched:
    tried = scanned(group.values, question)
    values = lattice(question.along, tried, multiple=group.multiple, heads=group.point.layer.heads)
    contest = Contest(group.point, question.between, question.along, values, evaluate, interval_of, question.margin)
    scan = tuple(values.index(each) for each in tried)
    found = GroupCrossover(group.labels, (tried[0], tried[-1]), crossover(contest, scan))
    return Searched(group, contest, scan, found)


def scanned(values: Sequence[float], question: CrossoverQuestion) -> list[float]:
    """The values that are tried first: those of the study between the ends, the ends that are given, and doublings.

    >>> scanned([8, 64], CrossoverQuestion("seq", ("a", "b")))
    [8, 64]
    >>> scanned([8], CrossoverQuestion("seq", ("a", "b"), end=64))
    [8, 16, 32, 64]
    """
    start, end = question.start, question.end
    if not values and (start is None or end is None):
        return []
    low = min(values) if start is None else start
    high = max(values) if end is None else end
    if low >= high:
        return [low]
    inside = [each for each in values if low <= each <= high]
    given = [] if start is None and end is None else [*_doublings(low, high), high]
    return sorted({*inside, *given})


def _one_value(group: Group, question: CrossoverQuestion) -> str:
    values = ", ".join(axis_text(question.along, each) for each in group.values) or "none"
    expected = "expected two or more in the study, or --from and --to"
    return f"axis {question.along!r}: the interval has one value at most, the study has {values}, {expected}"


def _doublings(low: float, high: float) -> list[float]:
    return [low * 2**power for power in range(math.ceil(math.log2(high / low)))] if low > 0 else [low]
