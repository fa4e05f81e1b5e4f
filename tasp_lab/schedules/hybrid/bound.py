"""Lower bound of the time of a pass of a hybrid, for every schedule whose blocks start where this one has them.

**Compute.** All ranks together compute all layers, so the busiest one computes at least the average.

**Layers.** Each layer takes at least the bound of its kind of attention. Bounds of layers are not added: a rank may
communicate for one layer while others compute another one. Re-layouts are no work that has to be done.
"""

from __future__ import annotations

from tasp_lab.core.units import Number
from tasp_lab.machines.machine import ComputeRate, Machine, fastest
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.bound import attention_bound_s
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.hybrid.stack import layers_of
from tasp_lab.schedules.linear.bound import least_flops, linear_bound_s
from tasp_lab.schedules.linear.task import LinearTask


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
