"""The least time that any schedule of the same work takes on a machine, whatever the engines compute.

    bound_s = least_s(schedule, machine)
    check_time(schedule, machine, predicted_s)      # an assertion: no prediction may lie below the bound

Layers have the bounds of their kind (`sim.bounds.attention`, `sim.bounds.linear`), schedules without kernel calls that
of what enters each rank; collectives have stronger ones (`sim.bounds.collectives`). Of a hybrid:

**Compute.** All ranks together compute all layers, so the busiest one computes at least the average.

**Layers.** Each layer takes at least the bound of its kind of attention. Bounds of layers are not added: a rank may
communicate for one layer while others compute another one. Re-layouts are no work that has to be done.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from sim.bounds.attention import attention_bound_s
from sim.bounds.linear import linear_bound_s
from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import ComputeRate, Machine, fastest
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.hybrid.relayout import RelayoutTask
from tasp_lab.schedules.hybrid.stack import layers_of
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.topology.cuts import like

ROUNDING = 1e-9
"""By how much of itself a time in floating point may lie below its bound."""


def least_s(schedule: Schedule, machine: Machine) -> Number:
    """Lower bound of the time in seconds, for every schedule with the same task, start and end.

    Exact for exact numbers. A schedule without a task brings every block that a rank promises, and does not have
    complete at the start, into that rank. 0 for tasks of which no bound is known.
    """
    task = schedule.task
    if task is None:
        return _communication_s(schedule, machine)
    if isinstance(task, LinearTask):
        return linear_bound_s(machine, task)
    if isinstance(task, AttentionTask):
        return attention_bound_s(machine, task, schedule.initial)
    if isinstance(task, StackedTask) and task.ranks is None and all(
        isinstance(each, AttentionTask | LinearTask | RelayoutTask) for each in task.layers
    ):  # fmt: skip
        return hybrid_bound_s(machine, schedule)
    return 0


def check_time(schedule: Schedule, machine: Machine, time_s: Number) -> None:
    """Assert that a predicted time is possible: that no schedule of this work could be faster on the machine."""
    bound_s = least_s(schedule, machine)
    rounds = isinstance(time_s, float) or isinstance(bound_s, float)
    assert time_s >= (bound_s * (1 - ROUNDING) if rounds else bound_s), (
        f"schedule {schedule.name!r} on {machine.topology.name}: predicted {float(time_s)} s, "
        f"and nothing takes less than {float(bound_s)} s"
    )


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


def _communication_s(schedule: Schedule, machine: Machine) -> Number:
    topology, block_bytes = machine.topology, schedule.block_bytes
    if schedule.world_size == 1:
        return 0  # without a link
    into, latency = topology.bandwidths_into_ranks_bytes_per_s, topology.min_latencies_into_ranks_s
    part = None
    if schedule.initial_part is not None:
        part = np.broadcast_to(schedule.initial_part, schedule.initial.shape)
    is_float = isinstance(like(topology, Fraction(0)), float)
    found: Number = 0
    for rank in range(schedule.world_size):
        has = schedule.initial[rank] if part is None else schedule.initial[rank] & _is_whole(schedule, part[rank])
        if missing := int(block_bytes[np.flatnonzero(schedule.final[rank] > has)].sum()):
            transfer_s = missing / into[rank]
            found = max(found, (float(transfer_s) if is_float else transfer_s) + latency[rank])
    return found


def _is_whole(schedule: Schedule, part: IntArray) -> BoolArray:
    """Whether an initial copy of each block, of which a rank has this part, or all for -1, is complete."""
    found: BoolArray = (part < 0) | (schedule.blocks.parts == 1)
    return found
