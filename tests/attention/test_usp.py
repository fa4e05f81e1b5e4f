"""USP: any schedule of attention between groups of ranks that share out the heads."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.attention.backward import Dataflow, attention_passes
from tasp_lab.attention.forward import attention
from tasp_lab.attention.registry import CIRCULATIONS
from tasp_lab.collectives.all_gather import ring_all_gather
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.strategies import attention_layers
from tests.support.systems import token_ring_passes, ulysses, usp
from tests.support.world import World


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A pass of any schedule between groups, and a number of members that share out its heads."""
    groups, members = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layer = draw(attention_layers(max_positions=12))
    kv_heads = draw(st.sampled_from([1, members, 2 * members]))
    layer = replace(layer, heads=2 * members, kv_heads=kv_heads)
    name = draw(st.sampled_from([*sorted(CIRCULATIONS), "token-ring"]))
    if name == "token-ring":
        passes = token_ring_passes(full_mesh(groups), layer)
    else:
        dataflow: Dataflow = draw(st.sampled_from(["rotate-kv", "rotate-q"]))
        passes = attention_passes(name, full_mesh(groups), layer, dataflow=dataflow)
    return draw(st.sampled_from(passes)), members


@settings(max_examples=40)
@given(cases())
def test_the_numbers_and_flops_are_those_of_the_layer(case: tuple[Schedule, int]) -> None:
    outer, members = case
    schedule = usp(full_mesh(outer.world_size * members), outer, members)
    assert schedule.flops().sum() == outer.flops().sum()
    world = World.of(schedule)
    assert is_right_in_orders(world, numbers_of(world), 1)


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("members", [1, 2, 4])
def test_heads_are_exchanged_within_groups_and_keys_move_between_them(kv_heads: int, members: int) -> None:
    groups = 3
    layer = Workload(sequence=2 * groups * members * 5, heads=8, kv_heads=kv_heads, head_dim=4)
    outer = attention("ring-attention", full_mesh(groups), layer)
    schedule = usp(full_mesh(groups * members), outer, members)
    there, *between, home = schedule.bytes_sent().sum(axis=2)
    positions, share = layer.sequence // (groups * members), Fraction(members - 1, members)
    queries, keys = layer.query_bytes_per_position * positions, layer.kv_bytes_per_position * positions
    assert (there == share * (queries + keys)).all()
    assert (home == share * (2 * queries + 4 * layer.heads * positions)).all()
    assert (sum(between) == (groups - 1) * keys).all()
    assert (schedule.flops() == schedule.flops()[:, :1]).all()
    for step in schedule.steps[1:-1]:
        assert (step.source % members == step.destination % members).all()


def test_one_member_is_the_outer_schedule_and_one_group_is_ulysses() -> None:
    layer = Workload(sequence=24, heads=4, head_dim=2, mask="causal")
    outer = attention("zigzag-ring-attention", full_mesh(4), layer)
    alone = usp(full_mesh(4), outer, 1)
    assert [step.rows() for step in alone.steps[1:-1]] == [step.rows() for step in outer.steps]
    together = usp(full_mesh(4), attention("ring-attention", full_mesh(1), layer), 4)
    expected = ulysses(full_mesh(4), layer, result_dtype="fp32")
    assert (together.bytes_sent().sum(axis=2) == expected.bytes_sent().sum(axis=2)).all()
    assert (together.flops() == expected.flops()).all()


def test_kv_heads_that_are_fewer_than_members_move_once_per_member() -> None:
    layer = Workload(sequence=24, heads=4, kv_heads=1, head_dim=2)
    outer = attention("ring-attention", full_mesh(2), layer)
    schedule = usp(full_mesh(8), outer, 4)
    assert np.array_equal(schedule.bytes_sent()[1:-1].sum(axis=(1, 2)), 4 * outer.bytes_sent().sum(axis=(1, 2)))


def test_what_is_no_outer_schedule_is_refused() -> None:
    layer = Workload(sequence=24, heads=6, head_dim=2)
    ring = attention("ring-attention", full_mesh(2), layer)
    with pytest.raises(ScheduleError, match="schedule 'usp-3 ring-attention': 2 groups of 3 ranks, full-mesh:8 has 8"):
        usp(full_mesh(8), ring, 3)
    with pytest.raises(ScheduleError, match="schedule 'usp-4 ring-attention': 6 heads and 6 KV heads for 4 members"):
        usp(full_mesh(8), ring, 4)
    with pytest.raises(ScheduleError, match="'usp-2 ring': expected attention that starts with the queries and keys"):
        usp(full_mesh(4), ring_all_gather(full_mesh(2), 8), 2)
    back = attention_passes("ring-attention", full_mesh(2), layer, dataflow="rotate-kv-back").backward
    with pytest.raises(ScheduleError, match="expected attention that starts with the queries and keys of each rank"):
        usp(full_mesh(4), back, 2)
    with pytest.raises(ScheduleError, match="'usp-2 ulysses': expected an outer schedule with all heads in each block"):
        usp(full_mesh(4), ulysses(full_mesh(2), replace(layer, kv_heads=1)), 2)
