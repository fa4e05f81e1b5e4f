"""Hamiltonian decompositions: every size, the two impossible ones, and corrupted rings."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise, permutations
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import Int32Array
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.rings.complete_digraph import (
    _FAMILIES,
    _Family,
    _owner,
    _rainbow_path,
    hamiltonian_cycles,
    two_fold_hamiltonian_cycles,
    verify_cycles,
)

IMPOSSIBLE = (4, 6)
POSSIBLE = [n for n in range(2, 257) if n not in IMPOSSIBLE]


def arc_uses(cycles: Int32Array, n: int) -> Int32Array:
    """How often each arc is used, counted one by one: independent of the vectorised check."""
    uses = np.zeros((n, n), dtype=np.int32)
    for ring in cycles.tolist():
        for tail, head in zip(ring, [*ring[1:], ring[0]], strict=True):
            uses[tail, head] += 1
    return uses


def can_pack(cycles: list[frozenset[tuple[int, int]]], wanted: int) -> bool:
    """Whether that many of the cycles are pairwise arc-disjoint, by complete backtracking."""
    if wanted == 0:
        return True
    return any(
        can_pack([other for other in cycles[first + 1 :] if not other & cycles[first]], wanted - 1)
        for first in range(len(cycles) - wanted + 1)
    )


def all_cycles(n: int) -> list[frozenset[tuple[int, int]]]:
    rings = [(0, *rest) for rest in permutations(range(1, n))]
    return [frozenset(zip(ring, ring[1:] + ring[:1], strict=True)) for ring in rings]


def assert_decomposition(cycles: Int32Array, n: int, fold: int) -> None:
    assert cycles.dtype == np.int32
    assert cycles.shape == (fold * (n - 1), n)
    assert (cycles[:, 0] == 0).all()
    assert (np.sort(cycles, axis=1) == np.arange(n)).all()
    assert (arc_uses(cycles, n) == fold * (1 - np.eye(n))).all()


def test_every_size_to_130() -> None:
    for n in POSSIBLE:
        if n <= 130:
            assert_decomposition(hamiltonian_cycles(n), n, fold=1)


@given(st.sampled_from(POSSIBLE))
def test_any_size_to_256(n: int) -> None:
    cycles = hamiltonian_cycles(n)
    assert cycles.shape == (n - 1, n)
    verify_cycles(cycles, n, fold=1)
    assert np.array_equal(cycles, hamiltonian_cycles(n))


# Odd, prime, 0, 2, 6 and 10 modulo 12 among the even ones, and the largest that a machine buffer may ask for.
@pytest.mark.parametrize("n", [1023, 1024, 1031, 1262, 1266, 1270, 4094])
def test_larger_sizes(n: int) -> None:
    cycles = hamiltonian_cycles(n)
    assert cycles.dtype == np.int32
    assert cycles.shape == (n - 1, n)
    assert (cycles[:, 0] == 0).all()
    verify_cycles(cycles, n, fold=1)


def test_memory_stays_near_that_of_the_answer() -> None:
    tracemalloc.start()
    cycles = hamiltonian_cycles(1024)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 * cycles.nbytes


def test_path_takes_one_arc_from_every_zigzag_at_each_even_size_to_4096() -> None:
    for n in range(8, 4097, 2):
        path = _rainbow_path(n)
        assert np.array_equal(np.sort(path), np.arange(n - 1)), n
        assert np.array_equal(np.sort(_owner(path[:-1], path[1:], n - 2)), np.arange(n - 2)), n


Linear = np.ndarray
"""A linear function of j = 0, 1, 2, ...: its value at 0 and its slope."""


def remainder(value: Linear, around: Linear) -> Linear:
    """Value modulo `around`, provided that this is one linear function for all j."""
    rest: Linear = value - value[0] // around[0] * around
    assert 0 <= rest[1] <= around[1]
    return rest


def half(value: Linear) -> Linear:
    assert (value % 2 == 0).all()
    return value // 2


def linear_owner(tail: Linear | None, head: Linear | None, around: Linear) -> Linear:
    """The row of the zigzag cycles that holds an arc, as `_owner` says it; None is the extra vertex."""
    if tail is None or head is None:
        assert tail is not head
        return remainder(tail - half(around), around) if head is None else head
    difference = remainder(head - tail, around)
    if difference[0] % 2 == 1:
        return remainder(tail + half(difference - (1, 0)), around)
    assert difference[0] > 0
    return remainder(tail + half(difference) - half(around), around)


@pytest.mark.parametrize("family", [family for family in _FAMILIES if family.period])
@pytest.mark.parametrize("parity", [0, 1])
def test_rows_of_the_table_are_right_for_every_size(family: _Family, parity: int) -> None:
    """The proof, for ``k = 2 j + 2 + parity`` turns and all j >= 0; the test above has the smaller k.

    A run's arc from index t to t + 1 is on row ``step * t + (step - 1) / 2``, so that all of them are on distinct
    rows, and those left are the rows of the last index of each run. The joins must be on just these.
    """
    scale = np.array([[1, 2 + parity], [0, 2]])
    around: Linear = scale @ (family.first - 2, family.period)
    step = family.halves * half(around) + (family.offset, 0)
    assert step[0] % 2 == 1
    assert step[1] % 2 == 0
    # Any common divisor of the step and `around` divides twice the offset, modulo which neither depends on j.
    assert gcd(step[0], around[0]) == 1
    assert step[1] % (2 * family.offset) == around[1] % (2 * family.offset) == 0

    def vertex(index: Linear) -> Linear:
        return remainder(family.offset * index + family.halves * (index[0] % 2) * half(around), around)

    starts = [scale @ start for start in zip(family.starts, family.growth, strict=True)]
    ends = [*starts[1:], around]
    assert all((start[0] < end[0]) and (start[1] <= end[1]) for start, end in zip(starts, ends, strict=True))
    first = [*map(vertex, starts), None]
    last = [*(vertex(end - (1, 0)) for end in ends), None]
    left = [linear_owner(vertex(end - (1, 0)), vertex(remainder(end, around)), around) for end in ends]
    joins = [linear_owner(last[run], first[following], around) for run, following in pairwise(family.order)]
    assert sorted(family.order) == list(range(len(first)))
    assert sorted(map(tuple, joins)) == sorted(map(tuple, left))


def test_rows_of_the_table_cover_every_even_size() -> None:
    period = int(np.lcm.reduce([family.period for family in _FAMILIES if family.period]))
    firsts = {family.first + k * family.period for family in _FAMILIES if family.period for k in range(period)}
    single = {family.first for family in _FAMILIES if not family.period}
    assert set(range(8, 30 + period, 2)) <= firsts | single


@pytest.mark.parametrize("n", [0, -3])
def test_fewer_than_one_vertex_is_refused(n: int) -> None:
    with pytest.raises(NoDecompositionError, match=f"at least 1 vertex, got n = {n}"):
        hamiltonian_cycles(n)


@pytest.mark.parametrize(("n", "most"), [(4, 2), (6, 4)])
def test_four_and_six_are_refused_and_really_impossible(n: int, most: int) -> None:
    with pytest.raises(NoDecompositionError, match=rf"at most {most} of the {n - 1} .* exactly twice exist"):
        hamiltonian_cycles(n)
    assert can_pack(all_cycles(n), most)
    assert not can_pack(all_cycles(n), most + 1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8])
def test_two_fold(n: int) -> None:
    cycles = two_fold_hamiltonian_cycles(n)
    assert_decomposition(cycles, n, fold=2)
    distinct = len({tuple(ring) for ring in cycles.tolist()})
    assert distinct == (len(cycles) if n in IMPOSSIBLE else len(cycles) // 2)


def test_verify_refuses_a_repeated_vertex() -> None:
    cycles = hamiltonian_cycles(8)
    cycles[3, 5] = cycles[3, 2]
    with pytest.raises(NoDecompositionError, match=r"ring 3 does not visit"):
        verify_cycles(cycles, 8, fold=1)


@pytest.mark.parametrize("vertex", [-1, 8])
def test_verify_refuses_a_vertex_out_of_range(vertex: int) -> None:
    cycles = hamiltonian_cycles(8)
    cycles[6, 0] = vertex
    with pytest.raises(NoDecompositionError, match=r"ring 6 does not visit"):
        verify_cycles(cycles, 8, fold=1)


def test_verify_refuses_a_repeated_arc() -> None:
    cycles = hamiltonian_cycles(7)
    cycles[4] = cycles[1]
    with pytest.raises(NoDecompositionError, match=r"arc 0 -> 2 is used 2 times.*rings \[1, 4\]"):
        verify_cycles(cycles, 7, fold=1)
    verify_cycles(cycles, 7, fold=2)


def test_verify_refuses_the_wrong_width() -> None:
    with pytest.raises(NoDecompositionError, match=r"rows of 7 vertices, got an array of shape \(7, 8\)"):
        verify_cycles(hamiltonian_cycles(8), 7, fold=1)
