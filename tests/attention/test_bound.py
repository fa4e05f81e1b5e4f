"""The lower bound of an attention layer: what it counts, against counting one by one, and that nothing is faster."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.attention.backward import DATAFLOWS, Dataflow, attention_passes
from tasp_lab.attention.bound import attention_bound_s, rank_flops
from tasp_lab.attention.circulation import cut_blocks
from tasp_lab.attention.forward import attention
from tasp_lab.attention.registry import ATTENTION
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, both_ways
from tasp_lab.workload.attention_task import AttentionTask, Side
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout
from tests.support.layouts import LAYOUTS
from tests.support.strategies import complete_topologies, exact_bandwidths, exact_latencies

schedule_names = st.sampled_from(sorted(ATTENTION))
dataflows = st.sampled_from(DATAFLOWS)
sides = st.sampled_from(["keys", "queries"])
rates = st.fractions(Fraction(1), Fraction(10**5), max_denominator=10)


@st.composite
def layers(draw: st.DrawFn, max_positions: int = 40) -> Workload:
    """Small layers of every mask, some packed; some have fewer positions than there are ranks."""
    mask = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.none() | st.integers(1, max_positions)) if mask == "causal" else None
    documents = draw(st.none() | st.lists(st.integers(1, max_positions // 3), min_size=1, max_size=3).map(tuple))
    sequence = draw(st.integers(1, max_positions)) if documents is None else sum(documents)
    return Workload(sequence, heads=2, kv_heads=1, head_dim=1, mask=mask, window=window, documents=documents)


@st.composite
def switch_trees(draw: st.DrawFn) -> Topology:
    """Two switches under a third, with ranks below each; their ways up may be narrower."""
    port, uplink = draw(exact_bandwidths), draw(exact_bandwidths)
    links: list[Link] = []
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    for leaf, first in (("left", 0), ("right", sizes[0])):
        for rank in range(first, first + sizes[leaf == "right"]):
            links += both_ways(rank, leaf, port, draw(exact_latencies))
        links += both_ways(leaf, "root", uplink, Fraction(0))
    return Topology("tree", sum(sizes), tuple(links))


@st.composite
def shared_media(draw: st.DrawFn) -> Topology:
    """A mesh all links of which share one capacity."""
    mesh = full_mesh(draw(st.integers(2, 5)), draw(exact_bandwidths), draw(exact_latencies))
    names = tuple(link.name for link in mesh.links)
    return Topology(
        "medium", mesh.world_size, tuple(mesh.links), (SharedCapacity("bus", draw(exact_bandwidths), names),)
    )


def sees(layer: Workload, query: int, key: int) -> bool:
    """The definition of a mask."""
    starts = layer.document_starts.tolist()
    if sum(start <= query for start in starts) != sum(start <= key for start in starts):
        return False
    return layer.mask == "full" or 0 <= query - key < (layer.window or layer.sequence)


def meets(layer: Workload, layout: SequenceLayout, circulating_side: Side, ranks: set[int]) -> set[int]:
    """The circulating positions that stationary ones of some ranks meet."""
    own = [position for rank in ranks for position in layout.positions(rank).tolist()]
    keys_travel = circulating_side == "keys"
    return {
        goes
        for goes in range(layer.sequence)
        if any(sees(layer, stays, goes) if keys_travel else sees(layer, goes, stays) for stays in own)
    }


def uncut(
    layer: Workload, layout: SequenceLayout, circulating_side: Side = "keys", dtype: str | None = None
) -> AttentionTask:
    """What a pass must compute, one block per span."""
    return cut_blocks(layer, layout, [Fraction(1)], circulating_side, dtype)[0]


def placed(layer: Workload, name: str, world_size: int) -> SequenceLayout:
    return LAYOUTS[name](layer.sequence, world_size, layer.documents)


def received_bytes(task: AttentionTask, rank: int) -> int:
    """What a rank has to receive at least, counted position by position."""
    layer, layout, others = task.workload, task.layout, set(range(task.layout.world_size)) - {rank}
    own = set(layout.positions(rank).tolist())
    missing = meets(layer, layout, task.circulating_side, {rank}) - own
    size = layer.kv_bytes_per_position if task.circulating_side == "keys" else task.query_bytes_per_position
    if not task.is_backward:
        return len(missing) * size
    returned = meets(layer, layout, task.circulating_side, others) & own
    return len(missing) * size + len(returned) * task.gradient_bytes_per_position


def assert_bounded(machine: Machine, schedule: Schedule) -> None:
    assert schedule.task is not None
    bound_s = attention_bound_s(machine, schedule.task, schedule.initial)
    assert simulate(schedule, machine).time_s >= bound_s > 0


@given(complete_topologies(6) | switch_trees() | shared_media(), layers(), schedule_names, rates, st.booleans())
@settings(max_examples=150)
def test_no_schedule_beats_the_bound(
    topology: Topology, layer: Workload, name: str, rate: Fraction, trim: bool
) -> None:
    assert_bounded(Machine(topology, compute=ComputeRate(rate)), attention(name, topology, layer, trim=trim))


@given(
    complete_topologies(5) | switch_trees() | shared_media(), layers(24), schedule_names, rates, dataflows,
    st.booleans(),
    st.integers(2, 4), st.sampled_from(["fp32", "input"]),
)  # fmt: skip
@settings(max_examples=150)
def test_no_backward_pass_beats_the_bound(
    topology: Topology,
    layer: Workload,
    name: str,
    rate: Fraction,
    dataflow: Dataflow,
    trim: bool,
    buffers: int,
    dtype: str,
) -> None:
    passes = attention_passes(
        name, topology, layer, dataflow=dataflow, gradient_dtype=dtype, trim=trim, buffers=buffers
    )
    machine = Machine(topology, compute=ComputeRate(rate))
    for schedule in (passes.backward, replace(passes.backward, buffers=len(passes.backward.steps) + 2)):
        assert_bounded(machine, schedule)


@given(st.integers(1, 6), layers(), schedule_names, dataflows)
def test_flops_are_those_of_the_schedule(world_size: int, layer: Workload, name: str, dataflow: Dataflow) -> None:
    mesh = full_mesh(world_size)
    for schedule in (attention(name, mesh, layer), attention_passes(name, mesh, layer, dataflow=dataflow).backward):
        assert schedule.task is not None
        assert rank_flops(schedule.task) == schedule.flops().sum(axis=0).tolist()


@given(st.integers(2, 6), layers(), st.sampled_from(sorted(LAYOUTS)), exact_bandwidths, exact_latencies,
       sides, st.sampled_from([None, "fp32"]))  # fmt: skip
def test_on_a_mesh_every_rank_receives_what_it_meets_and_has_not(
    world_size: int, layer: Workload, name: str, bandwidth: Fraction, latency: Fraction, side: Side, dtype: str | None
) -> None:
    task = uncut(layer, placed(layer, name, world_size), "keys" if dtype is None else side, dtype)
    most = max(received_bytes(task, rank) for rank in range(world_size))
    expected = latency + most / (bandwidth * (world_size - 1)) if most else 0
    assert attention_bound_s(Machine(full_mesh(world_size, bandwidth, latency)), task) == expected


@given(st.integers(2, 40), exact_bandwidths, exact_latencies)
def test_two_ranks_reach_the_bound(sequence: int, bandwidth: Fraction, latency: Fraction) -> None:
    """Under the full mask each sends its shard to the other."""
    layer, pair = Workload(sequence, heads=2, kv_heads=1), Machine(full_mesh(2, bandwidth, latency))
    schedule = attention("ring-attention", pair.topology, layer)
    assert schedule.task is not None
    assert simulate(schedule, pair).time_s == attention_bound_s(pair, schedule.task)


@given(st.integers(2, 40), exact_bandwidths, exact_latencies)
def test_two_ranks_that_kept_each_others_keys_reach_the_bound(
    sequence: int, bandwidth: Fraction, latency: Fraction
) -> None:
    """Under the full mask each sends the other the gradient of its shard, 4 bytes for each of 2 x 128 elements."""
    layer, pair = Workload(sequence, heads=2, kv_heads=1), Machine(full_mesh(2, bandwidth, latency))
    backward = attention_passes("ring-attention", pair.topology, layer, dataflow="rotate-kv-back").backward
    assert backward.task is not None
    expected_s = latency + -(-sequence // 2) * 4 * 2 * 128 / bandwidth
    assert simulate(backward, pair).time_s == attention_bound_s(pair, backward.task, backward.initial) == expected_s
    assert attention_bound_s(pair, backward.task) > expected_s, "without these copies keys travel, too"


@given(layers(), exact_bandwidths, st.integers(2, 5), sides, st.sampled_from([None, "input"]))
def test_a_shared_medium_carries_what_all_ranks_receive(
    layer: Workload, bandwidth: Fraction, world_size: int, side: Side, dtype: str | None
) -> None:
    mesh = full_mesh(world_size, bandwidth, Fraction(0))
    names = tuple(link.name for link in mesh.links)
    bus = Topology("bus", world_size, tuple(mesh.links), (SharedCapacity("bus", bandwidth, names),))
    dtype = dtype and layer.dtype
    task = uncut(layer, placed(layer, "zigzag", world_size), "keys" if dtype is None else side, dtype)
    carried = sum(received_bytes(task, rank) for rank in range(world_size))
    assert attention_bound_s(Machine(bus), task) == carried / bandwidth


@pytest.mark.parametrize(("dtype", "expected_s"), [(None, 16), ("fp32", 16 + 32)])
def test_a_narrow_way_between_nodes_counts_for_all_behind_it(dtype: str | None, expected_s: int) -> None:
    """Two and two ranks, 1 byte/s between: half of 8 positions crosses, 4 bytes each, and as many gradients, 8 each."""
    links = [link for rank in range(4) for link in both_ways(rank, f"leaf{rank // 2}", Fraction(100), Fraction(0))]
    links += [link for leaf in (0, 1) for link in both_ways(f"leaf{leaf}", "root", Fraction(1), Fraction(0))]
    tree = Machine(Topology("tree", 4, tuple(links)))
    layer = Workload(8, head_dim=1, heads=1)
    assert attention_bound_s(tree, uncut(layer, LAYOUTS["contiguous"](8, 4), dtype=dtype)) == expected_s


def test_a_causal_cut_carries_only_what_is_seen_behind_it() -> None:
    """Behind it are positions 3 to 5, which see two earlier ones in a window of three; 4 bytes each."""
    layer = Workload(6, head_dim=1, mask="causal", window=3, heads=1)
    mesh = Machine(full_mesh(2, Fraction(1), Fraction(0)))
    assert attention_bound_s(mesh, uncut(layer, LAYOUTS["contiguous"](6, 2))) == 2 * 4
