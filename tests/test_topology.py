from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.builders import full_mesh, nodes, ring, switch
from tasp_lab.errors import NoRouteError, TopologyError
from tasp_lab.topology import Link, SharedCapacity, Topology, both_ways
from tests.strategies import complete_topologies


def pair(bandwidth: float = 1.0, latency: float = 0.0) -> tuple[Link, ...]:
    return tuple(both_ways(0, 1, bandwidth, latency))


@pytest.mark.parametrize(
    ("links", "telling"),
    [
        ((Link(0, 1, 1.0, 0.0),), "not connected: no way from rank 0 to rank 1 and back"),
        ((), "not connected"),
        ((*pair(), Link(0, 7, 1.0, 0.0)), r"link 0->7: there is no rank 7, expected 0 to 1"),
        ((*pair(), Link(0, 1, 2.0, 0.0)), "link 0->1 is listed twice"),
        ((*pair(), Link(1, 1, 2.0, 0.0)), "link 1->1 joins a vertex to itself"),
        (pair(bandwidth=math.nan), "bandwidth_bytes_per_s is nan"),
        (pair(bandwidth=-5.0), r"bandwidth_bytes_per_s is -5.0, expected more than 0"),
        (pair(bandwidth=0.0), "expected more than 0"),
        (pair(latency=-1.0), r"latency_s is -1.0, expected 0 or more"),
        (pair(latency=math.inf), "latency_s is inf"),
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
    ],
)
def test_what_is_no_shared_capacity(shared: SharedCapacity, telling: str) -> None:
    with pytest.raises(TopologyError, match=telling):
        Topology("broken", 2, pair(), (shared,))


def test_a_shared_capacity_is_a_constraint_of_the_routes_over_its_links() -> None:
    bus = SharedCapacity("bus", 3.0, ("0->1", "1->0"))
    topology = Topology("bus", 2, pair(), (bus,))
    assert [constraint.name for constraint in topology.constraints] == ["0->1", "1->0", "bus"]
    assert topology.route(0, 1).constraints == (0, 2)
    assert topology.route(1, 0).constraints == (1, 2)


def test_ranks_do_not_forward() -> None:
    with pytest.raises(NoRouteError, match="no link and no switch leads from rank 0 to 2"):
        ring(4).route(0, 2)
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
