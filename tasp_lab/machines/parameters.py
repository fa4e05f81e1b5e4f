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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

import msgspec

from tasp_lab.core.errors import OverrideError, QuantityError
from tasp_lab.core.records import Record, Text
from tasp_lab.core.units import Number, parse_time_s
from tasp_lab.machines.constants import CONSTANTS, Quantity

_TEXT_DIGITS = 15
"""Digits of a number written as text: every decimal number of so many digits survives as a float."""


class Stated(Record, frozen=True, forbid_unknown_fields=True):
    """A number as a text like ``450GB/s``, and where it comes from."""

    value: Text
    source: Text


class Constant(Record, frozen=True, forbid_unknown_fields=True):
    """A constant as a file, a tool or a data sheet states it: texts, like ``450GB/s``.

    `interval` is its 5 to 95 % interval where the file states one: two values, or a width like ``5%``. `at` is the
    value of the constant on which it depends, like ``nic_bandwidth = 400Gbit/s``; empty if it has its value always.
    """

    name: Text
    value: Text
    source: Text
    interval: tuple[Text, Text] | Text | None = None
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
    def assumed(self) -> bool:
        """Whether it is an assumption."""
        return self.source.startswith("assum")

    def document(self) -> dict[str, object]:
        """The constant as a file states it, without `at`."""
        ends = [] if self.low is None or self.high is None else [self.low, self.high]
        interval = {"interval": [text_of(self.name, end) for end in ends]} if ends else {}
        return {"name": self.name, "value": self.text, "source": self.source, **interval}


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
        if numbers is None:
            every = self._by_name.values()
            numbers = {each.name: each.value for each in every if not isinstance(each.value, str)}
            for each in every:
                if each.at is not None and not isinstance(each.value, str):
                    other = CONSTANTS[each.name].depends_on
                    if other in numbers:
                        numbers[each.name] = each.value * (numbers[other] / each.at)
                    else:  # what depends on a parameter that is not there has no number
                        del numbers[each.name]
        self.numbers: Mapping[str, float] = numbers

    @classmethod
    def of_constants(cls, constants: Iterable[Constant]) -> Parameters:
        """The parameters of one machine that texts state, of any names. Raises `QuantityError`."""
        return cls(parse_constants(tuple(constants), any_name=True))

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


NO_PARAMETERS = Parameters()


class Change(NamedTuple):
    """Another number: ``old * times + plus``. A new value is ``Change(0, value)``, or the value itself.

    `name` and `text` are what a user gave, like ``nic.bandwidth`` and ``x2``; with these the source of the number says
    what became of it.
    """

    times: Number = 1
    plus: Number = 0
    name: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.text}"

    @property
    def is_factor(self) -> bool:
        """Whether it multiplies, and no more."""
        return bool(self.times) and not self.plus

    def in_units(self, quantity: Quantity) -> Change:
        """With the amount of its text in SI units. Raises `OverrideError` for a text without its unit.

        >>> Change(1, 0, "nic.latency", "+1us").in_units(CONSTANTS["nic_latency"].quantity).of(2e-6)
        3e-06
        """
        if self.text.startswith("x"):
            return self
        text = self.text.lstrip("+-").strip() if self.times else self.text
        try:
            # nothing added needs no unit, everything else does
            amount = 0.0 if self.times and not text.strip("0.") else quantity.parse(text)
        except QuantityError as error:
            raise OverrideError(f"override {self}: {error}") from error
        return self._replace(plus=-amount if self.text.startswith("-") else amount)

    def of(self, old: Number) -> Number:
        """The number in place of an old one, exact for exact ones."""
        # a fraction plus a float is a float, but sums of exact numbers stay exact
        return old * self.times + (Fraction(self.plus) if isinstance(old, Fraction) else self.plus)

    def new(self, old: Number, quantity: Quantity) -> Number:
        """The number in place of an old one by the text, checked."""
        change = self.in_units(quantity)
        change.check(old, quantity)
        return change.of(old)

    def check(self, old: Number, quantity: Quantity) -> None:
        """Raise `OverrideError` where the number in place of an old one is none that the quantity can have."""
        try:
            quantity.parse(quantity.format(float(self.of(old)), _TEXT_DIGITS))
        except QuantityError as error:
            raise OverrideError(f"override {self}: {error}") from error

    def source(self, was: str, source: str) -> str:
        """The source of the number: a new value is given and exact, a changed one as sure as the old one.

        >>> Change(2, name="nic.bandwidth", text="x2").source("50GB/s", "assumed: as NDR")
        'assumed: nic.bandwidth x2, was 50GB/s (assumed: as NDR)'
        """
        known = "given: " if not self.times else "assumed: " if source.startswith("assum") else ""
        return f"{known}{self.name} {self.text}, was {was} ({source})"


def as_changes(changes: Mapping[str, Change | float]) -> Mapping[str, Change]:
    """Changes, with those to new values among them."""
    return {name: each if isinstance(each, Change) else Change(0, each) for name, each in changes.items()}


_ORDER = {name: place for place, name in enumerate(CONSTANTS)}
_FOLLOWERS, _HOPS = (
    {name: [each.name for each in CONSTANTS.values() if getattr(each, field) == name] for name in CONSTANTS}
    for field in ("depends_on", "min_constant")
)
"""What is proportional to each parameter, and the hops that have the latency of each wire in them."""


def changed(parameters: Parameters, changes: Mapping[str, Change | float], *, clamp: bool = True) -> Parameters:
    """The parameters with changes, or new values, by name.

    What is proportional to a changed parameter follows it, the latency of a hop grows and shrinks by as much as that of
    its wire, and a change of their own applies to the result. A stated interval stays as wide beside the value, and is
    left out for a new value. With `clamp`, all numbers are the nearest possible ones (`nearest_possible`).

    >>> line = Parameter.parse("link_bandwidth", "900GB/s", "a data sheet")
    >>> rate = Parameter("ring_rate", 360e9, "a log", at=450e9)
    >>> found = changed(Parameters([line, rate]), {"ring_rate": Change(0.5), "link_bandwidth": 450e9})
    >>> found.numbers["ring_rate"]
    180000000000.0
    """
    by_name, numbers, sources = parameters._by_name, dict(parameters.numbers), dict[str, str]()
    wanted = as_changes(changes)
    # wires are first, so that what depends on them has followed them before it is changed itself
    moved = dict.fromkeys(sorted(wanted, key=_ORDER.__getitem__))

    def note(change: Change, name: str) -> None:
        spec, known = CONSTANTS[name], by_name[name]
        was = known.text if spec.kind else spec.format(numbers[name])
        sources[name] = change.source(was, sources.get(name, known.source))

    for name in [*moved]:
        change, old = wanted[name], numbers[name]
        if change.name:
            note(change, name)
        numbers[name] = new = float(old * change.times + change.plus)
        for follower in _FOLLOWERS[name]:
            known = by_name.get(follower)
            if known is not None and known.at is not None:
                numbers[follower] = known.number * (new / known.at)
        for hop in _HOPS[name]:
            if hop in numbers and new != old:
                if change.name:
                    note(Change(1, 0, f"follows {change.name}", change.text), hop)
                moved[hop] = None
                numbers[hop] += max(new - old, -numbers[hop])
    if clamp:
        possible = nearest_possible(numbers)
        moved |= dict.fromkeys(possible)
        numbers |= possible
    found = dict(by_name)
    for name in moved:
        known, value, other = by_name[name], numbers[name], CONSTANTS[name].depends_on
        source = sources.get(name, known.source)
        if value == (known.value if known.at is None else known.number * (numbers[other] / known.at)):
            # also where it has followed another one and changed no further; the text of the file stays
            found[name] = known if source is known.source else replace(known, source=source)
            continue
        is_new, low, high = name in wanted and not wanted[name].times, None, None
        if known.low is not None and known.high is not None and known.value and not is_new:
            low, high = known.low * value / known.number, known.high * value / known.number
        at, written_at = None, ""
        if known.at is not None:
            at = numbers[other]
            written_at = f"{other} = {found[other].text}" if at == found[other].value else ""
        written = wanted[name].text if is_new else ""
        found[name] = Parameter(name, value, source, at, low, high, written, written_at)
    return Parameters(found.values(), numbers)


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


@contextmanager
def located(where: str) -> Iterator[None]:
    """Adds to a `QuantityError` where in a file it is."""
    try:
        yield
    except QuantityError as error:
        raise QuantityError(f"{error} - at `{where}`") from error


def parse_constants(records: Sequence[Constant], *, any_name: bool = False) -> tuple[Parameter, ...]:
    """The parameters that a file states; with `any_name` also some without a definition, which are texts.

    Raises `QuantityError` for unknown, repeated and malformed ones.
    """
    found: dict[str, Parameter] = {}
    for index, record in enumerate(records):
        name, where = record.name, f"$.constants[{index}]"
        with located(where):
            if name not in CONSTANTS and not any_name:
                raise QuantityError(f"unknown constant {name!r}, expected one of {', '.join(CONSTANTS)}")
            if name in found:
                raise QuantityError(f"constant {name!r} occurs twice")
        with located(f"{where}.value"):
            stated = Parameter.parse(name, record.value, record.source)
        with located(f"{where}.at"):
            at = _parse_at(record) if record.at else None
        with located(f"{where}.interval"):
            low, high = parse_interval(record)
        found[name] = replace(stated, at=at, low=low, high=high, written_at=record.at)
    return tuple(found.values())


def _parse_at(record: Constant) -> float:
    """The value of the other constant at which a constant is stated, like 50e9 of ``nic_bandwidth = 400Gbit/s``."""
    other, _, text = (part.strip() for part in record.at.partition("="))
    expected = CONSTANTS[record.name].depends_on if record.name in CONSTANTS else ""
    if not expected:
        raise QuantityError(f"constant {record.name!r} does not depend on another")
    if other != expected:
        raise QuantityError(f"{record.name} depends on {expected}, expected `{expected} = ...`, got {record.at!r}")
    return CONSTANTS[other].parse(text)


def parse_interval(record: Constant) -> tuple[float, float] | tuple[None, None]:
    """The ends of the interval that a file states; None where it states none.

    >>> parse_interval(Constant("nic_payload", "50GB/s", "a table", "2%"))
    (49000000000.0, 51000000000.0)

    Raises `QuantityError` for ends that are no quantities, an empty interval, and one that lacks the value.
    """
    interval, spec = record.interval, CONSTANTS.get(record.name)
    if interval is None:
        return None, None
    # without a definition, in the file of one machine, a number is a time
    parse = parse_time_s if spec is None else spec.parse
    value = parse(record.value)
    if isinstance(interval, str):
        try:
            share = float(interval.strip().removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not interval.strip().endswith("%") or not 0 <= share < 1:
            raise QuantityError(f"interval {interval!r}: expected two values, or a width from 0% to less than 100%")
        if spec is None:
            raise QuantityError(f"interval {interval!r} of {record.name!r}: expected two values")
        interval = spec.format(value * (1 - share)), spec.format(value * (1 + share))
    low, high = map(parse, interval)
    what = f"{record.name}: interval {interval[0]} to {interval[1]}"
    if low > high:
        raise QuantityError(f"{what} is empty, expected the lower end first")
    if not low <= value <= high:
        raise QuantityError(f"{what} does not hold the value {record.value}")
    return low, high


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
    """The parameters of a file that has nothing but constants. Raises `QuantityError` as `parse_constants` does."""
    return parse_constants(
        msgspec.toml.decode(data, type=dict[Literal["constants"], tuple[Constant, ...]])["constants"]
    )
