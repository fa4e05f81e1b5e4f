"""Values of axes: lists, single values, and geometric sequences as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction

from tasp_lab.core.errors import QuantityError, StudyError
from tasp_lab.core.units import parse_count
from tasp_lab.study.point import Value

MAX_VALUES = 10_000
"""The most values of one axis."""

_ROUNDING = 1e-9
"""Of logarithms: a last term that is reached up to rounding belongs to a sequence."""

_GEOM = re.compile(r"\s*geom\s*\((?P<arguments>.*)\)\s*")
_PREFIXED = re.compile(r"\s*[0-9.]+\s*[KMGTkmgt]i?\s*")


def axis_values(name: str, given: object) -> tuple[Value, ...]:
    """The values of an axis: a list, one value, or ``geom(FIRST, LAST, RATIO)``, both ends included.

    Counts may have a binary prefix.

    >>> axis_values("seq", "geom(8Ki, 64Ki, 2)"), axis_values("seq", ["1Ki", 2000]), axis_values("mask", "causal")
    ((8192, 16384, 32768, 65536), (1024, 2000), ('causal',))

    Raises `StudyError` for an empty axis, a value twice, one that is no text, number or truth value, and a sequence
    that does not end.
    """
    if isinstance(given, str) and (found := _GEOM.fullmatch(given)):
        return _geometric(name, given.strip(), found["arguments"])
    several = given if isinstance(given, list | tuple) else [given]
    if not several:
        raise StudyError(f"axis {name!r} is empty, expected one value or more")
    values = tuple(_value(name, each) for each in several)
    _check_once(name, values)
    return values


def _value(name: str, given: object) -> Value:
    if isinstance(given, str) and _PREFIXED.fullmatch(given):
        try:
            return parse_count(given, name)
        except QuantityError as error:
            raise StudyError(f"axis {error}") from error
    if not isinstance(given, str | int | float):
        raise StudyError(f"axis {name!r}: {given!r}, expected a text, a number, true or false")
    return given


def _check_once(name: str, values: Iterable[Value]) -> None:
    seen: set[tuple[type, Value]] = set()
    for each in values:
        if (type(each), each) in seen:
            raise StudyError(f"axis {name!r} has the value {each!r} twice, expected it once")
        seen.add((type(each), each))


def _geometric(name: str, text: str, arguments: str) -> tuple[Value, ...]:
    """The terms of a geometric sequence; whole numbers where the first and the ratio are."""
    parts = arguments.split(",")
    if len(parts) != 3:
        raise StudyError(f"axis {name!r}: {text}, expected geom(FIRST, LAST, RATIO) like geom(8Ki, 1Mi, 2)")
    first, last, ratio = (_number(name, text, part) for part in parts)
    if ratio <= 1 or not 0 < first <= last:
        raise StudyError(
            f"axis {name!r}: {text} never ends or has no terms, expected 0 < FIRST, FIRST at most LAST, and a RATIO "
            "above 1"
        )
    count = math.floor(math.log(last / first) / math.log(ratio) + _ROUNDING) + 1
    if count > MAX_VALUES:
        raise StudyError(f"axis {name!r}: {text} has {count:,} terms, expected at most {MAX_VALUES:,}")
    if all(each.denominator == 1 for each in (first, ratio)):
        return tuple(int(first) * int(ratio) ** power for power in range(count))
    return tuple(float(first) * float(ratio) ** power for power in range(count))


def _number(name: str, text: str, part: str) -> Fraction:
    try:
        return Fraction(parse_count(part.strip(), name) if _PREFIXED.fullmatch(part) else Fraction(part.strip()))
    except (QuantityError, ValueError, ZeroDivisionError):
        raise StudyError(f"axis {name!r}: {text}: {part.strip()!r}, expected a number like 8Ki or 1.5") from None
