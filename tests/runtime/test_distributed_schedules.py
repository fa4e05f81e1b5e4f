"""Every schedule by name on real processes: results and gradients against float64 on one, whatever the layer."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from runtime import attention
from tasp_lab.attention.options import AttentionOptions
from tasp_lab.attention.registry import CIRCULATIONS
from tasp_lab.choices import WireDtype
from tasp_lab.workload.layer import Workload
from tests.runtime.test_distributed_attention import succeeded
from tests.runtime.test_distributed_gradients import Errors, Shard, Squares, alone, exact, relative_errors, squares
from tests.support.ranks import on_ranks
from tests.support.systems import schedules_for

pytestmark = pytest.mark.distributed

DOCUMENTS = (13, 0, 1, 40, 16)
HEADS = 24
"""A multiple of every world size but 5 and 7, on which no schedule shares out heads."""

LAYERS = [
    Workload(67, batch=2, heads=HEADS, kv_heads=12, head_dim=8, dtype="fp32", mask="causal"),
    Workload(53, heads=HEADS, head_dim=8, dtype="fp32"),
    Workload(61, heads=HEADS, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", window=13),
    Workload(70, heads=HEADS, kv_heads=1, head_dim=8, dtype="fp32", documents=DOCUMENTS),
    Workload(70, heads=HEADS, kv_heads=8, head_dim=8, dtype="fp32", mask="causal", documents=DOCUMENTS),
]
"""Lengths that no world size divides, every mask, packed documents, and from 1 KV head to as many as heads."""


def names_of(layer: Workload, world_size: int) -> list[str]:
    """The schedules but circulations, whose gradients have tests of their own."""
    return [name for name in schedules_for(layer, world_size) if name not in CIRCULATIONS]


def errors_of_rank(layers: list[Workload], dtype: WireDtype) -> list[Squares]:
    """On a rank: the squared errors of its part of both passes, of every layer and schedule."""
    found, options = [], AttentionOptions("both", gradient_dtype=dtype)
    for layer in layers:
        for name in names_of(layer, dist.get_world_size()):
            here = Shard(layer, name)
            found.append(squares(here.run(options=options), here.expected()))
    return found


def errors(layers: list[Workload], world_size: int, dtype: WireDtype = "auto") -> list[tuple[Workload, str, Errors]]:
    parts = succeeded(on_ranks(errors_of_rank, world_size, layers, dtype))
    cases = [(layer, name) for layer in layers for name in names_of(layer, world_size)]
    return [(*case, relative_errors(of_ranks)) for case, *of_ranks in zip(cases, *parts, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 8])
def test_results_and_gradients_are_those_of_one_process(world_size: int) -> None:
    found = errors(LAYERS, world_size)
    assert {"token-ring", "zigzag-token-ring"} <= {name for _, name, _ in found}
    assert ("ulysses" in {name for _, name, _ in found}) == (HEADS % world_size == 0)
    for layer, name, each in found:
        assert max(each) < 1e-5, (layer, name, each)


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_what_half_precision_costs(dtype: WireDtype) -> None:
    """At most half as much again as on one process, which rounds once: sums of several ranks are sent in float32."""
    layer = Workload(64, heads=8, head_dim=32, dtype="bf16", mask="causal")
    single = relative_errors([squares(alone(layer), exact(layer))])
    for _, name, found in errors([layer], 4, dtype):
        for error in Errors._fields:
            assert getattr(found, error) <= 1.5 * getattr(single, error), (name, error, found, single)


def on_one_rank() -> list[float]:
    """On the only rank: the largest difference of each schedule's result from that of the first."""
    layer = LAYERS[0]
    results = []
    for name in schedules_for(layer, 1):
        here = Shard(layer, name)
        results.append(attention(here.q, here.k, here.v, schedule=name, causal=True).detach())
    return [float((each - results[0]).abs().max()) for each in results]


def test_one_rank_needs_no_other() -> None:
    (found,) = succeeded(on_ranks(on_one_rank, 1))
    assert max(found) < 1e-6
