"""The bound of a hybrid: no schedule of the stack is faster, and it is that of its layers where these are all alike."""

from __future__ import annotations

from fractions import Fraction

import pytest

from sim.bounds.layers import attention_bound_s, hybrid_bound_s, linear_bound_s
from sim.simulate import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import attention_schedules, hybrid_schedules, linear_schedules
from tasp_lab.schedules.linear.flops import least_flops
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

LAYER = Workload(96, heads=4, head_dim=4, mask="causal", kind="hybrid", layers="LSSL", decay="scalar")
MACHINES = [(Fraction(1), Fraction(10**9)), (Fraction(10**6), Fraction(100)), (Fraction(1000), Fraction(10**5))]


@pytest.mark.parametrize(("bandwidth", "rate"), MACHINES)
def test_the_bound_is_the_greater_of_all_compute_and_of_the_worst_layer(bandwidth: Fraction, rate: Fraction) -> None:
    mesh = full_mesh(4, bandwidth, Fraction(1, 100))
    machine = Machine(mesh, compute=ComputeRate(rate))
    (softmax,) = attention_schedules("tasp", mesh, LAYER.of("S"))
    (linear,) = linear_schedules("lasp-2", mesh, LAYER.of("L"))
    assert isinstance(softmax.task, AttentionTask)
    assert isinstance(linear.task, LinearTask)
    (stack,) = hybrid_schedules("lasp-2+tasp", mesh, LAYER)
    worst_s = max(attention_bound_s(machine, softmax.task), linear_bound_s(machine, linear.task))
    flops = 2 * (int(softmax.flops().sum()) + least_flops(linear.task))
    assert hybrid_bound_s(machine, stack) == max(worst_s, -(-flops // 4) / rate)


def test_one_layer_has_its_own_bound() -> None:
    mesh = full_mesh(4, Fraction(1000), Fraction(1, 100))
    machine = Machine(mesh, compute=ComputeRate(Fraction(10**5)))
    for letter, name in (("L", "lasp-2"), ("S", "tasp")):
        layer = Workload(96, heads=4, head_dim=4, mask="causal", kind="hybrid", layers=letter)
        (stack,) = hybrid_schedules("lasp-2+tasp", mesh, layer)
        build = {"L": linear_schedules, "S": attention_schedules}[letter]
        (alone,) = build(name, mesh, layer.of(letter))
        task = alone.task
        own = attention_bound_s(machine, task) if isinstance(task, AttentionTask) else linear_bound_s(machine, task)  # type: ignore[arg-type]
        assert hybrid_bound_s(machine, stack) == own
        assert simulate(stack, machine).time_s == simulate(alone, machine).time_s
