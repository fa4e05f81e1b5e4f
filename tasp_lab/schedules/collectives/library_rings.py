"""Collectives as the communication libraries run them: fused calls around the rings of channels, and messages.

AllGather, ReduceScatter and AllReduce are one fused call around rings, AllToAll and SendRecv a group of messages.

One ring in the order of ranks if one switch joins all ranks; one ring per NIC of a node if there are several nodes; all
rings of the decomposition if ranks are joined by direct links.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.node_rings import node_rings, rings_through_nics
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.collectives.in_switch import library_switch_all_reduce
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.point_to_point import all_to_all, send_recv
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce, ring_reduce_scatter
from tasp_lab.schedules.collectives.tree_all_reduce import library_nvls_tree_all_reduce, library_tree_all_reduce
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.missing import nics_of

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


@schedule("library-ring", "AllGather", library_call="all_gather")
def library_ring_all_gather(topology: Topology, shard_bytes: int) -> Schedule:
    """AllGather as one call of the library, see `around_library_rings`."""
    return around_library_rings("all_gather", topology, shard_bytes).renamed("library-ring")


@schedule("library-ring-reduce-scatter", "ReduceScatter", library_call="reduce_scatter")
def library_ring_reduce_scatter(topology: Topology, shard_bytes: int) -> Schedule:
    """ReduceScatter as one call of the library, see `around_library_rings`."""
    return around_library_rings("reduce_scatter", topology, shard_bytes).renamed("library-ring-reduce-scatter")


@schedule("library-ring-all-reduce", "AllReduce", library_call="all_reduce")
def library_ring_all_reduce(topology: Topology, shard_bytes: int) -> Schedule:
    """AllReduce as one call of the library, see `around_library_rings`."""
    return around_library_rings("all_reduce", topology, shard_bytes).renamed("library-ring-all-reduce")


def library_rings(topology: Topology) -> IntArray:
    """The rings of a library's channels, an int array (rings, world_size).

    One ring in the order of ranks if one switch joins all ranks. With several nodes as many rings as NICs per node,
    each of which enters a node through one NIC and leaves it through another; links inside nodes have more bandwidth,
    but do not leave the node. Where parts are missing, all nodes have as many as the one with the fewest NICs. Without
    a switch all rings of the decomposition.

    >>> from tasp_lab.topology.builders import nodes
    >>> len(library_rings(nodes(10, 8, "switch")))
    8
    """
    n, node_count = topology.world_size, len({*topology.node_of_rank})
    if 1 < node_count < n:
        equal = topology.node_of_rank == tuple(rank // (n // node_count) for rank in range(n))
        nics = nics_of(topology) if topology.shared or not equal else []
        of_node = [[[*nic.links] for nic in nics if nic.node == node] for node in range(node_count)]
        uneven = len({len(nic.links) for nic in nics}) > 1 or len({*map(len, of_node)}) > 1
        if uneven and sum(len(nic.links) for nic in nics) == n:
            return rings_through_nics(of_node, min(map(len, of_node))).astype(np.int64)
        if equal:
            return node_rings(node_count, n // node_count).astype(np.int64)
    if len(topology.vertices) == n + 1 and topology.is_complete:
        return np.arange(n, dtype=np.int64)[None]
    return decompose(topology).rings.astype(np.int64)


def library_schedule(
    collective: NcclTestsName,
    topology: Topology,
    size_bytes: int,
    rings: IntArray | None = None,
    chunks: int = 1,
    algorithm: str = "ring",
) -> Schedule:
    """The schedule by which a library implements a collective.

    Parameters
    ----------
    collective : its nccl-tests name.
    topology : the topology of the machine.
    size_bytes : the nccl-tests size: the total for all_gather and reduce_scatter, the bytes that each rank sends for
        alltoall, one message for sendrecv and all_reduce.
    rings, chunks : see `around_library_rings`.
    algorithm : of an all_reduce, ``ring``, ``nvls`` for `library_switch_all_reduce`, ``tree`` or ``nvls-tree``.

    >>> from tasp_lab.topology.builders import switch
    >>> schedule = library_schedule("all_gather", switch(8), 2**25)
    >>> schedule.fused, schedule.transfers, int(schedule.block_bytes[0])
    (True, 56, 4194304)

    Raises `ScheduleError` for a single rank and for fewer bytes than ranks.
    """
    n = topology.world_size
    if n == 1:
        raise ScheduleError(f"{collective} of one rank sends nothing, expected two ranks or more")
    if size_bytes < n and collective != "sendrecv":
        raise ScheduleError(f"{collective} of {size_bytes} bytes, expected at least one per rank: {n}")
    if collective == "sendrecv":
        return send_recv(topology, size_bytes)
    if collective == "alltoall":
        return all_to_all(topology, size_bytes // n)
    if algorithm == "nvls":
        return library_switch_all_reduce(topology, size_bytes // n)
    if algorithm in ("tree", "nvls-tree"):
        tree = library_tree_all_reduce if algorithm == "tree" else library_nvls_tree_all_reduce
        return tree(topology, size_bytes // n)
    return around_library_rings(collective, topology, size_bytes // n, rings, chunks)
