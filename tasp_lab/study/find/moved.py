"""Numeric axes: a point at another value of one of them.

An axis is a number of the layer (`LAYER_AXES`), a number of the schedule's options (`OPTION_AXES`), ``nodes``, or the
factor of an override, such as ``nic.bandwidth``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from tasp_lab.core.choices import DEFAULT_BUFFERS
from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.study.point import Point, Value

LAYER_AXES: Mapping[str, str] = {
    "seq": "sequence",
    "batch": "batch",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "window": "window",
    "cached_keys": "cached_keys",
}
"""Numbers of a layer, to the fields of `tasp_lab.workload.layer.Workload`."""

OPTION_AXES = ("buffers", "stages", "tail_chunks")
NODES = "nodes"
WHOLE_AXES = (*LAYER_AXES, *OPTION_AXES, NODES)
"""Axes of whole numbers; all others are factors of overrides, whose names have a dot."""

_FAMILY = r"(?P<family>[a-z][a-z0-9_]*-|nodes:|.+\.toml:)"
_MEMBER = re.compile(_FAMILY + r"(?P<nodes>[1-9][0-9]{0,4})x(?P<rest>[1-9][0-9]{0,4}.*)")
_SINGLE = re.compile(_FAMILY.replace("|nodes:", "") + r"(?P<rest>[1-9][0-9]{0,4})")

SIGNIFICANT_DIGITS = 9
"""Of a factor in an override."""


def check_axis(axis: str) -> None:
    """Raise `StudyError` for an axis that is not numeric.

    >>> check_axis("mask")
    Traceback (most recent call last):
    ...
    tasp_lab.core.errors.StudyError: axis 'mask' is not numeric, expected one of seq, batch, heads, kv_heads, head_dim,\
 window, cached_keys, buffers, stages, tail_chunks, nodes, or an override's name like nic.bandwidth
    """
    if axis in WHOLE_AXES or "." in axis.strip("."):
        return
    known = f"{', '.join(WHOLE_AXES)}, or an override's name like nic.bandwidth"
    if axis in _WORDS:
        raise StudyError(f"axis {axis!r} is not numeric, expected one of {known}")
    raise StudyError(f"{unknown('axis', axis, WHOLE_AXES)}, or an override's name like nic.bandwidth")


_WORDS = ("machine", "schedule", "model", "mask", "pass", "passes", "dtype", "kind", "library", "kernel", "variant")


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
    labelled = replace(point, labels=_labels(point, axis, int(value) if axis in WHOLE_AXES else value))
    if axis in LAYER_AXES:
        return replace(labelled, work=replace(point.layer, **_layer_fields(point, axis, int(value))))
    if axis in OPTION_AXES:
        return replace(labelled, options=_with_option(point.options, axis, int(value)))
    if axis == NODES:
        return replace(labelled, machine=_with_nodes(point.machine, int(value)))
    others = tuple(text for text in point.overrides if not _is_factor(text, axis))
    own = () if value == 1 else (f"{axis}=x{factor_text(value)}",)
    return replace(labelled, overrides=others + own)


def value_of(point: Point, axis: str) -> float | None:
    """The value of an axis at a point; None if it has none, as a layer without a window.

    >>> from tasp_lab.workload.layer import Workload
    >>> point = Point("h100-8", "tasp", Workload(8192), overrides=("nic.bandwidth=x2",))
    >>> [value_of(point, axis) for axis in ("seq", "buffers", "nodes", "nic.bandwidth", "link.latency")]
    [8192, 3, 1, 2.0, 1.0]
    """
    check_axis(axis)
    if axis in LAYER_AXES:
        found: float | None = getattr(point.layer, LAYER_AXES[axis])
        return found
    if axis in OPTION_AXES:
        return int(getattr(point.options, axis))
    if axis == NODES:
        return _nodes(point.machine)
    product = Fraction(1)
    for text in point.overrides:
        if _is_factor(text, axis):
            product *= Fraction(text.partition("=")[2].strip().removeprefix("x").strip())
    return float(product)


def apart_from(point: Point, axis: str) -> str:
    """What a point asks besides an axis and its schedule, as a key.

    >>> from tasp_lab.workload.layer import Workload
    >>> one, other = Point("h100-8", "tasp", Workload(8192)), Point("h100-8", "ring-attention", Workload(16384))
    >>> apart_from(one, "seq") == apart_from(other, "seq"), apart_from(one, "batch") == apart_from(other, "batch")
    (True, False)
    """
    machine, layer = point.machine, {each.name: getattr(point.layer, each.name) for each in fields(point.layer)}
    for name in _layer_fields(point, axis, 0) if axis in LAYER_AXES else ():
        layer[name] = None
    if axis == NODES:
        machine = _with_nodes(machine, 1)
    own = _with_option(point.options, axis, DEFAULT_BUFFERS) if axis in OPTION_AXES else point.options
    overrides = [text for text in point.overrides if not _is_factor(text, axis)]
    rest = replace(point, schedule="", machine=machine, options=own).inputs()
    return json.dumps(rest | {"layer": layer, "overrides": overrides}, sort_keys=True)


def factor_text(value: float) -> str:
    """A factor as overrides take it, without an exponent.

    >>> factor_text(2.0), factor_text(0.00012345678912)
    ('2', '0.000123456789')
    """
    return f"{value:.12f}".rstrip("0").rstrip(".") if value < 1 else f"{value:.{SIGNIFICANT_DIGITS}g}"


def _with_option(options: AttentionOptions, axis: str, value: int) -> AttentionOptions:
    changed: dict[str, Any] = {axis: value}
    return replace(options, **changed)


def _layer_fields(point: Point, axis: str, value: int) -> dict[str, Any]:
    """The fields of the layer that change; KV heads follow the heads where they are as many."""
    follows = axis == "heads" and point.layer.kv_head_count == point.layer.heads
    return {LAYER_AXES[axis]: value} | ({"kv_heads": value} if follows else {})


def _labels(point: Point, axis: str, value: Value) -> tuple[tuple[str, Value], ...]:
    return tuple((name, value if name == axis else old) for name, old in point.labels)


def _is_factor(text: str, axis: str) -> bool:
    name, _, value = text.partition("=")
    return name.strip() == axis and value.strip().startswith("x")


def _nodes(machine: str) -> int:
    found = _MEMBER.fullmatch(machine)
    if found is not None:
        return int(found["nodes"])
    if _SINGLE.fullmatch(machine) is not None:
        return 1
    raise StudyError(f"axis 'nodes': machine {machine!r} has no number of nodes, expected a name like h100-2x8")


def _with_nodes(machine: str, nodes: int) -> str:
    _nodes(machine)
    found = _MEMBER.fullmatch(machine) or _SINGLE.fullmatch(machine)
    assert found is not None, "its nodes were read"
    return f"{found['family']}{nodes}x{found['rest']}"
