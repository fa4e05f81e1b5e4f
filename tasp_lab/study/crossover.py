"""Crossovers: the values of an axis at which one schedule stops being faster than another::

    find_crossovers(study.points(), CrossoverQuestion("seq", ("tasp", "ulysses")), evaluate)

Points that differ in the axis and in the schedule alone are a group. In each group some values are scanned, and
between two scanned ones of which different schedules are faster the crossing is bisected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from tasp_lab.core.errors import StudyError, TaspLabError, first_line, unknown
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import View
from tasp_lab.core.tables import Part, Table
from tasp_lab.prediction.interval import EQUAL
from tasp_lab.prediction.paired import paired_errors
from tasp_lab.prediction.question import Value
from tasp_lab.study.axis import (
    TOLERANCE,
    Change,
    axis_text,
    axis_value,
    bisected,
    changes,
    check_axis,
    lattice,
    moved,
    parse_share,
)
from tasp_lab.study.frames import rival_of
from tasp_lab.study.lookup import Evaluate, filled, groups_along
from tasp_lab.study.point import Point, Row

FIELDS: Mapping[str, object] = {"along": "seq", "between": (), "margin": 0.0, "from": None, "to": None}
"""Fields of the section ``[find] crossover`` of a study, and what they are where they are not given."""


@dataclass(frozen=True)
class CrossoverQuestion:
    """Where two schedules cross.

    Parameters
    ----------
    along : the axis.
    between : the two schedules.
    margin : times that differ by less than this share count as equal, 0 to less than 1.
    start, end : the ends of the axis, None for those of the study.
    """

    along: str
    between: tuple[str, str]
    margin: float = 0.0
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        check_axis(self.along)
        if self.between[0] == self.between[1]:
            raise StudyError(f"between {self.between[0]!r} and itself, expected two schedules")
        if not 0 <= self.margin < 1:
            raise StudyError(f"margin {self.margin:g}: expected 0 or more and less than 1, like 5%")
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise StudyError(f"axis {self.along!r}: the interval {self.start:g} to {self.end:g} is empty")


def crossover_question(find: Mapping[str, object], **given: object) -> CrossoverQuestion:
    """The question of a section of a study, with the fields that are given in place of it; None is not given.

    >>> question = crossover_question({"along": "seq", "between": ["tasp", "ulysses"], "margin": "5%"}, to="8Ki")
    >>> question.along, question.between, question.margin, question.end
    ('seq', ('tasp', 'ulysses'), 0.05, 8192)

    Raises `StudyError` for what is missing or impossible.
    """
    for name in find:
        if name not in FIELDS:
            raise StudyError(f"find.crossover: {unknown('field', name, FIELDS)}")
    values = {**FIELDS, **find, **{name: value for name, value in given.items() if value not in (None, ())}}

    def text(what: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise StudyError(f"find.crossover: {what} {value!r}, expected a name")
        return value

    def end(name: str) -> float | None:
        value = values[name]
        if value is not None and not isinstance(value, str | int | float):
            raise StudyError(f"find.crossover: {name} {value!r}, expected a value of the axis")
        return None if value is None else axis_value(axis, value)

    axis, pair = text("along", values["along"]), values["between"]
    check_axis(axis)
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        shown = repr(pair) if isinstance(pair, str) else f"{len(pair)} given" if isinstance(pair, Sequence) else pair
        raise StudyError(f"crossover: {shown}, expected two schedules: --between A --between B, or between = [A, B]")
    between = text("between", pair[0]), text("between", pair[1])
    return CrossoverQuestion(axis, between, parse_share("margin", values["margin"]), end("from"), end("to"))


# ------------------------------------------------------------------------------------ two schedules on one axis

Faster = Literal["first", "second", "neither"]
"""Which of two schedules is faster, by more than a margin."""

RANKED: tuple[Faster, ...] = ("second", "neither", "first")
"""By the ratio of the second time over the first at which they hold, ascending."""

Verdict = Literal["crosses", "first", "second", "neither", "tie", "does not apply"]
"""What happens along an axis. ``first`` and ``second``: that schedule is always faster; ``neither``: they never differ
by more than the margin; ``tie``: one is always faster, but not with 95 % anywhere."""

Binds = tuple[str | None, str | None]
"""The largest part of the critical path of the first and of the second schedule."""


@dataclass
class Comparison:
    """Two schedules at the values of an axis: which is faster, by how much, and how sure that is.

    Parameters
    ----------
    point : any point of the two; it has everything but axis and schedule.
    schedules : the first and the second.
    axis, values : the axis and the values it may have, ascending.
    evaluate : the row of a point; called once for each.
    margin : times that differ by less than this share count as equal.
    evaluated : how many points have been evaluated.
    """

    point: Point
    schedules: tuple[str, str]
    axis: str
    values: Sequence[float]
    evaluate: Evaluate
    margin: float = 0.0
    evaluated: int = 0
    _rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    def at(self, schedule: str, index: int) -> Point:
        """The point of a schedule at a value."""
        there = moved(self.point, self.axis, self.values[index])
        return replace(there, schedule=filled(schedule, there))

    def row(self, schedule: str, index: int) -> Row:
        """The row of a schedule at a value."""
        if (schedule, index) not in self._rows:
            self.evaluated += 1
            try:
                row = self.evaluate(self.at(schedule, index))
            except TaspLabError as error:  # a layer or a machine that does not exist
                row = {"status": "does not apply", "error": first_line(error)}
            self._rows[schedule, index] = row
        return self._rows[schedule, index]

    def times_s(self, index: int) -> tuple[float, float] | None:
        """Both times at a value; None where one of them does not apply."""
        times = [self.row(schedule, index).get("time_s") for schedule in self.schedules]
        first, second = (float(time_s) if isinstance(time_s, float | int) else 0.0 for time_s in times)
        return (first, second) if first > 0 and second > 0 else None

    def log_ratio(self, index: int) -> float | None:
        """The logarithm of the second time over the first; None where one of them does not apply."""
        times_s = self.times_s(index)
        return None if times_s is None else math.log(times_s[1]) - math.log(times_s[0])

    def faster(self, index: int) -> Faster | None:
        """Which one is faster at a value, by more than the margin."""
        ratio = self.log_ratio(index)
        if ratio is None:
            return None
        return "neither" if abs(ratio) <= self.threshold else "first" if ratio > 0 else "second"

    @property
    def threshold(self) -> float:
        """The logarithm of the ratio up to which times count as equal."""
        return max(math.log1p(self.margin), EQUAL)

    def side(self, index: int, threshold: float) -> int:
        """1 if the logarithm of the ratio is more than a threshold with 95 %, -1 if it is less, 0 if neither is sure.

        By the errors that the two do not share (`tasp_lab.prediction.paired`).
        """
        rows: list[dict[str, Any]] = [
            {**self.row(schedule, index), "schedule": schedule} for schedule in self.schedules
        ]
        first, second = map(rival_of, rows)
        if first is None or second is None:
            return 0
        low, high = paired_errors().ratio(second, first, rows[0]["setting"])
        return (math.log(low) > threshold) - (math.log(high) < threshold)

    def binds(self, index: int) -> Binds:
        """What binds both schedules at a value."""
        first, second = (self.row(schedule, index).get("bottleneck") for schedule in self.schedules)
        return (None if first is None else str(first)), (None if second is None else str(second))

    def refusal(self, indices: Sequence[int]) -> str:
        """Why one of the schedules has no time at these values: the first reason; empty if none has one."""
        rows = [(name, self.row(name, index)) for index in indices for name in self.schedules]
        reasons = (f"{name}: {row.get('error') or row.get('status')}" for name, row in rows if not row.get("time_s"))
        return next(reasons, "")


@dataclass(frozen=True)
class Crossing:
    """A value at which another schedule becomes the faster one.

    Parameters
    ----------
    last : the last value that was tried at which `before` holds.
    value : the first one at which it does not hold any more; they differ by the tolerance, or by the lattice.
    before, after : which schedule is faster below and above.
    low, high : where it is not sure, 5 to 95 %, whether the value is reached; None where that goes on beyond the axis.
    binds_below, binds_above : of both schedules, at `last` and at `value`.
    """

    last: float
    value: float
    before: Faster
    after: Faster
    low: float | None
    high: float | None
    binds_below: Binds
    binds_above: Binds


@dataclass(frozen=True)
class Crossover:
    """What happens along the axis of a comparison, of which `scan` are the indices that were tried first.

    `labels` tell its group from the others. `speedups` are the times of the second schedule over those of the first at
    the ends, None where they do not apply; `binds` are those at the lowest value that applies.
    """

    comparison: Comparison = field(repr=False)
    scan: tuple[int, ...]
    verdict: Verdict
    crossings: tuple[Crossing, ...]
    speedups: tuple[float | None, float | None]
    binds: Binds
    reason: str
    labels: tuple[tuple[str, Value], ...] = ()

    @property
    def ends(self) -> tuple[float, float]:
        """Of the axis."""
        values = self.comparison.values
        return values[self.scan[0]], values[self.scan[-1]]


def crossover(
    comparison: Comparison,
    scan: Sequence[int],
    tolerance: float = TOLERANCE,
    labels: tuple[tuple[str, Value], ...] = (),
) -> Crossover:
    """All crossings that the scanned indices of the values tell apart.

    With n scanned values and c crossings it predicts both schedules at n + c log2(n') values, n' being the values of
    the lattice between two scanned ones.
    """
    there = [index for index in scan if comparison.faster(index) is not None]
    crossings = []
    for change in changes(comparison.values, there, comparison.faster, tolerance):
        low, high = (_sure_end(comparison, there, change, tolerance, down) for down in (True, False))
        binds = comparison.binds(change.low), comparison.binds(change.high)
        last, value = comparison.values[change.low], comparison.values[change.high]
        crossings.append(Crossing(last, value, change.before, change.after, low, high, *binds))
    ratios = [comparison.log_ratio(index) for index in (there[:1] + there[-1:])]
    low_speedup, high_speedup = [None if ratio is None else math.exp(ratio) for ratio in ratios] or (None, None)
    return Crossover(
        comparison,
        tuple(scan),
        _verdict(comparison, there, bool(crossings)),
        tuple(crossings),
        (low_speedup, high_speedup),
        comparison.binds(there[0]) if there else (None, None),
        comparison.refusal(scan),
        labels,
    )


def _verdict(comparison: Comparison, there: Sequence[int], crosses: bool) -> Verdict:
    if len(there) < 2:
        return "does not apply"
    if crosses:
        return "crosses"
    faster = comparison.faster(there[0])
    assert faster is not None, "it applies there"
    clearest = max(there, key=lambda index: abs(comparison.log_ratio(index) or 0.0))
    return faster if faster == "neither" or comparison.side(clearest, 0.0) else "tie"


def _sure_end(
    comparison: Comparison, there: Sequence[int], change: Change, tolerance: float, down: bool
) -> float | None:
    """The value nearest to a change from which on its side is sure with 95 %; None if it is nowhere.

    Scanned values are tried outwards until one is sure, then it is bisected.
    """
    # Between the first and the second schedule the ratio passes 1; between one of them and neither, the margin.
    both = {change.before, change.after}
    threshold = 0.0 if both == {"first", "second"} else comparison.threshold * (1 if "first" in both else -1)
    rises = RANKED.index(change.after) > RANKED.index(change.before)
    wanted, start = (-1 if down == rises else 1), change.low if down else change.high
    outwards = [index for index in there if (index < start if down else index > start)]

    def is_sure(index: int) -> bool:
        return comparison.side(index, threshold) == wanted

    for inside, outside in pairwise([start, start, *(outwards[::-1] if down else outwards)]):
        if is_sure(outside):
            low, high = sorted((inside, outside))
            ends = bisected(comparison.values, low, high, lambda index: is_sure(index) == down, tolerance)
            return comparison.values[ends[outside > inside]]
    return None


# ------------------------------------------------------------------------------------------ the groups of a study


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
    inside = [value for value in values if low <= value <= high]
    if start is None and end is None:
        return sorted(set(inside))
    doublings = [low * 2**power for power in range(math.ceil(math.log2(high / low)))] if low > 0 else [low]
    return sorted({*inside, *doublings, high})


def crossovers(
    points: Iterable[Point],
    question: CrossoverQuestion,
    evaluate: Evaluate,
    progress: ProgressCallback = no_progress,
) -> Iterator[Crossover]:
    """The crossover of two schedules in every group of points. Groups of one value are left out if others have more.

    Raises `StudyError` for a schedule that no point has, and where no group has two values of the axis.
    """
    points, axis = list(points), question.along
    for name in question.between:
        if not any(point.schedule == filled(name, point) for point in points):
            known = list(dict.fromkeys(point.schedule for point in points))
            raise StudyError(f"{unknown('schedule', name, known)} of the study")
    every = groups_along(points, axis, question.between)
    groups = [group for group in every if len(scanned(group.values, question)) > 1]
    if not groups:
        values = ", ".join(axis_text(axis, value) for value in every[0].values) or "none"
        expected = "expected two or more in the study, or --from and --to"
        raise StudyError(f"axis {axis!r}: the interval has one value at most, the study has {values}, {expected}")
    for number, group in enumerate(groups, start=1):
        progress(f"crossover {number} of {len(groups)}: {group.text}")
        scan = scanned(group.values, question)
        values_of_axis = lattice(axis, scan, multiple=group.multiple, heads=group.point.layer.heads)
        compared = Comparison(group.point, question.between, axis, values_of_axis, evaluate, question.margin)
        yield crossover(compared, [values_of_axis.index(value) for value in scan], labels=group.labels)


# --------------------------------------------------------------------------------------------------- the report


def find_crossovers(
    points: Iterable[Point],
    question: CrossoverQuestion,
    evaluate: Evaluate,
    progress: ProgressCallback = no_progress,
) -> View:
    """The crossovers of a study: a row per crossing, of a group without one its verdict. See `crossovers`."""
    results = list(crossovers(points, question, evaluate, progress))
    groups = [_group(result, question) for result in results]
    document = {
        "along": question.along,
        "between": list(question.between),
        "margin": question.margin,
        "groups": groups,
    }
    found = [(result, group, crossing) for result, group in zip(results, groups, strict=True)
             for crossing in (group["crossings"] or [{}])]  # fmt: skip
    rows = [group["labels"] | {"verdict": group["verdict"]} | crossing for _, group, crossing in found]
    names = list(dict.fromkeys(name for result in results for name, _ in result.labels))
    cells = [
        ["" if (value := group["labels"].get(name)) is None else str(value) for name in names]
        + _cells(question, group | {"binds_below": _by_name(question, result.binds)} | crossing)
        for result, group, crossing in found
    ]
    (first, second), margin = question.between, f", by more than {question.margin:.3g}" if question.margin else ""
    title = f"crossovers of {first} and {second} along {question.along}{margin}; binds: {first} / {second}"
    columns = (*names, question.along, "95 %", "below", "above", "binds below", "binds above", "speed-up at the ends")
    return View(document, rows, [Table(title, columns, cells, tuple(range(len(names)))), *_notes(results)])


def _group(result: Crossover, question: CrossoverQuestion) -> dict[str, Any]:
    name_of = dict(zip(("first", "second"), question.between, strict=True))
    crossings = [
        {
            "value": crossing.value,
            "last": crossing.last,
            "low": crossing.low,
            "high": crossing.high,
            "is_tie": crossing.low is crossing.high is None,  # no value is surely on one side of it
            "faster_below": name_of.get(crossing.before),
            "faster_above": name_of.get(crossing.after),
            "binds_below": _by_name(question, crossing.binds_below),
            "binds_above": _by_name(question, crossing.binds_above),
        }
        for crossing in result.crossings
    ]
    verdicts = {
        "crosses": "crosses",
        "does not apply": f"does not apply: {result.reason}",
        "neither": f"within {question.margin:.3g} throughout" if question.margin else "equal throughout",
        "tie": f"a tie throughout, {question.between[(result.speedups[0] or 1.0) <= 1]} by prediction",
    }
    return {
        "labels": dict(result.labels),
        "from": result.ends[0],
        "to": result.ends[1],
        "verdict": verdicts.get(result.verdict) or f"always {name_of[result.verdict]}",
        "crossings": crossings,
        "speedup_from": result.speedups[0],
        "speedup_to": result.speedups[1],
        "refused": result.reason or None,
        "points": result.comparison.evaluated,
    }


def _by_name(question: CrossoverQuestion, binds: Binds) -> dict[str, str | None]:
    return dict(zip(question.between, binds, strict=True))


def _cells(question: CrossoverQuestion, row: Mapping[str, Any]) -> list[str]:
    """The cells of a crossing, or of a group without one, after its labels."""
    axis = question.along

    def binds(end: str) -> str:
        first, second = (part or "-" for part in row[end].values())
        return str(first if first == second else f"{first} / {second}")

    speedups = (row[f"speedup_{end}"] for end in ("from", "to"))
    at_ends = " .. ".join(f"{ratio:.3g}x" for ratio in speedups if ratio is not None)
    if "value" not in row:
        return [row["verdict"].partition(":")[0], "", "", "", binds("binds_below"), "", at_ends]
    low = f"< {axis_text(axis, row['from'])}" if row["low"] is None else axis_text(axis, row["low"])
    high = f"> {axis_text(axis, row['to'])}" if row["high"] is None else axis_text(axis, row["high"])
    interval = f"{low} .. {high}" + (" (a tie)" if row["is_tie"] else "")
    faster = [row[each] or "neither" for each in ("faster_below", "faster_above")]
    return [axis_text(axis, row["value"]), interval, *faster, binds("binds_below"), binds("binds_above"), at_ends]


def _notes(results: Sequence[Crossover]) -> list[Part]:
    notes: list[Part] = [f"{sum(result.comparison.evaluated for result in results)} points"]
    if any(result.reason and result.verdict != "does not apply" for result in results):
        notes.append("values at which a schedule does not apply are left out")
    nowhere = dict.fromkeys(result.reason for result in results if result.verdict == "does not apply")
    return notes + [f"does not apply: {reason}" for reason in nowhere]
