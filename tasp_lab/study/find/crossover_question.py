"""What is asked of a study's crossovers: its section ``[find] crossover``, and what is given in place of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tasp_lab.core.errors import QuantityError, StudyError, unknown
from tasp_lab.core.units import parse_count
from tasp_lab.machines.sampling import FEW_SAMPLES, Sampling
from tasp_lab.study.find.moved import WHOLE_AXES, check_axis

FIELDS = ("along", "between", "margin", "from", "to")


@dataclass(frozen=True)
class CrossoverQuestion:
    """Where two schedules cross.

    Parameters
    ----------
    along : the axis.
    between : the two schedules.
    margin : times that differ by less than this share count as equal, 0 to less than 1.
    start, end : the ends of the axis, None for those of the study.
    sampling : of constants, for the interval; no samples for none.
    """

    along: str
    between: tuple[str, str]
    margin: float = 0.0
    start: float | None = None
    end: float | None = None
    sampling: Sampling = FEW_SAMPLES

    def __post_init__(self) -> None:
        check_axis(self.along)
        if self.between[0] == self.between[1]:
            raise StudyError(f"between {self.between[0]!r} and itself, expected two schedules")
        if not 0 <= self.margin < 1:
            raise StudyError(f"margin {self.margin:g}: expected 0 or more and less than 1, like 5%")
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise StudyError(f"axis {self.along!r}: the interval {self.start:g} to {self.end:g} is empty")


def crossover_question(
    find: Mapping[str, object],
    *,
    along: str | None = None,
    between: Sequence[str] = (),
    margin: str | float | None = None,
    start: str | float | None = None,
    end: str | float | None = None,
    sampling: Sampling = FEW_SAMPLES,
) -> CrossoverQuestion:
    """The question of a section of a study, with what is given in place of it.

    >>> found = crossover_question({"along": "seq", "between": ["tasp", "ulysses"], "margin": "5%"}, start="8Ki")
    >>> found.along, found.between, found.margin, found.start
    ('seq', ('tasp', 'ulysses'), 0.05, 8192)

    Raises `StudyError` for what is missing or impossible.
    """
    for name in find:
        if name not in FIELDS:
            raise StudyError(f"find.crossover: {unknown('field', name, FIELDS)}")
    axis = _text("along", along or find.get("along", "seq"))
    check_axis(axis)
    pair = between or find.get("between") or ()
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
        given = repr(pair) if isinstance(pair, str) else f"{len(pair)} given" if isinstance(pair, Sequence) else pair
        raise StudyError(f"crossover: {given}, expected two schedules: --between A --between B, or between = [A, B]")
    start, end = (start if start is not None else _end(find, "from")), (end if end is not None else _end(find, "to"))
    return CrossoverQuestion(
        axis,
        (_text("between", pair[0]), _text("between", pair[1])),
        parse_share("margin", find.get("margin", 0.0) if margin is None else margin),
        None if start is None else axis_value(axis, start),
        None if end is None else axis_value(axis, end),
        sampling,
    )


def parse_share(what: str, given: object) -> float:
    """A share as a number or as a text with a percent sign.

    >>> parse_share("margin", "5%"), parse_share("margin", 0.05)
    (0.05, 0.05)

    Raises `StudyError` for anything else and for one outside 0 to 1.
    """
    try:
        text = str(given).strip()
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if isinstance(given, bool) or not 0 <= share < 1:
        raise StudyError(f"{what} {given!r}: expected 0 or more and less than 1, like 5%")
    return share


def axis_value(axis: str, given: str | float) -> float:
    """A value of an axis: a whole number like ``8Ki``, or a factor like ``x0.5``.

    >>> axis_value("seq", "8Ki"), axis_value("nic.bandwidth", "x0.5")
    (8192, 0.5)

    Raises `StudyError`.
    """
    text = str(given).strip()
    try:
        if axis in WHOLE_AXES:
            return parse_count(text, axis)
    except QuantityError as error:
        raise StudyError(str(error)) from error
    try:
        factor = float(Fraction(text.removeprefix("x")))
    except (ValueError, ZeroDivisionError):
        factor = 0.0
    if not factor > 0:
        raise StudyError(f"{axis} {text!r}: expected a factor more than 0, like x0.5")
    return factor


def _end(find: Mapping[str, object], name: str) -> str | float | None:
    found = find.get(name)
    if found is None or isinstance(found, str | int | float):
        return found
    raise StudyError(f"find.crossover: {name} {found!r}, expected a value of the axis")


def _text(what: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise StudyError(f"find.crossover: {what} {given!r}, expected a name")
    return given
