"""``gpu-check`` without a GPU: steps from tests, the record, ``--one`` on a host, and bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.ranks.watch import End
from tasp_lab.core.errors import OutputError, RunError, ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation import gpu_check as program
from tasp_lab.validation.gpu_check import TESTS, Check, Session, gpu_check_one
from tasp_lab.validation.gpu_record import Record, Step, check_folder

CPU = torch.device("cpu")


def steps_of(folder: Path, source: str) -> Record:
    """The record of a check on this host with these tests."""
    tests = folder / f"{folder.name}.py"  # modules of one name would be one
    tests.write_text(f"import pytest, torch\nfrom tests.gpu.conftest import *\npytestmark = pytest.mark.gpu\n{source}")
    return gpu_check_one(ranks=2, output=folder, tests=(str(tests),))


# --one


@pytest.mark.slow
def test_what_a_host_can_show(tmp_path: Path) -> None:
    """Tests that need a GPU are skipped with the reason; the record is what is returned."""
    record = gpu_check_one(ranks=2, schedules=["tasp", "lasp", "ring"], seed=3, quick=True, output=tmp_path)
    assert (record.verdict, record.error) == ("passed", None)
    assert {step.name for step in record.steps if step.verdict == "passed"} == {
        "environment",
        "every attention kernel dtype mask and pass agrees with float64",
        "linear attention agrees with float64",
        "merged results agree with float64",
        "every schedule pass and mask is exact in random orders",
        "planted faults of messages waits and memory are found",
        "a pass queues as many operations each time",
    }
    skipped = [step for step in record.steps if step.verdict == "skipped"]
    assert {step.message for step in skipped} == {"needs a GPU", "no GPU", "needs two GPUs"}
    assert json.loads((tmp_path / "gpu-check.json").read_text()) == json.loads(json.dumps(record.to_dict()))
    ran: Any = next(step.numbers for step in record.steps if step.name.startswith("every schedule"))
    assert (ran["schedules"], ran["runs"]) == (4 * 2 + 2 + 1, 4 * 2 + 2 + 1)  # masks and passes, passes, one
    text = (tmp_path / "gpu-check.txt").read_text()
    assert all(step.name in text and step.if_it_fails for step in record.steps)


def test_a_failure_does_not_end_the_check_and_has_its_numbers(tmp_path: Path) -> None:
    record = steps_of(tmp_path, '''
def test_a_limit(numbers):
    """It is slow."""
    numbers["seconds"] = 2.0
    assert numbers["seconds"] < 1, "2 s, expected less than 1 s"
def test_an_error(check):
    raise ValueError("no such kernel")
def test_others(check, group):
    pass
def test_after_it():
    assert torch.get_num_threads() == 1, "threads that wait for each other over small tensors take the cores"
''')  # fmt: skip
    assert [(step.name, step.verdict, step.message) for step in record.steps] == [
        ("environment", "passed", ""),
        ("a limit", "failed", "2 s, expected less than 1 s"),
        ("an error", "failed", "ValueError: no such kernel"),
        ("others", "skipped", "needs ranks: torchrun --nproc-per-node N -m tasp_lab.cli gpu-check"),
        ("after it", "passed", ""),
        ("kernel times", "skipped", "needs a GPU"),
    ]
    assert (record.steps[1].numbers, record.steps[1].if_it_fails) == ({"seconds": 2.0}, "It is slow.")
    assert record.error == "gpu-check: step 1, a limit, failed: 2 s, expected less than 1 s"


def test_tests_that_cannot_be_collected_fail(tmp_path: Path) -> None:
    record = steps_of(tmp_path, "import no_such_module\n")
    assert record.verdict == "failed"
    assert "step 1, collect tests, failed: " in str(record.error)
    assert "no_such_module" in str(record.error)


def test_an_interrupt_is_in_the_record(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        steps_of(tmp_path, "def test_long():\n    raise KeyboardInterrupt\ndef test_next():\n    pass\n")
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert record["verdict"] == "interrupted"
    assert [step["verdict"] for step in record["steps"]] == ["passed", "interrupted"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ranks": 1}, RunError, "--ranks: 1, expected 2 to 64"),
        ({"machine": "h100-8", "ranks": 4}, RunError, "h100-8 has 8 ranks, but --ranks is 4: give one of them"),
        ({"machine": "full-mesh:1"}, RunError, "has one rank, expected 2 or more"),
        ({"seed": -1}, RunError, "--seed: -1, expected 0 or more"),
        ({"schedules": ["tapc"]}, ScheduleError, "tapc"),
        ({"tests": ["no_such.py"]}, RunError, "no_such.py does not exist: expected tasp-lab installed by pip"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        gpu_check_one(output=tmp_path / "record", **arguments)
    assert not (tmp_path / "record").exists()


def test_a_wheel_without_tests_names_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TESTS", tmp_path)
    with pytest.raises(RunError, match=r"runs the tests of a checkout, .*test_kernels.py does not exist: expected .*"):
        gpu_check_one(output=tmp_path / "record")
    assert not (tmp_path / "record").exists()


def test_tests_for_gpus_are_marked() -> None:
    """Each file that the check runs is there, and pytest leaves it out on hosts."""
    for name in {*program.ON_RANKS, *program.ON_ONE_DEVICE}:
        assert (
            "pytestmark = pytest.mark.gpu" in (TESTS / name).read_text()
            or "pytest.mark.gpu," in (TESTS / name).read_text()
        )


# The record


def a_record(*verdicts: str) -> Record:
    numbers = {"rows": [{"name": "a", "time_s": 0.5}, {"name": "b", "why": "no"}], "text": "one\ntwo", "of": {"x": 1},
               "worst": float("nan")}  # fmt: skip
    steps = [
        Step(at, "kernels", verdict, numbers, 1.5, "wrong by 2" * (verdict == "failed"), "They do not.")  # type: ignore[arg-type]
        for at, verdict in enumerate(verdicts)
    ]
    return Record("h100-8", 8, "nccl", True, steps)


def test_a_record_is_written_whole_and_reads_back(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    check_folder(folder)
    assert a_record("passed").error is None
    record = a_record("passed", "failed")
    record.save(folder)
    found = json.loads((folder / "gpu-check.json").read_text())
    assert found == json.loads(json.dumps(record.to_dict()))
    assert found["error"] == "gpu-check: step 1, kernels, failed: wrong by 2"
    assert [step["verdict"] for step in found["steps"]] == ["passed", "failed"]
    assert found["steps"][0]["numbers"]["worst"] == "nan"
    text = (folder / "gpu-check.txt").read_text()
    assert text.count("what it means: They do not.") == 1
    assert all(each in text for each in ("h100-8, 8 ranks, nccl, quick", "wrong by 2", "one", "two", "x: 1", "0.5"))
    assert len(record.records()) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["gpu-check.json", "gpu-check.txt"]


@pytest.mark.parametrize("running", [True, False])
def test_an_interrupt_during_a_step_or_between_two_is_in_the_record(running: bool, tmp_path: Path) -> None:
    shown: list[Record] = []
    session = Session(Check(CPU, Machine(full_mesh(2))), Record("h100-8", 8, "nccl", True), tmp_path, shown.append)
    limits: Sequence[tuple[str, float]] = []
    session.watch, session.limit_s = SimpleNamespace(limit=lambda *limit: limits.append(limit)), 7.0  # type: ignore[assignment, attr-defined]
    session.begin("a step", "It does not work.")
    assert limits == [("step 0, a step,", 7.0)]
    if not running:
        session.end("passed")
    session.report(End("interrupted", "interrupted"))
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found == shown[0].to_dict()
    assert found["verdict"] == "interrupted"
    assert [step["verdict"] for step in found["steps"]] == (["interrupted"] if running else ["passed"])
    where = "step 0, a step, interrupted" if running else "interrupted between steps"
    assert found["error"] == f"gpu-check: {where}: interrupted"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "gpu-check.json").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(OutputError, match="cannot write"):
            check_folder(folder)
