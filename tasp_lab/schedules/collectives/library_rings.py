"""The rings of a communication library's channels, and the fused collectives around them.

One ring in the order of ranks if one switch joins all ranks; one ring per NIC of a node if there are several nodes; all
rings of the decomposition if ranks are joined by direct links.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.node_rings import node_rings
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce, ring_reduce_scatter
from tasp_lab.topology.graph import Topology

AROUND_RINGS = {
    "all_gather": ring_all_gather,
    "reduce_scatter": ring_reduce_scatter,
    "all_reduce": ring_all_reduce,
}
"""The collectives implemented by rings, by their nccl-tests names."""


def around_library_rings(
    collective: str, topology: Topology, shard_bytes: int, rings: IntArray | None = None, chunks: int = 1
) -> Schedule:
    """A collective of `AROUND_RINGS` as one fused call of the library, of `shard_bytes` per rank.

    `rings` is an int array (rings, world_size), by default `library_rings(topology)`. Each ring's part of a shard is
    cut into `chunks`, sent one after another. With fewer bytes than rings, fewer rings are used.

    >>> from tasp_lab.topology.builders import switch
    >>> around_library_rings("all_reduce", switch(8), 64).fused
    True
    """
    found = library_rings(topology) if rings is None else rings
    return AROUND_RINGS[collective](topology, shard_bytes, found, True, chunks=chunks)


def named_library_ring(name: str, collective: str, topology: Topology, shard_bytes: int) -> Schedule:
    """`around_library_rings` with the schedule's name on the command line."""
    return around_library_rings(collective, topology, shard_bytes).renamed(name)


def library_rings(topology: Topology) -> IntArray:
    """The rings of a library's channels, an int array (rings, world_size).

    One ring in the order of ranks if one switch joins all ranks. With several nodes as many rings as NICs per node,
    each of which enters a node through one NIC and leaves it through another; links inside nodes have more bandwidth,
    but do not leave the node. Without a switch all rings of the decomposition.

    >>> from tasp_lab.topology.builders import nodes
    >>> len(library_rings(nodes(10, 8, "switch")))
    8
    """
    n, node_count = topology.world_size, len({*topology.node_of_rank})
    if 1 < node_count < n and topology.node_of_rank == tuple(rank // (n // node_count) for rank in range(n)):
        return node_rings(node_count, n // node_count).astype(np.int64)
    if len(topology.vertices) == n + 1 and topology.is_complete:
        return np.arange(n, dtype=np.int64)[None]
    return decompose(topology).rings.astype(np.int64)
