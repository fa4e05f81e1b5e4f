"""Ranks that compute faster or slower than others: closed forms, and both engines say the same. Exact."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.array import engine as array_engine
from sim.event.engine import simulate
from sim.host import busy_s
from tasp_lab.machines.machine import CommLibrary, ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.simulations import attention_cases, factors, rates

some = settings(max_examples=20)
seconds = st.fractions(Fraction(1, 20), Fraction(20), max_denominator=20)


def layer(positions: int) -> Workload:
    """4 FLOPs per pair, and 4 bytes of keys and values per position."""
    return Workload(positions, head_dim=1, heads=1, mask="full")


@given(st.integers(2, 7), st.integers(0, 6), st.integers(1, 3), seconds, st.fractions(Fraction(1, 9), 1), factors)
def test_a_ring_waits_for_its_slowest_rank(
    n: int, slow: int, length: int, call_s: Fraction, ratio: Fraction, speed: Fraction
) -> None:
    """Where hops take no longer than calls, T = n calls of the slowest rank: it never waits for keys."""
    speeds = tuple(min(speed, 1) if rank == slow % n else Fraction(1) for rank in range(n))
    topology = full_mesh(n, 4 * length / (call_s * ratio), Fraction(0))
    machine = Machine(topology, compute=ComputeRate(4 * length**2 / call_s), rank_speeds=speeds)
    schedule = attention("ring-attention", topology, layer(n * length))
    assert simulate(schedule, machine).time_s == n * call_s / min(speeds)
    assert busy_s(schedule, machine.compute, machine.rank_speeds) == [n * call_s / each for each in speeds]


@some
@given(attention_cases(), rates, factors)
def test_equal_speeds_are_another_rate(case: tuple[Topology, Schedule], compute: ComputeRate, speed: Fraction) -> None:
    topology, schedule = case
    machine = Machine(topology, CommLibrary("plain", Fraction(1, 7)), compute)
    slowed = replace(machine, rank_speeds=(speed,) * topology.world_size)
    rate = compute.flops_per_s
    scaled = replace(machine, compute=ComputeRate(None if rate is None else rate * speed))
    assert simulate(schedule, slowed).time_s == simulate(schedule, scaled).time_s
    assert array_engine.run(schedule, slowed).time_s == pytest.approx(
        array_engine.run(schedule, scaled).time_s, rel=1e-12
    )


def test_ranks_of_equal_speed_stay_alike() -> None:
    """One slow rank tells all ranks of a ring apart, equal speeds tell none."""
    topology = full_mesh(6, 7.0, 0.5)
    schedule = attention("ring-attention", topology, layer(360))
    machine = Machine(topology, compute=ComputeRate(4000.0))
    same = replace(machine, rank_speeds=(Fraction(1, 2),) * 6)
    one = replace(machine, rank_speeds=(Fraction(1, 2), *(Fraction(1),) * 5))
    classes = [array_engine.run(schedule, each).classes for each in (machine, same, one)]
    assert classes[0] == classes[1] < classes[2]
