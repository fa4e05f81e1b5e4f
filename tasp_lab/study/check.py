"""A study before it runs: bad names are refused, points are counted, and the time is estimated from some of them."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from tasp_lab.study.evaluate import evaluate, groups
from tasp_lab.study.point import Point
from tasp_lab.study.study import Study
from tasp_lab.workload.layer import Workload

MANY_POINTS = 100_000
"""More points than this are run on request only."""

FEWEST_TIMED, MOST_TIMED = 24, 256
"""Points that are timed for the estimate: at least so many, if there are, and at most."""


@dataclass(frozen=True)
class Estimate:
    """How long a run takes, from timed points.

    Parameters
    ----------
    timed : how many points were timed.
    points_s : processor time of all points, in seconds.
    prepared : of each machine how long a process prepares it, in seconds, and how many groups of points it has: each
        worker that gets one of them prepares it.
    """

    timed: int
    points_s: float
    prepared: tuple[tuple[float, int], ...]

    def processor_s(self, workers: int) -> float:
        """The processor time of a run by so many workers together, in seconds, without starting them.

        >>> Estimate(2, 10.0, ((1.0, 1), (3.0, 8))).processor_s(2)
        17.0
        """
        return self.points_s + sum(seconds * min(workers, groups) for seconds, groups in self.prepared)

    @property
    def wall_s(self) -> dict[int, float]:
        """The time until a run ends with one worker, and with one on each core, in seconds."""
        return {workers: self.processor_s(workers) / workers for workers in sorted({1, usable_cores()})}

    def text(self, points: int) -> str:
        """All times on one line."""
        walls = ", ".join(
            f"{text_of_seconds(seconds)} with {workers} worker{'s' if workers > 1 else ''}"
            for workers, seconds in self.wall_s.items()
        )
        timed = f"{self.timed:,} of {points:,} points timed"
        return f"about {text_of_seconds(self.processor_s(1))} of processor time: {walls} ({timed})"


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
    expected = estimate_of(quick, progress=progress) if estimate and quick else None
    document = {
        "study": study.name,
        "combinations": study.count,
        "points": len(points),
        "questions": len(questions),
        "by_machine": dict(by_machine),
        "refused": refused,
        "estimate": expected and {
            "timed": expected.timed,
            "processor_s": expected.processor_s(1),
            "wall_s": {str(workers): seconds for workers, seconds in expected.wall_s.items()},
        },
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
        *([] if expected is None else [expected.text(len(questions))]),
    ]
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
) -> Estimate:
    """How long points take: for each machine, variant and schedule one of its points is timed, more if these are few.

    The first point of a machine is timed twice: what only the first time takes (rings, samples of constants, loading
    machine code) each worker prepares once. Which layer is timed differs from one schedule to the next, so that all
    together stand for all layers. Of more than `MOST_TIMED` some are drawn; the others take as long as those of the
    same schedule do on average. `timed` answers a point and returns the processor time of that, in seconds.
    """
    kinds: dict[tuple[tuple[object, ...], str], list[Point]] = {}
    for point in points:
        kinds.setdefault((point.on, point.schedule), []).append(point)
    drawn = set(random.Random(0).sample(list(kinds), min(len(kinds), MOST_TIMED)))
    chosen = [kind for kind in kinds if kind in drawn]  # one machine after another, as in a run
    most = -(-FEWEST_TIMED // len(chosen))
    picked = {}
    for place, kind in enumerate(chosen):
        count = min(most, len(kinds[kind]))
        # Multiples of the golden ratio, less their whole part, fill the unit interval evenly however many there are:
        # each kind begins at another layer.
        begin = place * (math.sqrt(5) - 1) / 2 % 1
        picked[kind] = [kinds[kind][int(len(kinds[kind]) * (number + begin) / count)] for number in range(count)]
    number_timed = sum(map(len, picked.values()))
    progress(f"timing {number_timed:,} of {len(points):,} points for an estimate")
    prepared_s: dict[tuple[object, ...], float] = {}
    means_s: dict[tuple[tuple[object, ...], str], float] = {}
    of_schedule: dict[str, list[float]] = {}
    for (machine, schedule), some in picked.items():
        seconds = list(map(timed, some))
        if machine not in prepared_s:
            again = timed(some[0])
            prepared_s[machine], seconds[0] = max(0.0, seconds[0] - again), again
        means_s[machine, schedule] = fmean(seconds)
        of_schedule.setdefault(schedule, []).append(fmean(seconds))
    points_s = sum(
        len(some) * means_s.get(kind, fmean(of_schedule.get(kind[1]) or means_s.values()))
        for kind, some in kinds.items()
    )
    groups_of = Counter(group[0].on for group in groups(points))
    mean_s = fmean(prepared_s.values())
    prepared_all = tuple((prepared_s.get(machine, mean_s), count) for machine, count in groups_of.items())
    return Estimate(number_timed, points_s, prepared_all)


def text_of_seconds(seconds: float) -> str:
    """A time for people.

    >>> text_of_seconds(8), text_of_seconds(250), text_of_seconds(9000)
    ('8 s', '4 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
