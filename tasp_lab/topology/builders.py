"""Topology builders, parameterised by bandwidth (bytes/s, one way) and latency (s).

Numbers may be floats or `fractions.Fraction`; with fractions all derived results are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from math import prod
from typing import Literal

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.topology.graph import Topology, both_ways
from tasp_lab.topology.links import Link, MeshLinks, SharedCapacity, Switch, SwitchKind, Vertex
from tasp_lab.topology.routing import Grid

LINK_BYTES_PER_S, LINK_S = 50e9, 1e-6
NIC_BYTES_PER_S, NIC_S = 50e9, 5e-6
"""Bandwidth and latency of links and of NICs where none are given."""

Inside = Literal["full-mesh", "switch"]
Network = Literal["fabric", "rails", "rails-only"]


def full_mesh(
    world_size: int, bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S, latency_s: Number = LINK_S
) -> Topology:
    """A direct link from every rank to every other, like Infinity Fabric between eight MI300X.

    >>> len(full_mesh(8).links)
    56
    """
    links = MeshLinks(world_size, bandwidth_bytes_per_s, latency_s)
    return Topology(f"full-mesh:{world_size}", world_size, links)


def switch(
    world_size: int, port_bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S, latency_s: Number = LINK_S
) -> Topology:
    """Every rank on one switch with one port, like NVSwitch between eight H100.

    The latency is from rank to rank; the two links of a route share it.
    """
    links = _switch_links(range(world_size), "switch", port_bandwidth_bytes_per_s, latency_s)
    return Topology(f"switch:{world_size}", world_size, tuple(links), switches=_switches(links))


def ring(world_size: int, bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S, latency_s: Number = LINK_S) -> Topology:
    """One directed ring: a link from every rank to the next.

    >>> [link.name for link in ring(3).links]
    ['0->1', '1->2', '2->0']
    """
    pairs = _circulant_pairs(world_size, (1,))
    return _of_pairs(f"ring:{world_size}", world_size, pairs, bandwidth_bytes_per_s, latency_s)


def bidirectional_ring(
    world_size: int, bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S, latency_s: Number = LINK_S
) -> Topology:
    """A link from every rank to the next and to the one before.

    >>> [link.name for link in bidirectional_ring(3).links]
    ['0->1', '0->2', '1->2', '1->0', '2->0', '2->1']
    """
    found = torus((world_size,), bandwidth_bytes_per_s, latency_s)
    return replace(found, name=f"bidirectional-ring:{world_size}")


def circulant(
    world_size: int,
    offsets: Sequence[int],
    bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S,
    latency_s: Number = LINK_S,
) -> Topology:
    """A link from every rank r to r + offset, modulo the world size, for each offset; one way, so give -1 as well as 1.

    >>> [link.name for link in circulant(5, (1, -1)).links][:2]
    ['0->1', '0->4']
    """
    name = f"circulant:{world_size}:{','.join(str(offset) for offset in offsets)}"
    return _of_pairs(name, world_size, _circulant_pairs(world_size, offsets), bandwidth_bytes_per_s, latency_s)


def torus(
    shape: Sequence[int],
    bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S,
    latency_s: Number = LINK_S,
    wraps: Sequence[bool] | None = None,
) -> Topology:
    """A grid of ranks with links both ways between neighbours, which wraps around in all or in some dimensions.

    The last coordinate counts fastest. A side of 2 has one link each way, not two. `wraps` tells for each dimension
    whether its ends are linked, too; default: all. A grid with open sides is a mesh.

    >>> len(torus((3, 3)).links), len(torus((2, 3)).links), len(torus((3, 3), wraps=(True, False)).links)
    (36, 18, 30)
    """
    grid = Grid(tuple(shape), (True,) * len(shape) if wraps is None else tuple(wraps))
    if not shape or min(shape) < 1 or len(grid.wraps) != len(shape):
        raise TopologyError(f"a torus of the shape {grid.sides}: expected sides of 1 or more, and for each if it wraps")
    name = f"{'torus' if all(grid.wraps) else 'mesh'}:{'x'.join(str(side) for side in shape)}"
    return replace(_of_pairs(name, prod(shape), _neighbours(grid), bandwidth_bytes_per_s, latency_s), grid=grid)


def hypercube(
    dimensions: int, bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S, latency_s: Number = LINK_S
) -> Topology:
    """Links both ways between ranks whose numbers differ in one binary digit.

    >>> [link.name for link in hypercube(2).links if link.source == 0]
    ['0->2', '0->1']
    """
    if dimensions < 0:
        raise TopologyError(f"a hypercube of {dimensions} dimensions, expected 0 or more")
    name = f"hypercube:{dimensions}"
    return replace(torus((2,) * dimensions if dimensions else (1,), bandwidth_bytes_per_s, latency_s), name=name)


def multipartite(
    parts: int, ranks_per_part: int, bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S, latency_s: Number = LINK_S
) -> Topology:
    """A link from every rank to every rank of the other parts. Ranks are numbered part by part.

    >>> len(multipartite(3, 2).links)
    24
    """
    if parts < 1 or ranks_per_part < 1:
        raise TopologyError(f"multipartite:{parts}x{ranks_per_part}: expected 1 or more parts and ranks per part")
    world_size = parts * ranks_per_part
    part = [rank // ranks_per_part for rank in range(world_size)]
    pairs = ((a, b) for a, b in product(range(world_size), repeat=2) if part[a] != part[b])
    return _of_pairs(f"multipartite:{parts}x{ranks_per_part}", world_size, pairs, bandwidth_bytes_per_s, latency_s)


def _of_pairs(
    name: str, world_size: int, pairs: Iterable[tuple[int, int]], bandwidth_bytes_per_s: Number, latency_s: Number
) -> Topology:
    """Equal links between pairs of ranks; duplicates and self-pairs are dropped."""
    links = tuple(Link(a, b, bandwidth_bytes_per_s, latency_s) for a, b in dict.fromkeys(pairs) if a != b)
    return Topology(name, world_size, links)


def _circulant_pairs(world_size: int, offsets: Sequence[int]) -> Iterable[tuple[int, int]]:
    return ((rank, (rank + offset) % world_size) for rank in range(world_size) for offset in offsets)


def _neighbours(grid: Grid) -> Iterable[tuple[int, int]]:
    """Each rank of a grid with the next and the one before in each dimension; of an open one, where there is one."""
    strides = [prod(grid.sides[position + 1 :]) for position in range(len(grid.sides))]
    for rank, place in enumerate(product(*(range(side) for side in grid.sides))):
        for coordinate, side, stride, wrap in zip(place, grid.sides, strides, grid.wraps, strict=True):
            for step in (1, -1):
                if wrap or 0 <= coordinate + step < side:
                    yield rank, rank + ((coordinate + step) % side - coordinate) * stride


def nodes(
    node_count: int,
    ranks_per_node: int,
    inside: Inside = "full-mesh",
    network: Network = "fabric",
    *,
    link_bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S,
    link_latency_s: Number = LINK_S,
    nic_bandwidth_bytes_per_s: Number = NIC_BYTES_PER_S,
    nic_latency_s: Number = NIC_S,
    ranks_per_nic: int = 1,
) -> Topology:
    """Nodes of a full mesh or a switch, whose ranks have NICs of their own, or share one among `ranks_per_nic`.

    ``fabric``: all NICs connect to one non-blocking network. ``rails``: NICs of equal local rank connect to a rail
    switch, and the rail switches to a spine with the full bandwidth of each rail; ``rails-only`` has no spine. The NIC
    latency is from rank to rank within a rail or the fabric, and once more from rail to rail through the spine. Ranks
    are numbered node by node; neighbours share a NIC.

    >>> len(nodes(2, 4).links)      # 2 x 4 x 3 inside, 8 NICs both ways
    40
    >>> [len(each.links) for each in nodes(2, 4, ranks_per_nic=2).shared]      # 4 NICs out, 4 in, of 2 ranks each
    [2, 2, 2, 2, 2, 2, 2, 2]
    """
    if node_count < 1 or ranks_per_node < 1:
        raise TopologyError(f"nodes:{node_count}x{ranks_per_node}: expected 1 or more nodes and ranks per node")
    if ranks_per_nic < 1:
        raise TopologyError(f"nodes:{node_count}x{ranks_per_node}: {ranks_per_nic} ranks per NIC, expected 1 or more")
    inner: list[Link] = []
    outer: list[Link] = []
    for node in range(node_count):
        members = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        if inside == "switch":
            inner += _switch_links(members, f"node{node}", link_bandwidth_bytes_per_s, link_latency_s)
        else:
            inner += _mesh_links(members, link_bandwidth_bytes_per_s, link_latency_s)
    world_size = node_count * ranks_per_node
    if node_count > 1 and network == "fabric":
        outer += _switch_links(range(world_size), "network", nic_bandwidth_bytes_per_s, nic_latency_s)
    elif node_count > 1:
        spine = network == "rails"
        outer += _rail_links(node_count, ranks_per_node, nic_bandwidth_bytes_per_s, nic_latency_s, spine=spine)
    switches = _switches(inner, outer)
    variants = ["switch"] * (inside == "switch") + [network] * (network != "fabric")
    name = ":".join([f"nodes:{node_count}x{ranks_per_node}", *variants])
    node_of_rank = tuple(rank // ranks_per_node for rank in range(world_size))
    shared = tuple(_shared_nics(outer, ranks_per_node, ranks_per_nic, nic_bandwidth_bytes_per_s))
    return Topology(name, world_size, (*inner, *outer), shared, switches=switches, nodes=node_of_rank)


def fat_tree(
    sides: Sequence[int],
    link_bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S,
    link_latency_s: Number = LINK_S,
    oversubscription: int = 1,
) -> Topology:
    """Switches under switches: ``(4, 8)`` is a core over 4 leaf switches of 8 ranks each.

    Each switch has one link up, as wide as all its links down together, or that over the `oversubscription`: the tree
    of Leiserson (1985), whose traffic spreads perfectly over the cables that a real one has in its place. The latency
    is from rank to rank at one leaf switch; each level adds as much. The ranks of a leaf switch are a node.

    >>> [link.bandwidth_bytes_per_s for link in fat_tree((2, 4), 10, 0, 2).links if link.source == "leaf0"]
    [10, 10, 10, 10, Fraction(20, 1)]
    """
    name = f"fat-tree:{'x'.join(map(str, sides))}" + (f":{oversubscription}" if oversubscription > 1 else "")
    if min(sides) < 1 or oversubscription < 1:
        raise TopologyError(f"{name}: expected sides and an oversubscription of 1 or more")
    half = _half(link_latency_s)
    links: list[Link] = []
    below: list[Vertex] = list(range(prod(sides)))
    bandwidth = link_bandwidth_bytes_per_s
    for level, side in enumerate(reversed(sides)):
        kind = "leaf" if level == 0 else f"level{level}." if level < len(sides) - 1 else "core"
        above: list[Vertex] = [f"{kind}{at}" for at in range(len(below) // side)]
        for at, vertex in enumerate(below):
            links += both_ways(vertex, above[at // side], bandwidth, half)
        below, bandwidth = above, bandwidth * side * Fraction(1, oversubscription)
    world_size = prod(sides)
    switches = _switches(links[: 2 * world_size], links[2 * world_size :])
    nodes_of_ranks = tuple(rank // sides[-1] for rank in range(world_size))
    return Topology(name, world_size, tuple(links), switches=switches, nodes=nodes_of_ranks)


def dragonfly(
    groups: int,
    routers: int,
    ranks: int,
    *,
    link_bandwidth_bytes_per_s: Number = LINK_BYTES_PER_S,
    link_latency_s: Number = LINK_S,
    nic_bandwidth_bytes_per_s: Number = NIC_BYTES_PER_S,
    nic_latency_s: Number = NIC_S,
) -> Topology:
    """Groups of routers that are linked to each other, with one link between any two groups (Kim et al., 2008).

    Each router has `ranks` ranks; group g reaches g + 1, g + 2, … from its routers in turn. Links between groups have
    the numbers of NICs, all others those of links; the latency of a link is from rank to rank at one router, that of
    a link between routers of a group as large. A group is a node. Routes have the fewest links, so
    some pass a third group.

    >>> len(dragonfly(3, 2, 2).links)      # 12 ranks, 3 pairs of routers and 3 of groups, both ways
    36
    """
    name = f"dragonfly:{groups}x{routers}x{ranks}"
    if min(groups, routers, ranks) < 1:
        raise TopologyError(f"{name}: expected 1 or more groups, routers of a group, and ranks of a router")
    half = _half(link_latency_s)
    links: list[Link] = []
    for rank in range(groups * routers * ranks):
        group, router = divmod(rank // ranks, routers)
        links += both_ways(rank, f"router{group}.{router}", link_bandwidth_bytes_per_s, half)
    for group in range(groups):
        for a, b in combinations(range(routers), 2):
            ends = f"router{group}.{a}", f"router{group}.{b}"
            links += both_ways(*ends, link_bandwidth_bytes_per_s, link_latency_s)
    for a, b in combinations(range(groups), 2):
        ends = f"router{a}.{(b - a - 1) % routers}", f"router{b}.{(a - b - 1) % groups % routers}"
        links += both_ways(*ends, nic_bandwidth_bytes_per_s, nic_latency_s)
    world_size = groups * routers * ranks
    nodes_of_ranks = tuple(rank // (routers * ranks) for rank in range(world_size))
    return Topology(name, world_size, tuple(links), switches=_switches(links), nodes=nodes_of_ranks)


def _shared_nics(
    outer: Sequence[Link], ranks_per_node: int, ranks_per_nic: int, bandwidth_bytes_per_s: Number
) -> Iterable[SharedCapacity]:
    """The NICs that several ranks share, each out and in; none where each rank has its own."""
    links: dict[tuple[str, int, int], list[str]] = {}
    for link in outer if ranks_per_nic > 1 else ():
        for way, rank in (("out", link.source), ("in", link.destination)):
            if isinstance(rank, int):
                node, local = divmod(rank, ranks_per_node)
                links.setdefault((way, node, local // ranks_per_nic), []).append(link.name)
    for (way, node, nic), names in links.items():
        yield SharedCapacity(f"nic {nic} of node {node}, {way}", bandwidth_bytes_per_s, tuple(names))


def _switches(inner: Sequence[Link], outer: Sequence[Link] = ()) -> tuple[Switch, ...]:
    """The switches of intra-node and inter-node links, with their kinds."""
    kinds: tuple[tuple[Sequence[Link], SwitchKind], ...] = ((inner, "node"), (outer, "network"))
    ends: dict[Vertex, SwitchKind] = {}
    for links, kind in kinds:
        for link in links:
            for end in (link.source, link.destination):
                ends.setdefault(end, kind)
    return tuple(Switch(name, kind) for name, kind in ends.items() if isinstance(name, str))


def _mesh_links(members: range, bandwidth_bytes_per_s: Number, latency_s: Number) -> list[Link]:
    return [Link(a, b, bandwidth_bytes_per_s, latency_s) for a in members for b in members if a != b]


def _switch_links(members: range, name: str, bandwidth_bytes_per_s: Number, latency_s: Number) -> list[Link]:
    if len(members) < 2:
        return []
    half = _half(latency_s)
    return [link for rank in members for link in both_ways(rank, name, bandwidth_bytes_per_s, half)]


def _rail_links(
    node_count: int, ranks_per_node: int, bandwidth_bytes_per_s: Number, latency_s: Number, *, spine: bool
) -> list[Link]:
    half = _half(latency_s)
    links: list[Link] = []
    for local in range(ranks_per_node):
        rail: Vertex = f"rail{local}"
        for rank in range(local, node_count * ranks_per_node, ranks_per_node):
            links += both_ways(rank, rail, bandwidth_bytes_per_s, half)
        if ranks_per_node > 1 and spine:
            links += both_ways(rail, "spine", node_count * bandwidth_bytes_per_s, half)
    return links


def _half(value: Number) -> Number:
    """Half of a number; exact for integers."""
    return Fraction(value, 2) if isinstance(value, int) else value / 2
