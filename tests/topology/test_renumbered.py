"""Other numbers of ranks: the same links, routes, shared capacities and nodes between the ranks they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.derived import renumbered
from tasp_lab.topology.graph import SharedCapacity, Topology
from tasp_lab.topology.links import MeshLinks
from tests.support.strategies import complete_topologies


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    """A topology, with capacities shared by some of its links, and an order of its ranks."""
    topology = draw(complete_topologies(6))
    names = [link.name for link in topology.listed_links()]
    if names and draw(st.booleans()):
        covered = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
        topology = replace(topology, shared=(SharedCapacity("bus", 7, tuple(covered)),))
    return topology, draw(st.permutations(range(topology.world_size)))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_routes_are_those_of_the_ranks_that_the_numbers_stand_for(case: tuple[Topology, list[int]]) -> None:
    topology, order = case
    found = renumbered(topology, np.array(order))
    assert found.name == topology.name
    for a in range(found.world_size):
        assert found.node_of_rank[a] == topology.node_of_rank[order[a]] or not topology.nodes
        for b in range(found.world_size):
            if a == b:
                continue
            here, there = found.route(a, b), topology.route(order[a], order[b])
            bandwidths = [
                [each.constraints[index].bandwidth_bytes_per_s for index in route.constraints]
                for each, route in ((found, here), (topology, there))
            ]
            assert bandwidths[0] == bandwidths[1]
            assert here.latency_s == there.latency_s
    back = renumbered(found, np.argsort(order))
    assert (back.links, back.shared, back.nodes) == (topology.links, topology.shared, topology.nodes)


def test_a_mesh_remains_one_and_needs_no_list_of_its_links() -> None:
    found = renumbered(full_mesh(4096), np.arange(4096)[::-1])
    assert isinstance(found.links, MeshLinks)


def test_the_order_that_ranks_have_changes_nothing() -> None:
    topology = full_mesh(4)
    assert renumbered(topology, np.arange(4)) is topology
