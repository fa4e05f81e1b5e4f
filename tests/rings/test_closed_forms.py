"""Rings on which ranks are at each distance equally often, and those of meshes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import IntArray
from tasp_lab.rings.closed_forms import balanced_rings, mesh_ring
from tasp_lab.rings.decompose import decompose
from tasp_lab.topology.builders import full_mesh, torus


def pairs_at(rings: IntArray, distance: int) -> IntArray:
    """How often rank v is `distance` places after rank u, for all u and v."""
    n = rings.shape[1]
    found = np.zeros((n, n), dtype=np.int64)
    np.add.at(found, (rings, np.roll(rings, -distance, axis=1)), 1)
    return found


@pytest.mark.parametrize(
    ("n", "count"), [(2, 1), (3, 2), (4, 6), (5, 4), (7, 6), (8, 28), (9, 24), (11, 10), (16, 120)]
)
def test_each_pair_is_at_each_distance_equally_often(n: int, count: int) -> None:
    rings = balanced_rings(n)
    assert rings is not None
    assert len(np.unique(rings, axis=0)) == len(rings) == count
    assert (np.sort(rings, axis=1) == np.arange(n)).all()
    for distance in range(1, n):
        found = pairs_at(rings, distance)
        assert set(found[~np.eye(n, dtype=bool)].tolist()) == {count // (n - 1)}


@pytest.mark.parametrize("n", [1, 6, 10, 12, 14, 15, 18])
def test_other_numbers_have_none(n: int) -> None:
    assert balanced_rings(n) is None


@given(st.integers(1, 5).map(lambda half: 2 * half), st.data())
def test_two_rings_of_an_even_number_of_ranks_agree_on_a_distance(n: int, data: st.DataObject) -> None:
    places = np.argsort([data.draw(st.permutations(range(n))) for _ in range(2)], axis=1)
    distances = (places[:, None, :] - places[:, :, None]) % n
    assert ((distances[0] == distances[1]) & ~np.eye(n, dtype=bool)).any()


def test_rings_that_use_each_link_once_load_links_unevenly_at_some_distance() -> None:
    rings = decompose(full_mesh(8)).rings.astype(np.int64)
    assert len(rings) == 7
    most = [int(pairs_at(rings, each).max()) for each in range(1, 8)]
    assert most[0] == most[-1] == 1 < max(most)


MESHES = [((2, 2), (False, False)), ((2, 3), (False, False)), ((3, 4), (False, False)), ((8, 16), (False, True)),
          ((2, 4, 4), (False,) * 3), ((3, 3, 2), (False,) * 3), ((5, 2, 3, 3), (False,) * 4)]  # fmt: skip


@pytest.mark.parametrize(("shape", "wraps"), MESHES)
def test_a_mesh_with_an_even_side_has_a_ring_of_its_links(shape: tuple[int, ...], wraps: tuple[bool, ...]) -> None:
    topology = torus(shape, wraps=wraps)
    found = mesh_ring(topology)
    assert found is not None
    [ring] = found.rings
    assert sorted(ring.tolist()) == list(range(topology.world_size))
    assert topology.linked_pairs[ring, np.roll(ring, -1)].all()


@pytest.mark.parametrize(
    ("shape", "wraps"), [((3, 3), (False, False)), ((4,), (False,)), ((1, 4), (False, False)), ((4, 4), (True, True))]
)
def test_other_grids_have_no_comb(shape: tuple[int, ...], wraps: tuple[bool, ...]) -> None:
    """Odd meshes, whose ranks have two colours of unequal numbers, and lines have no ring; of tori more are found."""
    assert mesh_ring(torus(shape, wraps=wraps)) is None


@pytest.mark.parametrize("shape", [(2, 3), (4, 4), (8, 8)])
def test_both_directions_of_the_comb_are_all_that_two_links_of_a_corner_carry(shape: tuple[int, int]) -> None:
    found = decompose(torus(shape, 10, 0, wraps=(False, False)))
    assert (len(found.rings), found.fold, found.proved_optimal) == (2, 1, True)
    assert found.rate_bytes_per_s == 20
