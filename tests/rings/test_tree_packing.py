from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from sim.bounds.collectives import all_gather_bound_s
from sim.event.engine import simulate
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import NoDecompositionError, ScheduleError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.rings import tree_packing
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import RELATIVE_TOLERANCE
from tasp_lab.rings.tree_packing import TreePacking, cheapest_tree, pack_trees, tree_depths
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.all_gather import direct_all_gather, multi_ring_all_gather
from tasp_lab.schedules.collectives.tree_all_gather import MAX_CHUNKS, best_chunks, tree_all_gather
from tasp_lab.topology.builders import full_mesh, nodes, ring, torus
from tasp_lab.topology.cuts import all_gather_cut
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, Vertex
from tests.support.routes import direct
from tests.support.strategies import complete_topologies, exact_bandwidths, exact_latencies


@st.composite
def digraphs(draw: st.DrawFn, max_ranks: int = 6, max_switches: int = 0) -> Topology:
    """Ranks and switches on a random cycle with links across, all of random bandwidth, some of which some share."""
    ranks = draw(st.integers(2, max_ranks))
    switches = [f"switch {number}" for number in range(draw(st.integers(0, max_switches)))]
    cycle: list[Vertex] = draw(st.permutations([*range(ranks), *switches]))
    pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    pairs += [(a, b) for a in cycle for b in cycle if a != b and (a, b) not in pairs and draw(st.booleans())]
    links = tuple(Link(a, b, draw(exact_bandwidths), draw(exact_latencies)) for a, b in pairs)
    names = st.lists(st.sampled_from([link.name for link in links]), min_size=1, unique=True)
    groups = draw(st.lists(names, max_size=2)) if max_switches else []
    shared = tuple(SharedCapacity(f"shared {at}", draw(exact_bandwidths), tuple(g)) for at, g in enumerate(groups))
    return Topology("digraph", ranks, links, shared)


topologies = st.one_of(complete_topologies(max_ranks=6), digraphs(), digraphs(4, 2))


def cut_bytes_per_s(topology: Topology) -> Fraction:
    """What every rank can receive in any AllGather, as far as the bottleneck cut tells."""
    if topology.world_size == 1:
        return Fraction(0)
    cut = all_gather_cut(topology)
    return (topology.world_size - 1) * cut.bandwidth_bytes_per_s / cut.ranks_inside


@settings(max_examples=60)
@given(topologies)
def test_trees_span_and_carry_what_every_constraint_allows(topology: Topology) -> None:
    """At the rate x of one root nothing is loaded above its bandwidth, and something is loaded up to it."""
    packing = pack_trees(topology)
    n = topology.world_size
    shards: dict[str, Fraction] = defaultdict(Fraction)
    whole = dict.fromkeys(range(n), Fraction(0))
    for parents, root, share in zip(packing.parents.tolist(), packing.roots.tolist(), packing.shares, strict=True):
        whole[root] += share
        for rank in range(n):
            above = [rank]
            while above[-1] != root:
                assert len(above) <= n
                above.append(parents[above[-1]])
            if rank != root:
                for constraint in topology.route(parents[rank], rank).constraints:
                    shards[topology.constraints[constraint].name] += share
    assert set(whole.values()) == {Fraction(1)}
    if n > 1:
        x = packing.rate_bytes_per_s / (n - 1)
        loads = {c.name: shards[c.name] * x / Fraction(c.bandwidth_bytes_per_s) for c in topology.constraints}
        assert max(loads.values()) == 1


@settings(max_examples=60)
@given(topologies)
def test_no_trees_exceed_the_cut(topology: Topology) -> None:
    packing = pack_trees(topology)
    assert packing.rate_bytes_per_s <= cut_bytes_per_s(topology)
    assert packing.limit_bytes_per_s <= cut_bytes_per_s(topology)
    assert packing.rate_bytes_per_s <= packing.limit_bytes_per_s * (1 + Fraction(RELATIVE_TOLERANCE))
    assert packing.proved_optimal


@settings(max_examples=60)
@given(digraphs())
def test_trees_reach_the_cut_where_data_passes_ranks_and_links_only(topology: Topology) -> None:
    """Edmonds' theorem on disjoint branchings, for bandwidths in place of numbers of parallel arcs."""
    assert pack_trees(topology).rate_bytes_per_s >= cut_bytes_per_s(topology) * (1 - Fraction(RELATIVE_TOLERANCE))


@settings(max_examples=40)
@given(digraphs(4, 2))
def test_no_choice_of_all_trees_carries_more(topology: Topology) -> None:
    """With all trees listed, the rate is the value of one linear program: maximise x, each root's trees carry x."""
    n = topology.world_size
    unit = float(cut_bytes_per_s(topology)) / (n - 1)
    columns, of_root = [], []
    for root, above in product(range(n), product(range(n), repeat=n)):
        tree = nx.DiGraph((parent, rank) for rank, parent in enumerate(above) if rank != root)
        if above[root] == root and len(tree) == n and nx.is_arborescence(tree) and all(
            topology.has_route(*pair) for pair in tree.edges
        ):  # fmt: skip
            load = np.zeros(len(topology.constraints))
            for pair in tree.edges:
                load[list(topology.route(*pair).constraints)] += 1
            columns.append(load)
            of_root.append(np.eye(n)[root])
    bandwidths = np.array([float(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints]) / unit
    best = linprog(
        [0.0] * len(columns) + [-1.0],
        A_ub=np.array([*columns, 0 * bandwidths]).T / bandwidths[:, None],
        b_ub=np.ones(len(bandwidths)),
        A_eq=np.array([*of_root, -np.ones(n)]).T,
        b_eq=np.zeros(n),
    )
    assert float(pack_trees(topology).rate_bytes_per_s) / (n - 1) == pytest.approx(best.x[-1] * unit, rel=1e-7)


def random_costs(n: int, seed: int, whole: bool) -> FloatArray:
    """Costs of hops, some of which are impossible; whole numbers are often equal."""
    random = np.random.default_rng(seed)
    costs = random.integers(0, 4, (n, n)).astype(float) if whole else random.exponential(size=(n, n))
    costs[(random.random((n, n)) < 0.4) & (np.arange(n)[:, None] + 1 != np.arange(n))] = np.inf
    return costs


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(0, 2**32 - 1), st.booleans())
def test_trees_are_the_same_compiled_or_not(n: int, seed: int, whole: bool) -> None:
    costs, found = random_costs(n, seed, whole), []
    for few in (0, 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree_packing, "_FEW", few)
            found.append(cheapest_tree(costs, 0).tolist())
    assert found[0] == found[1]


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.booleans())
def test_the_cheapest_tree_costs_as_much_as_networkx_says(n: int, seed: int, whole: bool) -> None:
    costs = random_costs(n, seed, whole)
    parents = cheapest_tree(costs, 0)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_weighted_edges_from((a, b, costs[a, b]) for a in range(n) for b in range(1, n) if costs[a, b] < np.inf)
    cheapest = nx.minimum_spanning_arborescence(graph).size("weight") if n > 1 else 0.0
    assert sum(costs[parents[rank], rank] for rank in range(1, n)) == pytest.approx(cheapest)
    assert (tree_depths(parents) > 0).sum() == n - 1


@settings(max_examples=60)
@given(topologies, st.integers(1, 300), st.none() | st.integers(1, 5))
def test_every_rank_receives_each_other_shard_once(topology: Topology, shard: int, chunks: int | None) -> None:
    """The replay proves that each block arrives once; the ledger counts what each rank receives."""
    schedule = tree_all_gather(topology, shard, chunks=chunks)
    n = topology.world_size
    received = np.zeros(n, dtype=np.int64)
    for step in schedule.steps:
        np.add.at(received, step.destination, schedule.block_bytes[step.block])
    assert (received == (n - 1) * shard).all()
    assert schedule.bytes_sent().sum() == n * (n - 1) * shard
    assert (schedule.initial @ schedule.block_bytes == shard).all()


@settings(max_examples=40)
@given(topologies, st.integers(1, 300), st.none() | st.integers(1, 5))
def test_no_schedule_of_trees_is_faster_than_the_bound(topology: Topology, shard: int, chunks: int | None) -> None:
    time_s = simulate(tree_all_gather(topology, shard, chunks=chunks), Machine(topology)).time_s
    assert time_s >= all_gather_bound_s(topology, shard)


def test_on_a_full_mesh_trees_are_stars() -> None:
    machine = Machine(full_mesh(6, Fraction(7), Fraction(1)))
    along_trees, direct = tree_all_gather(machine.topology, 60), direct_all_gather(machine.topology, 60)
    assert simulate(along_trees, machine).time_s == simulate(direct, machine).time_s
    assert [step.rows() for step in along_trees.steps] != []
    assert pack_trees(machine.topology).depths.max() == 1


def test_on_a_ring_trees_are_the_ring() -> None:
    machine = Machine(ring(6, Fraction(7), Fraction(1)))
    along_trees, around = (schedule(machine.topology, 60) for schedule in (tree_all_gather, multi_ring_all_gather))
    assert simulate(along_trees, machine).time_s == simulate(around, machine).time_s


def test_trees_pass_the_nics_less_often_than_rings() -> None:
    """Two nodes of eight H100: every ring takes 1/8 of all shards through each NIC, 50 GB/s of 400; trees need less."""
    machine = load_machine("h100-2x8", library="ideal")
    packing, decomposition = pack_trees(machine.topology), decompose(machine.topology)
    assert packing.proved_optimal
    assert decomposition.proved_optimal
    assert float(packing.rate_bytes_per_s) == pytest.approx(500e9, rel=RELATIVE_TOLERANCE)
    assert decomposition.rate_bytes_per_s == 400 * 10**9
    along_trees = simulate(tree_all_gather(machine.topology, 2**30, packing), machine).time_s
    around_rings = simulate(collective("multi-ring", machine.topology, 2**30, decomposition), machine).time_s
    bound_s = all_gather_bound_s(machine.topology, 2**30)
    assert along_trees < 1.02 * float(bound_s)
    assert along_trees < 0.82 * float(around_rings)


@pytest.mark.parametrize("topology", [torus((3, 3)), nodes(2, 4), nodes(2, 3, "switch")])
def test_more_chunks_fill_the_pipeline(topology: Topology) -> None:
    packing = pack_trees(topology)
    at_once, cut = (
        simulate(tree_all_gather(topology, 2**26, packing, chunks), Machine(topology)).time_s for chunks in (1, 16)
    )
    assert cut < at_once
    chosen = [best_chunks(packing, 2**power) for power in range(10, 40, 5)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 1
    assert chosen[-1] == MAX_CHUNKS


def test_blocks_of_one_lane_go_to_one_peer() -> None:
    for topology, lanes in ((torus((3, 3)), 4), (nodes(2, 4), 7 + 8)):
        schedule = tree_all_gather(topology, 2**20)
        peers = {(s, lane, d) for step in schedule.steps for s, d, lane, _ in step.rows()}
        assert len({(s, lane) for s, lane, _ in peers}) == len(peers)
        assert schedule.lanes <= lanes


def test_with_the_smallest_budget_there_are_still_trees() -> None:
    said: list[str] = []
    packing = pack_trees(torus((3, 3)), search_budget=1, progress=said.append)
    assert len(packing.shares) == 9
    assert 0 < packing.rate_bytes_per_s < packing.limit_bytes_per_s
    assert not packing.proved_optimal
    assert said
    for operations in (0, -1):
        with pytest.raises(NoDecompositionError, match=f"a search budget of {operations} operations"):
            pack_trees(ring(3), search_budget=operations)
        with pytest.raises(NoDecompositionError, match=f"a search budget of {operations} operations"):
            decompose(ring(3), search_budget=operations)


@pytest.mark.parametrize(
    ("parents", "shares", "told"),
    [
        ([[0, 0, 0]], [1], "tree 0 goes from rank 0 to 2, but ring:3 has no such link"),
        ([[0, 1, 0]], [1], "tree 0 has 2 roots, expected 1"),
        ([[1, 2, 0]], [1], "tree 0 has 0 roots, expected 1"),
        ([[0, 2, 1]], [1], "tree 0 does not lead from its root 0 to rank 1"),
        ([[0, 0, 3]], [1], "tree 0 has a parent that is not a rank, expected 0 to 2"),
        ([[0, 0, -1]], [1], "tree 0 has a parent that is not a rank, expected 0 to 2"),
        ([[0, 0, 1]], [1, 1], r"parents have the shape \(1, 3\), expected \(2, 3\)"),
        ([[0, 0, 1]], [0], "tree 0 has the share 0, expected more than 0"),
        ([[0, 0, 1]], [1], "the shares of the trees from rank 1 sum to 0, expected 1"),
    ],
)
def test_what_is_no_packing_is_refused(parents: list[list[int]], shares: list[int], told: str) -> None:
    with pytest.raises(NoDecompositionError, match=told):
        TreePacking(ring(3), np.array(parents), tuple(map(Fraction, shares)), Fraction(1))


def test_what_was_checked_cannot_be_changed() -> None:
    packing = pack_trees(ring(3))
    with pytest.raises(ValueError, match="read-only"):
        packing.parents[:] = 0
    with pytest.raises(NoDecompositionError, match="sum to 1/2, expected 1"):
        replace(packing, shares=(Fraction(1, 2), *packing.shares[1:]))


def test_a_schedule_of_trees_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ScheduleError, match="shard size is 0 bytes, expected 1 or more"):
        tree_all_gather(ring(3), 0)
    with pytest.raises(ScheduleError, match="0 chunks: expected 1 or more"):
        tree_all_gather(ring(3), 1, chunks=0)
    with pytest.raises(ScheduleError, match="trees of 3 ranks for ring:4, which has 4"):
        tree_all_gather(ring(4), 1, pack_trees(ring(3)))
    with pytest.raises(ScheduleError, match="but ring:4 has no such link"):
        tree_all_gather(direct(ring(4)), 8, pack_trees(full_mesh(4)))
    assert tree_all_gather(full_mesh(1), 5).transfers == 0
