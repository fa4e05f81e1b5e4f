"""Overrides of all links of a class, on machines without a profile: their NICs, or the links inside their nodes.

The latency of a class is that from rank to rank; a link between a rank and a switch has a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, TypeVar

from tasp_lab.core.errors import OverrideError
from tasp_lab.core.units import Number
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.overrides.override import Override
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link, MeshLinks

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
    kinds = topology.switch_kinds
    ends = (kinds.get(end) for end in (link.source, link.destination) if isinstance(end, str))
    return "nic" if "network" in ends else "link"


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
    if len(found) > 1 and override.change.kind != "times":
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
    if override.change.kind == "times":
        return with_number(link, field, value * override.change.factor)
    if old:
        return with_number(link, field, new * (Fraction(value) / Fraction(old)))
    share = Fraction(1, 1 if isinstance(link.source, int) and isinstance(link.destination, int) else 2)
    return with_number(link, field, new * share) if _at_rank(link) else link
