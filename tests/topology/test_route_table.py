from __future__ import annotations

import re
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoRouteError
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch, torus
from tasp_lab.topology.graph import Link, SharedCapacity, Topology
from tests.support.routes import direct
from tests.support.strategies import complete_topologies
from tests.topology.test_topology import mazes


@st.composite
def shared_mazes(draw: st.DrawFn) -> Topology:
    """A maze some of whose links share further capacities."""
    maze = draw(mazes())
    groups = st.lists(st.sampled_from([link.name for link in maze.links]), min_size=1, unique=True)
    drawn = draw(st.lists(groups, max_size=3)) if maze.links else []
    shared = tuple(SharedCapacity(f"group {index}", Fraction(1), tuple(names)) for index, names in enumerate(drawn))
    return Topology(maze.name, maze.world_size, maze.links, shared)


regular = st.sampled_from([
    torus((3, 4)), ring(5), nodes(3, 2, "switch", "rails"), nodes(2, 3, "full-mesh", "rails"), nodes(2, 2, "switch")
])  # fmt: skip
topologies = complete_topologies() | mazes() | shared_mazes() | regular


def every_pair(topology: Topology) -> tuple[IntArray, IntArray]:
    sources, destinations = np.divmod(np.arange(topology.world_size**2), topology.world_size)
    return sources, destinations


@given(topologies, st.randoms())
def test_the_routes_of_many_hops_are_the_routes_of_each(topology: Topology, random: Random) -> None:
    linked = [(a, b) for a in range(topology.world_size) for b in range(topology.world_size)]
    hops = [pair for pair in linked if topology.has_route(*pair)] * 2
    random.shuffle(hops)
    found, latencies_s = topology.routes(*np.array(hops, dtype=np.int64).reshape(-1, 2).T)
    for hop, constraints, latency_s in zip(hops, found.tolist(), latencies_s.tolist(), strict=True):
        route = topology.route(*hop)
        assert constraints == [*route.constraints, *(-1,) * (len(constraints) - len(route.constraints))]
        assert latency_s == pytest.approx(float(route.latency_s), rel=1e-15)
    none = np.zeros(0, dtype=np.int64)
    assert topology.routes(none, none)[0].dtype == found.dtype


@given(topologies)
def test_hops_have_routes_where_pairs_are_linked(topology: Topology) -> None:
    n = topology.world_size
    everywhere = topology.have_routes(*every_pair(topology)).reshape(n, n)
    assert (everywhere == ~np.eye(n, dtype=bool)).all()
    topology = direct(topology)
    found = topology.have_routes(*every_pair(topology))
    assert (found.reshape(n, n) == topology.linked_pairs).all()
    assert (found == topology.are_linked(*every_pair(topology))).all()
    for source, destination, linked in zip(*every_pair(topology), found, strict=True):
        if not linked:
            with pytest.raises(NoRouteError) as one:
                topology.route(int(source), int(destination))
            with pytest.raises(NoRouteError, match=re.escape(str(one.value))):
                topology.routes(np.array([source]), np.array([destination]))


@pytest.mark.parametrize("topology", [full_mesh(3), switch(3), ring(3)])
@pytest.mark.parametrize("hop", [(0, 3), (-1, 0), (0, 0)])
def test_hops_that_are_none_are_refused(topology: Topology, hop: tuple[int, int]) -> None:
    with pytest.raises(NoRouteError):
        topology.routes(*np.array([(0, 1), hop]).T)


def test_equal_links_in_another_order_are_not_alike() -> None:
    """Rank 0 lists switch a first and rank 1 switch b: each takes the one that it lists first."""
    to_switches = [Link(0, "a", 1.0, 1.0), Link(0, "b", 1.0, 1.0), Link(1, "b", 1.0, 1.0), Link(1, "a", 1.0, 1.0)]
    from_switches = [Link(name, rank, 1.0, 1.0) for rank in range(3) for name in "ab"]
    topology = Topology("order", 3, (*to_switches, *from_switches, Link(2, "a", 1.0, 1.0)))
    constraints, _ = topology.routes(np.array([0, 1]), np.array([2, 2]))
    assert [topology.links[first].name for first in constraints[:, 0]] == ["0->a", "1->b"]
