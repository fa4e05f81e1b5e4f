"""``gpu-check --one`` without a GPU: its verdicts, failures, an interrupt, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checks.one_device import GhostRun, Peers, merge_errors
from tasp_lab.core.errors import RunError, ScheduleError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation.gpu_steps import Outcome, Step
from tasp_lab.validation.one_gpu import ONE_STEPS, gpu_check_one
from tasp_lab.workload.layer import Workload

CPU = torch.device("cpu")
ON_HOST = {0, 1, 3, 5, 7, 10}


def test_what_a_host_can_show(tmp_path: Path) -> None:
    """Steps that need a GPU are skipped with the reason; the record is what is returned."""
    record = gpu_check_one(ranks=2, schedules=["tasp", "lasp", "ring"], seed=3, quick=True, output=tmp_path)
    assert (record.verdict, record.error) == ("passed", None)
    assert {step.step.number for step in record.steps if step.verdict == "passed"} == ON_HOST
    assert {step.message.split(":")[0] for step in record.steps if step.step.number in {2, 4, 6, 8, 9}} == {
        "needs a GPU"
    }
    assert json.loads((tmp_path / "gpu-check.json").read_text()) == json.loads(json.dumps(record.to_dict()))
    ran: Any = record.steps[3].numbers
    assert (ran["schedules"], ran["runs"]) == (4 * 2 + 2 + 1, 4 * 2 + 2 + 1)  # masks and passes, passes, one
    text = (tmp_path / "gpu-check.txt").read_text()
    assert all(step.proves in text for step in ONE_STEPS)


def steps(*runs: Callable[[Any], Outcome]) -> list[Step]:
    return [Step(number, "a step", "that it works", "It does not.", run) for number, run in enumerate(runs)]


def raise_it(error: BaseException) -> Outcome:
    raise error


def test_steps_use_one_thread_of_the_host(tmp_path: Path) -> None:
    """Threads that wait for each other over small tensors took six times the processor time."""
    threads, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    try:
        several = steps(lambda _: seen.append(torch.get_num_threads()) or Outcome({}))
        gpu_check_one(ranks=2, output=tmp_path, steps=several)
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_failure_does_not_end_the_check(tmp_path: Path) -> None:
    several = steps(lambda _: raise_it(RunError("wrong")), lambda _: Outcome({"a": 1}), lambda _: Outcome({}, "slow"))
    record = gpu_check_one(ranks=2, output=tmp_path, steps=several)
    assert [step.verdict for step in record.steps] == ["failed", "passed", "failed"]
    assert record.error == "gpu-check: step 0, a step, failed: wrong"


def test_an_interrupt_is_in_the_record(tmp_path: Path) -> None:
    several = steps(lambda _: Outcome({}), lambda _: raise_it(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        gpu_check_one(ranks=2, output=tmp_path, steps=several)
    record = json.loads((tmp_path / "gpu-check.json").read_text())
    assert (record["verdict"], [step["verdict"] for step in record["steps"]]) == (
        "interrupted",
        ["passed", "interrupted"],
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ranks": 1}, RunError, "--ranks: 1, expected 2 to 64"),
        ({"machine": "h100-8", "ranks": 4}, RunError, "h100-8 has 8 ranks, but --ranks is 4: give one of them"),
        ({"machine": "full-mesh:1"}, RunError, "has one rank, expected 2 or more"),
        ({"seed": -1}, RunError, "--seed: -1, expected 0 or more"),
        ({"schedules": ["tapc"]}, ScheduleError, "tapc"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        gpu_check_one(output=tmp_path / "record", steps=steps(lambda _: pytest.fail("it ran")), **arguments)
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize("peers", ["nothing", "copies"])
def test_a_ghost_run_makes_all_calls_of_one_rank(peers: Peers) -> None:
    layer = Workload(64, heads=2, head_dim=8, dtype="fp32", mask="causal")
    for schedule in build_schedules("tasp", full_mesh(4), layer, options=AttentionOptions("both")):
        run = GhostRun(schedule, 1, CPU, peers)
        run.run()
        first = run.operations()
        assert run.operations() == first
        assert sum(first.values()) >= len(run.trial.executor.part.calls) > 0
        assert run.time_s(repeats=1) > 0


def test_merge_errors_are_those_of_float32() -> None:
    found = merge_errors(CPU, 100, 0)
    assert 0 < found["out"] < 1e-5
    assert 0 < found["lse"] < 1e-5
