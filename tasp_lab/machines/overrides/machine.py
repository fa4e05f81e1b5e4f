"""Overrides of a machine: its constants, its links, and how fast its ranks compute.

Whatever the order of the texts, constants come first, then the spine, nodes, ranks, single links, and compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tasp_lab.core.errors import OverrideError, ProfileError, QuantityError, TopologyError, expected_one_of, unknown
from tasp_lab.machines.compute_rates import COMPUTE_RATES
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.kernel_compute import KernelCompute
from tasp_lab.machines.machine import Constant, Machine
from tasp_lab.machines.overrides.compute import rate_constants, with_compute, with_rate_constants
from tasp_lab.machines.overrides.constants import library_constants, member_of, with_constants
from tasp_lab.machines.overrides.layer import LAYER_NAMES
from tasp_lab.machines.overrides.link_classes import FIELDS, link_classes
from tasp_lab.machines.overrides.named_links import LinkOverrides, is_named
from tasp_lab.machines.overrides.names import COMPUTE, constant_name, has_nics, has_ports, shown
from tasp_lab.machines.overrides.override import LAYER, Override, parse_overrides
from tasp_lab.machines.overrides.places import PlaceOverrides, place_of, with_speeds
from tasp_lab.machines.overrides.spine import SPINE, SpineOverride
from tasp_lab.topology.graph import Topology

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
        changed = _changed(machine, by_name)
    except (ProfileError, QuantityError, TopologyError) as error:
        raise OverrideError(f"override {', '.join(map(str, given))}: {error}") from error
    name = f"{machine.topology.name} with {', '.join(map(str, given))}"
    changes = (*machine.changes, *(each.line(changed.constants) for each in given))
    return replace(changed, topology=replace(changed.topology, name=name), changes=changes)


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
    member = member_of(machine)
    if member is None:
        wires = [f"{kind}_{quantity}" for kind in link_classes(machine.topology) for quantity in FIELDS]
    else:
        read = member.constants_read()
        wires = [name for name in CONSTANTS if name in read]
    return [*wires, *library_constants(machine, wires), *rate_constants(machine)]


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
    of_profile = f"tasp-lab profile show {where.partition(' with ')[0]}" if member_of(machine) is not None else ""
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


def _changed(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of names that it has."""
    rates = {name: override for name, override in overrides.items() if name in COMPUTE_RATES}
    constants = {name: override for name, override in overrides.items() if name in CONSTANTS and name not in rates}
    changed = _with_links(with_constants(machine, constants), overrides)
    if rates:
        changed = with_rate_constants(changed, rates)
    if COMPUTE in overrides:
        changed = with_compute(changed, overrides[COMPUTE])
    speeds = [override for name, override in overrides.items() if _is_of_place(name, compute=True)]
    return with_speeds(changed, speeds) if speeds else changed


def _with_links(machine: Machine, overrides: Mapping[str, Override]) -> Machine:
    """The machine with overrides of its spine, of the links of nodes and ranks, and of single links."""
    if SPINE in overrides:
        spine = SpineOverride(overrides[SPINE])
        machine = _edited(machine, spine, spine.constants())
    if places := tuple(override for name, override in overrides.items() if _is_of_place(name, compute=False)):
        of_places = PlaceOverrides(places)
        machine = _edited(machine, of_places, of_places.constants(machine.topology))
    if single := tuple(override for name, override in overrides.items() if is_named(name)):
        of_links = LinkOverrides(single)
        machine = _edited(machine, of_links, of_links.constants(machine.topology))
    return machine


def _edited(machine: Machine, edit: Callable[[Topology], Topology], constants: Sequence[Constant]) -> Machine:
    return replace(machine.edited(edit), constants=(*machine.constants, *constants))


def _is_of_place(name: str, *, compute: bool) -> bool:
    place = place_of(name)
    return place is not None and (place.quantity == "compute") == compute
