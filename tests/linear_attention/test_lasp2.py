"""LASP-2: its bytes, its FLOPs, its numbers, and the calls that a layer of linear attention refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.errors import ScheduleError
from tasp_lab.linear_attention.lasp2 import lasp2
from tasp_lab.linear_attention.task import (
    APPLY_STATE,
    ATTEND,
    CHUNK_STATES,
    FOLD,
    KEYS,
    MAKE_STATE,
    PREFIX_STATES,
    QUERIES,
    RESULTS,
    LinearTask,
)
from tasp_lab.schedule.calls import Calls
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import contiguous, striped
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.world import World

layers = st.builds(
    Workload,
    sequence=st.integers(1, 40),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.integers(1, 4),
    mask=st.just("causal"),
)


def layer_of(sequence: int) -> Workload:
    return Workload(sequence=sequence, batch=2, heads=4, head_dim=8, mask="causal")


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_bytes_do_not_depend_on_the_sequence(n: int) -> None:
    state = 4 * 2 * 4 * 8 * 8 + 4 * 4  # float32: batch x heads x head_dim x head_dim, and a decay per head
    for sequence in (n, 10 * n + 1, 1000 * n):
        published = lasp2(full_mesh(n), layer_of(sequence), trim=False).bytes_sent()
        assert (published.sum(axis=(0, 2)) == (n - 1) * state).all()
        trimmed = lasp2(full_mesh(n), layer_of(sequence)).bytes_sent()
        assert trimmed.sum() == n * (n - 1) // 2 * state


def test_states_circulate_beside_the_attention_within_chunks() -> None:
    n = 4
    schedule = lasp2(ring(n), layer_of(40), trim=False)
    kernels = [[calls.kernel for calls in step.calls] for step in schedule.steps]
    assert kernels == [[MAKE_STATE], [ATTEND], [], [], [FOLD], [APPLY_STATE]]
    assert [len(step) for step in schedule.steps] == [0, n, n, n, 0, 0]


def test_a_single_chunk_needs_no_states() -> None:
    for n, sequence in ((1, 8), (3, 1)):
        schedule = lasp2(full_mesh(n), layer_of(sequence))
        assert [calls.kernel for step in schedule.steps for calls in step.calls] == [ATTEND]


@given(layers, st.integers(1, 6))
def test_the_flops_are_linear_in_the_sequence_but_for_the_chunks_themselves(layer: Workload, n: int) -> None:
    schedule = lasp2(full_mesh(n), layer, trim=False)
    counts = np.array([each for each in (contiguous(layer.sequence, n).length(rank) for rank in range(n)) if each])
    within = counts * (counts + 1) // 2 * layer.flops_per_pair
    per_state = 2 * layer.head_dim**2
    make = counts * per_state * layer.kv_head_count * (len(counts) > 1)
    fold = np.arange(len(counts)) * per_state * layer.kv_head_count
    apply = counts * per_state * layer.heads * (np.arange(len(counts)) > 0)
    assert schedule.flops().sum(axis=0)[: len(counts)].tolist() == (within + make + fold + apply).tolist()
    assert schedule.flops().sum(axis=0)[len(counts) :].sum() == 0


@settings(max_examples=40)
@given(layers, st.integers(1, 6), st.booleans(), st.sampled_from([1.0, 0.9, (0.5, 1.0, 0.8, 0.25)]))
def test_the_numbers_are_those_of_the_whole_layer(
    layer: Workload, n: int, trim: bool, decay: float | tuple[float, ...]
) -> None:
    decays = decay[: layer.kv_head_count] if isinstance(decay, tuple) else (decay,) * layer.kv_head_count
    schedule = lasp2(full_mesh(n), layer, decays, trim=trim)
    world = World.of(schedule)
    assert is_right_in_orders(world, numbers_of(world), 2)


TASK = LinearTask(layer_of(40), contiguous(40, 4), (0.9,) * 4)
"""Chunks 0 to 3 of 10 positions: keys are blocks 0 to 3, queries 4 to 7, results 8 to 11, their states 12 to 15, the
prefix states of chunks 1 to 3 blocks 16 to 18."""


def test_effects_are_parts_per_chunk() -> None:
    def effects(kernel: str, operands: list[list[int]], params: list[int]) -> list[tuple[int, int]]:
        found = TASK.effects(Calls.of(kernel, [(0, operands, params)]))
        assert not found.call.any()
        return list(zip(found.block.tolist(), found.part.tolist(), strict=True))

    assert effects(MAKE_STATE, [[2]], []) == [(14, 0)]
    assert effects(ATTEND, [[6], [0]], [20]) == [(10, 0)]
    assert effects(FOLD, [[12, 13]], [2]) == [(17, 0), (17, 1)]
    assert effects(FOLD, [[14]], [3]) == [(18, 2)]
    assert effects(APPLY_STATE, [[7], [18]], []) == [(11, 0), (11, 1), (11, 2)]


@pytest.mark.parametrize(
    ("kernel", "operands", "params", "message"),
    [
        ("advance", [[0]], [], "unknown kernel 'advance', expected one of make_state, attend, fold, apply_state"),
        (MAKE_STATE, [[4]], [], "with other blocks than keys"),
        (MAKE_STATE, [[0, 1]], [], "with not one block of keys"),
        (ATTEND, [[4], [0]], [], "attend takes queries and keys, and 1 parameters"),
        (ATTEND, [[4], [1]], [-10], "to keys behind the queries"),
        (ATTEND, [[5], [0]], [0], "over a distance that is not that of the blocks"),
        (FOLD, [[]], [1], "with no block of chunk states"),
        (FOLD, [[12, 14]], [3], "of chunks with others in between"),
        (FOLD, [[12]], [2], "of chunks with others in between"),
        (FOLD, [[13, 12]], [2], "of chunks with others in between"),
        (FOLD, [[12]], [4], "to a chunk that has no prefix state"),
        (FOLD, [[12]], [0], "to a chunk that has no prefix state"),
        (APPLY_STATE, [[5], [17]], [], "of another chunk"),
    ],
)
def test_calls_that_the_layer_does_not_require_are_refused(
    kernel: str, operands: list[list[int]], params: list[int], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        TASK.effects(Calls.of(kernel, [(0, operands, params)]))


def test_the_first_refused_call_of_several_is_named() -> None:
    calls = Calls.of(APPLY_STATE, [(1, [[5], [16]], []), (2, [[6], [16]], [])])
    with pytest.raises(ScheduleError, match=r"rank 2: apply_state of blocks \[\[6\], \[16\]\] of another chunk"):
        TASK.effects(calls)


def test_layers_that_are_no_linear_attention_are_refused() -> None:
    for layer in (
        Workload(sequence=8),
        Workload(sequence=8, mask="causal", window=3),
        Workload(sequence=8, mask="causal", documents=(4, 4)),
    ):
        with pytest.raises(ScheduleError, match="linear attention has a causal mask, without a window"):
            lasp2(full_mesh(2), layer)
    for decay in (0.0, 1.5, (0.5,)):
        with pytest.raises(ScheduleError, match="expected 4 numbers above 0 and up to 1, one per KV head"):
            lasp2(full_mesh(2), layer_of(8), decay)
    with pytest.raises(ScheduleError, match="layout 'striped' of 8 positions, expected spans of consecutive positions"):
        LinearTask(layer_of(8), striped(8, 2), (1.0,) * 4)


def test_blocks_are_those_of_their_fields() -> None:
    sizes = lasp2(full_mesh(4), layer_of(40)).blocks.bytes[[0, 4, 8, 12, 16]]
    assert TASK.tensor[[0, 4, 8, 12, 16]].tolist() == [KEYS, QUERIES, RESULTS, CHUNK_STATES, PREFIX_STATES]
    rows = 2 * 4 * 8 * 10
    assert sizes.tolist() == [2 * 2 * rows, 2 * rows, 4 * rows, 4 * 2 * 4 * 64 + 16, 4 * 2 * 4 * 64]
