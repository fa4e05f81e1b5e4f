"""Code of others beside ours: their published numbers of messages and calls, and the committed counts of ours."""

from __future__ import annotations

import pytest
import torch

from experiments.benchmarks.beside_others import (
    OURS,
    RESULT,
    TORCH,
    count_others,
    counts_of_ours,
    label,
    of_torch,
    transformer_engine,
)
from runtime.sequence_parallel.sharding import shard
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import zigzag
from tests.support.rank_layers import dout_of, exact, layer_of
from tests.support.ranks import on_ranks, succeeded

LAYER = Workload(32, heads=2, head_dim=8, dtype="bf16", mask="causal")


def ring_of_torch() -> float:
    """On a rank: the largest error of its ring."""
    rank, n = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = (*layer_of(LAYER), dout_of(LAYER), *exact(LAYER))
    q, k, v, dout, *wanted = (shard(x, zigzag(LAYER.sequence, n), rank) for x in whole)
    found = of_torch("alltoall")((q, k, v), dout)
    return max(float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True))


@pytest.mark.distributed
def test_the_ring_of_torch_computes_attention_in_as_many_messages_as_it_says() -> None:
    """Keys at all steps but the last in each pass, and gradients at all steps of the backward pass."""
    n = 4
    assert max(succeeded(on_ranks(ring_of_torch, n))) < 0.05
    for name, counts in succeeded(on_ranks(count_others, n))[1].items():
        if name in TORCH:
            assert (counts.calls, counts.messages) == (2 * n, 3 * n - 2)
            assert counts.shards == (n - 1) + (n - 1) + 2 * n  # gradients are twice as wide
            assert 0 < counts.copies < counts.kernels


@pytest.mark.parametrize("name", OURS[:2])
def test_the_committed_counts_of_ours(name: str) -> None:
    counts = counts_of_ours(name)
    assert f"| {label(name)} | {' | '.join(map(str, counts[:4]))} |" in RESULT.read_text()


def test_transformer_engine_sends_both_passes_in_16_bits() -> None:
    """Keys and values to all others in each pass, and their gradients once round."""
    assert transformer_engine(1, 8).shards == 7 + 7 + 7
    assert transformer_engine(1, 8).calls == 16
