"""What the schedules of linear attention send and compute, and when."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.bounds.layers import linear_bound_s
from sim.simulate import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, linear_schedules
from tasp_lab.schedules.linear.lasp import best_pieces
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.schedules.registry import LINEAR
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.workload.layer import Workload
from tests.support.routes import direct

LAYER = Workload(40, batch=2, heads=8, kv_heads=4, head_dim=8, mask="causal", kind="linear")
STATE = 4 * 2 * 4 * 8 * 8
"""Bytes: float32, batch x KV heads x head_dim x head_dim."""

TOTAL = {"none": 0, "head": 4 * 4, "scalar": 4 * 2 * 4, "channel": 4 * 2 * 4 * 8}
"""Bytes of the total decay of a chunk."""


def both(name: str, n: int, layer: Workload, **options: Any) -> tuple[Schedule, ...]:
    return linear_schedules(name, full_mesh(n), layer, None, AttentionOptions("both", **options))


@pytest.mark.parametrize("decay", TOTAL)
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_bytes_of_states_do_not_depend_on_the_sequence(n: int, decay: Any) -> None:
    """LASP-2 sends n - 1 states with their decays per rank, LASP and All-Scan one without, but for the last rank."""
    for sequence in (n, 10 * n + 1, 1000 * n):
        layer = replace(LAYER, sequence=sequence, decay=decay)
        for schedule in both("lasp-2", n, layer, trim=False):
            assert (schedule.bytes_sent().sum(axis=(0, 2)) == (n - 1) * (STATE + TOTAL[decay])).all()
        for name in ("lasp-2", "direct-lasp-2", "multi-ring-lasp-2"):
            for schedule in both(name, n, layer):
                sent = schedule.bytes_sent().sum()
                needed = n * (n - 1) // 2 * (STATE + TOTAL[decay])
                assert sent >= needed
                assert name == "multi-ring-lasp-2" or sent == needed  # rings pass through ranks that fold less
        for name, pieces in (("lasp", 1), ("all-scan", 4)):
            options = {"pieces": pieces} if name == "all-scan" else {}
            for passing, schedule in zip((1, -1), both(name, n, layer, **options), strict=True):
                assert schedule.bytes_sent().sum(axis=(0, 2)).tolist() == [*[STATE] * (n - 1), 0][::passing]
                assert schedule.transfers == (n - 1) * pieces


@pytest.mark.parametrize("n", [2, 4])
def test_rings_send_keys(n: int) -> None:
    keys, gradients = 2 * 2 * 2 * 4 * 8 * 10, 4 * 2 * 2 * 4 * 8 * 10  # k and v, of 10 positions; float32 backward
    layer = replace(LAYER, sequence=10 * n)
    hops = n * (n - 1) // 2
    for name in ("ring-linear-attention", "ring-linear-attention-right"):
        forward, backward = both(name, n, layer)
        assert forward.bytes_sent().sum() == hops * keys
        assert backward.bytes_sent().sum() == hops * (keys + gradients)  # from the last rank straight home
        full, around = both(name, n, replace(layer, mask="full"))
        assert (full.bytes_sent().sum(axis=(0, 2)) == (n - 1) * keys).all()
        assert (around.bytes_sent().sum(axis=(0, 2)) == (n - 1) * (keys + gradients)).all()
    narrow = both("ring-linear-attention", n, layer, gradient_dtype="input")[1]
    assert narrow.bytes_sent().sum() == hops * (keys + gradients // 2)


def test_documents_cut_the_chain() -> None:
    """Chunks of 10 positions; the second document starts with chunk 2, the third one within chunk 3."""
    layer = replace(LAYER, documents=(20, 15, 5))
    for name in ("lasp", "all-scan", "lasp-2"):
        for schedule in both(name, 4, layer):
            sent = schedule.bytes_sent().sum()
            assert sent == 2 * STATE


def test_states_circulate_beside_the_attention_within_chunks() -> None:
    n = 4
    (schedule,) = linear_schedules("lasp-2", ring(n), LAYER, None, AttentionOptions(trim=False))
    kernels = [[calls.kernel for calls in step.calls] for step in schedule.steps]
    assert kernels == [["make_state"], ["attend"], [], [], ["fold"], ["apply_state"]]
    assert [len(step) for step in schedule.steps] == [0, n, n, n, 0, 0]


def test_a_single_chunk_needs_no_states() -> None:
    for name in LINEAR:
        for n, sequence in ((1, 8), (3, 1)):
            for schedule, kernel in zip(
                both(name, n, replace(LAYER, sequence=sequence)), ("attend", "diff"), strict=True
            ):
                (found,) = [calls.kernel for step in schedule.steps for calls in step.calls]
                assert found.startswith(kernel)
                assert schedule.bytes_sent().sum() == 0 or name.startswith("ring")


def test_the_chain_is_hidden_behind_the_attention_within_chunks() -> None:
    """Attention takes long, and sums of states none of its time: they have a compute lane of their own."""
    layer = replace(LAYER, sequence=4 * 512)
    (schedule,) = linear_schedules("lasp", full_mesh(4), layer)
    flops = schedule.flops().sum(axis=0).max()
    advance = 2 * 2 * 2 * 4 * 8**2  # two states, a product each
    time_s = simulate(schedule, Machine(full_mesh(4, 1e15, 0.0), compute=ComputeRate(1.0))).time_s
    assert flops - 2 * advance <= time_s <= flops


def test_pieces_of_all_scan_overlap() -> None:
    """K pieces take n - 2 + K hops of a K-th of the state each."""
    n, mesh = 8, full_mesh(8, Fraction(1), Fraction(0))
    for pieces in (1, 2, 4):
        (schedule,) = linear_schedules("all-scan", mesh, LAYER, None, AttentionOptions(pieces=pieces))
        assert simulate(schedule, Machine(mesh)).time_s == Fraction(n - 2 + pieces) * STATE / pieces
    assert best_pieces(mesh, LAYER) == 4
    assert best_pieces(full_mesh(8, Fraction(1), Fraction(10**9)), LAYER) == 1


def flops_within(length: int, products: int, to_states: int, from_states: int, layer: Workload) -> int:
    """Of a run of positions, block by block of 64: pairs in the block, its state, and the state before it."""
    found, b, size = 0, layer.batch, layer.head_dim
    for first in range(0, length, 64):
        count = min(64, length - first)
        found += sum(range(count + 1)) * 2 * products * b * layer.heads * size
        found += (count * to_states * 2 * b * layer.kv_head_count * size**2) * (first + count < length)
        found += (count * from_states * 2 * b * layer.heads * size**2) * (first > 0)
    return found


@given(st.integers(1, 700), st.integers(1, 5), st.sampled_from([None, 3, 100]))
def test_the_flops_are_linear_in_the_sequence(sequence: int, n: int, document: int | None) -> None:
    documents = None if document is None or document >= sequence else (document, sequence - document)
    layer = replace(LAYER, sequence=sequence, documents=documents)
    edges = {0, sequence, *([document] if documents else [])}
    starts = [sum(len(each) for each in np.array_split(np.arange(sequence), n)[:rank]) for rank in range(n + 1)]
    q_state, kv_state = 2 * 2 * 8 * 8**2, 2 * 2 * 4 * 8**2
    for schedule, kernels in zip(both("lasp", n, layer), ((2, 1, 1, 1, 1), (5, 3, 2, 2, 2)), strict=True):
        products, to_states, from_states, from_prefix, into = kernels
        expected = np.zeros(n, dtype=np.int64)
        for rank, (start, end) in enumerate(pairwise(starts)):
            cuts = sorted({start, end, *(each for each in edges if start < each < end)})
            runs = np.diff(cuts).tolist() if end > start else []
            expected[rank] += sum(flops_within(each, products, to_states, from_states, layer) for each in runs)
            follows = end > start and start not in edges
            goes_on = end > start and end not in edges
            expected[rank] += follows * runs[0] * from_prefix * q_state if runs else 0
            expected[rank] += goes_on * runs[-1] * into * kv_state if runs else 0
            alone = len(runs) > 1 or not (follows and goes_on)
            sends = goes_on if products == 2 else follows
            expected[rank] += sends * (1 if alone else 2) * kv_state // 1
        assert schedule.flops().sum(axis=0).tolist() == expected.tolist()


def test_left_and_right_products_of_a_ring() -> None:
    layer = replace(LAYER, sequence=40)
    left, right = (both(name, 4, layer) for name in ("ring-linear-attention", "ring-linear-attention-right"))
    pairs, chunk, tiles = 10 * 10, 10, 6
    q_state, kv_state = 2 * 2 * 8 * 8**2, 2 * 2 * 4 * 8**2
    within = 4 * 55 * 2 * 2 * 8 * 8
    for schedules, forward, backward in (
        (left, pairs * 2 * 2 * 2 * 8 * 8, pairs * 5 * 2 * 2 * 8 * 8),
        (right, chunk * (kv_state + q_state), chunk * (3 * kv_state + 2 * q_state)),
    ):
        assert schedules[0].flops().sum() == 2 * within + tiles * forward
        assert schedules[1].flops().sum() == 5 * within + tiles * backward


@pytest.mark.parametrize(("positions", "least"), [(2, "keys"), (8, "states"), (100, "states")])
def test_the_last_rank_gets_a_state_or_the_keys_of_all_others(positions: int, least: str) -> None:
    """Three ranks, 4 heads, 2 KV heads of 16: keys of 128 bytes per position in bf16, states of 2 KiB, float32 results
    of 256 bytes per position."""
    layer = Workload(3 * positions, heads=4, kv_heads=2, head_dim=16, mask="causal", kind="linear")
    machine = Machine(full_mesh(3, Fraction(1), Fraction(5)))
    (forward,) = linear_schedules("lasp-2", machine.topology, layer)
    assert isinstance(forward.task, LinearTask)
    expected = {"keys": 2 * positions * 128, "states": 2 * 4 * 16**2}[least]
    assert expected == min(2 * positions * 128, 2048, positions * 256)
    assert linear_bound_s(machine, forward.task) == Fraction(expected, 2) + 5


def test_what_does_not_apply_is_refused() -> None:
    gated = replace(LAYER, decay="scalar")
    for name, layer, options, message in (
        ("ring-linear-attention", gated, {}, "decay 'scalar' depends on the data of all chunks in between"),
        ("lasp", LAYER, {"trim": False}, "schedule 'lasp': trim False does not apply to it, expected True"),
        ("lasp-2", LAYER, {"pieces": 2}, "schedule 'lasp-2': pieces 2 does not apply to it, expected none"),
        (
            "all-scan",
            LAYER,
            {"pieces": 3},
            "schedule 'all-scan': 4 KV heads in 3 groups, expected groups of equal size",
        ),
        ("lasp-3", LAYER, {}, "unknown schedule 'lasp-3'"),
    ):
        with pytest.raises(ScheduleError, match=message):
            linear_schedules(name, full_mesh(4), layer, None, AttentionOptions(**options))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="'tasp': a layer of linear attention, expected one of softmax attention"):
        attention_schedules("tasp", full_mesh(4), LAYER)
    with pytest.raises(ScheduleError, match="pieces: 0, expected 1 or more"):
        AttentionOptions(pieces=0)
    with pytest.raises(ScheduleError, match="has no such link"):
        linear_schedules("lasp", direct(ring(4)), LAYER, None, AttentionOptions("backward"))
