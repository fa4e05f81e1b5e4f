"""Stored answers hold as long as what decides them is the same: schedule, machine, and the version of the models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import tasp_lab
import tasp_lab.study.evaluate as evaluation
from tasp_lab import load_machine, load_study, predict
from tasp_lab.core.errors import MissingPackageError
from tasp_lab.machines.contention import Contention
from tasp_lab.machines.kernel_model.constants import data_folder
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.parameters import Parameter, Parameters
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.evaluate import Built, build
from tasp_lab.prediction.question import PreparedMachine
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.schedules.registry import ATTENTION, SCHEDULES, ScheduleSpec
from tasp_lab.study.file import Study
from tasp_lab.study.lookup import study_at
from tasp_lab.study.point import Point
from tasp_lab.study.run import run_study
from tasp_lab.study.store import RESULTS
from tasp_lab.workload.layer import Workload
from tests.support.studies import study_of

MACHINE = "h100-4"
LAYER = Workload(8192, heads=8, mask="causal")


def like(name: str) -> ScheduleSpec:
    """A schedule of one's own that is built as another one."""
    return ScheduleSpec(
        "softmax",
        lambda _, topology, work, options: attention_schedules(name, topology, work, None, options),
        lambda work, ranks: attention_layout(name, work, ranks),
        ATTENTION[name].options,
    )


def study_with(schedule: str, machine: str = MACHINE) -> Study:
    return load_study(
        {
            "machine": {"name": machine},
            "layer": {"seq": LAYER.sequence, "heads": LAYER.heads, "mask": LAYER.mask},
            "schedule": {"name": schedule},
        }
    )


def time_s(schedule: str, machine: str = MACHINE) -> float:
    return float(predict(machine, schedule, LAYER, samples=0)[-1].time_s)


class Counted:
    """How often schedules were built and simulated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        monkeypatch.setattr(evaluation, "build", self._counting("built", build))
        monkeypatch.setattr(Built, "answer", self._counting("simulated", Built.answer))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*arguments)

        return call

    def since(self) -> Mapping[str, int]:
        """The calls since the last one."""
        found, self.calls = self.calls, {}
        return found


@pytest.mark.parametrize("name", ["mine", "ulysses"])
def test_a_schedule_whose_code_changed_is_answered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`mine` is new, `ulysses` takes the place of one of tasp-lab's; what it is built from changes twice."""
    expected = {each: time_s(each) for each in ("zigzag-ring-attention", "kv-all-gather")}
    assert len(set(expected.values())) == 2
    for each in ("zigzag-ring-attention", "kv-all-gather", "zigzag-ring-attention"):
        monkeypatch.setitem(SCHEDULES, name, like(each))
        (row,) = run_study(study_with(name), tmp_path).rows
        assert row["time_s"] == pytest.approx(expected[each], rel=1e-9)
        _, evaluate = study_at(tmp_path)
        assert evaluate(next(study_with(name).points()))["time_s"] == row["time_s"]


def test_what_a_schedule_is_built_from_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of another module, an environment variable, a file: the builder itself stays the same object."""
    chosen = ["zigzag-ring-attention"]
    own = ScheduleSpec(
        "softmax",
        lambda _, topology, work, options: attention_schedules(chosen[0], topology, work, None, options),
        lambda work, ranks: attention_layout(chosen[0], work, ranks),
        (),
    )
    monkeypatch.setitem(SCHEDULES, "mine", own)
    before = run_study(study_with("mine"), tmp_path).rows[0]["time_s"]
    chosen[0] = "kv-all-gather"
    after = run_study(study_with("mine"), tmp_path).rows[0]["time_s"]
    assert [before, after] == pytest.approx([time_s("zigzag-ring-attention"), time_s("kv-all-gather")], rel=1e-9)


def test_nothing_is_built_again_while_the_sources_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_study(study_of(schedule={"name": ["ring-attention", "ulysses"]}))
    counted = Counted(monkeypatch)
    first = run_study(study, tmp_path)
    assert counted.since() == {"built": 16, "simulated": 16}
    assert run_study(study, tmp_path).rows == first.rows
    assert counted.since() == {}
    monkeypatch.setattr(evaluation, "own_sources", lambda: "edited")
    assert run_study(study, tmp_path).rows == first.rows
    assert counted.since() == {"built": 16}  # the same schedules as before: no simulation
    assert run_study(study, tmp_path).rows == first.rows
    assert counted.since() == {}


def test_finders_take_stored_rows_without_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_study(study_of(schedule={"name": ["ring-attention", "ulysses"]}))
    rows = run_study(study, tmp_path).rows
    points, counted = list(study.points()), Counted(monkeypatch)
    _, stored = study_at(tmp_path)
    assert [stored(each)["key"] for each in points] == [row["key"] for row in rows]
    assert counted.since() == {}
    (tmp_path / RESULTS).unlink()  # a folder that was passed on without its store: the files have the rows
    _, stored = study_at(tmp_path)
    assert [stored(each)["key"] for each in points] == [row["key"] for row in rows]
    assert counted.since() == {"built": 16}


def test_a_schedule_of_ones_own_is_built_but_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULES, "mine", like("ulysses"))
    counted = Counted(monkeypatch)
    rows = run_study(study_with("mine"), tmp_path).rows
    assert counted.since() == {"built": 1, "simulated": 1}
    assert run_study(study_with("mine"), tmp_path).rows == rows
    assert counted.since() == {"built": 1}


def test_sources_are_all_files_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(evaluation, "__file__", str(tmp_path / "study" / "evaluate.py"))
    found = [evaluation.own_sources()]
    for name, text in (("one.py", "a"), ("one.py", "b"), ("data/two.csv", "b"), ("data/three.csv", "")):
        (tmp_path / name).write_text(text)
        found.append(evaluation.own_sources())
    assert len(set(found)) == len(found)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "one.pyc").write_text("")
    assert evaluation.own_sources() == found[-1]


CHANGED: dict[str, Any] = {
    "topology": load_machine("h100-8").topology,
    "comm_library": load_machine(MACHINE, library="gloo").comm_library,
    "compute": ComputeRate(Fraction(10**15)),
    "parameters": Parameters([Parameter("link_latency", 3e-6, "a test")]),
    "accelerator": "a100",
    "contention": Contention(100, 3, 8),
    "host": load_stack("burst").host("burst"),
    "stack": "megatron",
    "network": "cloud",
    "rank_speeds": (Fraction(1),) * 3 + (Fraction(1, 2),),
}
"""Another value of each field of a machine that an answer follows from."""


def test_every_field_of_a_machine_is_in_its_hash() -> None:
    machine = load_machine(MACHINE)
    compared = {each.name for each in fields(Machine) if each.compare}
    assert compared - {"summary"} == CHANGED.keys()
    hashes = [PreparedMachine(replace(machine, **{name: value})).constants_sha256 for name, value in CHANGED.items()]
    assert len({PreparedMachine(machine).constants_sha256, *hashes}) == 1 + len(hashes)


def test_ends_of_intervals_are_in_the_hash_and_sources_are_not() -> None:
    machine = load_machine(MACHINE)

    def hash_with(**changed: Any) -> str:
        parameters = Parameters(replace(each, **changed) for each in machine.parameters.values())
        return PreparedMachine(replace(machine, parameters=parameters)).constants_sha256

    assert hash_with(low=1e-6) != hash_with() == hash_with(source="another page")


def test_a_stack_of_yours_is_in_the_hash_by_its_content_and_sources_are_not(tmp_path: Path) -> None:
    def hash_with(old: str, new: str) -> str:
        text = (Path(tasp_lab.__file__).parent / "machines/stacks/ring-flash-attn.toml").read_text()
        assert old in text
        (tmp_path / "mine.toml").write_text(text.replace(old, new))
        return PreparedMachine(replace(load_machine(MACHINE), stack=str(tmp_path / "mine.toml"))).constants_sha256

    same = hash_with("168us", "168us")
    assert hash_with("168us", "169us") != same
    assert hash_with("README", "another page") == same


def test_an_edited_machine_file_is_another_machine_in_the_same_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    found = []
    for rate in ("1GB/s", "2GB/s"):
        links = [{"source": a, "destination": 1 - a, "bandwidth_bytes_per_s": rate, "latency_s": "1us"} for a in (0, 1)]
        file.write_text(json.dumps({"name": "mine", "world_size": 2, "links": links}))
        (row,) = run_study(study_with("ulysses", str(file)), tmp_path / "run").rows
        found.append(float(row["exposed_s"] or 0))
    assert found[0] == pytest.approx(2 * found[1], rel=0.01)


def test_an_edited_kernel_file_is_another_machine_in_the_same_process(tmp_path: Path) -> None:
    file = tmp_path / "kernel.toml"
    text = (data_folder() / "h100" / "flash-attention-3.toml").read_text()
    rate = r"(?m)^rate = .*, (?=.s\d+.\]$)"
    times = []
    for flops in (4e14, 2e14):
        file.write_text(re.sub(rate, f"rate = [{flops}, {flops}, {flops}, ", text))
        times.append(predict(MACHINE, "ulysses", LAYER, samples=0, kernel=str(file))[-1].compute_s)
    assert times[1] > 1.5 * times[0]


def test_a_failed_point_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_with("ulysses")
    with monkeypatch.context() as patched:

        def missing(*_: object) -> None:
            raise MissingPackageError("a search needs ortools")

        patched.setattr(Built, "answer", missing)
        result = run_study(study, tmp_path)
        assert result.counts == {"ok": 0, "settled": 0, "does not apply": 0, "failed": 1}
        assert result.rows[0]["error"] == "a search needs ortools"
    assert run_study(study, tmp_path).counts == {"ok": 1, "settled": 0, "does not apply": 0, "failed": 0}


def test_a_worker_that_lacks_a_schedule_fails_and_does_not_say_that_it_does_not_apply() -> None:
    row = evaluation.evaluate(Point(MACHINE, "mine", LAYER))
    assert row["status"] == "failed"
    assert "unknown schedule 'mine'" in str(row["error"])
