"""Which switches are inside a node, which are a network between nodes, and which ranks are on one node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.topology.links import SwitchKind

if TYPE_CHECKING:
    from tasp_lab.topology.graph import Topology


def switch_kinds(topology: Topology) -> dict[str, SwitchKind]:
    """See `tasp_lab.topology.graph.Topology.switch_kinds`."""
    found: dict[str, SwitchKind] = {switch.name: switch.kind for switch in topology.switches}
    missing = [at for at, name in enumerate(topology.table.switches, topology.world_size) if name not in found]
    if missing:
        group = _joined(topology, np.all(topology.link_ends >= topology.world_size, axis=1))
        for number in {int(group[at]) for at in missing}:
            kind: SwitchKind = "network" if _holds_nodes_together(topology, group == number) else "node"
            found |= {str(topology.vertices[at]): kind for at in missing if group[at] == number}
    return {name: found[name] for name in topology.table.switches}


def node_of_rank(topology: Topology) -> tuple[int, ...]:
    """See `tasp_lab.topology.graph.Topology.node_of_rank`."""
    if topology.nodes or "network" not in topology.switch_kinds.values():
        return topology.nodes or (0,) * topology.world_size
    network = np.array([topology.switch_kinds.get(str(vertex)) == "network" for vertex in topology.vertices])
    node = _joined(topology, ~np.any(network[topology.link_ends], axis=1))[: topology.world_size].tolist()
    numbers = {label: number for number, label in enumerate(dict.fromkeys(node))}
    return tuple(numbers[label] for label in node)


def _holds_nodes_together(topology: Topology, switches: BoolArray) -> bool:
    """Whether removing these vertices splits the ranks into several groups, not all of one rank."""
    node = _joined(topology, ~np.any(switches[topology.link_ends], axis=1))[: topology.world_size]
    return 1 < len(np.unique(node)) < topology.world_size


def _joined(topology: Topology, links: BoolArray) -> IntArray:
    """The connected component of each vertex over the chosen links, a bool array (links,), in either direction."""
    ends, size = topology.link_ends[links], len(topology.vertices)
    graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=(size, size))
    return connected_components(graph, directed=False)[1].astype(np.int64)
