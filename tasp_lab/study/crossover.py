"""Crossovers: the values of an axis at which one schedule stops being faster than another::

    find_crossovers(study.points(), evaluate, {"along": "seq", "between": ["tasp", "ulysses"]})

Points that differ in the axis and in the schedule alone are a group. In each group some values are scanned, and
between two scanned ones of which different schedules are faster the crossing is bisected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

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
    apart_from,
    axis_text,
    axis_value,
    bisected,
    changes,
    check_axis,
    lattice,
    moved,
    parse_share,
    value_of,
)
from tasp_lab.study.frames import rival_of
from tasp_lab.study.lookup import fields_of, label_names, points_at
from tasp_lab.study.point import Point, Row
from tasp_lab.study.study import fill, ranks_of

FIELDS: Mapping[str, object] = {"along": "seq", "between": (), "margin": 0.0, "from": None, "to": None, "at": ""}
"""Fields of the section ``[find] crossover`` of a study, and what they are where they are not given."""


# ------------------------------------------------------------------------------------ two schedules on one axis

Binds = dict[str, str | None]
"""The largest part of the critical path of each schedule."""


@dataclass
class Comparison:
    """Two schedules at the values of an axis: which is faster, by how much, and how sure that is.

    Parameters
    ----------
    point : any point of the two; it has everything but axis and schedule.
    schedules : the first and the second; names may have values of axes in braces.
    axis, values : the axis and the values it may have, ascending.
    evaluate : the row of a point; called once for each.
    margin : times that differ by less than this share count as equal.
    """

    point: Point
    schedules: tuple[str, str]
    axis: str
    values: Sequence[float]
    evaluate: Callable[[Point], Row]
    margin: float = 0.0
    _rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    @property
    def evaluated(self) -> int:
        """How many points have been evaluated."""
        return len(self._rows)

    def row(self, schedule: str, index: int) -> Row:
        """The row of a schedule at a value."""
        if (schedule, index) not in self._rows:
            try:
                there = moved(self.point, self.axis, self.values[index])
                row = self.evaluate(replace(there, schedule=fill(schedule, dict(there.labels))))
            except TaspLabError as error:  # a layer or a machine that does not exist
                row = {"status": "does not apply", "error": first_line(error)}
            self._rows[schedule, index] = row
        return self._rows[schedule, index]

    def log_ratio(self, index: int) -> float | None:
        """The logarithm of the second time over the first at a value; None where one of them does not apply."""
        first_s, second_s = (float(self.row(name, index).get("time_s") or 0) for name in self.schedules)
        return math.log(second_s) - math.log(first_s) if first_s > 0 and second_s > 0 else None

    @property
    def threshold(self) -> float:
        """The logarithm of the ratio up to which times count as equal."""
        return max(math.log1p(self.margin), EQUAL)

    def faster(self, index: int) -> int | None:
        """1 where the first is faster by more than the margin, -1 where the second is, 0 for neither."""
        ratio = self.log_ratio(index)
        return None if ratio is None else (ratio > self.threshold) - (ratio < -self.threshold)

    def side(self, index: int, threshold: float) -> int:
        """1 if the logarithm of the ratio is more than a threshold with 95 %, -1 if it is less, 0 if neither is sure.

        By the errors that the two do not share (`tasp_lab.prediction.paired`).
        """
        rows: list[dict[str, Any]] = [{**self.row(name, index), "schedule": name} for name in self.schedules]
        first, second = map(rival_of, rows)
        if first is None or second is None:
            return 0
        low, high = paired_errors().ratio(second, first, rows[0]["setting"])
        return (math.log(low) > threshold) - (math.log(high) < threshold)

    def binds(self, index: int) -> Binds:
        """What binds both schedules at a value."""
        found = {name: self.row(name, index).get("bottleneck") for name in self.schedules}
        return {name: None if text is None else str(text) for name, text in found.items()}


def crossover(
    comparison: Comparison,
    scan: Sequence[int],
    tolerance: float = TOLERANCE,
    labels: Mapping[str, Value] | None = None,
) -> dict[str, Any]:
    """All crossings that the scanned indices of the values tell apart, as ``--json`` has them.

    With n scanned values and c crossings it predicts both schedules at n + c log2(n') values, n' being the values of
    the lattice between two scanned ones. Of a crossing, ``last`` is the last value that was tried at which
    ``faster_below`` holds, ``value`` the first one at which it does not; they differ by the tolerance, or by the
    lattice. Between ``low`` and ``high`` it is not sure, 5 to 95 %, which is the faster one; None where that goes on
    beyond the axis. ``speedup_from`` and ``speedup_to`` are the times of the second schedule over those of the first
    at the ends, ``binds`` is what binds at the lowest value that applies, ``refused`` why others do not.
    """
    values, (first, second) = comparison.values, comparison.schedules
    name_of = {1: first, -1: second, 0: None}
    there = [index for index in scan if comparison.faster(index) is not None]
    crossings = list[dict[str, Any]]()
    # Only values where both apply are scanned: a bisection that met a refusal would end there, far from the crossing.
    for change in changes(values, there, comparison.faster, tolerance):
        low, high = (_sure_end(comparison, there, change, tolerance, down) for down in (True, False))
        crossings.append(
            {
                "value": values[change.high],
                "last": values[change.low],
                "low": low,
                "high": high,
                "is_tie": low is high is None,  # no value is surely on one side of it
                "faster_below": name_of[change.before],
                "faster_above": name_of[change.after],
                "binds_below": comparison.binds(change.low),
                "binds_above": comparison.binds(change.high),
            }
        )
    rows = [(name, comparison.row(name, index)) for index in scan for name in (first, second)]
    reasons = (f"{name}: {row.get('error') or row.get('status')}" for name, row in rows if not row.get("time_s"))
    refused = next(reasons, None)
    ratios = {index: comparison.log_ratio(index) or 0.0 for index in there}
    verdict = "crosses"
    if len(there) < 2:
        verdict = f"does not apply: {refused or ''}"
    elif not crossings and not comparison.faster(there[0]):
        verdict = f"within {comparison.margin:.3g} throughout" if comparison.margin else "equal throughout"
    elif not crossings:
        winner = first if ratios[there[0]] > 0 else second
        # where the times differ most it is surest which one is faster: if not even there, then nowhere
        is_sure = comparison.side(max(there, key=lambda index: abs(ratios[index])), 0.0)
        verdict = f"always {winner}" if is_sure else f"a tie throughout, {winner} by prediction"
    return {
        "labels": dict(labels or {}),
        "from": values[scan[0]],
        "to": values[scan[-1]],
        "verdict": verdict,
        "crossings": crossings,
        "speedup_from": math.exp(ratios[there[0]]) if there else None,
        "speedup_to": math.exp(ratios[there[-1]]) if there else None,
        "refused": refused,
        "points": comparison.evaluated,
        "binds": comparison.binds(there[0]) if there else {first: None, second: None},
    }


def _sure_end(
    comparison: Comparison, there: Sequence[int], change: Change, tolerance: float, down: bool
) -> float | None:
    """The value nearest to a change from which on its side is sure with 95 %; None if it is nowhere.

    Scanned values are tried outwards until one is sure, then it is bisected.
    """
    # Between the first and the second schedule the ratio passes 1; between one of them and neither, the margin.
    threshold = comparison.threshold * (change.before + change.after)
    wanted = -1 if down == (change.after > change.before) else 1
    start = change.low if down else change.high
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


def find_crossovers(
    points: Iterable[Point],
    evaluate: Callable[[Point], Row],
    find: Mapping[str, object],
    progress: ProgressCallback = no_progress,
) -> View:
    """The crossover of two schedules in every group of points: a row per crossing, of a group without one its verdict.

    Groups of one value of the axis are left out if others have more.

    Parameters
    ----------
    points : of a study.
    evaluate : the row of a point.
    find : fields, see `FIELDS`: the axis ``along`` which, the two schedules ``between`` which, the ``margin`` up to
        which times count as equal, like ``5%``, and the ends of the axis ``from`` and ``to``, by default those of the
        study; only points ``at`` some values count (`tasp_lab.study.lookup.points_at`).

    Raises `StudyError` for what is missing or impossible, for a schedule that no point has, and where no group has two
    values of the axis.
    """
    fields = fields_of("crossover", FIELDS, find)
    axis, pair = fields["along"], fields["between"]
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        shown = repr(pair) if isinstance(pair, str) else f"{len(pair)} given" if isinstance(pair, Sequence) else pair
        raise StudyError(f"crossover: {shown}, expected two schedules: --between A --between B, or between = [A, B]")
    for what, name in (("along", axis), ("between", pair[0]), ("between", pair[1])):
        if not isinstance(name, str) or not name:
            raise StudyError(f"find.crossover: {what} {name!r}, expected a name")
    check_axis(axis)
    if pair[0] == pair[1]:
        raise StudyError(f"between {pair[0]!r} and itself, expected two schedules")
    between, margin = (str(pair[0]), str(pair[1])), parse_share("margin", fields["margin"])
    for name in ("from", "to"):
        if not isinstance(fields[name], str | int | float | None):
            raise StudyError(f"find.crossover: {name} {fields[name]!r}, expected a value of the axis")
    start, end = (None if fields[name] is None else axis_value(axis, fields[name]) for name in ("from", "to"))
    if start is not None and end is not None and start >= end:
        raise StudyError(f"axis {axis!r}: the interval {start:g} to {end:g} is empty")

    points = points_at(points, str(fields["at"]))
    members, found = dict[str, list[Point]](), set[str]()
    for point in points:
        if named := [name for name in between if point.schedule == fill(name, dict(point.labels))]:
            members.setdefault(apart_from(point, axis), []).append(point)
            found.update(named)
    if missing := [name for name in between if name not in found]:
        known = list(dict.fromkeys(point.schedule for point in points))
        raise StudyError(f"{unknown('schedule', missing[0], known)} of the study")
    firsts = [group[0] for group in members.values()]
    telling = [name for name in label_names(firsts) if name not in (axis, "schedule")
               and len({point.label(name) for point in firsts}) > 1]  # fmt: skip
    values_of = [sorted({value for point in group if (value := value_of(point, axis)) is not None})
                 for group in members.values()]  # fmt: skip
    scans = [(point, scan) for point, values in zip(firsts, values_of, strict=True)
             if len(scan := scanned(values, start, end)) > 1]  # fmt: skip
    if not scans:
        shown = ", ".join(axis_text(axis, value) for value in values_of[0]) or "none"
        expected = "expected two or more in the study, or --from and --to"
        raise StudyError(f"axis {axis!r}: the interval has one value at most, the study has {shown}, {expected}")
    groups = []
    for number, (point, scan) in enumerate(scans, start=1):
        labels = {name: point.label(name) for name in telling}
        text = ", ".join(map(str, labels.values())) or point.machine
        progress(f"crossover {number} of {len(scans)}: {text}")
        values = lattice(axis, scan, multiple=_multiple(point, axis), heads=point.layer.heads)
        compared = Comparison(point, between, axis, values, evaluate, margin)
        groups.append(crossover(compared, [values.index(value) for value in scan], labels=labels))
    return _report(axis, between, margin, groups)


def scanned(values: Sequence[float], start: float | None = None, end: float | None = None) -> list[float]:
    """The values that are tried first: those of the study between the ends, the ends that are given, and doublings.

    >>> scanned([8, 64]), scanned([8], end=64)
    ([8, 64], [8, 16, 32, 64])
    """
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


def _multiple(point: Point, axis: str) -> int:
    """What values of an axis are multiples of: lengths of twice the ranks, heads of the KV heads."""
    if axis == "heads" and point.layer.kv_head_count < point.layer.heads:
        return point.layer.kv_head_count
    try:
        return 2 * ranks_of(point.machine, "ideal") if axis == "seq" else 1
    except TaspLabError:  # its points fail, and say why
        return 2


def _report(axis: str, between: tuple[str, str], margin: float, groups: Sequence[Mapping[str, Any]]) -> View:
    found = [(group, crossing) for group in groups for crossing in (group["crossings"] or [{}])]
    names = list(dict.fromkeys(name for group in groups for name in group["labels"]))
    cells = [
        ["" if (value := group["labels"].get(name)) is None else str(value) for name in names]
        + _cells(axis, group, crossing)
        for group, crossing in found
    ]
    ends = ("95 %", "below", "above", "binds below", "binds above", "speed-up at the ends")
    (first, second), by = between, f", by more than {margin:.3g}" if margin else ""
    title = f"crossovers of {first} and {second} along {axis}{by}; binds: {first} / {second}"
    nowhere = dict.fromkeys(group["verdict"] for group in groups if group["verdict"].startswith("does not apply"))
    parts: list[Part] = [
        Table(title, (*names, axis, *ends), cells, range(len(names))),
        f"{sum(group['points'] for group in groups)} points",
    ]
    if any(group["refused"] and group["verdict"] not in nowhere for group in groups):
        parts.append("values at which a schedule does not apply are left out")
    rows = [group["labels"] | {"verdict": group["verdict"]} | crossing for group, crossing in found]
    shown = [{name: value for name, value in group.items() if name != "binds"} for group in groups]
    document = {"along": axis, "between": list(between), "margin": margin, "groups": shown}
    return View(document, rows, [*parts, *nowhere])


def _cells(axis: str, group: Mapping[str, Any], crossing: Mapping[str, Any]) -> list[str]:
    """The cells of a crossing, or of a group without one, after its labels."""

    def binds(found: Binds) -> str:
        return " / ".join(dict.fromkeys(part or "-" for part in found.values()))

    speedups = (group["speedup_from"], group["speedup_to"])
    at_ends = " .. ".join(f"{ratio:.3g}x" for ratio in speedups if ratio is not None)
    if not crossing:
        return [group["verdict"].partition(":")[0], "", "", "", binds(group["binds"]), "", at_ends]
    low = f"< {axis_text(axis, group['from'])}" if crossing["low"] is None else axis_text(axis, crossing["low"])
    high = f"> {axis_text(axis, group['to'])}" if crossing["high"] is None else axis_text(axis, crossing["high"])
    interval = f"{low} .. {high}" + (" (a tie)" if crossing["is_tie"] else "")
    faster = [crossing[end] or "neither" for end in ("faster_below", "faster_above")]
    bound = [binds(crossing[end]) for end in ("binds_below", "binds_above")]
    return [axis_text(axis, crossing["value"]), interval, *faster, *bound, at_ends]
