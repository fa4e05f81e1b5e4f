"""The rings of a communication library's channels, and the collectives that it runs around them in one call.

One ring in the order of ranks where a switch joins all; one ring per NIC of a node where there are several nodes; all
rings of the decomposition where ranks are joined by links of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasp_lab.all_gather import ring_all_gather
from tasp_lab.arrays import IntArray
from tasp_lab.decomposition import decompose
from tasp_lab.node_rings import node_rings
from tasp_lab.ring_reductions import ring_all_reduce, ring_reduce_scatter
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology

AROUND_RINGS = {
    "all_gather": ring_all_gather,
    "reduce_scatter": ring_reduce_scatter,
    "all_reduce": ring_all_reduce,
}
"""Collectives that go around rings, by nccl-tests' names."""


def around_library_rings(
    collective: str, topology: Topology, shard_bytes: int, rings: IntArray | None = None, pieces: int = 1
) -> Schedule:
    """A collective of `AROUND_RINGS` as one fused call of the library, of `shard_bytes` per rank.

    `rings` is an int array (rings, world_size), `library_rings(topology)` where it is not given; what a ring carries of
    a shard travels in so many pieces, one after the other. With fewer bytes than rings, fewer rings are used.

    >>> from tasp_lab.builders import switch
    >>> around_library_rings("all_reduce", switch(8), 64).fused
    True
    """
    found = library_rings(topology) if rings is None else rings
    return AROUND_RINGS[collective](topology, shard_bytes, found, True, pieces=pieces)


def named_library_ring(name: str, collective: str, topology: Topology, shard_bytes: int) -> Schedule:
    """The same under the name that it has on the command line."""
    return replace(around_library_rings(collective, topology, shard_bytes), name=name)


def library_rings(topology: Topology) -> IntArray:
    """The rings of a library's channels, an int array (rings, world_size).

    One ring in the order of ranks where one switch joins all. With several nodes as many rings as NICs per node, each
    of which enters a node through one NIC and leaves it through another: a node's own links carry more, but nothing
    leaves by them. Without a switch all rings of the decomposition, each as often as its share asks for.

    >>> from tasp_lab.builders import nodes
    >>> len(library_rings(nodes(10, 8, "switch")))
    8
    """
    n, node_count = topology.world_size, _node_count(topology)
    if 1 < node_count < n:
        return node_rings(node_count, n // node_count).astype(np.int64)
    if len(topology.vertices) == n + 1 and topology.is_complete:
        return np.arange(n, dtype=np.int64)[None]
    return decompose(topology).rings.astype(np.int64)


def _node_count(topology: Topology) -> int:
    """How many nodes there are: sets of ranks that are joined without the network, as builders name it."""
    n, ends = topology.world_size, topology.link_ends
    names = np.array([isinstance(v, str) and v.startswith(("network", "rail", "spine")) for v in topology.vertices])
    inside = ends[~names[ends].any(axis=1)]
    size = len(topology.vertices)
    joined = coo_array((np.ones(len(inside), dtype=np.int8), (inside[:, 0], inside[:, 1])), shape=(size, size))
    return len(np.unique(connected_components(joined)[1][:n]))
