"""The verdicts and the record of ``gpu-check``, with ranks and GPUs that are not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.calibration import Calibration
from runtime.checks import hardware, training
from runtime.checks.hardware import RankInventory
from runtime.checks.training import Trained
from runtime.checks.watch import End
from tasp_lab.core.errors import OutputError
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.validation import gpu_steps
from tasp_lab.validation.gpu_check import Record, Session, StepResult, check_folder, run_step
from tasp_lab.validation.gpu_steps import FULL, HOST, QUICK, Context, Outcome, Overlap, Step

MIB = 2**20


class FakeGroup:
    """Ranks of which this is one, and what the others say in each exchange."""

    ranks = SimpleNamespace(environment={"backend": "nccl", "device": "H100"})

    def __init__(self, world_size: int = 4, on_gpu: bool = True, others: Sequence[object] = ()) -> None:
        self.rank, self.world_size, self.local_world_size, self.on_gpu = 0, world_size, world_size, on_gpu
        self.device = torch.device("cuda:0" if on_gpu else "cpu")
        self._others = others

    def gather(self, value: object) -> list[object]:
        return [value, *(self._others or [value] * (self.world_size - 1))]


def context(group: FakeGroup, **found: Any) -> Context:
    return Context(group, Machine(full_mesh(group.world_size)), HOST, **found)  # type: ignore[arg-type]


def a_step(outcome: Outcome, min_ranks: int = 1) -> Step:
    return Step(3, "a step", "that it works", "It does not.", lambda _: outcome, min_ranks)


# verdicts


@pytest.mark.parametrize(
    ("own", "others", "verdict", "message"),
    [
        (Outcome({"a": 1}), (), "passed", ""),
        (Outcome({"a": 1}, skipped="needs a GPU"), (), "skipped", "needs a GPU"),
        (Outcome({"a": 1}), (Outcome({}), Outcome({}, "wrong"), Outcome({}, "too")), "failed", "rank 2: wrong"),
        (Outcome({"a": 1}, "slow", "needs a GPU"), (), "failed", "rank 0: slow"),
    ],
)
def test_a_step_fails_if_any_rank_does(own: Outcome, others: Sequence[Outcome], verdict: str, message: str) -> None:
    found = run_step(a_step(own), context(FakeGroup(others=others)))
    assert (found.verdict, found.message, found.numbers) == (verdict, message, {"a": 1})


def test_a_step_that_needs_more_ranks_does_not_run() -> None:
    found = run_step(a_step(Outcome({}, "it ran"), min_ranks=2), context(FakeGroup(1)))
    assert (found.verdict, found.message) == ("skipped", "needs 2 ranks")


def outcome_of_clock(monkeypatch: pytest.MonkeyPatch, message_s: float, empty_s: float, on_gpu: bool = True) -> Outcome:
    measured = {"send-recv": message_s, "empty": empty_s}
    monkeypatch.setattr(gpu_steps, "measured_s", lambda _, schedule: measured[schedule.name])
    ceilings = {("sendrecv", HOST.message_bytes[-1]): 1e-3}
    return gpu_steps.check_clock(context(FakeGroup(on_gpu=on_gpu), ceilings=ceilings))


@pytest.mark.parametrize(
    ("message_s", "empty_s", "failure"),
    [
        (1.04e-3, 40e-6, ""),
        (0.96e-3, 40e-6, ""),
        (1.06e-3, 40e-6, "a message takes +6.0% of the library's time, expected at most 5 % off"),
        (0.94e-3, 60e-6, "a message takes -6.0% of the library's time, expected at most 5 % off; an empty schedule "
         "takes 60 us, expected at most 50 us"),
    ],
)  # fmt: skip
def test_the_clock(message_s: float, empty_s: float, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of_clock(monkeypatch, message_s, empty_s).failure == failure
    on_host = outcome_of_clock(monkeypatch, message_s, empty_s, on_gpu=False)
    assert (on_host.failure, on_host.skipped.partition(":")[0]) == ("", "needs a GPU")


@pytest.mark.parametrize(("share", "is_failure"), [(0.91, False), (1.09, False), (0.89, True), (1.11, True)])
def test_calibration_against_the_ceiling(share: float, is_failure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neighbours: the slowest link between a rank and the next one."""
    size, seconds = HOST.message_bytes[-1], 1e-3
    machine = Machine(full_mesh(4, bandwidth_bytes_per_s=share * size / seconds), CommLibrary("calibrated", 0))
    monkeypatch.setattr(gpu_steps, "calibrate", lambda *_: Calibration((), machine))
    found = context(FakeGroup(), ceilings={("sendrecv", size): seconds})
    outcome = gpu_steps.check_calibration(found)
    assert bool(outcome.failure) == is_failure
    assert outcome.numbers["difference"] == pytest.approx(share - 1)
    assert found.calibration is not None


def test_neighbours_on_two_nodes_are_bound_by_the_network() -> None:
    slow = nodes(2, 2, nic_bandwidth_bytes_per_s=Fraction(10**9))
    assert gpu_steps.neighbours_bandwidth(slow) == 1e9
    assert gpu_steps.neighbours_bandwidth(full_mesh(3, bandwidth_bytes_per_s=7e9)) == 7e9


@pytest.mark.parametrize(("seconds", "is_failure"), [(64 / 56, False), (64 / 56 * 1.04, False), (64 / 56 * 1.08, True)])
def test_alignment_is_time_per_byte(seconds: float, is_failure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {HOST.aligned_bytes[0]: 1.0, HOST.aligned_bytes[1]: seconds}
    monkeypatch.setattr(gpu_steps, "build_schedules", lambda name, topology, size: (size,))
    monkeypatch.setattr(gpu_steps, "measured_s", lambda _, size: measured[size])
    assert bool(gpu_steps.check_alignment(context(FakeGroup())).failure) == is_failure


@pytest.mark.parametrize(("together_s", "is_failure"), [(3.0, False), (5.0, False), (5.1, False), (5.5, True)])
def test_overlap_fails_only_where_both_are_slower_together(
    together_s: float, is_failure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Overlap("high", 3.0, 2.0, together_s)
    assert found.hidden_share == pytest.approx((5 - together_s) / 2)
    measured = {"ring": 2.0, "multi-ring": 2.0, "ring-attention": together_s, "tasp": together_s}
    monkeypatch.setattr(gpu_steps, "measured_s", lambda _, schedule, ranks: measured[schedule.name])
    monkeypatch.setattr(gpu_steps, "kernels_s", lambda *_: 3.0)
    monkeypatch.setattr(hardware, "ranks_by_priority", lambda group: [("high", group.ranks)])
    assert bool(gpu_steps.check_overlap(context(FakeGroup())).failure) == is_failure


@pytest.mark.parametrize(
    ("losses", "learnt", "reserved", "failure"),
    [
        ((2.0, 1.0), 1.0, (5, 6, 7, 7), ""),
        ((2.0, 1.1), 1.0, (5, 6, 7, 7), "losses differ by 0.1"),
        ((2.0, 1.0), 1.1, (5, 6, 7, 7), "gradients through attention differ by 0.1"),
        ((2.0, 1.0), 1.0, (5, 6, 7, 9), "reserved memory grew by 2 bytes after step 3"),
        ((2.0, float("nan")), 1.0, (5, 6, 7, 7), "losses differ by nan"),
    ],
)
def test_training_fails_by_losses_weights_or_memory(
    losses: tuple[float, ...], learnt: float, reserved: tuple[int, ...], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Trained(losses, reserved, torch.tensor([learnt]))
    monkeypatch.setattr(training, "train_together", lambda *_: together)
    monkeypatch.setattr(training, "train_alone", lambda *_: Trained((2.0, 1.0), (), torch.tensor([1.0])))
    found = gpu_steps.check_training(context(FakeGroup())).failure
    assert failure in found
    assert bool(found) == bool(failure)


# the inventory


def test_gpus_of_two_kinds_fail_before_the_library_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SECRET", "hidden")
    monkeypatch.setattr(hardware, "topology_text", lambda: "GPU0 NV18")
    monkeypatch.setattr(hardware, "check_library", lambda *_: pytest.fail("the library was started"))
    first = RankInventory(0, "host", "H100", "0000:1b:00", 80 * 2**30)
    monkeypatch.setattr(hardware, "inventory_of_rank", lambda *_: first)
    other = replace(first, rank=1, gpu="A100", pci_bus="0000:0f:00")
    found = gpu_steps.take_inventory(context(FakeGroup(2, others=[other])))
    assert found.failure.startswith("GPUs of two kinds: rank 0 has H100 (80 GiB), rank 1 has A100 (80 GiB)")
    numbers: Mapping[str, Any] = found.numbers
    assert [each["gpu"] for each in numbers["ranks"]] == ["H100", "A100"]
    assert numbers["environment"]["variables"]["NCCL_DEBUG"] == "WARN"
    assert "SECRET" not in numbers["environment"]["variables"]
    assert numbers["environment"]["backend"] == "nccl"
    assert numbers["topology"] == "GPU0 NV18"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in numbers["gpu_order"]


# nccl-tests

LOG = """# nThread 1 nGpus 4 minBytes 65536 maxBytes 1048576 step: 8(factor) warmup iters: 5 iters: 20
# Collective test starting: sendrecv_perf
#  Rank  0 Group  0 Pid  41 on node1 device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  41 on node1 device  1 [0000:1f:00] NVIDIA H100 80GB HBM3
#   size   count   type   redop   root    time   algbw   busbw  #wrong    time   algbw   busbw  #wrong
   65536   16384  float     sum     -1   20.00    3.28    3.28       0   20.00    3.28    3.28     N/A
 1048576  262144  float     sum     -1   50.00   20.97   20.97       0   50.00   20.97   20.97     N/A
"""


@pytest.mark.parametrize(("ours_s", "ceiling_s"), [(80e-6, 50e-6), (40e-6, 40e-6)])
def test_the_ceiling_is_the_faster_of_nccl_tests_and_our_calls(
    ours_s: float, ceiling_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sendrecv_perf"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/arguments\ncat <<'END'\n{LOG}END\n")
    program.chmod(0o755)
    (tmp_path / "alltoall_perf").write_text("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    (tmp_path / "alltoall_perf").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hardware, "measure_operation", lambda *_: ours_s)
    monkeypatch.setattr(hardware, "measure_peers", lambda group, peers, size, calls: peers * 1e-3)
    found = context(FakeGroup())
    numbers: Mapping[str, Any] = gpu_steps.measure_ceiling(found).numbers
    assert found.ceilings["sendrecv", MIB] == pytest.approx(ceiling_s)
    assert found.ceilings["all_gather", MIB] == ours_s
    assert (tmp_path / "arguments").read_text().split() == ["-g", "4", "-b", "65536", "-e", "1048576", "-f", "8"]
    (note,) = numbers["nccl_tests"]
    assert note.endswith("alltoall_perf ended with exit code 3: out of memory")
    sweep = [(row["peers"], row["bytes"], row["sent_bytes_per_s"]) for row in numbers["peers"]]
    assert sweep == [(peers, 65536, pytest.approx(65536 / 1e-3)) for peers in (1, 2)]  # of 4 ranks
    theirs = [row for row in numbers["library"] if row["by"] == "nccl-tests"]
    assert [row["busbw_bytes_per_s"] for row in theirs] == pytest.approx([3.2768e9, 20.97152e9])


# the record


def a_result(verdict: Any, message: str = "") -> StepResult:
    numbers = {"rows": [{"name": "a", "time_s": 0.5}, {"name": "b", "why": "no"}], "text": "one\ntwo", "of": {"x": 1},
               "worst": float("nan")}  # fmt: skip
    step = Step(2, "kernels", "that they work", "They do not.", lambda context: Outcome({}))
    return StepResult(step, verdict, numbers, 1.5, message)


def test_a_record_is_written_whole_and_reads_back(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    record = Record("h100-8", 8, "nccl", True).with_step(a_result("passed"))
    assert (record.verdict, record.error) == ("running", None)
    record = record.with_step(a_result("failed", "wrong by 2"))
    record.save(tmp_path / "a" / "b")
    found = json.loads((tmp_path / "a" / "b" / "gpu-check.json").read_text())
    assert found == json.loads(json.dumps(record.to_dict()))
    assert (found["verdict"], found["error"]) == ("failed", "gpu-check: step 2, kernels, failed: wrong by 2")
    assert [step["verdict"] for step in found["steps"]] == ["passed", "failed"]
    text = (tmp_path / "a" / "b" / "gpu-check.txt").read_text()
    assert text.count("what it means: They do not.") == 1
    assert all(each in text for each in ("h100-8, 8 ranks, nccl, quick", "wrong by 2", "one", "two", "x: 1", "0.5"))
    assert len(record.records()) == 2
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["gpu-check.json", "gpu-check.txt"]


@pytest.mark.parametrize("running", [True, False])
def test_an_interrupt_during_a_step_or_between_two_is_in_the_record(running: bool, tmp_path: Path) -> None:
    shown: list[Record] = []
    session = Session(Record("h100-8", 8, "nccl", True), tmp_path, shown.append, lambda line: None)
    watch: Any = SimpleNamespace(limit=lambda what, seconds: None)
    session.begin(a_step(Outcome({})), watch, 1.0)
    if not running:
        session.add(a_result("passed"))
    session.report(End("interrupted", "interrupted"))
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found == shown[0].to_dict()
    assert found["verdict"] == "interrupted"
    assert [step["verdict"] for step in found["steps"]] == (["interrupted"] if running else ["passed"])
    where = "step 3, a step, interrupted" if running else "interrupted between steps"
    assert found["error"] == f"gpu-check: {where}: interrupted"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "gpu-check.json").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(OutputError, match="cannot write"):
            check_folder(folder)


def test_sizes_are_those_that_comparisons_need() -> None:
    """Seven rings of eight ranks divide the first shard in pages, but not the second; nccl-tests measures all sizes."""
    for sizes in (QUICK, FULL):
        whole, cut = sizes.aligned_bytes
        assert whole % (7 * 4096) == 0
        assert cut % 7
        steps = [MIB * 8**power for power in range(4)]
        assert [size for size in steps if size in sizes.message_bytes] == list(sizes.message_bytes)
