from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import NoRouteError, TopologyError
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, both_ways
from tests.support.routes import direct
from tests.support.strategies import complete_topologies


def pair(bandwidth: float = 1.0, latency: float = 0.0) -> tuple[Link, ...]:
    return tuple(both_ways(0, 1, bandwidth, latency))


@pytest.mark.parametrize(
    ("links", "telling"),
    [
        ((Link(0, 1, 1.0, 0.0),), "not connected: no way from rank 0 to rank 1 and back"),
        ((), "not connected"),
        ((*pair(), Link(0, 7, 1.0, 0.0)), r"link 0->7: there is no rank 7, expected 0 to 1"),
        ((*pair(), Link(0, 1, 2.0, 0.0)), "link 0->1 is listed twice"),
        ((*pair(), Link(1, 1, 2.0, 0.0)), "link 1->1 connects a vertex with itself"),
        (pair(bandwidth=math.nan), "bandwidth_bytes_per_s is nan"),
        (pair(bandwidth=-5.0), r"bandwidth_bytes_per_s is -5.0, expected more than 0"),
        (pair(bandwidth=0.0), "expected more than 0"),
        (pair(latency=-1.0), r"latency_s is -1.0, expected 0 or more"),
        (pair(latency=math.inf), "latency_s is inf"),
        (pair(bandwidth=5e-324), r"bandwidth_bytes_per_s is 5e-324, expected 1e-09 to 1e\+18"),
        (pair(bandwidth=1e300), r"bandwidth_bytes_per_s is 1e\+300, expected 1e-09 to 1e\+18"),
        (pair(bandwidth=10**400), "expected 1e-09 to"),
        (pair(latency=1e308), r"latency_s is 1e\+308, expected at most 1e\+09"),
        ((*pair(), *both_ways(0, "1", 1.0, 0.0)), "switch '1' could be taken for a rank"),
        ((*pair(), *both_ways(0, " -7", 1.0, 0.0)), "switch ' -7' could be taken for a rank"),
        ((*pair(), *both_ways(0, "1->0", 1.0, 0.0)), "switch '1->0' could be taken for a link"),
        ((*pair(), *both_ways(0, "", 1.0, 0.0)), "a switch has no name"),
        ((*pair(), Link(0, "hub", 1.0, 0.0)), "no way from rank 0 to switch 'hub' and back"),
    ],
)
def test_what_is_no_topology(links: tuple[Link, ...], telling: str) -> None:
    with pytest.raises(TopologyError, match=telling):
        Topology("broken", 2, links)


def test_a_world_has_at_least_one_rank() -> None:
    assert Topology("alone", 1, ()).vertices == (0,)
    with pytest.raises(TopologyError, match="world_size is 0"):
        Topology("nobody", 0, ())


@pytest.mark.parametrize(
    ("shared", "telling"),
    [
        (SharedCapacity("bus", 0.0, ("0->1",)), "'bus': bandwidth_bytes_per_s is 0.0"),
        (SharedCapacity("bus", 1.0, ("0->2",)), "'bus' covers link 0->2, which does not exist"),
        (SharedCapacity("bus", 1.0, ()), "'bus' covers no link"),
        (SharedCapacity("0->1", 1.0, ("0->1",)), "'0->1' has the name of another constraint"),
    ],
)
def test_what_is_no_shared_capacity(shared: SharedCapacity, telling: str) -> None:
    with pytest.raises(TopologyError, match=telling):
        Topology("broken", 2, pair(), (shared,))


def test_shared_capacities_have_names_of_their_own() -> None:
    twice = (SharedCapacity("bus", 1.0, ("0->1",)), SharedCapacity("bus", 2.0, ("1->0",)))
    with pytest.raises(TopologyError, match="'bus' has the name of another constraint"):
        Topology("broken", 2, pair(), twice)


def test_a_shared_capacity_is_a_constraint_of_the_routes_over_its_links() -> None:
    bus = SharedCapacity("bus", 3.0, ("0->1", "1->0"))
    topology = Topology("bus", 2, pair(), (bus,))
    assert [constraint.name for constraint in topology.constraints] == ["0->1", "1->0", "bus"]
    assert topology.route(0, 1).constraints == (0, 2)
    assert topology.route(1, 0).constraints == (1, 2)


def test_ranks_do_not_forward_without_leave() -> None:
    said = r"no link and no switch leads from rank 0 to 2, and routes 'direct' forwards through no other rank$"
    with pytest.raises(NoRouteError, match=said):
        direct(ring(4)).route(0, 2)
    assert ring(4).route(0, 2).links == (0, 1)
    with pytest.raises(NoRouteError, match="no rank 9"):
        ring(4).route(0, 9)


def test_a_route_prefers_few_links_then_little_latency() -> None:
    links = (
        *both_ways(0, "slow", 1.0, 5.0),
        *both_ways(1, "slow", 1.0, 5.0),
        *both_ways(0, "quick", 1.0, 1.0),
        *both_ways(1, "quick", 1.0, 1.0),
    )
    route = Topology("two ways", 2, links).route(0, 1)
    assert [links[index].name for index in route.links] == ["0->quick", "quick->1"]
    assert route.latency_s == 2.0


@st.composite
def mazes(draw: st.DrawFn) -> Topology:
    """Ranks and switches on one cycle, with further links in any order and latencies that tie."""
    world_size = draw(st.integers(1, 4))
    vertices = draw(st.permutations([*range(world_size), *(f"s{i}" for i in range(draw(st.integers(0, 4))))]))
    cycle = list(zip(vertices, [*vertices[1:], vertices[0]], strict=True)) if len(vertices) > 1 else []
    more = draw(st.lists(st.sampled_from([(a, b) for a in vertices for b in vertices if a != b]))) if cycle else []
    ends = draw(st.permutations(list(dict.fromkeys([*cycle, *more]))))
    latencies = st.sampled_from([Fraction(1), Fraction(2), Fraction(3)])
    return Topology("maze", world_size, tuple(Link(a, b, Fraction(1), draw(latencies)) for a, b in ends))


def best_path(topology: Topology, source: int, destination: int) -> tuple[int, ...] | None:
    """The rule of routes, word for word: all ways through switches only, in the order in which links are listed."""
    ways: list[tuple[int, ...]] = [()]
    while ways:
        longer = [
            (*way, index)
            for way in ways
            for index, link in enumerate(topology.links)
            if link.source == (topology.links[way[-1]].destination if way else source)
            if link.destination not in [source, *(topology.links[passed].destination for passed in way)]
        ]
        arrived = [way for way in longer if topology.links[way[-1]].destination == destination]
        if arrived:
            return min(arrived, key=lambda way: sum(topology.links[index].latency_s for index in way))
        ways = [way for way in longer if isinstance(topology.links[way[-1]].destination, str)]
    return None


@given(mazes())
def test_a_route_has_the_fewest_links_and_of_those_the_least_latency(topology: Topology) -> None:
    linked, topology = [], direct(topology)
    for source in range(topology.world_size):
        for destination in range(topology.world_size):
            best = best_path(topology, source, destination) if source != destination else None
            assert topology.has_route(source, destination) == (best is not None)
            if best is None:
                with pytest.raises(NoRouteError):
                    topology.route(source, destination)
                continue
            linked.append((source, destination))
            route = topology.route(source, destination)
            assert len(route.links) == len(best)
            assert route.latency_s == sum(topology.links[index].latency_s for index in best)
            assert route == topology.route(source, destination)
    assert list(topology.rank_pairs()) == linked
    assert [tuple(pair) for pair in np.argwhere(topology.linked_pairs).tolist()] == linked


def test_of_routes_that_are_equally_good_the_first_listed_is_taken() -> None:
    ways = [(0, "b"), (0, "a"), ("a", 1), ("b", 1), (1, "a"), (1, "b"), ("b", 0), ("a", 0)]
    links = tuple(Link(source, destination, 1.0, 1.0) for source, destination in ways)
    topology = Topology("equal ways", 2, links)
    assert [links[index].name for index in topology.route(0, 1).links] == ["0->b", "b->1"]
    assert [links[index].name for index in topology.route(1, 0).links] == ["1->a", "a->0"]


def test_routes_are_made_when_asked_for() -> None:
    """A ring on a large switch needs one route per rank, not one per pair."""
    topology = switch(64)
    for rank in range(64):
        assert topology.has_route(rank, (rank + 1) % 64)
    assert not topology.has_route(0, 64)
    assert not topology.has_route(-1, 0)
    assert topology._routes == {}
    topology.route(0, 1)
    assert list(topology._routes) == [(0, 1)]


@given(complete_topologies())
def test_routes_of_builders(topology: Topology) -> None:
    """Every pair has a route that begins and ends where it should and passes switches only; its latency adds up."""
    for source in range(topology.world_size):
        for destination in range(topology.world_size):
            if source == destination:
                continue
            route = topology.route(source, destination)
            path = [topology.links[index] for index in route.links]
            assert (path[0].source, path[-1].destination) == (source, destination)
            assert all(a.destination == b.source for a, b in pairwise(path))
            assert all(isinstance(link.destination, str) for link in path[:-1])
            assert route.latency_s == sum(link.latency_s for link in path)


def test_latency_is_from_rank_to_rank() -> None:
    latency = Fraction(7)
    assert full_mesh(3, Fraction(1), latency).route(0, 1).latency_s == latency
    assert switch(3, Fraction(1), latency).route(0, 1).latency_s == latency
    cluster = nodes(2, 2, nic_latency_s=latency, link_latency_s=Fraction(1))
    assert cluster.route(0, 2).latency_s == cluster.route(0, 3).latency_s == latency
    rails = nodes(2, 2, "switch", "rails", nic_latency_s=latency, link_latency_s=Fraction(1))
    assert rails.route(0, 1).latency_s == 1
    assert rails.route(0, 2).latency_s == latency
    assert rails.route(0, 3).latency_s == 2 * latency


@given(complete_topologies(), st.fractions(Fraction(1, 1000), Fraction(1), max_denominator=1000))
def test_scaling_is_slow_motion(topology: Topology, scale: Fraction) -> None:
    scaled = topology.scaled(scale)
    for before, after in zip(topology.links, scaled.links, strict=True):
        assert after.bandwidth_bytes_per_s == before.bandwidth_bytes_per_s * scale
        assert after.latency_s * scale == before.latency_s


@given(st.integers(2, 9), st.booleans(), st.data())
def test_a_graph_of_networkx_is_the_same_topology(ranks: int, directed: bool, data: st.DataObject) -> None:
    """Whatever its ranks are called: a cycle of numbers, of pairs, with a switch in its middle or without."""
    graph: Any = nx.cycle_graph(ranks, create_using=nx.DiGraph if directed else nx.Graph)
    pairs = list(graph.edges)
    numbers = {pair: data.draw(st.integers(1, 100)) for pair in pairs}
    nx.set_edge_attributes(graph, {pair: f"{number}GB/s" for pair, number in numbers.items()}, "bandwidth")
    both = [(pair, number) for (a, b), number in numbers.items() for pair in ((a, b), (b, a))[: 2 - directed]]
    links = tuple(Link(*pair, 1e9 * number, 2e-6) for pair, number in both)
    found = Topology.from_networkx(graph, "cycle", latency="2us")
    assert found == Topology("cycle", ranks, links)
    renamed = nx.relabel_nodes(graph, {rank: (rank, "of a grid") for rank in range(ranks)})
    assert Topology.from_networkx(renamed, "cycle", latency="2us") == found


def test_texts_in_a_graph_are_switches() -> None:
    star: Any = nx.relabel_nodes(nx.star_graph(4), {0: "hub", **{rank + 1: rank for rank in range(4)}})
    found = Topology.from_networkx(star, bandwidth="1GB/s", latency="1us")
    assert (found.world_size, found.vertices[4:]) == (4, ("hub",))


@pytest.mark.parametrize(
    ("edges", "options", "words"),
    [
        ([(0, 1)], {"latency": "1us"}, "edge 0 to 1 has no bandwidth, expected an attribute like bandwidth='25GB/s'"),
        ([(0, 1)], {"bandwidth": "1GB/s"}, "edge 0 to 1 has no latency"),
        ([(0, 1)], {"bandwidth": "1GBs", "latency": "1us"}, "edge 0 to 1: bandwidth '1GBs'"),
        ([(0, 0)], {"bandwidth": "1GB/s", "latency": "1us"}, "connects a vertex with itself"),
        ([(0, 1), (2, 3)], {"bandwidth": "1GB/s", "latency": "1us"}, "not connected"),
        ([(0, 1, {"bandwidth": float("nan")})], {"latency": "1us"}, "is nan, expected a finite number"),
        ([(0, 1, {"bandwidth": -1})], {"latency": "1us"}, "is -1, expected more than 0"),
        ([], {}, "world_size is 0"),
    ],
)
def test_graphs_that_are_no_topology(edges: list[Any], options: dict[str, str], words: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(words)):
        Topology.from_networkx(nx.Graph(edges), **options)
    if edges:
        with pytest.raises(TopologyError):
            Topology.from_networkx(nx.MultiGraph([*edges, *edges]), bandwidth="1GB/s", latency="1us")
