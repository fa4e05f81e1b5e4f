"""The lower bound of an attention layer, for schedules that leave queries, keys and values where a placement has them.

Queries stay, so each rank computes what its own queries attend to, and has to receive every key that one of them sees
and that the rank does not hold. Hence no such schedule is faster than

- the compute of the busiest rank;
- what a rank has to receive, over the bandwidth of all links into it, after the least latency of a way into it;
- what ranks whose links all share a capacity have to receive, over that capacity;
- what is seen outside a set of ranks and held inside it, over the bandwidth of all links that leave the set. Any set
  would do; taken is the one that bounds AllGather.

Keys and values that many ranks see count once for a set, since a rank outside may pass them on.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.attention_task import AttentionTask
from tasp_lab.bound import bottleneck, least_latency_into, like, ranks_behind
from tasp_lab.calls import pairs_in_band
from tasp_lab.journeys import cut_blocks
from tasp_lab.machine import Machine
from tasp_lab.placement import Placement
from tasp_lab.quantities import Number
from tasp_lab.topology import Topology
from tasp_lab.workload import Workload


def attention_bound_s(machine: Machine, layer: Workload, placement: Placement) -> Number:
    """Seconds that a layer takes at least when queries stay; exact for exact numbers.

    Eight ranks compute for 1 s each, and each receives 7/8 of the keys over seven links:

    >>> from tasp_lab.builders import full_mesh
    >>> from tasp_lab.machine import Compute
    >>> from tasp_lab.placement import contiguous
    >>> layer = Workload(sequence=16, heads=1, head_dim=1)             # 4 FLOPs per pair, 4 bytes per position
    >>> mesh, rate = full_mesh(8, Fraction(4), Fraction(1)), Compute(Fraction(128))
    >>> attention_bound_s(Machine(mesh, compute=rate), layer, contiguous(16, 8))
    Fraction(3, 1)
    """
    compute_s = machine.compute.time_s(max(rank_flops(layer, placement)))
    topology = machine.topology
    return max(compute_s, _communication_s(topology, layer, placement) if topology.world_size > 1 else 0)


def rank_flops(layer: Workload, placement: Placement) -> list[int]:
    """The FLOPs of each rank's own queries.

    >>> from tasp_lab.placement import contiguous
    >>> rank_flops(Workload(sequence=4, head_dim=1, mask="causal"), contiguous(4, 2))       # 3 and 7 pairs
    [12, 28]
    """
    task, _ = cut_blocks(layer, placement, [Fraction(1)])
    keys = np.arange(task.first_query)
    pairs = [0] * placement.world_size
    for query in range(task.first_query, len(task.owner)):
        low, high = task.bands(np.array([query]), keys)
        pairs[task.owner[query]] += int(pairs_in_band(low, high, task.count[query], task.count[keys]).sum())
    return [count * layer.flops_per_pair for count in pairs]


def _communication_s(topology: Topology, layer: Workload, placement: Placement) -> Number:
    """The largest of the bounds that receiving and crossing set."""
    task, _ = cut_blocks(layer, placement, [Fraction(1)])
    latency = least_latency_into(topology)
    received = [_missing_bytes(task, [rank]) for rank in range(placement.world_size)]
    into = topology.bandwidths_into_ranks_bytes_per_s
    bounds = [like(topology, received[rank] / into[rank]) + latency[rank] for rank in np.flatnonzero(received).tolist()]
    for group in topology.shared:
        if behind := [rank for rank in ranks_behind(topology, group) if received[rank]]:
            sums = sum(received[rank] for rank in behind)
            bounds.append(sums / group.bandwidth_bytes_per_s + min(latency[rank] for rank in behind))
    cut = bottleneck(topology)
    outside = [rank for rank in range(placement.world_size) if rank not in cut.inside]
    if crossing := _missing_bytes(task, outside):
        bounds.append(like(topology, crossing / cut.bandwidth_bytes_per_s) + min(latency[rank] for rank in outside))
    return max(bounds, default=0)


def _missing_bytes(task: AttentionTask, ranks: list[int]) -> int:
    """The bytes of all keys and values that queries of some ranks see and that none of these ranks holds."""
    mine = np.isin(task.owner, ranks)
    keys = np.flatnonzero(~mine[: task.first_query])
    queries = np.flatnonzero(mine[task.first_query :]) + task.first_query
    return _positions_seen(task, queries, keys) * task.workload.kv_bytes_per_position


def _positions_seen(task: AttentionTask, queries: IntArray, keys: IntArray) -> int:
    """How many positions of some key blocks are seen by some query blocks, those seen by several counted once.

    A query block sees a stretch of each key block; a later one sees a stretch that begins no earlier.
    """
    count = task.count[keys]
    seen, end = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    for query in queries[np.argsort(task.start[queries])]:
        low, high = (limits[0] for limits in task.bands(np.array([query]), keys))
        first = np.maximum(np.maximum(-high, 0), end)
        last = np.where(low <= high, np.minimum(task.count[query] - low, count), 0)
        seen += np.maximum(last - first, 0)
        end = np.maximum(end, last)
    return int(seen.sum())
