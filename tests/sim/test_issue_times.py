"""Nothing starts before its host has issued it, in program order, in both engines."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.host import issue_times, messages_under
from sim.simulate import simulate
from tasp_lab.core.units import Number
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.host import INSTANT_HOST, Batches, HostModel
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.dependencies import dependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.timeline.critical_path import critical_path
from tasp_lab.timeline.events import SEND, Timeline
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.workload.layer import Workload
from tests.support.simulations import Simulation, host_models, registered_cases, simulations

seconds = st.fractions(Fraction(0), Fraction(3), max_denominator=8)


issued = simulations(registered_cases(), hosts=host_models, lanes=1)
"""Passes of layers under a host model; calls of a rank on one lane."""


def first_alike(schedule: Schedule, block: int) -> int:
    """The first kind that differs from that of a block in the number of heads at most; of stacks its own one."""
    kind = int(schedule.blocks.kind[block])
    names = [each.name for each in schedule.blocks.kinds]
    return names.index(names[kind]) if isinstance(schedule.task, AttentionTask) else kind


def host_clocks(schedule: Schedule, host: HostModel) -> dict[tuple[object, ...], Fraction]:
    """When each rank has issued each batch (rank, step, kind) and its last call of a step: a clock per rank."""
    clock: dict[int, Fraction] = defaultdict(Fraction)
    issued = {}
    assert schedule.task is not None
    for index, step in enumerate(schedule.steps):
        rows = list(step.rows())
        for kind in range(len(schedule.blocks.kinds)):
            posts = {end for source, destination, _, block in rows for end in (source, destination)
                     if host.batches == "step" or first_alike(schedule, block) == kind}  # fmt: skip
            for rank in posts if kind == 0 or host.batches == "kind" else ():
                clock[rank] += Fraction(host.batch_s)
                issued[rank, index, kind] = clock[rank]
        for calls in step.calls:
            for rank in calls.rank.tolist():
                clock[rank] += Fraction(host.of_call_s(schedule.task.passing))
                issued[rank, index, "calls"] = clock[rank]
    return issued


def check_order(timeline: Timeline, schedule: Schedule, host: HostModel) -> None:
    """Check every event against the clocks of hosts; of several calls in a step, the last one."""
    issued, last_call = host_clocks(schedule, host), {}
    for event in timeline.events:
        if event.kind == SEND:
            kind = first_alike(schedule, event.block) if host.batches == "kind" else 0
            assert event.start_s >= max(issued[rank, event.step, kind] for rank in (event.rank, event.peer))
        else:
            key = event.rank, event.step
            last_call[key] = max(last_call.get(key, 0), event.start_s)
    for (rank, step), start_s in last_call.items():
        assert start_s >= issued[rank, step, "calls"]


@settings(max_examples=60, deadline=None)
@given(issued)
def test_nothing_starts_before_both_hosts_have_issued_it(case: Simulation) -> None:
    schedule, machine = case
    check_order(simulate(schedule, machine, "simpy"), schedule, machine.host)


@settings(max_examples=20, deadline=None)
@given(issued, st.sampled_from(["simpy", "array"]))
def test_a_host_that_takes_no_time_changes_nothing(case: Simulation, engine: str) -> None:
    schedule, machine = case
    instant = replace(machine, host=HostModel("instant"))
    without = replace(machine, host=INSTANT_HOST)
    assert simulate(schedule, instant, engine) == simulate(schedule, without, engine)  # type: ignore[arg-type]


shares = st.fractions(Fraction(1, 8), Fraction(1), max_denominator=8)


@given(st.integers(1, 6), seconds.filter(bool), seconds, shares, shares)
def test_a_ring_bound_by_its_host_takes_n_calls_and_n_less_one_batches(
    n: int, call_s: Fraction, batch_s: Fraction, hop: Fraction, kernel: Fraction
) -> None:
    """T = n c + (n-1) b + K where neither a hop nor a kernel call K takes longer than the host's time c for a call."""
    kernel_s = kernel * call_s
    topology = ring(n, 4 / (hop * call_s), Fraction(0))
    machine = Machine(topology, compute=ComputeRate(4 / kernel_s), host=HostModel("host", call_s, call_s, batch_s))
    schedule = attention("ring-attention", topology, Workload(n, head_dim=1, heads=1, mask="full"))
    assert simulate(schedule, machine, "simpy").time_s == n * call_s + (n - 1) * batch_s + kernel_s


@pytest.mark.parametrize("batches", ["step", "kind"])
@pytest.mark.parametrize("separate", [(), ("forward", "backward")])
def test_hosts_issue_uneven_heads_as_they_issue_even_ones(batches: Batches, separate: tuple[str, ...]) -> None:
    """4, 4, 3 and 3 heads, or 2, 2 and 1, are of two kinds, but messages of a tensor are one batch and one message."""
    host = HostModel("host", 1e-3, 1e-3, 1e-4, batches, separate=separate)
    for n, uneven, even in ((4, 14, 16), (3, 5, 6)):
        found = []
        for heads in (uneven, even):
            layer = Workload(6 * n, heads=heads, head_dim=2, mask="full")
            machine = Machine(full_mesh(n, 50e9, 1e-6), compute=ComputeRate(300e12), host=host)
            for schedule in attention_schedules("ulysses", machine.topology, layer, None, AttentionOptions("both")):
                derived = messages_under(schedule, machine)
                issued = issue_times(schedule, derived, host)
                assert issued is not None
                found.append([issued.of(each) for each in range(len(issued.number))])
        assert found[:2] == found[2:]


def test_collectives_are_calls_of_their_library() -> None:
    mesh = full_mesh(4, 50e9, 1e-6)
    schedule = collective("multi-ring", mesh, 2**20)
    slow = Machine(mesh, host=HostModel("host", 1.0, 1.0, 1.0))
    for engine in ("simpy", "array"):
        assert simulate(schedule, slow, engine).time_s == simulate(schedule, Machine(mesh), engine).time_s  # type: ignore[arg-type]


def test_a_path_that_begins_at_the_host_explains_all_of_the_time() -> None:
    mesh = full_mesh(4, 50e9, 1e-6)
    machine = Machine(mesh, compute=ComputeRate(300e12), host=HostModel("host", 1e-3, 1e-3, 1e-4))
    schedule = attention("zigzag-ring-attention", mesh, Workload(1024, mask="causal"))
    for engine in ("simpy", "array"):
        timeline = simulate(schedule, machine, engine, explain=True)  # type: ignore[arg-type]
        path = critical_path(timeline)
        assert path[0] == ("host", pytest.approx(4 * 1e-3 + 3 * 1e-4))
        assert sum(float(spent_s) for _, spent_s in path) == pytest.approx(float(timeline.time_s))


@given(st.integers(1, 6), st.booleans(), seconds.filter(bool), seconds.filter(bool))
def test_without_priority_a_ring_adds_up_its_hops_and_calls(
    n: int, overlaps: bool, call_s: Fraction, hop_s: Fraction
) -> None:
    """T = K + (n-1) max(K, C) beside each other, K + (n-1) (K + C) one after the other."""
    topology = ring(n, 4 / hop_s, Fraction(0))
    machine = Machine(topology, compute=ComputeRate(4 / call_s), host=HostModel("one stream", overlaps=overlaps))
    schedule = attention("ring-attention", topology, Workload(n, head_dim=1, heads=1, mask="full"))
    step_s = max(call_s, hop_s) if overlaps else call_s + hop_s
    assert simulate(schedule, machine, "simpy").time_s == call_s + (n - 1) * step_s


@settings(max_examples=30, deadline=None)
@given(issued)
def test_messages_that_do_not_overlap_follow_the_calls_on_their_block(case: Simulation) -> None:
    schedule, machine = case
    serial = replace(machine.host, overlaps=False)  # calls at a rate are handed out when they end
    exact = simulate(schedule, replace(machine, host=serial, compute=ComputeRate(10_000), contention=NONE), "simpy")
    derived = dependencies(schedule)
    reads = {(int(derived.calls.rank[call]), int(derived.calls.step[call]), int(block))
             for call, block in zip(derived.calls.reads.owner, derived.calls.reads.block, strict=True)}  # fmt: skip
    ends: dict[tuple[int, int], Number] = {}
    for event in exact.events:
        if event.kind != SEND:
            ends[event.rank, event.step] = max(ends.get((event.rank, event.step), 0), event.end_s)
    for event in exact.events:
        if event.kind == SEND and any((event.rank, event.step, block) in reads for block in event.blocks):
            assert event.start_s >= max(ends.get((end, event.step), 0) for end in (event.rank, event.peer))
