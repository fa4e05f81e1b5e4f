"""A cached prefix: its keys are there, its queries are not. Masks, FLOPs, bytes, and which side had better travel.

With T positions after P cached ones, keys and values travel in ring attention (pass-KV), queries and their results in
TokenRing (pass-Q), see arXiv:2411.01783.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.layers import attention_bound_s
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.composition import stacked
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEYS, QUERIES, RESULTS
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.schedules.registry import attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.kernel_calls import calls_of
from tests.support.masks import in_window
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.schedules import task_of, time_s
from tests.support.strategies import cached_layers
from tests.support.systems import names_for
from tests.support.world import World

WORLD_SIZES = st.integers(1, 6)


def forward(name: str, layer: Workload, n: int, **options: object) -> Schedule:
    (schedule,) = attention_schedules(name, full_mesh(n), layer, None, AttentionOptions(**options))  # type: ignore[arg-type]
    return schedule


@st.composite
def schedules(draw: st.DrawFn, max_positions: int = 40, max_ranks: int = 6) -> Schedule:
    """Any schedule that applies to a drawn layer with a cached prefix."""
    layer, n = draw(cached_layers(max_positions)), draw(st.integers(1, max_ranks))
    return forward(draw(names_for(layer, n)), layer, n)


def seen(layer: Workload) -> set[tuple[int, int]]:
    """The queries and keys that see each other, from the definition of the mask."""
    return {
        (query, key)
        for query in range(layer.cached_keys, layer.sequence)
        for key in range(layer.sequence if layer.mask == "full" else query + 1)
        if in_window(layer, query - key)
    }


def positions(schedule: Schedule, blocks: list[int]) -> list[int]:
    task = task_of(schedule)
    return [
        int(task.start[block]) + index * task.layout.stride for block in blocks for index in range(task.count[block])
    ]


def computed(schedule: Schedule) -> IntArray:
    """How often each query head attends with a query to a key: [head, query, key]."""
    task = task_of(schedule)
    found = np.zeros((task.workload.heads, task.workload.sequence, task.workload.sequence), dtype=np.int64)
    for step in schedule.steps:
        for call in calls_of(step):
            queries, keys = (np.array(positions(schedule, blocks)) for blocks in (call.queries, call.keys))
            distance = np.arange(len(queries))[:, None] - np.arange(len(keys))
            i, j = np.nonzero((call.low <= distance) & (distance <= call.high))
            for head in range(*task.heads_of(call.queries[0])):
                np.add.at(found, (head, queries[i], keys[j]), 1)
    return found


@settings(max_examples=80)
@given(schedules())
def test_each_new_query_attends_once_to_each_key_that_it_sees(schedule: Schedule) -> None:
    task = task_of(schedule)
    layer, wanted = task.workload, seen(task.workload)
    once = np.zeros((layer.sequence, layer.sequence), dtype=np.int64)
    once[tuple(np.array(sorted(wanted)).T)] = 1
    assert (computed(schedule) == once).all()
    assert schedule.flops().sum() == task.total_flops == len(wanted) * layer.flops_per_pair
    for rank in range(schedule.world_size):
        rank_part(schedule, rank)


@settings(max_examples=60)
@given(schedules())
def test_blocks_of_queries_and_results_are_of_new_positions_only(schedule: Schedule) -> None:
    task = task_of(schedule)
    for tensor, first in ((KEYS, 0), (QUERIES, task.workload.cached_keys), (RESULTS, task.workload.cached_keys)):
        of_tensor = Counter(positions(schedule, task.blocks_of(tensor).tolist()))
        assert sorted(of_tensor) == list(range(first, task.workload.sequence))
        assert len(set(of_tensor.values())) == 1  # once per group of heads
        held = [set(task.positions_of(tensor, rank).tolist()) for rank in range(schedule.world_size)]
        for block in task.blocks_of(tensor).tolist():
            assert held[int(task.owner[block])].issuperset(positions(schedule, [block]))


@settings(max_examples=40)
@given(schedules(max_positions=14, max_ranks=4))
def test_the_numbers_are_those_of_the_layer(schedule: Schedule) -> None:
    world = World.of(schedule)
    assert is_right_in_orders(world, numbers_of(world), 2)


@settings(max_examples=30)
@given(schedules())
def test_nothing_is_faster_than_the_bound(schedule: Schedule) -> None:
    mesh, rate = full_mesh(schedule.world_size, Fraction(7), Fraction(1, 5)), ComputeRate(Fraction(1000))
    bound_s = attention_bound_s(Machine(mesh, compute=rate), task_of(schedule))
    assert 0 < bound_s <= time_s(schedule, mesh, rate)


@given(cached_layers(200), WORLD_SIZES)
def test_both_parts_lie_as_they_would_alone_and_queries_are_shared_out(layer: Workload, n: int) -> None:
    """The keys of the prefix are where a pass over the prefix alone has them; chunks differ by one position."""
    for name in attention_names_on(n):
        layout = attention_layout(name, layer, n)
        alone = attention_layout(name, Workload(layer.cached_keys, mask=layer.mask), n)
        after = layout.after(layer.cached_keys)
        for rank in range(n):
            held = layout.positions(rank).tolist()
            assert [each for each in held if each < layer.cached_keys] == alone.positions(rank).tolist()
            new = (after.positions(rank) + layer.cached_keys).tolist()
            assert [each for each in held if each >= layer.cached_keys] == new
            chunks = 2 if "zigzag" in layout.name else 1
            assert abs(len(new) - layer.queries / n) < chunks


# -- bytes -------------------------------------------------------------------------------------------------------------

KV_HEADS, HEADS, HEAD_DIM = 2, 12, 16


def layer_of(n: int, cached: int, new: int, mask: str = "full") -> Workload:
    """Both parts with `cached` and `new` positions in each of 2n chunks."""
    return Workload(
        2 * n * (cached + new),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        mask=mask,
        cached_keys=2 * n * cached,
    )


def sent(name: str, layer: Workload, n: int, **options: object) -> int:
    return int(forward(name, layer, n, **options).bytes_sent().sum())


@pytest.mark.parametrize("dtype", ["input", "fp32"])
@pytest.mark.parametrize(("n", "cached", "new"), [(2, 3, 1), (4, 1, 2), (5, 4, 1)])
def test_what_travels_whole(n: int, cached: int, new: int, dtype: str) -> None:
    """Keys and values n - 1 hops; or queries n - 1 hops, and n - 1 parts of each result with its log-sum-exp."""
    layer = layer_of(n, cached, new)
    keys, queries = layer.sequence, layer.queries
    assert sent("ring-attention", layer, n) == (n - 1) * keys * 2 * KV_HEADS * HEAD_DIM * 2
    element = {"input": 2, "fp32": 4}[dtype]
    per_query = HEADS * (HEAD_DIM * 2 + HEAD_DIM * element + 4)
    assert sent("token-ring", layer, n, result_dtype=dtype) == (n - 1) * queries * per_query


@pytest.mark.parametrize(
    ("ring", "saved"), [("ring-attention", Fraction(1, 2)), ("zigzag-ring-attention", Fraction(1, 4))]
)
@pytest.mark.parametrize("n", [2, 4, 5])
def test_trimming_saves_bytes_of_new_keys_only(n: int, ring: str, saved: Fraction) -> None:
    """Every rank sees the whole prefix, so a causal mask saves nothing of it, and nothing of the queries."""
    layer = layer_of(n, cached=3, new=2, mask="causal")
    keys = layer.sequence - saved * layer.queries
    assert sent(ring, layer, n) == (n - 1) * keys * 2 * KV_HEADS * HEAD_DIM * 2
    token = ring.replace("ring-attention", "token-ring")
    assert sent(token, layer, n) == sent("token-ring", layer_of(n, 3, 2), n)


def crossover(layer: Workload) -> Fraction:
    """Pass-Q sends fewer bytes if T / (T + P) is below this: 2 KV e d / H (2 e d + 4), nearly KV / H."""
    of_keys, of_queries = layer.kv_bytes_per_position, layer.query_bytes_per_position
    return Fraction(of_keys, 2 * of_queries + 4 * layer.batch * layer.heads)


@settings(max_examples=60)
@given(
    st.integers(2, 5),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([(12, 12), (12, 4), (12, 1)]),
    st.sampled_from([8, 64]),
)
def test_queries_are_fewer_bytes_if_the_new_positions_are_few(
    n: int, cached: int, new: int, heads: tuple[int, int], head_dim: int
) -> None:
    layer = replace(layer_of(n, cached, new), heads=heads[0], kv_heads=heads[1], head_dim=head_dim)
    share = Fraction(layer.queries, layer.sequence)
    pass_kv, pass_q = sent("ring-attention", layer, n), sent("token-ring", layer, n)
    assert (pass_q < pass_kv) == (share < crossover(layer))
    assert Fraction(pass_q, pass_kv) == share / crossover(layer)


PUBLISHED_MS = {
    1280: (1023.39, 898.71),
    3200: (1110.18, 1046.43),
    4160: (1298.92, 1280.10),
    6400: (1305.56, 1302.01),
    12800: (2080.67, 2205.27),
    25600: (3353.02, 3617.02),
    38400: (4629.23, 4922.52),
    64000: (6845.21, 7367.99),
    128000: (11462.15, 12360.57),
}
"""arXiv:2411.01783v3, table 4: new positions of 128,000; time to first token in ms of Llama 3 405B with pass-KV and
with pass-Q, four hosts of eight H100. The ranks of a ring have 16 query heads of 128 and one KV head, bf16."""


def test_fewer_bytes_are_the_faster_side_in_every_published_measurement() -> None:
    """Counting queries without results, as the heuristic of the paper does, 10 % new positions would be pass-Q."""
    layer = Workload(128_000, heads=16, kv_heads=1, head_dim=128, mask="full")
    assert crossover(layer) == Fraction(2 * 2 * 128, 16 * (2 * 2 * 128 + 4)) == Fraction(8, 129)
    for new, (kv_ms, q_ms) in PUBLISHED_MS.items():
        cached = Workload(128_000, heads=16, kv_heads=1, head_dim=128, cached_keys=128_000 - new, mask="full")
        pass_kv, pass_q = sent("ring-attention", cached, 4), sent("token-ring", cached, 4)
        assert (pass_q < pass_kv) == (Fraction(new, 128_000) < Fraction(8, 129)) == (q_ms < kv_ms)
    assert Fraction(12_800, 128_000) < Fraction(2, 16)


@pytest.mark.parametrize(("new", "side"), [(1, "queries"), (30, "keys")])
def test_kv_and_q_rings_take_the_side_of_fewer_bytes(new: int, side: str) -> None:
    layer = layer_of(4, 30, new)
    schedule = forward("kv-and-q-rings", layer, 4)
    task, moved = task_of(schedule), np.unique(np.concatenate([step.block for step in schedule.steps]))
    kinds = set(task.tensor[moved].tolist())
    assert kinds == ({KEYS} if side == "keys" else {QUERIES, RESULTS})


# -- what it composes with, and what is refused ------------------------------------------------------------------------


def test_a_stack_has_no_cached_keys() -> None:
    schedule = forward("token-ring", Workload(14, heads=2, head_dim=3, cached_keys=9, mask="full"), 2)
    with pytest.raises(ScheduleError, match=r"^schedule 'token-ring' starts with 9 cached keys, which no layer of a"):
        stacked([schedule, schedule])


@pytest.mark.parametrize("passes", ["backward", "both"])
@pytest.mark.parametrize("name", attention_names_on(4))
def test_there_is_no_backward_pass(name: str, passes: str) -> None:
    layer = Workload(12, heads=4, head_dim=2, cached_keys=5, mask="full")
    with pytest.raises(ScheduleError, match=f"^pass '{passes}' with 5 cached keys, expected 'forward'$"):
        forward(name, layer, 4, passes=passes)
    with pytest.raises(ScheduleError, match=r"^5 cached keys, which have no gradients: expected the pass forward$"):
        attention_passes("tasp", full_mesh(4), layer)


def test_linear_attention_has_no_cached_keys() -> None:
    with pytest.raises(WorkloadError, match=r"^cached keys: 5, expected none for linear attention$"):
        Workload(12, heads=4, head_dim=2, mask="causal", cached_keys=5, kind="linear")
