"""Lower bounds of the time of a pass of a layer, of any kind, for every schedule of its task.

Softmax attention has its own module (`sim.bounds.attention`).

**Linear attention, compute.** All ranks together attend within all chunks, and compute what other chunks contribute to
each one: by applying a state to its positions, or from all their pairs. So the busiest one computes at least the
average.

**Linear attention, communication.** Take a rank whose chunk follows others. What one of those contributes to its
results comes in its results, computed elsewhere, or it is computed there, and then a state comes, or the keys of which
it is made. So its results come, or a state, or the keys of all chunks that it follows: at least the least of these.
Heads may come in different ways, but weigh alike in each. Backward it is the same with gradients of keys, of states,
and queries. These bytes take at least as long as the bandwidth of all links into the rank lets them, plus the lowest
latency of a route into it.

**Hybrids, compute.** All ranks together compute all layers, so the busiest one computes at least the average.

**Hybrids, layers.** Each layer takes at least the bound of its kind of attention. Bounds of layers are not added: a
rank may communicate for one layer while others compute another one. Re-layouts are no work that has to be done.
"""

from __future__ import annotations

import numpy as np

from sim.bounds.attention import attention_bound_s
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import ComputeRate, Machine, fastest
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.hybrid.relayout import RelayoutTask
from tasp_lab.schedules.hybrid.stack import layers_of
from tasp_lab.schedules.linear import task as linear
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.passes import receivers
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.topology.cuts import like
from tasp_lab.topology.graph import Topology


def layer_bound_s(machine: Machine, schedule: Schedule) -> Number:
    """Lower bound of the time of a pass of a layer or a hybrid in seconds, exact for exact numbers.

    0 for tasks of which no bound is known.
    """
    task = schedule.task
    if isinstance(task, LinearTask):
        return linear_bound_s(machine, task)
    if isinstance(task, AttentionTask):
        return attention_bound_s(machine, task, schedule.initial)
    if isinstance(task, StackedTask) and task.ranks is None and all(
        isinstance(each, AttentionTask | LinearTask | RelayoutTask) for each in task.layers
    ):  # fmt: skip
        return hybrid_bound_s(machine, schedule)
    return 0


def hybrid_bound_s(machine: Machine, schedule: Schedule) -> Number:
    """Lower bound of the time of a pass in seconds; exact for exact numbers.

    Two layers compute twice as long as one, if nothing else takes longer:

    >>> from fractions import Fraction
    >>> from tasp_lab.schedules.hybrid.stack import hybrid_schedules
    >>> from tasp_lab.machines.machine import ComputeRate
    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> mesh = full_mesh(2, Fraction(10**9), Fraction(0))
    >>> machine = Machine(mesh, compute=ComputeRate(Fraction(64)))
    >>> layers = [Workload(16, heads=1, head_dim=1, kind="hybrid", layers=each) for each in ("S", "SS")]
    >>> [hybrid_bound_s(machine, hybrid_schedules("lasp-2+ring-attention", mesh, each)[0]) for each in layers]
    [Fraction(8, 1), Fraction(16, 1)]
    """
    flops, bounds_s, rates = 0, dict[int, Number](), list[ComputeRate]()
    for task, initial in layers_of(schedule):
        assert isinstance(task, AttentionTask | LinearTask), "there are no other layers"
        rates.append(machine.rate_of(task.workload, task.passing))
        if isinstance(task, AttentionTask):
            flops += task.total_flops
            if id(task) not in bounds_s:
                bounds_s[id(task)] = attention_bound_s(machine, task, initial | task.owned(KEYS, QUERIES))
        else:
            flops += least_flops(task)
            if id(task) not in bounds_s:
                bounds_s[id(task)] = linear_bound_s(machine, task)
    compute_s = machine.least_compute_s(fastest(rates), flops)
    return max(compute_s, *bounds_s.values())


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
    return max(compute_s, _linear_communication_s(machine.topology, task))


def _linear_communication_s(topology: Topology, task: LinearTask) -> Number:
    """The largest of the bounds of single ranks."""
    layer = task.workload
    state_bytes = 4 * layer.batch * layer.kv_head_count * layer.head_dim**2
    result, source = (linear.KEY_GRADIENTS, linear.QUERIES) if task.is_backward else (linear.RESULTS, linear.KEYS)
    latency, into = topology.min_latencies_into_ranks_s, topology.bandwidths_into_ranks_bytes_per_s
    chunks = receivers(task)
    found: Number = 0
    for chunk, rank in zip(chunks.tolist(), task.owner[chunks].tolist(), strict=True):
        others = task.others(np.array([chunk]), back=task.is_backward)[1]
        sizes = task.block_bytes[task.block(source, others)]
        least = min(state_bytes, int(task.block_bytes[task.block(result, np.array([chunk]))][0]), int(sizes.sum()))
        found = max(found, like(topology, least / into[rank]) + latency[rank])
    return found
