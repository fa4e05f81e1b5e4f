from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, permutations, product

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Machine
from tasp_lab.rings.complete_digraph import hamiltonian_cycles
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.cuts import Cut, all_gather_cut, ring_cut
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, Vertex, both_ways
from tests.support.strategies import exact_bandwidths, topologies_and_schedules

bandwidths: st.SearchStrategy[st.SearchStrategy[Number]] = st.sampled_from(
    [
        st.sampled_from([1, 2, 100, 150]),
        exact_bandwidths,
        st.floats(1e9, 1e11),
        st.integers(2**57, 2**59 + 1),  # too many bits for a float, or for the sum of a few in 64 bits
    ]
)


@st.composite
def digraphs(draw: st.DrawFn) -> tuple[Topology, st.SearchStrategy[Number]]:
    """A few ranks and switches on a random cycle, with links across; and what its bandwidths are drawn from."""
    bandwidth, ranks = draw(bandwidths), draw(st.integers(2, 4))
    cycle: list[Vertex] = draw(st.permutations([*range(ranks), *"ab"[: draw(st.integers(0, 2))]]))
    around = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    across = [(a, b) for a in cycle for b in cycle if a != b and (a, b) not in around]
    pairs = [*around, *(pair for pair in across if draw(st.booleans()))]
    return Topology("digraph", ranks, tuple(Link(a, b, draw(bandwidth), 0) for a, b in pairs)), bandwidth


@st.composite
def digraphs_that_share(draw: st.DrawFn, *, at_one_end: bool) -> Topology:
    """Links share capacities: any links, or those at one end of one vertex, and some of these once more."""
    topology, bandwidth = draw(digraphs())
    shared: list[tuple[str, ...]] = []
    ends = st.tuples(st.sampled_from(topology.vertices), st.sampled_from(["source", "destination"]))
    for vertex, end in draw(st.lists(ends, max_size=3, unique=True)):
        there = [link.name for link in topology.links if not at_one_end or getattr(link, end) == vertex]
        members = draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
        shared.append(tuple(members))
        if draw(st.booleans()):
            shared.append(tuple(draw(st.lists(st.sampled_from(members), min_size=1, unique=True))))
    groups = tuple(
        SharedCapacity(f"shared {index}", draw(bandwidth), names)
        for index, names in enumerate(draw(st.permutations(shared)))
    )
    return Topology("shares", topology.world_size, topology.links, groups)


def cuts_of(topology: Topology) -> Iterator[Cut]:
    """Every set of vertices that holds some ranks and not all."""
    for held in product((False, True), repeat=len(topology.vertices)):
        inside = tuple(vertex for vertex, within in zip(topology.vertices, held, strict=True) if within)
        if 0 < (ranks := sum(held[: topology.world_size])) < topology.world_size:
            yield Cut(inside, ranks, bandwidth_out_of(topology, inside))


def bandwidth_out_of(topology: Topology, inside: tuple[Vertex, ...]) -> Fraction:
    """The least sum of shared capacities and links that covers every link that leaves.

    The links carry at most that (linear programming duality), and just that where each shared capacity covers links
    of one end and those of an end are disjoint or nested: the matrix of two laminar families is totally unimodular.
    """
    leaving = {link.name: link for link in topology.links if link.source in inside and link.destination not in inside}
    choices = (chosen for size in range(len(topology.shared) + 1) for chosen in combinations(topology.shared, size))
    return min(
        sum((Fraction(shared.bandwidth_bytes_per_s) for shared in chosen), Fraction())
        + sum(Fraction(leaving[name].bandwidth_bytes_per_s) for name in leaving.keys() - covered)
        for chosen in choices
        for covered in [{name for shared in chosen for name in shared.links}]
    )


def ratio(cut: Cut) -> Fraction:
    return cut.ranks_inside / cut.bandwidth_bytes_per_s


@given(digraphs().map(lambda drawn: drawn[0]) | digraphs_that_share(at_one_end=True))
def test_no_set_of_vertices_is_a_better_cut(topology: Topology) -> None:
    cuts = {cut.inside: cut for cut in cuts_of(topology)}
    for_all_gather, for_rings = all_gather_cut(topology), ring_cut(topology)
    assert ratio(for_all_gather) == max(map(ratio, cuts.values()))
    assert for_rings.bandwidth_bytes_per_s == min(cut.bandwidth_bytes_per_s for cut in cuts.values())
    for cut in (for_all_gather, for_rings):
        assert cut == cuts[cut.inside]


@pytest.mark.parametrize(
    "shared",
    [
        (SharedCapacity("port", 12, ("0->1", "0->2", "0->3")), SharedCapacity("half of it", 3, ("0->1", "0->2"))),
        (SharedCapacity("way out", 5, ("0->1", "0->2", "0->3")), SharedCapacity("way in", 6, ("0->3", "1->3"))),
        (SharedCapacity("way out", 9, ("0->1", "0->2")), SharedCapacity("all but one way in", 2, ("0->1", "2->1"))),
    ],
)
def test_capacities_within_and_behind_capacities(shared: tuple[SharedCapacity, ...]) -> None:
    for groups in permutations(shared):
        topology = Topology("shares", 4, full_mesh(4, 10).links, groups)
        assert ratio(all_gather_cut(topology)) == max(map(ratio, cuts_of(topology)))
        assert ring_cut(topology).bandwidth_bytes_per_s == min(cut.bandwidth_bytes_per_s for cut in cuts_of(topology))


@settings(max_examples=60)
@given(digraphs_that_share(at_one_end=False))
def test_what_is_shared_counts_but_never_too_much(topology: Topology) -> None:
    apart = Topology("apart", topology.world_size, topology.links)
    assert ratio(all_gather_cut(apart)) <= ratio(all_gather_cut(topology)) <= max(map(ratio, cuts_of(topology)))
    unshared, least = ring_cut(apart), min(cut.bandwidth_bytes_per_s for cut in cuts_of(topology))
    assert unshared.bandwidth_bytes_per_s >= ring_cut(topology).bandwidth_bytes_per_s >= least


@settings(max_examples=60)
@given(digraphs_that_share(at_one_end=True), st.randoms(use_true_random=False))
def test_names_and_order_do_not_matter(topology: Topology, chance: random.Random) -> None:
    ranks = list(range(topology.world_size))
    chance.shuffle(ranks)
    new: dict[Vertex, Vertex] = {**dict(enumerate(ranks)), "a": "z", "b": "y"}
    links = [Link(new[x.source], new[x.destination], x.bandwidth_bytes_per_s, 0) for x in topology.links]
    name = {old.name: link.name for old, link in zip(topology.links, links, strict=True)}
    shared = [SharedCapacity(s.name, s.bandwidth_bytes_per_s, tuple(name[x] for x in s.links)) for s in topology.shared]
    chance.shuffle(links)
    other = Topology("other", topology.world_size, tuple(links), tuple(shared))
    assert ratio(all_gather_cut(other)) == ratio(all_gather_cut(topology))
    assert ring_cut(other).bandwidth_bytes_per_s == ring_cut(topology).bandwidth_bytes_per_s


@settings(max_examples=60)
@given(digraphs_that_share(at_one_end=True), st.fractions(Fraction(1, 1000), 1))
def test_a_machine_in_slow_motion_has_the_same_cuts(topology: Topology, scale: Fraction) -> None:
    exact = topology.map_links(lambda _, x: Link(x.source, x.destination, Fraction(x.bandwidth_bytes_per_s), 0))
    exact = Topology("exact", exact.world_size, exact.links)
    for find in (all_gather_cut, ring_cut):
        cut = find(exact)
        assert find(exact.scaled(scale)) == Cut(cut.inside, cut.ranks_inside, cut.bandwidth_bytes_per_s * scale)


@settings(max_examples=40)
@given(topologies_and_schedules(6), st.integers(1, 100))
def test_no_schedule_is_faster(case: tuple[Topology, str], shard_bytes: int) -> None:
    topology, name = case
    if topology.world_size > 1:
        timeline = simulate(collective(name, topology, shard_bytes), Machine(topology))
        assert timeline.time_s >= shard_bytes * ratio(all_gather_cut(topology))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 9])
def test_the_rings_of_a_mesh_fill_its_ring_cut(n: int) -> None:
    """They share no link, so each carries what a link does."""
    assert ring_cut(full_mesh(n, 7)).bandwidth_bytes_per_s == 7 * len(hamiltonian_cycles(n))


AWKWARD = 50e9 * 2.86e-05  # a bandwidth in slow motion, of which neither sums nor multiples are floats


@pytest.mark.parametrize("bandwidth", [1, Fraction(7, 3), AWKWARD, 50e9])
@pytest.mark.parametrize("n", [2, 8, 64])
def test_closed_forms_of_one_node(n: int, bandwidth: Number) -> None:
    """A rank receives n - 1 shards through all its links; on a directed ring through one."""
    b, others = Fraction(bandwidth), tuple(range(1, n))
    assert all_gather_cut(full_mesh(n, bandwidth)) == Cut(others, n - 1, (n - 1) * b)
    assert all_gather_cut(switch(n, bandwidth)) == Cut((*others, "switch"), n - 1, b)
    assert all_gather_cut(ring(n, bandwidth)) == Cut(others, n - 1, b)
    assert ring_cut(full_mesh(n, bandwidth)) == Cut((0,), 1, (n - 1) * b)
    assert ring_cut(switch(n, bandwidth)) == ring_cut(ring(n, bandwidth)) == Cut((0,), 1, b)


@pytest.mark.parametrize("nic", [Fraction(1, 5), 3, 50e9])
@pytest.mark.parametrize("link", [1, AWKWARD])
@pytest.mark.parametrize("network", ["fabric", "rails"])
@pytest.mark.parametrize("inside", ["full-mesh", "switch"])
@pytest.mark.parametrize(("u", "m"), [(2, 2), (2, 8), (8, 8)])
def test_closed_forms_of_nodes(u: int, m: int, inside: str, network: str, link: Number, nic: Number) -> None:
    """The ports of one rank, or all NICs of a node: for AllGather what leads in, for rings what leads out."""
    topology = nodes(u, m, inside, network, link_bandwidth_bytes_per_s=link, nic_bandwidth_bytes_per_s=nic)  # type: ignore[arg-type]
    port = Fraction(nic) + Fraction(link) * (m - 1 if inside == "full-mesh" else 1)
    node = m * Fraction(nic)
    assert ratio(all_gather_cut(topology)) == max((u * m - 1) / port, (u - 1) * m / node)
    assert ring_cut(topology).bandwidth_bytes_per_s == min(port, node)


@pytest.mark.parametrize(("rows", "columns", "bandwidth"), [(3, 3, 1), (8, 8, 50e9), (3, 5, AWKWARD)])
def test_closed_forms_of_a_torus(rows: int, columns: int, bandwidth: Number) -> None:
    """Every rank has four links each way, and no band of rows or columns is as narrow."""
    joined = [
        ((row, column), near)
        for row, column in product(range(rows), range(columns))
        for near in (((row + 1) % rows, column), (row, (column + 1) % columns))
    ]
    links = [link for (a, b), (c, d) in joined for link in both_ways(a * columns + b, c * columns + d, bandwidth, 0)]
    torus, n = Topology("torus", rows * columns, tuple(links)), rows * columns
    assert all_gather_cut(torus) == Cut(tuple(range(1, n)), n - 1, 4 * Fraction(bandwidth))
    assert ring_cut(torus) == Cut((0,), 1, 4 * Fraction(bandwidth))


H100 = {"link_bandwidth_bytes_per_s": 450, "nic_bandwidth_bytes_per_s": 50}  # in GB/s, one way


@pytest.mark.parametrize(
    ("topology", "busbw"),
    [
        (full_mesh(8, 48), 336),
        (full_mesh(16, 50), 750),
        (full_mesh(32, 50), 1550),
        (switch(8, 450), 450),
        (nodes(2, 8, "switch", "fabric", **H100), 500),
        (nodes(2, 8, "switch", "rails", **H100), 500),
        (nodes(4, 8, "switch", "fabric", **H100), 500),
        (nodes(8, 8, "switch", "rails", **H100), 450),
        (nodes(2, 8, "full-mesh", "rails", link_bandwidth_bytes_per_s=48, nic_bandwidth_bytes_per_s=50), 386),
    ],
    ids=lambda value: value.name if isinstance(value, Topology) else str(value),
)  # fmt: skip
def test_forestcoll_agrees(topology: Topology, busbw: int) -> None:
    """Optimal AllGather busbw in GB/s that ForestColl (commit 3c13aee) prints for these machines."""
    assert (topology.world_size - 1) / ratio(all_gather_cut(topology)) == busbw


@pytest.mark.parametrize("seed", range(4))
def test_networkx_finds_no_better_cut_of_many_ranks(seed: int) -> None:
    """Two random clusters, slower in between, of 24 ranks and 4 switches; the bandwidths differ in 60 bits."""
    chance = random.Random(seed)
    vertices: list[Vertex] = [*range(24), "a", "b", "c", "d"]
    chance.shuffle(vertices)
    cluster = {vertex: place < 9 for place, vertex in enumerate(vertices)}
    links = [
        Link(a, b, chance.uniform(1e6, 1e11) / (1 if cluster[a] == cluster[b] else 100), 0)
        for a, b in permutations(vertices, 2)
        if chance.random() < 0.5
    ]
    topology = Topology("many", 24, tuple(links))
    graph = nx.DiGraph((x.source, x.destination, {"capacity": Fraction(x.bandwidth_bytes_per_s)}) for x in links)
    ways = [way for rank in range(1, 24) for way in ((0, rank), (rank, 0))]
    assert ring_cut(topology).bandwidth_bytes_per_s == min(nx.maximum_flow_value(graph, *way) for way in ways)

    cut = all_gather_cut(topology)
    assert cut.bandwidth_bytes_per_s == bandwidth_out_of(topology, cut.inside)
    graph.add_edges_from(("source", rank, {"capacity": 1 / ratio(cut)}) for rank in range(24))
    assert all(nx.maximum_flow_value(graph, "source", rank) == 24 / ratio(cut) for rank in range(24))


@pytest.mark.parametrize("find", [all_gather_cut, ring_cut])
def test_one_rank_has_no_cut(find: Callable[[Topology], Cut]) -> None:
    with pytest.raises(TopologyError, match="'full-mesh:1' has one rank, expected 2 or more"):
        find(full_mesh(1))


@pytest.mark.parametrize("n", [2, 8, 72])
def test_ranks_behind_one_switch_need_no_flow(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasp_lab.topology.cuts._Network.min_cut", None)
    cut = all_gather_cut(switch(n, 50))
    assert (cut.ranks_inside, cut.bandwidth_bytes_per_s) == (n - 1, 50)
