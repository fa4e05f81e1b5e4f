"""One question of a study, chosen by values of its axes: ``machine=h100-8x8,seq=128Ki``, or values alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasp_lab.core.errors import QuantityError, StudyError, unknown
from tasp_lab.core.units import parse_count
from tasp_lab.study.find.groups import SCHEDULE
from tasp_lab.study.point import AS_IS, Point, Value

VARIANT = "variant"
MAX_NAMED = 8
"""As many values are named in an error."""


def chosen(points: Iterable[Point], at: str = "") -> list[Point]:
    """The points that have all these values; they differ in the schedule only.

    Where several what-if variants remain it is the one in which nothing is changed.

    >>> from tasp_lab.workload.layer import Workload
    >>> points = [Point("h100-8", "tasp", Workload(seq), labels=(("seq", seq),)) for seq in (8192, 16384)]
    >>> [point.layer.sequence for point in chosen(points, "seq=16Ki")], len(chosen(points, "8Ki"))
    ([16384], 1)

    Raises `StudyError` for an unknown name, a value that no point has, and where several questions remain.
    """
    found = those_at(points, at)
    if any(each.label(VARIANT) != AS_IS for each in found):
        found = [each for each in found if each.label(VARIANT) == AS_IS] or found
    _check_one(found, at)
    return found


def those_at(points: Iterable[Point], at: str = "") -> list[Point]:
    """All points that have all these values. Raises `StudyError` for an unknown name, and a value that none has."""
    found = list(points)
    for part in filter(None, (each.strip() for each in at.split(","))):
        name, equals, text = (each.strip() for each in part.partition("="))
        found = _with(found, name, text) if equals else _with_any(found, name)
    return found


def _with(points: Sequence[Point], name: str, text: str) -> list[Point]:
    names = label_names(points)
    if name not in names:
        raise StudyError(f"at {name}={text}: {unknown('axis', name, names)}")
    kept = [each for each in points if _is(each.label(name), text)]
    if not kept:
        values = dict.fromkeys(str(each.label(name)) for each in points)
        raise StudyError(f"at {name}={text}: no such point, {name} is {_some(values)}")
    return kept


def _with_any(points: Sequence[Point], text: str) -> list[Point]:
    """The points one of whose axes has a value."""
    kept = [each for each in points if any(_is(value, text) for _, value in each.labels)]
    if not kept:
        values = dict.fromkeys(str(value) for each in points for _, value in each.labels)
        raise StudyError(f"at {text!r}: {unknown('value', text, values)}")
    return kept


def _is(value: Value, text: str) -> bool:
    if str(value) == text:
        return True
    try:
        return not isinstance(value, bool) and isinstance(value, int) and value == parse_count(text)
    except QuantityError:
        return False


def _check_one(points: Sequence[Point], at: str) -> None:
    """Raise `StudyError` where points differ in more than their schedule."""
    for name in label_names(points):
        values = dict.fromkeys(str(each.label(name)) for each in points)
        if name != SCHEDULE and len(values) > 1:
            where = f"at {at!r}" if at else "no point is chosen"
            raise StudyError(f"{where}: {name} is {_some(values)}, expected one: --at {name}=...")


def label_names(points: Sequence[Point]) -> list[str]:
    """The names of all labels, in order."""
    return list(dict.fromkeys(name for each in points for name, _ in each.labels))


def _some(values: Iterable[str]) -> str:
    names = list(values)
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
