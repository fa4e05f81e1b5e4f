"""Overrides of links: of all of a class, of the spine, of one node or rank, and of single links.

- ``link.bandwidth``, ``nic.latency``: a class, on machines without a profile. The latency of a class is that from rank
  to rank; a link between a rank and a switch has a part of it.
- ``spine.oversubscription=4``: without it the network between nodes carries all that NICs bring. With rails, NICs meet
  in rail switches, and the spine is the links between these. Otherwise the NICs of a node meet in a switch of their
  own, whose links up to the spine and down from it have the bandwidth of these NICs over the oversubscription: a
  capacity that they share.
- ``node.1.nic.bandwidth=x0.5``, ``rank.3.link.latency=+1us``: the links and NICs that begin or end at a rank of
  the place.
- ``link.0-1=10GB/s``, ``link.0>1.latency=+1us``: single links; ``0>1`` is one direction.

`edit_links` applies all but the first kind, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, TypeVar

from tasp_lab.core.errors import OverrideError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS, Quantity
from tasp_lab.machines.overrides.override import Override
from tasp_lab.machines.parameters import Parameter
from tasp_lab.topology.derived import links_named
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link, MeshLinks, SharedCapacity

Field = Literal["bandwidth_bytes_per_s", "latency_s"]
FIELDS: dict[str, Field] = {"bandwidth": "bandwidth_bytes_per_s", "latency": "latency_s"}
"""The field of a link, by the second word of a name."""


_Links = TypeVar("_Links", Link, MeshLinks)


def with_number(link: _Links, field: Field, number: Number) -> _Links:
    """A link with another bandwidth or latency; or all links of a mesh."""
    change: dict[str, Any] = {field: number}
    return replace(link, **change)


def link_classes(topology: Topology) -> list[str]:
    """The classes of links that a topology has, ``link`` and ``nic``.

    >>> from tasp_lab.topology.builders import full_mesh, nodes
    >>> link_classes(full_mesh(4)), link_classes(nodes(2, 4))
    (['link'], ['link', 'nic'])
    """
    if isinstance(topology.links, MeshLinks):
        return ["link"] if len(topology.links) else []
    found = {class_of(topology, link) for link in topology.links}
    return [each for each in ("link", "nic") if each in found]


def class_of(topology: Topology, link: Link) -> str:
    """``nic`` for a link into or out of a network between nodes, ``link`` for all others."""
    return "nic" if topology.is_nic(link) else "link"


def with_class(topology: Topology, constant: str, override: Override) -> tuple[Topology, Number, Number]:
    """The topology with an override of ``link_bandwidth`` or another wire, and the number before and after.

    Where links of a class differ, the numbers are those of the first. Raises `OverrideError` where they differ and a
    factor is needed.
    """
    kind, quantity = constant.split("_")
    field = FIELDS[quantity]
    mesh = isinstance(topology.links, MeshLinks)
    members = topology.links[:1] if mesh else [each for each in topology.links if class_of(topology, each) == kind]
    old = _of_class(topology, members, field, override)
    new = override.of(old, CONSTANTS[constant].quantity)
    if isinstance(topology.links, MeshLinks):
        return replace(topology, links=with_number(topology.links, field, new)), old, new

    def changed(_: int, link: Link) -> Link:
        return _with(link, field, old, new, override) if class_of(topology, link) == kind else link

    return topology.map_links(changed), old, new


def _of_class(topology: Topology, members: Sequence[Link], field: Field, override: Override) -> Number:
    """The number of a class: that from rank to rank."""
    found = list(dict.fromkeys(_from_rank_to_rank(each, field) for each in members if _at_rank(each)))
    if len(found) > 1 and override.kind != "times":
        quantity = CONSTANTS["link_bandwidth" if field == "bandwidth_bytes_per_s" else "link_latency"]
        values = " and ".join(quantity.format(float(each)) for each in found[:2])
        raise OverrideError(
            f"override {override}: links of {topology.name} have {values}, expected a factor like x2, or one link by "
            "name like link.0-1"
        )
    return found[0]


def _at_rank(link: Link) -> bool:
    return isinstance(link.source, int) or isinstance(link.destination, int)


def _from_rank_to_rank(link: Link, field: Field) -> Number:
    value: Number = getattr(link, field)
    through_switch = isinstance(link.source, str) or isinstance(link.destination, str)
    return 2 * value if field == "latency_s" and through_switch else value


def _with(link: Link, field: Field, old: Number, new: Number, override: Override) -> Link:
    """A link whose number has the same share of that of its class as before."""
    value: Number = getattr(link, field)
    if override.kind == "times":
        return with_number(link, field, value * override.factor)
    if old:
        return with_number(link, field, new * (Fraction(value) / Fraction(old)))
    share = Fraction(1, 1 if isinstance(link.source, int) and isinstance(link.destination, int) else 2)
    return with_number(link, field, new * share) if _at_rank(link) else link


SPINE = "spine.oversubscription"


def _parse_ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 1 <= ratio < 1e6:
        raise OverrideError(f"{text!r}, expected a number of 1 or more, like 4")
    return ratio


_RATIO = Quantity("", _parse_ratio)


_NAME = re.compile(r"(node|rank)\.(\d{1,5})\.(?:(compute)|(link|port|nic)\.(bandwidth|latency))", re.ASCII)


@dataclass(frozen=True)
class Place:
    """What a name means: a node or a rank by number, and its compute or a number of its links."""

    kind: str
    number: int
    links: str
    quantity: str


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


def ranks_of(topology: Topology, place: Place, override: Override) -> list[int]:
    """The ranks of a place. Raises `OverrideError` if there are none."""
    places = topology.node_of_rank if place.kind == "node" else range(topology.world_size)
    ranks = [rank for rank, at in enumerate(places) if at == place.number]
    if not ranks:
        last = topology.world_size - 1 if place.kind == "rank" else max(topology.node_of_rank)
        raise OverrideError(f"override {override}: {topology.name} has {place.kind}s 0 to {last}")
    return ranks


PREFIX = "link."


def is_named(name: str) -> bool:
    """Whether a name is that of a single link.

    >>> is_named("link.0>1"), is_named("link.0-1.latency"), is_named("link.bandwidth")
    (True, True, False)
    """
    return name.startswith(PREFIX) and ("-" in name or ">" in name)


def ends_and_field(name: str) -> tuple[str, str]:
    """The ends of a link and its quantity.

    >>> ends_and_field("link.0-1.latency"), ends_and_field("link.0>1")
    (('0-1', 'latency'), ('0>1', 'bandwidth'))
    """
    ends, _, field = name.removeprefix(PREFIX).rpartition(".")
    return (ends, field) if ends and field in FIELDS else (name.removeprefix(PREFIX), "bandwidth")


def is_of_links(name: str) -> bool:
    """Whether `edit_links` takes overrides of this name."""
    return name == SPINE or is_named(name) or (place_of(name) is not None and not is_of_speed(name))


def is_of_speed(name: str) -> bool:
    """Whether a name is of how fast a node or a rank computes."""
    place = place_of(name)
    return place is not None and place.quantity == "compute"


def edit_links(topology: Topology, overrides: Sequence[Override]) -> Topology:
    """The topology with overrides of its spine, of links of nodes and ranks, and of single links.

    Raises `OverrideError` where a place or its links do not exist, and `TopologyError` for an unknown link.
    """
    return edited_links(topology, overrides)[0]


def edited_links(topology: Topology, overrides: Sequence[Override]) -> tuple[Topology, list[Parameter]]:
    """The topology of `edit_links`, and the new numbers with their sources; of several links that of the first."""
    parameters = []
    for override in overrides:
        if override.name == SPINE:
            topology = _with_spine(topology, override)
            text = override.text.removeprefix("x")
            parameters.append(Parameter(SPINE, text, f"given: {override}, was 1"))
    of_places = [_selected(topology, override) for override in overrides if place_of(override.name) is not None]
    single = [_selected(topology, override) for override in overrides if is_named(override.name)]
    parameters += [each.parameter(topology) for each in (*of_places, *single)]
    _check_once(topology, single)
    for each in (*sorted(of_places, key=lambda each: each.override.name), *single):  # nodes before ranks
        topology = each.edit(topology)
    return topology, parameters


@dataclass(frozen=True)
class _Selected:
    """The links whose bandwidth or latency, the `quantity`, an override changes, by number; at least one."""

    override: Override
    links: tuple[int, ...]
    quantity: str

    @property
    def field(self) -> Field:
        return FIELDS[self.quantity]

    def number(self, link: Link) -> Number:
        """The new number of a link."""
        return self.override.of(getattr(link, self.field), CONSTANTS[f"link_{self.quantity}"].quantity)

    def edit(self, topology: Topology) -> Topology:
        """The topology with the new numbers."""
        chosen = frozenset(self.links)
        return topology.map_links(
            lambda index, link: with_number(link, self.field, self.number(link)) if index in chosen else link
        )

    def parameter(self, topology: Topology) -> Parameter:
        """The new number of the first of the links."""
        link, spec = topology.links[self.links[0]], CONSTANTS[f"link_{self.quantity}"]
        was, new = (spec.format(float(each)) for each in (getattr(link, self.field), self.number(link)))
        whose = f"{link.name} of the machine" if is_named(self.override.name) else "of the machine"
        return Parameter(self.override.name, new, self.override.source(was, whose))


def _selected(topology: Topology, override: Override) -> _Selected:
    """What an override of a single link, or of links of a place, changes. Raises `OverrideError`, `TopologyError`."""
    place = place_of(override.name)
    if place is None:
        ends, quantity = ends_and_field(override.name)
        return _Selected(override, tuple(links_named(topology, ends)), quantity)
    ranks = set(ranks_of(topology, place, override))
    links = tuple(
        index for index, link in enumerate(topology.listed_links())
        if class_of(topology, link) == place.links and not ranks.isdisjoint((link.source, link.destination))
    )  # fmt: skip
    if not links:
        what = "NICs" if place.links == "nic" else "links"
        raise OverrideError(f"override {override}: {place.kind} {place.number} of {topology.name} has no {what}")
    return _Selected(override, links, place.quantity)


def _check_once(topology: Topology, single: Sequence[_Selected]) -> None:
    """Raise `OverrideError` if two overrides of single links change the same number."""
    changes: dict[tuple[int, Field], Override] = {}
    for each in single:
        for link in each.links:
            other = changes.setdefault((link, each.field), each.override)
            if other is not each.override:
                name = topology.links[link].name
                raise OverrideError(f"override {each.override}: {name} has the override {other}, too, expected one")


def _with_spine(topology: Topology, override: Override) -> Topology:
    """The topology whose spine carries a part of what NICs bring."""
    ratio = Fraction(0) if override.kind == "plus" else Fraction(override.of(1.0, _RATIO))
    if ratio < 1:
        raise OverrideError(f"override {override}: expected a number of 1 or more, like 4")
    network = {name for name, kind in topology.switch_kinds.items() if kind == "network"}
    if ratio == 1:
        return topology
    if any({link.source, link.destination} <= network for link in topology.links):
        return topology.map_links(
            lambda _, link: with_number(link, "bandwidth_bytes_per_s", link.bandwidth_bytes_per_s / ratio)
            if {link.source, link.destination} <= network else link
        )  # fmt: skip
    shared = []
    for node in dict.fromkeys(topology.node_of_rank):
        for where, links in _nics(topology, network, node).items():
            if not links:
                raise OverrideError(
                    f"override {override}: ranks of {topology.name} have no NICs of their own, expected a machine of "
                    "nodes with a NIC per rank"
                )
            bandwidth: Number = sum(link.bandwidth_bytes_per_s for link in links) / ratio
            shared.append(SharedCapacity(f"node {node} {where} spine", bandwidth, tuple(link.name for link in links)))
    return replace(topology, shared=(*topology.shared, *shared))


def _nics(topology: Topology, network: set[str], node: int) -> dict[str, Sequence[Link]]:
    """The links of the NICs of a node, out of it and into it."""
    ranks = {rank for rank, of_rank in enumerate(topology.node_of_rank) if of_rank == node}
    out = [link for link in topology.links if link.destination in network and link.source in ranks]
    into = [link for link in topology.links if link.source in network and link.destination in ranks]
    return {"to": out, "from": into}
