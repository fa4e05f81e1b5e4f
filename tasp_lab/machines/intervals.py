"""The interval of each constant, 5 to 95 %: stated in its file, or a width by the kind of its source.

A constant states an ``interval`` of two values (``["46GB/s", "48GB/s"]``) or a width (``"5%"``). One that states none
has the width of `WIDTHS`, which follows from the kind of its source and from what it is. The widths are derived, not
chosen: ``python -m experiments.accuracy.constant_widths`` predicts each constant of our files from the same constant of
other sources, leaving it out, and prints the 90th percentile of the error by kind.

Exact are wires (the line rate and latency of a link are what a profile is *about*; what protocols leave of them is
uncertain), counts and sizes (a library's code states them), and what a user gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from tasp_lab.core.errors import ProfileError, QuantityError
from tasp_lab.core.units import parse_time_s
from tasp_lab.machines.constants import CONSTANTS, ConstantSpec
from tasp_lab.machines.machine import Constant
from tasp_lab.machines.records import ConstantRecord

SourceKind = Literal["code", "document", "measured", "assumed"]
Dimension = Literal["rate", "time", "compute"]

WIDTHS: Mapping[tuple[Dimension, SourceKind], float] = {
    ("rate", "code"): 0.05,
    ("rate", "document"): 0.05,
    ("rate", "measured"): 0.1,
    ("rate", "assumed"): 0.1,
    ("time", "code"): 0.25,
    ("time", "document"): 0.25,
    ("time", "measured"): 0.25,
    ("time", "assumed"): 0.55,
    ("compute", "code"): 0.2,
    ("compute", "document"): 0.2,
    ("compute", "measured"): 0.2,
    ("compute", "assumed"): 0.65,
}
"""Relative widths: a value may be larger, and smaller, by a factor of 1 + width in 90 of 100 cases."""

EXACT_SOURCES = ("given",)
"""Beginnings of sources of constants that the user gave."""

WIRES = ("link_bandwidth", "link_latency", "nic_bandwidth", "nic_latency")
_MEASURED = ("measured", "measurement", "nccl-tests", "appendix a", "_perf", "log of")


def source_kind(source: str) -> SourceKind:
    """The kind of a source, by its words: an assumption is one whatever it starts from.

    >>> source_kind("NVIDIA/nccl 5067397c, src/graph/tuning.cc, baseLat"), source_kind("as NCCL's: an assumption")
    ('code', 'assumed')
    >>> source_kind("46 to 48 GB/s, measured"), source_kind("NVIDIA H100 data sheet")
    ('measured', 'document')
    """
    text = source.casefold()
    if "assum" in text:
        return "assumed"
    if "src/" in text:
        return "code"
    return "measured" if any(word in text for word in _MEASURED) else "document"


def dimension(spec: ConstantSpec) -> Dimension | None:
    """What a constant is; None for those that are exact unless their file states an interval."""
    if spec.kind is not None:
        return "compute"
    if spec.name in WIRES or spec.unit not in ("s", "bytes/s"):
        return None
    return "time" if spec.unit == "s" else "rate"


def default_width(dimension: Dimension, source: str) -> float:
    """The relative width of a constant that states no interval.

    >>> default_width("compute", "given"), default_width("compute", "assumed: as forward")
    (0.0, 0.65)
    """
    return 0.0 if source.startswith(EXACT_SOURCES) else WIDTHS[dimension, source_kind(source)]


def log_ends(constant: Constant) -> tuple[float, float]:
    """How far the ends of a constant's interval are from its value, as logarithms: (at most 0, at least 0).

    >>> low, high = log_ends(Constant("nic_payload", "47GB/s", "a table", low="46GB/s", high="48GB/s"))
    >>> round(low, 4), round(high, 4)
    (-0.0215, 0.0211)
    >>> log_ends(Constant("channels", "24", "NVIDIA/nccl, src/graph/connect.cc"))
    (0.0, 0.0)
    """
    spec = CONSTANTS.get(constant.name)
    if spec is None:
        return 0.0, 0.0
    if constant.low:
        value = spec.parse(constant.value)
        return _log(spec.parse(constant.low), value), _log(spec.parse(constant.high), value)
    found = dimension(spec)
    width = 0.0 if found is None else math.log1p(default_width(found, constant.source))
    return 0.0 - width, width


def interval_fields(constant: Constant, value: float) -> dict[str, object]:
    """The fields of `--json` about the interval of a constant with this value in SI units."""
    low, high = log_ends(constant)
    exact = None if low == high else source_kind(constant.source)
    return {
        "low": value * math.exp(low),
        "high": value * math.exp(high),
        "interval": "stated" if constant.low else exact,
    }


def interval_ends(constant: Constant) -> tuple[str, str] | None:
    """Both ends of the interval of a constant as texts; None of an exact one.

    >>> interval_ends(Constant("base_ll", "6.6us", "NVIDIA/nccl, src/graph/tuning.cc"))
    ('5.28us', '8.25us')
    """
    low, high = log_ends(constant)
    if low == high:
        return None
    spec = CONSTANTS[constant.name]
    value = spec.parse(constant.value)
    return spec.format(value * math.exp(low), 4), spec.format(value * math.exp(high), 4)


def interval_text(constant: Constant) -> str:
    """The interval of a constant for people; empty for an exact one.

    >>> interval_text(Constant("base_ll", "6.6us", "NVIDIA/nccl, src/graph/tuning.cc"))
    ', 5.28us to 8.25us (by its source: code)'
    """
    ends = interval_ends(constant)
    if ends is None:
        return ""
    why = "stated" if constant.low else f"by its source: {source_kind(constant.source)}"
    return f", {ends[0]} to {ends[1]} ({why})"


def _log(end: float, value: float) -> float:
    """The logarithm of end / value; a latency may be 0, which has no factor."""
    return math.log(end / value) if end > 0 and value > 0 else 0.0


def stated_interval(record: ConstantRecord, where: str) -> tuple[str, str]:
    """The ends of the interval that a record states, as texts; two empty ones where it states none.

    >>> stated_interval(ConstantRecord("nic_payload", "50GB/s", "a table", "2%"), "here")
    ('49GB/s', '51GB/s')

    Raises `ProfileError` for ends that are no quantities, an empty interval, and one that lacks the value.
    """
    if record.interval is None:
        return "", ""
    try:
        low, high = _ends(record)
        numbers = [_number(record.name, text) for text in (low, record.value, high)]
    except QuantityError as error:
        raise ProfileError(f"{error} - at `{where}.interval`") from error
    if numbers[0] > numbers[2]:
        what = f"{record.name}: interval {low} to {high} is empty, expected the lower end first"
        raise ProfileError(f"{what} - at `{where}.interval`")
    if not numbers[0] <= numbers[1] <= numbers[2]:
        what = f"{record.name}: interval {low} to {high} does not hold the value {record.value}"
        raise ProfileError(f"{what} - at `{where}.interval`")
    return low, high


def _ends(record: ConstantRecord) -> tuple[str, str]:
    if not isinstance(record.interval, str):
        assert record.interval is not None, "the record states an interval"
        return record.interval
    share = _width(record.interval)
    spec, value = CONSTANTS.get(record.name), _number(record.name, record.value)
    if spec is None:
        raise QuantityError(f"interval {record.interval!r} of {record.name!r}: expected two values")
    return spec.format(value * (1 - share)), spec.format(value * (1 + share))


def _width(text: str) -> float:
    """A width like ``5%`` as a share."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not text.strip().endswith("%") or not 0 <= share < 1:
        raise QuantityError(f"interval {text!r}: expected two values, or a width from 0% to less than 100%")
    return share


def _number(name: str, text: str) -> float:
    """A value in SI units; of constants of one machine file only, which have no definition, a time."""
    return CONSTANTS[name].parse(text) if name in CONSTANTS else parse_time_s(text)
