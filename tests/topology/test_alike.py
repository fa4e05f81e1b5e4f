"""Which parts of a topology are alike: the orbits of its symmetries on machines, and never less on any graph."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networkx.algorithms.isomorphism import DiGraphMatcher

from tasp_lab.machines.catalogue import load_machine
from tasp_lab.topology.alike import alike
from tasp_lab.topology.builders import full_mesh, nodes, ring
from tasp_lab.topology.derived import renumbered
from tasp_lab.topology.graph import Topology, both_ways
from tests.support.strategies import complete_topologies


def orbits(topology: Topology) -> tuple[set[frozenset[int]], set[frozenset[int]]]:
    """The orbits of vertices and of links under all symmetries of a topology without shared capacities."""
    graph = nx.DiGraph()
    for place, vertex in enumerate(topology.vertices):
        graph.add_node(place, kind=topology.switch_kinds.get(str(vertex), "rank"))
    numbers: dict[tuple[int, int], int] = {}
    for index, (link, ends) in enumerate(zip(topology.links, topology.link_ends.tolist(), strict=True)):
        graph.add_edge(*ends, number=(link.bandwidth_bytes_per_s, link.latency_s))
        numbers[ends[0], ends[1]] = index
    vertices, links = nx.utils.UnionFind(graph), nx.utils.UnionFind(range(len(topology.links)))
    matcher = DiGraphMatcher(graph, graph, lambda a, b: a["kind"] == b["kind"], lambda a, b: a["number"] == b["number"])
    for symmetry in matcher.isomorphisms_iter():
        for place, image in symmetry.items():
            vertices.union(place, image)
        for (source, destination), index in numbers.items():
            links.union(index, numbers[symmetry[source], symmetry[destination]])
    return {frozenset(each) for each in vertices.to_sets()}, {frozenset(each) for each in links.to_sets()}


def classes(of: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(of == each).tolist()) for each in np.unique(of)}


@pytest.mark.parametrize(
    "name",
    ["ring:5", "full-mesh:4", "torus:2x4", "torus:3x3", "torus:3x4", "hypercube:3", "nodes:2x2", "nodes:2x2:rails",
     "nodes:3x2:rails", "h100-2x2", "h100-4", "gb200-2x1x2"],
)  # fmt: skip
def test_parts_of_machines_are_alike_exactly_if_a_symmetry_maps_one_to_the_other(name: str) -> None:
    topology = load_machine(name).topology
    vertices, links = alike(topology)
    assert (classes(vertices), classes(links)) == orbits(topology)


@st.composite
def graphs(draw: st.DrawFn) -> Topology:
    """A connected graph of a few ranks and perhaps a switch, with links of two speeds."""
    ranks, speeds = draw(st.integers(2, 5)), st.sampled_from([Fraction(1), Fraction(2)])
    vertices = [*range(ranks), *(["switch"] if draw(st.booleans()) else [])]
    pairs = set(pairwise(vertices))
    others = {(b, a) for at, a in enumerate(vertices) for b in vertices[:at]} - pairs
    pairs |= {pair for pair in sorted(others, key=str) if draw(st.booleans())}
    links = [link for a, b in sorted(pairs, key=str) for link in both_ways(a, b, draw(speeds), 0)]
    return Topology("graph", ranks, tuple(links))


@given(graphs())
def test_a_symmetry_maps_parts_to_parts_that_are_alike(topology: Topology) -> None:
    for own, of_symmetries in zip(map(classes, alike(topology)), orbits(topology), strict=True):
        assert all(any(orbit <= each for each in own) for orbit in of_symmetries)


@given(complete_topologies(6), st.randoms(use_true_random=False))
def test_numbers_of_ranks_do_not_matter(topology: Topology, random: object) -> None:
    order = np.array(random.sample(range(topology.world_size), topology.world_size))  # type: ignore[attr-defined]
    vertices, links = alike(topology)
    other_vertices, other_links = alike(renumbered(topology, order))
    ranks = topology.world_size
    assert classes(vertices[:ranks]) == {
        frozenset(order[list(each)].tolist()) for each in classes(other_vertices[:ranks])
    }
    assert sorted(Counter(links.tolist()).values()) == sorted(Counter(other_links.tolist()).values())


def test_a_slow_rank_and_shared_capacities_are_told_apart() -> None:
    assert classes(alike(full_mesh(4), [1, 1, 2, 1])[0]) == {frozenset({2}), frozenset({0, 1, 3})}
    assert len(classes(alike(ring(5), [1, 1, 2, 1, 1])[0])) == 5
    topology = nodes(2, 4, ranks_per_nic=2)
    assert len(classes(alike(topology)[0][:8])) == 1
    slower = topology.shared[0]
    one = type(slower)(slower.name, slower.bandwidth_bytes_per_s / 2, slower.links)
    changed = Topology("slower", 8, topology.links, (one, *topology.shared[1:]), topology.switches)
    assert frozenset({0, 1}) in classes(alike(changed)[0])
