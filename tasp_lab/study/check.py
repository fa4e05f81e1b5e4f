"""A study before it runs: bad names are refused, points are counted, and the time is estimated from some of them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from tasp_lab.core.errors import ScheduleError, StudyError, TaspLabError, first_line
from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import View
from tasp_lab.core.tables import Part, Table
from tasp_lab.planning.plan import ANY
from tasp_lab.prediction.question import prepared
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.registry import check_names, options_of
from tasp_lab.study.evaluate import evaluate
from tasp_lab.study.point import Point
from tasp_lab.study.study import Study
from tasp_lab.workload.layer import Workload

MANY_POINTS = 100_000
"""More points than this are run on request only."""

MOST_TIMED = 64
"""Points that are timed for the estimate, at most."""


def check_study(study: Study, *, estimate: bool = True, progress: ProgressCallback = no_progress) -> View:
    """What a study comes to, with a row per machine.

    Raises `TaspLabError` for what no point can have: a misspelt machine, schedule, model or override.

    A variant that does not apply to a machine is counted; `estimate`: whether some points are timed.
    """
    check_size(study)
    points = list(study.points())
    if not points:
        raise StudyError(f"study {study.name!r} has no points, its filters skip all {study.count:,}")
    _check_schedules({(each.schedule, each.layer, each.options) for each in points})
    refused = _refused(points)
    questions = list(dict.fromkeys(points))  # equal points have equal questions
    by_machine = Counter(each.machine for each in points)
    quick = [each for each in questions if each.job is None]  # a plan takes a while
    timed, seconds = estimate_of(quick, progress=progress) if estimate and quick else (0, 0.0)
    wall_s = {workers: seconds / workers for workers in sorted({1, usable_cores()})}
    document = {
        "study": study.name,
        "combinations": study.count,
        "points": len(points),
        "questions": len(questions),
        "by_machine": dict(by_machine),
        "refused": refused,
        "estimate": {
            "timed": timed, "processor_s": seconds, "wall_s": {str(workers): wall for workers, wall in wall_s.items()},
        } if timed else None,
    }  # fmt: skip
    skipped = study.count - len(points)
    counted = f"{len(points):,} points" + (f", {skipped:,} skipped by filters" if skipped else "")
    same = f", {len(questions):,} of them different" if len(questions) < len(points) else ""
    rows = [{"machine": name, "points": count} for name, count in by_machine.items()]
    reasons = [{"reason": reason, "points": count} for reason, count in refused.items()]
    parts: list[Part] = [
        f"study {study.name}: {counted}{same}",
        *Table.of("points", rows, {"machine": "{machine}", "points": "{points:,}"}),
        *Table.of("does not apply", reasons, {"points": "{points:,}", "reason": "{reason}"}, (1,)),
    ]
    if timed:
        walls = (f"{text_of_seconds(wall)} with {n} worker{'s' * (n > 1)}" for n, wall in wall_s.items())
        counts = f"{timed:,} of {len(questions):,} points timed"
        parts.append(f"about {text_of_seconds(seconds)} of processor time: {', '.join(walls)} ({counts})")
    return View(document, rows, parts)


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


def _check_schedules(asked: Iterable[tuple[str, Workload, AttentionOptions]]) -> None:
    """Raise `ScheduleError` for an unknown schedule, and for an option that none of the schedules has."""
    known, given = {"passes"}, dict[str, object]()
    for name, layer, options in asked:
        if name != ANY:
            check_names([name], layer)
            known |= set(options_of(name))
        given |= {option: value for option, value in vars(options).items() if value != getattr(DEFAULT_OPTIONS, option)}
    for option in given.keys() - known:
        raise ScheduleError(f"{option} {given[option]!r}: no schedule of the study has this option")


def _refused(points: Sequence[Point]) -> dict[str, int]:
    """Why machines with overrides are refused, and how many points have them.

    Raises the error of a machine without overrides, and of an override that no machine takes.
    """
    reasons = Counter[str]()
    errors: dict[tuple[object, ...], TaspLabError | None] = {}
    for point in points:
        if point.on not in errors:
            try:
                prepared(point)
                errors[point.on] = None
            except TaspLabError as error:
                errors[point.on] = error
        if (refused := errors[point.on]) is not None:
            reasons[f"{point.machine}: {first_line(refused)}"] += 1
    accepted = {overrides for (_, overrides, *_), error in errors.items() if error is None}
    for (_, overrides, *_), found in errors.items():
        if found is not None and (not overrides or overrides not in accepted):
            raise found
    return dict(reasons)


def processor_s(point: Point) -> float:
    """Answer a point: the processor time of this process, in seconds."""
    begin_s = time.process_time()
    evaluate(point)
    return time.process_time() - begin_s


def estimate_of(
    points: Sequence[Point],
    timed: Callable[[Point], float] = processor_s,
    progress: ProgressCallback = no_progress,
) -> tuple[int, float]:
    """How many points were timed, and the processor time of all of them in seconds.

    Some are drawn of each schedule, equally many, and all others of the schedule take as long as those do on average.
    `timed` answers a point and returns its processor time in seconds.
    """
    of_schedule: dict[str, list[Point]] = {}
    for point in points:
        of_schedule.setdefault(point.schedule, []).append(point)
    drawn, most = random.Random(0), -(-MOST_TIMED // len(of_schedule))
    chosen = {name: drawn.sample(some, min(len(some), most)) for name, some in of_schedule.items()}
    count = sum(map(len, chosen.values()))
    progress(f"timing {count:,} of {len(points):,} points for an estimate")
    for point in {point.on: point for some in chosen.values() for point in some}.values():
        timed(point)  # what only the first point of a machine takes (its rings, samples, machine code) is not counted
    return count, sum(len(of_schedule[name]) * fmean(map(timed, some)) for name, some in chosen.items())


def text_of_seconds(seconds: float) -> str:
    """A time for people.

    >>> text_of_seconds(8), text_of_seconds(250), text_of_seconds(9000)
    ('8 s', '4 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
