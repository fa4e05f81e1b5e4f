"""A table of links answers alike whether links are listed or made when asked for."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.cuts import all_gather_cut, ring_cut
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link, ListedLinks, MeshLinks
from tests.support.strategies import topologies_and_schedules

ARRAYS = ("ends", "bandwidths_bytes_per_s", "distinct_bandwidths_bytes_per_s", "joined")
FACTS = ("switches", "is_uniform", "is_mesh", "is_symmetric", "into_ranks_bytes_per_s", "latencies_into_ranks_s")
numbers = st.fractions(Fraction(1), Fraction(9), max_denominator=9)


@given(st.integers(1, 7), numbers, numbers)
def test_a_mesh_answers_as_its_listed_links(n: int, bandwidth: Fraction, latency: Fraction) -> None:
    mesh = MeshLinks(n, bandwidth, latency)
    listed = ListedLinks(tuple(mesh), n)
    for name in ARRAYS:
        assert np.array_equal(getattr(mesh, name), getattr(listed, name)), name
    for name in FACTS:
        assert getattr(mesh, name) == getattr(listed, name), name
    assert len({*mesh.components.tolist()}) == len({*listed.components.tolist()}) == 1
    ranks = np.arange(n)
    pairs = np.broadcast_arrays(ranks[:, None], ranks)
    assert (mesh.between(*pairs) == listed.between(*pairs)).all()
    assert (mesh.latencies_s(mesh.between(*pairs)) == listed.latencies_s(listed.between(*pairs))).all()
    assert [mesh.link(a, b) for a in ranks for b in ranks] == [listed.link(a, b) for a in ranks for b in ranks]


@given(topologies_and_schedules(6))
def test_a_table_says_what_each_link_says(drawn: tuple[Topology, str]) -> None:
    topology, table = drawn[0], drawn[0].table
    for at, link in enumerate(topology.links):
        assert tuple(topology.vertices[end] for end in table.ends[at].tolist()) == (link.source, link.destination)
        if isinstance(link.source, int) and isinstance(link.destination, int):
            assert table.link(link.source, link.destination) == at
    for rank, into in enumerate(table.into_ranks_bytes_per_s):
        assert into == sum(Fraction(x.bandwidth_bytes_per_s) for x in topology.links if x.destination == rank)


@given(topologies_and_schedules(6))
def test_the_least_latency_into_a_rank_is_that_of_some_route_or_less(drawn: tuple[Topology, str]) -> None:
    """Routes prefer few hops, so one of them may take longer than the quickest way; none is quicker."""
    topology = drawn[0]
    for rank, min_s in enumerate(topology.min_latencies_into_ranks_s if topology.world_size > 1 else ()):
        sources = [source for source, destination in topology.rank_pairs() if destination == rank]
        assert min_s <= min(topology.route(source, rank).latency_s for source in sources)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_a_listed_mesh_is_the_same_topology(n: int) -> None:
    mesh = full_mesh(n)
    listed = Topology(mesh.name, n, tuple(mesh.links))
    assert mesh == listed
    assert hash(mesh) == hash(listed)
    assert listed != Topology(mesh.name, n, (*listed.links[:-1], Link(n - 1, n - 2, 1.0, 0.0)))
    assert all_gather_cut(mesh) == all_gather_cut(listed)
    assert ring_cut(mesh) == ring_cut(listed)
    assert mesh.table is mesh.links
