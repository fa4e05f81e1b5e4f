"""Lower bound of the time of a pass of linear attention, for every schedule of the task.

**Compute.** All ranks together attend within all chunks, and compute what other chunks contribute to each one: by
applying a state to its positions, or from all their pairs. So the busiest one computes at least the average.

**Communication.** Take a rank whose chunk follows others. What one of those contributes to its results comes in its
results, computed elsewhere, or it is computed there, and then a state comes, or the keys of which it is made. So its
results come, or a state, or the keys of all chunks that it follows: at least the least of these. Heads may come in
different ways, but weigh alike in each. Backward it is the same with gradients of keys, of states, and queries. These
bytes take at least as long as the bandwidth of all links into the rank lets them, plus the lowest latency of a route
into it.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Machine
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.passes import receivers
from tasp_lab.schedules.linear.task import KEY_GRADIENTS, KEYS, QUERIES, RESULTS, LinearTask
from tasp_lab.topology.cuts import like
from tasp_lab.topology.graph import Topology


def linear_bound_s(machine: Machine, task: LinearTask) -> Number:
    """Lower bound of the time of a pass in seconds; exact for exact numbers.

    The second of two ranks gets a state of 64 bytes, less than the keys of the first or its results, at 8 bytes/s:

    >>> from fractions import Fraction
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> from tasp_lab.workload.sequence_layout import contiguous
    >>> layer = Workload(sequence=16, heads=1, head_dim=4, mask="causal", kind="linear")
    >>> mesh = full_mesh(2, Fraction(8), Fraction(1))
    >>> linear_bound_s(Machine(mesh), LinearTask(layer, contiguous(16, 2)))
    Fraction(9, 1)
    """
    compute_s = machine.least_compute_s(machine.rate_of(task.workload, task.passing), least_flops(task))
    return max(compute_s, _communication_s(machine.topology, task))


def _communication_s(topology: Topology, task: LinearTask) -> Number:
    """The largest of the bounds of single ranks."""
    layer = task.workload
    state_bytes = 4 * layer.batch * layer.kv_head_count * layer.head_dim**2
    result, source = (KEY_GRADIENTS, QUERIES) if task.is_backward else (RESULTS, KEYS)
    latency, into = topology.min_latencies_into_ranks_s, topology.bandwidths_into_ranks_bytes_per_s
    chunks = receivers(task)
    found: Number = 0
    for chunk, rank in zip(chunks.tolist(), task.owner[chunks].tolist(), strict=True):
        others = task.others(np.array([chunk]), back=task.is_backward)[1]
        sizes = task.block_bytes[task.block(source, others)]
        least = min(state_bytes, int(task.block_bytes[task.block(result, np.array([chunk]))][0]), int(sizes.sum()))
        found = max(found, like(topology, least / into[rank]) + latency[rank])
    return found
