"""Builders of the topologies that machines are made of, parameterised by bandwidth (bytes/s, one way) and latency (s).

Numbers may be floats or `fractions.Fraction`; with fractions everything that follows is exact.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from tasp_lab.errors import TopologyError
from tasp_lab.quantities import Number
from tasp_lab.topology import Link, Topology, Vertex, both_ways

DEFAULT_LINK_BANDWIDTH_BYTES_PER_S = 50e9
DEFAULT_LINK_LATENCY_S = 1e-6
DEFAULT_NIC_BANDWIDTH_BYTES_PER_S = 50e9
DEFAULT_NIC_LATENCY_S = 5e-6

Inside = Literal["full-mesh", "switch"]
Network = Literal["fabric", "rails"]


def full_mesh(
    world_size: int,
    bandwidth_bytes_per_s: Number = DEFAULT_LINK_BANDWIDTH_BYTES_PER_S,
    latency_s: Number = DEFAULT_LINK_LATENCY_S,
) -> Topology:
    """A link of its own from every rank to every other, as Infinity Fabric joins eight MI300X.

    >>> len(full_mesh(8).links)
    56
    """
    links = _mesh_links(range(world_size), bandwidth_bytes_per_s, latency_s)
    return Topology(f"full-mesh:{world_size}", world_size, tuple(links))


def switch(
    world_size: int,
    port_bandwidth_bytes_per_s: Number = DEFAULT_LINK_BANDWIDTH_BYTES_PER_S,
    latency_s: Number = DEFAULT_LINK_LATENCY_S,
) -> Topology:
    """Every rank on one switch with one port, as NVSwitch joins eight H100.

    The latency is from rank to rank; the two links of a route share it.
    """
    links = _switch_links(range(world_size), "switch", port_bandwidth_bytes_per_s, latency_s)
    return Topology(f"switch:{world_size}", world_size, tuple(links))


def ring(
    world_size: int,
    bandwidth_bytes_per_s: Number = DEFAULT_LINK_BANDWIDTH_BYTES_PER_S,
    latency_s: Number = DEFAULT_LINK_LATENCY_S,
) -> Topology:
    """One directed ring: a link from every rank to the next.

    >>> [link.name for link in ring(3).links]
    ['0->1', '1->2', '2->0']
    """
    hops = [(rank, (rank + 1) % world_size) for rank in range(world_size)] if world_size > 1 else []
    links = tuple(Link(a, b, bandwidth_bytes_per_s, latency_s) for a, b in hops)
    return Topology(f"ring:{world_size}", world_size, links)


def nodes(
    node_count: int,
    ranks_per_node: int,
    inside: Inside = "full-mesh",
    network: Network = "fabric",
    *,
    link_bandwidth_bytes_per_s: Number = DEFAULT_LINK_BANDWIDTH_BYTES_PER_S,
    link_latency_s: Number = DEFAULT_LINK_LATENCY_S,
    nic_bandwidth_bytes_per_s: Number = DEFAULT_NIC_BANDWIDTH_BYTES_PER_S,
    nic_latency_s: Number = DEFAULT_NIC_LATENCY_S,
) -> Topology:
    """Nodes of a full mesh or a switch, with one NIC per rank.

    ``fabric``: all NICs meet in one non-blocking network. ``rails``: NICs of equal local rank meet in a rail
    switch, and the rail switches in a spine which carries all that a rail can bring. The NIC latency is from rank
    to rank within a rail or the fabric, and once more from rail to rail through the spine. Ranks are numbered
    node by node.

    >>> len(nodes(2, 4).links)      # 2 x 4 x 3 inside, 8 NICs both ways
    40
    """
    if node_count < 1 or ranks_per_node < 1:
        raise TopologyError(f"nodes:{node_count}x{ranks_per_node}: expected 1 or more nodes and ranks per node")
    links: list[Link] = []
    for node in range(node_count):
        members = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        if inside == "switch":
            links += _switch_links(members, f"node{node}", link_bandwidth_bytes_per_s, link_latency_s)
        else:
            links += _mesh_links(members, link_bandwidth_bytes_per_s, link_latency_s)
    world_size = node_count * ranks_per_node
    if node_count > 1 and network == "fabric":
        links += _switch_links(range(world_size), "network", nic_bandwidth_bytes_per_s, nic_latency_s)
    elif node_count > 1:
        links += _rail_links(node_count, ranks_per_node, nic_bandwidth_bytes_per_s, nic_latency_s)
    variants = [word for word, used in (("switch", inside == "switch"), ("rails", network == "rails")) if used]
    name = ":".join([f"nodes:{node_count}x{ranks_per_node}", *variants])
    return Topology(name, world_size, tuple(links))


def _mesh_links(members: range, bandwidth_bytes_per_s: Number, latency_s: Number) -> list[Link]:
    return [Link(a, b, bandwidth_bytes_per_s, latency_s) for a in members for b in members if a != b]


def _switch_links(members: range, name: str, bandwidth_bytes_per_s: Number, latency_s: Number) -> list[Link]:
    if len(members) < 2:
        return []
    half = _half(latency_s)
    return [link for rank in members for link in both_ways(rank, name, bandwidth_bytes_per_s, half)]


def _rail_links(node_count: int, ranks_per_node: int, bandwidth_bytes_per_s: Number, latency_s: Number) -> list[Link]:
    half = _half(latency_s)
    links: list[Link] = []
    for local in range(ranks_per_node):
        rail: Vertex = f"rail{local}"
        for rank in range(local, node_count * ranks_per_node, ranks_per_node):
            links += both_ways(rank, rail, bandwidth_bytes_per_s, half)
        if ranks_per_node > 1:
            links += both_ways(rail, "spine", node_count * bandwidth_bytes_per_s, half)
    return links


def _half(value: Number) -> Number:
    """Half of a number without leaving exact arithmetic when the number is a whole one."""
    return Fraction(value, 2) if isinstance(value, int) else value / 2
