"""The same machine with other numbers of its ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.topology.graph import Link, Topology, Vertex
from tasp_lab.topology.links import MeshLinks


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

    nodes = tuple(topology.nodes[rank] for rank in order.tolist()) if topology.nodes else ()
    if isinstance(topology.links, MeshLinks) and not topology.shared:
        return replace(topology, nodes=nodes)
    old = topology.listed_links()
    new = tuple(Link(moved(a.source), moved(a.destination), a.bandwidth_bytes_per_s, a.latency_s) for a in old)
    names = {before.name: after.name for before, after in zip(old, new, strict=True)}
    shared = tuple(replace(each, links=tuple(names[name] for name in each.links)) for each in topology.shared)
    return replace(topology, links=new, shared=shared, nodes=nodes)
