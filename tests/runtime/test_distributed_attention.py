"""Attention on real processes against the float64 reference on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from runtime import attention_with_lse
from runtime.executor.views import DTYPES
from runtime.kernels.registry import KERNELS, choose_kernel
from runtime.sequence_parallel.layer import AttentionLayer
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.errors import TaspLabError
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.topology.graph import Link
from tasp_lab.workload.layer import Workload
from tests.support.ranks import ROOT, on_ranks, succeeded
from tests.support.refusals import check_refusals
from tests.support.schedules import task_of
from tests.support.sent_bytes import SentBytes
from tests.support.systems import schedules_for

pytestmark = pytest.mark.distributed

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer_of(workload: Workload) -> Tensors:
    """Queries, keys and values of a whole layer, the same in every process."""
    drawn = torch.Generator().manual_seed(1)
    shape = workload.batch, workload.sequence
    counts = workload.heads, workload.kv_head_count, workload.kv_head_count
    q, k, v = (torch.randn(*shape, count, workload.head_dim, generator=drawn) for count in counts)
    dtype = DTYPES[workload.dtype]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@cache
def single_process(workload: Workload, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = layer_of(workload)
    n = workload.sequence
    chosen = KERNELS["reference"] if kernel == "reference" else choose_kernel(kernel, q.dtype, q.device, q.shape[3])
    low = 0 if workload.mask == "causal" else 1 - n
    high = n - 1 if workload.window is None else workload.window - 1
    found = chosen.attend(q, k, v, scale=workload.head_dim**-0.5, low=low, high=high)
    return found.out, found.lse.transpose(1, 2)


CASES = [
    Workload(67, batch=2, heads=4, kv_heads=2, head_dim=64, dtype="fp32", mask="causal"),
    Workload(64, batch=1, heads=4, kv_heads=1, head_dim=128, dtype="bf16", mask="causal"),
    Workload(96, batch=1, heads=2, kv_heads=2, head_dim=64, dtype="bf16"),
    Workload(51, batch=1, heads=6, kv_heads=2, head_dim=96, dtype="fp32"),
    Workload(80, batch=1, heads=2, kv_heads=1, head_dim=256, dtype="fp16", mask="causal"),
    Workload(75, batch=1, heads=2, kv_heads=1, head_dim=64, dtype="fp32", mask="causal", window=20),
]


def errors_of_rank(workloads: list[Workload], transport: str) -> list[tuple[float, float]]:
    """On a rank: the squared errors of its part of the result of every case and schedule, and its part's square."""
    found = []
    world_size = dist.get_world_size()
    for workload, name in ((each, name) for each in workloads for name in schedules_for(each, world_size)):
        expected, expected_lse = single_process(workload, "reference")
        layout = attention_layout(name, workload, dist.get_world_size())
        q, k, v = (shard(x, layout, dist.get_rank()) for x in layer_of(workload))
        out, lse = attention_with_lse(
            q, k, v, schedule=name, causal=workload.mask == "causal", window=workload.window, transport=transport
        )
        assert (out.dtype, out.shape, lse.dtype) == (q.dtype, q.shape, torch.float32)
        expected = shard(expected, layout, dist.get_rank())
        expected_lse = shard(expected_lse, layout, dist.get_rank(), dim=2)
        for each, wanted in ((out, expected), (lse, expected_lse)):
            found.append((float((each.double() - wanted).square().sum()), float(wanted.square().sum())))
    return found


@pytest.mark.parametrize(("world_size", "transport"), [
    (2, "p2p"), (3, "all-to-all"), (4, "p2p"), (5, "batched"), (6, "p2p"), (7, "p2p"), (8, "p2p"),
])  # fmt: skip
def test_the_result_is_that_of_one_process(world_size: int, transport: str) -> None:
    """float32: relative error below 1e-5; half precision: at most 1.5 times that of one process in the same dtype."""
    parts = succeeded(on_ranks(errors_of_rank, world_size, CASES, transport))
    at = 0
    for workload, name in ((each, name) for each in CASES for name in schedules_for(each, world_size)):
        alone = single_process(workload, "auto")
        exact = single_process(workload, "reference")
        for single, expected in zip(alone, exact, strict=True):
            error = (sum(part[at][0] for part in parts) / sum(part[at][1] for part in parts)) ** 0.5
            allowed = 1e-5 if workload.dtype == "fp32" else max(1.5 * relative_error(single, expected), 1e-5)
            assert error < allowed, (workload, name, at % 2)
            at += 1


def bytes_of_rank(schedules: list[Schedule]) -> list[tuple[int, int]]:
    """On a rank: the bytes that went to the transport, and those of the ledger, of every schedule."""
    sent = SentBytes()
    found = []
    rank = dist.get_rank()
    for schedule in schedules:
        workload = task_of(schedule).workload
        q, k, v = (shard(x, task_of(schedule).layout, rank) for x in layer_of(workload))
        sent.count = 0
        attention_with_lse(q, k, v, schedule=schedule, causal=workload.mask == "causal", window=workload.window)
        found.append((sent.count, int(schedule.bytes_sent()[:, rank].sum())))
    return found


@pytest.mark.parametrize("world_size", [4, 6])
def test_bytes_sent_are_those_of_the_ledger(world_size: int) -> None:
    """Keys and values travel with their own number of heads, whatever the number of query heads."""
    mesh = full_mesh(world_size)
    schedules = [
        attention(name, mesh, case, trim=trim) for name, case, trim in product(CIRCULATIONS, CASES, (True, False))
    ]
    others = [(name, case) for case in CASES for name in schedules_for(case, world_size) if name not in CIRCULATIONS]
    schedules += [attention_schedules(name, mesh, case)[0] for name, case in others]
    for of_rank in succeeded(on_ranks(bytes_of_rank, world_size, schedules)):
        assert all(sent == ledger for sent, ledger in of_rank), of_rank
        assert sum(sent for sent, _ in of_rank) > 0


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors made in this thread that are alive, but not those of existing ones."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._existing = [each.untyped_storage() for each in existing]
        self._known: set[int] = {each._cdata for each in self._existing}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def memory_of_rank(per_rank: int, mask: Any) -> dict[str, tuple[int, int]]:
    """On a rank: the peak of allocated bytes, and the memory of the schedule, for every schedule."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    workload = Workload(per_rank * world_size, heads=4, kv_heads=4, head_dim=64, dtype="fp32", mask=mask)
    found = {}
    for name in CIRCULATIONS:
        schedule = attention(name, full_mesh(world_size), workload)
        q, k, v = (shard(x, task_of(schedule).layout, rank) for x in layer_of(workload))
        for _ in range(2):  # the first time fills caches
            with Allocations(q, k, v) as allocations:
                attention_with_lse(q, k, v, schedule=schedule, causal=mask == "causal", transport="batched")
        found[name] = allocations.peak, rank_part(schedule, rank).memory_bytes
    return found


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_memory_is_the_buffers_and_what_does_not_grow_with_the_world(mask: str) -> None:
    """With 168 positions per rank on 2 and on 8 ranks; TASP needs no more than 1.2 times what Ring does."""
    rest: dict[str, set[int]] = {name: set() for name in CIRCULATIONS}
    ring = "ring-attention" if mask == "full" else "zigzag-ring-attention"
    for world_size in (2, 8):
        found = succeeded(on_ranks(memory_of_rank, world_size, 168, mask))
        for name in CIRCULATIONS:
            rest[name] |= {of_rank[name][0] - of_rank[name][1] for of_rank in found}
        for measure in (0, 1):  # on the rank that needs most
            assert max(each["tasp"][measure] for each in found) <= 1.2 * max(each[ring][measure] for each in found)
    shard_bytes = 168 * 4 * 64 * 4
    for name, left in rest.items():
        padded = (
            name == "striped-ring-attention" and mask == "causal"
        )  # a row that sees nothing makes a copy of a result
        said = 2**14  # what ranks tell each other before the start
        most = (3.1 if padded else 2.1) * shard_bytes + said  # results in float32 and one temporary
        assert max(left) <= most, (name, left)
        assert padded or max(left) - min(left) < said, (name, left)


def refusal(change: str) -> None:
    """On a rank: attention where rank 1, or every rank, does something that cannot work."""
    workload = Workload(32, heads=4, kv_heads=2, head_dim=64, dtype="fp32")
    q, k, v = (shard(x, attention_layout("tasp", workload, 2), dist.get_rank()) for x in layer_of(workload))
    options: Any = {"schedule": "tasp"}
    odd = dist.get_rank() == 1
    if change == "schedules" and odd:
        options["schedule"] = "zigzag-ring-attention"
    elif change == "schedule objects" and odd:
        options["schedule"] = attention("tasp", full_mesh(2), workload, buffers=4)
    elif change == "schedule objects":
        options["schedule"] = attention("tasp", full_mesh(2), workload)
    elif change == "rings":
        options["topology"] = full_mesh(2)
        options["options"] = AttentionOptions(buffers=4 if odd else 2)
    elif change == "batch" and odd:
        q, k, v = (torch.cat([x, x]) for x in (q, k, v))
    elif change == "lengths" and odd:
        q, k, v = (x[:, 2:] for x in (q, k, v))
    elif change == "heads" and odd:
        q = q[:, :, :3]
    elif change == "dtype":
        q, k, v = (x.to(torch.float64) for x in (q, k, v))
    elif change == "dtypes" and odd:
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    elif change == "dtypes of k" and odd:
        k = k.to(torch.bfloat16)
    elif change == "kernel" and odd:
        options["kernel"] = "flash-attn"
    elif change == "name":
        options["schedule"] = "ring"
    elif change == "dimensions":
        q = q[0]
    elif change == "masks" and odd:
        options["causal"] = True
    elif change == "window":
        options["window"] = 5
    elif change == "gradients" and odd:
        v.requires_grad_()
    elif change == "scale":
        options["scale"] = float("nan")
    elif change == "backward alone":
        options["options"] = AttentionOptions("backward")
    elif change in ANOTHER:
        options["options"] = replace(AttentionOptions("both"), **{change: ANOTHER[change]} if odd else {})
    attention_with_lse(q, k, v, **options)


ANOTHER: dict[str, Any] = {
    "passes": "forward", "trim": False, "buffers": 4, "dataflow": "rotate-q", "gradient_dtype": "input",
    "result_dtype": "input", "tail_chunks": 2, "stages": 2, "groups": "strided", "travels": "keys", "pieces": 2,
    "direction": "descending",
}  # fmt: skip
"""For each option a value that is not its default where both passes are asked for."""

REFUSALS = {
    "schedules": ("rank 1: schedule is zigzag-ring-attention, on rank 0 it is tasp",) * 2,
    "schedule objects": ("rank 1: schedule is tasp ",) * 2,
    "rings": ("rank 1: buffers is 4, on rank 0 it is 2",) * 2,
    "batch": ("rank 1: batch is 2, on rank 0 it is 1",) * 2,
    "lengths": ("rank 0 has 16 of 30 positions, the contiguous layout of tasp assigns 15 to it",) * 2,
    "heads": ("rank 1: 3 heads are not a multiple of 2 KV heads", "3 heads are not a multiple of 2 KV heads"),
    "dtype": ("q is torch.float64, which is not supported, expected one of torch.",) * 2,
    "dtypes": ("rank 1: dtype is bf16, on rank 0 it is fp32",) * 2,
    "dtypes of k": ("rank 1: k is torch.bfloat16 on cpu, q is torch.float32 on cpu", "k is torch.bfloat16 on cpu"),
    "kernel": ("rank 1: ", "flash-attn"),
    "name": ("unknown schedule 'ring', did you mean 'ring-attention'? expected one of ",) * 2,
    "dimensions": ("q is [16, 4, 64], expected [batch, positions, heads, head_dim]",) * 2,
    "masks": ("rank 1: mask is causal, on rank 0 it is full",) * 2,
    "window": ("window: 5 with the mask full, expected a causal mask",) * 2,
    "gradients": ("rank 1: gradients is True, on rank 0 it is False",) * 2,
    "scale": ("scale: nan, expected a finite number",) * 2,
    "backward alone": ("passes is backward, expected both, or forward where no gradients are wanted",) * 2,
    **{
        each.name: (f"rank 1: {each.name} is {ANOTHER[each.name]}, on rank 0 it is "
                    f"{getattr(AttentionOptions('both'), each.name)}",) * 2
        for each in fields(AttentionOptions)
    },
}  # fmt: skip


def test_what_cannot_work_is_refused_on_all_ranks_before_data_moves() -> None:
    """So the group can still be used afterwards."""
    check_refusals(refusal, REFUSALS)


def count(counts: Counter[str], owner: type, method: str) -> None:
    """Count from now on the calls of a method of all objects of a class."""
    original: Callable[..., object] = getattr(owner, method)

    def counted(*arguments: object) -> object:
        counts[f"{owner.__name__}.{method}"] += 1
        return original(*arguments)

    setattr(owner, method, counted)


def counts_of_calls(gradients: bool) -> list[list[Counter[str]]]:
    """On a rank: what each of three equal calls builds and looks at, on a mesh by default and on a topology."""
    counts: Counter[str] = Counter()
    count(counts, Schedule, "__post_init__")
    count(counts, Link, "__hash__")
    count(counts, Link, "__eq__")
    found = []
    for topology in (None, nodes(2, 2)):
        workload = Workload(33, heads=4, kv_heads=2, head_dim=16, dtype="fp32", mask="causal")
        layout = attention_layout("tasp", workload, dist.get_world_size())
        q, k, v = (shard(x, layout, dist.get_rank()).requires_grad_(gradients) for x in layer_of(workload))
        of_calls = []
        for _ in range(3):
            counts.clear()
            attention_with_lse(q, k, v, schedule="tasp", causal=True, topology=topology)
            of_calls.append(Counter(counts))
        found.append(of_calls)
    return found


@pytest.mark.parametrize("gradients", [False, True])
def test_what_was_built_for_a_call_serves_the_next(gradients: bool) -> None:
    """The second call for the same inputs builds no schedule and looks at no link of the topology."""
    for of_rank in succeeded(on_ranks(counts_of_calls, 4, gradients)):
        for first, *later in of_rank:
            assert first["Schedule.__post_init__"] == (2 if gradients else 1)
            assert later == [Counter(), Counter()]


def with_a_death() -> tuple[str, float] | None:
    """On a rank: rank 2 dies when it is about to make its first kernel call.

    It has two buffers, so it cannot have taken in what it would have to pass on at the last of four steps.
    """
    workload = Workload(80, heads=2, head_dim=64, dtype="fp32")
    q, k, v = (shard(x, attention_layout("tasp", workload, 5), dist.get_rank()) for x in layer_of(workload))
    if dist.get_rank() == 2:
        AttentionLayer.compute = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    began_s = time.monotonic()
    try:
        attention_with_lse(q, k, v, options=AttentionOptions(buffers=2))
    except TaspLabError as error:
        return str(error), time.monotonic() - began_s
    return None


def test_a_rank_that_dies_in_the_middle_is_named_within_seconds() -> None:
    answers: Any = on_ranks(with_a_death, 5)
    assert answers.pop(2) == -signal.SIGKILL
    assert any("lost rank 2" in message for message, _ in answers), answers
    assert all("lost rank" in message and seconds < 20 for message, seconds in answers), answers


def odd_tensors() -> Any:
    """On a rank: tensors that are not contiguous, NaN and infinite values, no positions at all, a group of its own."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    workload = Workload(21, heads=4, kv_heads=2, head_dim=64, dtype="fp32", mask="causal")
    layout = attention_layout("tasp", workload, world_size)
    q, k, v = layer_of(workload)
    k[0, 9, 1, 3], v[0, 15, 0, 7], k[0, 12, 0, 0] = torch.nan, torch.inf, torch.inf
    low, high = 0, workload.sequence - 1
    alone = KERNELS["reference"].attend(q, k, v, scale=0.125, low=low, high=high)
    parts = [shard(x, layout, rank) for x in (q, k, v)]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    out, _ = attention_with_lse(*strided, causal=True)
    expected = shard(alone.out, layout, rank)
    torch.testing.assert_close(out.double(), expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    group = [dist.new_group([each]) for each in range(world_size)][rank]
    few = Workload(2, heads=4, kv_heads=2, head_dim=64, dtype="fp32")
    own = layer_of(few)
    in_group, _ = attention_with_lse(*own, group=group)
    torch.testing.assert_close(in_group.double(), single_process(few, "reference")[0], rtol=1e-4, atol=1e-5)
    placed = [shard(x, attention_layout("tasp", few, world_size), rank) for x in own]
    out, _ = attention_with_lse(*placed)
    assert out.shape[1] == placed[0].shape[1]
    torch.testing.assert_close(out, shard(in_group, attention_layout("tasp", few, world_size), rank))
    return True


def test_odd_tensors_and_groups() -> None:
    assert succeeded(on_ranks(odd_tensors, 3)) == [True] * 3
    assert succeeded(on_ranks(odd_tensors, 1)) == [True]


def test_the_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, "-m", "experiments.attention_example"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:2] for line in found] == [["rank", f"{rank}:"] for rank in range(3)]
    assert sum(int(line[2]) for line in found) == 1000
    assert all(float(line[-1]) < 1e-6 for line in found)
