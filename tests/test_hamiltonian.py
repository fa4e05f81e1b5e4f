"""Hamiltonian decompositions: every size to 256, the two impossible sizes, and corrupted rings."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.errors import NoDecompositionError
from tasp_lab.hamiltonian import IntArray, hamiltonian_cycles, two_fold_hamiltonian_cycles, verify_cycles

IMPOSSIBLE = (4, 6)
POSSIBLE = [n for n in range(2, 257) if n not in IMPOSSIBLE]


def arc_uses(cycles: IntArray, n: int) -> IntArray:
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


def assert_decomposition(cycles: IntArray, n: int, fold: int) -> None:
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


# Sizes that need the rarer rows of the table of paths, and the largest that a machine room may ask for.
@pytest.mark.parametrize("n", [258, 422, 478, 702, 842, 982, 1022, 1024, 1030])
def test_larger_sizes(n: int) -> None:
    cycles = hamiltonian_cycles(n)
    assert cycles.shape == (n - 1, n)
    verify_cycles(cycles, n, fold=1)


def test_smallest_sizes() -> None:
    assert hamiltonian_cycles(1).shape == (0, 1)
    assert hamiltonian_cycles(2).tolist() == [[0, 1]]
    assert hamiltonian_cycles(3).tolist() == [[0, 1, 2], [0, 2, 1]]


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


def test_a_size_without_a_formula_is_refused() -> None:
    with pytest.raises(NoDecompositionError, match="no formula is known here"):
        hamiltonian_cycles(1262)


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


def test_verify_refuses_an_arc_missing_its_partner_after_a_swap() -> None:
    cycles = hamiltonian_cycles(9)
    cycles[2, [3, 4]] = cycles[2, [4, 3]]
    with pytest.raises(NoDecompositionError, match="is used 2 times"):
        verify_cycles(cycles, 9, fold=1)
