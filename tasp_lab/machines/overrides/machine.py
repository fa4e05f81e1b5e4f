"""Overrides of a machine: its constants, its links, and how fast its ranks compute.

Whatever the order of the texts, constants come first, then the spine, nodes, ranks, single links, and compute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from tasp_lab.core.errors import OverrideError, ProfileError, QuantityError, TopologyError, expected_one_of, unknown
from tasp_lab.core.units import Number
from tasp_lab.machines.compute import ASSUMED_COMPUTE, COMPUTE_RATES, KernelCompute, compute_of
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.machine import INSTANT, ComputeRate, ComputeRates, Machine
from tasp_lab.machines.overrides.links import (
    FIELDS,
    SPINE,
    edit_links,
    edited_links,
    is_named,
    is_of_links,
    is_of_speed,
    link_classes,
    place_of,
    ranks_of,
    with_class,
)
from tasp_lab.machines.overrides.override import (
    COMPUTE,
    LAYER,
    LAYER_NAMES,
    Override,
    constant_name,
    has_nics,
    has_ports,
    parse_overrides,
    shown,
)
from tasp_lab.machines.parameters import Change, Parameter, Parameters, changed, nearest_possible

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
    by_name = _by_name(machine, given)
    try:
        found = _override(machine, by_name)
    except (ProfileError, QuantityError, TopologyError) as error:
        raise OverrideError(f"override {', '.join(map(str, given))}: {error}") from error
    name = f"{machine.topology.name} with {', '.join(map(str, given))}"
    changes = (*machine.changes, *(each.line(found.parameters.values()) for each in given))
    return replace(found, topology=replace(found.topology, name=name), changes=changes)


def override_names(machine: Machine) -> list[str]:
    """The numbers of a machine that can be overridden: constants on which its times depend, and ``compute.rate``.

    Beside these, single links, nodes and ranks can be, and the spine between nodes: ``link.0-1``, ``link.0-1.latency``,
    ``node.1.nic.bandwidth``, ``rank.3.compute``, ``spine.oversubscription``.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> override_names(load_machine("full-mesh:8"))
    ['link.bandwidth', 'link.latency', 'compute.rate']
    """
    return [*map(shown, constant_names(machine)), COMPUTE]


def constant_names(machine: Machine) -> list[str]:
    """The constants among these names, as files have them."""
    if machine.system is None:
        known = [f"{kind}_{quantity}" for kind in link_classes(machine.topology) for quantity in FIELDS]
    else:
        read = machine.system.numbers_read(machine.parameters.numbers)
        known = [name for name in CONSTANTS if name in read]
    return [*known, *_library_fields(machine, known), *_rate_constants(machine)]


def _by_name(machine: Machine, overrides: Sequence[Override]) -> dict[str, Override]:
    """The overrides by the names of constants. Raises `OverrideError` for an unknown or repeated name."""
    found: dict[str, Override] = {}
    known = {COMPUTE, *constant_names(machine), *([SPINE] if has_nics(machine) else [])}
    for override in overrides:
        name = constant_name(machine, override.name)
        if name not in known and not is_named(name) and place_of(name) is None:
            raise OverrideError(f"override {override}: {_why_unknown(machine, override.name, name)}")
        if name in found:
            raise OverrideError(f"override {override}: {shown(name)} is given twice, expected once")
        found[name] = override
    return found


def _why_unknown(machine: Machine, given: str, name: str) -> str:
    names, where = override_names(machine), machine.topology.name
    of_profile = f"tasp-lab profile show {where.partition(' with ')[0]}" if machine.system is not None else ""
    expected = expected_one_of(name, names, of_profile)
    if name in COMPUTE_RATES and isinstance(machine.compute, KernelCompute):
        return f"{where} computes as the kernel {machine.compute.kernel.name} does, expected compute.rate=..."
    if name.startswith(("nic", "spine")) and not has_nics(machine):
        return f"{where} has no NICs, {expected}"
    if given.startswith("port") and not has_ports(machine):
        return f"ranks of {where} have no ports into a switch, {expected}"
    if name in CONSTANTS:
        return f"{where} does not depend on {name}, {expected}"
    return unknown("name", given, [*names, *EXAMPLES, *LAYER_NAMES], of_profile)


def _override(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of names that it has."""
    rates = {name: override for name, override in overrides.items() if name in COMPUTE_RATES}
    constants = {name: override for name, override in overrides.items() if name in CONSTANTS and name not in rates}
    changed = _with_constants(machine, constants)
    if of_links := tuple(override for name, override in overrides.items() if is_of_links(name)):
        topology, parameters = edited_links(changed.topology, of_links)
        system = changed.system and changed.system.edited(partial(edit_links, overrides=of_links))
        parameters_now = changed.parameters.with_parameters(parameters)
        changed = replace(changed, topology=topology, parameters=parameters_now, system=system)
    if rates:
        changed = _with_rates(changed, rates)
    if COMPUTE in overrides:
        changed = _with_compute(changed, overrides[COMPUTE])
    speeds = [override for name, override in overrides.items() if is_of_speed(name)]
    return _with_speeds(changed, speeds) if speeds else changed


def _with_constants(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of the numbers of its links and its library, by name."""
    system, known = machine.system, machine.parameters
    read: Collection[str] = () if system is None else system.numbers_read(known.numbers)
    of_library = {name: overrides[name] for name in _library_fields(machine, read) if name in overrides}
    rest = {name: override for name, override in overrides.items() if name not in of_library}
    if system is None:
        for name, override in rest.items():
            topology, old, new = with_class(machine.topology, name, override)
            machine = replace(_with_number(machine, name, override, old, new), topology=topology)
    elif rest:
        made = system.topology(known.numbers)
        if replace(made, name=machine.topology.name) != machine.topology:
            raise OverrideError(
                f"{machine.topology.name}: its links are not those of its profile any more; override it before they "
                "change"
            )
        parameters = override_parameters(known, rest)
        library = system.comm_library(parameters.numbers)
        machine = replace(
            machine,
            topology=system.topology(parameters.numbers),
            comm_library=library if library.name == machine.comm_library.name else machine.comm_library,
            parameters=parameters,
            contention=system.contention(parameters.numbers) if machine.contention.slows else NONE,
        )
    for name, override in of_library.items():
        machine = _with_library_field(machine, name, override)
    return machine


def override_parameters(parameters: Parameters, overrides: Mapping[str, Override]) -> Parameters:
    """The parameters with overrides of some that are among them, by name.

    What is proportional to a line rate follows it (`tasp_lab.machines.parameters.changed`). The latency of a hop has
    the wire's in it, so it grows and shrinks by as much as the wire's does. An override of a parameter that follows
    another is applied after it has followed. Raises `OverrideError` for impossible values.
    """
    found = parameters
    for name in (each for each in CONSTANTS if each in overrides):
        override, spec, old, before = overrides[name], CONSTANTS[name], found[name], found.numbers[name]
        new = override.checked(before, spec.quantity)
        hops = [hop for hop in found if hop in CONSTANTS and CONSTANTS[hop].min_constant == name]
        changes = {hop: Change(1, max(new - before, -found.numbers[hop])) for hop in hops}
        after = changed(found, {name: override.change(before, new)} | changes, clamp=False)
        # the text of a file stays where the number does
        written = override.text if override.kind == "to" and after[name] != old else after[name].written
        source = override.source(old.text if spec.kind else spec.format(before), old.source)
        sources = [replace(after[name], source=source, written=written)]
        for hop in hops:
            if after.numbers[hop] != found.numbers[hop]:
                was = f"{CONSTANTS[hop].format(found.numbers[hop])} ({found[hop].source})"
                follows = f"follows {override.name} {override.text}, was {was}"
                source = f"assumed: {follows}" if found[hop].assumed else follows
                sources.append(replace(after[hop], source=source))
        found = after.with_parameters(sources)
    _check(found, overrides)
    return found


def _check(parameters: Parameters, overrides: Mapping[str, Override]) -> None:
    """Raise `OverrideError` where an override lets a payload exceed its line rate, or a hop beat the wire."""
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


_LIBRARY_FIELDS = {
    "launch": "launch_s",
    "tcp_payload": "payload_share",
    "peer_write_bandwidth": "write_bytes_per_s",
    "peer_write_share": "write_share",
}
"""Parameters of a library without a profile, and its fields."""


def _library_fields(machine: Machine, others: Collection[str]) -> list[str]:
    """The parameters of its library that a machine has beside `others`."""
    library = machine.comm_library
    has = [name for name, field in _LIBRARY_FIELDS.items() if hasattr(library, field)]
    return [name for name in has if name not in others and (name != "launch" or library.launch_s)]


def _with_library_field(machine: Machine, name: str, override: Override) -> Machine:
    """The machine with an override of a number of its library."""
    field, spec = _LIBRARY_FIELDS[name], CONSTANTS[name]
    old: Number = getattr(machine.comm_library, field)
    new = override.checked(float(old), spec.quantity)
    new = float(old) if new == old else new
    change: dict[str, Any] = {field: new}
    found = _with_number(machine, name, override, old, new)
    return replace(found, comm_library=replace(machine.comm_library, **change))


def _with_number(machine: Machine, name: str, override: Override, old: Number, new: Number) -> Machine:
    """The machine whose parameter of a name, stated or not, has a new number."""
    spec, known = CONSTANTS[name], machine.parameters.get(name)
    source = override.source(spec.format(float(old)), "of the machine" if known is None else known.source)
    text = spec.format(float(new))
    changed = (
        Parameter(shown(name), text, source) if known is None else Parameter(name, float(new), source, written=text)
    )
    return replace(machine, parameters=machine.parameters.with_parameters([changed]))


def _rate_constants(machine: Machine) -> list[str]:
    """The compute rates that a machine has and uses; a kernel has constants of its own for 16 bit."""
    names = [name for name in machine.parameters if name in COMPUTE_RATES]
    if isinstance(machine.compute, KernelCompute):
        return [name for name in names if COMPUTE_RATES[name][0] == "fp32"]
    return names if isinstance(machine.compute, ComputeRates) else []


def _with_rates(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of compute rates, by name."""
    parameters = override_parameters(machine.parameters, overrides)
    rates, kernel = compute_of(parameters.values()), machine.compute
    compute = replace(kernel, rest=rates) if isinstance(kernel, KernelCompute) else rates
    return replace(machine, parameters=parameters, compute=compute)


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
    changed = compute if override.factor == 1 else compute.scaled(float(override.factor))
    source = "kernel calls of all shapes, dtypes and passes; their times are divided by the factor"
    parameter = Parameter(COMPUTE, override.text, f"given: {override.name} {override.text} ({source})")
    return replace(machine, compute=changed, parameters=machine.parameters.with_parameters([parameter]))


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
    equal = all(speed == 1 for speed in speeds)
    speeds = [Fraction(speed) for speed in speeds]
    known = machine.parameters.with_parameters(parameters)
    return replace(machine, rank_speeds=() if equal else tuple(speeds), parameters=known)
