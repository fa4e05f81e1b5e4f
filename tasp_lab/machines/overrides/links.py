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

`changed_links` applies them in this order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from tasp_lab.core.errors import OverrideError, QuantityError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS, ConstantSpec, Quantity
from tasp_lab.machines.overrides.override import Override
from tasp_lab.machines.parameters import NO_PARAMETERS, Parameter, Parameters
from tasp_lab.topology.derived import links_named
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link, MeshLinks, SharedCapacity

FIELDS = {"bandwidth": "bandwidth_bytes_per_s", "latency": "latency_s"}
"""The field of a link, by the last word of a name."""

SPINE = "spine.oversubscription"

_NAME = re.compile(
    r"(?:(?P<kind>node|rank)\.(?P<number>\d{1,5})\.)?(?:compute|(?P<links>link|port|nic)[._](?:bandwidth|latency))"
    r"|link\.(?P<ends>.*?[->].*?)(?:\.(?:bandwidth|latency))?",
    re.ASCII,
)


class Place(NamedTuple):
    """What a name means: links of a class, of a node, of a rank or between two `ends`, and which number of them."""

    kind: str
    number: int
    links: str
    ends: str
    quantity: str


def place_of(name: str) -> Place | None:
    """The place that a name means; None for other names.

    >>> place_of("node.1.nic.bandwidth")
    Place(kind='node', number=1, links='nic', ends='', quantity='bandwidth')
    >>> place_of("link.0>1").ends, place_of("link.0-1.latency").quantity, place_of("link_bandwidth").kind
    ('0>1', 'latency', 'class')
    """
    found = _NAME.fullmatch(name)
    if found is None or name == "compute":
        return None
    ends, last = found["ends"] or "", re.split("[._]", name)[-1]
    kind = "link" if ends else found["kind"] or "class"
    links = (found["links"] or "").replace("port", "link")
    return Place(kind, int(found["number"] or 0), links, ends, last if last in (*FIELDS, "compute") else "bandwidth")


def link_classes(topology: Topology) -> list[str]:
    """The classes of links that a topology has: ``nic`` into and out of a network between nodes, ``link`` all others.

    >>> from tasp_lab.topology.builders import full_mesh, nodes
    >>> link_classes(full_mesh(4)), link_classes(nodes(2, 4))
    (['link'], ['link', 'nic'])
    """
    links = topology.links[:1] if isinstance(topology.links, MeshLinks) else topology.links
    return sorted({"nic" if topology.is_nic(link) else "link" for link in links})


def ranks_of(topology: Topology, place: Place, override: Override) -> list[int]:
    """The ranks of a place. Raises `OverrideError` if there are none."""
    places = topology.node_of_rank if place.kind == "node" else range(topology.world_size)
    ranks = [rank for rank, at in enumerate(places) if at == place.number]
    if not ranks:
        last = topology.world_size - 1 if place.kind == "rank" else max(topology.node_of_rank)
        raise OverrideError(f"override {override}: {topology.name} has {place.kind}s 0 to {last}")
    return ranks


_KINDS = ("class", "spine", "node", "rank", "link")
"""Kinds of places, in the order in which their overrides are applied."""


def change_links(topology: Topology, overrides: Mapping[str, Override]) -> Topology:
    """The topology of `changed_links`."""
    return changed_links(topology, overrides)[0]


def changed_links(
    topology: Topology, overrides: Mapping[str, Override], known: Parameters = NO_PARAMETERS
) -> tuple[Topology, list[Parameter]]:
    """The topology with overrides by name, and the new numbers with their sources; of several links that of the first.

    A class of links may be among the `known` parameters of the machine. Raises `OverrideError` where a place or its
    links do not exist, and `TopologyError` for an unknown link.
    """
    # what is narrower has the last word: a node before its ranks, and single links last
    places = {name: place_of(name) or Place("spine", 0, "", "", "") for name in overrides}
    parameters, single = list[Parameter](), dict[tuple[int, str], Override]()
    for name in sorted(overrides, key=lambda name: (_KINDS.index(places[name].kind), places[name].number)):
        place, override = places[name], overrides[name]
        if place.kind == "spine":
            topology = _with_spine(topology, override)
            parameters.append(Parameter(SPINE, override.text.removeprefix("x"), f"given: {override}, was 1"))
            continue
        links, field, spec = _links_of(topology, place, override), FIELDS[place.quantity], _spec(place)
        first = topology.links[links[0]]
        for link in links if place.kind == "link" else ():
            if (other := single.setdefault((link, field), override)) is not override:
                which = f"{topology.links[link].name} has the override {other}"
                raise OverrideError(f"override {override}: {which}, too, expected one")
        old, shown, whose, stated = getattr(first, field), name, "of the machine", None
        if place.kind == "link":
            whose = f"{first.name} of the machine"
        elif place.kind == "class":  # the one kind that is a constant, which a file may state
            old, shown = _of_class(topology, links, place, override), name.replace("_", ".", 1)
            stated = known.get(name)
        new = override.of(old, spec.quantity)
        source = override.source(spec.format(float(old)), stated.source if stated else whose)
        text = spec.format(float(new))
        new_parameter = Parameter(name, float(new), source, written=text) if stated else Parameter(shown, text, source)
        parameters.append(new_parameter)
        topology = _with_numbers(topology, links, place, override, (old, new))
    return topology, parameters


def _spec(place: Place) -> ConstantSpec:
    return CONSTANTS[f"link_{place.quantity}"]


def _links_of(topology: Topology, place: Place, override: Override) -> Sequence[int]:
    """The links that an override changes, by number; of a mesh, all of whose links are equal, only the first."""
    if place.kind == "link":
        return links_named(topology, place.ends)
    if place.kind == "class" and isinstance(topology.links, MeshLinks):
        return [0]
    every, nics = topology.listed_links(), place.links == "nic"
    members = [index for index, link in enumerate(every) if topology.is_nic(link) == nics]
    if place.kind == "class":
        return members
    ranks = set(ranks_of(topology, place, override))
    members = [index for index in members if not ranks.isdisjoint((every[index].source, every[index].destination))]
    if not members:
        what = f"{place.kind} {place.number} of {topology.name} has no {'NICs' if nics else 'links'}"
        raise OverrideError(f"override {override}: {what}")
    return members


def _of_class(topology: Topology, links: Sequence[int], place: Place, override: Override) -> Number:
    """The number of a class: that from rank to rank, twice the latency of a link into or out of a switch.

    Raises `OverrideError` where links of the class differ, except for a factor.
    """
    field, spec = FIELDS[place.quantity], _spec(place)
    at_ranks = [link for link in (topology.links[each] for each in links) if _rank_ends(link)]
    values = [getattr(link, field) * (2 // _rank_ends(link) if field == "latency_s" else 1) for link in at_ranks]
    found: list[Number] = list(dict.fromkeys(values))
    if len(found) > 1 and override.kind != "times":
        texts = " and ".join(spec.format(float(each)) for each in found[:2])
        raise OverrideError(
            f"override {override}: links of {topology.name} have {texts}, expected a factor like x2, or one link by "
            "name like link.0-1"
        )
    return found[0]


def _rank_ends(link: Link) -> int:
    """How many of its ends are ranks; the others are switches."""
    return isinstance(link.source, int) + isinstance(link.destination, int)


def _with_numbers(
    topology: Topology, links: Sequence[int], place: Place, override: Override, of_class: tuple[Number, Number]
) -> Topology:
    """The topology with other numbers on some links; `of_class` is the number of a class before and after."""
    field, quantity, chosen = FIELDS[place.quantity], _spec(place).quantity, frozenset(links)
    old, new = of_class
    if place.kind == "class" and isinstance(topology.links, MeshLinks):
        # a mesh of thousands of ranks stays one number, not millions of links
        return replace(topology, links=_with_number(topology.links, field, new))

    def changed(index: int, link: Link) -> Link:
        value: Number = getattr(link, field)
        if index not in chosen:
            return link
        if place.kind != "class" or override.kind == "times":
            return _with_number(link, field, override.of(value, quantity))
        # each link has the share of its class that it had; without one, those from rank to switch have half each
        if old:
            return _with_number(link, field, new * (Fraction(value) / Fraction(old)))
        return _with_number(link, field, new * Fraction(_rank_ends(link), 2))

    return topology.map_links(changed)


_Links = TypeVar("_Links", Link, MeshLinks)


def _with_number(link: _Links, field: str, number: Number) -> _Links:
    change: dict[str, Any] = {field: number}
    return replace(link, **change)


def _parse_ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 1 <= ratio < 1e6:
        raise QuantityError(f"{text!r}, expected a number of 1 or more, like 4")
    return ratio


def _with_spine(topology: Topology, override: Override) -> Topology:
    """The topology whose spine carries a part of what NICs bring."""
    if override.kind == "plus":
        raise OverrideError(f"override {override}: expected a number of 1 or more, like 4")
    ratio = Fraction(override.of(1.0, Quantity("", _parse_ratio)))
    if ratio == 1:
        return topology
    network = {name for name, kind in topology.switch_kinds.items() if kind == "network"}
    if any({link.source, link.destination} <= network for link in topology.links):

        def thinned(_: int, link: Link) -> Link:
            if not {link.source, link.destination} <= network:
                return link
            return _with_number(link, "bandwidth_bytes_per_s", link.bandwidth_bytes_per_s / ratio)

        return topology.map_links(thinned)
    shared = []
    for node in dict.fromkeys(topology.node_of_rank):
        ranks = {rank for rank, of_rank in enumerate(topology.node_of_rank) if of_rank == node}
        out = [link for link in topology.links if link.destination in network and link.source in ranks]
        into = [link for link in topology.links if link.source in network and link.destination in ranks]
        for where, nics in (("to", out), ("from", into)):
            if not nics:
                raise OverrideError(
                    f"override {override}: ranks of {topology.name} have no NICs of their own, expected a machine of "
                    "nodes with a NIC per rank"
                )
            bandwidth: Number = sum(link.bandwidth_bytes_per_s for link in nics) / ratio
            shared.append(SharedCapacity(f"node {node} {where} spine", bandwidth, tuple(link.name for link in nics)))
    return replace(topology, shared=(*topology.shared, *shared))
