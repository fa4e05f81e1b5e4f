"""A study before it runs: bad names are refused, points are counted, and the time is estimated from a few of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasp_lab.analysis.registry import check_names, options_of
from tasp_lab.analysis.report import Report
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.errors import ScheduleError, StudyError, TaspLabError, first_line
from tasp_lab.study.evaluate import evaluate, prepared
from tasp_lab.study.point import Point
from tasp_lab.study.study import Study
from tasp_lab.tables import Part, Table
from tasp_lab.workload.layer import Workload

MANY_POINTS = 100_000
"""More points than this are run on request only."""

PILOTS, PILOT_S = 8, 10.0
"""Points that are timed for the estimate, and after how many seconds no further one is."""


@dataclass(frozen=True, repr=False)
class StudyCheck(Report):
    """What a study comes to.

    Parameters
    ----------
    study : its name.
    combinations, points, questions : all combinations, those that filters keep, and those of them that differ.
    by_machine : the number of points of each machine.
    refused : reasons why variants do not apply, with the numbers of points; these points become failed rows.
    point_s : seconds of processor time per point, measured on a few points; None if none was timed.
    """

    study: str
    combinations: int
    points: int
    questions: int
    by_machine: dict[str, int]
    refused: dict[str, int]
    point_s: float | None

    def seconds(self, jobs: int) -> float | None:
        """The time of a run by so many workers, without waiting for one another."""
        return None if self.point_s is None else self.point_s * self.questions / jobs

    def to_dict(self) -> dict[str, object]:
        return {
            "study": self.study,
            "combinations": self.combinations,
            "points": self.points,
            "questions": self.questions,
            "by_machine": self.by_machine,
            "refused": self.refused,
            "point_s": self.point_s,
        }

    def records(self) -> Sequence[dict[str, object]]:
        return [{"machine": name, "points": count} for name, count in self.by_machine.items()]

    def parts(self) -> list[Part]:
        skipped = self.combinations - self.points
        counted = f"{self.points:,} points" + (f", {skipped:,} skipped by filters" if skipped else "")
        same = f", {self.questions:,} of them different" if self.questions < self.points else ""
        rows = [(name, f"{count:,}") for name, count in self.by_machine.items()]
        found: list[Part] = [f"study {self.study}: {counted}{same}", Table("points", ("machine", "points"), rows)]
        if self.refused:
            reasons = [(f"{count:,}", reason) for reason, count in self.refused.items()]
            found.append(Table("refused", ("points", "reason"), reasons, (1,)))
        if self.point_s is not None:
            found.append(f"about {text_of_seconds(self.seconds(1) or 0)} by one worker")
        return found


def check_study(study: Study, *, estimate: bool = True) -> StudyCheck:
    """Check a study. Raises `TaspLabError` for what no point can have: a misspelt machine, schedule, model or override.

    A variant that does not apply to a machine is counted; `estimate`: whether a few points are timed.
    """
    check_size(study)
    points = list(study.points())
    if not points:
        raise StudyError(f"study {study.name!r} has no points, its filters skip all {study.count:,}")
    _check_schedules({(each.schedule, each.layer, each.options) for each in points})
    refused = _refused(points)
    questions = {_question(each) for each in points}
    by_machine: dict[str, int] = {}
    for each in points:
        by_machine[each.machine] = by_machine.get(each.machine, 0) + 1
    point_s = _point_s([each for each in points if not each.overrides]) if estimate else None
    return StudyCheck(study.name, study.count, len(points), len(questions), by_machine, refused, point_s)


def check_size(study: Study, *, yes: bool = False) -> None:
    """Raise `StudyError` for more than `MANY_POINTS` combinations, unless they are wanted."""
    if study.count > MANY_POINTS and not yes:
        hours = study.count * _QUICK_POINT_S / 3600
        raise StudyError(
            f"study {study.name!r} has {study.count:,} combinations, some {hours:,.0f} h of one processor even with 8 "
            f"ranks: expected at most {MANY_POINTS:,}, or --yes"
        )


_QUICK_POINT_S = 0.05
"""About what a point of 8 ranks takes, for a warning."""


def _question(point: Point) -> tuple[object, ...]:
    rest = point.library, point.kernel, point.runtime, point.contention, point.sampling
    return point.machine, point.schedule, point.layer, point.options, point.overrides, rest


def _check_schedules(asked: Iterable[tuple[str, Workload, AttentionOptions]]) -> None:
    """Raise `ScheduleError` for an unknown schedule, and for an option that none of the schedules has."""
    known, given = {"passes"}, dict[str, object]()
    for name, layer, options in asked:
        check_names([name], layer)
        known |= set(options_of(name))
        given |= {option: value for option, value in vars(options).items() if value != getattr(DEFAULT_OPTIONS, option)}
    for option in given.keys() - known:
        raise ScheduleError(f"{option} {given[option]!r}: no schedule of the study has this option")


def _refused(points: Sequence[Point]) -> dict[str, int]:
    """Why machines with overrides are refused, and how many points have them.

    Raises the error of a machine without overrides, and of an override that no machine takes.
    """
    found: dict[str, int] = {}
    accepted: dict[tuple[str, ...], bool] = {}
    errors: dict[tuple[str, ...], TaspLabError] = {}
    machines = {}
    for point in points:
        asked = point.machine, point.library, point.kernel, point.runtime, point.overrides
        if asked not in machines:
            machines[asked] = _error_of(point)
        error = machines[asked]
        accepted[point.overrides] = accepted.get(point.overrides, False) or error is None
        if error is not None:
            errors.setdefault(point.overrides, error)
            reason = f"{point.machine}: {first_line(error)}"
            found[reason] = found.get(reason, 0) + 1
    for overrides, error in errors.items():
        if not overrides or not accepted[overrides]:
            raise error
    return found


def _error_of(point: Point) -> TaspLabError | None:
    try:
        prepared(point)
    except TaspLabError as error:
        return error
    return None


def _point_s(points: Sequence[Point]) -> float | None:
    """The mean processor time of a few points that lie evenly among all, in seconds.

    Each is timed the second time: machines, rings and machine code are prepared once per run, not per point.
    """
    step = max(1, len(points) // PILOTS)
    spent, begin_s = list[float](), time.process_time()
    for each in points[step // 2 :: step][:PILOTS]:
        evaluate(each)
        start_s = time.process_time()
        evaluate(each)
        spent.append(time.process_time() - start_s)
        if time.process_time() - begin_s > PILOT_S:
            break
    return sum(spent) / len(spent) if spent else None


def text_of_seconds(seconds: float) -> str:
    """A time for people.

    >>> text_of_seconds(8), text_of_seconds(250), text_of_seconds(9000)
    ('8 s', '4 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
