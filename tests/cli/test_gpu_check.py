"""``gpu-check`` as a command: all steps on real ranks, the first failure, Ctrl-C in each phase, and bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.ranks.torchrun import ON_GPUS
from tests.conftest import ROOT, Command
from tests.support.ranks import as_if_by_torchrun
from tests.support.signals import hear_interrupts

IMPORTED_BY_RANKS = ("tasp_lab.validation.gpu_check",)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def torchrun(*arguments: str) -> list[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*line, "-m", "tasp_lab.cli", "gpu-check", *arguments]


def record_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu-check.json").read_text())
    return found


@pytest.mark.distributed
@pytest.mark.slow
def test_all_steps_on_two_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        torchrun("full-mesh:2", "--backend", "gloo", "--output", "record", "--json"), cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=280, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == record_in(tmp_path / "record")
    assert (record["verdict"], record["world_size"], record["backend"]) == ("passed", 2, "gloo")
    assert [step["number"] for step in record["steps"]] == list(range(16))
    steps = {step["name"]: step for step in record["steps"]}
    skipped = {step["name"] for step in record["steps"] if step["verdict"] == "skipped"}
    assert {step["message"].partition(":")[0] for step in record["steps"] if step["name"] in skipped} == {"needs a GPU"}
    assert skipped == {
        "a merge moves bytes as fast as a copy", "the clock of the executor is that of the library",
        "the calibrated bandwidth is that of the library", "shards that rings do not divide are as fast",
        "kernels hide messages of normal and of high priority",
    }  # fmt: skip
    assert all(row["time_s"] > 0 for row in steps["the library delivers every byte"]["numbers"]["library"])
    ran = steps["every schedule over every transport delivers every bit"]["numbers"]
    assert ran["runs"] == ran["schedules"] * len(ran["transports"]) * 2
    assert ran["transports"] == ["p2p", "batched", "all-to-all"]
    lost = steps["a rank that fails is named and no process is left"]["numbers"]["losses"]
    assert [(each["how"], each["named"], each["orphans"]) for each in lost] == [("raise", True, 0), ("kill", True, 0)]
    table = steps["predicted and measured times"]["numbers"]["predicted_and_measured"]
    assert {"ring", "multi-ring", "ring-attention", "tasp"} <= {row["schedule"] for row in table}
    text = (tmp_path / "record" / "gpu-check.txt").read_text()
    assert all(step["name"] in text and step["if_it_fails"].endswith(".") for step in record["steps"])


FAULTY = """
import os, signal, threading, pytest, torch
import torch.distributed as dist
from tests.cli.test_gpu_check import children_of_ours, interrupt_when
from tests.gpu.conftest import check, group, numbers, session_of
from tests.gpu.lost_ranks import lose_rank

pytestmark = pytest.mark.gpu

def test_first():
    pass

def test_fault(check, group, numbers, pytestconfig):
    "It does not work."
    {fault}

def test_last():
    pass
"""

FAULTS = {
    # all ranks get to the end of the step, rank 1 with a failure
    "fails": "numbers['error'] = 0.25; group.gather(0); assert not group.rank, 'wrong by 0.25'",
    # rank 1 raises while rank 0 waits for it in a call of the library
    "raises": "assert 1 // (1 - group.rank); dist.all_reduce(torch.ones(1))",
    # the time of this step alone is short, as others take long on busy cores
    "hangs": "session_of(pytestconfig).watch.limit('step 2, fault,', 0.5); group.store.get('never')",
    # Ctrl-C on all ranks, in a call that returns no more
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT); group.store.get('never')",
    # Ctrl-C while rank 0 has started a group of its own
    "is interrupted with a group": "group.rank and group.store.get('never'); threading.Thread("
    "target=interrupt_when, args=(children_of_ours,), daemon=True).start(); lose_rank('kill', 'gloo', 2, 60)",
}


@pytest.mark.distributed
def test_one_rank_checks_what_needs_no_other(tmp_path: Path) -> None:
    assert as_if_by_torchrun(checked_on_rank, 1, str(tmp_path), "as it is") == [(0, "")]
    steps = {step["name"]: step for step in record_in(tmp_path)["steps"]}
    messages = {step["message"] for step in steps.values() if step["verdict"] == "skipped"}
    assert messages == {"needs 2 ranks", "needs a GPU"}
    assert {step["verdict"] for step in steps.values()} == {"passed", "skipped"}
    assert steps["training on all ranks has the losses of one process"]["verdict"] == "passed"


def checked_on_rank(folder: str, how: str) -> tuple[int, str]:
    """On a rank: exit code and errors of a check in which the second of three tests is faulty."""
    import tasp_lab.validation.gpu_check as program
    from tasp_lab.cli.process import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if how == "cannot join":
        import torch.distributed as dist

        dist.init_process_group = no_library
    elif how != "as it is":
        tests = Path(folder, "test_planted.py")
        if os.environ["RANK"] == "0":
            tests.write_text(FAULTY.replace("{fault}", FAULTS[how]))
        while not tests.exists() or not tests.read_text():
            time.sleep(0.01)
        program.gpu_check.__kwdefaults__ |= {"tests": (str(tests),)}
    os.chdir(folder)
    try:
        main(["gpu-check", "--backend", "gloo", "--output", folder])
    except SystemExit as left:
        return int(left.code or 0), ""
    return 0, ""


def no_library(*arguments: object, **keywords: object) -> None:
    """As of an NCCL that is initialised when ranks join."""
    import torch.distributed as dist

    raise dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nno memory")


def children_of_ours() -> bool:
    """Whether this process has started ranks; their numbers are noted."""
    found = processes("tests.gpu.lost_ranks")
    if len(found) < 3:  # torchrun and two ranks
        return False
    Path("children").write_text(" ".join(map(str, found)))
    return True


def processes(text: str) -> list[int]:
    """The processes below this one whose command line has a text."""
    return [each for each in descendants(os.getpid()) if text in command_line(each)]


def command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def descendants(process: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{process}/task").glob("*/children"))
        children = [int(pid) for task in tasks for pid in task.read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


def interrupt_when(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("fails", 2, "gpu-check: step 2, fault, failed: rank 1: wrong by 0.25"),
        ("raises", 2, "gpu-check: step 2, fault, failed: rank 1: ZeroDivisionError: "),
        ("hangs", 2, "gpu-check: step 2, fault, failed: step 2, fault, did not end in time"),
        ("is interrupted", 130, "gpu-check: step 2, fault, interrupted: interrupted"),
    ],
)
def test_the_first_failure_ends_it_with_a_record(how: str, code: int, told: str, tmp_path: Path) -> None:
    assert as_if_by_torchrun(checked_on_rank, 2, str(tmp_path), how) == [code, code]
    record = record_in(tmp_path)
    assert [step["name"] for step in record["steps"]] == ["join", "first", "fault"], "the last step does not run"
    last = record["steps"][-1]
    assert record["verdict"] == last["verdict"] == ("interrupted" if code == 130 else "failed")
    assert record["error"].startswith(told)
    assert last["numbers"] == {"error": 0.25} if how == "fails" else not last["numbers"]
    text = (tmp_path / "gpu-check.txt").read_text()
    assert ("what it means: It does not work." in text) == (code == 2)


@pytest.mark.distributed
def test_a_library_that_cannot_start_is_in_the_record(tmp_path: Path) -> None:
    assert as_if_by_torchrun(checked_on_rank, 2, str(tmp_path), "cannot join") == [2, 2]
    (step,) = record_in(tmp_path)["steps"]
    assert (step["number"], step["verdict"]) == (0, "failed")
    told = "rank 0: cannot join the process group at 127.0.0.1:1: NCCL error: unhandled cuda error: no memory"
    assert step["message"] == told
    assert "NCCL_DEBUG=INFO" in step["if_it_fails"]


@pytest.mark.distributed
def test_ctrl_c_ends_the_group_of_a_lost_rank(tmp_path: Path) -> None:
    assert as_if_by_torchrun(checked_on_rank, 2, str(tmp_path), "is interrupted with a group") == [130, 2]
    assert record_in(tmp_path)["verdict"] == "interrupted"
    children = [int(each) for each in (tmp_path / "children").read_text().split()]
    assert_gone([each for each in children if "lost_ranks" in command_line(each)])


def assert_gone(group: list[int]) -> None:
    """All processes end."""
    until = time.monotonic() + 30
    while left := [each for each in group if command_line(each)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.distributed
def test_ctrl_c_while_ranks_join(tmp_path: Path) -> None:
    """The other rank never comes; the interrupt arrives in a call of torch that does not look for signals."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tasp_lab.cli", "gpu-check", "--backend", "gloo", "--output", str(tmp_path)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT | place, preexec_fn=hear_interrupts,
    )  # fmt: skip
    assert process.stderr is not None
    assert any("step 0: join" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.startswith("tasp-lab: gpu-check: step 0, join, interrupted: interrupted; record: ")
    assert record_in(tmp_path)["verdict"] == "interrupted"


@pytest.mark.distributed
def test_ctrl_c_under_torchrun(tmp_path: Path) -> None:
    """As a terminal sends it: to torchrun and all ranks."""
    process = subprocess.Popen(
        torchrun("--backend", "gloo", "--output", str(tmp_path)), cwd=tmp_path, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, preexec_fn=hear_interrupts,
    )  # fmt: skip
    assert process.stderr is not None
    assert any("step 7: every schedule" in line for line in process.stderr)
    group = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode
    assert_gone(group)
    record = record_in(tmp_path)
    assert record["verdict"] == "interrupted"
    assert [step["verdict"] for step in record["steps"]] == ["passed"] * 6 + ["skipped", "interrupted"]


# bad input


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts the first of two ranks."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "1"}  # fmt: skip
    for name in ON_GPUS:
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    for name, value in place.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("h100-8",), "h100-8 has 8 ranks, but 2 were started: name a machine of 2, or start 8"),
        (("no-such",), "'no-such'"),
        (("--backend", "gloo", "--output", "file"), "cannot write file: File exists"),
        (("--backend", "gloo", "--output", "/proc/record"), "cannot write /proc/record: No such file or directory"),
        (("--backend", "mpi"), "mpi"),
        ((), "2 ranks on this host, but torch"),
        (("--backend", "nccl"), "sees 0 GPUs here"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_before_ranks_join(
    arguments: tuple[str, ...], told: str, command: Command, started: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command.folder / "file").write_text("kept")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert told in command.refused("gpu-check", *arguments)
    assert [path.name for path in command.folder.iterdir()] == ["file"]
    assert (command.folder / "file").read_text() == "kept"


def test_more_ranks_than_gpus_is_one_line(command: Command, started: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = command.refused("gpu-check")
    assert told.startswith("tasp-lab: 2 ranks on this host, but torch ")
    assert "sees 1 GPU here" in told
    assert told.endswith("expected a GPU for each rank, or --backend gloo to use gloo on CPUs instead")
