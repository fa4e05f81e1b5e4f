"""Overrides of a machine: its constants, its links, and how fast its ranks compute.

Whatever the order of the texts, constants come first, then the spine, nodes, ranks, single links, and compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from tasp_lab.core.errors import (
    OverrideError,
    ProfileError,
    QuantityError,
    TopologyError,
    expected_one_of,
    unknown,
)
from tasp_lab.core.units import Number
from tasp_lab.machines.compute import ASSUMED_COMPUTE, COMPUTE_RATES, KernelCompute, compute_of
from tasp_lab.machines.constants import CONSTANTS, WIRES
from tasp_lab.machines.machine import INSTANT, ComputeRate, ComputeRates, Machine
from tasp_lab.machines.overrides.links import (
    FIELDS,
    SPINE,
    change_links,
    changed_links,
    link_classes,
    place_of,
    ranks_of,
)
from tasp_lab.machines.overrides.override import (
    COMPUTE,
    LAYER,
    LAYER_NAMES,
    Override,
    has_nics,
    parse_overrides,
)
from tasp_lab.machines.parameters import Parameter, changed, nearest_possible

EXAMPLES = ("link.0-1", "node.0.nic.bandwidth", "rank.0.link.bandwidth", "rank.0.compute", SPINE)
"""Names of single links, nodes and ranks, and of the spine."""


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
    groups = _by_kind(machine, given)
    found, texts = machine, ", ".join(map(str, given))
    try:
        if constants := groups["system"] | groups["rates"]:
            found = _with_constants(found, constants, links=bool(groups["system"]), rates=bool(groups["rates"]))
        for name, override in groups["library"].items():
            found = _with_library_field(found, name, override)
        if links := groups["links"]:
            topology, parameters = changed_links(found.topology, links, found.parameters)
            found = found.edited(partial(change_links, overrides=links), topology)
            found = replace(found, parameters=found.parameters.with_parameters(parameters))
        for override in groups["compute"].values():
            found = _with_compute(found, override)
        if speeds := groups["speeds"]:
            found = _with_speeds(found, list(speeds.values()))
    except (ProfileError, QuantityError, TopologyError) as error:
        raise OverrideError(f"override {texts}: {error}") from error
    changes = (*machine.changes, *(each.line(found.parameters.values()) for each in given))
    return replace(
        found, topology=replace(found.topology, name=f"{machine.topology.name} with {texts}"), changes=changes
    )


def override_names(machine: Machine) -> list[str]:
    """The numbers of a machine that can be overridden: constants on which its times depend, and ``compute.rate``.

    Beside these, single links, nodes and ranks can be, and the spine between nodes: ``link.0-1``, ``link.0-1.latency``,
    ``node.1.nic.bandwidth``, ``rank.3.compute``, ``spine.oversubscription``.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> override_names(load_machine("full-mesh:8"))
    ['link.bandwidth', 'link.latency', 'compute.rate']
    """
    return [*map(_shown, constants_of(machine)), COMPUTE]


_LIBRARY_FIELDS = {
    "launch": "launch_s",
    "tcp_payload": "payload_share",
    "peer_write_bandwidth": "write_bytes_per_s",
    "peer_write_share": "write_share",
}
"""Parameters of a library without a profile, and its fields."""


def constants_of(machine: Machine) -> dict[str, str]:
    """The constants among these names, as files have them, and what each is of: links, system, library or rates."""
    system, library = machine.system, machine.comm_library
    if system is None:
        found = {f"{kind}_{quantity}": "links" for kind in link_classes(machine.topology) for quantity in FIELDS}
    else:
        read = system.numbers_read(machine.parameters.numbers)
        found = {name: "system" for name in CONSTANTS if name in read}
    for name, field in _LIBRARY_FIELDS.items():
        if hasattr(library, field) and (name != "launch" or library.launch_s):
            found.setdefault(name, "library")
    kernel = isinstance(machine.compute, KernelCompute)  # it has constants of its own for 16 bit
    if kernel or isinstance(machine.compute, ComputeRates):
        rates = (name for name in machine.parameters if name in COMPUTE_RATES)
        found |= {name: "rates" for name in rates if not kernel or COMPUTE_RATES[name][0] == "fp32"}
    return found


def _by_kind(machine: Machine, overrides: Sequence[Override]) -> dict[str, dict[str, Override]]:
    """The overrides by the names of constants, and by what these are of.

    Raises `OverrideError` for an unknown or repeated name.
    """
    kinds = constants_of(machine) | {COMPUTE: "compute"} | ({SPINE: "links"} if has_nics(machine) else {})
    found: dict[str, dict[str, Override]] = {
        kind: {} for kind in ("system", "rates", "library", "links", "compute", "speeds")
    }
    for override in overrides:
        name = override.name.replace(".", "_") if override.name != COMPUTE else COMPUTE
        # ranks have ports into a switch, and links to each other
        name = name.replace("port", "link", 1) if name.startswith("port_") and _has_ports(machine) else name
        name = name if name in CONSTANTS else override.name
        place, kind = place_of(name), kinds.get(name)
        if kind is None and place is not None and place.kind != "class":
            kind = "speeds" if place.quantity == "compute" else "links"
        if kind is None:
            raise OverrideError(f"override {override}: {_why_unknown(machine, override.name, name)}")
        if name in found[kind]:
            raise OverrideError(f"override {override}: {_shown(name)} is given twice, expected once")
        found[kind][name] = override
    return found


def _shown(constant: str) -> str:
    """The name of a constant for people: wires have a dot."""
    return constant.replace("_", ".", 1) if constant in WIRES else constant


def _has_ports(machine: Machine) -> bool:
    """Whether ranks of a node meet in a switch."""
    return any(kind != "network" for kind in machine.topology.switch_kinds.values())


def _why_unknown(machine: Machine, given: str, name: str) -> str:
    names, where = override_names(machine), machine.topology.name
    of_profile = f"tasp-lab profile show {where.partition(' with ')[0]}" if machine.system is not None else ""
    expected = expected_one_of(name, names, of_profile)
    if name in COMPUTE_RATES and isinstance(machine.compute, KernelCompute):
        return f"{where} computes as the kernel {machine.compute.kernel.name} does, expected compute.rate=..."
    if name.startswith(("nic", "spine")) and not has_nics(machine):
        return f"{where} has no NICs, {expected}"
    if given.startswith("port") and not _has_ports(machine):
        return f"ranks of {where} have no ports into a switch, {expected}"
    if name in CONSTANTS:
        return f"{where} does not depend on {name}, {expected}"
    return unknown("name", given, [*names, *EXAMPLES, *LAYER_NAMES], of_profile)


def _with_constants(machine: Machine, overrides: Mapping[str, Override], *, links: bool, rates: bool) -> Machine:
    """The machine with overrides of constants of its system, by name: of its `links` and library, and of its `rates`.

    Raises `OverrideError` for impossible values: also where a payload would exceed its line rate, or a hop beat the
    wire.
    """
    changes = {name: override.change(CONSTANTS[name].quantity) for name, override in overrides.items()}
    parameters = changed(machine.parameters, changes, clamp=False)
    for name, override in overrides.items():
        override.check(parameters.numbers[name], CONSTANTS[name].quantity)
    nearest = nearest_possible(parameters.numbers)
    for name in (each for each in parameters if each in nearest):
        value, possible, spec = parameters.numbers[name], nearest[name], CONSTANTS[name]
        # a payload that is its whole line rate stays possible when both are multiplied
        if math.isclose(possible, value, rel_tol=1e-9, abs_tol=1e-15):
            continue
        other = spec.depends_on if value > possible else spec.min_constant
        why = ", ".join(str(overrides[each]) for each in (name, other) if each in overrides)
        limit = f"expected at {'most' if value > possible else 'least'} {spec.format(possible)}, {other}"
        raise OverrideError(f"override {why}: {name} would be {spec.format(value)}, {limit}")
    if links:
        assert machine.system is not None, "only systems have such numbers"
        # links that were changed by hand would come back as those of the profile
        made = machine.system.topology(machine.parameters.numbers)
        if replace(made, name=machine.topology.name) != machine.topology:
            raise OverrideError(
                f"{machine.topology.name}: its links are not those of its profile any more; override it before they "
                "change"
            )
        machine = machine.rebuilt(parameters)
    if not rates:
        return machine
    of_dtype, compute = compute_of(parameters.values()), machine.compute
    rated = replace(compute, rest=of_dtype) if isinstance(compute, KernelCompute) else of_dtype
    return replace(machine, parameters=parameters, compute=rated)


def _with_library_field(machine: Machine, name: str, override: Override) -> Machine:
    """The machine with an override of a number of its library."""
    field, spec, known = _LIBRARY_FIELDS[name], CONSTANTS[name], machine.parameters.get(name)
    old: Number = getattr(machine.comm_library, field)
    new = float(override.of(old, spec.quantity))
    source = override.source(spec.format(float(old)), "of the machine" if known is None else known.source)
    text = spec.format(new)
    stated = Parameter(name, text, source) if known is None else Parameter(name, new, source, written=text)
    change: dict[str, Any] = {field: new}
    return replace(
        machine,
        comm_library=replace(machine.comm_library, **change),
        parameters=machine.parameters.with_parameters([stated]),
    )


def _with_compute(machine: Machine, override: Override) -> Machine:
    """The machine whose kernel calls all have another rate, or times divided by a factor.

    Raises `OverrideError` for an amount that is added: calls of different shapes have different rates.
    """
    compute = ASSUMED_COMPUTE if machine.compute == INSTANT else machine.compute
    if override.kind == "plus":
        raise OverrideError(f"override {override}: expected a factor like x0.9, or a rate like 300TFLOP/s")
    if override.kind == "to":
        rate = override.of(0.0, CONSTANTS["compute_rate"].quantity)
        return replace(machine, compute=ComputeRate(rate, f"given: {override}"))
    scaled = compute if override.factor == 1 else compute.scaled(float(override.factor))
    source = "kernel calls of all shapes, dtypes and passes; their times are divided by the factor"
    parameter = Parameter(COMPUTE, override.text, f"given: {override.name} {override.text} ({source})")
    return replace(machine, compute=scaled, parameters=machine.parameters.with_parameters([parameter]))


def _with_speeds(machine: Machine, overrides: Sequence[Override]) -> Machine:
    """The machine with overrides of how fast ranks compute beside the others. Raises `OverrideError` for no factor."""
    speeds: list[Number] = list(machine.rank_speeds or [1] * machine.topology.world_size)
    for override in overrides:
        place = place_of(override.name)
        assert place is not None, "names of places only"
        if override.kind != "times":
            raise OverrideError(f"override {override}: expected a factor, like x0.5")
        for rank in ranks_of(machine.topology, place, override):
            speeds[rank] = speeds[rank] * override.factor
    parameters = [Parameter(each.name, each.text, f"given: {each}") for each in overrides]
    return replace(
        machine,
        rank_speeds=() if all(speed == 1 for speed in speeds) else tuple(Fraction(speed) for speed in speeds),
        parameters=machine.parameters.with_parameters(parameters),
    )
