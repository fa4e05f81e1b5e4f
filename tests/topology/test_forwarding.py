"""Routes through other ranks: shortest walks over linked ranks, the same by the formula of a grid as by search."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from math import prod

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import NoRouteError
from tasp_lab.topology.builders import bidirectional_ring, hypercube, ring, torus
from tasp_lab.topology.derived import renumbered
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.routing import CHOICES, Forwarding
from tests.support.simulations import uneven_topologies
from tests.support.strategies import complete_topologies
from tests.topology.test_topology import mazes

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple).filter(lambda shape: prod(shape) <= 40)
grids = (
    st.builds(torus, shapes)
    | st.builds(hypercube, st.integers(0, 4))
    | st.builds(bidirectional_ring, st.integers(1, 13))
)
chords = uneven_topologies(("chords",), max_ranks=7)
topologies = grids | chords | mazes() | uneven_topologies(("two switches",)) | complete_topologies(5)


def ways(topology: Topology) -> dict[tuple[int, int], list[int]]:
    """The ranks on the route of each pair of ranks, from its source to its destination."""
    found = {}
    for pair in permutations(range(topology.world_size), 2):
        ends = topology.link_ends[list(topology.route(*pair).links)].tolist()
        assert all(into == out for (_, into), (out, _) in pairwise(ends))
        assert (ends[0][0], ends[-1][1]) == pair
        passed = [ends[0][0], *(end for _, end in ends)]
        found[pair] = [vertex for vertex in passed if vertex < topology.world_size]
    return found


@given(topologies, st.booleans())
@settings(deadline=None)
def test_a_route_is_a_shortest_walk_over_linked_ranks(topology: Topology, spread: bool) -> None:
    topology = replace(topology, forwarding=Forwarding(spread=spread))
    linked = topology.linked_pairs
    least = dict(
        networkx.all_pairs_shortest_path_length(networkx.from_numpy_array(linked, create_using=networkx.DiGraph))
    )
    for (source, destination), way in ways(topology).items():
        assert all(linked[hop] for hop in pairwise(way))
        assert len(way) - 1 == least[source][destination]
        route = topology.route(source, destination)
        parts = [topology.route(*hop) for hop in pairwise(way)]
        assert route.links == tuple(link for part in parts for link in part.links)
        assert float(route.latency_s) == pytest.approx(float(sum(part.latency_s for part in parts)), rel=1e-12)
        assert set(route.constraints) == {at for part in parts for at in part.constraints}


@given(grids)
@settings(deadline=None)
def test_routes_of_a_grid_go_dimension_by_dimension_as_a_search_finds_them(topology: Topology) -> None:
    one = replace(topology, forwarding=CHOICES["one"])
    assert ways(one) == ways(replace(one, grid=None))
    assert one.grid is not None
    for turning in (one, topology):
        for way in ways(turning).values():
            coordinates = np.array(np.unravel_index(way, one.grid.sides)).T
            moved = [int(np.flatnonzero(step)[0]) for step in np.diff(coordinates, axis=0)]
            assert moved == sorted(moved)


@given(topologies, st.sampled_from([0, 1, 2]))
@settings(deadline=None)
def test_ranks_forward_as_often_as_they_may(topology: Topology, most: int) -> None:
    """Exactly the routes through at most so many ranks are left, and nothing is said of others but that."""
    limited = replace(topology, forwarding=Forwarding(most, software="it"))
    for (source, destination), way in ways(topology).items():
        assert limited.has_route(source, destination) == (len(way) - 2 <= most)
        if len(way) - 2 <= most:
            assert limited.route(source, destination) == topology.route(source, destination)
        else:
            with pytest.raises(NoRouteError, match=f"from rank {source} to {destination}, and it forwards through"):
                limited.route(source, destination)


@given(grids | chords, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_renumbered_ranks_have_the_renumbered_routes(topology: Topology, random: object) -> None:
    one = replace(topology, forwarding=CHOICES["one"])
    order = np.array(random.sample(range(one.world_size), one.world_size), dtype=np.int64)  # type: ignore[attr-defined]
    expected = ways(one)
    for pair, way in ways(renumbered(one, order)).items():
        assert order[way].tolist() == expected[int(order[pair[0]]), int(order[pair[1]])]


@given(st.builds(torus, shapes), st.booleans())
@settings(deadline=None)
def test_reversed_links_of_a_torus_make_routes_as_long(topology: Topology, on_grid: bool) -> None:
    links = tuple(replace(link, source=link.destination, destination=link.source) for link in topology.links)
    back = replace(topology, links=links, grid=topology.grid if on_grid else None)
    there, again = ways(topology), ways(back)
    assert {pair: len(way) for pair, way in there.items()} == {(b, a): len(way) for (a, b), way in again.items()}


def test_equally_short_ways_are_taken_in_turn() -> None:
    """Half of the ring away, even ranks go up and odd ones down; with one way for all, everyone goes up."""
    around = bidirectional_ring(4)
    assert [ways(around)[rank, (rank + 2) % 4][1] for rank in range(4)] == [1, 0, 3, 2]
    one = ways(replace(around, forwarding=CHOICES["one"]))
    assert [one[rank, (rank + 2) % 4][1] for rank in range(4)] == [1, 2, 3, 0]
    assert ways(ring(4))[3, 2] == [3, 0, 1, 2]
