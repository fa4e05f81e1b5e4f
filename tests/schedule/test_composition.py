"""Laws of composed schedules: bytes and FLOPs add up, valid ones compose to valid ones, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import LOAD_BYTES
from tasp_lab.schedule.blocks import Blocks, Pool
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.composition import in_chunks, in_sequence, over_groups, replicated, stacked
from tasp_lab.schedule.composition.groups import reduce_scatter_and_all_gather
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import DENSE, DENSE_BACKWARD, StackedTask
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow, Passes, attention_passes
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.schedules.collectives.all_gather import direct_all_gather, multi_ring_all_gather, ring_all_gather
from tasp_lab.schedules.collectives.point_to_point import all_to_all, send_recv
from tasp_lab.schedules.collectives.ring_reductions import (
    multi_ring_all_reduce,
    multi_ring_reduce_scatter,
    ring_all_reduce,
    ring_reduce_scatter,
)
from tasp_lab.schedules.collectives.tree_all_gather import tree_all_gather
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.small_task import SmallTask
from tests.support.systems import lasp2, token_ring, token_ring_passes, ulysses, ulysses_passes
from tests.support.world import World

Builder = Callable[[Topology, int], Schedule]
GATHERS: list[Builder] = [ring_all_gather, multi_ring_all_gather, direct_all_gather, tree_all_gather]
SCATTERS: list[Builder] = [ring_reduce_scatter, multi_ring_reduce_scatter]
COLLECTIVES = [*GATHERS, *SCATTERS, ring_all_reduce, multi_ring_all_reduce, all_to_all, send_recv]


def rows(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """What a schedule sends at each step, in any order."""
    return [
        sorted((*row, int(gives)) for row, gives in zip(step.rows(), step.gives.tolist(), strict=True))
        for step in schedule.steps
    ]


def total(schedule: Schedule) -> int:
    return int(schedule.bytes_sent().sum())


def layer_of(sequence: int, **changes: object) -> Workload:
    return replace(Workload(sequence=sequence, heads=12, head_dim=4, mask="causal"), **changes)  # type: ignore[arg-type]


# -- in_sequence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scatter", "gather", "reduce"),
    [
        (ring_reduce_scatter, ring_all_gather, ring_all_reduce),
        (multi_ring_reduce_scatter, multi_ring_all_gather, multi_ring_all_reduce),
    ],
)
@given(n=st.integers(2, 6), shard=st.integers(6, 100))
@settings(max_examples=10)
def test_reduce_scatter_then_all_gather_is_all_reduce(
    scatter: Builder, gather: Builder, reduce: Builder, n: int, shard: int
) -> None:
    mesh = full_mesh(n)
    composed = in_sequence(scatter(mesh, shard), gather(mesh, shard))
    expected = reduce(mesh, shard)
    assert rows(composed) == rows(expected)
    assert (composed.final == expected.final).all()


@given(st.integers(2, 5), st.integers(4, 40))
@settings(max_examples=10)
def test_a_sequence_sends_what_its_schedules_send(n: int, shard: int) -> None:
    mesh = full_mesh(n)
    for scatter, gather in ((ring_reduce_scatter, ring_all_gather), (ring_reduce_scatter, direct_all_gather)):
        first, second = scatter(mesh, shard), gather(mesh, shard)
        both = in_sequence(first, second)
        assert total(both) == total(first) + total(second)
        assert both.transfers == first.transfers + second.transfers


def test_a_sequence_of_one_is_the_schedule_and_sequences_are_associative() -> None:
    mesh = full_mesh(4)
    scatter, gather = ring_reduce_scatter(mesh, 12), ring_all_gather(mesh, 12)
    nothing = replace(gather, name="nothing", initial=gather.final.copy(), steps=[])
    assert in_sequence(scatter) is scatter
    left = in_sequence(in_sequence(scatter, gather), nothing)
    right = in_sequence(scatter, in_sequence(gather, nothing))
    assert left.digest == right.digest == in_sequence(scatter, gather, nothing).digest
    assert rows(left) == rows(in_sequence(scatter, gather))


@given(st.sampled_from(GATHERS), st.integers(2, 5), st.data())
@settings(max_examples=20)
def test_a_schedule_is_the_sequence_of_its_parts(build: Builder, n: int, data: st.DataObject) -> None:
    whole = build(full_mesh(n), 30)
    cut = data.draw(st.integers(0, len(whole.steps)))
    between = whole.initial.copy()
    for step in whole.steps[:cut]:
        between[step.destination, step.block] = True
    first = replace(whole, final=between, steps=list(whole.steps[:cut]))
    second = replace(whole, initial=between.copy(), steps=list(whole.steps[cut:]))
    assert rows(in_sequence(first, second)) == rows(whole)


def test_a_sequence_that_starts_with_other_copies_is_refused() -> None:
    mesh = full_mesh(4)
    gather, scatter = ring_all_gather(mesh, 12), ring_reduce_scatter(mesh, 12)
    message = "schedule 'ring-all-reduce' after 'ring-reduce-scatter': rank 0 starts with block 1"
    with pytest.raises(ScheduleError, match=message):
        in_sequence(scatter, ring_all_reduce(mesh, 12))
    with pytest.raises(ScheduleError, match="they have different blocks, expected the same ones"):
        in_sequence(scatter, ring_all_gather(mesh, 13))
    with pytest.raises(ScheduleError, match="schedule 'ring' is for 3 ranks, 'ring' for 4"):
        in_sequence(gather, ring_all_gather(full_mesh(3), 12))
    with pytest.raises(ScheduleError, match="step 3: rank 0 sends block 0 to rank 1 on lane 0: rank 1 already holds"):
        in_sequence(gather, gather)
    with pytest.raises(ScheduleError, match="nothing to compose"):
        in_sequence()


def test_passes_of_different_layers_are_no_sequence() -> None:
    forward, backward = token_ring_passes(full_mesh(4), layer_of(16))
    with pytest.raises(ScheduleError, match="they compute different layers, expected the same one"):
        in_sequence(forward, backward)


# -- in_chunks ---------------------------------------------------------------------------------------------------------


@given(st.sampled_from(COLLECTIVES), st.integers(2, 5), st.integers(100, 200), st.integers(1, 5))
@settings(max_examples=60)
def test_chunks_keep_bytes_and_promises(build: Builder, n: int, size: int, chunks: int) -> None:
    schedule = build(full_mesh(n), size)
    chunked = in_chunks(schedule, chunks)
    assert (chunked.bytes_sent().sum(axis=0) == schedule.bytes_sent().sum(axis=0)).all()
    assert len(chunked.steps) == len(schedule.steps) + chunks - 1
    assert chunked.transfers == chunks * schedule.transfers
    assert chunked.blocks.bytes.reshape(-1, chunks).sum(axis=1).tolist() == schedule.blocks.bytes.tolist()
    assert np.ptp(chunked.blocks.bytes.reshape(-1, chunks), axis=1).max() <= 1


@given(st.sampled_from(COLLECTIVES), st.integers(2, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=20)
def test_chunks_of_chunks_are_chunks(build: Builder, n: int, first: int, second: int) -> None:
    schedule = build(full_mesh(n), 9 * 64)
    assert in_chunks(schedule, 1) is schedule
    twice, once = in_chunks(in_chunks(schedule, first), second), in_chunks(schedule, first * second)
    assert total(twice) == total(once)
    assert len(twice.blocks) == len(once.blocks)


CUT: dict[str, Callable[[Topology, Workload], Schedule]] = {
    "token-ring": token_ring,
    "token-ring-backward": lambda mesh, layer: token_ring_passes(mesh, layer).backward,
    "zigzag": lambda mesh, layer: attention("zigzag-ring-attention", mesh, layer),
    "tasp-backward": lambda mesh, layer: attention_passes("tasp", mesh, layer).backward,
    "lasp2": lambda mesh, layer: lasp2(mesh, layer, 0.9),
    "replicas": lambda mesh, layer: replicated(
        lasp2(mesh, layer, 0.9), np.arange(2 * mesh.world_size).reshape(2, -1)[:, ::-1]
    ),
}


@given(st.sampled_from(sorted(CUT)), st.integers(2, 4), st.sampled_from([1, 2, 3, 6]), st.integers(2, 16))
@settings(max_examples=60)
def test_layers_in_chunks_send_and_compute_the_same(name: str, n: int, chunks: int, sequence: int) -> None:
    """Every block is cut into groups of heads; kernel calls follow their blocks a step apart."""
    schedule = CUT[name](full_mesh(n), layer_of(sequence, kv_heads=6))
    chunked = in_chunks(schedule, chunks)
    assert (chunked.bytes_sent().sum(axis=0) == schedule.bytes_sent().sum(axis=0)).all()
    assert sorted(chunked.blocks.bytes * chunks) == sorted(schedule.blocks.bytes.repeat(chunks))
    flops, before = chunked.flops(), schedule.flops()
    for step, own in enumerate(flops):
        expected = sum(before[step - chunk] for chunk in range(chunks) if 0 <= step - chunk < len(before))
        assert (own * chunks == expected).all()
    for kind, cut in zip(schedule.blocks.kinds, chunked.blocks.kinds, strict=True):
        assert (kind.name, kind.pool, kind.bound) == (cut.name, cut.pool, cut.bound)
        sizes = [[int(np.prod(each.shape)) for each in fields] for fields in (kind.fields, cut.fields)]
        assert sizes[0] == [size * chunks for size in sizes[1]]


@pytest.mark.parametrize("name", sorted(CUT))
def test_chunks_of_chunks_of_layers_are_chunks(name: str) -> None:
    schedule = CUT[name](full_mesh(2), layer_of(8))
    twice, once = in_chunks(in_chunks(schedule, 2), 3), in_chunks(schedule, 6)
    assert twice.task is not None
    assert once.task is not None
    assert sorted(twice.blocks.bytes) == sorted(once.blocks.bytes)
    assert twice.blocks.kinds == once.blocks.kinds
    assert twice.flops().sum() == once.flops().sum()
    assert total(twice) == total(once)


@pytest.mark.parametrize("name", sorted(CUT))
def test_the_numbers_of_layers_in_chunks_are_right(name: str) -> None:
    layer = Workload(sequence=6, heads=4, kv_heads=2, head_dim=2, mask="causal")
    world = World.of(in_chunks(CUT[name](full_mesh(2), layer), 2))
    assert is_right_in_orders(world, numbers_of(world), 2)


@pytest.mark.parametrize("chunks", [2, 3, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_chunks_share_keys_of_fewer_heads(chunks: int, kv_heads: int) -> None:
    """They send them once, and give their gradients once."""
    layer = layer_of(6, heads=6, kv_heads=kv_heads)
    for schedule in attention_schedules("direct-kv-all-gather", full_mesh(2), layer, None, AttentionOptions("both")):
        chunked = in_chunks(schedule, chunks)
        assert (chunked.bytes_sent().sum(axis=0) == schedule.bytes_sent().sum(axis=0)).all()
        assert chunked.flops().sum() == schedule.flops().sum()
        world = World.of(chunked)
        assert is_right_in_orders(world, numbers_of(world), 2)


def test_layers_in_chunks_can_be_stacked() -> None:
    layer = Workload(sequence=4, heads=2, head_dim=2, mask="causal")
    parts = [in_chunks(LAYERS[name](full_mesh(2), layer), 2) for name in ("lasp2", "token-ring")]
    parts[1] = in_chunks(attention("ring-attention", full_mesh(2), layer), 2)
    world = World.of(stacked(parts))
    assert is_right_in_orders(world, numbers_of(world), 2)


def test_heads_of_different_chunks_are_not_mixed() -> None:
    schedule = in_chunks(lasp2(full_mesh(2), layer_of(8)), 2)
    assert schedule.task is not None
    keys, queries = ([first, first + len(schedule.blocks) // 2] for first in (0, 2))
    for mixed, own in ((keys[0], keys[1]), (keys[1], keys[0])):
        call = Calls.of("attend", [(0, [[queries[keys.index(own)]], [mixed]], [0])])
        with pytest.raises(ScheduleError, match=r"attend of blocks .* where .* are expected"):
            schedule.task.effects(call)


def test_what_cannot_be_cut_is_refused() -> None:
    gather, mesh = ring_all_gather(full_mesh(3), 7), full_mesh(3)
    with pytest.raises(ScheduleError, match="schedule 'ring' in 0 chunks: expected 1 chunk or more"):
        in_chunks(gather, 0)
    with pytest.raises(ScheduleError, match="schedule 'ring' in 8 chunks: expected 1 to 7, as a chunk has a byte"):
        in_chunks(gather, 8)
    with pytest.raises(ScheduleError, match=r"token-ring' in 13 chunks: block \d+ \(queries\) has 12 heads, "
                                            "expected 13 or more"):  # fmt: skip
        in_chunks(token_ring(mesh, layer_of(9)), 13)
    with pytest.raises(ScheduleError, match="in 2 chunks: 1 KV heads in 2 groups, expected groups of equal size"):
        in_chunks(lasp2(mesh, layer_of(9, kv_heads=1)), 2)
    layer = ulysses(mesh, layer_of(9))
    with pytest.raises(ScheduleError, match="in 2 chunks: its dense calls read all heads of a layer"):
        in_chunks(stacked([layer, layer]), 2)
    everywhere, task = np.ones((2, 1), dtype=bool), SmallTask(np.ones((1, 1), dtype=bool))
    small = Schedule("small", 2, 1, Blocks.of_data(np.array([8])), everywhere, everywhere, [], task)
    with pytest.raises(ScheduleError, match="in 2 chunks: its kernel calls read whole blocks, expected a collective"):
        in_chunks(small, 2)


# -- replicated and over_groups ----------------------------------------------------------------------------------------


@given(st.sampled_from(COLLECTIVES), st.integers(2, 4), st.integers(1, 3), st.randoms())
@settings(max_examples=30)
def test_replicas_send_what_each_sends(build: Builder, n: int, count: int, random: object) -> None:
    schedule = build(full_mesh(n), 24)
    groups = np.random.default_rng(count).permutation(n * count).reshape(count, n)
    several = replicated(schedule, groups)
    assert several.transfers == count * schedule.transfers
    sent = several.bytes_sent().sum(axis=2)
    for ranks in groups:
        assert (sent[:, ranks] == schedule.bytes_sent().sum(axis=2)).all()


def test_replicas_of_a_layer_compute_it_in_every_group() -> None:
    schedule = token_ring(full_mesh(3), layer_of(15))
    several = replicated(schedule, np.array([[0, 2, 4], [5, 3, 1]]))
    assert isinstance(several.task, StackedTask)
    assert (several.flops()[:, [5, 3, 1]] == schedule.flops()).all()
    assert several.flops().sum() == 2 * schedule.flops().sum()


def test_groups_that_are_no_partition_are_refused() -> None:
    gather = ring_all_gather(full_mesh(2), 8)
    with pytest.raises(ScheduleError, match="the groups have not each of the ranks 0 to 3 once"):
        replicated(gather, np.array([[0, 1], [1, 2]]))
    with pytest.raises(ScheduleError, match=r"in groups of shape \(1, 3\), expected \(groups, 2\)"):
        replicated(gather, np.array([[0, 1, 2]]))


@given(st.sampled_from(GATHERS), st.sampled_from(GATHERS), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=40)
def test_two_all_gathers_are_an_all_gather_of_all_ranks(
    inside: Builder, between: Builder, members: int, groups: int, inner_first: bool
) -> None:
    shard = 36 * LOAD_BYTES
    inner, outer = inside(full_mesh(members), shard), between(full_mesh(groups), members * shard)
    both = over_groups(inner, outer, inner_first=inner_first)
    n = members * groups
    assert both.final.all()
    assert (both.initial @ both.blocks.bytes == shard).all()
    assert total(both) == n * (n - 1) * shard
    crossing = sum(
        int(both.blocks.bytes[step.block[step.source // members != step.destination // members]].sum())
        for step in both.steps
    )
    assert crossing == (members if inner_first else 1) * n * (groups - 1) * shard


@given(st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=16)
def test_reductions_on_two_levels_are_reductions_of_all_ranks(members: int, groups: int) -> None:
    shard, n = 24, members * groups
    inner, outer = full_mesh(members), full_mesh(groups)
    scatter = over_groups(
        ring_reduce_scatter(inner, shard), ring_reduce_scatter(outer, members * shard), inner_first=True
    )
    assert (scatter.blocks.parts == n).all()
    assert (scatter.final @ scatter.blocks.bytes == shard).all()
    assert total(scatter) == n * (n - 1) * shard
    gather = over_groups(ring_all_gather(inner, shard), ring_all_gather(outer, members * shard))
    reduce = in_sequence(scatter, gather)
    assert reduce.final.all()
    assert Fraction(total(reduce), n) == 2 * Fraction(n - 1, n) * (n * shard)


@given(st.sampled_from([ring_all_gather, ring_reduce_scatter]), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=20)
def test_the_numbers_of_composed_collectives_are_right(build: Builder, members: int, groups: int, chunks: int) -> None:
    inner, outer = build(full_mesh(members), 24), build(full_mesh(groups), 24 * members)
    levels = over_groups(inner, outer, inner_first=build is ring_reduce_scatter)
    for schedule in (levels, in_chunks(levels, chunks), replicated(inner, np.arange(2 * members).reshape(2, -1))):
        world = World.of(schedule)
        assert is_right_in_orders(world, numbers_of(world), 2)


@given(
    st.sampled_from([ring_all_reduce, multi_ring_all_reduce]),
    st.sampled_from([ring_all_reduce, multi_ring_all_reduce]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=20)
def test_two_all_reduces_are_an_all_reduce_of_all_ranks(
    inside: Builder, between: Builder, members: int, groups: int, inner_first: bool
) -> None:
    """No ring of all ranks sends less: 2 (n - 1) / n of a rank's message; one level sends it whole, one a share."""
    shard, n = 144, members * groups
    message = shard * n
    inner, outer = inside(full_mesh(members), groups * shard), between(full_mesh(groups), members * shard)
    both = over_groups(inner, outer, inner_first=inner_first)
    assert both.initial.all()
    assert both.final.all()
    assert (both.blocks.parts == n).all()
    assert Fraction(total(both), n) == 2 * Fraction(n - 1, n) * message
    crossing = sum(
        int(both.blocks.bytes[step.block[step.source // members != step.destination // members]].sum())
        for step in both.steps
    )
    share = Fraction(message, members if inner_first else 1)
    assert Fraction(crossing, n) == 2 * Fraction(groups - 1, groups) * share


@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize("kinds", [(ring_all_reduce, ring_all_reduce), (ring_all_reduce, ring_reduce_scatter),
                                   (ring_reduce_scatter, multi_ring_all_reduce)])  # fmt: skip
def test_the_numbers_of_reductions_on_two_levels_are_right(kinds: tuple[Builder, Builder], inner_first: bool) -> None:
    inner, outer = kinds[0](full_mesh(3), 12), kinds[1](full_mesh(2), 18)
    world = World.of(over_groups(inner, outer, inner_first=inner_first))
    assert is_right_in_orders(world, numbers_of(world), 3)


@given(st.integers(1, 5), st.integers(1, 30))
@settings(max_examples=10)
def test_an_all_reduce_is_its_two_halves(n: int, shard: int) -> None:
    whole = ring_all_reduce(full_mesh(n), shard)
    scatter, gather = reduce_scatter_and_all_gather(whole)
    assert rows(in_sequence(scatter, gather)) == rows(whole)
    assert rows(scatter) == rows(ring_reduce_scatter(full_mesh(n), shard))


def test_a_step_between_groups_is_taken_beside_all_steps_within_them() -> None:
    members, groups, shard = 4, 3, 12
    inner, outer = ring_all_gather(full_mesh(members), shard), ring_all_gather(full_mesh(groups), members * shard)
    gather = over_groups(inner, outer)
    assert len(gather.steps) == groups * (members - 1)
    for index, step in enumerate(gather.steps):
        crosses = step.source // members != step.destination // members
        assert (crosses == (step.lane == 1)).all()
        assert np.count_nonzero(~crosses) == members * groups
        between = index % (members - 1) == 0 and index < (groups - 1) * (members - 1)
        assert np.count_nonzero(crosses) == (members * groups if between else 0)


def test_one_group_or_one_member_is_the_schedule_itself() -> None:
    alone, gather = ring_all_gather(full_mesh(1), 30), ring_all_gather(full_mesh(3), 30)
    assert rows(over_groups(gather, ring_all_gather(full_mesh(1), 90))) == rows(gather)
    of_members = over_groups(alone, gather)
    assert [[row[:2] + row[3:] for row in step] for step in rows(of_members)] == [
        [row[:2] + row[3:] for row in step] for step in rows(gather)
    ]


def test_levels_that_do_not_fit_are_refused() -> None:
    inner = ring_all_gather(full_mesh(2), 10)
    with pytest.raises(ScheduleError, match="ring over ring: block 0 of 1 bytes in 2 pieces, expected a byte or more"):
        over_groups(inner, ring_all_gather(full_mesh(3), 1))
    with pytest.raises(ScheduleError, match="one moves data, one adds up parts, expected the same of both"):
        over_groups(inner, ring_reduce_scatter(full_mesh(3), 20))
    with pytest.raises(ScheduleError, match="schedule 'zigzag-token-ring' has kernel calls, expected a collective"):
        over_groups(token_ring(full_mesh(2), layer_of(8)), inner)
    with pytest.raises(ScheduleError, match="one moves data, one adds up parts, expected the same of both"):
        over_groups(inner, ring_all_reduce(full_mesh(3), 20))
    pipelined = in_chunks(ring_all_reduce(full_mesh(4), 20), 3)
    message = "schedule 'ring-all-reduce' copies sums at step 3 that are at several ranks, expected a ReduceScatter"
    with pytest.raises(ScheduleError, match=message):
        over_groups(pipelined, pipelined, inner_first=True)
    pooled = replace(inner.blocks, kinds=[replace(inner.blocks.kinds[0], pool=Pool("some", 2))])
    with pytest.raises(ScheduleError, match="schedule 'ring' receives into buffers, expected copies that stay"):
        over_groups(replace(inner, blocks=pooled, steps=list(inner.steps)), inner)


# -- stacked -----------------------------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[[Topology, Workload], Schedule]] = {
    "token-ring": lambda mesh, layer: token_ring(mesh, replace(layer, mask="full", window=None)),
    "ulysses": ulysses,
    "lasp2": lambda mesh, layer: lasp2(mesh, layer, 0.9),
}


@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3), st.sampled_from([1, 2, 3, 4]), st.integers(4, 20)
)
@settings(max_examples=30)
def test_a_stack_sends_and_computes_what_its_layers_do(names: list[str], n: int, sequence: int) -> None:
    layers = [LAYERS[name](full_mesh(n), layer_of(sequence)) for name in names]
    stack = stacked(layers, dense_flops=1000)
    assert total(stack) == sum(map(total, layers))
    assert stack.transfers == sum(each.transfers for each in layers)
    dense = (len(layers) - 1) * 1000
    assert (stack.flops().sum(axis=0) == sum(each.flops().sum(axis=0) for each in layers) + dense).all()
    assert len(stack.steps) == sum(len(each.steps) for each in layers) + len(layers) - 1


def test_a_stack_of_one_is_the_layer() -> None:
    layer = ulysses(full_mesh(4), layer_of(16))
    assert stacked([layer]) is layer


@pytest.mark.parametrize(
    "names", [("ulysses", "lasp2"), ("lasp2", "ulysses"), ("ulysses", "ulysses"), ("lasp2", "lasp2")]
)
def test_the_numbers_of_a_stack_are_those_of_its_layers_in_turn(names: tuple[str, str]) -> None:
    layer = Workload(sequence=5, heads=2, head_dim=2, mask="causal")
    world = World.of(stacked([LAYERS[name](full_mesh(2), layer) for name in names]))
    assert is_right_in_orders(world, numbers_of(world), 2)


def passes_of(name: str, topology: Topology, layer: Workload, dataflow: Dataflow = "rotate-kv") -> Passes:
    systems = {"token-ring": token_ring_passes, "ulysses": ulysses_passes}
    if name in systems:
        return systems[name](topology, layer)  # type: ignore[operator]
    return attention_passes(name, topology, layer, dataflow=dataflow)


def training_step(passes: Sequence[Passes]) -> list[Schedule]:
    """In the order in which they are computed."""
    return [each.forward for each in passes] + [each.backward for each in reversed(passes)]


BACKWARD = ["ulysses", "ring-attention", "tasp"]


@given(st.lists(st.sampled_from(BACKWARD), min_size=1, max_size=3), st.integers(2, 4), st.integers(4, 20))
@settings(max_examples=20)
def test_a_training_step_sends_and_computes_what_its_passes_do(names: list[str], n: int, sequence: int) -> None:
    """One call between two passes, its FLOPs those of its pass; zigzag is another layout than contiguous."""
    names = names if "tasp" not in names else ["tasp"] * len(names)
    layers = [passes_of(name, full_mesh(n), layer_of(sequence)) for name in names]
    for backward_only in (False, True):
        parts = [each.backward for each in layers] if backward_only else training_step(layers)
        stack = stacked(parts, dense_flops=10, dense_backward_flops=1000)
        assert total(stack) == sum(map(total, parts))
        backward = len(layers) - 1 if backward_only else len(layers)
        present = np.array([each.flops().any(axis=0) for each in parts]).any(axis=0)
        dense = 1000 * backward + (0 if backward_only else 10 * (len(layers) - 1))
        assert (stack.flops().sum(axis=0) == sum(each.flops().sum(axis=0) for each in parts) + dense * present).all()


@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_the_numbers_of_backward_passes_in_a_stack_are_right(dataflow: Dataflow) -> None:
    """Keys that a forward pass has left at other ranks are there from the start."""
    layer = Workload(sequence=5, heads=2, kv_heads=1, head_dim=2, mask="causal")
    passes = [passes_of("ring-attention", full_mesh(2), layer, dataflow) for _ in range(2)]
    world = World.of(stacked([each.backward for each in passes]))
    assert is_right_in_orders(world, numbers_of(world), 2)


@pytest.mark.parametrize(
    "names", [("ring-attention",), ("ring-attention", "ulysses"), ("tasp", "tasp"), ("token-ring", "tasp")]
)
def test_the_numbers_of_a_training_step_are_right(names: tuple[str, ...]) -> None:
    """Gradients follow from results and gradients of other layers, by the chain rule."""
    layer = Workload(sequence=6, heads=2, head_dim=2, mask="causal")
    world = World.of(stacked(training_step([passes_of(name, full_mesh(2), layer) for name in names])))
    assert is_right_in_orders(world, numbers_of(world), 2)


@pytest.mark.parametrize("name", ["ulysses", "ring-attention"])
def test_too_much_overlap_of_backward_passes_is_refused(name: str) -> None:
    """The last step of each of these passes brings gradients, so nothing can be made of them before its end."""
    backward = [passes_of(name, full_mesh(3), layer_of(9)).backward] * 2
    stacked(backward, overlap=0)
    for overlap in range(1, len(backward[0].steps) + 1):
        with pytest.raises(ScheduleError, match=r"rank \d computes with block \d+ \((key|query) gradients\), of which"):
            stacked(backward, overlap)


def test_equal_kinds_and_pools_of_layers_are_one() -> None:
    layer = attention("zigzag-ring-attention", full_mesh(4), layer_of(16))
    stack = stacked([layer] * 3)
    assert stack.blocks.kinds == layer.blocks.kinds
    assert list(stack.blocks.pools) == list(layer.blocks.pools) != []


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_too_much_overlap_is_refused(name: str) -> None:
    """The last step of each of these layers completes results, so nothing can be made of them before its end."""
    layers = [LAYERS[name](full_mesh(3), layer_of(9))] * 2
    stacked(layers, overlap=0)
    for overlap in range(1, len(layers[0].steps) + 1):
        with pytest.raises(ScheduleError, match=r"rank \d computes with block \d+ \(results\), of which it lacks"):
            stacked(layers, overlap)
    with pytest.raises(ScheduleError, match="layers overlap by -1 steps, expected 0 to"):
        stacked(layers, -1)


def test_a_layer_that_ends_with_other_work_may_overlap() -> None:
    """With idle steps at the end of a layer the one behind it may begin as many steps earlier, and no more."""
    layer = ulysses(full_mesh(3), layer_of(9))
    slow = replace(layer, steps=[*layer.steps, Step.of(()), Step.of(())])
    assert len(stacked([slow, layer], overlap=2).steps) == len(stacked([layer, layer]).steps)
    with pytest.raises(ScheduleError, match=r"step 2: rank 0 computes with block 21 \(results\), of which it lacks"):
        stacked([slow, layer], overlap=3)


def test_what_is_no_stack_is_refused() -> None:
    mesh, layer = full_mesh(4), layer_of(16)
    contiguous, backward = ulysses(mesh, layer), token_ring_passes(mesh, layer).backward
    with pytest.raises(ScheduleError, match="'zigzag-token-ring' has other positions on rank 0 than 'ulysses': "
                                            "layout zigzag, expected contiguous"):  # fmt: skip
        stacked([contiguous, token_ring(mesh, layer)])
    ring, back = attention_passes("ring-attention", mesh, layer, dataflow="rotate-kv")
    kept = attention_passes("ring-attention", mesh, layer, dataflow="rotate-kv-back").backward
    for layers, message in (
        ([back, ring], "passes in the order backward, forward, expected forward passes, then backward passes"),
        ([ring, ring, back], "2 forward and 1 backward passes, expected equally many"),
        ([ring, token_ring(mesh, layer), back, backward], "'zigzag-token-ring' has other positions"),
        ([ring, attention_passes("ring-attention", mesh, replace(layer, window=3)).backward],
         "layer 1, 'ring-attention', is no backward pass of layer 0, 'ring-attention'"),
        ([ring, kept], r"layer 1, 'ring-attention': rank 0 starts with block \d+ \(keys\), expected its own"),
    ):  # fmt: skip
        with pytest.raises(ScheduleError, match=message):
            stacked(layers)
    with pytest.raises(ScheduleError, match="schedule 'ring' is no pass of a layer"):
        stacked([ring_all_gather(mesh, 8), contiguous])
    with pytest.raises(ScheduleError, match="schedule 'ulysses' is for 3 ranks, 'ulysses' for 4"):
        stacked([contiguous, ulysses(full_mesh(3), layer)])
    with pytest.raises(ScheduleError, match="layer 1 is in fp32, expected bf16 like layer 0"):
        stacked([contiguous, ulysses(mesh, replace(layer, dtype="fp32"))])
    with pytest.raises(ScheduleError, match="FLOPs of 3 ranks, expected one number or 4"):
        stacked([contiguous, contiguous], dense_flops=[1, 2, 3])


def test_a_stacked_task_refuses_what_its_layers_refuse() -> None:
    layer = lasp2(full_mesh(2), layer_of(8))
    task = stacked([layer, layer]).task
    assert isinstance(task, StackedTask)
    count = len(layer.blocks)
    queries, keys = 2, 0  # keys 0 and 1, queries 2 and 3, results 4 and 5
    for kernel, operands, params, message in (
        ("attend", [[queries], [count + keys]], [0], "rank 0: attend across layers"),
        ("attend", [[], []], [0], "rank 0: attend of nothing"),
        (
            "attend",
            [[count + queries], [count + keys + 1]],
            [0],
            "layer 1: rank 0: attend .* of keys that it does not attend to",
        ),
        (DENSE, [[5]], [0], r"rank 0: dense 0 of blocks \[5\], expected \[4\]"),
        (DENSE, [[4, 5]], [0], r"rank 0: dense 0 of blocks \[4, 5\], expected \[4\]"),
        (DENSE, [[4]], [2], "rank 0: dense 2, expected 0 to 1"),
        (DENSE_BACKWARD, [[4]], [0], "rank 0: dense_backward 0, which is a call of dense"),
        (DENSE, [[4]], [], "dense takes lists of blocks and one parameter"),
    ):
        with pytest.raises(ScheduleError, match=message):
            task.effects(Calls.of(kernel, [(0, operands, params)]))
    made = task.effects(Calls.of(DENSE, [(1, [[5]], [1])]))
    assert sorted(made.block.tolist()) == [count + keys + 1, count + queries + 1]


def test_layers_mixed_in_one_set_of_calls_are_told_apart() -> None:
    layer = lasp2(full_mesh(2), layer_of(8))
    task = stacked([layer, layer]).task
    assert isinstance(task, StackedTask)
    count = len(layer.blocks)
    calls = Calls.of("attend", [(0, [[count + 2], [count]], [0]), (0, [[2], [0]], [0])])
    found = task.effects(calls)
    assert sorted(zip(found.call.tolist(), found.block.tolist(), strict=True)) == [(0, count + 4), (1, 4)]
    assert task.flops(calls).tolist() == [layer.task.flops(calls.select(np.array([1]))).item()] * 2  # type: ignore[union-attr]
