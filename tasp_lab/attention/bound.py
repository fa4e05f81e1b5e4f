"""Lower bound of the time of an attention pass, for schedules with one stationary side in a given layout.

Stationary blocks never move. So each rank computes the tiles of its own stationary blocks, and must receive every
circulating position that they attend to and that it does not hold at the start. In a backward pass each of these tiles
contributes to a gradient that ends at the owner of the circulating block. Contributions may be summed on the way, but a
rank must receive the gradient of each of its positions that others attend to at least once. Hence no such schedule is
faster than

- the compute of the busiest rank;
- the bytes a rank must receive, over the bandwidth of all links into it, plus the lowest latency of a route into it;
- the bytes that ranks whose links all share a capacity must receive, over that capacity;
- the bytes that a set of ranks must receive from all others, over the bandwidth of all links into the set. The set used
  is the complement of the cut that bounds AllGather.

Bytes that several ranks of a set need count once, since they may be forwarded, and gradients summed, inside the set.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.machines.machine import Machine
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.limits import bottleneck, like, ranks_behind
from tasp_lab.units import Number
from tasp_lab.workload.attention_task import AttentionTask
from tasp_lab.workload.kernel_calls import pairs_in_band


def attention_bound_s(machine: Machine, task: AttentionTask, initial: BoolArray | None = None) -> Number:
    """Lower bound of the time of a pass in seconds; exact for exact numbers.

    `initial`, a bool array (world_size, blocks), is what each rank holds at the start; by default the blocks it owns.

    Eight ranks compute for 1 s each, and each receives 7/8 of the keys over seven links:

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.attention.circulation import cut_blocks
    >>> from tasp_lab.machines.machine import ComputeRate
    >>> from tasp_lab.workload.sequence_layout import contiguous
    >>> from tasp_lab.workload.layer import Workload
    >>> layer = Workload(sequence=16, heads=1, head_dim=1)             # 4 FLOPs per pair, 4 bytes per position
    >>> task, _ = cut_blocks(layer, contiguous(16, 8), [Fraction(1)])
    >>> mesh, rate = full_mesh(8, Fraction(4), Fraction(1)), ComputeRate(Fraction(128))
    >>> attention_bound_s(Machine(mesh, compute=rate), task)
    Fraction(3, 1)

    Backward they compute 5/2 of that, and receive the gradient of their own two positions, 8 bytes each:

    >>> task, _ = cut_blocks(layer, contiguous(16, 8), [Fraction(1)], gradient_dtype="fp32")
    >>> attention_bound_s(Machine(mesh, compute=rate), task)           # 1 + (56 + 16) / 28
    Fraction(25, 7)
    """
    compute_s = machine.rate_of(task).time_s(max(rank_flops(task)))
    held = task.owned if initial is None else initial
    return max(compute_s, _communication_s(machine.topology, task, held) if len(held) > 1 else 0)


def rank_flops(task: AttentionTask) -> list[int]:
    """The FLOPs of the tiles of each rank's stationary blocks.

    >>> from fractions import Fraction
    >>> from tasp_lab.attention.circulation import cut_blocks
    >>> from tasp_lab.workload.sequence_layout import contiguous
    >>> from tasp_lab.workload.layer import Workload
    >>> layer = Workload(sequence=4, head_dim=1, mask="causal", heads=1)        # 3 and 7 pairs
    >>> rank_flops(cut_blocks(layer, contiguous(4, 2), [Fraction(1)])[0])
    [12, 28]
    """
    pairs = [0] * task.layout.world_size
    circulating = _by_document(task, task.circulating)
    for block in task.stationary:
        attended = circulating[int(task.document[block])]
        low, high = _bands(task, np.array([block]), attended)
        pairs[task.owner[block]] += int(pairs_in_band(low, high, task.count[block], task.count[attended]).sum())
    return [count * task.flops_per_pair for count in pairs]


def _communication_s(topology: Topology, task: AttentionTask, held: BoolArray) -> Number:
    """The largest of the bounds on communication."""
    latency = topology.min_latencies_into_ranks_s
    received = [_received_bytes(task, held, [rank]) for rank in range(topology.world_size)]
    into = topology.bandwidths_into_ranks_bytes_per_s
    bounds = [like(topology, received[rank] / into[rank]) + latency[rank] for rank in np.flatnonzero(received).tolist()]
    for group in topology.shared:
        if behind := [rank for rank in ranks_behind(topology, group) if received[rank]]:
            sums = sum(received[rank] for rank in behind)
            bounds.append(sums / group.bandwidth_bytes_per_s + min(latency[rank] for rank in behind))
    cut = bottleneck(topology)
    outside = [rank for rank in range(topology.world_size) if rank not in cut.inside]
    if crossing := _received_bytes(task, held, outside):
        bounds.append(like(topology, crossing / cut.bandwidth_bytes_per_s) + min(latency[rank] for rank in outside))
    return max(bounds, default=0)


def _received_bytes(task: AttentionTask, held: BoolArray, ranks: list[int]) -> int:
    """Bytes that a set of ranks must receive: blocks that its stationary blocks attend to, and own gradients."""
    mine = np.isin(task.owner, ranks)
    stationary, circulating = task.stationary, task.circulating
    missing = circulating[held[ranks].sum(axis=0)[circulating] == 0]
    per_position = (
        task.workload.kv_bytes_per_position if task.circulating_side == "keys" else task.query_bytes_per_position
    )
    received = _attended_positions(task, stationary[mine[stationary]], missing) * per_position
    if task.is_backward:
        returned = _attended_positions(task, stationary[~mine[stationary]], circulating[mine[circulating]])
        received += returned * task.gradient_bytes_per_position
    return received


def _attended_positions(task: AttentionTask, stationary: IntArray, circulating: IntArray) -> int:
    """The number of positions of `circulating` blocks in the mask of any of the `stationary` blocks, each counted once.

    The mask of a stationary block covers an interval of each circulating one; that of a later one begins no earlier.
    """
    positions, blocks_of = 0, _by_document(task, circulating)
    for document, rows in _by_document(task, stationary).items():
        columns = blocks_of.get(document, circulating[:0])
        rows = rows[np.argsort(task.start[rows])]
        low, high = _bands(task, rows, columns)
        end = np.minimum(task.count[rows][:, None] - low, task.count[columns][None, :])
        end = np.maximum.accumulate(np.where(low <= high, end, 0), axis=0)
        counted = np.concatenate([np.zeros_like(end[:1]), end[:-1]])
        positions += int(np.maximum(end - np.maximum(np.maximum(-high, 0), counted), 0).sum())
    return positions


def _by_document(task: AttentionTask, blocks: IntArray) -> dict[int, IntArray]:
    """Blocks by document; blocks of different documents never attend to each other."""
    document = task.document[blocks]
    order = np.argsort(document, kind="stable")
    numbers, first = np.unique(document[order], return_index=True)
    return dict(zip(numbers.tolist(), np.split(blocks[order], first[1:]), strict=False))


def _bands(task: AttentionTask, stationary: IntArray, circulating: IntArray) -> tuple[IntArray, IntArray]:
    """The bands of tiles, arrays (stationary, circulating): stationary i pairs with j if low <= i - j <= high."""
    if task.circulating_side == "keys":
        return task.bands(stationary, circulating)
    low, high = task.bands(circulating, stationary)
    return -high.T, -low.T
