"""The study of a file or of a folder, its points by values of their axes and in groups, and rows that are known there::

source = study_at("longctx")
points = points_at(source.study.points(), "machine=h100-8x8,seq=128Ki")
source.evaluate(points[0])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tasp_lab.core.errors import QuantityError, StudyError, TaspLabError, unknown
from tasp_lab.core.units import parse_count
from tasp_lab.prediction.question import Value
from tasp_lab.schedules.registry import is_own
from tasp_lab.study.axis import apart_from, value_of
from tasp_lab.study.evaluate import group_rows, labelled, own_sources
from tasp_lab.study.file import load_study
from tasp_lab.study.folder import POINTS, STUDY, StudyFolder
from tasp_lab.study.frames import listed
from tasp_lab.study.point import AS_IS, Point, Row
from tasp_lab.study.store import RESULTS, Store
from tasp_lab.study.study import Study, fill, ranks_of

Evaluate = Callable[[Point], Row]
"""The row of a point."""

SCHEDULE, VARIANT = "schedule", "variant"
STORED = ("key", "status", "time_s", "exposed_s", "steps", "setting", "measured", "bottleneck")
"""What is used of a row of a folder without a store."""

MAX_NAMED = 8
"""As many values are named in an error."""


@dataclass(frozen=True)
class StudySource:
    """A study by its file or by the folder it was run in.

    `known` are rows that were simulated there, by key, and `keys` those of points whose schedules need not be built, by
    the hash of what they ask.
    """

    study: Study
    known: Mapping[str, Row] = field(default_factory=dict, repr=False)
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    def evaluate(self, point: Point) -> Row:
        """The row of a point: that of the folder if it still holds, else a new one."""
        key = self.keys.get(point.key(), "") if is_own(point.schedule) else ""
        if key in self.known:
            return self.known[key]
        (row,) = group_rows([point], known=self.known)
        return self.known[row] if isinstance(row, str) else labelled(row, point)


def study_at(path: str | Path) -> StudySource:
    """The study of a file or of a folder. Raises `StudyError` where there is none."""
    path = Path(path)
    if not path.is_dir():
        return StudySource(load_study(path))
    if not (path / STUDY).exists():
        raise StudyError(f"{path}: no study there, expected {STUDY}, as tasp-lab study run FILE --output {path} writes")
    return StudySource(load_study(path / STUDY), *_stored(path))


def _stored(folder: Path) -> tuple[dict[str, Row], dict[str, str]]:
    """The rows of a folder that have a time, by key; and the keys that hold without building schedules.

    Without a store, as in a folder that was passed on, the rows are those of the files.
    """
    if (folder / RESULTS).exists():
        sources = own_sources()
        with Store(folder) as store:
            last = {question: each for question, each in store.last().items() if each.status == "ok"}
            rows = store.rows(each.key for each in last.values())
        return rows, {question: each.key for question, each in last.items() if each.sources == sources}
    if not (folder / POINTS).exists():
        return {}, {}
    frame = StudyFolder(folder).rows()
    done = frame[frame["status"] == "ok"]
    columns = [column for column in STORED if column in done]
    return {str(row["key"]): row for row in done[columns].to_dict("records")}, {}


# ------------------------------------------------------------------------------------ points by values of axes


def points_at(points: Iterable[Point], at: str = "") -> list[Point]:
    """All points that have all these values: ``machine=h100-8x8,seq=128Ki``, or values alone.

    >>> from tasp_lab.workload.layer import Workload
    >>> points = [Point("h100-8", "tasp", Workload(seq), labels=(("seq", seq),)) for seq in (8192, 16384)]
    >>> [point.layer.sequence for point in points_at(points, "seq=16Ki")], len(points_at(points, "8Ki"))
    ([16384], 1)

    Raises `StudyError` for an unknown name, a value that no point has, and points that ask for plans.
    """
    left = list(points)
    if any(point.job is not None for point in left):
        raise StudyError("a study of plans, expected one of layers")
    for part in filter(None, (each.strip() for each in at.split(","))):
        name, equals, text = (each.strip() for each in part.partition("="))
        left = _with(left, name, text) if equals else _with_any(left, name)
    return left


def one_point_at(points: Iterable[Point], at: str = "") -> list[Point]:
    """The points that have all these values and differ in the schedule only.

    Where several what-if variants remain it is the one in which nothing is changed. Raises `StudyError` as `points_at`
    does, and where points differ in more than their schedule.
    """
    left = points_at(points, at)
    left = [point for point in left if point.label(VARIANT) == AS_IS] or left
    for name in label_names(left):
        values = dict.fromkeys(str(point.label(name)) for point in left)
        if name != SCHEDULE and len(values) > 1:
            where = f"at {at!r}" if at else "no point is chosen"
            raise StudyError(f"{where}: {name} is {listed(list(values), MAX_NAMED)}, expected one: --at {name}=...")
    return left


def _with(points: Sequence[Point], name: str, text: str) -> list[Point]:
    names = label_names(points)
    if name not in names:
        raise StudyError(f"at {name}={text}: {unknown('axis', name, names)}")
    left = [point for point in points if _is(point.label(name), text)]
    if not left:
        values = list(dict.fromkeys(str(point.label(name)) for point in points))
        raise StudyError(f"at {name}={text}: no such point, {name} is {listed(values, MAX_NAMED)}")
    return left


def _with_any(points: Sequence[Point], text: str) -> list[Point]:
    """The points one of whose axes has a value."""
    left = [point for point in points if any(_is(value, text) for _, value in point.labels)]
    if not left:
        values = dict.fromkeys(str(value) for point in points for _, value in point.labels)
        raise StudyError(f"at {text!r}: {unknown('value', text, values)}")
    return left


def _is(value: Value, text: str) -> bool:
    if str(value) == text:
        return True
    try:
        return not isinstance(value, bool) and isinstance(value, int) and value == parse_count(text)
    except QuantityError:
        return False


def label_names(points: Sequence[Point]) -> list[str]:
    """The names of all labels, in order."""
    return list(dict.fromkeys(name for point in points for name, _ in point.labels))


# ------------------------------------------------------------------------------- groups of points along an axis


@dataclass(frozen=True)
class Group:
    """Points that differ in an axis and in the schedule.

    Parameters
    ----------
    point : one of them.
    values : those of the axis, ascending.
    labels : the axes of the study that tell the group from others, with its values.
    multiple : what values of the axis are multiples of: lengths of twice the ranks, heads of the KV heads.
    """

    point: Point
    values: tuple[float, ...]
    labels: tuple[tuple[str, Value], ...]
    multiple: int = 1

    @property
    def text(self) -> str:
        """The labels on one line."""
        return ", ".join(str(value) for _, value in self.labels) or self.point.machine


def groups_along(points: Iterable[Point], axis: str, schedules: Sequence[str]) -> list[Group]:
    """The groups of these schedules along an axis, in the order of the points."""
    by_key: dict[str, list[Point]] = {}
    for point in points:
        if any(point.schedule == filled(name, point) for name in schedules):
            by_key.setdefault(apart_from(point, axis), []).append(point)
    firsts = [members[0] for members in by_key.values()]
    names = [name for name in label_names(firsts) if name not in (axis, SCHEDULE)]
    telling = [name for name in names if len({point.label(name) for point in firsts}) > 1]
    return [
        Group(
            members[0],
            tuple(sorted({value for point in members if (value := value_of(point, axis)) is not None})),
            tuple((name, members[0].label(name)) for name in telling),
            _multiple(members[0], axis),
        )
        for members in by_key.values()
    ]


def _multiple(point: Point, axis: str) -> int:
    if axis == "heads" and point.layer.kv_head_count < point.layer.heads:
        return point.layer.kv_head_count
    if axis != "seq":
        return 1
    try:
        return 2 * ranks_of(point.machine, "ideal")
    except TaspLabError:  # its points fail, and say why
        return 2


def filled(schedule: str, point: Point) -> str:
    """The name of a schedule with the values of a point's axes in place of their names in braces.

    >>> from tasp_lab.workload.layer import Workload
    >>> filled("usp:8x{nodes}", Point("h100-2x8", "tasp", Workload(8192), labels=(("nodes", 2),)))
    'usp:8x2'
    """
    return fill(schedule, dict(point.labels))
