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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

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
    links: dict[int, list[int]] = {}
    for index, link in enumerate(topology.listed_links()):
        rank = link.source if isinstance(link.source, int) else link.destination
        if isinstance(rank, int) and topology.is_nic(link):
            links.setdefault(rank, []).append(index)
    owner, capacities = {rank: rank for rank in links}, dict[int, list[SharedCapacity]]()
    of_name = {topology.links[at].name: (rank, topology.links[at]) for rank, own in links.items() for at in own}
    for capacity in topology.shared:
        ends = [of_name[name] for name in capacity.links if name in of_name]
        is_nic = len(ends) == len(capacity.links) and not capacity.name.endswith(" spine")
        if is_nic and capacity.bandwidth_bytes_per_s <= min(link.bandwidth_bytes_per_s for _, link in ends):
            first = min(owner[rank] for rank, _ in ends)
            owner |= {rank: first for rank, _ in ends}
            capacities.setdefault(first, []).append(capacity)
    found, in_node = list[Nic](), dict[int, int]()
    for first in sorted(set(owner.values()), key=lambda rank: (topology.node_of_rank[rank], rank)):
        node = topology.node_of_rank[first]
        in_node[node] = in_node.get(node, -1) + 1
        used_by = {rank: links[rank] for rank in sorted(links) if owner[rank] == first}
        found.append(Nic(node, in_node[node], used_by, tuple(capacities.get(first, ()))))
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
    links: list[list[Link]] = [[] if at in gone["link"] else [link] for at, link in enumerate(topology.listed_links())]
    shared = _moved(topology, nics, _nearest(topology, nics, gone["nic"], links), links)
    kept = [link for at_place in links for link in at_place]
    try:
        return _of_ranks(topology, name, ranks, kept, shared)
    except TopologyError as error:
        joined = {end for link in kept for end in (link.source, link.destination)}
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
        first = firsts.setdefault(nics[at][:2], at)
        moves |= {at: first} if at != first else {}
    links = [[link] for link in topology.listed_links()]
    shared = _moved(topology, nics, moves, links)
    kept = [link for at_place in links for link in at_place]
    return _of_ranks(topology, topology.name, range(topology.world_size), kept, shared)


def notes(topology: Topology, parts: Sequence[str]) -> tuple[str, ...]:
    """What to know of a topology `without` some of its parts: which NICs are shared, and which GPUs the ranks are.

    >>> from tasp_lab.topology.builders import nodes
    >>> notes(nodes(2, 4), ["gpu.5", "nic.1"])[1]
    'without gpu.5: ranks 5 to 6 are GPUs 6 to 7'
    """
    nics, found = nics_of(topology), list[str]()
    gone = _gone(topology, nics, parts)
    every = [[link] for link in topology.listed_links()] if gone["nic"] else []
    for at, kept in sorted(_nearest(topology, nics, gone["nic"], every).items()):
        whose = " and ".join(f"rank {topology.rank_names[rank]}" for rank in nics[at].links)
        found.append(f"without nic.{at}: {whose} shares nic.{kept}, assumed: NCCL takes the NIC by the shortest path")
    names = [name for rank, name in enumerate(topology.rank_names) if rank not in gone["gpu"]]
    runs: list[tuple[int, int]] = []
    for rank, name in enumerate(names):
        if name != rank and runs and name - rank == names[runs[-1][0]] - runs[-1][0]:
            runs[-1] = runs[-1][0], rank
        elif name != rank:
            runs.append((rank, rank))
    texts = [f"ranks {a} to {b} are GPUs {names[a]} to {names[b]}" if a < b else f"rank {a} is GPU {names[a]}"
             for a, b in runs]  # fmt: skip
    return (
        (*found, f"without {', '.join(gone['gpu'].values())}: {', '.join(texts)}")
        if gone["gpu"] and texts
        else (*found,)
    )


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
        return Topology(name, len(ranks), links, (), switches, nodes, labels)
    number: dict[Vertex, Vertex] = {rank: at for at, rank in enumerate(ranks)}
    vertices = number.keys() | topology.switch_kinds.keys()
    kept = {
        link.name: replace(
            link,
            source=number.get(link.source, link.source),
            destination=number.get(link.destination, link.destination),
        )
        for link in links
        if len(ranks) > 1 and link.source in vertices and link.destination in vertices
    }
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
                raise TopologyError(f"without {part}: {topology.name} has no NICs at its ranks")
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


def _nearest(
    topology: Topology, nics: Sequence[Nic], gone: Mapping[int, str], links: Sequence[Sequence[Link]]
) -> dict[int, int]:
    """For each missing NIC the nearest one that is left in its node with all its `links`, the lower of two."""
    found = dict[int, int]()
    for at in gone:
        left = [other for other, nic in enumerate(nics) if nic.node == nics[at].node and other not in gone
                and all(links[link] for own in nic.links.values() for link in own)]  # fmt: skip
        if not left:
            parts = ", ".join(gone[other] for other in gone if nics[other].node == nics[at].node)
            where = f"node {nics[at].node} of {topology.name}"
            raise TopologyError(f"without {parts}: {where} has no other NIC, so the machine would be in two parts")
        found[at] = min(left, key=lambda other: (abs(other - at), other))
    return found


def _moved(
    topology: Topology, nics: Sequence[Nic], moves: Mapping[int, int], links: list[list[Link]]
) -> list[SharedCapacity]:
    """Put copies of the links of one NIC in place of those of others, for all their ranks; returns all that is shared.

    `moves` has the NICs by number, and `links` those of the result by the number of each in the topology.
    """
    names, shared = dict[str, str](), list[SharedCapacity]()
    touched = {capacity.name for at in {*moves, *moves.values()} for capacity in nics[at].shared}
    for kept in sorted(set(moves.values())):
        nic = nics[kept]
        first, of_first = next(iter(nic.links.items()))
        own = [topology.links[at] for at in of_first]
        used = [[topology.links[at].name for at in each] for each in nic.links.values()]
        for rank, old in (pair for at in sorted(moves) if moves[at] == kept for pair in nics[at].links.items()):
            copies = [
                replace(a, **{end: rank for end in ("source", "destination") if getattr(a, end) == first}) for a in own
            ]
            names |= {topology.links[at].name: copy.name for at, copy in zip(old, copies, strict=False)}
            links[old[0]] = copies
            for at in old[1:]:
                links[at] = []
            used.append([copy.name for copy in copies])
        for link, *together in zip(own, *used, strict=False):
            way = "out" if link.source == first else "in"
            name = f"nic {nic.place} of node {nic.node}, {way}" + (f", {link.name}" if len(own) > 2 else "")
            limits = [each.bandwidth_bytes_per_s for each in nic.shared if link.name in each.links]
            shared.append(SharedCapacity(name, min([link.bandwidth_bytes_per_s, *limits]), tuple(together)))
    others = (each for each in topology.shared if each.name not in touched)
    return [*(replace(each, links=tuple(names.get(link, link) for link in each.links)) for each in others), *shared]
