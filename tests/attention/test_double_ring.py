"""The double ring: bytes on inner and outer lanes, FLOPs, steps, times. Proven on construction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.attention.backward import check_fit, dataflow_of
from tasp_lab.attention.double_ring import INNER, OUTER
from tasp_lab.errors import ScheduleError
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes
from tasp_lab.topology.edits import without_links
from tasp_lab.workload.layer import Mask, Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of
from tests.support.world import World

SPLITS = [(2, 2), (4, 2), (2, 4), (3, 3)]


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("window", "rings"), SPLITS)
def test_each_block_makes_one_hop_less_than_there_are_rings_between_them(
    window: int, rings: int, kv_heads: int
) -> None:
    """4X(P - 1) forward. Backward gradients make P - 1 hops and, as each window ends where it began, R - 1 more.

    The published code makes P + R: the owner's part goes along and comes back.
    """
    n = window * rings
    layer = Workload(sequence=4 * n, heads=4, kv_heads=kv_heads, head_dim=4)
    forward, backward = passes_of(f"double-ring:{window}x{rings}", full_mesh(n), layer)
    keys = 4 * layer.sequence // n * kv_heads * layer.head_dim
    sent = forward.bytes_sent().sum(axis=0)
    assert (sent[:, INNER] == rings * (window - 1) * keys).all()
    assert (sent[:, OUTER] == (rings - 1) * keys).all()
    sent = backward.bytes_sent().sum(axis=0)
    gradients = 2 * keys
    assert (sent[:, INNER] == rings * (window - 1) * keys + (n - 1) * gradients).all()
    assert (sent[:, OUTER] == (rings - 1) * (keys + gradients)).all()


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("window", "rings"), SPLITS)
def test_every_rank_computes_the_same_at_every_step(mask: Mask, window: int, rings: int) -> None:
    n = window * rings
    layer = Workload(sequence=4 * n, heads=2, head_dim=8, mask=mask)
    pairs = layer.sequence * (layer.sequence + 1) // 2 if mask == "causal" else layer.sequence**2
    passes = passes_of(f"double-ring:{window}x{rings}", full_mesh(n), layer)
    for schedule, factor in zip(passes, (2, 5), strict=True):
        flops = schedule.flops()
        assert (flops == flops[:, :1]).all()
        assert (flops[:n] > 0).all()
        assert flops.sum() == pairs * factor * 2 * layer.heads * layer.head_dim


@pytest.mark.parametrize(("window", "rings"), SPLITS)
def test_inner_lanes_stay_within_rings_and_outer_ones_keep_the_place(window: int, rings: int) -> None:
    n = window * rings
    for schedule in passes_of(f"double-ring:{window}x{rings}", full_mesh(n), Workload(sequence=2 * n, heads=1)):
        for step in schedule.steps:
            inner = step.lane == INNER
            assert ((step.source // window == step.destination // window) == inner).all()
            assert ((step.source % window == step.destination % window) == ~inner).all()
            between = np.abs(step.source - step.destination)[inner] % window
            assert np.isin(between, (1, window - 1)).all()


def test_one_ring_or_rings_of_one_rank_are_the_ring() -> None:
    layer = Workload(sequence=48, heads=2, head_dim=2, mask="causal")
    expected = passes_of("zigzag-ring-attention", full_mesh(4), layer, dataflow="rotate-kv")
    for name in ("double-ring:4x1", "double-ring:1x4"):
        for schedule, ring in zip(passes_of(name, full_mesh(4), layer), expected, strict=True):
            assert schedule.name == name
            assert [step.rows() for step in schedule.steps] == [step.rows() for step in ring.steps]


@pytest.mark.parametrize("slower", [1, 2, 3, 10])
def test_only_one_block_waits_for_the_slower_links_between_nodes(slower: int) -> None:
    """Outer and inner rings move at once; a single ring sends every block but one over the same link between nodes."""
    layer = Workload(sequence=64, heads=1, head_dim=4)
    link = Fraction(10**9)
    topology = nodes(
        2, 4, link_bandwidth_bytes_per_s=link, link_latency_s=Fraction(0),
        nic_bandwidth_bytes_per_s=link / slower, nic_latency_s=Fraction(0),
    )  # fmt: skip
    machine = Machine(topology, compute=INSTANT)
    hop_s = layer.kv_bytes_per_position * 8 / link
    double, single = (
        simulate(passes_of(name, topology, layer).forward, machine).time_s
        for name in ("double-ring:4x2", "ring-attention")
    )
    assert double == (max(3, slower) + 3) * hop_s
    assert single == 7 * slower * hop_s


def test_a_block_stays_for_a_window_in_one_of_more_buffers() -> None:
    layer = Workload(sequence=32, heads=1)
    forward, backward = passes_of("double-ring:4x2", full_mesh(8), layer, buffers=2)
    for schedule in (forward, backward):
        assert [pool.buffers for pool in schedule.blocks.pools] == [5]
    check_fit(forward, backward)
    assert dataflow_of(backward) == "rotate-kv"


@settings(max_examples=60, deadline=None)
@given(attention_layers(), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.booleans(), st.integers(2, 4))
def test_any_layer_is_computed_once(layer: Workload, split: tuple[int, int], trim: bool, buffers: int) -> None:
    name, n = "double-ring:{}x{}".format(*split), split[0] * split[1]
    forward, backward = passes_of(name, full_mesh(n), layer, trim=trim, buffers=buffers)
    assert 2 * backward.flops().sum() == 5 * forward.flops().sum()


@settings(max_examples=25, deadline=None)
@given(attention_layers(max_positions=14), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.booleans())
def test_the_numbers_are_those_of_the_layer(layer: Workload, split: tuple[int, int], trim: bool) -> None:
    for schedule in passes_of("double-ring:{}x{}".format(*split), full_mesh(split[0] * split[1]), layer, trim=trim):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


def test_trimmed_bytes_under_a_causal_mask() -> None:
    """Only lower ranks need the back half of a shard: going down both rings, it leaves out what no rank there needs."""
    layer = Workload(sequence=64, heads=2, head_dim=4, mask="causal")
    whole = passes_of("double-ring:4x2", full_mesh(8), layer, trim=False).forward.bytes_sent().sum()
    trimmed = passes_of("double-ring:4x2", full_mesh(8), layer).forward.bytes_sent().sum()
    assert trimmed == Fraction(3, 4) * whole


def test_sums_go_on_along_the_outer_ring_where_no_link_leads_home() -> None:
    """Of four inner rings, those opposite to each other are not linked."""
    layer = Workload(sequence=32, heads=1, head_dim=2, mask="causal", window=9)
    away = [(rank, (rank + 4) % 8) for rank in range(8)]
    sparse = without_links(full_mesh(8), [f"{a}-{b}" for a, b in away[:4]])
    hops = []
    for topology in (full_mesh(8), sparse):
        backward = passes_of("double-ring:2x4", topology, layer).backward
        hops.append({(source, destination) for step in backward.steps for source, destination, *_ in step.rows()})
    assert hops[0] & set(away)
    assert not hops[1] & set(away)


def test_rings_without_links_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank \d+ sends to rank \d+, but bidirectional-ring:12 has no such link"):
        passes_of("double-ring:2x6", bidirectional_ring(12), Workload(sequence=24, heads=1))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("double-ring:3x3", "is for 9 ranks, expected a split of 8"),
        ("double-ring", "expected double-ring:WxR with two numbers, like double-ring:2x4"),
        ("double-ring:4", "expected double-ring:WxR with two numbers"),
    ],
)
def test_other_splits_are_refused(name: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=f"schedule '{name}'.*{why}"):
        passes_of(name, full_mesh(8), Workload(sequence=8))
