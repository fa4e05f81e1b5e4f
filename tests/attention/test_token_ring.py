"""TokenRing: its bytes, its FLOPs, its steps. That every tile is computed once is proven on construction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.attention.token_ring import token_ring, token_ring_passes
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.builders import bidirectional_ring, full_mesh
from tasp_lab.workload.layer import Mask, Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.strategies import attention_layers
from tests.support.world import World

QUERY_LANE, RETURN_LANE = range(2)


def shard_bytes(layer: Workload, n: int, dtype_bytes: int) -> tuple[int, int, int]:
    """Bytes of a shard of one tensor of queries in the layer's dtype and in another one, and of a number per row."""
    rows = layer.batch * layer.heads * layer.sequence // n
    return 2 * rows * layer.head_dim, dtype_bytes * rows * layer.head_dim, 4 * rows


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_bytes_are_those_of_queries_and_results_whatever_the_kv_heads(mask: Mask, kv_heads: int, n: int) -> None:
    layer = Workload(sequence=12 * n, batch=2, heads=8, kv_heads=kv_heads, head_dim=4, mask=mask)
    forward, backward = token_ring_passes(full_mesh(n), layer)
    share = Fraction(3, 4) if mask == "causal" else Fraction(1)
    tensor, in_float, row_sums = shard_bytes(layer, n, 4)
    hops = share * n * (n - 1)
    assert lanes(forward) == [hops * tensor, hops * (in_float + row_sums)]
    assert lanes(backward) == [hops * (2 * tensor + 2 * row_sums), hops * in_float]
    small = token_ring(full_mesh(n), layer, result_dtype="input")
    assert lanes(small) == [hops * tensor, hops * (tensor + row_sums)]


def lanes(schedule: Schedule) -> list[int]:
    """The bytes on each lane."""
    found: list[int] = schedule.bytes_sent().sum(axis=(0, 1)).tolist()
    return found


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_rank_computes_the_same_at_every_step_but_the_first(mask: Mask) -> None:
    n, layer = 6, Workload(sequence=72, heads=2, head_dim=8, mask=mask)
    for schedule, factor in zip(token_ring_passes(full_mesh(n), layer), (2, 5), strict=True):
        flops = schedule.flops()
        assert (flops == flops[:, :1]).all()
        pairs = 72 * 73 // 2 if mask == "causal" else 72**2
        assert flops.sum() == pairs * factor * 2 * layer.heads * layer.head_dim


def test_results_return_a_step_after_their_call_and_the_last_ones_alone() -> None:
    n = 5
    schedule = token_ring(full_mesh(n), Workload(sequence=20, heads=1, head_dim=1))
    sent = [np.bincount(step.lane, minlength=2).tolist() for step in schedule.steps]
    assert sent == [[n, 0], [n, 0], [n, n], [n, n], [0, n], [0, n]]
    assert [bool(step.calls) for step in schedule.steps] == [True] * n + [False]
    for index, step in enumerate(schedule.steps):
        direct = step.lane == RETURN_LANE
        assert (step.gives == direct).all()
        assert ((step.source - step.destination) % n == np.where(direct, 1 - index, 1) % n).all()


def test_a_rank_makes_one_call_per_step() -> None:
    layer = Workload(sequence=40, heads=1, head_dim=1, mask="causal")
    for schedule in token_ring_passes(full_mesh(5), layer):
        assert all(sorted(calls.rank.tolist()) == [0, 1, 2, 3, 4] for step in schedule.steps for calls in step.calls)


@settings(max_examples=60)
@given(attention_layers(), st.integers(1, 6))
def test_any_layer_is_computed_once_at_any_world_size(layer: Workload, n: int) -> None:
    forward, backward = token_ring_passes(full_mesh(n), layer)
    assert 2 * backward.flops().sum() == 5 * forward.flops().sum()
    for schedule, promised in ((forward, {"results"}), (backward, {"key gradients", "query gradients"})):
        blocks = schedule.final.any(axis=0)
        kinds = np.array([each.name for each in schedule.blocks.kinds])[schedule.blocks.kind]
        assert blocks.tolist() == np.isin(kinds, list(promised)).tolist()


@given(attention_layers(packed=False), st.integers(1, 6))
@settings(max_examples=30)
def test_the_flops_are_those_of_the_pairs_in_the_mask(layer: Workload, n: int) -> None:
    query, key = np.ogrid[: layer.sequence, : layer.sequence]
    seen = (key <= query) | (layer.mask == "full")
    if layer.window is not None:
        seen &= query - key < layer.window
    assert token_ring(full_mesh(n), layer).flops().sum() == np.count_nonzero(seen) * layer.flops_per_pair


@settings(max_examples=15)
@given(attention_layers(max_positions=12), st.integers(1, 4))
def test_the_numbers_are_those_of_the_layer(layer: Workload, n: int) -> None:
    for schedule in token_ring_passes(full_mesh(n), layer):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


def test_it_needs_links_between_all_ranks() -> None:
    with pytest.raises(ScheduleError, match=r"step 3: rank 3 sends to rank 0, but .* has no such link"):
        token_ring(bidirectional_ring(5), Workload(sequence=10))


def test_an_unknown_dtype_on_the_wire_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unknown dtype 'bf16' on the wire, expected fp32 or input"):
        token_ring(full_mesh(4), Workload(sequence=8), result_dtype="bf16")
