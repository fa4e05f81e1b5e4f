"""The double ring: bytes on inner and outer lanes, FLOPs, steps, times. Proven on construction."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.rings.rings import split_count
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import check_fit, dataflow_of
from tasp_lab.schedules.attention.double_ring import routes_of
from tasp_lab.schedules.attention.task import KEYS
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes, torus
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.links import with_links, without_links
from tests.support.routes import direct
from tests.support.schedules import bytes_between, task_of
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of

SPLITS = [(2, 2), (4, 2), (2, 4), (3, 3)]
RINGS = {2: 1, 3: 2, 4: 6, 5: 4, 7: 6, 8: 7}
"""Of a full mesh: n - 1 that use each link once, of 4 ranks 6 that use each one twice (Tillson 1980)."""
INNER, OUTER = range(2)
"""The lanes of a double ring without a variant."""


def slow_nodes(node_count: int, ranks_per_node: int, slower: int) -> Topology:
    """Full meshes of 1 GB/s per link, and NICs that are slower by a factor."""
    link = Fraction(10**9)
    return nodes(
        node_count, ranks_per_node, link_bandwidth_bytes_per_s=link, link_latency_s=Fraction(0),
        nic_bandwidth_bytes_per_s=link / slower, nic_latency_s=Fraction(0),
    )  # fmt: skip


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("window", "rings"), SPLITS)
def test_each_block_makes_one_hop_less_than_there_are_rings_between_them(
    window: int, rings: int, kv_heads: int
) -> None:
    """4X(P - 1) forward. Backward gradients make P - 1 hops and, as each window ends where it began, R - 1 more.

    The published code makes P + R: the owner's part goes along and comes back.
    """
    n = window * rings
    layer = Workload(sequence=4 * n, heads=4, kv_heads=kv_heads, head_dim=4, mask="full")
    forward, backward = passes_of(f"double-ring:{window}x{rings}", full_mesh(n), layer)
    keys = 4 * layer.sequence // n * kv_heads * layer.head_dim
    sent = forward.bytes_sent().sum(axis=0)
    assert (sent[:, INNER] == rings * (window - 1) * keys).all()
    assert (sent[:, OUTER] == (rings - 1) * keys).all()
    sent = backward.bytes_sent().sum(axis=0)
    gradients = 2 * keys
    assert (sent[:, INNER] == rings * (window - 1) * keys + (n - 1) * gradients).all()
    assert (sent[:, OUTER] == (rings - 1) * (keys + gradients)).all()


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("window", "rings"), [(2, 2), (4, 2), (2, 4), (3, 3), (5, 2)])
def test_tasp_inside_spreads_the_same_bytes_over_all_links_of_a_group(window: int, rings: int, kv_heads: int) -> None:
    """Each of W - 1 links of a rank carries what the only link of a single ring does, over W - 1; outside as before."""
    n, lanes = window * rings, RINGS[window]
    layer = Workload(sequence=12 * n, heads=4, kv_heads=kv_heads, head_dim=4, mask="full")
    keys = 4 * 12 * kv_heads * layer.head_dim
    within = np.kron(np.eye(rings, dtype=int), np.ones((window, window), dtype=int)) - np.eye(n, dtype=int)
    passes = passes_of(f"double-ring:{window}x{rings}:tasp", full_mesh(n), layer)
    inside = [rings * (window - 1) * keys, rings * (window - 1) * keys + (n - 1) * 2 * keys]
    outside = [(rings - 1) * keys, (rings - 1) * 3 * keys]
    for schedule, inner, outer in zip(passes, inside, outside, strict=True):
        assert schedule.lanes == lanes + 1
        assert (bytes_between(schedule) * within == Fraction(inner, window - 1) * within).all()
        sent = schedule.bytes_sent().sum(axis=0)
        assert (sent[:, :lanes] == Fraction(inner, lanes)).all()
        assert (sent[:, lanes] == outer).all()


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("window", "rings"), SPLITS)
def test_every_rank_computes_the_same_at_every_step(mask: str, window: int, rings: int) -> None:
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
    for schedule in passes_of(
        f"double-ring:{window}x{rings}", full_mesh(n), Workload(sequence=2 * n, heads=1, mask="full")
    ):
        for step in schedule.steps:
            inner = step.lane == INNER
            assert ((step.source // window == step.destination // window) == inner).all()
            assert ((step.source % window == step.destination % window) == ~inner).all()
            between = np.abs(step.source - step.destination)[inner] % window
            assert np.isin(between, (1, window - 1)).all()


@pytest.mark.parametrize(("window", "rings"), SPLITS)
def test_lanes_of_tasp_are_rings_within_groups_and_the_last_one_keeps_the_place(window: int, rings: int) -> None:
    n, lanes = window * rings, RINGS[window]
    layer = Workload(sequence=24 * n, heads=1, head_dim=1, mask="causal")
    for schedule in passes_of(f"double-ring:{window}x{rings}:tasp", full_mesh(n), layer):
        next_of: dict[tuple[int, int], set[int]] = {}
        for step in schedule.steps:
            inner = step.lane < lanes
            assert ((step.source // window == step.destination // window) == inner).all()
            assert ((step.source % window == step.destination % window) == ~inner).all()
            for source, destination, lane, _ in step.rows():
                if lane < lanes:
                    next_of.setdefault((lane, source % window), set()).add(destination % window)
        assert len(next_of) == lanes * window
        assert all(len(each) == 1 for each in next_of.values())


def test_one_ring_or_rings_of_one_rank_are_the_ring() -> None:
    layer = Workload(sequence=48, heads=2, head_dim=2, mask="causal")
    expected = passes_of("zigzag-ring-attention", full_mesh(4), layer, dataflow="rotate-kv")
    for name in ("double-ring:4x1", "double-ring:1x4"):
        for schedule, ring in zip(passes_of(name, full_mesh(4), layer), expected, strict=True):
            assert schedule.name == name
            assert [step.rows() for step in schedule.steps] == [step.rows() for step in ring.steps]
    tasp = passes_of("tasp", full_mesh(4), layer, dataflow="rotate-kv")
    for name, others in (("double-ring:4x1:tasp", tasp), ("double-ring:1x4:tasp", expected)):
        for schedule, other in zip(passes_of(name, full_mesh(4), layer), others, strict=True):
            assert schedule.name == name
            assert [step.rows() for step in schedule.steps] == [step.rows() for step in other.steps]


@pytest.mark.parametrize("slower", [1, 2, 3, 10])
def test_only_one_block_waits_for_the_slower_links_between_nodes(slower: int) -> None:
    """Outer and inner rings move at once; a single ring sends every block but one over the same link between nodes."""
    layer = Workload(sequence=64, heads=1, head_dim=4, mask="full")
    machine = Machine(slow_nodes(2, 4, slower), compute=INSTANT)
    hop_s = layer.kv_bytes_per_position * 8 / Fraction(10**9)
    double, single = (
        simulate(passes_of(name, machine.topology, layer).forward, machine).time_s
        for name in ("double-ring:4x2", "ring-attention")
    )
    assert double == (max(3, slower) + 3) * hop_s
    assert single == 7 * slower * hop_s


@pytest.mark.parametrize("slower", [1, 3, 10])
def test_a_window_takes_the_time_of_one_hop_over_all_links(slower: int) -> None:
    """7 hops of a seventh of the keys in each ring; the last part to reach the other node goes around there alone."""
    layer = Workload(sequence=16 * 7, heads=1, head_dim=4, mask="full")
    machine = Machine(slow_nodes(2, 8, slower), compute=INSTANT)
    hop_s = layer.kv_bytes_per_position * 7 / Fraction(10**9)
    times = [
        simulate(passes_of(name, machine.topology, layer).forward, machine).time_s
        for name in ("double-ring:8x2:tasp", "double-ring:8x2")
    ]
    assert times == [(slower + 1) * hop_s, (max(7, slower) + 7) * hop_s]


def lanes_of_keys(schedule: Schedule) -> int:
    """The lanes of what is not given: without those on which sums go straight home."""
    return len({lane for step in schedule.steps for lane in step.lane[~step.gives].tolist()})


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_half_of_the_keys_go_each_way_if_slow_links_between_groups_carry_less(mask: str) -> None:
    """Half of the keys and of their gradients each way between four groups; behind a port all of them one way."""
    layer = Workload(sequence=16 * 24, heads=1, head_dim=4, mask=mask)
    between = [f"{rank}>{(rank + step) % 16}=1GB/s" for rank in range(16) for step in (4, 12)]
    slow_links = with_links(full_mesh(16), between)
    passes = passes_of("double-ring:4x4:tasp", slow_links, layer)
    whole = passes_of("double-ring:4x4:tasp", full_mesh(16), layer)
    for schedule, one_way in zip(passes, whole, strict=True):
        assert [lanes_of_keys(each) for each in (schedule, one_way)] == [RINGS[4] + 2, RINGS[4] + 1]
        up, down = (np.roll(np.eye(16, dtype=bool), step, axis=1) for step in (4, 12))
        assert bytes_between(schedule)[up].max() < bytes_between(one_way)[up | down].max()
    if mask == "full":
        keys = layer.kv_bytes_per_position * 24
        assert set(bytes_between(passes.forward)[up | down].tolist()) == {3 * keys // 2}
    ports = slow_nodes(4, 4, 100)
    assert [each.lanes for each in passes_of("double-ring:4x4:tasp", ports, replace(layer, mask="full"))] == [7, 7]


def test_a_block_stays_for_a_window_in_one_of_more_buffers() -> None:
    layer = Workload(sequence=32, heads=1, mask="full")
    forward, backward = passes_of("double-ring:4x2", full_mesh(8), layer, buffers=2)
    for schedule in (forward, backward):
        assert [pool.buffers for pool in schedule.blocks.pools] == [5]
    check_fit(forward, backward)
    assert dataflow_of(backward) == "rotate-kv"


@pytest.mark.parametrize("variant", ["", ":tasp"])
@pytest.mark.parametrize("buffers", [2, 3])
def test_memory_is_that_of_the_own_keys_and_the_buffers(variant: str, buffers: int) -> None:
    """A shard of keys comes at each step, in parts or whole. Backward gradients in float32 take twice as much.

    At step W come keys and the gradients of the own ones of window 0, and those are begun with which window 1 begins.
    """
    layer = Workload(sequence=8 * 12, heads=2, head_dim=4, mask="full")
    forward, backward = passes_of(f"double-ring:4x2{variant}", full_mesh(8), layer, buffers=buffers)
    keys = layer.kv_bytes_per_position * 12
    assert (memory_bytes(forward) == (1 + buffers + 3) * keys).all()
    assert (memory_bytes(backward) == (1 + 2 + (buffers + 3) * (1 + 2 + 2)) * keys).all()


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


def test_groups_need_the_same_links_and_rings_of_their_own() -> None:
    layer = Workload(sequence=24, heads=1, mask="full")
    refused = (
        r"schedule 'double-ring:3x2:tasp': .* ranks 3, 4, 5 have other links among them than ranks 0, 1, 2, expected"
    )
    for change in ({"names": ["3>4"]}, {"names": ["0>1"]}):
        with pytest.raises(ScheduleError, match=refused):
            passes_of("double-ring:3x2:tasp", without_links(full_mesh(6), **change), layer, groups="consecutive")
    with pytest.raises(ScheduleError, match=refused):
        passes_of("double-ring:3x2:tasp", with_links(full_mesh(6), ["4-5=1GB/s"]), layer, groups="consecutive")
    with pytest.raises(ScheduleError, match=r"'double-ring:3x2:tasp': .*has no ring"):
        passes_of("double-ring:3x2:tasp", direct(bidirectional_ring(6)), layer, groups="consecutive")
    torus_rings = passes_of("double-ring:4x3:tasp", torus((3, 4)), Workload(sequence=24, heads=1, mask="full")).forward
    assert torus_rings.lanes == 3


@settings(max_examples=15, deadline=None)
@given(attention_layers(), st.sampled_from([torus((3, 4)), nodes(2, 4), nodes(3, 2, "switch", "rails")]))
def test_keys_are_cut_by_the_shares_of_the_rings(layer: Workload, topology: Topology) -> None:
    """Of every span of a shard each ring has its share, rounded to positions."""
    groups, window = {"torus:3x4": (3, 4), "nodes:2x4": (2, 4)}.get(topology.name, (3, 2))
    forward = passes_of(f"double-ring:{window}x{groups}:tasp", topology, layer, trim=False).forward
    lanes = forward.lanes - 1
    task = task_of(forward)
    counts = task.count[task.blocks_of(KEYS)].tolist()
    for rank in range(topology.world_size):
        for span in task.layout.spans[rank]:
            parts = [each for each in split_count(span.count, [Fraction(1, lanes)] * lanes) if each]
            assert counts[: len(parts)] == parts
            counts = counts[len(parts) :]
    assert not counts


def test_rings_without_links_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank \d+ sends to rank \d+, but bidirectional-ring:12 has no such link"):
        passes_of("double-ring:2x6", direct(bidirectional_ring(12)), Workload(sequence=24, heads=1, mask="full"))


@pytest.mark.parametrize("variant", ["", "tasp"])
def test_links_are_checked_without_the_paths_of_all_blocks(variant: str) -> None:
    topology = nodes(3, 4)
    for routes in routes_of("double-ring:4x3", topology, (4, 3), variant):
        hops = np.array([0, 1, 4, 11])
        assert np.array_equal(routes.paths(hops), routes.paths()[:, hops])
    tracemalloc.start()
    routes_of("double-ring:8x512", full_mesh(4096), (8, 512), "")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * 4096**2 / 8, "bytes; a table of ranks and hops takes eight times as many"
