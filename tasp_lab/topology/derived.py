"""Topologies derived from others: with links of other speeds, some of the ranks, other numbers, groups as ranks.

>>> from tasp_lab.topology.builders import full_mesh
>>> len(induced(full_mesh(4), [0, 2]).links)
2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, TypeVar

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.topology.components import strong_components
from tasp_lab.topology.graph import Link, SharedCapacity, Switch, Topology, Vertex
from tasp_lab.topology.links import MeshLinks

LinkField = Literal["bandwidth_bytes_per_s", "latency_s"]
_Part = TypeVar("_Part", Link, MeshLinks, SharedCapacity)


def with_class(topology: Topology, nics: bool, field: LinkField, old: Number, new: Number) -> Topology:
    """The topology whose NICs, or else all other links, have `new` in place of `old` from rank to rank.

    Each keeps the share of it that it has: a link between a rank and a switch half of a latency, a link up to a spine
    several times a bandwidth. So do capacities that they share.

    >>> from tasp_lab.topology.builders import switch
    >>> with_class(switch(4, 10, 1.0), False, "latency_s", 1.0, 3.0).links[0].latency_s
    1.5
    """
    if old == new:
        return topology
    if isinstance(topology.links, MeshLinks) and not topology.shared:
        # a mesh of thousands of ranks stays one number, not millions of links
        return topology if nics else replace(topology, links=with_number(topology.links, field, new))

    def changed(_: int, link: Link) -> Link:
        if topology.is_nic(link) != nics:
            return link
        # without a latency before, links between a rank and a switch have half of the new one each
        share = Fraction(getattr(link, field)) / Fraction(old) if old else Fraction(rank_ends(link), 2)
        return with_number(link, field, new * share)

    found = topology.map_links(changed)
    if not topology.shared or field != "bandwidth_bytes_per_s":
        return found
    of_class = {link.name for link in topology.links if topology.is_nic(link) == nics}
    shared = (
        # links that share a capacity are of one class
        with_number(each, field, new * (Fraction(each.bandwidth_bytes_per_s) / Fraction(old)))
        if each.links[0] in of_class
        else each
        for each in topology.shared
    )
    return replace(found, shared=tuple(shared))


def rank_ends(link: Link) -> int:
    """How many of its ends are ranks; the others are switches."""
    return isinstance(link.source, int) + isinstance(link.destination, int)


def with_number(part: _Part, field: LinkField, number: Number) -> _Part:
    """A link or a capacity with another bandwidth or latency."""
    change: dict[str, Any] = {field: number}
    return replace(part, **change)


def links_named(topology: Topology, name: str) -> list[int]:
    """The indices of the links with a name: ``A-B`` is both directions, ``A>B`` one; ends are ranks or switches."""
    index_of = {(link.source, link.destination): index for index, link in enumerate(topology.listed_links())}
    names = (*topology.rank_names, *topology.vertices[topology.world_size :])
    vertices = {str(name): vertex for name, vertex in zip(names, topology.vertices, strict=True)}
    for mark in ">-":
        for source, destination in _ends(name, mark, vertices):
            wanted = [(source, destination)] if mark == ">" else [(source, destination), (destination, source)]
            links = [index_of[pair] for pair in wanted if pair in index_of]
            if links and (mark == "-" or len(links) == 1):
                return links
    raise TopologyError(f"{topology.name} has no link {name!r}, expected two of its ranks or switches like 0-3 or 0>3")


def _ends(name: str, mark: str, vertices: dict[str, Vertex]) -> list[tuple[Vertex, Vertex]]:
    """All readings of a name as two vertices; names of switches may contain the separator."""
    parts = name.split(mark)
    cuts = [(mark.join(parts[:cut]), mark.join(parts[cut:])) for cut in range(1, len(parts))]
    return [(vertices[a], vertices[b]) for a, b in cuts if a in vertices and b in vertices]


def induced(topology: Topology, ranks: Sequence[int]) -> Topology:
    """The topology of some ranks, numbered in this order: the links on routes between them.

    Routes between linked ranks are those of the whole topology. Where links and switches do not join the ranks, others
    that forward for them become switches. Switches and shared capacities are numbered in the order of its links, so
    parts with the same links are equal.

    Raises `TopologyError` if ranks do not reach each other so.

    >>> from tasp_lab.topology.builders import nodes
    >>> [link.name for link in induced(nodes(2, 2, "switch"), [2, 3]).links]
    ['0->switch0', 'switch0->0', '1->switch0', 'switch0->1']
    """
    order = np.array(ranks, dtype=np.int64)
    linked = topology.linked_pairs[np.ix_(order, order)]
    if strong_components(np.argwhere(linked), len(order)).any() and topology.reaches_all:
        linked = ~np.eye(len(order), dtype=bool)
    row, column = np.nonzero(linked)
    used = np.unique(topology.routes(order[row], order[column])[0]) if len(row) else row
    count = len(topology.links)
    kept = [topology.links[index] for index in used[(used >= 0) & (used < count)].tolist()]
    new: dict[Vertex, Vertex] = {rank: number for number, rank in enumerate(order.tolist())}
    switches = [end for link in kept for end in (link.source, link.destination) if end not in new]
    new |= {name: f"switch{number}" for number, name in enumerate(dict.fromkeys(switches))}
    links = {link.name: replace(link, source=new[link.source], destination=new[link.destination]) for link in kept}
    shared = [topology.shared[index - count] for index in used[used >= count].tolist()]
    nodes = [topology.node_of_rank[rank] for rank in order.tolist()]
    return Topology(
        f"{len(order)} ranks of {topology.name}",
        len(order),
        tuple(links.values()),
        shared=tuple(
            replace(
                group, name=f"shared{number}", links=tuple(links[name].name for name in group.links if name in links)
            )
            for number, group in enumerate(shared)
        ),
        switches=tuple(
            Switch(str(new[end]), topology.switch_kinds.get(str(end), "node")) for end in dict.fromkeys(switches)
        ),
        nodes=tuple(list(dict.fromkeys(nodes)).index(node) for node in nodes),
        forwarding=topology.forwarding,
    )


def equal_parts(topology: Topology, groups: IntArray) -> Topology:
    """The topology of each of several groups of ranks, an int array (groups, ranks), which must be the same for all.

    Raises `TopologyError` if ranks of a group do not reach each other, and if groups have different links.
    """
    first, *others = (induced(topology, group) for group in groups.tolist())
    for group, part in zip(groups.tolist()[1:], others, strict=True):
        if part != first:
            raise TopologyError(
                f"{topology.name}: ranks {_listed(group)} have other links among them than ranks "
                f"{_listed(groups[0].tolist())}, expected the same in each group"
            )
    return first


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks if len(ranks) <= 4 else [*ranks[:3], "...", ranks[-1]]))


def renumbered(topology: Topology, order: IntArray) -> Topology:
    """The topology whose rank i is rank ``order[i]`` of the given one; `order` has each rank once.

    Links keep their order, so routes are the same: of equally short ones the first listed is taken.

    >>> from tasp_lab.topology.builders import ring
    >>> [link.name for link in renumbered(ring(3), np.array([0, 2, 1])).links]
    ['0->2', '2->1', '1->0']
    """
    if np.array_equal(order, np.arange(topology.world_size)):
        return topology
    place = np.argsort(order).tolist()

    def moved(vertex: Vertex) -> Vertex:
        return vertex if isinstance(vertex, str) else place[vertex]

    nodes, labels = (
        tuple(of[rank] for rank in order.tolist()) if of else () for of in (topology.nodes, topology.labels)
    )
    if isinstance(topology.links, MeshLinks) and not topology.shared:
        return replace(topology, nodes=nodes, labels=labels)
    old = topology.listed_links()
    new = tuple(Link(moved(a.source), moved(a.destination), a.bandwidth_bytes_per_s, a.latency_s) for a in old)
    names = {before.name: after.name for before, after in zip(old, new, strict=True)}
    shared = tuple(replace(group, links=tuple(names[name] for name in group.links)) for group in topology.shared)
    return replace(topology, links=new, shared=shared, nodes=nodes, labels=labels, grid=None)


def between_groups(topology: Topology, members: int) -> Topology:
    """The groups of `members` consecutive ranks as ranks, with what each member has of the routes between them.

    Member m of a group sends to member m of another one, all members at once. There is a link from group to group if
    every member is linked; or if every member has a route, where links alone do not join all groups. What a link, port
    or shared capacity of the topology carries for several members, each has an equal part of; where it carries several
    routes of a member, it is a shared capacity of these links. So the time of transfers between groups is that of the
    same transfers of every member. If it carries more members of some links than of others, all are taken for as many
    as the most, and the time is not less.

    Raises `TopologyError` if groups do not reach each other.

    >>> from tasp_lab.topology.builders import nodes
    >>> groups = between_groups(nodes(3, 4), 4)
    >>> len(groups.links), [(port.name, port.links) for port in groups.shared][:2]
    (6, [('part of 0->network', ('0->1', '0->2')), ('part of network->4', ('0->1', '2->1'))])
    """
    count = topology.world_size // members
    pairs = np.argwhere(~np.eye(count, dtype=bool))
    ends = pairs[:, None] * members + np.arange(members)[:, None]
    linked = topology.are_linked(ends[..., 0], ends[..., 1]).all(axis=1)
    if strong_components(pairs[linked], count).any():  # not all groups are in one
        linked = topology.have_routes(ends[..., 0], ends[..., 1]).all(axis=1)
    pairs, ends = pairs[linked], ends[linked]
    shape = ends.shape[:2]
    constraints, latencies_s = topology.routes(ends[..., 0].ravel(), ends[..., 1].ravel())
    uses = _uses(constraints.reshape(*shape, constraints.shape[1]))
    rates: dict[int, Number] = {}
    shared: dict[tuple[tuple[str, ...], Number], str] = {}
    names = [f"{a}->{b}" for a, b in pairs.tolist()]
    for index, (links, most) in uses.items():
        constraint = topology.constraints[index]
        rate = _part(constraint.bandwidth_bytes_per_s, most)
        for link in links:
            rates[link] = min(rates.get(link, rate), rate)
        if len(links) > 1:
            shared.setdefault((tuple(names[link] for link in links), rate), constraint.name)
    slowest_s = latencies_s.reshape(shape).max(axis=1, initial=0).tolist()
    return Topology(
        f"{topology.name} between groups of {members}",
        count,
        tuple(Link(a, b, rates[link], slowest_s[link]) for link, (a, b) in enumerate(pairs.tolist())),
        tuple(SharedCapacity(f"part of {name}", rate, links) for (links, rate), name in shared.items()),
        forwarding=topology.forwarding,
    )


def _uses(constraints: IntArray) -> dict[int, tuple[list[int], int]]:
    """By constraint the links with a route over it, and the most members of a link whose routes pass it.

    `constraints` is an int array (links, members, constraints of a route), padded with -1.
    """
    uses: dict[int, tuple[list[int], int]] = {}
    for link, routes in enumerate(constraints):
        numbers, counts = np.unique(routes[routes >= 0], return_counts=True)
        for number, times in zip(numbers.tolist(), counts.tolist(), strict=True):
            links, most = uses.get(number, ([], 0))
            uses[number] = [*links, link], max(most, times)
    return uses


def _part(bandwidth_bytes_per_s: Number, members: int) -> Number:
    if members == 1:
        return bandwidth_bytes_per_s
    exact = isinstance(bandwidth_bytes_per_s, int | Fraction)
    return Fraction(bandwidth_bytes_per_s) / members if exact else bandwidth_bytes_per_s / members
