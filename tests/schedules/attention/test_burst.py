"""BurstAttention: when it sends less, and that it is the ring forward and ``rotate-q`` backward."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tasp_lab.schedules.attention.backward import dataflow_of
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.systems import passes_of


@pytest.mark.parametrize(("kv_heads", "saves"), [(8, True), (4, False), (2, False)])
def test_it_sends_less_than_keys_and_their_gradients_if_there_are_as_many_kv_heads(kv_heads: int, saves: bool) -> None:
    """In 16 bit it pays below 4/3 heads per KV head, without the row sums."""
    layer = Workload(sequence=64, heads=8, kv_heads=kv_heads, head_dim=128, mask="full")
    sent = [
        passes_of(name, full_mesh(8), layer, gradient_dtype="input", **options).backward.bytes_sent().sum()
        for name, options in (("burst", {}), ("ring-attention", {"dataflow": "rotate-kv"}))
    ]
    assert (sent[0] < sent[1]) == saves


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_it_is_the_ring_forward_and_rotates_queries_backward(mask: str) -> None:
    layer = Workload(sequence=48, heads=4, kv_heads=2, head_dim=4, mask=mask)
    ring = "ring-attention" if mask == "full" else "zigzag-ring-attention"
    passes = passes_of("burst", full_mesh(4), layer)
    assert dataflow_of(passes.backward) == "rotate-q"
    for schedule, expected in zip(passes, passes_of(ring, full_mesh(4), layer, dataflow="rotate-q"), strict=True):
        assert schedule.name == "burst"
        assert [step.rows() for step in schedule.steps] == [step.rows() for step in expected.steps]
        assert (schedule.flops() == expected.flops()).all()
        assert (schedule.flops().sum(axis=0) == schedule.flops().sum() // 4).all()


def test_only_lower_ranks_need_one_half_of_a_shard_under_a_causal_mask() -> None:
    """The back half of keys, the front half of queries; their gradients return from the last rank that adds to them."""
    n, layer = 6, Workload(sequence=72, heads=2, head_dim=4, mask="causal")
    forward, backward = passes_of("burst", full_mesh(n), layer)
    rows = layer.sequence // n * layer.heads
    hops = Fraction(3, 4) * n * (n - 1)
    assert forward.bytes_sent().sum() == hops * 4 * rows * layer.head_dim
    assert backward.bytes_sent().sum() == hops * rows * (4 * layer.head_dim + 2 * 4 + 4 * layer.head_dim)
