"""The helpers of tests for GPUs find the faults that they are for; what needs a GPU is played by fakes."""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from runtime.executor.actions import Actions
from runtime.executor.messages import Message, Post, Transport
from runtime.executor.streams import Streams
from runtime.executor.transports import TRANSPORTS, make_transport
from runtime.kernels import linear_attention as linear
from runtime.kernels.partials import Gradients, Partial
from runtime.kernels.registry import KERNELS
from runtime.protocol.jobs import RunSchedule
from runtime.ranks.torchrun import HIGH_PRIORITY
from runtime.ranks.watch import CheckedGroup, End, Watch
from tasp_lab.core.errors import RunError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.gpu import hardware
from tests.gpu.beside import is_right_beside_a_collective
from tests.gpu.delays import DelayedRuns
from tests.gpu.groups import Ended
from tests.gpu.hardware import (
    OPERATIONS,
    RankInventory,
    bus_bandwidth,
    check_same_gpus,
    measure_operation,
    measure_peers,
)
from tests.gpu.kernels import check_kernels, check_linear_kernels
from tests.gpu.lost_ranks import Loss
from tests.gpu.training import Recipe, difference_learnt, difference_of_losses, train_alone, train_together
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")
IMPORTED_BY_RANKS = ("tests.gpu.training", "tests.gpu.delays")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# kernels


def test_the_kernels_of_this_host_pass() -> None:
    found = {(each.kernel, each.dtype): each for each in check_kernels(CPU, 33, [(16, 16), (16, 8)])}
    assert found["flash-attn", "bf16"].unsupported
    for dtype in ("fp32", "bf16", "fp16"):
        checked = found["sdpa", dtype]
        assert checked.cases == 2 * 2 * 9  # widths, KV heads, masks
        assert 0 < checked.forward_error <= checked.limit
        assert 0 < checked.backward_error <= 2 * checked.limit


class WrongKernel:
    """The reference with one fault, under the name of a fast kernel."""

    def __init__(self, fault: str) -> None:
        self.name, self._fault = "wrong", fault

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int, value_dim: int) -> str | None:
        return None

    def attend(self, *tensors: torch.Tensor, scale: float, low: int, high: int) -> Partial:
        if self._fault == "mask":
            low -= 1
        found = KERNELS["reference"].attend(*tensors, scale=scale, low=low, high=high)
        if self._fault == "lse":  # in base 2, as some kernels have it
            return Partial(found.out, found.lse / torch.tensor(2.0).log())
        if self._fault == "empty rows":
            return Partial(found.out, found.lse.nan_to_num(neginf=0.0))
        return found

    def backward(self, *tensors: torch.Tensor, scale: float, low: int, high: int) -> Gradients:
        found = KERNELS["reference"].backward(*tensors, scale=scale, low=low, high=high)
        if self._fault == "NaN":
            return found._replace(v=found.v * torch.nan)
        return found._replace(k=found.k * 1.05) if self._fault == "dk" else found


@pytest.mark.parametrize(
    ("fault", "named"),
    [("mask", "forward"), ("lse", "forward"), ("empty rows", "forward"), ("dk", "backward"), ("NaN", "backward")],
)
def test_a_wrong_kernel_is_named(fault: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"wrong": WrongKernel(fault), "reference": KERNELS["reference"]}
    monkeypatch.setattr("tests.gpu.kernels.KERNELS", kernels)
    with pytest.raises(RunError, match=f"kernel wrong, .* mask .*, {named}: error"):
        list(check_kernels(CPU, 33, [(16, 16), (16, 8)]))


def test_wrong_linear_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each["decay"] for each in check_linear_kernels(CPU, 70)] == ["none", "head", "scalar", "channel"]
    right = linear.total_decay
    monkeypatch.setattr(linear, "total_decay", lambda gates, positions: right(gates, positions - 1))
    with pytest.raises(RunError, match="linear attention, decay head, forward: error"):
        check_linear_kernels(CPU, 70)


# the library


def library_on_rank() -> list[float]:
    group = CheckedGroup()
    by_peers = [measure_peers(group, peers, 300, 2) for peers in (1, 2)]
    return [measure_operation(group, operation, 1200, 2) for operation in OPERATIONS] + by_peers


def wrong_library_on_rank() -> str:
    """A library that delivers one wrong byte."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    right = getattr(dist, name)

    def wrong(received: torch.Tensor, sent: torch.Tensor) -> None:
        right(received, sent)
        received[5] += 1

    setattr(dist, name, wrong)
    try:
        measure_operation(CheckedGroup(), "all_gather", 1200, 1)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_the_library_is_timed_and_its_result_checked() -> None:
    of_ranks = on_ranks(library_on_rank, 3)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2], "all ranks know the slowest"
    assert all(seconds > 0 for seconds in of_ranks[0])  # type: ignore[attr-defined]


@pytest.mark.distributed
def test_a_wrong_byte_of_the_library_is_seen() -> None:
    told = "all_gather of 1200 bytes: what arrived is not what was sent"
    assert on_ranks(wrong_library_on_rank, 2) == [told, told]


@pytest.mark.parametrize(("operation", "share"), [("sendrecv", 1.0), ("alltoall", 0.75), ("all_gather", 0.75)])
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, share: float) -> None:
    assert bus_bandwidth(operation, 2**20, 0.5, 4) == 2**21 * share


def priorities_on_rank() -> tuple[list[tuple[str, str, bool]], str]:
    """On a rank, with groups of gloo in place of NCCL's: priorities, torch's variable, and whether a schedule ran."""
    made = {"normal": dist.new_group(backend="gloo"), "high": dist.new_group(backend="gloo")}
    hardware._group_with = made.__getitem__  # type: ignore[assignment]
    os.environ[HIGH_PRIORITY] = "before"
    group: Any = SimpleNamespace(on_gpu=True)
    job, found = RunSchedule(collective("ring", full_mesh(2), 96), "p2p", repeats=1, warm_ups=1), []
    for priority, ranks in hardware.ranks_by_priority(group):
        assert ranks._group is made[priority]
        records = ranks.perform(job, 60)
        found.append((priority, os.environ[HIGH_PRIORITY], all(isinstance(each, list) for each in records)))
    return found, os.environ[HIGH_PRIORITY]


@pytest.mark.distributed
def test_schedules_run_over_groups_of_both_priorities() -> None:
    """torch reads its variable when a group is made; it is afterwards what it was."""
    expected = [("normal", "0", True), ("high", "1", True)], "before"
    assert on_ranks(priorities_on_rank, 2) == [expected, expected]


# collectives beside attention


def beside_on_rank() -> bool:
    return is_right_beside_a_collective(CPU, rounds=3)


@pytest.mark.distributed
def test_attention_while_a_collective_of_another_group_runs() -> None:
    assert on_ranks(beside_on_rank, 3) == [True, True, True]


# delays


class Swapped(Transport):
    """A transport that delivers the first two messages of a call in each other's place."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.receives_ahead, self.whole_steps, self.channels = transport.receives_ahead, transport.whole_steps, False
        self.short_bytes = transport.short_bytes

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        self._transport.open(channels, memory, streams)

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        if len(receives) > 1 and receives[0].data.shape == receives[1].data.shape:
            first, second, *others = receives
            swapped = ((first, second.data), (second, first.data))
            receives = [*(Message(each.peer, each.tag, data, each.channel) for each, data in swapped), *others]
        found: Post = self._transport.bind(receives, sends)
        return found


def delayed_on_rank(transport: str, fault: str) -> str:
    """What a run with delays says on a rank."""
    group = CheckedGroup()
    layer = Workload(16 * group.world_size, heads=4, head_dim=8, dtype="bf16", mask="causal")
    topology = full_mesh(group.world_size)
    schedules = [collective("direct", topology, 96)] if fault != "early" else []
    schedules += attention_schedules("tasp", topology, layer, None, AttentionOptions("both"))
    made: Any = make_transport(transport, 60)
    if fault == "early":  # kernels do not wait for what arrives
        Actions.wait = lambda self, direction, messages: lambda: None  # type: ignore[method-assign]
    for schedule in schedules:
        runs = DelayedRuns(group, schedule, Swapped(made) if fault == "swapped" else made)
        for seed in (None, 0, 1):
            told = _told_by(runs, seed)
            if any(group.gather(told)):  # a rank that saw nothing would wait for the others
                return told
    return ""


def _told_by(runs: DelayedRuns, seed: int | None) -> str:
    try:
        runs.run(seed)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("transport", sorted(set(TRANSPORTS) - {"symmetric-memory"}))
def test_delays_change_no_bit(transport: str) -> None:
    assert on_ranks(delayed_on_rank, 3, transport, "") == ["", "", ""]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "seen"), [("swapped", "is not what its owner sent"), ("early", "computes with block .* not complete")]
)
def test_wrong_messages_and_missing_waits_are_seen(fault: str, seen: str) -> None:
    told = on_ranks(delayed_on_rank, 3, "batched", fault)
    assert any(re.search(seen, str(each)) for each in told), told


# training


def trained_on_rank(fault: str) -> tuple[float, float]:
    """The differences of losses and of what was learnt."""
    recipe = Recipe(48, 2, 8, steps=6)
    if fault:
        import tests.gpu.training as training

        right = training.attention

        def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> torch.Tensor:
            return right(q, k.detach() * 1.0 + 0 * k, v, **keywords)

        training.attention = wrong  # type: ignore[assignment]
    together, alone = train_together(recipe, "fp32", CPU), train_alone(recipe, "fp32", CPU)
    assert alone.losses[-1] < alone.losses[0]
    return difference_of_losses(together, alone), difference_learnt(together, alone)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_training_on_ranks_is_training_alone(world_size: int) -> None:
    for loss, learnt in on_ranks(trained_on_rank, world_size, ""):  # type: ignore[misc]
        assert loss < 1e-5
        assert learnt < 1e-4


@pytest.mark.distributed
def test_a_lost_gradient_of_keys_is_seen() -> None:
    """By what is learnt; the losses of so few steps hardly differ."""
    for _, learnt in on_ranks(trained_on_rank, 2, "keys"):  # type: ignore[misc]
        assert learnt > 1e-3


# GPUs that are not there


class FakeGpus:
    """torch.cuda of a host with some GPUs."""

    def __init__(self, names: Sequence[str], buses: Sequence[int] = (), apart: Sequence[tuple[int, int]] = ()) -> None:
        self._names, self._buses, self._apart = names, buses or range(len(names)), apart

    def device_count(self) -> int:
        return len(self._names)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=self._names[index], total_memory=80 * 2**30, multi_processor_count=132, pci_domain_id=0,
            pci_bus_id=self._buses[index], pci_device_id=0,
        )  # fmt: skip

    def can_device_access_peer(self, one: int, other: int) -> bool:
        return (one, other) not in self._apart


def ranks_on(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> list[RankInventory]:
    monkeypatch.setattr(hardware.torch, "cuda", gpus)
    n = gpus.device_count()
    return [hardware.inventory_of_rank(rank, torch.device("cuda", rank), n) for rank in range(n)]


def test_equal_gpus_with_peer_access_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks_on(FakeGpus(["H100"] * 3), monkeypatch)
    check_same_gpus(found)
    assert [each.pci_bus for each in found] == ["0000:00:00", "0000:01:00", "0000:02:00"]


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        (FakeGpus(["H100"] * 3, [7, 3, 7]), "ranks 0 and 2 use the same GPU, 0000:07:00: expected one GPU per rank"),
        (FakeGpus(["H100", "A100"]), r"GPUs of two kinds: rank 0 has H100 \(80 GiB\), rank 1 has A100 \(80 GiB\)"),
        (FakeGpus(["H100"] * 2, apart=[(1, 0)]), "rank 1: no peer access to GPU 0 of its host"),
    ],
)
def test_what_gpus_cannot_do_is_one_line(gpus: FakeGpus, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=told) as refused:
        check_same_gpus(ranks_on(gpus, monkeypatch))
    assert len(str(refused.value).splitlines()) == 1


def test_a_library_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tensor: torch.Tensor) -> None:
        raise dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nno memory")

    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "all_reduce", broken)
    with pytest.raises(RunError, match=r"nccl cannot start: NCCL error in: .*; run again with NCCL_DEBUG=INFO") as told:
        hardware.check_library(CPU, 2)
    assert len(str(told.value).splitlines()) == 1


# lost ranks


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"output": "no torch\n"}, "the processes did not get to the run: no torch"),
        ({"ended_s": None}, "the end took longer than can be waited for, expected at most 10 s"),
        ({"ended_s": 12.34}, "the end took 12.3 s, expected at most 10 s"),
        ({"exit_code": 0}, "exit code 0, expected an error"),
        ({"named": False}, "the output does not name the rank: failing 1.5"),
        ({"orphans": (7, 8)}, "2 processes were left behind"),
    ],
)
def test_what_is_wrong_with_the_end_of_a_group(change: dict[str, Any], told: str) -> None:
    right: dict[str, Any] = {"exit_code": 1, "ended_s": 2.0, "named": True, "orphans": (), "output": "failing 1.5\n"}
    for found, problem in ((right, None), (right | change, f"kill: {told}")):
        end = Ended(found["output"], found["exit_code"], None, found["orphans"])
        assert Loss("kill", end, found["ended_s"], found["named"]).problem(10) == problem


# the watch


class DictStore:
    """A store of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def watched(path: Path, how: str) -> None:
    """In a child process: a main thread that is stuck, and what the watch makes of it."""

    def report(end: End | None) -> None:
        path.write_text(str(end))

    store = DictStore()
    with Watch(0, 2, report) as watch:
        watch.connect(store)
        if how == "time":
            watch.limit("step 3", 0.0)
        elif how == "rank":
            fail_on_rank_1(store, msgspec.msgpack.encode((1.0, "kernel wrong")))
        elif how == "garbage":
            fail_on_rank_1(store, pickle.dumps((1.0, "kernel wrong")))
        elif how == "both":
            fail_on_rank_1(store, msgspec.msgpack.encode((1.0, "kernel wrong")))
            watch.fail("lost rank 1", store)
        else:
            os.kill(os.getpid(), {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}[how])
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.sigwait({signal.SIGUSR1})  # in C, without end


def fail_on_rank_1(store: DictStore, told: bytes) -> None:
    store.set("gpu-check/failed/1", told)


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("interrupt", 130, End("interrupted", "interrupted")),
        ("terminate", 2, "ended by SIGTERM: another rank died"),
        ("time", 2, End("failed", "step 3 did not end in time")),
        ("rank", 2, End("failed", "rank 1: kernel wrong")),
        ("garbage", 2, End("failed", "rank 1: failed, and its message cannot be read")),
        ("both", 2, End("failed", "rank 1: kernel wrong; then rank 0: lost rank 1")),
    ],
)
@pytest.mark.timeout(60)
def test_the_watch_ends_a_process_that_is_stuck(how: str, code: int, told: End | str, tmp_path: Path) -> None:
    path = tmp_path / "end"
    process = os.fork()
    if not process:
        try:
            watched(path, how)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == code
    assert (told if isinstance(told, str) else str(told)) in path.read_text()


def test_the_watch_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Watch(0, 1, lambda end: None):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
