"""Degraded topologies: links removed or slowed.

A link is named by its ends: ``0-3`` is both directions, ``0>3`` one. An end is a rank or the name of a switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, Vertex


def without_links(topology: Topology, names: Sequence[str]) -> Topology:
    """The topology without some links. Raises `TopologyError` for an unknown link, or if ranks become unreachable.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> without_links(full_mesh(4), ["0-3", "1>2"]).name
    'full-mesh:4 without 0-3, 1>2'
    """
    if not names:
        return topology
    gone = {link for name in names for link in links_named(topology, name)}
    links = tuple(link for index, link in enumerate(topology.listed_links()) if index not in gone)
    left = {link.name for link in links}
    shared = tuple(_covering(each, left) for each in topology.shared if left & set(each.links))
    ends = {end for link in links for end in (link.source, link.destination)}
    switches = tuple(switch for switch in topology.switches if switch.name in ends)
    name = f"{topology.name} without {', '.join(names)}"
    return replace(topology, name=name, links=links, shared=shared, switches=switches)


def with_links(topology: Topology, changes: Sequence[str]) -> Topology:
    """The topology with other bandwidths, like ``0-3=10GB/s``, on some links. Raises `TopologyError`, `QuantityError`.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> with_links(full_mesh(4), ["0>3=10GB/s"]).route(0, 3).latency_s
    1e-06
    """
    if not changes:
        return topology
    bandwidths: dict[int, float] = {}
    for change in changes:
        name, equals, value = change.rpartition("=")
        if not equals:
            raise TopologyError(f"link {change!r}: expected a link and its bandwidth, like 0-3=10GB/s")
        bandwidth_bytes_per_s = parse_bandwidth_bytes_per_s(value)
        for link in links_named(topology, name):
            if bandwidths.setdefault(link, bandwidth_bytes_per_s) != bandwidth_bytes_per_s:
                raise TopologyError(f"link {change!r}: {topology.links[link].name} is given another bandwidth, too")

    def changed(index: int, link: Link) -> Link:
        return replace(link, bandwidth_bytes_per_s=bandwidths.get(index, link.bandwidth_bytes_per_s))

    return topology.map_links(changed, f"{topology.name} with {', '.join(''.join(each.split()) for each in changes)}")


def _covering(shared: SharedCapacity, names: set[str]) -> SharedCapacity:
    return replace(shared, links=tuple(name for name in shared.links if name in names))


def links_named(topology: Topology, name: str) -> list[int]:
    """The indices of the links with a name: two for ``A-B``, one for ``A>B``."""
    index_of = {(link.source, link.destination): index for index, link in enumerate(topology.listed_links())}
    vertices = {str(vertex): vertex for vertex in topology.vertices}
    for mark in ">-":
        for source, destination in _ends(name, mark, vertices):
            wanted = [(source, destination)] if mark == ">" else [(source, destination), (destination, source)]
            found = [index_of[pair] for pair in wanted if pair in index_of]
            if found and (mark == "-" or len(found) == 1):
                return found
    raise TopologyError(f"{topology.name} has no link {name!r}, expected two of its ranks or switches like 0-3 or 0>3")


def _ends(name: str, mark: str, vertices: dict[str, Vertex]) -> list[tuple[Vertex, Vertex]]:
    """All readings of a name as two vertices; names of switches may contain the separator."""
    parts = name.split(mark)
    cuts = [(mark.join(parts[:cut]), mark.join(parts[cut:])) for cut in range(1, len(parts))]
    return [(vertices[a], vertices[b]) for a, b in cuts if a in vertices and b in vertices]
