"""Parts of a topology: the routes among some ranks are those of the whole, and nothing else is left."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasp_lab.core.errors import TopologyError
from tasp_lab.topology.builders import circulant, full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.edits import with_links, without_links
from tasp_lab.topology.graph import Route, Topology
from tasp_lab.topology.parts import equal_parts, induced
from tests.topology.test_edits import awkward

topologies = st.sampled_from([
    full_mesh(5), switch(4), ring(4), torus((3, 3)), circulant(7, (1, 2)), nodes(2, 3), nodes(2, 2, "switch", "rails"),
    with_links(full_mesh(4), ["0>3=10GB/s"]), awkward(),
])  # fmt: skip


@st.composite
def parts(draw: st.DrawFn) -> tuple[Topology, list[int], Topology]:
    """A topology, some of its ranks in any order, and their part."""
    topology = draw(topologies)
    ranks = draw(st.permutations(range(topology.world_size)))[: draw(st.integers(1, topology.world_size))]
    try:
        return topology, ranks, induced(topology, ranks)
    except TopologyError:
        assume(False)
        raise


def numbers_of(topology: Topology, route: Route) -> tuple[float, list[float]]:
    """The latency of a route and the bandwidths of its constraints."""
    bandwidths = [float(topology.constraints[each].bandwidth_bytes_per_s) for each in route.constraints]
    return float(route.latency_s), bandwidths


@given(parts())
def test_routes_are_those_of_the_whole(case: tuple[Topology, list[int], Topology]) -> None:
    topology, ranks, part = case
    for a, b in permutations(range(len(ranks)), 2):
        assert part.has_route(a, b) == topology.has_route(ranks[a], ranks[b])
        if part.has_route(a, b):
            expected = numbers_of(topology, topology.route(ranks[a], ranks[b]))
            assert numbers_of(part, part.route(a, b)) == expected


@given(parts())
def test_every_link_is_on_a_route_and_nodes_are_kept(case: tuple[Topology, list[int], Topology]) -> None:
    topology, ranks, part = case
    used = {each for a, b in part.rank_pairs() for each in part.route(a, b).constraints}
    assert used == set(range(len(part.links) + len(part.shared)))
    for a, b in permutations(range(len(ranks)), 2):
        together = topology.node_of_rank[ranks[a]] == topology.node_of_rank[ranks[b]]
        assert (part.node_of_rank[a] == part.node_of_rank[b]) == together
    whole, left = set(topology.switch_kinds.values()), set(part.switch_kinds.values())
    assert left <= whole


def test_all_ranks_of_a_mesh_are_the_mesh() -> None:
    assert induced(full_mesh(6), range(6)).links == full_mesh(6).links
    assert set(induced(full_mesh(6), [5, 1, 2]).links) == set(full_mesh(3).links)


@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        (full_mesh(6), [[0, 1, 2], [3, 4, 5]]),
        (nodes(3, 2, "switch"), [[0, 1], [2, 3], [4, 5]]),
        (nodes(2, 3, "switch", "rails"), [[0, 3], [1, 4], [2, 5]]),
        (torus((3, 4)), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (torus((3, 4)), [[0, 4, 8], [3, 7, 11]]),
    ],
)
def test_equal_groups_have_one_part(topology: Topology, groups: list[list[int]]) -> None:
    part = equal_parts(topology, np.array(groups))
    assert all(part == induced(topology, group) for group in groups)


@pytest.mark.parametrize(
    ("topology", "groups", "telling"),
    [
        (without_links(full_mesh(4), ["2>3"]), [[0, 1], [2, 3]], "is not connected: no way from rank 0 to rank 1"),
        (without_links(full_mesh(6), ["3>4"]), [[0, 1, 2], [3, 4, 5]],
         "ranks 3, 4, 5 have other links among them than ranks 0, 1, 2, expected the same in each group"),
        (with_links(nodes(2, 2), ["2-3=1GB/s"]), [[0, 1], [2, 3]], "ranks 2, 3 have other links"),
        (nodes(2, 6), [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 11]], "ranks 0, 1, 2, ..., 11 have other links"),
    ],
)  # fmt: skip
def test_groups_with_other_links_are_refused(topology: Topology, groups: list[list[int]], telling: str) -> None:
    with pytest.raises(TopologyError, match=telling):
        equal_parts(topology, np.array(groups))
