from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.builders import full_mesh, nodes, ring, switch
from tasp_lab.decomposition import Decomposition, decompose
from tasp_lab.errors import NoDecompositionError
from tasp_lab.topology import Topology, both_ways


@given(st.integers(1, 24))
def test_a_full_mesh_is_used_completely(world_size: int) -> None:
    """Every ring visits every rank once and every link is used exactly `fold` times."""
    decomposition = decompose(full_mesh(world_size))
    arcs: Counter[tuple[int, int]] = Counter()
    for row in decomposition.rings.tolist():
        assert sorted(row) == list(range(world_size))
        arcs.update(zip(row, row[1:] + row[:1], strict=True))
    assert set(arcs.values()) <= {decomposition.fold}
    assert len(arcs) == decomposition.links_used == decomposition.links_total == world_size * (world_size - 1)
    assert decomposition.fold == (2 if world_size in (4, 6) else 1)


@pytest.mark.parametrize(("world_size", "rings"), [(4, 6), (6, 10)])
def test_where_one_fold_rings_do_not_exist(world_size: int, rings: int) -> None:
    with pytest.raises(NoDecompositionError, match=str(world_size)):
        decompose(full_mesh(world_size), fold=1)
    for topology in (full_mesh(world_size), switch(world_size)):
        found = decompose(topology)
        assert (len(found.rings), found.fold) == (rings, 2)
        assert "Tillson" in found.reason
        assert "use each pair of ranks twice" in found.reason


def test_an_explicit_fold_of_two_doubles_the_rings() -> None:
    found = decompose(full_mesh(5), fold=2)
    assert (found.rings.shape, found.fold) == ((8, 5), 2)
    with pytest.raises(NoDecompositionError, match="fold 3"):
        decompose(full_mesh(5), fold=3)


def test_switches_and_nodes_are_complete_digraphs_of_ranks() -> None:
    for topology in (switch(8), nodes(2, 4), nodes(2, 4, "switch", "rails")):
        assert decompose(topology).rings.shape == (7, 8)
        assert decompose(topology).links_total == 56


def test_a_ring_is_its_own_decomposition() -> None:
    assert decompose(ring(5)).rings.tolist() == [[0, 1, 2, 3, 4]]


def test_a_topology_without_known_rings_is_refused() -> None:
    path = Topology("path", 3, (*both_ways(0, 1, 1.0, 0.0), *both_ways(1, 2, 1.0, 0.0)))
    with pytest.raises(NoDecompositionError, match="4 of 6 pairs of ranks are linked"):
        decompose(path)


def test_rings_over_links_that_do_not_exist_are_refused() -> None:
    backwards = np.array([[0, 3, 2, 1]], dtype=np.int32)
    with pytest.raises(NoDecompositionError, match="ring 0 goes from rank 0 to 3, but ring:4 has no such link"):
        Decomposition(ring(4), backwards, 1, "made up")
