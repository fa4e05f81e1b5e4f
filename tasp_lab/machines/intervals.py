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

from tasp_lab.machines.constants import CONSTANTS, WIRES, ConstantSpec
from tasp_lab.machines.parameters import Parameter

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

_MEASURED = ("measured", "measurement", "nccl-tests", "appendix a", "_perf", "log of")


def source_kind(source: str) -> SourceKind:
    """The kind of a source, by its words: an assumption is one whatever it starts from.

    >>> source_kind("NVIDIA/nccl 5067397c, src/graph/tuning.cc, baseLat"), source_kind("as NCCL's: an assumption")
    ('code', 'assumed')
    >>> source_kind("46 to 48 GB/s, measured"), source_kind("NVIDIA H100 data sheet")
    ('measured', 'document')
    """
    text = source.casefold()
    # first: "assumed: as measured on A100, src/graph/tuning.cc" names all kinds
    if "assum" in text:
        return "assumed"
    if "src/" in text:
        return "code"
    return "measured" if any(word in text for word in _MEASURED) else "document"


def dimension(spec: ConstantSpec) -> Dimension | None:
    """What a constant is; None for those that are exact unless their file states an interval."""
    if spec.kind is not None:
        return "compute"
    # what protocols leave of a wire is uncertain, and has constants of its own; its line rate is not
    if spec.name in WIRES or spec.unit not in ("s", "bytes/s"):
        return None
    return "time" if spec.unit == "s" else "rate"


def default_width(dimension: Dimension, source: str) -> float:
    """The relative width of a constant that states no interval.

    >>> default_width("compute", "given"), default_width("compute", "assumed: as forward")
    (0.0, 0.65)
    """
    return 0.0 if source.startswith(EXACT_SOURCES) else WIDTHS[dimension, source_kind(source)]


def log_ends(parameter: Parameter) -> tuple[float, float]:
    """How far the ends of a parameter's interval are from its value, as logarithms: (at most 0, at least 0).

    >>> low, high = log_ends(Parameter("nic_payload", 47e9, "a table", low=46e9, high=48e9))
    >>> round(low, 4), round(high, 4)
    (-0.0215, 0.0211)
    >>> log_ends(Parameter("channels", 24, "NVIDIA/nccl, src/graph/connect.cc"))
    (0.0, 0.0)
    """
    spec = CONSTANTS.get(parameter.name)
    if spec is None:
        return 0.0, 0.0
    if parameter.low is not None and parameter.high is not None:
        return _log(parameter.low, parameter.number), _log(parameter.high, parameter.number)
    kind = dimension(spec)
    # as many times smaller as larger
    width = 0.0 if kind is None else math.log1p(default_width(kind, parameter.source))
    return 0.0 - width, width


def interval_fields(parameter: Parameter, value: float) -> dict[str, object]:
    """The fields of `--json` about the interval of a parameter with this value in SI units."""
    low, high = log_ends(parameter)
    return {"low": value * math.exp(low), "high": value * math.exp(high), "interval": _origin(parameter)}


def interval_ends(parameter: Parameter) -> tuple[str, str] | None:
    """Both ends of the interval of a parameter as texts; None of an exact one.

    >>> interval_ends(Parameter("base_ll", 6.6e-6, "NVIDIA/nccl, src/graph/tuning.cc"))
    ('5.28us', '8.25us')
    """
    low, high = log_ends(parameter)
    if low == high:
        return None
    spec, value = CONSTANTS[parameter.name], parameter.number
    return spec.format(value * math.exp(low), 4), spec.format(value * math.exp(high), 4)


def interval_text(parameter: Parameter) -> str:
    """The interval of a parameter for people; empty for an exact one.

    >>> interval_text(Parameter("base_ll", 6.6e-6, "NVIDIA/nccl, src/graph/tuning.cc"))
    ', 5.28us to 8.25us (by its source: code)'
    """
    ends, origin = interval_ends(parameter), _origin(parameter)
    return f", {' to '.join(ends)} ({'' if origin == 'stated' else 'by its source: '}{origin})" if ends else ""


def _origin(parameter: Parameter) -> str | None:
    """Where an interval is from: ``stated`` in the file, or the kind of the source; None for none."""
    if parameter.low is not None:
        return "stated"
    return None if log_ends(parameter) == (0.0, 0.0) else source_kind(parameter.source)


def _log(end: float, value: float) -> float:
    """The logarithm of end / value; a latency may be 0, which has no factor."""
    return math.log(end / value) if end > 0 and value > 0 else 0.0
