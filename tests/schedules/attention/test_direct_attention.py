"""Keys straight to the ranks that need them, in stages: bytes, ranks, calls, times. Proven on construction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.buffer_layout import memory_bytes
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes, check_fit
from tasp_lab.schedules.attention.direct_attention import direct_pass, needed_runs
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, AttentionTask
from tasp_lab.schedules.build import attention_layout
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span
from tests.support.masks import ONE_OF_EACH, pairs_seen
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of

NAME = "direct-attention"


def passes(n: int, layer: Workload, **options: object) -> Passes:
    return passes_of(NAME, full_mesh(n), layer, **options)


def task_of(schedule: Schedule) -> AttentionTask:
    assert isinstance(schedule.task, AttentionTask)
    return schedule.task


def keys_needed(layer: Workload, layout: SequenceLayout) -> dict[int, set[int]]:
    """The keys of other ranks that each rank's queries attend to, position by position."""
    seen = pairs_seen(layer)
    shards = [layout.positions(rank).tolist() for rank in range(layout.world_size)]
    others = [set(range(layer.sequence)) - set(shard) for shard in shards]
    return {rank: {key for key in others[rank] if seen[shard, key].any()} for rank, shard in enumerate(shards)}


def positions_moved(schedule: Schedule, tensor: int) -> Counter[tuple[int, int, int]]:
    """How often each position of a tensor is sent, by source and destination."""
    task, found = task_of(schedule), Counter[tuple[int, int, int]]()
    for step in schedule.steps:
        for source, destination, _, block in step.rows():
            if task.tensor[block] == tensor:
                first = int(task.start[block])
                found.update((source, destination, first + index) for index in range(int(task.count[block])))
    return found


# Bytes


@pytest.mark.parametrize("stages", [1, 3, 4, 7])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_with_a_full_mask_keys_go_to_all_and_again_backward_where_gradients_return(
    n: int, kv_heads: int, stages: int
) -> None:
    """4X(P - 1) bytes forward and, in 16 bit, 8X(P - 1) backward, from every rank and equally on every link."""
    layer = Workload(sequence=8 * n, batch=2, heads=8, kv_heads=kv_heads, head_dim=4, mask="full")
    x = layer.batch * 8 * kv_heads * layer.head_dim
    for dtype, gradients in (("auto", 4 * x), ("fp32", 8 * x)):
        forward, backward = passes(n, layer, stages=stages, gradient_dtype=dtype)
        assert (forward.bytes_sent().sum(axis=0) == 4 * x).all()
        by_lane = backward.bytes_sent().sum(axis=0)
        assert (by_lane == np.repeat([4 * x, gradients], n - 1)).all()


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_only_lower_ranks_need_the_back_half_of_a_shard_under_a_causal_mask(n: int, stages: int) -> None:
    layer = Workload(sequence=8 * n, heads=2, head_dim=4, mask="causal")
    keys = layer.kv_bytes_per_position * 8
    forward, backward = passes(n, layer, stages=stages)
    assert forward.bytes_sent().sum() == Fraction(3, 4) * n * (n - 1) * keys
    assert backward.bytes_sent().sum() == 2 * forward.bytes_sent().sum()
    by_rank = forward.bytes_sent().sum(axis=(0, 2))
    assert (by_rank == [Fraction(n - 1 + rank, 2) * keys for rank in range(n)]).all()


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 7])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_chunk_receives_the_keys_within_the_window_before_it(n: int, window: int, stages: int) -> None:
    """Each of 2n chunks, but the first one and the second one of the last rank: what is before that is its own."""
    layer = Workload(sequence=2 * n * 6, heads=2, head_dim=4, mask="causal", window=window)
    sent = passes(n, layer, stages=stages).forward.bytes_sent().sum()
    assert sent == (2 * n - 2) * (window - 1) * layer.kv_bytes_per_position


@settings(max_examples=50, deadline=None)
@given(attention_layers(packed=False), st.integers(1, 6), st.integers(1, 5))
def test_a_rank_receives_from_their_owners_the_keys_that_it_needs_and_no_other(
    layer: Workload, n: int, stages: int
) -> None:
    layout = attention_layout(NAME, layer, n)
    owner = {int(position): rank for rank in range(n) for position in layout.positions(rank)}
    needed = [(rank, key) for rank, keys in keys_needed(layer, layout).items() for key in keys]
    there = Counter((owner[key], rank, key) for rank, key in needed)
    home = Counter((rank, owner[key], key) for rank, key in needed)
    forward, backward = passes(n, layer, stages=stages)
    assert positions_moved(forward, KEYS) == positions_moved(backward, KEYS) == there
    assert positions_moved(backward, KEY_GRADIENTS) == home
    for schedule, tensors in ((forward, 1), (backward, 2)):
        assert schedule.bytes_sent().sum() == tensors * len(needed) * layer.kv_bytes_per_position
        assert schedule.flops().sum() == task_of(schedule).total_flops


@settings(max_examples=50, deadline=None)
@given(attention_layers().filter(lambda layer: layer.documents is None), st.integers(1, 6))
@example(Workload(70, heads=2, head_dim=4, ranges=ONE_OF_EACH), 3)
def test_keys_are_cut_only_where_the_ranks_that_need_them_change(layer: Workload, n: int) -> None:
    layout = attention_layout(NAME, layer, n)
    needed = keys_needed(layer, layout)
    task = span_task(layer, layout, "fp32")
    runs = needed_runs(task)
    covered = []
    for block, first, length, users in zip(*runs, strict=True):
        start = int(task.start[block] + first)
        places = range(start, start + int(length))
        covered += places
        for key in layout.positions_at(np.array(places)).tolist():
            assert users.tolist() == [key in needed[rank] for rank in range(n)]
    assert sorted(covered) == list(range(layer.sequence))
    again = (runs.block[1:] == runs.block[:-1]) & (runs.users[1:] == runs.users[:-1]).all(axis=1)
    assert not again.any()


@settings(max_examples=50, deadline=None)
@given(attention_layers(), st.integers(1, 6), st.integers(1, 5))
def test_documents_move_all_that_a_rank_needs_and_no_more_than_one_document(
    layer: Workload, n: int, stages: int
) -> None:
    layout = attention_layout(NAME, layer, n)
    needed = {(rank, key) for rank, keys in keys_needed(layer, layout).items() for key in keys}
    packed = passes(n, layer, stages=stages).forward
    at = layout.positions_at(np.arange(layer.sequence)).tolist()
    moved = Counter((rank, at[place]) for _, rank, place in positions_moved(packed, KEYS).elements())
    assert needed <= moved.keys()
    assert max(moved.values(), default=1) == 1
    if layer.window is None and layer.ranges is None:
        whole = passes(n, replace(layer, documents=None), stages=stages).forward
        assert positions_moved(packed, KEYS) <= positions_moved(whole, KEYS)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_ranges_move_what_is_needed_and_nothing_else(n: int, stages: int) -> None:
    layer = Workload(70, heads=2, head_dim=4, ranges=ONE_OF_EACH)
    layout = attention_layout(NAME, layer, n)
    needed = {(rank, key) for rank, keys in keys_needed(layer, layout).items() for key in keys}
    at = layout.positions_at(np.arange(layer.sequence)).tolist()
    for schedule in passes(n, layer, stages=stages):
        moved = Counter((rank, at[place]) for _, rank, place in positions_moved(schedule, KEYS).elements())
        assert moved == Counter(needed)


def whole_documents(lengths: tuple[int, ...], ranks: tuple[int, ...]) -> SequenceLayout:
    """Each document on one rank."""
    starts = np.cumsum((0, *lengths)).tolist()
    spans = [
        tuple(Span(start, 1, length) for start, length, at in zip(starts, lengths, ranks, strict=False) if at == rank)
        for rank in range(max(ranks) + 1)
    ]
    return SequenceLayout("whole documents", sum(lengths), tuple(spans))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("backward", [False, True])
def test_documents_that_lie_on_one_rank_move_nothing(mask: str, backward: bool) -> None:
    lengths = (5, 9, 3, 7, 4)
    layer = Workload(sum(lengths), heads=2, head_dim=4, mask=mask, documents=lengths)
    layout = whole_documents(lengths, (0, 1, 2, 0, 2))
    schedule = direct_pass(NAME, full_mesh(3), layer, layout, AttentionOptions("both"), backward)
    assert schedule.transfers == 0
    assert [len(calls) for step in schedule.steps for calls in step.calls] == [3]
    assert schedule.flops().sum() == task_of(schedule).total_flops


def test_documents_that_two_ranks_share_move_between_these_two() -> None:
    layer = Workload(24, heads=2, head_dim=4, documents=(8, 16), mask="full")
    spans = ((Span(0, 1, 8),), (Span(8, 1, 8),), (Span(16, 1, 8),))
    layout = SequenceLayout("one and two", 24, spans)
    forward = direct_pass(NAME, full_mesh(3), layer, layout, AttentionOptions(), backward=False)
    sent = forward.bytes_sent().sum(axis=0)
    assert sent.tolist() == [[0, 0], [8 * layer.kv_bytes_per_position, 0], [0, 8 * layer.kv_bytes_per_position]]


# Stages


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_each_stage_is_an_equal_part_of_what_every_link_carries(mask: str, stages: int) -> None:
    n, layer = 4, Workload(sequence=48, heads=2, head_dim=4, mask=mask)
    forward, backward = passes(n, layer, stages=stages)
    assert (len(forward.steps), len(backward.steps)) == (stages + 1, stages + 2)
    *keys, last = forward.bytes_sent()
    assert (keys == keys[0]).all()
    assert not last.any()
    there, home = np.split(backward.bytes_sent(), 2, axis=2)
    assert (there[:stages] == keys).all()
    assert not home[:2].any()
    assert (home[2:] == home[2]).all()
    assert home[2].sum() == there[0].sum()
    assert not there[stages:].any()


@settings(max_examples=30, deadline=None)
@given(attention_layers(), st.integers(2, 5), st.integers(1, 6))
def test_stages_of_a_link_differ_by_a_position_per_set_of_ranks(layer: Workload, n: int, stages: int) -> None:
    forward = passes(n, layer, stages=stages).forward
    task = task_of(forward)
    groups = len({tuple(users) for users in needed_runs(span_task(layer, task.layout, "fp32")).users.tolist()})
    by_stage = forward.bytes_sent()[:stages]
    by_stage = np.concatenate([by_stage, np.zeros((stages - len(by_stage), *by_stage.shape[1:]), dtype=np.int64)])
    assert (np.ptp(by_stage, axis=0) <= groups * layer.kv_bytes_per_position).all()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_rank_makes_one_call_at_home_and_per_stage_as_few_as_the_mask_allows(stages: int) -> None:
    """Under a causal mask one for both halves of the queries, and one for the back half alone if there is a rank up."""
    n = 4
    for mask, per_stage in (("full", [1] * n), ("causal", [1, 2, 2, 1])):
        for schedule in passes(n, Workload(sequence=64, heads=2, mask=mask), stages=stages):
            at_home, *others = [
                np.bincount(np.concatenate([calls.rank for calls in step.calls]), minlength=n).tolist()
                for step in schedule.steps
                if step.calls
            ]
            assert at_home == [1] * n
            assert others == [per_stage] * stages


@pytest.mark.parametrize("compute", [Fraction(1, 100), Fraction(1, 2), Fraction(1), Fraction(3), Fraction(100)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_all_but_the_first_stage_of_transfers_or_the_last_one_of_calls_is_hidden(
    compute: Fraction, stages: int
) -> None:
    """T is the longest of K, C/s + K (n-1)/n and C + K/s (n-1)/n, here with C = 1."""
    n, layer = 4, Workload(sequence=32, heads=2, head_dim=4, mask="full")
    bandwidth = Fraction(layer.kv_bytes_per_position * 8)
    rate = Fraction(layer.sequence * 8 * layer.flops_per_pair) / compute
    machine = Machine(full_mesh(n, bandwidth, Fraction(0)), compute=ComputeRate(rate))
    schedule = passes(n, layer, stages=stages, buffers=5).forward
    away = compute * Fraction(n - 1, n)
    assert simulate(schedule, machine).time_s == max(compute, Fraction(1, stages) + away, 1 + away / stages)


@pytest.mark.parametrize(("stages", "buffers", "held"), [(1, 3, 1), (3, 3, 3), (6, 2, 2), (6, 3, 3), (6, 6, 6)])
def test_a_rank_holds_as_many_stages_as_there_are_buffers(stages: int, buffers: int, held: int) -> None:
    """Beside its own keys; backward also gradients: its own in float32, and in buffers what it makes and what arrives.

    At a step a stage is made and another one arrives, but if there is only one stage.
    """
    n, layer = 4, Workload(sequence=24, heads=2, head_dim=4, mask="full")
    shard = layer.kv_bytes_per_position * 6
    forward, backward = passes(n, layer, stages=stages, buffers=buffers)
    stage = Fraction(n - 1, stages) * shard
    assert (memory_bytes(forward) == shard + held * stage).all()
    gradients = min(buffers, stages + 1) * stage * (1 if stages == 1 else 2)
    assert (memory_bytes(backward) == 3 * shard + held * stage + gradients).all()


# Both passes


def test_gradients_are_given_straight_home_a_step_after_their_call_and_added_in_float32() -> None:
    n = 4
    backward = passes(n, Workload(sequence=32, heads=2, mask="causal")).backward
    task = task_of(backward)
    assert {field.home_dtype for field in task.fields_of(KEY_GRADIENTS, 1)} == {"fp32"}
    assert {field.dtype for field in task.fields_of(KEY_GRADIENTS, 1)} == {"bf16"}
    came: dict[tuple[int, int], int] = {}
    for index, step in enumerate(backward.steps):
        assert (step.gives == (task.tensor[step.block] == KEY_GRADIENTS)).all()
        assert (step.gives == (step.lane >= n - 1)).all()
        ahead = np.where(step.gives, step.source - step.destination, step.destination - step.source)
        assert ((ahead - 1) % n == step.lane % (n - 1)).all()
        for source, destination, _, block in step.rows():
            if task.tensor[block] == KEYS:
                assert source == task.owner[block]
                came[destination, int(task.output_of[block])] = index
            else:
                assert destination == task.owner[block]
                assert came.pop((source, block)) == index - 2
    assert not came


def test_the_backward_pass_needs_nothing_that_the_forward_pass_left() -> None:
    forward, backward = passes(3, Workload(sequence=25, heads=2, mask="causal", window=9))
    check_fit(forward, backward)
    assert (backward.initial.sum(axis=0) <= 1).all()


# Refusals
