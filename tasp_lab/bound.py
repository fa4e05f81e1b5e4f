"""The physical lower bounds of collectives.

**AllGather.** What any set of ranks and switches holds has to leave it for the ranks outside, at least once: the cut
with the most ranks inside per bandwidth (`tasp_lab.cuts.all_gather_cut`) limits every schedule. Every rank has to
receive the shards of all others; ranks whose links all share a capacity receive through it together; the first byte
takes one route latency. No schedule can be faster. On a full mesh and on a switch `direct_all_gather` reaches this.

**ReduceScatter** is AllGather backwards: of every shard that is not its own a rank has to let out something once, where
in AllGather it has to let it in. So its bound is that of AllGather on the same links, each turned around.

**AllReduce.** Let the ranks be in k parts, however they are chosen, and follow one element of the message. Until the
first part has the complete sum, each of the others has let something of it out; the k - 1 others do not have it yet, so
after that each of them lets something in: 2 (k - 1) times the message enters some part. Parts are the ranks one by one,
and for every bandwidth what faster links join, as nodes are (`_parts`). The message also has to leave any set of ranks
once; the narrowest is found by `tasp_lab.cuts.ring_cut`. On a full mesh and on a switch, rings come up to this bound
but for the latencies of their steps.

**AllToAll and SendRecv** are taken as they are done: each message goes from its source to its destination along its
route, at once or cut in any way, but never through another rank. Then what all messages bring to a constraint has to
pass it, and the last of it takes one of their latencies. On a full mesh and on a switch, sending at once reaches this.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasp_lab.arrays import IntArray
from tasp_lab.collectives import CollectiveKind
from tasp_lab.cuts import Cut, all_gather_cut, ring_cut
from tasp_lab.links import MeshLinks
from tasp_lab.quantities import Number
from tasp_lab.topology import Link, SharedCapacity, Topology, Vertex

MOST_PARTINGS = 64
"""In so many ways ranks are parted at most, where links have more bandwidths than that."""


def collective_bound_s(kind: CollectiveKind, topology: Topology, shard_bytes: int) -> Number:
    """Seconds that a collective takes at least; `shard_bytes` as in `tasp_lab.collectives`. Exact for exact bandwidths.

    >>> from fractions import Fraction
    >>> from tasp_lab.builders import full_mesh, switch
    >>> mesh, star = full_mesh(8, Fraction(10), Fraction(1)), switch(8, Fraction(10), Fraction(1))
    >>> [collective_bound_s("AllReduce", each, 100) for each in (mesh, star)]      # L + 2S/B, L + 2(n-1)S/P
    [Fraction(21, 1), Fraction(141, 1)]
    >>> [collective_bound_s("AllToAll", each, 100) for each in (mesh, star)]       # L + S/B, L + (n-1)S/P
    [Fraction(11, 1), Fraction(71, 1)]
    """
    return _BOUNDS[kind](topology, shard_bytes) if topology.world_size > 1 else 0


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
    if isinstance(topology.links, MeshLinks):
        return [topology.links.latency_s] * topology.world_size
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


def reduce_scatter_bound_s(topology: Topology, shard_bytes: int) -> Number:
    """Seconds that ReduceScatter takes at least to leave `shard_bytes` with each rank."""
    return all_gather_bound_s(_turned_around(topology), shard_bytes)


def _turned_around(topology: Topology) -> Topology:
    """The topology with every link the other way; itself where that is the same."""
    if isinstance(topology.links, MeshLinks):
        return topology
    links = tuple(replace(link, source=link.destination, destination=link.source) for link in topology.links)
    if not topology.shared and set(links) == set(topology.links):
        return topology
    turned = {link.name: back.name for link, back in zip(topology.links, links, strict=True)}
    shared = tuple(replace(group, links=tuple(turned[name] for name in group.links)) for group in topology.shared)
    return Topology(topology.name, topology.world_size, links, shared)


def all_reduce_bound_s(topology: Topology, shard_bytes: int) -> Number:
    """Seconds that AllReduce of a message of `shard_bytes` times the number of ranks takes at least."""
    n = topology.world_size
    message_bytes = n * shard_bytes
    times = [message_bytes / ring_cut(topology).bandwidth_bytes_per_s]
    times += [2 * (parts - 1) * message_bytes / into for parts, into in _parts(topology)]
    for group in topology.shared:
        behind = len(ranks_behind(topology, group))
        messages = 2 * (n - 1) if behind == n else behind
        times.append(messages * message_bytes / Fraction(group.bandwidth_bytes_per_s))
    return like(topology, max(times)) + min(least_latency_into(topology))


def _parts(topology: Topology) -> Iterator[tuple[int, Fraction]]:
    """Ways to part the ranks: the number of parts, and the bandwidth of all links into them, in bytes/s, exact.

    First every rank is a part; then, for bandwidths of links, the ranks that faster links join are one.
    """
    yield topology.world_size, sum(topology.bandwidths_into_ranks_bytes_per_s, Fraction(0))
    if isinstance(topology.links, MeshLinks):
        return
    sources, destinations = topology.link_ends.T
    size, bandwidths = len(topology.vertices), topology.link_bandwidths_bytes_per_s
    distinct = np.unique(bandwidths)
    for slow in distinct[:-1][:: -(-len(distinct) // MOST_PARTINGS)]:
        fast = bandwidths > slow
        joined = coo_array((np.ones(int(fast.sum())), (sources[fast], destinations[fast])), shape=(size, size))
        part = connected_components(joined.tocsr(), directed=False)[1]
        parts = np.unique(part[: topology.world_size])
        entering = np.flatnonzero((part[sources] != part[destinations]) & np.isin(part[destinations], parts))
        if len(parts) > 1:
            yield len(parts), sum((Fraction(topology.links[at].bandwidth_bytes_per_s) for at in entering), Fraction(0))


def all_to_all_bound_s(topology: Topology, piece_bytes: int) -> Number:
    """Seconds that AllToAll of a piece of `piece_bytes` from every rank to every other takes at least."""
    sources, destinations = np.nonzero(~np.eye(topology.world_size, dtype=bool))
    return _bound_of_messages_s(topology, sources, destinations, piece_bytes)


def send_recv_bound_s(topology: Topology, message_bytes: int) -> Number:
    """Seconds that a message of `message_bytes` from each rank to the next, all at once, takes at least."""
    ranks = np.arange(topology.world_size)
    return _bound_of_messages_s(topology, ranks, np.roll(ranks, -1), message_bytes)


def _bound_of_messages_s(topology: Topology, sources: IntArray, destinations: IntArray, size_bytes: int) -> Number:
    """What the constraint that these messages of one size keep busy longest takes; each goes along its route."""
    passed, latencies_s = topology.routes(sources, destinations)
    message, column = np.nonzero(passed >= 0)
    passed = passed[message, column]
    of_shared = [float(group.bandwidth_bytes_per_s) for group in topology.shared]
    bandwidths = np.concatenate([topology.link_bandwidths_bytes_per_s, of_shared])
    messages = np.bincount(passed, minlength=len(bandwidths))
    latency_s = np.zeros(len(bandwidths))
    latency_s[passed] = np.inf
    np.minimum.at(latency_s, passed, latencies_s[message])
    slowest = int((messages * size_bytes / bandwidths + latency_s).argmax())
    through = message[passed == slowest]
    first = through[latencies_s[through].argmin()]
    links = len(topology.links)
    busy = topology.links[slowest] if slowest < links else topology.shared[slowest - links]
    busy_s = like(topology, int(messages[slowest]) * size_bytes / Fraction(busy.bandwidth_bytes_per_s))
    return busy_s + topology.route(int(sources[first]), int(destinations[first])).latency_s


_BOUNDS: Mapping[CollectiveKind, Callable[[Topology, int], Number]] = {
    "AllGather": all_gather_bound_s,
    "ReduceScatter": reduce_scatter_bound_s,
    "AllReduce": all_reduce_bound_s,
    "AllToAll": all_to_all_bound_s,
    "SendRecv": send_recv_bound_s,
}


def busbw_bytes_per_s(world_size: int, shard_bytes: int, time_s: Number, kind: CollectiveKind = "AllGather") -> float:
    """The bus bandwidth as nccl-tests defines it, with `shard_bytes` as in `tasp_lab.collectives`; 0 for no time.

    It is what each rank would receive over the time if all went around one ring.

    >>> busbw_bytes_per_s(8, 100, 2.0), busbw_bytes_per_s(8, 100, 2.0, "AllReduce")
    (350.0, 700.0)
    """
    times = {"AllReduce": 2 * (world_size - 1), "SendRecv": min(1, world_size - 1)}.get(kind, world_size - 1)
    return float(times * shard_bytes / time_s) if time_s else 0.0
