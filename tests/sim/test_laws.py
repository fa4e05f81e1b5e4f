"""Laws of every simulation, whatever is simulated on whatever machine: `tests.support.simulations` draws both.

Both engines say the same of every event; a naive third implementation agrees exactly; machine code, stages and classes
of equal operations change nothing; all bytes and FLOPs are there, no bound is beaten, and every wait has its reason.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from math import inf
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.array import event_loop, max_min
from sim.array.engine import time_s
from sim.array.from_schedule import step_operations
from sim.array.symmetry import classes_of
from sim.bounds.collectives import all_gather_bound_s
from sim.bounds.least import least_s
from sim.bounds.schedules import rates_within
from sim.event.engine import simulate as simulate_events
from sim.simulate import Engine, simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.host import INSTANT_HOST
from tasp_lab.machines.machine import CommLibrary, ComputeRate, Machine
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, attention_passes
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.kinds import busbw_bytes_per_s
from tasp_lab.timeline.events import SEND, Event
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.sim.test_array_symmetry import counted_by_hand
from tests.sim.test_compiled import assert_equal, program, run
from tests.support.contention import ChannelsByPair, channels
from tests.support.reference import reference_times
from tests.support.schedules import assert_every_transfer_once
from tests.support.simulations import CASES, Simulation, assert_agree, launches, simulations

every_kind = pytest.mark.parametrize("kind", CASES)
some = settings(max_examples=25, deadline=None)
few = settings(max_examples=20, deadline=None)
ENGINES: tuple[Engine, ...] = ("simpy", "array")


@every_kind
@some
@given(data=st.data())
def test_both_engines_agree_on_every_event_and_lose_nothing(kind: str, data: st.DataObject) -> None:
    lanes = data.draw(st.sampled_from([1, 3]))
    schedule, machine = data.draw(simulations(CASES[kind], lanes=lanes))
    timeline = assert_agree(schedule, machine)
    assert sum(event.bytes for event in timeline.events) == schedule.bytes_sent().sum()
    assert sum(event.flops for event in timeline.events) == (schedule.flops().sum() if schedule.task else 0)
    if lanes == 1:  # several calls at once, each at the rate of a rank, would beat it
        assert least_s(schedule, machine) <= timeline.time_s


@every_kind
@some
@given(data=st.data())
def test_a_naive_implementation_agrees_on_every_start_and_end(kind: str, data: st.DataObject) -> None:
    schedule, drawn = data.draw(simulations(CASES[kind], hosts=st.just(INSTANT_HOST)))
    assume(schedule.transfers + sum(len(calls) for step in schedule.steps for calls in step.calls) <= 120)
    library = ChannelsByPair("channels", data.draw(launches))
    contention = replace(drawn.contention, waits=0)
    machine = Machine(drawn.topology, library, drawn.compute, contention=contention)
    events = simulate_events(schedule, machine).events
    sends = {(e.step, e.rank, e.peer, e.lane, e.blocks): (e.start_s, e.end_s) for e in events if e.kind == SEND}
    calls = defaultdict(list)
    for e in events:
        if e.kind != SEND:
            calls[e.rank].append((e.step, (e.start_s, e.end_s)))
    expected, spans = reference_times(
        schedule, machine.topology, library.launch_s, machine.compute, contention, channels
    )
    assert sends == expected
    assert {rank: sorted(each) for rank, each in calls.items()} == {rank: sorted(each) for rank, each in spans.items()}
    assert_every_transfer_once(events, schedule)
    for event in events:
        if event.kind == SEND:
            under = (
                machine.topology.constraints[index].name
                for index in machine.topology.route(event.rank, event.peer).constraints
            )
            assert event.bound_by in {*under, "latency", "launch"}
        check_reason(event, events, machine.topology)


def check_reason(event: Event, events: tuple[Event, ...], topology: Topology) -> None:
    """What an event waited for was over at the very moment at which it started."""

    def left_s(send: Event) -> object:
        return send.end_s - topology.route(send.rank, send.peer).latency_s

    def is_over(other: Event) -> bool:
        if other is event:
            return False
        match event.waited_for:
            case "block":  # arrives, or becomes whole by a call of the rank
                arrives = other.peer == event.rank and bool({*other.blocks} & {*event.blocks} or event.kind != SEND)
                return other.end_s == event.start_s and (arrives or (other.kind != SEND and other.rank == event.rank))
            case "lane":
                return (other.rank, other.lane) == (event.rank, event.lane) and left_s(other) == event.start_s
            case "compute":
                return other.kind != SEND and other.rank == event.rank and other.end_s == event.start_s
            case "buffer":
                # Of the peer: read by a call, sent on, or joined by what arrives. Or a sum of the rank itself, to which
                # something came that was joined once an earlier send of the same sum had left.
                owner = event.peer if event.kind == SEND else event.rank
                is_of_it = other.rank == event.rank and bool({*other.blocks} & {*event.blocks})
                if other.kind == SEND and (other.rank == owner or is_of_it) and left_s(other) == event.start_s:
                    return True
                return owner in (other.rank, other.peer) and other.end_s == event.start_s
        raise AssertionError(event.waited_for)

    assert event.start_s == 0 if event.waited_for == "" else any(map(is_over, events)), event


def test_a_sum_leaves_once_what_came_to_it_is_joined_behind_an_earlier_send() -> None:
    """Rank 1 sends its sum on from 10 to 20; what rank 3 has sent by 10 is joined then, and may leave."""
    step_by_step = [[(0, 1, 0, 0, True)], [(1, 2, 1, 0, True)], [(3, 1, 0, 0, True), (2, 0, 0, 0, True)],
                    [(1, 0, 0, 0, True)]]  # fmt: skip
    blocks, mesh = Blocks.of_sums(np.array([1]), 4), full_mesh(4, Fraction(1, 10), Fraction(0))
    everywhere, at_first, parts = np.ones((4, 1), dtype=bool), np.eye(4, 1, dtype=bool), np.array([[1], [0], [2], [3]])
    steps = [Step.of(rows) for rows in step_by_step]
    schedule = Schedule("sums", 4, 2, blocks, everywhere, at_first, steps, initial_part=parts)
    events = simulate_events(schedule, Machine(mesh)).events
    last = next(each for each in events if each.step == 3)
    assert (last.start_s, last.waited_for) == (20, "buffer")
    for event in events:
        check_reason(event, events, mesh)


@settings(max_examples=100, deadline=None)
@given(simulations())
def test_machine_code_and_stages_change_no_bit(case: Simulation) -> None:
    found = program(*case)
    with pytest.MonkeyPatch.context() as patch:
        expected = run(found, patch, fast=False)
        assert_equal(run(found, patch, fast=True), expected)
        for stages in (1, 7, 10**6):
            patch.setattr(event_loop, "STAGES", stages)
            assert_equal(run(found, patch, fast=False), expected)


@settings(max_examples=100, deadline=None)
@given(simulations())
def test_classes_are_equitable(case: Simulation) -> None:
    schedule, machine = case
    operations = step_operations(schedule, machine, message_dependencies(schedule))
    assert counted_by_hand(operations, classes_of(operations))


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_runs_are_identical(engine: Engine) -> None:
    cluster, star = nodes(2, 4, "switch", "rails"), switch(6)
    layer = Workload(77, heads=2, kv_heads=1, mask="causal")
    cases = [(cluster, collective("multi-ring", cluster, 12345)), (star, attention("tasp", star, layer, buffers=3))]
    cases += [(star, attention_passes("tasp", star, layer, dataflow=dataflow).backward) for dataflow in DATAFLOWS]
    for topology, schedule in cases:
        machine = Machine(topology, CommLibrary("test", 1e-6), ComputeRate(1e9))
        assert len({simulate(schedule, machine, engine).events for _ in range(10)}) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_one_rank_needs_no_time(engine: Engine) -> None:
    alone = full_mesh(1)
    for name in ("ring", "multi-ring", "direct", "trees"):
        timeline = simulate(collective(name, alone, 5), Machine(alone), engine)
        assert (timeline.time_s, timeline.events) == (0, ())
    assert all_gather_bound_s(alone, 5) == 0
    assert busbw_bytes_per_s(1, 5, 0) == 0


def test_messages_and_calls_beyond_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = full_mesh(4)
    schedule = attention("ring-attention", mesh, Workload(8, head_dim=1, heads=1, mask="full"))
    monkeypatch.setattr("sim.event.engine.MAX_TRANSFERS", 28)
    assert len(simulate_events(schedule, Machine(mesh)).events) == 28
    monkeypatch.setattr("sim.event.engine.MAX_TRANSFERS", 27)
    with pytest.raises(ScheduleError, match=r"has 12 transfers and 16 kernel calls; this engine keeps .* at most 27"):
        simulate_events(schedule, Machine(mesh))


@every_kind
@some
@given(data=st.data())
def test_times_hardly_differ_where_constraints_of_many_are_nearly_filled(kind: str, data: st.DataObject) -> None:
    schedule, machine = data.draw(simulations(CASES[kind]))
    with patch.object(event_loop, "FEW", inf):
        exact_s = time_s(schedule, machine)
        with patch.object(max_min, "MANY", 2):
            nearly_s = time_s(schedule, machine)
    with patch("sim.bounds.schedules.MANY", 2):
        within = rates_within(schedule, machine)
    assert nearly_s == pytest.approx(exact_s, rel=within or 1e-12)
