"""Overrides of the fields of an attention layer: ``layer.kv_heads=1``, ``layer.sequence=x2``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, overload

from tasp_lab.core.errors import OverrideError, WorkloadError, unknown
from tasp_lab.core.units import parse_count
from tasp_lab.machines.constants import Quantity
from tasp_lab.machines.overrides.override import LAYER, Override, parse_overrides
from tasp_lab.workload.layer import Workload

TEXTS = ("dtype", "mask", "kind", "decay", "layers")
"""Fields that are words."""

_ALIASES = {"seq": "sequence"}
LAYER_NAMES = tuple(f"{LAYER}{each.name}" for each in fields(Workload))


@overload
def overridden_layer(work: Workload, overrides: Sequence[str]) -> Workload: ...
@overload
def overridden_layer(work: Workload | int, overrides: Sequence[str]) -> Workload | int: ...
def overridden_layer(work: Workload | int, overrides: Sequence[str]) -> Workload | int:
    """The layer with those overrides whose names begin with ``layer.``; the others are of the machine.

    Heads of keys and values follow the number of heads where both are equal, and the sequence follows documents.

    >>> overridden_layer(Workload(8192), ["layer.kv_heads=1", "layer.sequence=x2", "nic.bandwidth=x2"])
    Workload(sequence=16384, batch=1, heads=32, kv_heads=1, head_dim=128, dtype='bf16', mask='full', window=None, \
documents=None)

    Raises `OverrideError` for a collective, an unknown field, a field given twice, and a value that the layer cannot
    have.
    """
    found = parse_overrides(overrides)
    if not isinstance(work, Workload):
        for override in found:
            if override.name.startswith((LAYER, "compute")) or override.name.endswith(".compute"):
                raise OverrideError(f"override {override}: a collective has no layer and no kernel calls")
        return work
    given = [each for each in found if each.name.startswith(LAYER)]
    if not given:
        return work
    changes: dict[str, Any] = {}
    for override in given:
        field = _field(override)
        if field in changes:
            raise OverrideError(f"override {override}: {LAYER}{field} is given twice, expected once")
        changes[field] = _value(work, field, override)
    try:
        return replace(work, **_followed(work, changes))
    except WorkloadError as error:
        raise OverrideError(f"override {', '.join(map(str, given))}: {error}") from error


def _field(override: Override) -> str:
    name = override.name.removeprefix(LAYER)
    field = _ALIASES.get(name, name)
    if LAYER + field not in LAYER_NAMES:
        raise OverrideError(f"override {override}: {unknown('name', override.name, LAYER_NAMES)}")
    return field


def _value(work: Workload, field: str, override: Override) -> object:
    if field == "documents":
        parts = _new_value(override).split(",")
        return tuple(_number(0, override, replace(override, text=part)) for part in parts)
    if field in TEXTS:
        return _new_value(override)
    old = getattr(work, field)
    if old is None and override.kind != "to":
        raise OverrideError(f"override {override}: the layer has no {field}, expected a number like 4096")
    return _number(old or 0, override, override)


def _new_value(override: Override) -> str:
    if override.kind != "to":
        raise OverrideError(f"override {override}: expected a new value, not a factor and no sum")
    return override.text


def _number(old: int, override: Override, part: Override) -> int:
    """A whole number; `part` is one of several new values of the override, or all of it."""
    count = Quantity("", lambda text: parse_count(text, override.name, least=0))
    try:
        new = part.of(old, count)
    except OverrideError as error:
        raise OverrideError(str(error).replace(f"override {part}:", f"override {override}:", 1)) from error
    if new != int(new):
        raise OverrideError(f"override {override}: {float(new):g}, expected a whole number")
    return int(new)


def _followed(work: Workload, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, and those of fields that follow from them."""
    if "heads" in changes and work.kv_head_count == work.heads:
        changes = {"kv_heads": changes["heads"], **changes}
    if "documents" in changes:
        changes = {"sequence": sum(changes["documents"]), **changes}
    return changes
