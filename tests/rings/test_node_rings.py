"""Hamiltonian paths of complete digraphs, and the rings over nodes that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import Int32Array
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.rings.complete_digraph import verify_cycles
from tasp_lab.rings.node_rings import (
    even_hamiltonian_paths,
    hamiltonian_paths,
    is_rail_aligned,
    node_rings,
    two_fold_hamiltonian_paths,
)

WITHOUT_PATHS = (3, 5)
WITH_PATHS = [m for m in range(1, 257) if m not in WITHOUT_PATHS]

node_counts = st.integers(2, 9)
ranks_per_node = st.integers(1, 24)


def arc_uses(paths: Int32Array, m: int) -> Int32Array:
    """How often each arc is used, counted one by one."""
    uses = np.zeros((m, m), dtype=np.int32)
    for path in paths.tolist():
        for tail, head in pairwise(path):
            uses[tail, head] += 1
    return uses


def assert_paths(paths: Int32Array, m: int, fold: int) -> None:
    assert paths.dtype == np.int32
    assert paths.shape == (fold * m, m)
    assert (np.sort(paths, axis=1) == np.arange(m)).all()
    assert (arc_uses(paths, m) == fold * (1 - np.eye(m))).all()
    assert paths[:, 0].tolist() == fold * list(range(m))
    assert sorted(paths[:, -1].tolist()) == sorted(fold * list(range(m)))


def is_even(permutation: list[int]) -> bool:
    inversions = sum(np.count_nonzero(np.array(permutation[:i]) > p) for i, p in enumerate(permutation))
    return inversions % 2 == 0


def test_paths_of_every_size_to_66() -> None:
    for m in WITH_PATHS[:64]:
        assert_paths(hamiltonian_paths(m), m, fold=1)


@pytest.mark.parametrize("m", [*range(1, 20), 64, 65])
def test_two_fold_paths(m: int) -> None:
    assert_paths(two_fold_hamiltonian_paths(m), m, fold=2)


def test_all_six_paths_of_three_vertices() -> None:
    assert sorted(map(tuple, two_fold_hamiltonian_paths(3).tolist())) == list(permutations(range(3)))


@given(st.sampled_from(WITH_PATHS))
def test_paths_joined_through_one_more_vertex_are_cycles(m: int) -> None:
    verify_cycles(np.insert(hamiltonian_paths(m), 0, m, axis=1), m + 1, fold=1)


@given(st.sampled_from([m for m in WITH_PATHS if m != 2]))
def test_even_paths(m: int) -> None:
    paths = even_hamiltonian_paths(m)
    assert_paths(paths, m, fold=1)
    assert is_even(paths[:, -1].tolist())


# One size of each kind, and the odd and even ones in which most ranks of a node fit.
@pytest.mark.parametrize("m", [6, 10, 14, 510, 1014, 1018, 1022, 1023, 1024])
def test_even_paths_of_larger_sizes(m: int) -> None:
    """Joined through one more vertex, paths are cycles of which no two share an arc exactly if no two paths do."""
    verify_cycles(np.insert(even_hamiltonian_paths(m), 0, m, axis=1), m + 1, fold=1)


@pytest.mark.parametrize("m", WITHOUT_PATHS)
def test_three_and_five_are_refused_and_really_impossible(m: int) -> None:
    with pytest.raises(NoDecompositionError, match=rf"K\*_{m} does not split.*two_fold_hamiltonian_paths\({m}\)"):
        hamiltonian_paths(m)
    assert not can_split(m, 0, frozenset())


def can_split(m: int, start: int, used: frozenset[tuple[int, int]]) -> bool:
    """Whether one path from each vertex, from this one on, can be added to the used arcs: complete backtracking."""
    if start == m:
        return True
    others = [vertex for vertex in range(m) if vertex != start]
    paths = (frozenset(pairwise((start, *rest))) for rest in permutations(others))
    return any(can_split(m, start + 1, used | path) for path in paths if not used & path)


@pytest.mark.parametrize("build", [hamiltonian_paths, two_fold_hamiltonian_paths, even_hamiltonian_paths])
def test_fewer_than_one_vertex_is_refused(build: Callable[[int], Int32Array]) -> None:
    with pytest.raises(NoDecompositionError, match="at least 1 vertex, got m = 0"):
        build(0)


def test_even_paths_of_two_vertices_are_refused() -> None:
    with pytest.raises(NoDecompositionError, match="odd permutation"):
        even_hamiltonian_paths(2)


@given(node_counts, ranks_per_node, st.sampled_from([None, False]))
def test_at_every_step_every_link_carries_the_same(u: int, m: int, rail_aligned: bool | None) -> None:
    """Each rank starts with a block per ring; all blocks move at once. Counted block by block, step by step."""
    rings = node_rings(u, m, rail_aligned=rail_aligned)
    fold = 2 if m in WITHOUT_PATHS else 1
    assert rings.dtype == np.int32
    assert rings.shape == (fold * m, u * m)
    ranks = range(u * m)
    for step in (0, 1, m, u * m - 2):
        now = np.roll(rings, -step, axis=1).ravel().tolist()
        then = np.roll(rings, -step - 1, axis=1).ravel().tolist()
        moves = list(zip(now, then, strict=True))
        inside = Counter((a, b) for a, b in moves if a // m == b // m)
        assert inside == {(a, b): fold for a in ranks for b in ranks if a != b and a // m == b // m}
        hops = [(a, b) for a, b in moves if a // m != b // m]
        assert Counter(a for a, _ in hops) == dict.fromkeys(ranks, fold)
        assert Counter(b for _, b in hops) == dict.fromkeys(ranks, fold)


@given(node_counts, ranks_per_node)
def test_every_ring_brings_every_block_everywhere(u: int, m: int) -> None:
    for rail_aligned in (None, False):
        rings = node_rings(u, m, rail_aligned=rail_aligned)
        assert all(sorted(ring) == list(range(u * m)) for ring in rings.tolist())
        assert (rings.reshape(-1, u, m) // m == np.arange(u)[:, np.newaxis]).all()
        verify_cycles(rings, u * m, fold=len(rings) // m)


@given(node_counts, ranks_per_node)
def test_rail_alignment(u: int, m: int) -> None:
    exists = m != 2 or u % 2 == 0
    rings = node_rings(u, m)
    pieces = rings.reshape(-1, u, m) % m
    aligned = all(ring[node][-1] == ring[(node + 1) % u][0] for ring in pieces.tolist() for node in range(u))
    assert aligned == exists == is_rail_aligned(rings, m)
    if exists:
        assert np.array_equal(rings, node_rings(u, m, rail_aligned=True))
    else:
        with pytest.raises(NoDecompositionError, match=f"{u} x 2 do not exist"):
            node_rings(u, m, rail_aligned=True)


@given(node_counts, st.integers(2, 24))
def test_plain_rings_hop_off_the_rail(u: int, m: int) -> None:
    assert not is_rail_aligned(node_rings(u, m, rail_aligned=False), m)


def test_no_ring_of_three_nodes_of_two_is_rail_aligned() -> None:
    """All Hamiltonian cycles with three hops, in any order of nodes."""
    rings = np.array([(0, *rest) for rest in permutations(range(1, 6))])
    hops = (rings // 2 != np.roll(rings, -1, axis=1) // 2).sum(axis=1)
    candidates = rings[hops == 3]
    assert len(candidates) > 0
    assert not any(is_rail_aligned(ring[np.newaxis], 2) for ring in candidates)


@pytest.mark.parametrize("m", [62, 63, 64])
@pytest.mark.parametrize("u", [2, 3, 5])
def test_the_largest_nodes(u: int, m: int) -> None:
    rings = node_rings(u, m, rail_aligned=True)
    verify_cycles(rings, u * m, fold=1)  # node by node, so m (m - 1) different pairs inside each node
    assert (rings.reshape(m, u, m) // m == np.arange(u)[:, np.newaxis]).all()
    assert is_rail_aligned(rings, m)


@pytest.mark.parametrize(("u", "m"), [(1, 8), (0, 8), (2, 0), (-2, 4)])
def test_too_few_nodes_or_ranks_are_refused(u: int, m: int) -> None:
    with pytest.raises(NoDecompositionError, match=f"{u} x {m}: expected 2 or more nodes"):
        node_rings(u, m)
