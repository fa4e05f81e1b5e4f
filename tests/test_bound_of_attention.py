"""The lower bound of an attention layer: what it counts, against counting one by one, and that nothing is faster."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import simulate
from tasp_lab.attention import ATTENTION, attention, attention_placement
from tasp_lab.attention_bound import attention_bound_s, rank_flops
from tasp_lab.builders import full_mesh
from tasp_lab.machine import Compute, Machine
from tasp_lab.placement import PLACEMENTS, Placement
from tasp_lab.topology import Link, SharedCapacity, Topology, both_ways
from tasp_lab.workload import Workload
from tests.strategies import complete_topologies, exact_bandwidths, exact_latencies

schedule_names = st.sampled_from(sorted(ATTENTION))
rates = st.fractions(Fraction(1), Fraction(10**5), max_denominator=10)


@st.composite
def layers(draw: st.DrawFn, most_positions: int = 40) -> Workload:
    """Small layers of every mask; some have fewer positions than there are ranks."""
    mask = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.none() | st.integers(1, most_positions)) if mask == "causal" else None
    return Workload(draw(st.integers(1, most_positions)), heads=2, kv_heads=1, head_dim=1, mask=mask, window=window)


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
    return layer.mask == "full" or 0 <= query - key < (layer.window or layer.sequence)


def seen(layer: Workload, placement: Placement, rank: int) -> set[int]:
    """The keys that queries of a rank see."""
    own = placement.positions(rank).tolist()
    return {key for key in range(layer.sequence) if any(sees(layer, query, key) for query in own)}


@given(complete_topologies(6) | switch_trees() | shared_media(), layers(), schedule_names, rates, st.booleans())
@settings(max_examples=150)
def test_no_schedule_beats_the_bound(
    topology: Topology, layer: Workload, name: str, rate: Fraction, trim: bool
) -> None:
    machine = Machine(topology, compute=Compute(rate))
    bound_s = attention_bound_s(machine, layer, attention_placement(name, layer, topology.world_size))
    assert simulate(attention(name, topology, layer, trim=trim), machine).time_s >= bound_s > 0


@given(st.integers(1, 6), layers(), schedule_names)
def test_flops_are_those_of_the_schedule(world_size: int, layer: Workload, name: str) -> None:
    schedule = attention(name, full_mesh(world_size), layer)
    assert rank_flops(layer, schedule.task.placement) == schedule.flops().sum(axis=0).tolist()


@given(st.integers(2, 6), layers(), st.sampled_from(sorted(PLACEMENTS)), exact_bandwidths, exact_latencies)
def test_on_a_mesh_every_rank_receives_what_it_sees_and_has_not(
    world_size: int, layer: Workload, name: str, bandwidth: Fraction, latency: Fraction
) -> None:
    placement = PLACEMENTS[name](layer.sequence, world_size)
    missing = [len(seen(layer, placement, r) - set(placement.positions(r).tolist())) for r in range(world_size)]
    received_s = max(missing) * layer.kv_bytes_per_position / (bandwidth * (world_size - 1))
    expected = latency + received_s if any(missing) else 0
    assert attention_bound_s(Machine(full_mesh(world_size, bandwidth, latency)), layer, placement) == expected


@given(st.integers(2, 40), exact_bandwidths, exact_latencies)
def test_two_ranks_reach_the_bound(sequence: int, bandwidth: Fraction, latency: Fraction) -> None:
    """Under the full mask each sends its shard to the other."""
    layer, pair = Workload(sequence, heads=2, kv_heads=1), Machine(full_mesh(2, bandwidth, latency))
    schedule = attention("ring-attention", pair.topology, layer)
    assert simulate(schedule, pair).time_s == attention_bound_s(pair, layer, schedule.task.placement)


@given(layers(), exact_bandwidths, st.integers(2, 5))
def test_a_shared_medium_carries_what_all_ranks_receive(layer: Workload, bandwidth: Fraction, world_size: int) -> None:
    mesh = full_mesh(world_size, bandwidth, Fraction(0))
    names = tuple(link.name for link in mesh.links)
    bus = Topology("bus", world_size, tuple(mesh.links), (SharedCapacity("bus", bandwidth, names),))
    placement = PLACEMENTS["zigzag"](layer.sequence, world_size)
    missing = [len(seen(layer, placement, r) - set(placement.positions(r).tolist())) for r in range(world_size)]
    carried_s = sum(missing) * layer.kv_bytes_per_position / bandwidth
    assert attention_bound_s(Machine(bus), layer, placement) == carried_s


def test_a_narrow_way_between_nodes_counts_for_all_behind_it() -> None:
    """Two and two ranks, 1 byte/s between: half of 8 positions, 4 bytes each, crosses, whatever is received inside."""
    links = [link for rank in range(4) for link in both_ways(rank, f"leaf{rank // 2}", Fraction(100), Fraction(0))]
    links += [link for leaf in (0, 1) for link in both_ways(f"leaf{leaf}", "root", Fraction(1), Fraction(0))]
    tree = Machine(Topology("tree", 4, tuple(links)))
    assert attention_bound_s(tree, Workload(8, head_dim=1), PLACEMENTS["contiguous"](8, 4)) == 16


def test_a_causal_cut_carries_only_what_is_seen_behind_it() -> None:
    """Behind it are positions 3 to 5, which see two earlier ones in a window of three; 4 bytes each."""
    assert attention_bound_s(
        Machine(full_mesh(2, Fraction(1), Fraction(0))), Workload(6, head_dim=1, mask="causal", window=3),
        PLACEMENTS["contiguous"](6, 2),
    ) == 2 * 4  # fmt: skip
