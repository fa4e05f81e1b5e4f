"""Axes: the values that a study lists, and for numeric axes points at other values and what lies between two::

    axis_values("seq", "geom(8Ki, 1Mi, 2)"), moved(point, "seq", 16384), moved(point, "nic.bandwidth", 1.5)

A numeric axis is a number of the layer (`LAYER_NUMBERS`), a number of the schedule's options, ``nodes``, or the factor
of an override, such as ``nic.bandwidth``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from tasp_lab.core.errors import QuantityError, StudyError, unknown
from tasp_lab.core.units import parse_count
from tasp_lab.prediction.question import Value
from tasp_lab.schedules.attention.options import NUMBERS
from tasp_lab.study.point import LAYER, LAYER_NUMBERS, OPTIONS, SETTINGS, Point

NODES = "nodes"
WHOLE_AXES = (*LAYER_NUMBERS, *NUMBERS, NODES)
"""Axes of whole numbers; all others are factors of overrides, whose names have a dot."""

_FAMILY = r"(?P<family>[a-z][a-z0-9_]*-|nodes:|.+\.toml:)"
_MEMBER = re.compile(_FAMILY + r"(?P<nodes>[1-9][0-9]{0,4})x(?P<rest>(?:1x)?[1-9][0-9]{0,4}(?![x0-9]).*)")
_SINGLE = re.compile(_FAMILY.replace("|nodes:", "") + r"(?P<rest>[1-9][0-9]{0,4})")

SIGNIFICANT_DIGITS = 9
"""Of a factor in an override."""


def check_axis(axis: str) -> None:
    """Raise `StudyError` for an axis that is not numeric.

    >>> check_axis("mask")
    Traceback (most recent call last):
    ...
    tasp_lab.core.errors.StudyError: axis 'mask' is not numeric, expected one of seq, batch, heads, kv_heads, head_dim,\
 window, cached_keys, linear_kv_heads, value_dim, buffers, pieces, stages, tail_chunks, nodes, or an override's name\
 like nic.bandwidth
    """
    if axis in WHOLE_AXES or "." in axis.strip("."):
        return
    known = f"{', '.join(WHOLE_AXES)}, or an override's name like nic.bandwidth"
    if axis in ("machine", "schedule", "variant", "passes", *LAYER, *OPTIONS, *SETTINGS):
        raise StudyError(f"axis {axis!r} is not numeric, expected one of {known}")
    raise StudyError(f"{unknown('axis', axis, WHOLE_AXES)}, or an override's name like nic.bandwidth")


def moved(point: Point, axis: str, value: float) -> Point:
    """A point at another value of an axis; its label of that name, too.

    >>> from tasp_lab.workload.layer import Workload
    >>> point = Point("h100-2x8", "tasp", Workload(8192, heads=32, kv_heads=8), overrides=("nic.bandwidth=x2",))
    >>> moved(point, "seq", 16384).layer.sequence, moved(point, "nodes", 4).machine
    (16384, 'h100-4x8')
    >>> moved(point, "nic.bandwidth", 1.5).overrides
    ('nic.bandwidth=x1.5',)

    Raises `StudyError` for an axis that is not numeric or that the point lacks, and `TaspLabError` for an impossible
    value.
    """
    check_axis(axis)
    value = int(value) if axis in WHOLE_AXES else value
    changed: dict[str, Any] = {"labels": tuple((name, value if name == axis else old) for name, old in point.labels)}
    if axis in LAYER_NUMBERS:
        of_layer: dict[str, Any] = dict.fromkeys(_layer_fields(point, axis), value)
        changed["work"] = replace(point.layer, **of_layer)
    elif axis in NUMBERS:
        changed["options"] = replace(point.options, **{axis: value})  # type: ignore[arg-type]
    elif axis == NODES:
        family, _, rest = _machine_parts(point.machine)
        changed["machine"] = f"{family}{value}x{rest}"
    else:
        own = () if value == 1 else (f"{axis}=x{factor_text(value)}",)
        changed["overrides"] = (*(text for text in point.overrides if not _is_factor(text, axis)), *own)
    return replace(point, **changed)


def value_of(point: Point, axis: str) -> float | None:
    """The value of an axis at a point; None if it has none, as a layer without a window, or stages that are left
    open.

    >>> from tasp_lab.workload.layer import Workload
    >>> point = Point("h100-8", "tasp", Workload(8192), overrides=("nic.bandwidth=x2",))
    >>> [value_of(point, axis) for axis in ("seq", "buffers", "nodes", "nic.bandwidth", "link.latency")]
    [8192, 3, 1, 2.0, 1.0]
    """
    check_axis(axis)
    if axis in LAYER_NUMBERS or axis in NUMBERS:
        subject, field = (point.layer, LAYER_NUMBERS[axis]) if axis in LAYER_NUMBERS else (point.options, axis)
        number: object = getattr(subject, field)
        return number if isinstance(number, int) else None  # a window on both sides is none
    if axis == NODES:
        return _machine_parts(point.machine)[1]
    factors = (found[1] for found in map(factor_of, point.overrides) if found is not None and found[0] == axis)
    return float(math.prod(factors, start=Fraction(1)))


def apart_from(point: Point, axis: str) -> str:
    """What a point asks besides an axis and its schedule, as a key.

    >>> from tasp_lab.workload.layer import Workload
    >>> one, other = Point("h100-8", "tasp", Workload(8192)), Point("h100-8", "ring-attention", Workload(16384))
    >>> apart_from(one, "seq") == apart_from(other, "seq"), apart_from(one, "batch") == apart_from(other, "batch")
    (True, False)
    """
    # Fields of layer and options one by one, since a layer with another value of the axis may not exist: 7 heads, say.
    layer, options = asdict(point.layer), asdict(point.options)
    for name in _layer_fields(point, axis):
        layer[name] = None
    rest = replace(point, schedule="", machine="" if axis == NODES else point.machine).inputs()
    machine = _machine_parts(point.machine)[::2] if axis == NODES else None
    overrides = [text for text in point.overrides if not _is_factor(text, axis)]
    rest |= {"layer": layer, "options": options | {axis: None}, "overrides": overrides, NODES: machine}
    return json.dumps(rest, sort_keys=True)


def factor_text(value: float) -> str:
    """A factor as overrides take it, without an exponent.

    >>> factor_text(2.0), factor_text(0.00012345678912)
    ('2', '0.000123456789')
    """
    return f"{value:.12f}".rstrip("0").rstrip(".") if value < 1 else f"{value:.{SIGNIFICANT_DIGITS}g}"


def _layer_fields(point: Point, axis: str) -> list[str]:
    """The fields of the layer that have the value of an axis: KV heads follow the heads where they are as many, and the
    keys of a decode layer its positions.
    """
    names = [axis]
    if axis == "heads" and point.layer.kv_head_count == point.layer.heads:
        names.append("kv_heads")
    if axis in ("seq", "cached_keys") and point.layer.decode:
        names = ["seq", "cached_keys"]
    return [LAYER_NUMBERS[name] for name in names if name in LAYER_NUMBERS]


def factor_of(override: str) -> tuple[str, Fraction] | None:
    """The name and the factor of an override; None of one that is no factor.

    >>> factor_of("nic.bandwidth=x2"), factor_of("link.latency=+1us")
    (('nic.bandwidth', Fraction(2, 1)), None)
    """
    name, _, value = (part.strip() for part in override.partition("="))
    try:
        return (name, Fraction(value[1:])) if value.startswith("x") else None
    except ValueError:
        return None


def _is_factor(override: str, axis: str) -> bool:
    return (factor_of(override) or ("",))[0] == axis


def _machine_parts(machine: str) -> tuple[str, int, str]:
    """The name of a machine before its number of nodes, this number, and what follows: ``h100-``, 2, ``8``."""
    if found := _MEMBER.fullmatch(machine):
        return found["family"], int(found["nodes"]), found["rest"]
    if found := _SINGLE.fullmatch(machine):
        return found["family"], 1, found["rest"]
    raise StudyError(f"axis 'nodes': machine {machine!r} has no number of nodes, expected a name like h100-2x8")


# ------------------------------------------------------------------------------ the values that a study lists

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

    Raises `StudyError` for an empty axis, a value that is no text, number or truth value, and a sequence
    that does not end.
    """
    if isinstance(given, str) and (found := _GEOM.fullmatch(given)):
        return _geometric(f"axis {name!r}: {given.strip()}", name, found["arguments"].split(","))
    several = given if isinstance(given, list | tuple) else [given]
    if not several:
        raise StudyError(f"axis {name!r} is empty, expected one value or more")
    values = list[Value]()
    for value in several:
        if not isinstance(value, str | int | float):
            raise StudyError(f"axis {name!r}: {value!r}, expected a text, a number, true or false")
        try:
            is_count = isinstance(value, str) and _PREFIXED.fullmatch(value)
            values.append(parse_count(str(value), name) if is_count else value)
        except QuantityError as error:
            raise StudyError(f"axis {error}") from error
    return tuple(values)


def _geometric(text: str, name: str, parts: Sequence[str]) -> tuple[Value, ...]:
    """The terms of a geometric sequence; whole numbers where the first and the ratio are."""
    if len(parts) != 3:
        raise StudyError(f"{text}, expected geom(FIRST, LAST, RATIO) like geom(8Ki, 1Mi, 2)")
    numbers = list[Fraction]()
    for part in map(str.strip, parts):
        try:
            numbers.append(Fraction(parse_count(part, name) if _PREFIXED.fullmatch(part) else part))
        except (QuantityError, ValueError, ZeroDivisionError):
            raise StudyError(f"{text}: {part!r}, expected a number like 8Ki or 1.5") from None
    first, last, ratio = numbers
    if ratio <= 1 or not 0 < first <= last:
        expected = "expected 0 < FIRST, FIRST at most LAST, and a RATIO above 1"
        raise StudyError(f"{text} never ends or has no terms, {expected}")
    count = math.floor(math.log(last / first) / math.log(ratio) + _ROUNDING) + 1
    if count > MAX_VALUES:
        raise StudyError(f"{text} has {count:,} terms, expected at most {MAX_VALUES:,}")
    if first.denominator == ratio.denominator == 1:
        return tuple(int(first) * int(ratio) ** power for power in range(count))
    return tuple(float(first) * float(ratio) ** power for power in range(count))


# ---------------------------------------------------------------------------------------------- values as texts


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
    """A value of an axis: a whole number like ``8Ki``, or a factor like ``x0.5``. Raises `StudyError`.

    >>> axis_value("seq", "8Ki"), axis_value("nic.bandwidth", "x0.5")
    (8192, 0.5)
    """
    text = str(given).strip()
    try:
        factor = parse_count(text, axis) if axis in WHOLE_AXES else float(Fraction(text.removeprefix("x")))
    except QuantityError as error:
        raise StudyError(str(error)) from error
    except (ValueError, ZeroDivisionError):
        factor = 0.0
    if not factor > 0:
        raise StudyError(f"{axis} {text!r}: expected a factor more than 0, like x0.5")
    return factor


def axis_text(axis: str, value: float) -> str:
    """A value for people.

    >>> axis_text("seq", 24576), axis_text("heads", 12), axis_text("nic.bandwidth", 1.5)
    ('24Ki', '12', 'x1.5')
    >>> axis_text("seq", 4672), axis_text("seq", 800)
    ('4.562Ki', '800')
    """
    if axis not in WHOLE_AXES:
        return f"x{value:.4g}"
    for unit, factor in (("Mi", 2**20), ("Ki", 2**10)):
        if axis in ("seq", "window", "cached_keys") and value >= factor:
            return f"{int(value) / factor:.4g}{unit}"
    return str(int(value))


# ---------------------------------------------------------------------------------- the values between two ends

TOLERANCE = 0.02
"""A value is found to 2 %, or to the lattice where that is coarser."""

STEPPED = ("seq", "heads", "head_dim", "value_dim", "window", "cached_keys")
"""Axes of large numbers, whose values have a common divisor."""


def lattice(
    axis: str, scan: Sequence[float], *, multiple: int = 1, heads: int = 1, tolerance: float = TOLERANCE
) -> Sequence[float]:
    """The values of an axis between the ends of `scan`, those of `scan` among them.

    Lengths, heads and the like are multiples of a step between any two scanned neighbours: the greatest common divisor
    of all scanned values, halved while it is more than `tolerance` of the lower neighbour and stays a multiple of
    `multiple`, what schedules need. KV heads divide the `heads`. Factors are a geometric series of steps of at most
    `tolerance`. All others are whole numbers.

    >>> found = lattice("seq", [8192, 16384, 32768], multiple=16)
    >>> len(found), found[1] - found[0], found[-1] - found[-2]
    (129, 128, 256)
    >>> lattice("kv_heads", [1, 8], heads=32)
    [1, 2, 4, 8]

    Raises `StudyError` for an empty interval.
    """
    values = sorted(set(scan))
    if len(values) < 2:
        raise StudyError(f"axis {axis!r}: the interval is empty, expected two values or more")
    found = list[float]()
    if axis not in WHOLE_AXES:
        for low, high in pairwise(values):
            steps = math.ceil(math.log(high / low) / math.log1p(tolerance))
            found += [low * (high / low) ** (index / steps) for index in range(steps)]
        return [*found, values[-1]]
    whole = [int(value) for value in values]
    if axis == "kv_heads":
        return [value for value in range(whole[0], whole[-1] + 1) if heads % value == 0 or value in whole]
    for low, high in pairwise(whole):
        step = math.gcd(*whole) if axis in STEPPED else 1
        # halved, and not divided by any number, so that the scanned values stay in the lattice
        while step > max(tolerance * low, 1) and step % (2 * multiple) == 0:
            step //= 2
        found += range(low, high, step)
    return [*found, whole[-1]]


# ---------------------------------------------------------------------------------------------------- bisection

State = TypeVar("State", bound=Hashable)


class Change(NamedTuple):
    """A state that changes between two indices of the values: `before` at `low` and below, `after` at `high`."""

    low: int
    high: int
    before: Any
    after: Any


def changes(
    values: Sequence[float], scan: Sequence[int], state: Callable[[int], State | None], tolerance: float = 0.0
) -> list[Change]:
    """All changes of a state that the scanned indices tell apart, ascending.

    Between two scanned neighbours of different states the one of the first is bisected until it ends, then the next. A
    bisection ends with two adjacent values, with two that differ by `tolerance` at most, or where a state is None: it
    does not exist there. Changes that come and go between neighbours are not seen.

    Parameters
    ----------
    values : ascending, more than 0.
    scan : ascending indices of values; those without a state are left out.
    state : the state at an index, called once for each.

    >>> [(change.low, change.high) for change in changes(range(1, 101), [0, 99], lambda index: index >= 30)]
    [(29, 30)]
    """
    known = cache(state)

    def holds(index: int, wanted: State) -> bool | None:
        found = known(index)
        return None if found is None else found == wanted

    there = [(index, found) for index in scan if (found := known(index)) is not None]
    seen = []
    for (low, before), (high, after) in pairwise(there):
        while before != after:  # several changes may lie between two neighbours
            last, low = bisected(values, low, high, lambda index: holds(index, before), tolerance)  # noqa: B023
            reached = known(low)
            assert reached is not None, "a bisection ends at states that exist"
            seen.append(Change(last, low, before, reached))
            before = reached
    return seen


def bisected(
    values: Sequence[float], low: int, high: int, holds: Callable[[int], bool | None], tolerance: float = 0.0
) -> tuple[int, int]:
    """Two indices between which a predicate ends that holds at `low` and not at `high`.

    They are adjacent, or their values differ by `tolerance` at most, or the predicate is None between them.

    >>> bisected(range(1, 101), 0, 99, lambda index: index < 30)
    (29, 30)
    """
    while high - low > 1 and values[high] > values[low] * (1 + tolerance):
        middle = (low + high) // 2
        found = holds(middle)
        if found is None:
            break
        low, high = (middle, high) if found else (low, middle)
    return low, high
