"""The physical lower bounds of collectives.

**AllGather.** The shards inside any set of ranks and switches must leave it at least once: the cut with the most ranks
inside per bandwidth (`tasp_lab.topology.cuts.all_gather_cut`) limits every schedule. Every rank must receive the shards
of all others; ranks whose links all share a capacity receive through it together; the first byte takes one route
latency. No schedule can be faster. On a full mesh and on a switch `direct_all_gather` reaches this.

**ReduceScatter** is AllGather reversed: a rank must send a contribution to every shard that it does not own, where in
AllGather it must receive that shard. So its bound is that of AllGather with every link reversed.

**AllReduce.** Partition the ranks into any k parts and consider one element of the message. Before the first part has
the complete sum, each of the k - 1 others has sent a contribution; after that each of these must receive the sum. So
2 (k - 1) times the message enters some part. The partitions used are single ranks and, for each bandwidth, the groups
joined by faster links, such as nodes (`_parts`). The message must also leave any set of ranks once; the narrowest is
found by `tasp_lab.topology.cuts.ring_cut`. On a full mesh and on a switch, rings reach this bound up to the latencies
of their steps. A switch that adds and multicasts merges contributions and splits sums, so there each part receives the
message once.

**AllToAll and SendRecv** are bounded for messages that go from source to destination in one transfer, whole or cut in
any way: each follows its route, also where that leads through ranks. Then all messages of a constraint must pass it,
and the last byte takes one of their latencies. On a full mesh, on a switch and on tori whose sides are odd or multiples
of four, sending all messages at once reaches this bound up to the latencies of longer routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.units import Number
from tasp_lab.schedules.collectives.kinds import CollectiveKind
from tasp_lab.topology.components import components
from tasp_lab.topology.cuts import bottleneck, like, ranks_behind, ring_cut
from tasp_lab.topology.graph import Topology

MAX_PARTITIONS = 64
"""Maximum partitions to consider if links have more bandwidths than that."""


def all_gather_bound_s(topology: Topology, shard_bytes: int) -> Number:
    """Lower bound of AllGather of `shard_bytes` per rank, in seconds; exact for exact bandwidths.

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import full_mesh, switch
    >>> all_gather_bound_s(full_mesh(8, Fraction(10), Fraction(1)), 100)     # L + S/B
    Fraction(11, 1)
    >>> all_gather_bound_s(switch(8, Fraction(10), Fraction(1)), 100)        # L + (n-1)S/P
    Fraction(71, 1)
    """
    n = topology.world_size
    if n == 1:
        return 0
    latency = topology.min_latencies_into_ranks_s
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


def reduce_scatter_bound_s(topology: Topology, shard_bytes: int) -> Number:
    """Lower bound of ReduceScatter that leaves `shard_bytes` at each rank, in seconds."""
    return all_gather_bound_s(_reversed(topology), shard_bytes)


def _reversed(topology: Topology) -> Topology:
    """The topology with every link reversed; itself if it is symmetric."""
    if not topology.shared and topology.table.is_symmetric:
        return topology
    links = tuple(replace(link, source=link.destination, destination=link.source) for link in topology.links)
    turned = {link.name: back.name for link, back in zip(topology.links, links, strict=True)}
    shared = tuple(replace(group, links=tuple(turned[name] for name in group.links)) for group in topology.shared)
    return replace(topology, links=links, shared=shared)


def all_reduce_bound_s(topology: Topology, shard_bytes: int, in_switch: bool = False) -> Number:
    """Lower bound of AllReduce of a message of `shard_bytes` times the number of ranks, in seconds.

    With `in_switch` switches may add and multicast: then each part receives the sum, and no more.

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import switch
    >>> [all_reduce_bound_s(switch(8, Fraction(10), Fraction(1)), 100, each) for each in (False, True)]
    [Fraction(141, 1), Fraction(81, 1)]
    """
    n = topology.world_size
    message_bytes = n * shard_bytes
    times = [message_bytes / ring_cut(topology).bandwidth_bytes_per_s]
    times += [(parts if in_switch else 2 * (parts - 1)) * message_bytes / into for parts, into in _parts(topology)]
    for group in topology.shared:
        behind = len(ranks_behind(topology, group))
        messages = 2 * (n - 1) if behind == n else behind
        times.append(messages * message_bytes / Fraction(group.bandwidth_bytes_per_s))
    return like(topology, max(times)) + min(topology.min_latencies_into_ranks_s)


def _parts(topology: Topology) -> Iterator[tuple[int, Fraction]]:
    """Partitions of the ranks: the number of parts, and the total bandwidth of links into them in bytes/s, exact.

    First single ranks; then, for each bandwidth, the groups of ranks joined by faster links.
    """
    yield topology.world_size, sum(topology.bandwidths_into_ranks_bytes_per_s, Fraction(0))
    distinct = topology.table.distinct_bandwidths_bytes_per_s
    if len(distinct) < 2:
        return
    sources, destinations = topology.link_ends.T
    bandwidths = topology.link_bandwidths_bytes_per_s
    for slow in distinct[:-1][:: -(-len(distinct) // MAX_PARTITIONS)]:
        fast = bandwidths > slow
        part = components(topology.link_ends[fast], len(topology.vertices))
        parts = np.unique(part[: topology.world_size])
        entering = np.flatnonzero((part[sources] != part[destinations]) & np.isin(part[destinations], parts))
        if len(parts) > 1:
            yield (
                len(parts),
                sum((Fraction(topology.links[at].bandwidth_bytes_per_s) for at in entering.tolist()), Fraction(0)),
            )


def all_to_all_bound_s(topology: Topology, chunk_bytes: int) -> Number:
    """Lower bound of AllToAll with a chunk of `chunk_bytes` from every rank to every other, in seconds."""
    sources, destinations = np.nonzero(~np.eye(topology.world_size, dtype=bool))
    return _bound_of_messages_s(topology, sources, destinations, chunk_bytes)


def send_recv_bound_s(topology: Topology, message_bytes: int) -> Number:
    """Lower bound of SendRecv, a message of `message_bytes` from each rank to the next, in seconds."""
    ranks = np.arange(topology.world_size)
    return _bound_of_messages_s(topology, ranks, np.roll(ranks, -1), message_bytes)


def _bound_of_messages_s(topology: Topology, sources: IntArray, destinations: IntArray, size_bytes: int) -> Number:
    """The time of the busiest constraint, for messages of one size that each follow their route."""
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


_BOUNDS_S: Mapping[CollectiveKind, Callable[[Topology, int], Number]] = {
    "AllGather": all_gather_bound_s,
    "ReduceScatter": reduce_scatter_bound_s,
    "AllReduce": all_reduce_bound_s,
    "AllToAll": all_to_all_bound_s,
    "SendRecv": send_recv_bound_s,
}


def collective_bound_s(kind: CollectiveKind, topology: Topology, shard_bytes: int, in_switch: bool = False) -> Number:
    """Lower bound of a collective in seconds, exact for exact bandwidths.

    `shard_bytes` is that of `tasp_lab.schedules.collectives.kinds`; `in_switch` as of `all_reduce_bound_s`.

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import full_mesh, switch
    >>> mesh, star = full_mesh(8, Fraction(10), Fraction(1)), switch(8, Fraction(10), Fraction(1))
    >>> [collective_bound_s("AllReduce", each, 100) for each in (mesh, star)]      # L + 2S/B, L + 2(n-1)S/P
    [Fraction(21, 1), Fraction(141, 1)]
    >>> [collective_bound_s("AllToAll", each, 100) for each in (mesh, star)]       # L + S/B, L + (n-1)S/P
    [Fraction(11, 1), Fraction(71, 1)]
    """
    if in_switch and kind == "AllReduce" and topology.world_size > 1:
        return all_reduce_bound_s(topology, shard_bytes, in_switch)
    return _BOUNDS_S[kind](topology, shard_bytes) if topology.world_size > 1 else 0
