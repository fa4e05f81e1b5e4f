"""Topologies from which something is missing: links, NICs and GPUs, by the names that they have in the whole machine.

>>> from tasp_lab.topology.builders import full_mesh, nodes
>>> len(without(full_mesh(4), ["link.0-3"]).links), without(full_mesh(4), ["gpu.1"]).labels
(10, (0, 2, 3))
>>> without(nodes(2, 4), ["nic.1"]).shared[0].links
('0->network', '1->network')

``link.0-3`` is both directions of a link, ``link.0>3`` one; an end is a rank or the name of a switch. ``nic.3`` is a
NIC, counted node by node, and ``gpu.5`` a rank with its links. Overrides are made before, so their names are those of
the whole machine, too.

Ranks whose NIC is missing use the nearest one that is left in their node, the lower of two: NCCL takes the NIC with the
shortest PCIe path (NVIDIA/nccl, src/graph/paths.cc), and that neighbours have it is an assumption. A NIC that several
ranks use is a capacity that their links share, as `tasp_lab.topology.builders.nodes` has them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tasp_lab.core.errors import TopologyError
from tasp_lab.topology.derived import links_named
from tasp_lab.topology.graph import Topology, Vertex
from tasp_lab.topology.links import Link, MeshLinks, SharedCapacity, Switch

_PART = re.compile(r"(?P<kind>link|nic|gpu)\.(?P<which>\S+)", re.ASCII)


class Nic(NamedTuple):
    """A NIC: its node, its place among the NICs of that, the ranks that use it, and the capacities that these share.

    `links` are by rank the numbers of its links into and out of the network.
    """

    node: int
    place: int
    links: Mapping[int, Sequence[int]]
    shared: Sequence[SharedCapacity] = ()


def nics_of(topology: Topology) -> list[Nic]:
    """The NICs of a topology, node by node; ranks share one if a capacity of their links is no more than one link.

    >>> from tasp_lab.topology.builders import nodes
    >>> [tuple(nic.links) for nic in nics_of(nodes(2, 4, ranks_per_nic=2))]
    [(0, 1), (2, 3), (4, 5), (6, 7)]
    """
    if "network" not in topology.switch_kinds.values():
        return []
    network = np.array([topology.switch_kinds.get(str(vertex)) == "network" for vertex in topology.vertices])
    ends, links = topology.link_ends, dict[int, list[int]]()
    for at in np.flatnonzero((network[ends] & (ends < topology.world_size)[:, ::-1]).any(axis=1)).tolist():
        links.setdefault(int(ends[at].min()), []).append(at)  # vertices begin with the ranks
    first, shared = {rank: rank for rank in links}, dict[int, list[SharedCapacity]]()
    of_name = (
        {topology.links[at].name: (rank, at) for rank, own in links.items() for at in own} if topology.shared else {}
    )
    for capacity in topology.shared:
        users = [of_name[name] for name in capacity.links if name in of_name]
        if len(users) < len(capacity.links) or capacity.name.endswith(" spine"):
            continue
        if capacity.bandwidth_bytes_per_s <= min(topology.links[at].bandwidth_bytes_per_s for _, at in users):
            lowest = min(first[rank] for rank, _ in users)
            first |= {rank: lowest for rank, _ in users}
            shared.setdefault(lowest, []).append(capacity)
    users_of: dict[int, dict[int, list[int]]] = {}
    for rank in sorted(links):
        users_of.setdefault(first[rank], {})[rank] = links[rank]
    found, count = list[Nic](), Counter[int]()
    for rank, used in sorted(users_of.items(), key=lambda each: (topology.node_of_rank[each[0]], each[0])):
        node = topology.node_of_rank[rank]
        found.append(Nic(node, count[node], used, tuple(shared.get(rank, ()))))
        count[node] += 1
    return found


def without(topology: Topology, parts: Sequence[str]) -> Topology:
    """The topology without some of its parts: first its links are removed, then NICs, then GPUs.

    Raises `TopologyError` for a part that does not exist or is given twice, and if ranks become unreachable.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> without(full_mesh(4), ["link.0-3", "link.1>2"]).name
    'full-mesh:4 without link.0-3, link.1>2'
    """
    if not parts:
        return topology
    nics = nics_of(topology)
    gone = _gone(topology, nics, parts)
    name = f"{topology.name} without {', '.join(parts)}"
    ranks = [rank for rank in range(topology.world_size) if rank not in gone["gpu"]]
    if isinstance(topology.links, MeshLinks) and not (topology.shared or gone["link"]):
        return _of_ranks(topology, name, ranks, replace(topology.links, world_size=len(ranks)), ())
    links, shared = _moved(topology, nics, _nearest(topology, nics, gone), gone["link"])
    try:
        return _of_ranks(topology, name, ranks, links, shared)
    except TopologyError as error:
        joined = {end for link in links for end in (link.source, link.destination)}
        lone = [topology.rank_names[rank] for rank in ranks if rank not in joined]
        raise TopologyError(f"{error}{f', expected gpu.{lone[0]} for a whole GPU' if lone else ''}") from None


def with_nics(topology: Topology, count: Callable[[int], int]) -> Topology:
    """The topology with fewer NICs in each node, which neighbours share evenly; `count` of those that a node has.

    >>> from tasp_lab.topology.builders import nodes
    >>> with_nics(nodes(2, 4), lambda nics: nics // 2).shared == nodes(2, 4, ranks_per_nic=2).shared
    True
    """
    nics, moves, firsts = nics_of(topology), dict[int, int](), dict[tuple[int, int], int]()
    of_node = Counter(nic.node for nic in nics)
    for at, nic in enumerate(nics):
        nics[at] = nic._replace(place=nic.place * count(of_node[nic.node]) // of_node[nic.node])
        moves[at] = firsts.setdefault(nics[at][:2], at)
    moves = {at: kept for at, kept in moves.items() if at != kept}
    return _of_ranks(topology, topology.name, range(topology.world_size), *_moved(topology, nics, moves, ()))


def notes(whole: Topology, left: Topology) -> list[str]:
    """What to know of what is left of a topology: whose NICs are shared now, and which GPUs the ranks are.

    >>> from tasp_lab.topology.builders import nodes
    >>> notes(nodes(2, 4), without(nodes(2, 4), ["gpu.5", "nic.1"]))[1]
    'ranks 5 to 6 are GPUs 6 to 7'
    """
    before, after = (
        {each.rank_names[rank]: each.rank_names[min(nic.links)] for nic in nics_of(each) for rank in nic.links}
        for each in (whole, left)
    )
    moved = [f"rank {rank} uses that of rank {first}" for rank, first in after.items() if before[rank] != before[first]]
    found = [f"NICs: {', '.join(moved)}; assumed: the nearest, as NCCL takes the shortest path"] if moved else []
    for shift, run in groupby(range(left.world_size), key=lambda rank: left.rank_names[rank] - rank):
        first, *others = run
        if shift and others:
            found.append(f"ranks {first} to {others[-1]} are GPUs {first + shift} to {others[-1] + shift}")
        elif shift:
            found.append(f"rank {first} is GPU {first + shift}")
    return found


def _of_ranks(
    topology: Topology,
    name: str,
    ranks: Sequence[int],
    links: Iterable[Link] | MeshLinks,
    shared: Iterable[SharedCapacity],
) -> Topology:
    """The topology of some ranks, numbered anew, with those of these links that are theirs."""
    nodes, labels, switches = topology.nodes, topology.labels, topology.switches
    if len(ranks) < topology.world_size:
        labels = tuple(topology.rank_names[rank] for rank in ranks)
        places = [topology.node_of_rank[rank] for rank in ranks]
        order = {place: at for at, place in enumerate(dict.fromkeys(places))}
        nodes = tuple(order[place] for place in places) if len(order) > 1 or topology.nodes else ()
        # what follows from the whole graph stays as it is there
        switches = tuple(Switch(name, kind) for name, kind in topology.switch_kinds.items())
    if isinstance(links, MeshLinks):
        return Topology(name, len(ranks), links, (), switches, nodes, labels, topology.forwarding)
    number: dict[Vertex, Vertex] = {rank: at for at, rank in enumerate(ranks)}
    # what is left of one node needs no network
    alone = len({topology.node_of_rank[rank] for rank in ranks}) == 1 < len({*topology.node_of_rank})
    joining = {name for name, kind in topology.switch_kinds.items() if not (alone and kind == "network")}
    vertices = number.keys() | joining
    kept = {link.name: _renamed(link, number) for link in links
            if len(ranks) > 1 and link.source in vertices and link.destination in vertices}  # fmt: skip
    ends = {end for link in kept.values() for end in (link.source, link.destination)}
    covered = (replace(each, links=tuple(kept[link].name for link in each.links if link in kept)) for each in shared)
    return Topology(
        name,
        len(ranks),
        tuple(kept.values()),
        tuple(each for each in covered if each.links),
        tuple(each for each in switches if each.name in ends),
        nodes,
        labels,
        topology.forwarding,
    )


def _gone(topology: Topology, nics: Sequence[Nic], parts: Sequence[str]) -> dict[str, dict[int, str]]:
    """The parts by kind and number: links and ranks as the topology numbers them, NICs as they are counted."""
    gone: dict[str, dict[int, str]] = {"link": {}, "nic": {}, "gpu": {}}
    for part in parts:
        found = _PART.fullmatch(part)
        if found is None:
            hint = f"did you mean link.{part}? " if re.fullmatch(r"\w+[->]\w+", part) else ""
            raise TopologyError(f"without {part!r}: {hint}expected a part such as link.0-3, link.0>3, nic.3 or gpu.5")
        kind, which = found["kind"], found["which"]
        if kind == "link":
            numbers = links_named(topology, which)
        else:
            names, what = (range(len(nics)), "NICs") if kind == "nic" else (topology.rank_names, "GPUs")
            if not names:
                switched = "network" in topology.switch_kinds.values()
                raise TopologyError(f"without {part}: {topology.name} has no NICs{' at its ranks' * switched}")
            if not which.isdecimal() or int(which) not in names:
                raise TopologyError(f"without {part}: {topology.name} has {what} {names[0]} to {names[-1]}")
            numbers = [names.index(int(which))]
        for number in numbers:
            if (other := gone[kind].get(number)) is not None:
                raise TopologyError(f"without {part}: {other} removes the same, expected each part once")
            gone[kind][number] = part
    for at, part in gone["nic"].items():
        if both := gone["link"].keys() & {link for own in nics[at].links.values() for link in own}:
            raise TopologyError(f"without {part}: {gone['link'][min(both)]} is a link of it, expected one of them")
    if len(gone["gpu"]) == topology.world_size:
        raise TopologyError(f"without {', '.join(parts)}: {topology.name} has no other GPU")
    return gone


def _nearest(topology: Topology, nics: Sequence[Nic], gone: Mapping[str, Mapping[int, str]]) -> dict[int, int]:
    """For each missing NIC the nearest one that is left in its node with all its links, the lower of two."""
    dead = {
        at for at, nic in enumerate(nics) if any(link in gone["link"] for own in nic.links.values() for link in own)
    }
    found = dict[int, int]()
    for at in gone["nic"]:
        here = [other for other, nic in enumerate(nics) if nic.node == nics[at].node]
        left = [other for other in here if other not in gone["nic"] and other not in dead]
        if not left:
            parts = ", ".join(gone["nic"][other] for other in here if other in gone["nic"])
            where = f"node {nics[at].node} of {topology.name}"
            raise TopologyError(f"without {parts}: {where} has no other NIC, so the machine would be in two parts")
        found[at] = min(left, key=lambda other: (abs(other - at), other))
    return found


def _moved(
    topology: Topology, nics: Sequence[Nic], moves: Mapping[int, int], gone: Container[int]
) -> tuple[list[Link], list[SharedCapacity]]:
    """The links, with copies of those of one NIC in place of those of others, and what is shared then.

    `moves` has the NICs by number, and `gone` the numbers of links that are left out.
    """
    names, copied, shared = dict[str, str](), dict[int, list[Link]](), list[SharedCapacity]()
    touched = {each.name for at in {*moves, *moves.values()} for each in nics[at].shared}
    for kept in sorted(set(moves.values())):
        nic = nics[kept]
        first = min(nic.links)
        own = [topology.links[at] for at in nic.links[first]]
        users = [[topology.links[at].name for at in each] for each in nic.links.values()]
        for rank, old in (pair for at in moves if moves[at] == kept for pair in nics[at].links.items()):
            copies = [_renamed(link, {first: rank}) for link in own]
            users.append([copy.name for copy in copies])
            names |= dict(zip((topology.links[at].name for at in old), users[-1], strict=False))
            copied |= {at: copies if at == old[0] else [] for at in old}
        for link, *together in zip(own, *users, strict=False):
            way = "out" if link.source == first else "in"
            name = f"nic {nic.place} of node {nic.node}, {way}" + (f", {link.name}" if len(own) > 2 else "")
            limits = [each.bandwidth_bytes_per_s for each in nic.shared if link.name in each.links]
            shared.append(SharedCapacity(name, min([link.bandwidth_bytes_per_s, *limits]), tuple(together)))
    others = [replace(each, links=tuple(names.get(link, link) for link in each.links))
              for each in topology.shared if each.name not in touched]  # fmt: skip
    every = enumerate(topology.listed_links())
    return [new for at, link in every if at not in gone for new in copied.get(at, [link])], others + shared


def _renamed(link: Link, ends: Mapping[Vertex, Vertex]) -> Link:
    """A link between other vertices, by the names of those that change."""
    return replace(
        link, source=ends.get(link.source, link.source), destination=ends.get(link.destination, link.destination)
    )
