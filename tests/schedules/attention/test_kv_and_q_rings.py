"""Rings that carry keys for some pairs of ranks and queries for others: which split is best, its bytes, its numbers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sim.event.engine import simulate
from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.choices import Pass, Travelling
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, Passes
from tasp_lab.schedules.attention.kv_and_q_rings import Travels, busiest_link_s, what_travels
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.routes import direct
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of
from tests.support.world import World

fractions = st.fractions(min_value=Fraction(1, 8), max_value=8)


def passes(n: int, layer: Workload, **options: Any) -> Passes:
    return passes_of("kv-and-q-rings", full_mesh(n), layer, **options)


def one(name: str, topology: Topology, layer: Workload, **options: Any) -> Schedule:
    (schedule,) = attention_schedules(name, topology, layer, None, AttentionOptions(**options))
    return schedule


def chosen(layer: Workload, n: int, dtype: str, backward: bool = False) -> Travels:
    return what_travels(span_task(layer, attention_layout("kv-and-q-rings", layer, n), dtype, backward=backward))


@given(hnp.arrays(bool, st.tuples(st.integers(1, 5), st.integers(1, 5))), fractions, fractions)
def test_no_split_of_a_full_tile_sends_fewer_bytes_than_its_cheaper_side(
    at_queries: BoolArray, key_bytes: Fraction, query_bytes: Fraction
) -> None:
    """Whatever pairs (query, key) are computed at the queries: keys of these travel, and queries of the other pairs."""
    rows, columns = at_queries.shape
    keys, queries = int(at_queries.any(axis=0).sum()), int((~at_queries).any(axis=1).sum())
    assert keys * key_bytes + queries * query_bytes >= min(columns * key_bytes, rows * query_bytes)


@given(st.integers(1, 30), st.integers(1, 30), fractions, fractions)
def test_rings_of_one_side_each_carry_no_less_than_rings_of_both(
    key_rings: int, query_rings: int, key_bytes: Fraction, query_bytes: Fraction
) -> None:
    busiest = max(key_bytes / key_rings, query_bytes / query_rings)
    both = (key_bytes + query_bytes) / (key_rings + query_rings)
    assert busiest >= both
    assert (busiest == both) == (key_bytes * query_rings == query_bytes * key_rings)


@settings(max_examples=60)
@given(
    st.integers(2, 8),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["input", "fp32"]),
    st.booleans(),
    st.booleans(),
)
def test_the_split_of_each_pair_follows_from_heads_and_dtypes(
    n: int, group: int, dtype: str, causal: bool, backward: bool
) -> None:
    """Bytes per position and head: keys K = (2e + 2g) / group with g = 0 forward, queries Q as the module says."""
    head_dim, element = 32, 2
    layer = Workload(8 * n, heads=24, kv_heads=24 // group, head_dim=head_dim, mask="causal" if causal else "full")
    wire = {"input": "bf16", "fp32": "fp32"}[dtype]
    sum_bytes = {"input": element, "fp32": 4}[dtype]
    keys = Fraction(2 * element + 2 * sum_bytes * backward, group) * head_dim
    queries = (2 * element + sum_bytes) * head_dim + 8 if backward else (element + sum_bytes) * head_dim + 4
    found = chosen(layer, n, wire, backward)
    lower, upper = np.tri(n, k=-1, dtype=bool), np.tri(n, k=-1, dtype=bool).T
    up = (keys, Fraction(queries, 2)) if causal else (keys, queries)  # queries of a lower rank, keys of an upper one
    down = (keys / 2, queries) if causal else (keys, queries)
    assert (found.keys == (lower & (up[0] <= up[1])) | (upper & (down[0] <= down[1]))).all()
    assert (found.queries == (upper & (up[0] > up[1])) | (lower & (down[0] > down[1]))).all()


@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_bytes_of_a_mix_are_those_of_half_shards_that_travel_upward(n: int) -> None:
    half, heads, dim = 6 * (n - 1), 2, 16
    layer = Workload(2 * half * n, heads=heads, head_dim=dim, mask="causal")
    topology = full_mesh(n)
    schedule = one("kv-and-q-rings", topology, layer, result_dtype="input")
    rings = decompose(topology).rings
    place = np.argsort(rings, axis=1)
    hops = sum(
        max(((place[ring, b] - place[ring, a]) % n for b in range(a + 1, n)), default=0)
        for ring in range(len(rings))
        for a in range(n)
    )
    piece, returns = Fraction(half, len(rings)) * heads, n * (n - 1) // 2 * half * heads
    assert sent(schedule) == {
        KEYS: hops * piece * 2 * 2 * dim,
        QUERIES: hops * piece * 2 * dim,
        RESULTS: returns * (2 * dim + 4),
    }


def sent(schedule: Schedule) -> dict[int, int]:
    """All bytes sent, by tensor."""
    assert isinstance(schedule.task, AttentionTask)
    found: dict[int, int] = {}
    for step in schedule.steps:
        for tensor, size in zip(schedule.task.tensor[step.block], schedule.blocks.bytes[step.block], strict=True):
            found[int(tensor)] = found.get(int(tensor), 0) + int(size)
    return found


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_with_few_kv_heads_keys_travel_as_in_tasp(mask: str) -> None:
    n, layer = 8, Workload(8 * 14, heads=8, kv_heads=2, head_dim=16, mask=mask)
    found, tasp = one("kv-and-q-rings", full_mesh(n), layer), one("tasp", full_mesh(n), layer)
    assert sent(found) == sent(tasp)
    assert (found.bytes_sent().sum(axis=2) == tasp.bytes_sent().sum(axis=2)).all()


def test_backward_with_a_full_mask_and_as_many_kv_heads_as_heads_queries_travel() -> None:
    layer = Workload(8 * 28, heads=8, head_dim=16, mask="full")
    found, tokens = (passes_of(name, full_mesh(8), layer).backward for name in ("kv-and-q-rings", "token-multi-ring"))
    assert (found.bytes_sent() == tokens.bytes_sent()).all()


def test_a_mix_is_faster_than_either_side_alone_behind_a_switch() -> None:
    """Ports carry all bytes of a rank; with one rate for all, fewer bytes take less time."""
    layer = Workload(8 * 14 * 4, heads=8, head_dim=64, mask="causal")
    machine = Machine(switch(8, 10**9, 0), compute=ComputeRate(1e30))
    times = {
        name: simulate(one(name, machine.topology, layer, **options), machine).time_s
        for name, options in (
            ("kv-and-q-rings", {"result_dtype": "input"}),
            ("token-multi-ring", {"result_dtype": "input"}),
            ("tasp", {}),
        )
    }
    assert times["kv-and-q-rings"] < 0.95 * min(times["token-multi-ring"], times["tasp"])


def busiest_s(topology: Topology, *schedules: Schedule) -> float:
    return sum(busiest_link_s(topology, each.steps, each.blocks.bytes) for each in schedules)


linked = st.builds(full_mesh, st.integers(1, 6)) | st.builds(switch, st.integers(1, 6)) | st.just(nodes(2, 3))
wire_dtypes = st.sampled_from(["auto", "fp32", "input"])


@settings(max_examples=25)
@given(linked, attention_layers(), wire_dtypes)
def test_tasp_and_token_multi_ring_have_no_less_busy_links(topology: Topology, layer: Workload, dtype: str) -> None:
    """Forward alone, both passes together, and backward alone if both begin with the shards."""
    found = passes_of("kv-and-q-rings", topology, layer, gradient_dtype=dtype)
    others: dict[str, Passes] = {
        dataflow: passes_of("tasp", topology, layer, gradient_dtype=dtype, dataflow=dataflow)
        for dataflow in ("auto", *DATAFLOWS)
    }
    others["tokens"] = passes_of("token-multi-ring", topology, layer, gradient_dtype=dtype)
    alone = busiest_s(topology, one("kv-and-q-rings", topology, layer))
    for flow, other in others.items():
        assert alone <= busiest_s(topology, other.forward)
        assert busiest_s(topology, *found) <= busiest_s(topology, *other)
        if flow in ("rotate-kv", "rotate-q", "tokens"):
            assert busiest_s(topology, found.backward) <= busiest_s(topology, other.backward)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["auto", "fp32", "input"])
@pytest.mark.parametrize("topology", [switch(4), switch(7), full_mesh(5), full_mesh(8)], ids=lambda each: each.name)
def test_with_a_full_mask_the_least_of_five_sums_is_sent(topology: Topology, dtype: str, kv_heads: int) -> None:
    """Bytes per position, head and element, as in the module: e of the layer, g sent once, s of a sum on its way."""
    n, heads, d, e = topology.world_size, 8, 32, 2
    positions = 4 * 28 * 6
    layer = Workload(positions * n, heads=heads, kv_heads=kv_heads, head_dim=d, mask="full")
    g, s = {"auto": (2, 4), "fp32": (4, 4), "input": (2, 2)}[dtype]
    x = Fraction(kv_heads, heads)
    backward = [
        (n - 1) * (2 * e + 2 * g) * x,
        (n - 1) * (2 * e + g + Fraction(8, d)),
        (n - 1) * (2 * e + 2 * s) * x,
        (n - 1) * (2 * e + s + Fraction(8, d)),
        (n - 2) * 2 * e * x + (n - 1) * 2 * s * x,
    ]
    found = passes_of("kv-and-q-rings", topology, layer, gradient_dtype=dtype)
    for schedule, each in zip(found, ((n - 1) * 2 * e * x, min(backward)), strict=True):
        assert set(schedule.bytes_sent().sum(axis=(0, 2)).tolist()) == {each * positions * heads * d}


@pytest.mark.parametrize(("count", "members"), [(2, 2), (2, 4), (3, 2)])
def test_out_of_a_node_go_fewer_sums_than_gradients_straight_home(count: int, members: int) -> None:
    """Rings that leave each node once carry n - 1 sums out of it; m (n - m) gradients go straight home."""
    n = count * members
    topology = nodes(count, members, nic_bandwidth_bytes_per_s=10**9)
    layer = Workload(n * 12, heads=4, kv_heads=1, head_dim=16, mask="full")
    shard = 12 * 16 * 2 * 2
    found = passes_of("kv-and-q-rings", topology, layer, gradient_dtype="input").backward
    assert leaving_first_node(found, members, KEY_GRADIENTS) == (n - 1) * shard
    tokens = passes_of("token-multi-ring", topology, layer, gradient_dtype="input").backward
    assert leaving_first_node(tokens, members, QUERY_GRADIENTS) == members * (n - members) * 4 * shard // 2


def leaving_first_node(schedule: Schedule, members: int, tensor: int) -> int:
    assert isinstance(schedule.task, AttentionTask)
    total = 0
    for step in schedule.steps:
        leaves = (step.source < members) & (step.destination >= members)
        leaves &= schedule.task.tensor[step.block] == tensor
        total += int(schedule.blocks.bytes[step.block[leaves]].sum())
    return total


@settings(max_examples=20)
@given(attention_layers(max_positions=14), st.integers(1, 4), st.sampled_from(["keys", "queries", "both"]))
def test_the_numbers_do_not_depend_on_what_travels(layer: Workload, n: int, travels: Travelling) -> None:
    for schedule in passes(n, layer, travels=travels):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


def test_what_travels_is_what_was_asked_for() -> None:
    """Zigzag shards under a causal mask: three quarters of one side, or half of both."""
    layer = Workload(8 * 28 * 2, heads=8, head_dim=16, mask="causal")
    shard = layer.sequence // 8 * 8 * 16 * 2
    one_side = 3 * 8 * 7 // 4 * shard
    for travels, expected in {
        "keys": {KEYS: 2 * one_side},
        "queries": {QUERIES: one_side},
        "both": {KEYS: 2 * one_side * 2 // 3, QUERIES: one_side * 2 // 3},
    }.items():
        found = sent(one("kv-and-q-rings", switch(8), layer, travels=travels))
        assert set(found) - {RESULTS} == set(expected), travels
        assert (RESULTS in found) == (travels != "keys")
    full = replace(layer, mask="full")
    for travels in ("keys", "both"):
        assert sent(one("kv-and-q-rings", full_mesh(8), full, travels=travels)) == {KEYS: 2 * 8 * 7 * shard}


@settings(max_examples=20)
@given(attention_layers(), st.integers(2, 5), st.sampled_from(["forward", "both"]))
def test_auto_is_at_least_as_good_as_any_choice(layer: Workload, n: int, passing: Pass) -> None:
    topology = full_mesh(n)
    busiest_s = {
        travels: sum(
            busiest_link_s(topology, each.steps, each.blocks.bytes)
            for each in attention_schedules(
                "kv-and-q-rings", topology, layer, None, AttentionOptions(passing, travels=travels)
            )
        )
        for travels in get_args(Travelling)
    }
    assert busiest_s.pop("auto") <= min(busiest_s.values()) * (1 + 1e-12)


@pytest.mark.parametrize("travels", ["queries", "both"])
def test_queries_do_not_travel_without_routes_between_all_ranks(travels: str) -> None:
    layer = Workload(sequence=40, heads=2, head_dim=2, mask="causal")
    with pytest.raises(ScheduleError, match=f"'kv-and-q-rings': travels '{travels}' without routes between all ranks"):
        one("kv-and-q-rings", direct(bidirectional_ring(5)), layer, travels=travels)
    forwarded = one("kv-and-q-rings", bidirectional_ring(5), layer, travels=travels)
    assert QUERIES in sent(forwarded)
    world = World.of(forwarded)
    assert is_right_in_orders(world, numbers_of(world), 2)


def test_without_links_between_all_ranks_it_is_tasp() -> None:
    """Gradients of keys, which have no links straight home, follow along the rings."""
    ring, layer = bidirectional_ring(5), Workload(sequence=20, heads=2, head_dim=2, mask="causal")
    both = (passes_of(name, ring, layer) for name in ("kv-and-q-rings", "tasp"))
    for found, tasp in zip(*both, strict=True):
        assert (found.bytes_sent() == tasp.bytes_sent()).all()
    assert set(sent(one("kv-and-q-rings", ring, layer))) == {KEYS}
