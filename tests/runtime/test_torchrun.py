"""Ranks that torchrun has started: which backend they take, how they join, and how one that fails ends."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.linux import host_environment, library_variables
from runtime.ranks import torchrun
from runtime.ranks.torchrun import COLLECTIVE_LIMIT, HIGH_PRIORITY, ON_GPUS, START_LIMIT, choose_backend, join
from tasp_lab.core import process
from tasp_lab.core.choices import BackendKind
from tasp_lab.core.errors import RunError
from tests.conftest import Command
from tests.support.ranks import as_if_by_torchrun

HUNG = 99
"""The exit code of a rank that waits in vain for others to destroy their group."""


def with_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool = True, driver: bool = True) -> None:
    """Eight ranks on a host with so many GPUs that torch sees."""
    for name in ON_GPUS:
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torchrun, "has_gpus", lambda: driver)


def test_a_gpu_per_rank_is_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 8)
    assert choose_backend("auto") == choose_backend("nccl") == choose_backend("auto", "h100-8") == "nccl"
    assert choose_backend("gloo", "h100-8") == "gloo"


def test_a_host_without_gpus_is_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0, nccl=False, driver=False)
    assert choose_backend("auto") == choose_backend("gloo") == choose_backend("gloo", "h100-8") == "gloo"


@pytest.mark.parametrize(
    ("gpus", "nccl", "driver", "machine"),
    [(4, True, True, None), (0, False, True, None), (8, False, True, None), (0, False, False, "h100-8")],
    ids=["two ranks per GPU", "torch for CPUs", "torch without NCCL", "a machine with GPUs"],
)
def test_gloo_is_not_taken_in_silence(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool, driver: bool, machine: str | None
) -> None:
    with_gpus(monkeypatch, gpus, nccl=nccl, driver=driver)
    with pytest.raises(RunError, match=rf"8 ranks on this host, .* sees {gpus} GPUs here.*--backend gloo"):
        choose_backend("auto", machine)
    assert choose_backend("gloo", machine) == "gloo"


def test_nccl_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0, nccl=False, driver=False)
    with pytest.raises(RunError, match="expected a GPU for each rank"):
        choose_backend("nccl")


@pytest.fixture
def group_of_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake NCCL group on a fake GPU: what it is made with."""
    made: dict[str, Any] = {}

    def init(backend: str, **options: Any) -> None:
        made.update(options, backend=backend, environment={name: os.environ.get(name) for name in ON_GPUS})

    with_gpus(monkeypatch, 8)
    place = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "node-0", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update(current=device))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: made.update(destroyed=True))
    monkeypatch.setattr(torchrun, "TorchrunRanks", lambda: None)
    monkeypatch.setattr(torchrun.distributed_c10d, "_set_pg_timeout", lambda limit: made.update(limit=limit))
    store = SimpleNamespace(set_timeout=lambda limit: made.update(store_limit=limit))
    monkeypatch.setattr(torchrun.distributed_c10d, "_get_default_store", lambda: store)
    return made


def test_how_ranks_join_on_gpus(group_of_gpus: dict[str, Any]) -> None:
    """The GPU is named; the start has a limit of its own; messages have priority; GPUs are numbered by their bus."""
    with join():
        assert "destroyed" not in group_of_gpus
    made = group_of_gpus
    assert (made["backend"], made["current"], made["device_id"]) == ("nccl", 3, torch.device("cuda", 3))
    assert made["timeout"] == made["pg_options"]._timeout == START_LIMIT == timedelta(seconds=120)
    assert made["limit"] == made["store_limit"] == COLLECTIVE_LIMIT > START_LIMIT
    assert made["pg_options"].is_high_priority_stream
    assert made["environment"] == ON_GPUS
    assert made["destroyed"]


def test_what_the_user_has_set_stays(group_of_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIGH_PRIORITY, "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    with join():
        pass
    assert not group_of_gpus["pg_options"].is_high_priority_stream
    assert group_of_gpus["environment"]["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_variables_are_set_before_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, backend: BackendKind) -> None:
    """Without NVML or AMD SMI torch starts CUDA or HIP to count GPUs, and these read their variables once."""
    with_gpus(monkeypatch, 8)
    seen: list[dict[str, str | None]] = []
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: seen.append({name: os.environ.get(name) for name in ON_GPUS}) or 8
    )
    assert choose_backend(backend) == "nccl"
    assert seen == [ON_GPUS]


def test_hidden_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(RunError, match=r"8 ranks .* sees 1 GPU here \(CUDA_VISIBLE_DEVICES=3\); expected"):
        choose_backend("nccl")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(
    group_of_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "-two")
    with pytest.raises(RunError, match=f"^{name} is '-two', expected a number"), join():
        pass
    assert "backend" not in group_of_gpus


@pytest.mark.parametrize("moment", ["set_device", "init_process_group"])
def test_a_rank_that_cannot_join_says_why(
    group_of_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """NCCL's reason is the last line of its error. What there is of the group is left as it is."""
    told = "NCCL error in: x.cpp:94, invalid usage\nncclInvalidUsage: ...\nLast error:\nDuplicate GPU detected"

    def fail(*_: object, **__: object) -> None:
        raise dist.DistBackendError(told) if moment == "init_process_group" else torch.AcceleratorError("busy")

    monkeypatch.setattr(process, "_at_once", False)
    monkeypatch.setattr(torch.cuda if moment == "set_device" else dist, moment, fail)
    reason = "busy" if moment == "set_device" else "NCCL error in: x.cpp:94, invalid usage: Duplicate GPU detected"
    with pytest.raises(RunError, match=rf"^rank 11: cannot join the process group at node-0:1: {reason}$"), join():
        pass
    assert process.leaves_at_once()


def test_a_group_is_not_destroyed_after_an_error(
    group_of_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_at_once", False)
    with pytest.raises(RunError, match="planted"), join():
        raise RunError("planted")
    assert "destroyed" not in group_of_gpus
    assert process.leaves_at_once()


def hang(*_: object) -> None:
    """As `destroy_process_group` does on NCCL while another rank does not call it: for so long that a test sees it."""
    threading.Event().wait(60)
    os._exit(HUNG)


def fails_on_rank_1(program: str, folder: str) -> None:
    """On a rank: a program in which rank 1 fails, where `destroy_process_group` never returns."""
    rank = os.environ["RANK"]
    os.dup2(os.open(Path(folder) / rank, os.O_WRONLY | os.O_CREAT), 2)
    dist.destroy_process_group = hang  # type: ignore[assignment]
    perform = torchrun.perform

    def failing(*arguments: Any) -> Any:
        if rank == "1":
            raise RunError("planted on rank 1")
        return perform(*arguments)

    torchrun.perform = failing  # type: ignore[assignment]
    if program == "validate":
        from tasp_lab.cli.process import main

        main(["validate", "full-mesh:2", "--schedule", "ring", "--shard-bytes", "1kB", "--fabric", "torchrun"])
    else:
        from experiments.train_gpt import __main__ as train_gpt
        from experiments.train_gpt.train import LostRankError

        def train(*_: object) -> None:
            if rank == "1":
                raise LostRankError("planted on rank 1")
            dist.barrier()

        train_gpt.train = train  # type: ignore[assignment]
        train_gpt.main([])


@pytest.mark.distributed
@pytest.mark.parametrize("program", ["validate", "train_gpt"])
def test_a_message_appears_where_destroying_the_group_hangs(program: str, tmp_path: Path) -> None:
    codes = as_if_by_torchrun(fails_on_rank_1, 2, program, str(tmp_path))
    assert codes[1] == 2
    assert codes[0] not in (0, HUNG)
    assert "planted on rank 1" in (tmp_path / "1").read_text()


@pytest.mark.parametrize("arguments", [("validate", "--schedule", "ring", "--shard-bytes", "1kB"), ("calibrate",)])
def test_a_machine_with_gpus_is_not_measured_with_gloo_unasked(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    with_gpus(monkeypatch, 0, nccl=False, driver=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    told = command(arguments[0], "h100-8", *arguments[1:], "--fabric", "torchrun")
    assert told.returncode == 2
    assert "h100-8 has GPUs: 8 ranks on this host" in told.stderr
    assert "--backend gloo" in told.stderr
    told = command(arguments[0], "full-mesh:2", *arguments[1:], "--fabric", "local", "--backend", "nccl")
    assert (told.returncode, "the local fabric has gloo" in told.stderr) == (2, True)


def test_a_record_has_the_variables_of_libraries_and_no_others(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {
        "NCCL_ALGO": "Ring",
        "RCCL_X": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HSA_Y": "2",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
    }
    for name, value in {**mine, "MY_SECRET": "3"}.items():
        monkeypatch.setenv(name, value)
    found = json.loads(command("doctor", "--json").stdout)
    assert mine.items() <= found["variables"].items()
    assert host_environment()["variables"] == found["variables"] == library_variables()
    assert "MY_SECRET" not in found["variables"]
    assert {"gpu_driver", "gpu_libraries"} <= found.keys()
    assert found["gpu_libraries"]["nccl"] is None or torch.version.cuda or torch.version.hip


def environment_of_a_rank() -> dict[str, object]:
    with join() as ranks:
        return dict(ranks.environment)


@pytest.mark.distributed
def test_what_ranks_run_on_is_known() -> None:
    assert as_if_by_torchrun(environment_of_a_rank, 2) == [{"backend": "gloo", "device": "cpu"}] * 2


def all_have_joined(folder: str) -> bool:
    """On a rank: whether all had joined when this one went on, where rank 1 takes longer."""
    init, mine = dist.init_process_group, Path(folder) / os.environ["RANK"]

    def slow(*arguments: Any, **options: Any) -> None:
        init(*arguments, **options)
        threading.Event().wait(0.5 * int(os.environ["RANK"]))
        mine.touch()

    dist.init_process_group = slow
    with join() as ranks:
        return all((Path(folder) / str(rank)).exists() for rank in range(ranks.world_size))


@pytest.mark.distributed
def test_no_rank_goes_on_before_all_have_joined(tmp_path: Path) -> None:
    """gloo fails a rank that still connects to one that has left."""
    assert as_if_by_torchrun(all_have_joined, 2, str(tmp_path)) == [True, True]
