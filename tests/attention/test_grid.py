"""Ranks in a grid: bytes that fall with the square root of the ranks, FLOPs, calls. Proven on construction."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.attention.backward import check_fit, dataflow_of
from tasp_lab.attention.task import AttentionTask
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.topology.builders import full_mesh, nodes, ring
from tasp_lab.workload.layer import Mask, Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of
from tests.support.world import World

SPLITS = [(2, 2), (2, 4), (4, 2), (3, 3), (1, 3), (3, 1)]
small_splits = st.sampled_from([(2, 2), (2, 3), (3, 2), (1, 2), (2, 1)])


def named(split: tuple[int, int]) -> str:
    return "grid:{}x{}".format(*split)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("split", SPLITS)
def test_queries_and_results_move_in_rows_and_keys_in_columns(split: tuple[int, int], kv_heads: int) -> None:
    (rows, columns), n = split, split[0] * split[1]
    layer = Workload(sequence=3 * n, batch=2, heads=4, kv_heads=kv_heads, head_dim=4)
    positions = layer.batch * 3
    q, kv, sums = 2 * positions * 4 * 4, 4 * positions * kv_heads * 4, 4 * positions * 4
    across, down = columns - 1, rows - 1
    for dtype, size in (("auto", 1), ("fp32", 2)):  # in 16 or 32 bit on the wire
        forward, backward = passes_of(named(split), full_mesh(n), layer, result_dtype=dtype, gradient_dtype=dtype)
        sent = across * q + down * kv, 0, across * (size * q + sums)
        assert (forward.bytes_sent().sum(axis=2) == np.array(sent)[:, None]).all()
        sent = across * (2 * q + 2 * sums), 0, size * (across * q + down * kv)
        assert (backward.bytes_sent().sum(axis=2) == np.array(sent)[:, None]).all()
    for schedule in (forward, backward):
        for step in schedule.steps:
            in_row = step.lane < columns - 1
            assert ((step.source // columns == step.destination // columns) == in_row).all()
            assert ((step.source % columns == step.destination % columns) == ~in_row).all()


@pytest.mark.parametrize("n", [4, 9, 16, 25])
def test_a_square_sends_what_star_trail_does_with_as_many_teams_as_a_team_has_ranks(n: int) -> None:
    """8Y(C - 1) in 16 bit with C = sqrt(P), and the log-sum-exp: a ring sends 4X(P - 1), sqrt(P) + 1 halves as much."""
    side, layer = isqrt(n), Workload(sequence=2 * n, heads=2, head_dim=4)
    y = 2 * layer.heads * layer.head_dim
    forward = passes_of(named((side, side)), full_mesh(n), layer, result_dtype="input").forward
    without_sums = forward.bytes_sent().sum(axis=(0, 2)) - (side - 1) * 4 * 2 * layer.heads
    assert (without_sums == 8 * y * (side - 1)).all()
    in_ring = passes_of("ring-attention", full_mesh(n), layer).forward.bytes_sent().sum(axis=(0, 2))
    assert (in_ring == Fraction(side + 1, 2) * without_sums).all()


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("split", SPLITS)
def test_all_ranks_compute_the_same(mask: Mask, split: tuple[int, int]) -> None:
    n = split[0] * split[1]
    layer = Workload(sequence=4 * n, heads=2, head_dim=8, mask=mask)
    pairs = layer.sequence * (layer.sequence + 1) // 2 if mask == "causal" else layer.sequence**2
    for schedule, factor in zip(passes_of(named(split), full_mesh(n), layer), (2, 5), strict=True):
        assert (schedule.flops()[1] == pairs * factor * 2 * layer.heads * layer.head_dim // n).all()
        assert schedule.flops().sum() == schedule.flops()[1].sum()
        if mask == "full":
            assert [len(calls) for calls in schedule.steps[1].calls] == [n]


@pytest.mark.parametrize("split", [(2, 2), (3, 2), (2, 4)])
def test_a_block_goes_only_to_ranks_whose_mask_needs_it(split: tuple[int, int]) -> None:
    """The pairs of ranks and half shards that a causal mask leaves, counted chunk by chunk."""
    (_, columns), n = split, split[0] * split[1]
    layer = Workload(sequence=2 * n, heads=1, head_dim=4, mask="causal")
    chunks = [(rank, chunk) for rank in range(n) for chunk in (rank, 2 * n - 1 - rank)]
    queries, keys = set(), set()
    for q_rank, q in chunks:
        for k_rank, k in chunks:
            user = q_rank // columns * columns + k_rank % columns
            if k <= q:
                queries |= {(user, q)} if user != q_rank else set()
                keys |= {(user, k)} if user != k_rank else set()
    forward, backward = passes_of(named(split), full_mesh(n), layer)
    there, _, home = forward.bytes_sent().sum(axis=(1, 2))
    assert there == len(queries) * 2 * 4 + len(keys) * 4 * 4
    assert home == len(queries) * (2 * 4 + 4)
    there, _, home = backward.bytes_sent().sum(axis=(1, 2))
    assert there == len(queries) * (2 * 2 * 4 + 2 * 4)
    assert home == len(queries) * 2 * 4 + len(keys) * 4 * 4


@settings(max_examples=60, deadline=None)
@given(attention_layers(), small_splits)
def test_any_layer_is_computed_once_by_calls_on_blocks_side_by_side(layer: Workload, split: tuple[int, int]) -> None:
    for schedule in passes_of(named(split), full_mesh(split[0] * split[1]), layer):
        assert isinstance(schedule.task, AttentionTask)
        assert schedule.flops().sum() == schedule.task.total_flops
        for rank in range(schedule.world_size):
            rank_part(schedule, rank)


@settings(max_examples=25, deadline=None)
@given(attention_layers(max_positions=12), small_splits)
def test_the_numbers_are_those_of_the_layer(layer: Workload, split: tuple[int, int]) -> None:
    for schedule in passes_of(named(split), full_mesh(split[0] * split[1]), layer):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


def test_the_backward_pass_starts_with_the_keys_that_the_forward_pass_left() -> None:
    forward, backward = passes_of("grid:2x3", full_mesh(6), Workload(sequence=25, heads=2, mask="causal", window=9))
    check_fit(forward, backward)
    assert dataflow_of(backward) is None
    assert forward.kept is not None
    keys = np.array([kind.name == "keys" for kind in forward.blocks.kinds])[forward.blocks.kind]
    assert keys[: keys.sum()].all()
    assert (backward.initial[:, : keys.sum()] == (forward.initial | forward.kept)[:, : keys.sum()]).all()


def test_links_within_rows_and_columns_suffice() -> None:
    layer = Workload(sequence=24, heads=2)
    passes_of("grid:2x3", nodes(2, 3, "switch", "rails"), layer)
    with pytest.raises(ScheduleError, match=r"rank \d sends to rank \d, but ring:4 has no such link"):
        passes_of("grid:2x2", ring(4), layer)


@pytest.mark.parametrize(
    ("name", "why"), [("grid:3x3", "is for 9 ranks, expected a split of 8"), ("grid:8", "expected grid:YxX with two")]
)
def test_other_splits_are_refused(name: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=f"schedule '{name}'.*{why}"):
        passes_of(name, full_mesh(8), Workload(sequence=8))
