"""Heads that ranks do not divide: who has which, what is sent for them, what is computed, and what padding costs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.least import least_s
from sim.simulate import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.composition import in_chunks, stacked
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedules.attention.backward import Passes, check_fit
from tasp_lab.schedules.attention.heads import HeadPieces, head_cuts, head_pieces, padded
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.topology.builders import full_mesh, switch
from tasp_lab.workload.layer import ELEMENT_BYTES, Workload
from tests.support.mutations import is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.simulations import assert_agree
from tests.support.systems import passes_of, ulysses_passes
from tests.support.world import World

UNEVEN = [
    (4, "ulysses", 14, 14), (4, "ulysses", 14, 7), (4, "ulysses", 14, 2), (4, "ulysses", 13, 1), (4, "ulysses", 6, 2),
    (4, "ulysses", 6, 3), (3, "ulysses", 5, 5), (4, "ulysses", 12, 3), (4, "ulysses", 20, 5), (3, "ulysses", 14, 7),
    (4, "staged-ulysses", 14, 14), (3, "staged-ulysses", 16, 8), (4, "staged-ulysses", 13, 1),
    (4, "usp:2x2", 3, 3), (4, "usp:2x2", 9, 3), (6, "usp:3x2:tasp", 4, 2), (6, "usp:3x2", 12, 4),
    (4, "usp:2x2:token-ring", 5, 5), (4, "usp:2x2:kv-and-q-rings", 9, 3), (4, "usp:2x2:burst", 3, 1),
    (4, "usp:2x2:kv-all-gather", 3, 3), (4, "usp:2x2:kv-all-gather", 4, 2), (6, "usp:2x3:direct-kv-all-gather", 9, 3),
    (6, "usp:2x3:multi-ring-kv-all-gather", 7, 1),
]  # fmt: skip
"""Ranks, a schedule, heads and KV heads."""


def layer_of(heads: int, kv_heads: int, **values: Any) -> Workload:
    given = {"sequence": 23, "head_dim": 2, "mask": "causal", "dtype": "fp32"} | values
    return Workload(heads=heads, kv_heads=kv_heads, **given)


@st.composite
def shared_heads(draw: st.DrawFn) -> tuple[Workload, int]:
    """A layer, and how many ranks share its heads: no more than there are."""
    kv_heads, ratio = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    return layer_of(kv_heads * ratio, kv_heads), draw(st.integers(1, min(kv_heads * ratio, 32)))


# -- who has which ----------------------------------------------------------------------------------------------------
@given(shared_heads())
def test_every_head_is_in_one_piece_which_uses_whole_kv_heads_or_a_part_of_one(case: tuple[Workload, int]) -> None:
    layer, ranks = case
    ratio, pieces = layer.heads // layer.kv_head_count, head_pieces(*case)
    own = [range(first, first + heads) for first, heads in zip(pieces.first, pieces.heads, strict=True)]
    assert [head for each in own for head in each] == list(range(layer.heads))
    kv = [range(first, first + heads) for first, heads in zip(pieces.first_kv, pieces.kv_heads, strict=True)]
    assert [head for each in kv for head in each] == list(range(layer.kv_head_count))
    for heads, number in zip(own, pieces.kv.tolist(), strict=True):
        assert sorted({head // ratio for head in heads}) == list(kv[number])
        assert len(kv[number]) == 1 or len(heads) == len(kv[number]) * ratio
    assert sorted(set(pieces.group.tolist())) == list(range(ranks))
    assert list(pieces.group) == sorted(pieces.group)
    used = list(zip(pieces.group.tolist(), pieces.kv.tolist(), strict=True))
    assert len(used) == len(set(used))


@given(shared_heads())
def test_no_rank_has_more_heads_than_the_best_division_gives_the_slowest(case: tuple[Workload, int]) -> None:
    """Some rank has ceil(H / U) heads or more, whoever divides them. With KV heads for all, or for none, so have all:
    one piece each; where ranks divide both, these are equal."""
    layer, ranks = case
    pieces = head_pieces(layer, ranks)
    own = np.bincount(pieces.group, pieces.heads)
    assert own.max() == -(-layer.heads // ranks)
    kv_heads = layer.kv_head_count
    if kv_heads in (1, layer.heads):
        assert len(pieces.group) == ranks
        assert own.min() == layer.heads // ranks
    if layer.heads % ranks == 0 and 0 in (kv_heads % ranks, ranks % kv_heads):
        assert len(pieces.group) == ranks
        assert len(pieces.first_kv) == min(ranks, kv_heads)
        assert {*own.tolist()} == {layer.heads // ranks}


@given(shared_heads())
def test_a_rank_has_two_pieces_more_than_one_at_most(case: tuple[Workload, int]) -> None:
    """A part of a KV head, whole ones, and a part of another one; only if one piece each would be slower."""
    layer, ranks = case
    pieces, aligned = head_pieces(*case), head_cuts(layer.heads, layer.kv_head_count, ranks)
    assert np.bincount(pieces.group).max() <= 3
    if len(pieces.group) > ranks:
        assert np.diff(aligned).max() > -(-layer.heads // ranks)
    assert all(a < b for a, b in pairwise(aligned.tolist()))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [(14, 14, 4, [4, 4, 3, 3]), (13, 1, 4, [4, 3, 3, 3]), (6, 2, 4, [2, 1, 2, 1]), (6, 3, 4, [1, 1, 2, 2])],
)
def test_examples(heads: int, kv_heads: int, ranks: int, expected: list[int]) -> None:
    assert head_pieces(layer_of(heads, kv_heads), ranks).heads.tolist() == expected


# -- what is sent -----------------------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(shared_heads(), st.integers(1, 3))
def test_a_rank_sends_the_heads_of_others_and_takes_its_own_of_all(case: tuple[Workload, int], positions: int) -> None:
    """Heads have b bytes. Of P positions a rank sends P b (h' + 2 k') to another one, which has h' heads and uses k' KV
    heads, and of its own h heads P h (b + 4) back to each of the n - 1 others.
    """
    layer, n = case
    layer = replace(layer, sequence=n * positions, mask="full")
    pieces, element = head_pieces(layer, n), ELEMENT_BYTES[layer.dtype] * layer.head_dim
    own, kv = np.bincount(pieces.group, pieces.heads), np.bincount(pieces.group, pieces.kv_heads[pieces.kv])
    there, none, home = ulysses_passes(full_mesh(n), layer, gradient_dtype="input").forward.bytes_sent().sum(axis=2)
    assert np.array_equal(there, positions * element * ((own + 2 * kv).sum() - (own + 2 * kv)))
    assert np.array_equal(home, positions * (element + 4) * own * (n - 1))
    assert not none.any()
    there, _, home = ulysses_passes(full_mesh(n), layer, gradient_dtype="input").backward.bytes_sent().sum(axis=2)
    assert np.array_equal(there, positions * (2 * element + 8) * (own.sum() - own))
    assert np.array_equal(home, positions * element * (own + 2 * kv) * (n - 1))


@settings(max_examples=30)
@given(shared_heads())
def test_ranks_compute_in_proportion_to_their_heads(case: tuple[Workload, int]) -> None:
    layer, n = case
    own = np.bincount(head_pieces(*case).group, head_pieces(*case).heads)
    for schedule, products in zip(ulysses_passes(full_mesh(n), layer), (2, 5), strict=True):
        pairs = layer.sequence * (layer.sequence + 1) // 2
        assert np.array_equal(schedule.flops().sum(axis=0), 2 * products * layer.head_dim * pairs * own)


@pytest.mark.parametrize("kv_heads", [7, 14])
def test_keys_are_gathered_between_groups_of_members_with_their_heads(kv_heads: int) -> None:
    """Each of 2 x 3 ranks gets the keys of its heads of the two other groups once: 2/3 of the sequence."""
    layer = layer_of(14, kv_heads, sequence=36, mask="full")
    forward, backward = passes_of("usp:2x3:direct-kv-all-gather", full_mesh(6), layer, gradient_dtype="input")
    pieces = head_pieces(layer, 2)
    own = np.tile(np.bincount(pieces.group, pieces.kv_heads[pieces.kv]), 3)
    assert np.array_equal(forward.bytes_sent()[1].sum(axis=1), 24 * 2 * 8 * own)
    sent = backward.bytes_sent().sum(axis=2)
    assert np.array_equal(sent[0], np.tile(6 * (14 - np.bincount(pieces.group, pieces.heads)) * (16 + 8), 3))
    assert np.array_equal(sent[2:-1].sum(axis=0), 24 * 2 * 8 * own)  # gradients, where keys came from


# -- what is computed -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "name", "heads", "kv_heads"), UNEVEN)
def test_both_passes_are_exact_in_any_order(n: int, name: str, heads: int, kv_heads: int) -> None:
    """Against float64 of the whole layer, plain and packed."""
    for documents in (None, (9, 0, 14)):
        passes = passes_of(name, full_mesh(n), layer_of(heads, kv_heads, documents=documents))
        check_fit(*passes)
        for schedule in passes:
            world = World.of(schedule)
            assert is_right_in_orders(world, numbers_of(world), 2)
            for rank in range(n):
                rank_part(schedule, rank)  # operands of its calls lie side by side


@pytest.mark.parametrize(("n", "name", "heads", "kv_heads"), UNEVEN)
def test_both_engines_agree_above_the_bound(n: int, name: str, heads: int, kv_heads: int) -> None:
    layer, latency = layer_of(heads, kv_heads, sequence=24), Fraction(1, 3)
    for topology, rate in ((full_mesh(n, Fraction(7), latency), 10**5), (switch(n, Fraction(50), latency), 1000)):
        machine = Machine(topology, compute=ComputeRate(Fraction(rate)))
        for schedule in passes_of(name, topology, layer):
            assert_agree(schedule, machine)
            assert simulate(schedule, machine).time_s >= least_s(schedule, machine) > 0


def test_layers_with_uneven_heads_follow_each_other() -> None:
    forward, backward = ulysses_passes(full_mesh(3), layer_of(5, 5, sequence=9))
    world = World.of(stacked([forward, forward, backward, backward]))
    assert is_right_in_orders(world, numbers_of(world), 2)


@given(shared_heads(), st.integers(2, 4))
@settings(max_examples=40)
def test_chunks_of_any_heads_send_and_compute_the_same(case: tuple[Workload, int], chunks: int) -> None:
    layer, n = replace(case[0], sequence=4), min(case[1], 3)
    for whole in ulysses_passes(full_mesh(n), layer):
        assert isinstance(whole.task, AttentionTask)
        if int(head_pieces(layer, n).heads.min()) < chunks:
            with pytest.raises(ScheduleError, match=rf"has \d heads, expected {chunks} or more"):
                in_chunks(whole, chunks)
            continue
        cut = in_chunks(whole, chunks)
        assert np.array_equal(cut.bytes_by_rank(), whole.bytes_by_rank())
        assert np.array_equal(cut.flops().sum(axis=0), whole.flops().sum(axis=0))
        world = World.of(cut)
        assert is_right_in_orders(world, numbers_of(world), 1)


@pytest.mark.parametrize(("heads", "stages"), [(14, 2), (16, 4), (17, 1), (12, 3)])
def test_the_heads_of_the_slowest_rank_are_cut_into_equal_stages(heads: int, stages: int) -> None:
    """Up to four: 4 heads into 2 for other ranks have 3, 5 into no equal ones."""
    staged = passes_of("staged-ulysses", full_mesh(4), layer_of(heads, heads), stages=4).forward
    calls = [step.calls for step in staged.steps if step.calls]
    assert len(calls) == stages
    largest = staged.flops().sum(axis=0).max()
    assert {int(each.max()) for each in staged.flops() if each.any()} == {largest // stages}


# -- what padding costs -----------------------------------------------------------------------------------------------
@given(shared_heads())
def test_padded_heads_are_even_and_as_few_as_can_be(case: tuple[Workload, int]) -> None:
    layer, n = case
    found = padded(*case)
    assert found.heads % n == 0
    assert 0 in (found.kv_head_count % n, n % found.kv_head_count)
    assert found.kv_head_count >= layer.kv_head_count
    assert found.heads // found.kv_head_count >= layer.heads // layer.kv_head_count
    assert len(head_pieces(found, n).group) == n
    if layer.heads % n == 0 and 0 in (layer.kv_head_count % n, n % layer.kv_head_count):
        assert found == layer
    if layer.kv_head_count in (1, layer.heads):
        assert found.heads == -(-layer.heads // n) * n


@pytest.mark.parametrize("name", ["ulysses", "staged-ulysses", "usp:2x2", "usp:4x1", "usp:2x2:kv-all-gather"])
def test_padding_is_the_layer_with_more_heads(name: str) -> None:
    layer, members = layer_of(14, 14), int(name[4]) if name.startswith("usp") else 4
    found = passes_of(name, full_mesh(4), layer, padded_heads=True)
    wider = passes_of(name, full_mesh(4), padded(layer, members))
    assert [each.digest for each in found] == [each.digest for each in wider]
    even = passes_of(name, full_mesh(4), layer_of(16, 16), padded_heads=True)
    assert [each.digest for each in even] == [each.digest for each in passes_of(name, full_mesh(4), layer_of(16, 16))]


def test_uneven_heads_save_the_bytes_of_padding_but_no_time_of_the_slowest_rank() -> None:
    """Attention of 4, 4, 3 and 3 heads, and what is sent for it, last as long as of 4 heads each.

    With keys gathered between 2 groups of 2 ranks, each with 7 heads, attention takes 7/8 of that. vLLM-Omni measured
    both on 4 GPUs: from 16 Ki to 256 Ki positions padding took 1.03 to 1.147 times as long (its issue 7589).
    """
    layer, fast = layer_of(14, 14, sequence=64, mask="full"), Fraction(10**12)
    computing = Machine(full_mesh(4, fast), compute=ComputeRate(Fraction(1000)))
    sending = Machine(full_mesh(4, Fraction(1000)), compute=ComputeRate(fast))

    def time(machine: Machine, name: str, **options: Any) -> float:
        found: Passes = passes_of(name, machine.topology, layer, **options)
        return float(simulate(found.forward, machine).time_s)

    even, wider = time(computing, "ulysses"), time(computing, "ulysses", padded_heads=True)
    assert even == pytest.approx(wider, rel=1e-6)
    assert time(computing, "usp:2x2:direct-kv-all-gather") == pytest.approx(7 / 8 * wider, rel=1e-6)
    assert time(sending, "ulysses") == pytest.approx(time(sending, "ulysses", padded_heads=True), rel=1e-6)


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "heads", "n", "works"),
    [("ulysses", 3, 4, "usp:2x2"), ("staged-ulysses", 3, 8, "usp:2x4"), ("ulysses", 1, 4, "usp:1x4"),
     ("usp:4x2", 3, 8, "usp:2x4"), ("usp:6x2", 5, 12, "usp:4x3"), ("usp:4x1", 3, 4, "usp:2x2")],
)  # fmt: skip
def test_fewer_heads_than_ranks_that_share_them_are_refused(name: str, heads: int, n: int, works: str) -> None:
    ranks = int(name[4]) if name.startswith("usp") else n
    message = f"schedule '{name}': {heads} heads for {ranks} ranks, expected as many heads or more, as for {works}"
    with pytest.raises(ScheduleError, match=f"^{message}$"):
        passes_of(name, full_mesh(n), layer_of(heads, heads))
    assert passes_of(works, full_mesh(n), layer_of(heads, heads)).forward.flops().any()


def test_pieces_of_one_group_are_all_heads() -> None:
    whole = HeadPieces(*(np.array([each]) for each in (0, 0, 6, 0, 0, 2)))
    assert all(np.array_equal(*each) for each in zip(head_pieces(layer_of(6, 2), 1), whole, strict=True))
