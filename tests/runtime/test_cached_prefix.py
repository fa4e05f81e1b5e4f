"""Attention after a cached prefix: by threads for drawn layers, and on real processes against float64 on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import attention, attention_with_lse
from runtime.kernels.registry import KERNELS
from runtime.sequence_parallel.sharding import shard
from tasp_lab.core.choices import Dtype
from tasp_lab.core.errors import TaspLabError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.schedules.attention.test_cached_prefix import schedules
from tests.support.one_device import run_in_process
from tests.support.rank_layers import layer_of
from tests.support.ranks import on_ranks, succeeded
from tests.support.selection import covering
from tests.support.systems import schedules_for

LAYERS = [
    Workload(67, batch=2, heads=12, kv_heads=4, head_dim=16, dtype="fp32", mask="causal", cached_keys=50),
    Workload(53, heads=12, head_dim=8, dtype="fp32", cached_keys=21, mask="full"),
    Workload(61, heads=12, kv_heads=1, head_dim=8, dtype="fp32", mask="causal", window=13, cached_keys=40),
    Workload(41, heads=12, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", cached_keys=40),
    Workload(40, heads=12, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", cached_keys=1),
]
"""Lengths that no world size divides, every mask, grouped heads, a prefix of all positions but one and of one."""


@settings(max_examples=60)
@given(schedules(max_ranks=4), st.integers(0, 5), st.booleans())
def test_every_schedule_computes_exact_attention(schedule: Schedule, receives_ahead: int, whole_steps: bool) -> None:
    run_in_process(schedule, receives_ahead, whole_steps)


@pytest.mark.parametrize(("name", "heads"), [("token-ring", 1), ("ulysses", 2)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_results_in_rows_of_six_bytes_are_joined(name: str, heads: int, dtype: Dtype) -> None:
    """Rows of a 16-bit number and a log-sum-exp of 4 bytes, which are unaligned in the memory of a run."""
    layer = Workload(40, heads=heads, head_dim=1, dtype=dtype, cached_keys=7, mask="full")
    run_in_process(attention_schedules(name, full_mesh(2), layer)[0])


def shards(layer: Workload, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The queries of a rank's new positions, and the keys and values of all its positions."""
    layout, rank = attention_layout(name, layer, dist.get_world_size()), dist.get_rank()
    q, k, v = layer_of(layer)
    new = shard(q[:, layer.cached_keys :], layout.after(layer.cached_keys), rank)
    return new, shard(k, layout, rank), shard(v, layout, rank)


def arguments(layer: Workload) -> Any:
    return {"causal": layer.mask == "causal", "window": layer.window, "cached_keys": layer.cached_keys}


LAYERS_ON = {3: LAYERS[::2], 4: LAYERS[1::2]}
"""The layers that run on 3 and on 4 ranks."""


def cases_on(world_size: int) -> list[tuple[Workload, str]]:
    """Layers and schedules."""
    return covering((layer, name) for layer in LAYERS_ON[world_size] for name in schedules_for(layer, world_size))


def errors_of_rank() -> list[tuple[float, float]]:
    """On a rank: the squared errors of its part of every result and log-sum-exp, and the squares of these parts."""
    found, world_size, rank = [], dist.get_world_size(), dist.get_rank()
    for layer, name in cases_on(world_size):
        q, k, v = layer_of(layer)
        n, cached = layer.sequence, layer.cached_keys
        low = -cached if layer.mask == "causal" else 1 - n
        high = n - cached - 1 if layer.window is None else layer.window - 1 - cached
        new = q[:, cached:].double(), k.double(), v.double()
        single = KERNELS["reference"].attend(*new, scale=layer.head_dim**-0.5, low=low, high=high)
        layout = attention_layout(name, layer, world_size).after(cached)
        out, lse = attention_with_lse(*shards(layer, name), schedule=name, **arguments(layer))
        expected = shard(single.out, layout, rank), shard(single.lse.transpose(1, 2), layout, rank, dim=2)
        for each, wanted in zip((out, lse), expected, strict=True):
            assert each.shape == wanted.shape
            found.append((float((each.double() - wanted).square().sum()), float(wanted.square().sum())))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", LAYERS_ON)
def test_the_result_is_that_of_one_process_with_all_keys(world_size: int) -> None:
    parts = succeeded(on_ranks(errors_of_rank, world_size))
    cases = [case for case in cases_on(world_size) for _ in range(2)]
    for case, *of_ranks in zip(cases, *parts, strict=True):
        error, size = (sum(each) for each in zip(*of_ranks, strict=True))
        assert error**0.5 < 1e-5 * size**0.5, case


def refusals() -> list[str]:
    """On a rank: how it refuses what cannot work, one thing after the other; at last something that does."""
    found, layer, odd = [], LAYERS[0], dist.get_rank() == 1
    q, k, v = shards(layer, "tasp")
    good = {"schedule": "tasp", **arguments(layer)}
    schedule = attention_schedules("tasp", full_mesh(2), Workload(67, 2, 12, 4, 16, "fp32", "causal"))[0]
    wrong: list[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any]]] = [
        ((q, k, v), good | {"cached_keys": 0}),
        ((q, k, v), good | {"cached_keys": 50 if odd else 49}),
        ((q, k, v), good | {"cached_keys": -50}),
        ((q[:, :0], k, v), good | {"cached_keys": 67}),
        ((q, k[:, :4], v[:, :4]), good),
        ((q[:, 1:] if odd else q, k, v), good),
        ((q[:, 1:] if odd else torch.cat([q, q[:, :1]], dim=1), k, v), good),
        ((q, k[:, 1:], v[:, 1:]) if odd else (q, k, v), good),
        ((q.clone().requires_grad_(), k, v), good),
        ((q, k, v), good | {"cu_seqlens": [0, 30, 67]}),
        ((q, k, v), good | {"schedule": schedule}),
    ]
    for tensors, options in wrong:
        try:
            attention(*tensors, **options)
        except TaspLabError as error:
            found.append(str(error))
    with torch.no_grad():
        attention(q.clone().requires_grad_(), k, v, **good)
    attention(q, k, v, **good, options=AttentionOptions("forward", buffers=2))
    return found


REFUSED = [
    "expected equal batch, positions and head_dim, and equal shapes of k and v",
    "rank 1: cached_keys is 50, on rank 0 it is 49",
    "cached keys: -50, expected 0 or more",
    "cached keys: 67, expected 0 or more and fewer than the sequence of 67 positions",
    "k is [2, 4, 4, 16]",
    "16 queries and 67 keys on all ranks, expected 50 keys more than queries, the cached ones",
    "rank 0 has 9 of 17 queries, the zigzag layout of tasp assigns 8 to it",
    "17 queries and 66 keys on all ranks, expected 50 keys more than queries, the cached ones",
    "cached_keys: 50, expected 0 where gradients are wanted",
    "cached keys: 50 in packed documents, expected one document",
    "the schedule is for 2 ranks and Workload(",
]


@pytest.mark.distributed
def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    for found in succeeded(on_ranks(refusals, 2)):
        assert len(found) == len(REFUSED), found
        for text, part in zip(found, REFUSED, strict=True):
            assert part in text
            assert "\n" not in text
