"""Rings of every kind of topology: that they are what they say, and as many as the theorems promise."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import NoDecompositionError, TopologyError
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition, constraint_loads
from tasp_lab.topology.builders import circulant, full_mesh, hypercube, multipartite, nodes, ring, switch, torus
from tasp_lab.topology.cuts import ring_cut
from tasp_lab.topology.graph import Link, Topology, both_ways
from tests.support.links import with_links, without_links
from tests.support.routes import direct


def check(found: Decomposition) -> None:
    """What must hold of every decomposition, counted hop by hop: no link carries more than it can at the found rate."""
    topology = found.topology
    pairs: Counter[tuple[int, int]] = Counter()
    carried: Counter[int] = Counter()
    for row, share in zip(found.rings.tolist(), found.shares, strict=True):
        assert sorted(row) == list(range(topology.world_size))
        for pair in zip(row, row[1:] + row[:1], strict=True):
            pairs[pair] += 1
            for constraint in topology.route(*pair).constraints:
                carried[constraint] += share * found.rate_bytes_per_s
    assert max(pairs.values()) <= found.fold
    assert sum(found.shares) == 1
    assert len([link for link in carried if link < len(topology.links)]) == found.links_used
    full = [rate == Fraction(topology.constraints[at].bandwidth_bytes_per_s) for at, rate in carried.items()]
    assert all(rate <= Fraction(topology.constraints[at].bandwidth_bytes_per_s) for at, rate in carried.items())
    assert any(full)
    assert found.rate_bytes_per_s <= found.ring_limit_bytes_per_s * (1 + Fraction(1, 10**9))
    assert found.rate_bytes_per_s <= found.bound_bytes_per_s


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
    assert decomposition.proved_optimal
    assert decomposition.share_of_bound == 1.0


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


def test_a_switch_is_a_complete_digraph_whose_ports_the_rings_share() -> None:
    found = decompose(switch(8, 450))
    assert found.rings.shape == (7, 8)
    assert (found.links_used, found.links_total, found.rate_bytes_per_s) == (16, 16, 450)


def test_a_ring_is_its_own_decomposition() -> None:
    assert decompose(ring(5)).rings.tolist() == [[0, 1, 2, 3, 4]]
    assert decompose(full_mesh(1)).rings.shape == (0, 1)
    assert decompose(full_mesh(1)).share_of_bound == 1.0


# Regular networks: as many rings as links leave each rank, each link used once


@st.composite
def regular_networks(draw: st.DrawFn) -> tuple[Topology, int, int]:
    """A network with the number of rings and the fold that theorems promise."""
    kind = draw(st.sampled_from(["torus", "hypercube", "both ways", "circulant", "multipartite"]))
    if kind == "torus":  # Kotzig; Foregger; Aubert and Schneider
        sides = draw(st.sampled_from([(a, b) for a in range(3, 8) for b in range(a, 8)] + [(3, 3, 3), (3, 4, 5)]))
        return torus(sides), 2 * len(sides), 1
    if kind == "hypercube":  # Ringel; Stong; the 3-cube is the exception
        dimensions = draw(st.sampled_from([1, 2, 3, 4, 5, 6]))
        return hypercube(dimensions), 6 if dimensions == 3 else dimensions, 2 if dimensions == 3 else 1
    if kind == "circulant":  # Bermond, Favaron and Maheo: degree 4
        n = draw(st.integers(5, 20))
        one = draw(st.integers(1, (n - 1) // 2))
        other = draw(
            st.integers(1, (n - 1) // 2).filter(lambda each: each != one and np.gcd.reduce([each, one, n]) == 1)
        )
        return circulant(n, (one, -one, other, -other)), 4, 1
    if kind == "multipartite":  # Ng: all but K*_4(1) and K*_6(1)
        parts, each = draw(st.sampled_from([(2, 2), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3), (5, 2), (6, 2)]))
        return multipartite(parts, each), (parts - 1) * each, 1
    return torus((draw(st.integers(3, 30)),)), 2, 1


@given(regular_networks())
@settings(max_examples=40)
def test_regular_networks_fall_into_rings_as_theorems_say(case: tuple[Topology, int, int]) -> None:
    topology, count, fold = case
    found = decompose(topology)
    check(found)
    assert (len(found.rings), found.fold) == (count, fold)
    assert found.links_used == found.links_total
    assert found.proved_optimal
    assert found.share_of_bound == 1.0


def test_large_tori_and_hypercubes_are_found_at_once() -> None:
    for topology, count in ((torus((16, 16)), 4), (torus((8, 8, 8)), 6), (hypercube(8), 8)):
        found = decompose(topology, search_budget=6 * 10**7)
        assert len(found.rings) == count
        assert found.proved_optimal


# Nodes


@given(st.integers(2, 4), st.integers(2, 9), st.sampled_from(["fabric", "rails"]))
def test_nodes_have_a_ring_per_nic(node_count: int, per_node: int, network: str) -> None:
    """(m-K_m-m)^u: m rings, for 3 and 5 twice as many of fold two, that fill every NIC and reach the bound."""
    found = decompose(nodes(node_count, per_node, network=network))  # type: ignore[arg-type]
    check(found)
    twice = per_node in (3, 5)
    assert (len(found.rings), found.fold) == ((2 * per_node, 2) if twice else (per_node, 1))
    assert found.rate_bytes_per_s == per_node * 50e9
    assert found.proved_optimal
    crossing = found.rings // per_node != np.roll(found.rings, -1, axis=1) // per_node
    leaving = np.bincount(found.rings[crossing], minlength=node_count * per_node)
    assert set(leaving.tolist()) == {found.fold}


def test_rail_aligned_rings_on_demand() -> None:
    found = decompose(nodes(3, 8, network="rails"), rail_aligned=True)
    onward = np.roll(found.rings, -1, axis=1)
    between = found.rings // 8 != onward // 8
    assert (found.rings[between] % 8 == onward[between] % 8).all()
    with pytest.raises(NoDecompositionError):
        decompose(nodes(3, 2), rail_aligned=True)
    with pytest.raises(NoDecompositionError, match="no rails"):
        decompose(full_mesh(8), rail_aligned=True)


def test_rings_cannot_reach_what_trees_can_where_ports_exceed_nics() -> None:
    """Two nodes of eight H100: a ring passes all shards through the NICs, 8 x 50; AllGather can reach 450 + 50."""
    found = decompose(nodes(2, 8, "switch", link_bandwidth_bytes_per_s=450, nic_bandwidth_bytes_per_s=50))
    assert (found.rate_bytes_per_s, found.bound_bytes_per_s) == (400, 500)
    assert found.proved_optimal
    assert found.beyond_rings
    assert not decompose(full_mesh(8), lanes=4).beyond_rings


# Relabelling, failing links, slow links


def relabelled(topology: Topology, seed: int) -> Topology:
    order = list(range(topology.world_size))
    random.Random(seed).shuffle(order)

    def end(vertex: int | str) -> int | str:
        return order[vertex] if isinstance(vertex, int) else vertex

    links = tuple(replace(link, source=end(link.source), destination=end(link.destination)) for link in topology.links)
    return Topology("relabelled", topology.world_size, links)


few_ranks = st.sampled_from([
    full_mesh(4), full_mesh(5), full_mesh(8), switch(5), nodes(2, 4), nodes(3, 3), nodes(2, 4, "full-mesh", "rails"),
    torus((3, 3)), torus((2, 3)), torus((4, 4)), hypercube(3), hypercube(4), circulant(7, (1, 2)), multipartite(3, 2),
    torus((6,)),
])  # fmt: skip


@given(few_ranks, st.integers(0, 10**6))
@settings(max_examples=30)
def test_relabelling_the_ranks_changes_nothing(topology: Topology, seed: int) -> None:
    first, again = decompose(topology), decompose(relabelled(topology, seed))
    check(again)
    assert first.proved_optimal
    assert again.proved_optimal
    assert (len(first.rings), first.fold) == (len(again.rings), again.fold)
    assert first.share_of_bound == again.share_of_bound


@given(few_ranks, st.data())
@settings(max_examples=40)
def test_without_any_one_link_there_are_rings_or_a_named_impossibility(topology: Topology, data: st.DataObject) -> None:
    link = data.draw(st.sampled_from(topology.links))
    try:
        found = decompose(without_links(topology, [f"{link.source}>{link.destination}"]), search_budget=10**7)
    except (TopologyError, NoDecompositionError) as error:
        named = str(error)
        assert topology.name in named
        return
    check(found)
    assert found.proved_optimal or "not proved optimal" in found.reason


@given(few_ranks, st.data(), st.fractions(Fraction(1, 20), 1, max_denominator=20))
@settings(max_examples=30)
def test_a_slow_link_carries_no_more_than_it_can(topology: Topology, data: st.DataObject, part: Fraction) -> None:
    link = data.draw(st.sampled_from(topology.links))
    slow = float(link.bandwidth_bytes_per_s * part) / 1e9
    changed = with_links(topology, [f"{link.source}>{link.destination}={slow}GB/s"])
    found = decompose(changed, search_budget=10**7)
    check(found)
    assert found.proved_optimal or "not proved optimal" in found.reason


def test_a_mesh_of_five_with_a_broken_link() -> None:
    """Rank 0 keeps three of its links, so three rings are the most, and they reach the bound."""
    found = decompose(without_links(full_mesh(5), ["0-3"]))
    assert (len(found.rings), found.fold, found.share_of_bound) == (3, 1, 1.0)


def test_shares_where_one_link_is_slow() -> None:
    """What enters rank 0 is so many times 50 and 13, and rings with shares reach it."""
    for world_size in (8, 16):
        found = decompose(with_links(full_mesh(world_size), ["0-3=13GB/s"]))
        check(found)
        assert float(found.rate_bytes_per_s) == pytest.approx((world_size - 2) * 50e9 + 13e9, rel=1e-9)
        assert len(set(found.shares)) > 1


# Fewer lanes


@given(st.integers(2, 12).filter(lambda n: n != 6), st.integers(1, 12))
def test_lanes_of_a_mesh_are_so_many_links(world_size: int, lanes: int) -> None:
    found = decompose(full_mesh(world_size, 50), lanes=lanes)
    check(found)
    assert len(found.rings) <= lanes
    assert found.proved_optimal
    if world_size != 4:
        assert found.rate_bytes_per_s == 50 * min(lanes, world_size - 1)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_lanes_of_a_mesh_of_six_share_no_link_up_to_four(lanes: int) -> None:
    assert decompose(full_mesh(6, 50), lanes=lanes).rate_bytes_per_s == 50 * lanes


def test_lanes_on_other_topologies() -> None:
    assert decompose(nodes(2, 8), lanes=3).rate_bytes_per_s == 150e9
    assert decompose(full_mesh(4, 50), lanes=3).rate_bytes_per_s == 100
    assert decompose(switch(8, 50), lanes=1).rate_bytes_per_s == 50
    assert decompose(with_links(full_mesh(8), ["0-3=10GB/s"]), lanes=4).rate_bytes_per_s == 200e9
    with pytest.raises(NoDecompositionError, match="0 lanes"):
        decompose(full_mesh(4), lanes=0)
    with pytest.raises(NoDecompositionError, match="cannot be combined"):
        decompose(full_mesh(5), 1, lanes=2)


# What cannot be


@pytest.mark.parametrize(
    "topology",
    [full_mesh(4), full_mesh(6), hypercube(3), torus((2, 3)), nodes(2, 3), nodes(2, 5)],
    ids=lambda x: x.name,
)
def test_impossible_one_fold_rings_raise_with_the_reason(topology: Topology) -> None:
    with pytest.raises(NoDecompositionError, match=r"at most|and no more|no \d Hamiltonian paths"):
        decompose(topology, fold=1)


def test_a_cut_vertex_is_named() -> None:
    links = [*both_ways(0, 1, 1.0, 0.0), *both_ways(1, 2, 1.0, 0.0)]
    with pytest.raises(NoDecompositionError, match="without rank 1 the others do not reach each other"):
        decompose(direct(Topology("path", 3, tuple(links))))
    found = decompose(Topology("path", 3, tuple(links)))
    check(found)
    assert (found.rate_bytes_per_s, found.proved_optimal, found.search_complete) == (1, True, True)
    assert re.match("one ring, in which ranks forward: .* without rank 1 the others", found.reason)


@given(st.lists(st.integers(0, 10), min_size=1, max_size=10))
def test_the_ring_of_a_tree_passes_each_link_once_each_way(parents: list[int]) -> None:
    """As few as any: every ring enters and leaves the ranks beyond each link. So no ring of a tree is faster."""
    edges = [(rank, parent % rank) for rank, parent in enumerate(parents, 1)]
    tree = Topology("tree", len(parents) + 1, tuple(link for edge in edges for link in both_ways(*edge, 3, 0)))
    found = decompose(tree)
    check(found)
    assert constraint_loads(tree, found.rings, [1]).tolist() == [1] * len(tree.links)
    assert found.proved_optimal


def test_an_acyclic_graph_is_no_topology() -> None:
    links = tuple(Link(a, b, 1.0, 0.0) for a, b in ((0, 1), (0, 2), (1, 2)))
    with pytest.raises(TopologyError, match="not connected"):
        decompose(Topology("acyclic", 3, links))


def test_a_graph_without_any_ring_says_that_all_ways_were_tried() -> None:
    """K_{2,3}: no rank separates the others, but a ring would have to alternate between sides of two sizes."""
    links = [link for a in (0, 1) for b in (2, 3, 4) for link in both_ways(a, b, 1.0, 0.0)]
    with pytest.raises(NoDecompositionError, match="the search was exhaustive"):
        decompose(direct(Topology("K_2,3", 5, tuple(links))))
    with pytest.raises(NoDecompositionError, match="the search was exhaustive"):
        decompose(Topology("K_2,3", 5, tuple(links)), fold=1)


def test_rings_over_links_that_do_not_exist_are_refused() -> None:
    backwards = np.array([[0, 3, 2, 1]], dtype=np.int32)
    with pytest.raises(NoDecompositionError, match="ring 0 goes from rank 0 to 3, but ring:4 has no such link"):
        Decomposition(direct(ring(4)), backwards, 1, "made up")
    forwarded = Decomposition(ring(4, 3), backwards, 1, "made up")
    check(forwarded)
    assert forwarded.rate_bytes_per_s == 1  # each hop passes all links but one: four hops, each link three times


@pytest.mark.parametrize("shares", [(Fraction(1, 2),), (Fraction(1, 2), Fraction(1, 3)), (Fraction(2), Fraction(-1))])
def test_wrong_shares_are_refused(shares: tuple[Fraction, ...]) -> None:
    rings = np.array([[0, 1, 2], [0, 2, 1]], dtype=np.int32)
    with pytest.raises(NoDecompositionError, match="share"):
        Decomposition(full_mesh(3), rings, 1, "made up", shares)


def test_the_limit_of_rings_is_the_narrowest_cut() -> None:
    topology = with_links(full_mesh(5), ["0-3=10GB/s"])
    assert decompose(topology).ring_limit_bytes_per_s == pytest.approx(
        float(ring_cut(topology).bandwidth_bytes_per_s), rel=1e-9
    )


@pytest.mark.parametrize("dimensions", range(2, 11))
def test_one_ring_of_a_hypercube_needs_no_search(dimensions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasp_lab.rings.search.RingSearch", None)
    found = decompose(hypercube(dimensions, 50), lanes=1)
    assert found.rings.shape == (1, 2**dimensions)
    changed = found.rings ^ np.roll(found.rings, 1)
    assert (changed > 0).all()
    assert not (changed & changed - 1).any(), "one binary digit changes"
    assert found.rate_bytes_per_s == 50
    assert found.proved_optimal
