"""A topology as it is between groups of ranks whose equal members send alike."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.units import Number
from tasp_lab.topology.graph import Link, SharedCapacity, Topology


def between_groups(topology: Topology, members: int) -> Topology:
    """The groups of `members` consecutive ranks as ranks, with what each member has of the routes between them.

    Member m of a group sends to member m of another one, all members at once. There is a link from group to group if
    every member has a route. What a link, port or shared capacity of the topology carries for several members, each
    has an equal part of; where it carries several routes of a member, it is a shared capacity of these links. So the
    time of transfers between groups is that of the same transfers of every member. If it carries more members of some
    links than of others, all are taken for as many as the most, and the time is not less.

    Raises `TopologyError` if groups do not reach each other.

    >>> from tasp_lab.topology.builders import nodes
    >>> found = between_groups(nodes(3, 4), 4)
    >>> len(found.links), [(each.name, each.links) for each in found.shared][:2]
    (6, [('part of 0->network', ('0->1', '0->2')), ('part of network->4', ('0->1', '2->1'))])
    """
    count = topology.world_size // members
    pairs = np.array([(a, b) for a in range(count) for b in range(count) if a != b]).reshape(-1, 2)
    ends = pairs[:, None] * members + np.arange(members)[:, None]
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
    )


def _uses(constraints: IntArray) -> dict[int, tuple[list[int], int]]:
    """By constraint the links with a route over it, and the most members of a link whose routes pass it.

    `constraints` is an int array (links, members, constraints of a route), padded with -1.
    """
    found: dict[int, tuple[list[int], int]] = {}
    for link, routes in enumerate(constraints):
        numbers, counts = np.unique(routes[routes >= 0], return_counts=True)
        for number, times in zip(numbers.tolist(), counts.tolist(), strict=True):
            links, most = found.get(number, ([], 0))
            found[number] = [*links, link], max(most, times)
    return found


def _part(bandwidth_bytes_per_s: Number, members: int) -> Number:
    if members == 1:
        return bandwidth_bytes_per_s
    exact = isinstance(bandwidth_bytes_per_s, int | Fraction)
    return Fraction(bandwidth_bytes_per_s) / members if exact else bandwidth_bytes_per_s / members
