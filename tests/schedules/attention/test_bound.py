"""The lower bound of an attention layer: against the lightest covers, found by trying all; nothing is faster."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.layers import Runs, attention_bound_s
from sim.event.engine import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow, attention_passes
from tasp_lab.schedules.attention.circulation import Side, cut_blocks
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.attention.task import KEYS, QUERIES, RESULTS, AttentionTask
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, both_ways
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout
from tests.support.kernel_calls import Call, as_arrays, with_buffers
from tests.support.layouts import LAYOUTS
from tests.support.schedules import task_of
from tests.support.strategies import complete_topologies, exact_bandwidths, exact_latencies

schedule_names = st.sampled_from(sorted({*CIRCULATIONS} - {"half-each-way"}))
dataflows = st.sampled_from(DATAFLOWS)
sides = st.sampled_from(["keys", "queries"])
rates = st.fractions(Fraction(1), Fraction(10**5), max_denominator=10)


@st.composite
def layers(draw: st.DrawFn, max_positions: int = 40) -> Workload:
    """Small layers of every mask, some packed; some have fewer positions than there are ranks."""
    mask: Literal["full", "causal"] = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.none() | st.integers(1, max_positions)) if mask == "causal" else None
    documents = draw(st.none() | st.lists(st.integers(1, max_positions // 3), min_size=1, max_size=3).map(tuple))
    sequence = draw(st.integers(1, max_positions)) if documents is None else sum(documents)
    return Workload(
        sequence, heads=2, kv_heads=1, head_dim=1, mask=mask, window=window, documents=documents,
        value_dim=draw(st.none() | st.integers(2, 3)),
    )  # fmt: skip


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


def uncut(
    layer: Workload, layout: SequenceLayout, circulating_side: Side = "keys", dtype: str | None = None
) -> AttentionTask:
    """What a pass must compute, one block per span."""
    return cut_blocks(layer, layout, [Fraction(1)], circulating_side, dtype)[0]


def placed(layer: Workload, name: str, world_size: int) -> SequenceLayout:
    return LAYOUTS[name](layer.sequence, world_size, layer.documents)


class Graph:
    """The pairs of a query and a key of which one is of some ranks' own, and the other neither theirs nor held there.

    `own` is what yields something that must come home, `foreign` what could come instead, as positions of a document.
    """

    def __init__(self, task: AttentionTask, ranks: set[int], held: set[int], own_queries: bool) -> None:
        layer, self.stride = task.workload, task.layout.stride
        self.owner = {
            position: rank
            for rank in range(task.layout.world_size)
            for position in task.layout.positions(rank).tolist()
        }
        self.own = [position for position, rank in self.owner.items() if rank in ranks]
        self.foreign = {position for position in self.owner if position not in held}
        self.neighbours: dict[int, set[int]] = {
            each: {o for o in self.foreign if (sees(layer, each, o) if own_queries else sees(layer, o, each))}
            for each in self.own
        }
        self.document = {
            position: sum(start <= position for start in layer.document_starts.tolist()) for position in self.owner
        }

    def lightest_cover(self, own_weight: int, foreign_weight: int) -> int:
        """Of all subsets of what is foreign, with whatever is not covered by them: the least weight."""
        edges = [each for each in self.neighbours.values() if each]
        ends = sorted(set().union(*edges))
        return min(
            (
                len(chosen) * foreign_weight + sum(not each <= set(chosen) for each in edges) * own_weight
                for size in range(len(ends) + 1)
                for chosen in combinations(ends, size)
            ),
            default=0,
        )

    def runs(self, positions: set[int]) -> list[set[int]]:
        """Positions of one rank and document that follow one another."""
        found: list[set[int]] = []
        for position in sorted(positions):
            for run in found:
                last = max(run)
                if (
                    last + self.stride == position
                    and self.owner[last] == self.owner[position]
                    and (self.document[last] == self.document[position])
                ):
                    run.add(position)
                    break
            else:
                found.append({position})
        return found

    @property
    def is_simple(self) -> bool:
        """Whether runs see each other all or not at all, and in a document one run's neighbours contain another's."""
        by_document: defaultdict[int, list[set[int]]] = defaultdict(list)
        for run in self.runs(set(self.own)):
            for other in self.runs(self.foreign):
                if len({position in self.neighbours[each] for each in run for position in other}) > 1:
                    return False
            by_document[self.document[min(run)]].append(self.neighbours[min(run)])
        return all(
            one <= other or other <= one for each in by_document.values() for one, other in combinations(each, 2)
        )


def graphs(task: AttentionTask, ranks: set[int]) -> list[tuple[Graph, int, int]]:
    """What must enter some ranks that hold their own, and what an own position and a foreign one weigh.

    Results and gradients weigh as in the dtype of the layer, 2 bytes per element; rows of scalars 4.
    """
    layer = task.workload
    held = {position for rank in ranks for position in task.layout.positions(rank).tolist()}
    row, result = (2 * layer.batch * layer.heads * size for size in (layer.head_dim, layer.value_size))
    keys = layer.kv_bytes_per_position
    found = [(Graph(task, ranks, held, own_queries=True), row if task.is_backward else result, keys)]
    if task.is_backward:
        queries = row + result + 2 * 4 * layer.batch * layer.heads  # q and the gradient of its result, and two scalars
        found.append((Graph(task, ranks, held, own_queries=False), keys, queries))
    return found


def lightest_bytes(task: AttentionTask, ranks: set[int]) -> tuple[int, bool]:
    """The least that enters some ranks, by trying all covers, and whether the bound must find it."""
    found = graphs(task, ranks)
    return sum(graph.lightest_cover(*weights) for graph, *weights in found), all(graph.is_simple for graph, *_ in found)


def assert_bounded(machine: Machine, schedule: Schedule) -> None:
    bound_s = attention_bound_s(machine, task_of(schedule), schedule.initial)
    assert simulate(schedule, machine).time_s >= bound_s > 0


@given(complete_topologies(6) | switch_trees() | shared_media(), layers(), schedule_names, rates, st.booleans())
@settings(max_examples=100)
def test_no_schedule_beats_the_bound(
    topology: Topology, layer: Workload, name: str, rate: Fraction, trim: bool
) -> None:
    assert_bounded(Machine(topology, compute=ComputeRate(rate)), attention(name, topology, layer, trim=trim))


@given(
    complete_topologies(5) | switch_trees() | shared_media(), layers(24), schedule_names, rates, dataflows,
    st.booleans(),
    st.integers(2, 4), st.sampled_from(["fp32", "input"]),
)  # fmt: skip
@settings(max_examples=100)
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
    roomy = with_buffers(passes.backward, len(passes.backward.steps) + 2)
    for schedule in (passes.backward, replace(passes.backward, blocks=roomy)):
        assert_bounded(machine, schedule)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), exact_bandwidths, exact_latencies, rates)
def test_queries_that_travel_do_not_beat_the_bound(
    length: int, kv_heads: int, group: int, bandwidth: Fraction, latency: Fraction, rate: Fraction
) -> None:
    """Two ranks send each other their queries, and the results home."""
    layer = Workload(2 * length, heads=kv_heads * group, kv_heads=kv_heads, head_dim=1, mask="full")
    task = uncut(layer, LAYOUTS["contiguous"](2 * length, 2))
    keys, queries, results = (task.blocks_of(tensor).tolist() for tensor in (KEYS, QUERIES, RESULTS))
    band = 1 - length, length - 1
    calls = [[Call(rank, [queries[rank ^ away]], [keys[rank]], *band) for rank in (0, 1)] for away in (0, 1)]
    steps = [
        Step.of([(0, 1, 0, queries[0]), (1, 0, 0, queries[1])], as_arrays(task, calls[0])),
        Step.of([], as_arrays(task, calls[1])),
        Step.of([(0, 1, 0, results[1], True), (1, 0, 0, results[0], True)]),
    ]
    blocks = task.blocks(dict.fromkeys((QUERIES, RESULTS), Pool("queries", 2)), bound=())
    initial, final = task.owned(KEYS, QUERIES), task.owned(RESULTS)
    schedule = Schedule("queries", 2, 1, blocks, initial, final, steps, task)
    assert_bounded(Machine(full_mesh(2, bandwidth, latency), compute=ComputeRate(rate)), schedule)


@given(st.integers(1, 6), layers(), schedule_names, dataflows, rates)
def test_compute_is_all_flops_over_all_ranks(
    world_size: int, layer: Workload, name: str, dataflow: Dataflow, rate: Fraction
) -> None:
    mesh = full_mesh(world_size)
    pairs = sum(sees(layer, query, key) for query in range(layer.sequence) for key in range(layer.sequence))
    passes = attention(name, mesh, layer), attention_passes(name, mesh, layer, dataflow=dataflow).backward
    for schedule, (of_keys, of_values) in zip(passes, ((1, 1), (3, 2)), strict=True):
        flops, lengths = task_of(schedule).total_flops, of_keys * layer.head_dim + of_values * layer.value_size
        assert flops == pairs * 2 * layer.batch * layer.heads * lengths
        assert flops == schedule.flops().sum()
        everything = np.ones_like(schedule.initial)
        machine = Machine(mesh, compute=ComputeRate(rate))
        assert attention_bound_s(machine, task_of(schedule), everything) == -(-flops // world_size) / rate


@given(st.data(), st.integers(2, 4), layers(12), st.sampled_from(sorted(LAYOUTS)), sides,
       st.sampled_from([None, "fp32"]))  # fmt: skip
@settings(max_examples=150)
def test_what_enters_weighs_no_more_than_the_lightest_cover(
    data: st.DataObject, world_size: int, layer: Workload, name: str, side: Side, dtype: str | None
) -> None:
    ranks = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1))
    task = uncut(layer, placed(layer, name, world_size), "keys" if dtype is None else side, dtype)
    lightest, is_simple = lightest_bytes(task, ranks)
    found = Runs.of(task, task.owned(KEYS, QUERIES)).entering_bytes(sorted(ranks))
    assert found <= lightest
    if is_simple:
        assert found == lightest


@given(st.integers(2, 4), st.integers(1, 3), st.sampled_from(["contiguous", "zigzag"]), st.integers(1, 3),
       st.sampled_from([None, "fp32"]), st.sampled_from(["full", "causal"]))  # fmt: skip
def test_the_bound_finds_the_lightest_cover_of_full_and_causal_masks(
    world_size: int, length: int, name: str, group: int, dtype: str | None, mask: Literal["full", "causal"]
) -> None:
    """Where runs see each other all or not at all, by the order of their positions: of any one rank."""
    sequence = length * world_size * (2 if name == "zigzag" else 1)
    layer = Workload(sequence, heads=2 * group, kv_heads=2, head_dim=1, mask=mask)
    task = uncut(layer, placed(layer, name, world_size), dtype=dtype)
    for rank in range(world_size):
        lightest, is_simple = lightest_bytes(task, {rank})
        assert is_simple
        assert Runs.of(task, task.owned(KEYS, QUERIES)).entering_bytes([rank]) == lightest


@given(st.integers(2, 4), layers(12), st.sampled_from(sorted(LAYOUTS)), exact_bandwidths, exact_latencies,
       sides, st.sampled_from([None, "fp32"]))  # fmt: skip
def test_on_a_mesh_every_rank_receives_the_lightest_cover(
    world_size: int, layer: Workload, name: str, bandwidth: Fraction, latency: Fraction, side: Side, dtype: str | None
) -> None:
    task = uncut(layer, placed(layer, name, world_size), "keys" if dtype is None else side, dtype)
    lightest = [lightest_bytes(task, {rank}) for rank in range(world_size)]
    most = max(found for found, _ in lightest)
    expected = latency + most / (bandwidth * (world_size - 1)) if most else 0
    bound_s = attention_bound_s(Machine(full_mesh(world_size, bandwidth, latency)), task)
    assert bound_s <= expected
    if all(is_simple for _, is_simple in lightest):
        assert bound_s == expected


@given(st.integers(2, 40), exact_bandwidths, exact_latencies)
def test_two_ranks_reach_the_bound(sequence: int, bandwidth: Fraction, latency: Fraction) -> None:
    """Under the full mask each sends its shard to the other; results of four heads weigh twice as much as the keys."""
    layer, pair = Workload(sequence, heads=4, kv_heads=1, mask="full"), Machine(full_mesh(2, bandwidth, latency))
    schedule = attention("ring-attention", pair.topology, layer)
    assert simulate(schedule, pair).time_s == attention_bound_s(pair, task_of(schedule))


@given(st.integers(2, 40), exact_bandwidths, exact_latencies)
def test_two_ranks_that_kept_each_others_keys_reach_the_bound(
    sequence: int, bandwidth: Fraction, latency: Fraction
) -> None:
    """Under the full mask each sends the other the gradient of its shard, 2 bytes for each of 2 x 128 elements."""
    layer, pair = Workload(sequence, heads=2, kv_heads=1, mask="full"), Machine(full_mesh(2, bandwidth, latency))
    backward = attention_passes(
        "ring-attention", pair.topology, layer, dataflow="rotate-kv-back", gradient_dtype="input"
    ).backward
    expected_s = latency + -(-sequence // 2) * 2 * 2 * 128 / bandwidth
    assert simulate(backward, pair).time_s == attention_bound_s(pair, task_of(backward), backward.initial) == expected_s
    assert attention_bound_s(pair, task_of(backward)) > expected_s, "without these copies keys travel, too"


@given(layers(12), exact_bandwidths, st.integers(2, 4), sides, st.sampled_from([None, "bf16"]))
def test_a_shared_medium_carries_what_all_ranks_receive(
    layer: Workload, bandwidth: Fraction, world_size: int, side: Side, dtype: str | None
) -> None:
    mesh = full_mesh(world_size, bandwidth, Fraction(0))
    names = tuple(link.name for link in mesh.links)
    bus = Topology("bus", world_size, tuple(mesh.links), (SharedCapacity("bus", bandwidth, names),))
    task = uncut(layer, placed(layer, "zigzag", world_size), "keys" if dtype is None else side, dtype)
    lightest = [lightest_bytes(task, {rank}) for rank in range(world_size)]
    bound_s, carried = attention_bound_s(Machine(bus), task), sum(found for found, _ in lightest)
    assert bound_s <= carried / bandwidth
    if all(is_simple for _, is_simple in lightest):
        assert bound_s == carried / bandwidth


@pytest.mark.parametrize(("dtype", "expected_s"), [(None, 16), ("fp32", 16 + 16)])
def test_a_narrow_way_between_nodes_counts_for_all_behind_it(dtype: str | None, expected_s: int) -> None:
    """Two and two ranks, 1 byte/s between: half of 8 positions crosses, 4 bytes each, and as many gradients.

    Results, and gradients of queries, would weigh 8 bytes each, and queries with what their gradients need 48.
    """
    links = [link for rank in range(4) for link in both_ways(rank, f"leaf{rank // 2}", Fraction(100), Fraction(0))]
    links += [link for leaf in (0, 1) for link in both_ways(f"leaf{leaf}", "root", Fraction(1), Fraction(0))]
    tree = Machine(Topology("tree", 4, tuple(links)))
    layer = Workload(8, head_dim=1, heads=4, kv_heads=1, mask="full")
    assert attention_bound_s(tree, uncut(layer, LAYOUTS["contiguous"](8, 4), dtype=dtype)) == expected_s


def test_many_key_heads_stay_where_results_weigh_less() -> None:
    """Behind the cut are positions 3 to 5; their results weigh 2 bytes each, the keys they see 4 bytes each."""
    layer = Workload(6, head_dim=1, mask="causal", heads=1)
    mesh = Machine(full_mesh(2, Fraction(1), Fraction(0)))
    assert attention_bound_s(mesh, uncut(layer, LAYOUTS["contiguous"](6, 2))) == 3 * 2


@pytest.mark.parametrize("narrow", ["gradient_dtype", "result_dtype"])
def test_what_travels_in_a_narrower_dtype_than_the_layer_weighs_less(narrow: str) -> None:
    """A layer in float32, whose results or gradients are sent in 16 bits: 2 bytes each, not 4."""
    layer = Workload(4, head_dim=1, heads=1, dtype="fp32", mask="full")
    is_backward = narrow == "gradient_dtype"
    task = uncut(layer, LAYOUTS["contiguous"](4, 2), dtype="fp32" if is_backward else None)
    narrowed = replace(task, gradient_dtype="bf16") if is_backward else replace(task, result_dtype="bf16")
    found = Runs.of(narrowed, task.owned(KEYS, QUERIES)).entering_bytes([0])
    assert found == 2 * 2 * (1 + 2 * is_backward)
