"""Parts of a topology: some of its ranks and the links that transfers among them use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import TopologyError
from tasp_lab.topology.graph import Switch, Topology, Vertex


def induced(topology: Topology, ranks: Sequence[int]) -> Topology:
    """The topology of some ranks, numbered in this order: the links on routes between them.

    Routes are those of the whole topology. Switches and shared capacities are numbered in the order of its links, so
    parts with the same links are equal.

    Raises `TopologyError` unless each of the ranks reaches every other one through these ranks and switches.

    >>> from tasp_lab.topology.builders import nodes
    >>> [link.name for link in induced(nodes(2, 2, "switch"), [2, 3]).links]
    ['0->switch0', 'switch0->0', '1->switch0', 'switch0->1']
    """
    order = np.array(ranks, dtype=np.int64)
    row, column = np.nonzero(topology.linked_pairs[np.ix_(order, order)])
    used = np.unique(topology.routes(order[row], order[column])[0]) if len(row) else row
    count = len(topology.links)
    kept = [topology.links[index] for index in used[(used >= 0) & (used < count)].tolist()]
    new: dict[Vertex, Vertex] = {rank: number for number, rank in enumerate(order.tolist())}
    switches = [end for link in kept for end in (link.source, link.destination) if isinstance(end, str)]
    new |= {name: f"switch{number}" for number, name in enumerate(dict.fromkeys(switches))}
    links = {link.name: replace(link, source=new[link.source], destination=new[link.destination]) for link in kept}
    shared = [topology.shared[index - count] for index in used[used >= count].tolist()]
    nodes = [topology.node_of_rank[rank] for rank in order.tolist()]
    return Topology(
        f"{len(order)} ranks of {topology.name}",
        len(order),
        tuple(links.values()),
        shared=tuple(
            replace(each, name=f"shared{number}", links=tuple(links[name].name for name in each.links if name in links))
            for number, each in enumerate(shared)
        ),
        switches=tuple(Switch(str(new[name]), topology.switch_kinds[name]) for name in dict.fromkeys(switches)),
        nodes=tuple(list(dict.fromkeys(nodes)).index(node) for node in nodes),
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
