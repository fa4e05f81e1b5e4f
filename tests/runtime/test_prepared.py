"""Prepared layers: agreed once, with a memory of their own, and the results of float64 in every call."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from runtime import attention, prepare, release_memory
from runtime.executor.executor import Executor
from runtime.executor.kept import OF_ALL_LAYERS
from runtime.executor.messages import Transport
from runtime.sequence_parallel import agreement
from tasp_lab.core.errors import RunError, WorkloadError
from tasp_lab.workload.layer import Workload
from tests.support.rank_layers import Shard, exact
from tests.support.ranks import on_ranks, succeeded

pytestmark = pytest.mark.distributed

RANKS = 3
LAYER = Workload(48, heads=4, kv_heads=2, head_dim=8, dtype="fp32", mask="causal")


def both_passes(layer: Any, shard: Shard) -> list[torch.Tensor]:
    """The result and the gradients of a shard."""
    out = layer(shard.q, shard.k, shard.v)
    return [out.detach(), *torch.autograd.grad(out, shard.inputs, shard.dout)]


def worst_errors(schedule: str, transport: str, dtype: str) -> list[float]:
    """On a rank: of each output and gradient the largest error of three calls, relative to the largest entry."""
    work = Workload(48, heads=4, kv_heads=2, head_dim=8, dtype=dtype, mask="causal")
    shard, whole = Shard(work, schedule), exact(work)
    layer = prepare(*shard.inputs, schedule=schedule, causal=True, transport=transport)
    expected = [shard.of(each) for each in whole]
    runs = [both_passes(layer, shard) for _ in range(3)]
    return [
        max(float((run[at].double() - each).abs().max() / whole[at].abs().max()) for run in runs)
        for at, each in enumerate(expected)
    ]


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 2e-5), ("bf16", 3e-2), ("fp16", 4e-3)])
def test_every_call_has_the_results_of_float64(dtype: str, most: float) -> None:
    for schedule, transport in (("tasp", "p2p"), ("zigzag-ring-attention", "batched"), ("ulysses", "all-to-all")):
        world_size = 2 if schedule == "ulysses" else RANKS
        for errors in succeeded(on_ranks(worst_errors, world_size, schedule, transport, dtype)):
            assert max(errors) <= most, (schedule, errors)


def counted(prepared: bool) -> dict[str, int]:
    """On a rank: what later calls of both passes agree on, hash, allocate and make anew."""
    shard, found = Shard(LAYER, "tasp"), Counter[str]()
    keywords: dict[str, Any] = {"schedule": "tasp", "causal": True}

    def plain(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*tensors, **keywords)

    layer = prepare(*shard.inputs, **keywords) if prepared else plain
    both_passes(layer, shard)
    release_memory()

    def counting(name: str, function: Any) -> Any:
        def counted_call(*arguments: Any, **options: Any) -> Any:
            found[name] += 1
            return function(*arguments, **options)

        return counted_call

    with (
        patch.object(agreement, "_gather", counting("exchanges", agreement._gather)),
        patch.object(hashlib, "sha256", counting("hashes", hashlib.sha256)),
        patch.object(Transport, "take", counting("memories", Transport.take)),
        patch.object(Executor, "__init__", counting("executors", Executor.__init__)),
    ):
        for _ in range(3):
            both_passes(layer, shard)
    return {**found, "shared": OF_ALL_LAYERS.size_bytes}


def test_later_calls_agree_on_nothing_and_allocate_no_memory() -> None:
    for found in succeeded(on_ranks(counted, RANKS, True)):
        assert found == {"shared": 0}
    for found in succeeded(on_ranks(counted, RANKS, False)):  # what is counted does happen without preparation
        assert found["exchanges"] == 3 * 2
        assert found["memories"] == found["executors"] == 2
        assert found["hashes"] > 0
        assert found["shared"] > 0


def prepared_on_one() -> str:
    """On a rank: the error where only rank 1 prepares the layer."""
    shard = Shard(LAYER, "tasp")
    call = prepare if dist.get_rank() == 1 else attention
    with pytest.raises(RunError) as raised:
        call(*shard.inputs, schedule="tasp", causal=True)
    return str(raised.value)


def test_all_ranks_prepare_a_layer_or_none() -> None:
    expected = "rank 1: prepared is True, on rank 0 it is False"
    assert succeeded(on_ranks(prepared_on_one, RANKS)) == [expected] * RANKS


def refusals() -> list[str]:
    """On a rank: what a prepared layer says of tensors that it was not prepared for."""
    q, k, v = (torch.randn(1, 8, heads, 16) for heads in (4, 2, 2))
    layer, found = prepare(q, k, v, schedule="ring-attention"), []
    for tensors in ((q[:, :6], k[:, :6], v[:, :6]), (q, k.half(), v), (q.clone().requires_grad_(), k, v)):
        with pytest.raises(WorkloadError) as raised:
            layer(*tensors)
        found.append(str(raised.value))
    with torch.no_grad():
        assert torch.equal(layer(q.clone().requires_grad_(), k, v), layer(q, k, v))
    return found


def test_other_tensors_are_refused() -> None:
    (found,) = succeeded(on_ranks(refusals, 1))
    assert found == [
        "q is [1, 6, 4, 16] of torch.float32 on cpu, expected [1, 8, 4, 16] of torch.float32 on cpu, for which the "
        "layer was prepared",
        "k is [1, 8, 2, 16] of torch.float16 on cpu, expected [1, 8, 2, 16] of torch.float32 on cpu, for which the "
        "layer was prepared",
        "gradients are wanted, expected none, as the layer was prepared with tensors that require none",
    ]


def bits_again() -> list[bool]:
    """On a rank: whether later calls of both passes have the bits of the first one, with deterministic algorithms."""
    work = Workload(48 * 64, heads=2, kv_heads=2, head_dim=16, dtype="fp32", mask="causal")
    shard = Shard(work, "token-multi-ring")
    torch.use_deterministic_algorithms(True)
    runs = [
        both_passes(lambda *tensors: attention(*tensors, schedule="token-multi-ring", causal=True), shard)
        for _ in range(6)
    ]
    return [all(map(torch.equal, runs[0], run)) for run in runs]


def test_deterministic_algorithms_give_the_same_bits_in_every_call() -> None:
    """Messages are long enough for lanes, which add parts as they arrive."""
    assert succeeded(on_ranks(bits_again, 4)) == [[True] * 6] * 4
