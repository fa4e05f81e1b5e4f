"""Parameters: the numbers of a machine, each with its unit, its interval and its source.

::

    parameters = load_profile("h100").parameters
    parameters["nic_payload"].source                           # where it comes from
    parameters.numbers["nic_payload"]                          # 4.7e10, in bytes/s
    changed(parameters, {"nic_bandwidth": Change(times=2)})    # a what-if; what depends on it follows

A file states a constant as text (`Constant`). The text is parsed once, when the file is read; from there on a parameter
is a number, and text is made for output only. `changed` is the one way to other numbers: overrides, samples of the
intervals, fits and what-ifs are mappings from names to changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec

from tasp_lab.core.errors import ProfileError, QuantityError
from tasp_lab.core.records import Record, Text
from tasp_lab.core.units import Number, parse_time_s
from tasp_lab.machines.constants import CONSTANTS

_TEXT_DIGITS = 15
"""Digits of a number written as text: every decimal number of so many digits survives as a float."""


class Constant(Record, frozen=True, forbid_unknown_fields=True):
    """A constant as a file, a tool or a data sheet states it: texts, like ``450GB/s``.

    `interval` is its 5 to 95 % interval where the file states one: two values, or a width like ``5%``.
    """

    name: Text
    value: Text
    source: Text
    interval: tuple[Text, Text] | Text | None = None


class DependentConstant(Constant, frozen=True, forbid_unknown_fields=True):
    """A constant that may be stated `at` a value of the one on which it depends, like ``nic_bandwidth = 400Gbit/s``."""

    at: str = ""


@dataclass(frozen=True)
class Parameter:
    """A number of a machine.

    Parameters
    ----------
    name : one of `CONSTANTS`, or any other name in the file of one machine.
    value : in SI units; a text where the name has no definition.
    source : where it comes from; ``assum...`` marks an assumption, ``given...`` what a user gave.
    at : the value of the parameter on which this one depends, at which it has this value; None if it has it always.
    low, high : the ends of its 5 to 95 % interval where the file states it; see `tasp_lab.machines.intervals`.
    written, written_at : `value` and `at` as the file has them; empty for numbers that were computed.

    >>> Parameter.parse("link_bandwidth", "900GB/s", "a data sheet").value
    900000000000.0
    """

    name: str
    value: float | str
    source: str
    at: float | None = None
    low: float | None = None
    high: float | None = None
    written: str = field(default="", compare=False, repr=False)
    written_at: str = field(default="", compare=False, repr=False)

    @classmethod
    def parse(cls, name: str, text: str, source: str) -> Parameter:
        """The parameter that a text states. Raises `QuantityError`."""
        value = CONSTANTS[name].parse(text) if name in CONSTANTS else text
        return cls(name, value, source, written=text)

    @property
    def number(self) -> float:
        """The value of a parameter that has a definition."""
        assert not isinstance(self.value, str), "only parameters without a definition are texts"
        return self.value

    @property
    def text(self) -> str:
        """The value with its unit, as its file has it."""
        return self.written or text_of(self.name, self.value)

    @property
    def at_text(self) -> str:
        """What it is stated at, like ``nic_bandwidth = 400Gbit/s``; empty if it does not depend on another."""
        if self.at is None:
            return ""
        other = CONSTANTS[self.name].depends_on
        return self.written_at or f"{other} = {text_of(other, self.at)}"

    @property
    def interval_texts(self) -> tuple[str, str] | None:
        """The ends of a stated interval."""
        if self.low is None or self.high is None:
            return None
        return text_of(self.name, self.low), text_of(self.name, self.high)

    @property
    def assumed(self) -> bool:
        """Whether it is an assumption."""
        return self.source.startswith("assum")

    def document(self) -> dict[str, object]:
        """The constant as a file states it, without `at`."""
        found: dict[str, object] = {"name": self.name, "value": self.text, "source": self.source}
        return found if self.interval_texts is None else found | {"interval": list(self.interval_texts)}


def text_of(name: str, value: float | str) -> str:
    """A value as a file states it."""
    if isinstance(value, str):
        return value
    return CONSTANTS[name].format(value, _TEXT_DIGITS) if name in CONSTANTS else f"{value * 1e6:.{_TEXT_DIGITS}g}us"


class Parameters(Mapping[str, Parameter]):
    """The parameters of a machine by name, in the order of its file.

    `numbers` are their values in SI units. A parameter that is stated at a value of another is proportional to it, so
    its number differs from its `value` where the other one has another value now.

    >>> line = Parameter.parse("link_bandwidth", "900GB/s", "a data sheet")
    >>> rate = Parameter("ring_rate", 360e9, "a log", at=450e9)
    >>> Parameters([line, rate]).numbers["ring_rate"]
    720000000000.0
    """

    __slots__ = ("_by_name", "numbers")

    def __init__(self, parameters: Iterable[Parameter] = (), numbers: Mapping[str, float] | None = None) -> None:
        self._by_name = {parameter.name: parameter for parameter in parameters}
        self.numbers: Mapping[str, float] = _numbers(self._by_name.values()) if numbers is None else numbers

    @classmethod
    def of_constants(cls, constants: Iterable[Constant]) -> Parameters:
        """The parameters that texts state, without their intervals. Raises `QuantityError`."""
        return cls(Parameter.parse(each.name, each.value, each.source) for each in constants)

    def __getitem__(self, name: str) -> Parameter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parameters) and self._by_name == other._by_name

    def __hash__(self) -> int:
        return hash(frozenset(self._by_name.values()))

    def __repr__(self) -> str:
        return f"Parameters({list(self._by_name.values())!r})"

    def with_parameters(self, parameters: Iterable[Parameter]) -> Parameters:
        """A copy in which these parameters replace those of the same names; new names come last."""
        return Parameters((self._by_name | {parameter.name: parameter for parameter in parameters}).values())


def _numbers(parameters: Iterable[Parameter]) -> dict[str, float]:
    """The value of each parameter with a definition; without what depends on a parameter that is not there."""
    numbers = {each.name: each.value for each in parameters if not isinstance(each.value, str)}
    for each in parameters:
        if each.at is not None and not isinstance(each.value, str):
            other = CONSTANTS[each.name].depends_on
            if other in numbers:
                numbers[each.name] = each.value * (numbers[other] / each.at)
            else:
                del numbers[each.name]
    return numbers


NO_PARAMETERS = Parameters()


class Change(NamedTuple):
    """Another number: ``old * times + plus``. So a new value is ``Change(0, value)``."""

    times: Number = 1
    plus: Number = 0


_ORDER = {name: place for place, name in enumerate(CONSTANTS)}
"""Wires are first, so that what depends on them has followed them before it is changed itself."""

_FOLLOWERS = {
    name: [spec.name for spec in CONSTANTS.values() if spec.depends_on == name]
    for name in dict.fromkeys(spec.depends_on for spec in CONSTANTS.values())
}
"""What is proportional to each parameter."""


def changed(parameters: Parameters, changes: Mapping[str, Change], *, clamp: bool = True) -> Parameters:
    """The parameters with changes by name.

    What is proportional to a changed parameter follows it, and its own change applies to the result. A stated interval
    stays as wide beside the value, and is left out for a new value. With `clamp`, all numbers are the nearest possible
    ones (`nearest_possible`).

    >>> line = Parameter.parse("link_bandwidth", "900GB/s", "a data sheet")
    >>> rate = Parameter("ring_rate", 360e9, "a log", at=450e9)
    >>> found = changed(Parameters([line, rate]), {"ring_rate": Change(0.5), "link_bandwidth": Change(0, 450e9)})
    >>> found.numbers["ring_rate"]
    180000000000.0
    """
    by_name, numbers = parameters._by_name, dict(parameters.numbers)
    for name in sorted(changes, key=_ORDER.__getitem__):
        times, plus = changes[name]
        numbers[name] = new = float(numbers[name] * times + plus)
        for follower in _FOLLOWERS.get(name, ()):
            known = by_name.get(follower)
            if known is not None and known.at is not None:
                assert not isinstance(known.value, str)
                numbers[follower] = known.value * (new / known.at)
    if clamp:
        possible = nearest_possible(numbers)
        changes = {**changes, **{name: _SAME for name in possible if name not in changes}}
        numbers |= possible
    found = dict(by_name)
    for name, change in changes.items():
        old, value, other = by_name[name], numbers[name], CONSTANTS[name].depends_on
        assert not isinstance(old.value, str)
        if value == (old.value if old.at is None else old.value * (numbers[other] / old.at)):
            continue  # also where it has followed another one and changed no further
        low = high = None
        if old.low is not None and old.high is not None and old.value and change.times:
            low, high = old.low * value / old.value, old.high * value / old.value
        if old.at is None:
            found[name] = Parameter(name, value, old.source, None, low, high)
        else:
            written_at = f"{other} = {by_name[other].text}" if numbers[other] == by_name[other].value else ""
            found[name] = Parameter(name, value, old.source, numbers[other], low, high, written_at=written_at)
    return Parameters(found.values(), numbers)


_SAME = Change()


_NO_LIMIT = math.inf
_LIMITS = tuple(
    (spec.name, spec.depends_on if spec.is_part else "", spec.quantity.max_value, spec.min_constant)
    for spec in CONSTANTS.values()
)


def nearest_possible(numbers: Mapping[str, float]) -> dict[str, float]:
    """The impossible ones of some numbers, with the nearest possible values.

    A share is at most 1, a payload at most its line rate, a hop takes at least the latency of the wire, and nothing is
    negative.
    """
    possible = {}
    for name, whole, most, least in _LIMITS:
        if name in numbers:
            value = numbers[name]
            nearest = max(min(value, most, numbers.get(whole, _NO_LIMIT)), numbers.get(least, 0.0))
            if nearest != value:
                possible[name] = nearest
    return possible


def parse_constants(records: Sequence[DependentConstant]) -> tuple[Parameter, ...]:
    """The parameters that a file of a family or a library states.

    Raises `ProfileError` for unknown, repeated and malformed ones.
    """
    for index, record in enumerate(records):
        if record.name not in CONSTANTS:
            raise ProfileError(
                f"unknown constant {record.name!r}, expected one of {', '.join(CONSTANTS)} - at `$.constants[{index}]`"
            )
        if any(record.name == other.name for other in records[:index]):
            raise ProfileError(f"constant {record.name!r} occurs twice - at `$.constants[{index}]`")
    return tuple(_parse(record, f"$.constants[{index}]") for index, record in enumerate(records))


def _parse(record: DependentConstant, where: str) -> Parameter:
    try:
        found = Parameter.parse(record.name, record.value, record.source)
    except QuantityError as error:
        raise ProfileError(f"{error} - at `{where}.value`") from error
    at = _parse_at(record, f"at `{where}.at`") if record.at else None
    low, high = parse_interval(record, where)
    return replace(found, at=at, low=low, high=high, written_at=record.at)


def _parse_at(record: DependentConstant, where: str) -> float:
    """The value of the other constant at which a constant is stated, like 50e9 of ``nic_bandwidth = 400Gbit/s``."""
    name, _, text = (part.strip() for part in record.at.partition("="))
    expected = CONSTANTS[record.name].depends_on
    if not expected:
        raise ProfileError(f"constant {record.name!r} does not depend on another - {where}")
    if name != expected:
        raise ProfileError(
            f"{record.name} depends on {expected}, expected `{expected} = ...`, got {record.at!r} - {where}"
        )
    try:
        return CONSTANTS[name].parse(text)
    except QuantityError as error:
        raise ProfileError(f"{error} - {where}") from error


def parse_interval(record: Constant, where: str) -> tuple[float, float] | tuple[None, None]:
    """The ends of the interval that a file states; None where it states none.

    >>> parse_interval(Constant("nic_payload", "50GB/s", "a table", "2%"), "here")
    (49000000000.0, 51000000000.0)

    Raises `ProfileError` for ends that are no quantities, an empty interval, and one that lacks the value.
    """
    if record.interval is None:
        return None, None
    try:
        texts = _end_texts(record)
        low, value, high = (_parse_number(record.name, text) for text in (texts[0], record.value, texts[1]))
    except QuantityError as error:
        raise ProfileError(f"{error} - at `{where}.interval`") from error
    what = f"{record.name}: interval {texts[0]} to {texts[1]}"
    if low > high:
        raise ProfileError(f"{what} is empty, expected the lower end first - at `{where}.interval`")
    if not low <= value <= high:
        raise ProfileError(f"{what} does not hold the value {record.value} - at `{where}.interval`")
    return low, high


def _end_texts(record: Constant) -> tuple[str, str]:
    """The ends of an interval that is stated as two values or as a width like ``5%``."""
    if not isinstance(record.interval, str):
        assert record.interval is not None, "the record states an interval"
        return record.interval
    number = record.interval.strip().removesuffix("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not record.interval.strip().endswith("%") or not 0 <= share < 1:
        raise QuantityError(f"interval {record.interval!r}: expected two values, or a width from 0% to less than 100%")
    value, spec = _parse_number(record.name, record.value), CONSTANTS.get(record.name)
    if spec is None:
        raise QuantityError(f"interval {record.interval!r} of {record.name!r}: expected two values")
    return spec.format(value * (1 - share)), spec.format(value * (1 + share))


def _parse_number(name: str, text: str) -> float:
    """A value in SI units; of a constant without a definition, in the file of one machine, a time."""
    return CONSTANTS[name].parse(text) if name in CONSTANTS else parse_time_s(text)


class _LibraryFile(Record, frozen=True, forbid_unknown_fields=True):
    constants: tuple[DependentConstant, ...]


@cache
def library_parameters(library: str) -> tuple[Parameter, ...]:
    """The parameters that all machines of a library have (``libraries/constants/*.toml``); none of ``ideal``.

    >>> [parameter.name for parameter in library_parameters("gloo")]
    ['launch', 'tcp_payload']
    """
    file = files("tasp_lab.machines.libraries") / "constants" / f"{library}.toml"
    if not file.is_file():
        return ()
    return read_constants(file.read_bytes())


def read_constants(data: bytes) -> tuple[Parameter, ...]:
    """The parameters of a file that has nothing but constants. Raises `ProfileError` as `parse_constants` does."""
    return parse_constants(msgspec.toml.decode(data, type=_LibraryFile).constants)
