"""The study of a file or of a folder, its points by values of their axes, and rows that are known there::

study, evaluate = study_at("longctx")
evaluate(points_at(study.points(), "machine=h100-8x8,seq=128Ki")[0])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tasp_lab.core.errors import QuantityError, StudyError, unknown
from tasp_lab.core.units import parse_count
from tasp_lab.prediction.question import Value
from tasp_lab.schedules.registry import is_own
from tasp_lab.study.evaluate import evaluate, group_rows, labelled, own_sources
from tasp_lab.study.file import load_study
from tasp_lab.study.folder import POINTS, STUDY, StudyFolder, no_study
from tasp_lab.study.frames import listed, records_of
from tasp_lab.study.point import AS_IS, Point, Row
from tasp_lab.study.store import RESULTS, Store
from tasp_lab.study.study import Study

MAX_NAMED = 8
"""As many values are named in an error."""


def study_at(path: str | Path) -> tuple[Study, Callable[[Point], Row]]:
    """The study of a file or of a folder it was run in, and what answers its points: with rows of the folder that hold.

    Raises `StudyError` where there is none.
    """
    path = Path(path)
    if not path.is_dir():
        return load_study(path), evaluate
    if not (path / STUDY).exists():
        raise no_study(path)
    known, keys = dict[str, Row](), dict[str, str]()
    if (path / RESULTS).exists():
        sources = own_sources()
        with Store(path) as store:
            last = {question: each for question, each in store.last().items() if each.status == "ok"}
            known = store.rows(each.key for each in last.values())
        # while the sources are the same the key of a question holds without building its schedules
        keys = {question: each.key for question, each in last.items() if each.sources == sources}
    elif (path / POINTS).exists():  # a folder that was passed on without its store
        known = {str(row["key"]): row for row in records_of(StudyFolder(path).rows()) if row["status"] == "ok"}

    def stored(point: Point) -> Row:
        key = keys.get(point.key(), "") if is_own(point.schedule) else ""
        (row,) = [key] if key in known else group_rows([point], known=known)
        return known[row] if isinstance(row, str) else labelled(row, point)

    return load_study(path / STUDY), stored


def fields_of(kind: str, defaults: Mapping[str, object], find: Mapping[str, object]) -> dict[str, Any]:
    """The fields of a question in the section ``[find]``, or their defaults.

    Raises `StudyError` for an unknown field.
    """
    for name in find:
        if name not in defaults:
            raise StudyError(f"find.{kind}: {unknown('field', name, defaults)}")
    return {**defaults, **find}


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
    for part in filter(None, map(str.strip, at.split(","))):
        names = label_names(left)
        name, has_name, text = (word.strip() for word in part.partition("="))
        if has_name and name not in names:
            raise StudyError(f"at {name}={text}: {unknown('axis', name, names)}")
        text, names = (text, [name]) if has_name else (name, names)
        found = [point for point in left if any(_is(point.label(name), text) for name in names)]
        if not found:
            values = dict.fromkeys(str(point.label(name)) for point in left for name in names)
            if not has_name:
                raise StudyError(f"at {text!r}: {unknown('value', text, values)}")
            raise StudyError(f"at {name}={text}: no such point, {name} is {listed(list(values), MAX_NAMED)}")
        left = found
    return left


def one_point_at(points: Iterable[Point], at: str = "") -> list[Point]:
    """The points that have all these values and differ in the schedule only.

    Where several what-if variants remain it is the one in which nothing is changed. Raises `StudyError` as `points_at`
    does, and where points differ in more than their schedule.
    """
    left = points_at(points, at)
    # a study with variants asks every question several times; who names none means the machine as it is
    left = [point for point in left if point.label("variant") == AS_IS] or left
    for name in label_names(left):
        values = dict.fromkeys(str(point.label(name)) for point in left)
        if name != "schedule" and len(values) > 1:
            where = f"at {at!r}" if at else "no point is chosen"
            raise StudyError(f"{where}: {name} is {listed(list(values), MAX_NAMED)}, expected one: --at {name}=...")
    return left


def _is(value: Value, text: str) -> bool:
    if str(value) == text:
        return True
    try:
        return not isinstance(value, bool) and isinstance(value, int) and value == parse_count(text)
    except QuantityError:
        return False


def label_names(points: Iterable[Point]) -> list[str]:
    """The names of all labels, in order."""
    return list(dict.fromkeys(name for point in points for name, _ in point.labels))
