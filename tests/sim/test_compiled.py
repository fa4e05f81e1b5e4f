"""Compiled or not, the event loop says the same to the last bit; and its queue is a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba.core import event

from sim.array import event_loop
from sim.array.event_loop import Record, Run
from sim.array.event_queue import EventQueue, pop, put, remove
from sim.array.flows import log_table
from sim.array.from_schedule import step_operations
from sim.array.quotient import MAX_PASSES, Program, program_of
from sim.array.symmetry import classes_of
from tasp_lab.core import compiled
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import CommLibrary, Compute, Machine
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.topology.graph import Topology
from tests.sim.test_array_engine import libraries
from tests.sim.test_backward_engine import backward_cases
from tests.sim.test_engine_against_reference import computes, gossip_cases

some = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def program(schedule: Schedule, machine: Machine) -> Program:
    operations = step_operations(schedule, machine, message_dependencies(schedule))
    return program_of(operations, classes_of(operations))


def run(program: Program, monkeypatch: pytest.MonkeyPatch, fast: bool) -> tuple[Record, float]:
    monkeypatch.setattr(event_loop, "LARGE", 0 if fast else 10**9)
    monkeypatch.setattr(event_loop, "MANY", 10**9)
    return Run(program).run(), Run(program).end_s()


def assert_equal(found: tuple[Record, float], expected: tuple[Record, float]) -> None:
    assert found[1] == expected[1] == expected[0].end_s.max(initial=0.0)
    for times, others in zip(found[0].times(), expected[0].times(), strict=True):
        assert (times == others).all()
    assert (found[0].waited_for == expected[0].waited_for).all()
    assert dict(found[0].bounds.items()) == dict(expected[0].bounds.items())


@some
@given(gossip_cases() | backward_cases(), libraries, computes)
def test_a_simulation_in_stages_is_the_same(
    monkeypatch: pytest.MonkeyPatch, case: tuple[Topology, Schedule], library: CommLibrary, compute: Compute
) -> None:
    found = program(case[1], Machine(case[0], library, compute))
    monkeypatch.setattr(event_loop, "STAGES", 1)
    whole = Run(found).run(), Run(found).end_s()
    for stages in (7, 10**6):
        monkeypatch.setattr(event_loop, "STAGES", stages)
        assert_equal((Run(found).run(), Run(found).end_s()), whole)


@some
@given(gossip_cases() | backward_cases(), libraries, computes)
def test_compiled_functions_say_what_python_says(
    monkeypatch: pytest.MonkeyPatch, case: tuple[Topology, Schedule], library: CommLibrary, compute: Compute
) -> None:
    found = program(case[1], Machine(case[0], library, compute))
    assert_equal(run(found, monkeypatch, fast=True), run(found, monkeypatch, fast=False))


def test_a_log_that_is_full_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = nodes(2, 4, "switch", "rails")
    found = program(collective("multi-ring", topology, 12345), Machine(topology, CommLibrary("t", 1e-6)))
    expected = run(found, monkeypatch, fast=False)
    monkeypatch.setattr("sim.array.flows.log_table", lambda rows: log_table(min(rows, 1)))
    assert_equal(run(found, monkeypatch, fast=False), expected)


def test_without_a_folder_to_keep_it_in_machine_code_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    njit: Callable[..., Any] = numba.njit

    def no_cache(cache: bool = False, **options: bool) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", no_cache)
    assert compiled.compiled.__wrapped__(_twice)(21) == 42


def _twice(number: int) -> int:
    return 2 * number


def test_a_route_of_too_many_constraints_is_refused() -> None:
    mesh = full_mesh(2)
    schedule = collective("ring", mesh, 8)
    operations = step_operations(schedule, Machine(mesh), message_dependencies(schedule))
    many = MAX_PASSES + 1
    operations.__dict__.update(
        constraints=np.arange(many),
        capacity_bytes_per_s=np.arange(1.0, many + 1),
        passing=np.zeros(many, dtype=np.int64),
        passed=np.arange(many),
    )
    with pytest.raises(ScheduleError, match="a transfer passes 63 links and shared capacities, expected at most 62"):
        program_of(operations, classes_of(operations))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20) | st.none()) | st.none()))
def test_a_queue_is_in_the_order_of_times(changes: list[tuple[int, int | None] | None]) -> None:
    """Entries and moves; an entry without a time leaves; and None: the first one leaves."""
    operations = compiled.table(10, due="f8", place="i4")
    operations["place"] = -1
    compiled.call(_replay, EventQueue.of(operations), list(changes), fast=False)


def _replay(queue: EventQueue, changes: list[tuple[int, int | None] | None]) -> None:
    expected: dict[int, int] = {}
    for change in changes:
        if change is None and expected:
            number = pop(queue)
            assert expected.pop(number) == min([*expected.values(), queue.operations[number].due])
        elif change is not None and change[1] is not None:
            put(queue, change[0], float(change[1]))
            expected[change[0]] = change[1]
        elif change is not None and change[0] in expected:
            remove(queue, change[0])
            del expected[change[0]]
    assert queue.size[0] == len(expected)
    assert all(queue.operations[number].due == due for number, due in expected.items())


def test_compilation_is_announced_once_and_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(event._registered, "numba:compile", [])  # other tests may have registered one
    compiled._announce_compilation.__wrapped__()
    numba.njit(_twice)(1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    numba.njit(_twice)(1)
    assert capsys.readouterr().err.count("compiling the simulator") == 1
    numba.njit(_twice)(1.0)
    assert capsys.readouterr().err == ""


def test_machine_code_is_loaded_for_small_programs_once_many_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    call = event_loop.call

    def noted(*arguments: Any, fast: bool) -> Any:
        used.append(fast)
        return call(*arguments, fast=False)

    mesh = full_mesh(3, 1.0, 0.0)
    small = program(collective("direct", mesh, 12), Machine(mesh))
    monkeypatch.setattr(event_loop, "call", noted)
    monkeypatch.setattr(event_loop, "MANY", 2 * small.plan.size)
    monkeypatch.setattr(Run, "_in_python", 0)
    for _ in range(5):
        Run(small).end_s()
    assert used == [False, False, False, True, True]
