"""A run that is repeated with other libraries predicts what a simulation from scratch predicts."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tasp_lab
from sim.array import engine as array_engine
from sim.array import repeated
from sim.array.repeated import RepeatedRun, RepeatedRuns
from sim.event import engine
from sim.simulate import simulate, times_on
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.machines.parameters import Change, changed
from tasp_lab.machines.profile import load_profile
from tasp_lab.machines.sampling import Sampling, machine_samples
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.inputs import chosen_machine, with_host
from tasp_lab.prediction.question import Question
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, collective
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import library_schedule
from tasp_lab.study.evaluate import group_rows
from tasp_lab.study.point import Point
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.simulations import Case, Library, PatientLibrary, collective_cases, gossip_cases, launches

some = settings(max_examples=60)
limits = st.none() | st.fractions(Fraction(1, 4), Fraction(20), max_denominator=6)
overheads = st.sampled_from([Fraction(0), Fraction(1, 3)])
alike = st.one_of(
    st.lists(st.builds(lambda launch_s: CommLibrary("plain", launch_s), launches), min_size=2, max_size=4),
    *(
        st.lists(st.builds(kind, st.just("library"), launches, limits, overheads), min_size=2, max_size=4)
        for kind in (Library, PatientLibrary)
    ),
)
"""Libraries that differ in constants alone."""


@some
@given(collective_cases() | gossip_cases(), alike)
def test_a_run_with_other_libraries_is_a_simulation_from_scratch(case: Case, libraries: list[CommLibrary]) -> None:
    topology, schedule = case
    assume(schedule.transfers <= 400)
    machines = [Machine(topology, library) for library in libraries]
    run = RepeatedRun(schedule, machines[0])
    for machine in [*machines, machines[0]]:
        expected_s = float(engine.simulate(schedule, machine).time_s)
        assert run.time_s(machine) == pytest.approx(expected_s, rel=1e-9)


@some
@given(
    st.sampled_from([("h100", "2x4"), ("h100", "8"), ("mi300x", "4"), ("h100", "3x2-rails")]),
    st.sampled_from(["all_gather", "all_reduce", "reduce_scatter", "alltoall", "sendrecv"]),
    st.integers(10, 30),
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 1)), min_size=1, max_size=3),
)
def test_members_of_a_family(
    member: tuple[str, str], name: NcclTestsName, power: int, factors: list[tuple[float, float]]
) -> None:
    """Slow rings saturate no link and fast ones do, short messages have other protocols than long ones."""
    profile = load_profile(member[0])
    machine = profile.machine(member[1], "member")
    assert machine is not None
    schedule = library_schedule(name, machine.topology, 2**power)
    run = RepeatedRun(schedule, machine)
    for rate, payload in factors:
        factors_of = {
            "ring_rate": rate, "link_payload": payload, "link_many_payload": payload, "message_launch": 1 / rate
        }  # fmt: skip
        changes = {each: Change(factor) for each, factor in factors_of.items() if each in profile.parameters}
        library = profile.system(member[1]).comm_library(changed(profile.parameters, changes).numbers)
        other = replace(machine, comm_library=library)
        assert run.time_s(other) == pytest.approx(array_engine.run(schedule, other).time_s, rel=1e-9)


def test_each_set_of_messages_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = full_mesh(4, 1.0, 0.0)
    one, two = ([Machine(mesh, CommLibrary(name, launch_s)) for launch_s in (0, 1)] for name in "ab")
    run = RepeatedRun(collective("ring", mesh, 8), one[0])
    first = [run.time_s(machine) for machine in one]
    monkeypatch.setattr(RepeatedRun, "_program", None)
    assert [run.time_s(machine) for machine in two] == first == [24, 27]


def test_a_topology_without_the_links_is_refused() -> None:
    with pytest.raises(ScheduleError):
        RepeatedRun(collective("ring", full_mesh(4, 1.0, 0.0), 8), Machine(full_mesh(3, 1.0, 0.0)))


@some
@given(
    st.sampled_from([("h100", "2x4"), ("h100", "8"), ("mi300x", "4"), ("h100", "3x2-rails")]),
    st.sampled_from(["all_gather", "all_reduce", "reduce_scatter", "alltoall", "sendrecv"]),
    st.lists(st.integers(10, 30), min_size=1, max_size=4),
    st.floats(0.01, 100),
)
def test_schedules_of_several_sizes_take_what_each_takes_alone(
    member: tuple[str, str], name: NcclTestsName, powers: list[int], factor: float
) -> None:
    """Rings that are computed together, and messages that are not."""
    profile = load_profile(member[0])
    system, parameters = profile.system(member[1]), profile.parameters
    machine = Machine(system.topology(parameters.numbers), system.comm_library(parameters.numbers))
    schedules = [library_schedule(name, machine.topology, 2**power) for power in powers]
    runs = RepeatedRuns.of(schedules, machine)
    changes = {each: Change(factor) for each in ("ring_rate", "base_ll", "message_launch") if each in parameters}
    other = replace(machine, comm_library=system.comm_library(changed(parameters, changes).numbers))
    expected_s = [array_engine.run(schedule, other).time_s for schedule in schedules]
    assert runs.times_s(other) == pytest.approx(expected_s, rel=1e-9)


def test_a_prediction_of_six_rings_takes_few_calls() -> None:
    """A fit makes thousands of them: at most 150 Python calls each, from numbers to seconds."""
    profile = load_profile("h100")
    system, parameters = profile.system("8"), profile.parameters
    machine = Machine(system.topology(parameters.numbers), system.comm_library(parameters.numbers))
    sizes = [2**power for power in range(18, 30, 2)]
    runs = RepeatedRuns.of([library_schedule("all_gather", machine.topology, size) for size in sizes], machine)
    runs.times_s(machine)  # the library's choice for each size is made once
    calls = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        numbers = changed(parameters, {"ring_rate": Change(0.9), "base_ll": Change(0, 8e-6)}).numbers
        found = runs.times_s(replace(machine, comm_library=system.comm_library(numbers)))
    finally:
        sys.setprofile(None)
    assert len(found) == 6
    assert len(calls) <= 150, calls


@some
@given(
    st.sampled_from(["h100-4", "mi300x-4", "h100-2x2"]),
    st.sampled_from(["tasp", "zigzag-ring-attention", "ulysses", "kv-all-gather"]),
    st.sampled_from(["", "zigzag-ring-attention"]),
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=2),
)
def test_layers_on_samples_take_what_each_takes_alone(
    name: str, schedule: str, host: str, factors: list[float]
) -> None:
    """Messages with channels slow kernel calls, and hosts issue both; the event engine is the specification."""
    machine = with_host(load_machine(name), load_stack("ring-flash-attn").host(host))
    layer = Workload(4096, heads=8, mask="causal")
    passes = build_schedules(schedule, machine.topology, layer, None, AttentionOptions("both"))
    drawn = machine_samples(machine, Sampling(len(factors))).machines
    samples = [replace(each, compute=each.compute.scaled(factor)) for each, factor in zip(drawn, factors, strict=True)]
    assert samples
    expected_s = [[float(engine.simulate(each, sample).time_s) for each in passes] for sample in samples]
    assert times_on(samples, passes).ravel() == pytest.approx(np.ravel(expected_s), rel=1e-9)


def test_what_waits_for_what_is_found_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    derive = repeated.operations_of

    def count(schedule: Schedule, machine: Machine) -> Any:
        found.append(schedule.name)
        return derive(schedule, machine)

    monkeypatch.setattr(repeated, "operations_of", count)
    answer = tasp_lab.predict("h100-4", ["tasp", "ulysses"], Workload(4096, heads=8, mask="full"), samples=32)
    assert [len(each.interval.samples_s) for each in answer if each.interval is not None] == [32, 32]
    assert found == ["tasp", "ulysses"]


def test_machines_that_differ_in_more_than_numbers_are_simulated_one_by_one() -> None:
    fast, slow = full_mesh(4, 2.0, 0.0), full_mesh(4, 1.0, 0.0)
    assert times_on([Machine(fast), Machine(slow)], [collective("ring", fast, 8)]).tolist() == [[12], [24]]


EAGER = with_host(load_machine("h100-4"), load_stack("ring-flash-attn").host("zigzag-ring-attention"))
"""Its hosts take time."""

VARIANTS = [
    *(Question(name, "", 0, overrides=overrides) for name in ("h100-4", "mi300x-4", "h100-2x2")
      for overrides in ((), ("link.bandwidth=x0.1",), ("link.latency=x7",), ("rank.0.link.bandwidth=x0.5",))),
    Question("h200-4", "", 0), Question("b200-4", "", 0, contention=False), Question("h100-4", "", 0, library="ideal"),
    Question(EAGER, "", 0), Question("h100-4", "", 0, compute=1e15),
]  # fmt: skip
"""Machines of four ranks: they differ in numbers, or in links, routes, contention, library or host, too."""


@some
@given(
    st.lists(st.sampled_from(VARIANTS), min_size=2, max_size=5),
    st.sampled_from(["tasp", "zigzag-ring-attention", "ulysses", "kv-all-gather", "usp:2x2"]),
)
def test_a_schedule_on_one_machine_after_another_takes_what_it_takes_on_each(
    drawn: list[Question], schedule: str
) -> None:
    layer = Workload(4096, heads=8, mask="causal")
    passes = build_schedules(schedule, full_mesh(4), layer, None, AttentionOptions("both"))
    for machine in (chosen_machine(each.machine, each) for each in [*drawn, *drawn[::-1]]):
        expected_s = [float(engine.simulate(each, machine).time_s) for each in passes]
        assert [simulate(each, machine, events=False).time_s for each in passes] == pytest.approx(expected_s, rel=1e-9)


def test_what_waits_for_what_is_found_once_for_machines_that_differ_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    derive = repeated.operations_of

    def count(schedule: Schedule, machine: Machine) -> Any:
        found.append(machine.topology.name)
        return derive(schedule, machine)

    monkeypatch.setattr(repeated, "operations_of", count)
    layer = Workload(4096, heads=8, mask="causal")
    alike = [(name, set_) for name in ("h100-4", "h200-4", "b200-4") for set_ in ((), ("link.bandwidth=x0.5",))]
    points = [Point(name, "ulysses", layer, overrides=each) for name, each in (*alike, ("mi300x-4", ()), *alike)]
    rows = [row for row in group_rows(points) if not isinstance(row, str)]
    assert len({row["time_s"] for row in rows}) == len(alike) + 1
    assert found == ["h100-4", "mi300x-4"], "a mesh and a switch have other routes"
