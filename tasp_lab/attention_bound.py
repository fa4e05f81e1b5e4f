"""The lower bound of a pass of an attention layer, for schedules in which one side stays where a placement has it.

Blocks of the side that stays never move, so each rank computes what its own ones meet, and has to receive every
position of the side that travels which one of them meets and which the rank does not hold at the start. In a backward
pass what they meet of others' positions is part of gradients that end at their owners; parts may be summed on the way,
but of each of its positions that others' blocks meet a rank has to receive the gradient at least once. Hence no such
schedule is faster than

- the compute of the busiest rank;
- what a rank has to receive, over the bandwidth of all links into it, after the least latency of a way into it;
- what ranks whose links all share a capacity have to receive, over that capacity;
- what a set of ranks has to receive from all others, over the bandwidth of all links into the set. Any set would do;
  taken is what is outside the cut that bounds AllGather.

What several ranks of a set need counts once for it, since they may pass it on, and add up gradients inside.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention_task import AttentionTask
from tasp_lab.bound import bottleneck, least_latency_into, like, ranks_behind
from tasp_lab.calls import pairs_in_band
from tasp_lab.machine import Machine
from tasp_lab.quantities import Number
from tasp_lab.topology import Topology


def attention_bound_s(machine: Machine, task: AttentionTask, initial: BoolArray | None = None) -> Number:
    """Seconds that a pass takes at least; exact for exact numbers.

    `initial` (world_size, blocks) is who holds what at the start, where that is more than what the task says who owns.

    Eight ranks compute for 1 s each, and each receives 7/8 of the keys over seven links:

    >>> from fractions import Fraction
    >>> from tasp_lab.builders import full_mesh
    >>> from tasp_lab.journeys import cut_blocks
    >>> from tasp_lab.machine import Compute
    >>> from tasp_lab.placement import contiguous
    >>> from tasp_lab.workload import Workload
    >>> layer = Workload(sequence=16, heads=1, head_dim=1)             # 4 FLOPs per pair, 4 bytes per position
    >>> task, _ = cut_blocks(layer, contiguous(16, 8), [Fraction(1)])
    >>> mesh, rate = full_mesh(8, Fraction(4), Fraction(1)), Compute(Fraction(128))
    >>> attention_bound_s(Machine(mesh, compute=rate), task)
    Fraction(3, 1)

    Backward they compute 5/2 of that, and receive the gradient of their own two positions, 8 bytes each:

    >>> task, _ = cut_blocks(layer, contiguous(16, 8), [Fraction(1)], gradient_dtype="fp32")
    >>> attention_bound_s(Machine(mesh, compute=rate), task)           # 1 + (56 + 16) / 28
    Fraction(25, 7)
    """
    compute_s = machine.compute.time_s(max(rank_flops(task)))
    held = task.owned if initial is None else initial
    return max(compute_s, _communication_s(machine.topology, task, held) if len(held) > 1 else 0)


def rank_flops(task: AttentionTask) -> list[int]:
    """The FLOPs of what each rank's own staying blocks meet.

    >>> from fractions import Fraction
    >>> from tasp_lab.journeys import cut_blocks
    >>> from tasp_lab.placement import contiguous
    >>> from tasp_lab.workload import Workload
    >>> layer = Workload(sequence=4, head_dim=1, mask="causal")        # 3 and 7 pairs
    >>> rank_flops(cut_blocks(layer, contiguous(4, 2), [Fraction(1)])[0])
    [12, 28]
    """
    pairs = [0] * task.placement.world_size
    travelling = _by_document(task, task.travelling)
    for block in task.staying:
        meets = travelling[int(task.document[block])]
        low, high = _bands(task, np.array([block]), meets)
        pairs[task.owner[block]] += int(pairs_in_band(low, high, task.count[block], task.count[meets]).sum())
    return [count * task.flops_per_pair for count in pairs]


def _communication_s(topology: Topology, task: AttentionTask, held: BoolArray) -> Number:
    """The largest of the bounds that receiving and crossing set."""
    latency = least_latency_into(topology)
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
    """What some ranks have to receive from the others: what their staying blocks meet, and gradients of their own."""
    mine = np.isin(task.owner, ranks)
    staying, travelling = task.staying, task.travelling
    missing = travelling[held[ranks].sum(axis=0)[travelling] == 0]
    per_position = task.workload.kv_bytes_per_position if task.travellers == "keys" else task.query_bytes_per_position
    received = _positions_met(task, staying[mine[staying]], missing) * per_position
    if task.is_backward:
        returned = _positions_met(task, staying[~mine[staying]], travelling[mine[travelling]])
        received += returned * task.gradient_bytes_per_position
    return received


def _positions_met(task: AttentionTask, staying: IntArray, travelling: IntArray) -> int:
    """How many positions of some travelling blocks some staying blocks meet, those that several meet counted once.

    A staying block meets a stretch of each travelling one; a later one meets a stretch that begins no earlier.
    """
    positions, blocks_of = 0, _by_document(task, travelling)
    for document, stays in _by_document(task, staying).items():
        travels = blocks_of.get(document, travelling[:0])
        stays = stays[np.argsort(task.start[stays])]
        low, high = _bands(task, stays, travels)
        end = np.minimum(task.count[stays][:, None] - low, task.count[travels][None, :])
        end = np.maximum.accumulate(np.where(low <= high, end, 0), axis=0)
        counted = np.concatenate([np.zeros_like(end[:1]), end[:-1]])
        positions += int(np.maximum(end - np.maximum(np.maximum(-high, 0), counted), 0).sum())
    return positions


def _by_document(task: AttentionTask, blocks: IntArray) -> dict[int, IntArray]:
    """Some blocks by the document that they belong to: those of different documents never meet."""
    document = task.document[blocks]
    order = np.argsort(document, kind="stable")
    numbers, first = np.unique(document[order], return_index=True)
    return dict(zip(numbers.tolist(), np.split(blocks[order], first[1:]), strict=False))


def _bands(task: AttentionTask, staying: IntArray, travelling: IntArray) -> tuple[IntArray, IntArray]:
    """The bands of tiles as arrays (staying, travelling): i of what stays meets j when low <= i - j <= high."""
    if task.travellers == "keys":
        return task.bands(staying, travelling)
    low, high = task.bands(travelling, staying)
    return -high.T, -low.T
