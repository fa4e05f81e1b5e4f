"""Overrides: numbers of a machine or a layer, changed by texts like ``nic.bandwidth=x2``.

::

    overridden(load_machine("h100-2x4"), ["nic.bandwidth=x2", "link.0-node0=100GB/s"])
    overridden_layer(Workload(8192), ["layer.kv_heads=1"])

The value is a factor (``x2``), what is added (``+1us``), or a new value (``900GB/s``). Names of numbers of a machine
are those of `tasp_lab.machines.change`, and with a dot ``link.bandwidth`` and the like; those of a layer begin with
``layer.``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any, overload

from tasp_lab.core.errors import (
    OverrideError,
    ProfileError,
    QuantityError,
    TopologyError,
    WorkloadError,
    expected_one_of,
    unknown,
)
from tasp_lab.core.units import parse_count
from tasp_lab.machines.change import COMPUTE, NICS, SPINE, change, constants_of, has_nics, place_of, quantity_of
from tasp_lab.machines.compute import COMPUTE_RATES, KernelCompute
from tasp_lab.machines.constants import CONSTANTS, WIRES, Quantity
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Change
from tasp_lab.workload.layer import Workload

LAYER = "layer."
"""How names of numbers of a layer begin; all others are of the machine."""

LAYER_NAMES = tuple(f"{LAYER}{each.name}" for each in fields(Workload) if each.name != "sinks")

EXAMPLES = (
    "link.0-1",
    "nic.0.bandwidth",
    "node.0.nic.bandwidth",
    "rank.0.link.bandwidth",
    "rank.0.compute",
    NICS,
    SPINE,
)
"""Names of single links, NICs, nodes and ranks, of the number of NICs, and of the spine."""

_NOTHING = re.compile(r"x?\s*0*\.?0+\s*([A-Za-z/]*|%)")
_PARTS = {r"(link\.[^.]*)(\.bandwidth)?": r"\1", r"(nic\.\d+)\.bandwidth": r"\1",
          r"rank\.(\d+)\.nic\.bandwidth": r"nic.\1", r"rank\.(\d+)\.compute": r"gpu.\1"}  # fmt: skip
"""Parts that can be left out in place of a bandwidth or a speed of nothing."""

_FACTOR = re.compile(r"x\s*(\d{1,12}(?:\.\d{1,12})?|\.\d{1,12}|\d{1,12}/0*[1-9]\d{0,11})", re.ASCII)
_OTHER_FACTOR = re.compile(r"\*\s*([\d.]+)|([\d.]+)\s*x|(\d{1,12})\s*%", re.ASCII)
"""A factor as it is written elsewhere: ``*2``, ``2x``, ``50%``."""


def parse_override(text: str) -> Change:
    """The change that a text means, whose amount has its unit once the name is known (`Change.in_units`).

    >>> str(parse_override(" nic.bandwidth = x2")), parse_override("nic.latency=-1us").times
    ('nic.bandwidth=x2', 1)

    Raises `OverrideError` for a text that is not ``NAME=VALUE``, for a factor that is not positive, and for one that is
    written in another way.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise OverrideError(f"override {text!r}: expected NAME=VALUE, like nic.bandwidth=x2")
    if _NOTHING.fullmatch(value):
        parts = [found.expand(part) for pattern, part in _PARTS.items() if (found := re.fullmatch(pattern, name))]
        if parts:
            raise OverrideError(f"override {text!r}: expected more than 0, or the part left out: --without {parts[0]}")
    if value.startswith("x"):
        match = _FACTOR.fullmatch(value)
        if match and (factor := Fraction(match[1])):
            return Change(factor, 0, name, value)
        raise OverrideError(
            f"override {text!r}: factor {value!r}: expected x and a number more than 0, like x2 or x0.5"
        )
    if meant := _OTHER_FACTOR.fullmatch(value):
        wanted = f"{int(meant[3]) / 100:g}" if meant[3] else meant[1] or meant[2]
        raise OverrideError(f"override {text!r}: {value!r} is no factor, did you mean x{wanted}?")
    return Change(int(value.startswith(("+", "-"))), 0, name, value)


def parse_overrides(texts: Sequence[str]) -> list[Change]:
    """The changes of texts. Raises `OverrideError` for a single text, which would be read letter by letter."""
    if isinstance(texts, str):
        raise OverrideError(f"overrides {texts!r}: expected a sequence of texts, like ({texts!r},)")
    return [parse_override(text) for text in texts]


# ------------------------------------------------------------------------------ numbers of a machine: nic.bandwidth=x2


def overridden(machine: Machine, overrides: Sequence[str]) -> Machine:
    """The machine with overrides of its numbers; those of a layer are left to `overridden_layer`.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> found = overridden(load_machine("h100-2x8"), ["nic.bandwidth=x2"])
    >>> found.topology.name, found.topology.route(0, 8).latency_s
    ('h100-2x8 with nic.bandwidth=x2', 2.7e-06)

    Raises `OverrideError` for a name that the machine does not have, one that is given twice, and a value that it
    cannot have.
    """
    given = [each for each in parse_overrides(overrides) if not each.name.startswith(LAYER)]
    if not given:
        return machine
    known, changes, texts = constants_of(machine), dict[str, Change](), ", ".join(map(str, given))
    for override in given:
        name = _name_of(machine, override, known)
        if name in changes:
            raise OverrideError(f"override {override}: {_shown(name)} is given twice, expected once")
        changes[name] = override.in_units(quantity_of(name))
    try:
        found = change(machine, changes, clamp=False)
    except (ProfileError, QuantityError, TopologyError) as error:
        raise OverrideError(f"override {texts}: {error}") from error
    return replace(found, topology=replace(found.topology, name=f"{machine.topology.name} with {texts}"))


def override_names(machine: Machine) -> list[str]:
    """The numbers of a machine that can be overridden: constants on which its times depend, and ``compute.rate``.

    Beside these, single links, NICs, nodes and ranks can be, the number of NICs of a node, and the spine between nodes:
    ``link.0-1``, ``link.0-1.latency``, ``nic.3.bandwidth``, ``node.1.nic.bandwidth``, ``rank.3.compute``, ``nics``,
    ``spine.oversubscription``.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> override_names(load_machine("full-mesh:8"))
    ['link.bandwidth', 'link.latency', 'compute.rate']
    """
    return [*map(_shown, constants_of(machine)), COMPUTE]


def _shown(constant: str) -> str:
    """The name of a constant for people: wires have a dot."""
    return constant.replace("_", ".", 1) if constant in WIRES else constant


def _name_of(machine: Machine, override: Change, constants: Sequence[str]) -> str:
    """The name of a number of the machine. Raises `OverrideError` for one that it does not have."""
    if override.name == COMPUTE:
        return COMPUTE
    name, where = override.name.replace(".", "_"), machine.topology.name
    # ranks have ports into a switch, and links to each other
    has_ports = any(kind != "network" for kind in machine.topology.switch_kinds.values())
    name = name.replace("port", "link", 1) if name.startswith("port_") and has_ports else name
    name = name if name in CONSTANTS else override.name
    place = place_of(name)
    is_place = place is not None and place.kind != "class" and (name not in (SPINE, NICS) or has_nics(machine))
    if name in constants or is_place:
        return name
    of_profile = f"tasp-lab profile show {where.partition(' with ')[0]}" if machine.system is not None else ""
    names = override_names(machine)
    expected = expected_one_of(name, names, of_profile)
    if name in COMPUTE_RATES and isinstance(machine.compute, KernelCompute):
        why = f"{where} computes as the kernel {machine.compute.kernel.name} does, expected compute.rate=..."
    elif name.startswith(("nic", "spine")) and not has_nics(machine):
        why = f"{where} has no NICs, {expected}"
    elif name.startswith("port") and not has_ports:
        why = f"ranks of {where} have no ports into a switch, {expected}"
    elif name in CONSTANTS:
        why = f"{where} does not depend on {name}, {expected}"
    else:
        why = unknown("name", override.name, [*names, *EXAMPLES, *LAYER_NAMES], of_profile)
    raise OverrideError(f"override {override}: {why}")


# ------------------------------------------------------------ fields of an attention layer: layer.kv_heads=1

TEXTS = ("dtype", "mask", "kind", "decay", "layers")
"""Fields that are words."""


@overload
def overridden_layer(work: Workload, overrides: Sequence[str]) -> Workload: ...
@overload
def overridden_layer(work: Workload | int, overrides: Sequence[str]) -> Workload | int: ...
def overridden_layer(work: Workload | int, overrides: Sequence[str]) -> Workload | int:
    """The layer with those overrides whose names begin with ``layer.``; the others are of the machine.

    Heads of keys and values follow the number of heads where both are equal, and the sequence follows documents.

    >>> overridden_layer(Workload(8192), ["layer.kv_heads=1", "layer.sequence=x2", "nic.bandwidth=x2"])
    Workload(sequence=16384, batch=1, heads=32, kv_heads=1, head_dim=128, dtype='bf16', mask='causal', window=None, \
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


def _field(override: Change) -> str:
    name = override.name.removeprefix(LAYER)
    field = "sequence" if name == "seq" else name
    if LAYER + field not in LAYER_NAMES:
        raise OverrideError(f"override {override}: {unknown('name', override.name, LAYER_NAMES)}")
    return field


def _value(work: Workload, field: str, override: Change) -> object:
    is_text = field in TEXTS or (field == "window" and "," in override.text)
    old = work.value_size if field == "value_dim" else getattr(work, field)
    if override.times:
        if is_text or field == "documents" or isinstance(old, tuple):
            raise OverrideError(f"override {override}: expected a new value, not a factor and no sum")
        if old is None:
            raise OverrideError(f"override {override}: the layer has no {field}, expected a number like 4096")
    count = Quantity("", lambda text: parse_count(text, override.name, least=0))
    if field == "documents":
        return tuple(int(override._replace(text=part).new(0, count)) for part in override.text.split(","))
    return override.text if is_text else int(override.new(0 if old is None or isinstance(old, tuple) else old, count))


def _followed(work: Workload, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, and those of fields that follow from them."""
    if "heads" in changes and work.kv_head_count == work.heads:
        changes = {"kv_heads": changes["heads"], **changes}
    if work.decode and (keys := changes.get("sequence", changes.get("cached_keys"))):
        changes = {"sequence": keys, "cached_keys": keys, **changes}
    if "documents" in changes:
        changes = {"sequence": sum(changes["documents"]), **changes}
    return changes
