"""Overrides of one node or rank: ``node.1.nic.bandwidth=x0.5``, ``rank.3.link.latency=+1us``, ``rank.3.compute=x0.5``.

Of links and NICs those are changed that begin or end at a rank of the place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tasp_lab.core.errors import OverrideError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.machine import Constant, Machine
from tasp_lab.machines.overrides.link_classes import FIELDS, class_of, with_number
from tasp_lab.machines.overrides.override import Override
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link

_NAME = re.compile(r"(node|rank)\.(\d{1,5})\.(?:(compute)|(link|port|nic)\.(bandwidth|latency))", re.ASCII)


@dataclass(frozen=True)
class Place:
    """What a name means: a node or a rank by number, and its compute or a number of its links."""

    kind: str
    number: int
    links: str
    quantity: str

    def ranks(self, topology: Topology) -> list[int]:
        """The ranks of the place; none if the topology has no such node or rank."""
        places = topology.node_of_rank if self.kind == "node" else range(topology.world_size)
        return [rank for rank, place in enumerate(places) if place == self.number]


def place_of(name: str) -> Place | None:
    """The place that a name means; None for other names.

    >>> place_of("node.1.nic.bandwidth")
    Place(kind='node', number=1, links='nic', quantity='bandwidth')
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    kind, number, compute, links, quantity = found.groups()
    links = "link" if links == "port" else links
    return Place(kind, int(number), links or "", quantity or compute)


@dataclass(frozen=True)
class PlaceOverrides:
    """An edit of a topology: overrides of links of single nodes or ranks, nodes first."""

    overrides: tuple[Override, ...]

    def __call__(self, topology: Topology) -> Topology:
        """The topology with these overrides. Raises `OverrideError` where a place or its links do not exist."""
        for override in sorted(self.overrides, key=lambda each: each.name):
            topology = _with_place(topology, override)
        return topology

    def constants(self, topology: Topology) -> list[Constant]:
        """The overridden numbers with their sources; `topology` has the old ones, of which the first is shown."""
        return [_constant(topology, each) for each in self.overrides]


def _with_place(topology: Topology, override: Override) -> Topology:
    place = place_of(override.name)
    assert place is not None, "names of places only"
    ranks = set(ranks_of(topology, place, override))
    field, quantity = FIELDS[place.quantity], CONSTANTS[f"link_{place.quantity}"].quantity
    changed: set[int] = set()

    def change(index: int, link: Link) -> Link:
        if class_of(topology, link) != place.links or ranks.isdisjoint((link.source, link.destination)):
            return link
        changed.add(index)
        return with_number(link, field, override.of(getattr(link, field), quantity))

    found = topology.map_links(change)
    if not changed:
        what = "NICs" if place.links == "nic" else "links"
        raise OverrideError(f"override {override}: {place.kind} {place.number} of {topology.name} has no {what}")
    return found


def _constant(topology: Topology, override: Override) -> Constant:
    place = place_of(override.name)
    assert place is not None, "names of places only"
    ranks, spec = set(ranks_of(topology, place, override)), CONSTANTS[f"link_{place.quantity}"]
    for link in topology.links:
        if class_of(topology, link) == place.links and not ranks.isdisjoint((link.source, link.destination)):
            old = getattr(link, FIELDS[place.quantity])
            new = spec.format(float(override.of(old, spec.quantity)))
            return Constant(override.name, new, override.source(spec.format(float(old)), "of the machine"))
    return Constant(override.name, override.change.text, f"given: {override}")


def ranks_of(topology: Topology, place: Place, override: Override) -> list[int]:
    """The ranks of a place. Raises `OverrideError` if there are none."""
    ranks = place.ranks(topology)
    if not ranks:
        last = topology.world_size - 1 if place.kind == "rank" else max(topology.node_of_rank)
        raise OverrideError(f"override {override}: {topology.name} has {place.kind}s 0 to {last}")
    return ranks


def with_speeds(machine: Machine, overrides: Sequence[Override]) -> Machine:
    """The machine with overrides of how fast ranks compute beside the others. Raises `OverrideError` for no factor."""
    speeds: list[Number] = list(machine.rank_speeds or [1] * machine.topology.world_size)
    for override in overrides:
        place = place_of(override.name)
        assert place is not None, "names of places only"
        if override.change.kind != "times":
            raise OverrideError(f"override {override}: expected a factor, like x0.5")
        for rank in ranks_of(machine.topology, place, override):
            speeds[rank] = speeds[rank] * override.change.factor
    constants = [Constant(each.name, each.change.text, f"given: {each}") for each in overrides]
    equal = all(speed == 1 for speed in speeds)
    speeds = [Fraction(speed) for speed in speeds]
    return replace(machine, rank_speeds=() if equal else tuple(speeds), constants=(*machine.constants, *constants))
