"""The physical lower bound of AllGather.

What any set of ranks and switches holds has to leave it for the ranks outside, at least once: the cut with the most
ranks inside per bandwidth (`tasp_lab.cuts.all_gather_cut`) limits every schedule. Every rank has to receive the shards
of all others; ranks whose links all share a capacity receive through it together; the first byte takes one route
latency. No schedule can be faster. On a full mesh and on a switch the bound is reached by `direct_all_gather`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from fractions import Fraction
from functools import lru_cache

from tasp_lab.cuts import Cut, all_gather_cut
from tasp_lab.quantities import Number
from tasp_lab.topology import Link, SharedCapacity, Topology, Vertex


def all_gather_bound_s(topology: Topology, shard_bytes: int) -> Number:
    """Seconds that AllGather of `shard_bytes` per rank takes at least; exact for exact bandwidths.

    >>> from fractions import Fraction
    >>> from tasp_lab.builders import full_mesh, switch
    >>> all_gather_bound_s(full_mesh(8, Fraction(10), Fraction(1)), 100)     # L + S/B
    Fraction(11, 1)
    >>> all_gather_bound_s(switch(8, Fraction(10), Fraction(1)), 100)        # L + (n-1)S/P
    Fraction(71, 1)
    """
    n = topology.world_size
    if n == 1:
        return 0
    latency = least_latency_into(topology)
    cut = bottleneck(topology)
    into = topology.bandwidths_into_ranks_bytes_per_s
    across = like(topology, cut.ranks_inside * shard_bytes / cut.bandwidth_bytes_per_s) + min(latency)
    received = [like(topology, (n - 1) * shard_bytes / into[rank]) + latency[rank] for rank in range(n)]
    shared = [
        len(behind) * (n - 1) * shard_bytes / group.bandwidth_bytes_per_s + min(latency[rank] for rank in behind)
        for group in topology.shared
        if (behind := ranks_behind(topology, group))
    ]
    return max([across, *received, *shared])


def ranks_behind(topology: Topology, group: SharedCapacity) -> list[int]:
    """The ranks into which every link is one of the group's: together they receive through it."""
    inside = set(group.links)
    outside = {link.destination for link in topology.links if link.name not in inside}
    return [rank for rank in range(topology.world_size) if rank not in outside]


@lru_cache(maxsize=4)
def bottleneck(topology: Topology) -> Cut:
    """The cut, once for the schedules that are compared on a topology."""
    return all_gather_cut(topology)


def like(topology: Topology, value: Fraction) -> Number:
    """A fraction as a float where the topology's own numbers are floats."""
    return float(value) if isinstance(topology.links[0].bandwidth_bytes_per_s, float) else value


def least_latency_into(topology: Topology) -> list[Number]:
    """The least latency from any rank into each rank, through switches: Dijkstra from all ranks at once."""
    onward: dict[Vertex, list[Link]] = defaultdict(list)
    for link in topology.links:
        onward[link.source].append(link)
    into: dict[int, Number] = {}
    settled: set[Vertex] = set()
    queue: list[tuple[Number, str, Vertex]] = [(0, "", rank) for rank in range(topology.world_size)]
    while queue:
        latency, _, vertex = heapq.heappop(queue)
        if vertex in settled:
            continue
        settled.add(vertex)
        for link in onward[vertex]:
            arrival = latency + link.latency_s
            if isinstance(link.destination, int):
                into[link.destination] = min(into.get(link.destination, arrival), arrival)
            else:
                heapq.heappush(queue, (arrival, link.destination, link.destination))
    return [into[rank] for rank in range(topology.world_size)]


def busbw_bytes_per_s(world_size: int, shard_bytes: int, time_s: Number) -> float:
    """AllGather's bus bandwidth as nccl-tests defines it: bytes each rank receives over the time; 0 for no time.

    >>> busbw_bytes_per_s(8, 100, 2.0)
    350.0
    """
    return float((world_size - 1) * shard_bytes / time_s) if time_s else 0.0
