"""Compiled or not, the event loop says the same to the last bit; and its queue is a queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.array import event_loop
from sim.array.event_loop import Record, Run
from sim.array.event_queue import EventQueue, pop, put, remove
from sim.array.flows import log_table
from sim.array.from_schedule import step_operations
from sim.array.quotient import MAX_PASSES, Program, program_of
from sim.array.symmetry import classes_of
from tasp_lab.core import compiled
from tasp_lab.core.assembly import Struct
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.schedule.messages import message_dependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh, nodes

some = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def program(schedule: Schedule, machine: Machine) -> Program:
    operations = step_operations(schedule, machine, message_dependencies(schedule))
    return program_of(operations, classes_of(operations))


def run(program: Program, monkeypatch: pytest.MonkeyPatch, fast: bool) -> tuple[Record, float]:
    monkeypatch.setattr(event_loop, "FEW", -1 if fast else 10**9)
    monkeypatch.setattr(Run, "_in_python", 0)
    return Run(program).run(), Run(program).end_s()


def assert_equal(found: tuple[Record, float], expected: tuple[Record, float]) -> None:
    assert found[1] == expected[1] == expected[0].end_s.max(initial=0.0)
    for times, others in zip(found[0].times(), expected[0].times(), strict=True):
        assert (times == others).all()
    assert (found[0].waited_for == expected[0].waited_for).all()
    assert dict(found[0].bounds.items()) == dict(expected[0].bounds.items())


def test_a_log_that_is_full_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = nodes(2, 4, "switch", "rails")
    found = program(collective("multi-ring", topology, 12345), Machine(topology, CommLibrary("t", 1e-6)))
    expected = run(found, monkeypatch, fast=False)
    monkeypatch.setattr("sim.array.flows.log_table", lambda rows: log_table(min(rows, 1)))
    assert_equal(run(found, monkeypatch, fast=False), expected)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The functions that are compiled from now on; no code is kept elsewhere."""
    found: list[str] = []
    compile_it = compiled._compile

    def noted(function: Callable[..., object], kind: Struct) -> bytes:
        found.append(function.__name__)
        return compile_it(function, kind)

    monkeypatch.setattr(compiled, "_compile", noted)
    monkeypatch.setattr(compiled, "_loaded", {})
    monkeypatch.setenv("TASP_LAB_CACHE", str(tmp_path))
    return found


class _Pair(NamedTuple):
    numbers: np.ndarray[Any, Any]
    records: np.ndarray[Any, Any]


def _twice(number: int) -> int:
    return 2 * number


def _sums(pair: _Pair, factor: float, is_added: bool, first: int) -> float:
    total = 0.0
    for row in range(first, len(pair.records)):
        total += factor * pair.records[row].value * pair.numbers[row]
        pair.numbers[row] = -1.0
    return total if is_added else -total


def _last(numbers: np.ndarray[Any, Any]) -> float:
    return float(numbers[len(numbers) - 1])


def test_machine_code_is_made_once_and_kept(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.call(_last, np.arange(43), fast=True) == 42.0
    assert compiled.call(_last, np.arange(9), fast=True) == 8.0
    monkeypatch.setattr(compiled, "_loaded", {})  # as in another process
    assert compiled.call(_last, np.arange(11), fast=True) == 10.0
    assert compiled.call(_last, np.arange(3, dtype=np.int32), fast=True) == 2.0  # other types, other code
    assert compilations == ["_last", "_last"]


def test_a_broken_file_is_made_again(compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled.call(_twice, 21, fast=True)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(compiled, "_loaded", {})
    assert compiled.call(_twice, 21, fast=True) == 42
    assert compilations == ["_twice", "_twice"]


def test_without_a_folder_to_keep_it_in_machine_code_is_made_all_the_same(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TASP_LAB_CACHE", str(tmp_path / "file"))
    assert compiled.call(_twice, 21, fast=True) == 42


def _predict(cache: Path) -> subprocess.Popen[bytes]:
    """A whole command whose simulations run as machine code, kept in this folder."""
    question = ["predict", "h100-8", "--schedule", "tasp", "--seq", "16Ki", "--json"]
    line = [sys.executable, "-m", "tasp_lab.cli", *question]
    return subprocess.Popen(line, stdout=subprocess.PIPE, env={**os.environ, "TASP_LAB_CACHE": str(cache)})


def test_first_commands_at_once_give_one_answer_and_keep_one_file(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = [process.communicate()[0] for process in (_predict(cache), _predict(cache))]
    (kept,) = cache.iterdir()
    stamp = kept.stat().st_mtime_ns
    again = _predict(cache).communicate()[0]
    assert [kept] == list(cache.iterdir())
    assert kept.stat().st_mtime_ns == stamp  # not compiled again
    (tmp_path / "file").touch()
    nowhere = _predict(tmp_path / "file").communicate()[0]
    answers = [json.loads(text)["predictions"] for text in (*first, again, nowhere)]
    assert answers[0]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "backwards", "read-only", "empty"])
def test_compiled_functions_take_tables_of_any_layout(layout: str) -> None:
    step = {"strided": 2, "backwards": -1}.get(layout, 1)
    records = compiled.table(0 if layout == "empty" else 4, number="i4", value="f8")
    records["value"] = np.arange(len(records)) + 0.5
    records.flags.writeable = layout != "read-only"
    once, again = np.arange(8.0)[::step], np.arange(8.0)[::step]
    for is_added in (True, False):
        found = compiled.call(_sums, _Pair(once, records), 2.0, is_added, 1, fast=True)
        assert found == compiled.call(_sums, _Pair(again, records), 2.0, is_added, 1, fast=False)
    assert (once == again).all()
    assert (layout == "empty") == (once == np.arange(8.0)[::step]).all()


def _checked(number: int) -> int:
    assert number > 0, "a positive number"
    return number


def test_what_compiled_functions_assert_is_raised() -> None:
    assert compiled.call(_checked, 1, fast=True) == 1
    with pytest.raises(AssertionError, match="_checked"):
        compiled.call(_checked, 0, fast=True)


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


def test_machine_code_is_loaded_for_small_programs_once_many_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    call = event_loop.call

    def noted(*arguments: Any, fast: bool) -> Any:
        used.append(fast)
        return call(*arguments, fast=False)

    mesh = full_mesh(3, 1.0, 0.0)
    small = program(collective("direct", mesh, 12), Machine(mesh))
    monkeypatch.setattr(event_loop, "call", noted)
    monkeypatch.setattr(event_loop, "FEW", 3 * small.plan.size)
    monkeypatch.setattr(Run, "_in_python", 0)
    for _ in range(5):
        Run(small).end_s()
    assert used == [False, False, False, True, True]
