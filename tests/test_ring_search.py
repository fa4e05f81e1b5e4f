"""The parts of the search for rings, each against a slower way to the same answer, and what holds of any search."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, permutations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tasp_lab import decomposition, exact_search, few_rings, packing, ring_search
from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.builders import bidirectional_ring, circulant, full_mesh, hypercube, nodes, switch, torus
from tasp_lab.changes import with_links, without_links
from tasp_lab.cuts import ring_cut
from tasp_lab.decomposition import Decomposition, decompose
from tasp_lab.errors import NoDecompositionError, TopologyError
from tasp_lab.exact_search import Answer, cheapest_ring, rings_within
from tasp_lab.factors import random_factors, regular_part
from tasp_lab.packing import Packing, Patching, best_packing, whole_packing, with_exact_shares
from tasp_lab.ring_load import constraint_loads, ring_rate_bytes_per_s
from tasp_lab.ring_problem import RingProblem
from tasp_lab.rings import Patience
from tasp_lab.switching import disjoint_rings
from tasp_lab.topology import Constraint, Link, SharedCapacity, Topology, Vertex, both_ways
from tasp_lab.two_factors import hamiltonian_cycles_both_ways

ROOT = Path(__file__).parent.parent

Ring = tuple[int, ...]

seeds = st.integers(0, 10**6)


# What is drawn


@st.composite
def digraphs(draw: st.DrawFn, most: int = 6) -> BoolArray:
    """Any digraph without loops."""
    n = draw(st.integers(2, most))
    linked = np.array(draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))).reshape(n, n)
    np.fill_diagonal(linked, False)
    return linked


@st.composite
def digraphs_of_rings(draw: st.DrawFn, most: int = 7) -> tuple[BoolArray, IntArray]:
    """A digraph and rings of it that share no arc, with a few arcs more."""
    n, random = draw(st.integers(3, most)), Random(draw(seeds))
    linked = np.zeros((n, n), dtype=bool)
    rings: list[list[int]] = []
    for _ in range(20):
        ring = [0, *random.sample(range(1, n), n - 1)]
        if not linked[ring, np.roll(ring, -1)].any():
            linked[ring, np.roll(ring, -1)] = True
            rings.append(ring)
    more = draw(digraphs(n).filter(lambda each: len(each) <= n))
    linked[: len(more), : len(more)] |= more
    return linked, np.array(rings)


@st.composite
def networks(draw: st.DrawFn, most_ranks: int = 5) -> Topology:
    """Few ranks and switches, links of unequal bandwidth, capacities that links share; most ranks are on a cycle."""
    world_size = draw(st.integers(2, most_ranks))
    switches = [f"s{number}" for number in range(draw(st.integers(0, 2)))]
    vertices: list[Vertex] = list(draw(st.permutations([*range(world_size), *switches])))
    ends = list(itertools.permutations(vertices, 2))
    cycle = list(pairwise([*vertices, vertices[0]]))
    chosen = dict.fromkeys([*cycle, *draw(st.lists(st.sampled_from(ends), min_size=world_size))])
    bandwidths = st.sampled_from([Fraction(1), Fraction(1, 3), Fraction(2), Fraction(5, 7)])
    links = tuple(Link(a, b, draw(bandwidths), Fraction(0)) for a, b in chosen)
    names = st.lists(st.sampled_from([link.name for link in links]), min_size=1, max_size=4, unique=True)
    shared = [
        SharedCapacity(f"bus{number}", draw(bandwidths), tuple(draw(names)))
        for number in range(draw(st.integers(0, 2)))
    ]
    return Topology("network", world_size, links, tuple(shared))


@st.composite
def link_graphs(draw: st.DrawFn, most: int = 6) -> Topology:
    """Ranks joined by links of their own, without switches; strongly connected."""
    linked = draw(digraphs(most))
    kinds: list[list[float]] = [[1], [1, 2, 3], [0.3, 0.70001, 0.9], [1.0, 1e-3]]
    bandwidths = st.sampled_from(draw(st.sampled_from(kinds)))
    links = tuple(Link(a, b, draw(bandwidths), 0) for a, b in np.argwhere(linked).tolist())
    try:
        return Topology("links", len(linked), links)
    except TopologyError:
        assume(False)
        raise


# Slower ways to the same answers


def hops(ring: Ring | list[int]) -> list[tuple[int, int]]:
    return list(pairwise([*ring, ring[0]]))


def rings_of(linked: BoolArray) -> list[Ring]:
    """All rings of a digraph, from vertex 0 on."""
    rings = ((0, *others) for others in permutations(range(1, len(linked))))
    return [ring for ring in rings if all(linked[hop] for hop in hops(ring))]


def passes(topology: Topology, ring: Ring | list[int]) -> Counter[int]:
    """How often a ring passes each constraint, hop by hop along the links of its routes."""
    count: Counter[int] = Counter()
    for source, destination in hops(ring):
        links = topology.route(source, destination).links
        names = {topology.links[link].name for link in links}
        count.update(links)
        count.update(
            len(topology.links) + at for at, each in enumerate(topology.shared) if names.intersection(each.links)
        )
    return count


def best_rate(topology: Topology, rings: list[Ring]) -> float:
    """What rings carry at best, by linear programming over what each passes."""
    constraints = topology.constraints
    largest = max(float(each.bandwidth_bytes_per_s) for each in constraints)
    table = np.zeros((len(constraints), len(rings)))
    for column, ring in enumerate(rings):
        for constraint, times in passes(topology, ring).items():
            table[constraint, column] = times
    most = [float(each.bandwidth_bytes_per_s) / largest for each in constraints]
    result = linprog([-1.0] * len(rings), A_ub=table, b_ub=np.array(most))
    assert result.fun is not None
    return -result.fun * largest


def check_disjoint(rings: IntArray, linked: BoolArray) -> None:
    """Rings of a digraph from vertex 0 on, no two over the same arc."""
    used = [hop for ring in rings.tolist() for hop in hops(ring)]
    assert all(sorted(ring) == list(range(len(linked))) and ring[0] == 0 for ring in rings.tolist())
    assert all(linked[hop] for hop in used)
    assert len(set(used)) == len(used)


def check(found: Decomposition) -> None:
    """Rings within the fold that carry what they say, counted hop by hop."""
    topology = found.topology
    carried: defaultdict[int, Fraction] = defaultdict(Fraction)
    pairs: Counter[tuple[int, int]] = Counter()
    for ring, share in zip(found.rings.tolist(), found.shares, strict=True):
        assert sorted(ring) == list(range(topology.world_size))
        pairs.update(hops(ring))
        for constraint, times in passes(topology, ring).items():
            carried[constraint] += share * times
    assert max(pairs.values()) <= found.fold
    assert sum(found.shares) == 1
    limits = {at: Fraction(topology.constraints[at].bandwidth_bytes_per_s) / load for at, load in carried.items()}
    assert found.rate_bytes_per_s == min(limits.values())
    assert found.rate_bytes_per_s <= found.ring_limit_bytes_per_s * (1 + Fraction(1, 10**9))


def check_best(topology: Topology) -> None:
    """Rings that are proved to carry as much as all rings can, or a refusal where there is no ring."""
    every = rings_of(topology.linked_pairs)
    if not every:
        with pytest.raises(NoDecompositionError, match="has no ring at all"):
            decompose(topology)
        return
    found = decompose(topology)
    check(found)
    assert float(found.rate_bytes_per_s) == pytest.approx(best_rate(topology, every), rel=1e-8)
    assert found.proved_optimal


@contextlib.contextmanager
def settings_of(target: object, **values: object) -> Iterator[None]:
    """Attributes of a module or class with other values for a while, for tests that draw many cases."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(target, name, value)
        yield


# 1-factors


@given(digraphs(), st.integers(0, 5), seeds)
def test_a_regular_part_exists_unless_a_cut_says_no(linked: BoolArray, degree: int, seed: int) -> None:
    """There is none exactly if some sources need more than all destinations can take from them (max-flow, min-cut)."""
    part = regular_part(linked, degree, Random(seed))
    n = len(linked)
    sources = (list(inside) for size in range(n + 1) for inside in combinations(range(n), size))
    possible = all(np.minimum(linked[inside].sum(axis=0), degree).sum() >= degree * len(inside) for inside in sources)
    assert (part is not None) == possible
    if part is not None:
        assert (part.sum(axis=0) == degree).all()
        assert (part.sum(axis=1) == degree).all()
        assert not (part & ~linked).any()


@given(st.integers(2, 12), st.data(), seeds)
def test_a_regular_digraph_falls_into_factors(n: int, data: st.DataObject, seed: int) -> None:
    """Each is a permutation of the vertices, and each arc is in exactly one."""
    hop_lengths = data.draw(st.sets(st.integers(1, n - 1)))
    renamed = np.random.default_rng(seed).permutation(n)
    regular = np.zeros((n, n), dtype=bool)
    for length in hop_lengths:
        regular[np.arange(n), renamed[(np.arange(n) + length) % n]] = True
    factors = random_factors(regular, Random(seed))
    assert factors.shape == (len(hop_lengths), n)
    assert (np.sort(factors, axis=1) == np.arange(n)).all()
    count = np.zeros((n, n), dtype=int)
    np.add.at(count, (np.arange(n), factors), 1)
    assert (count == regular).all()


# Switching


@given(digraphs(7), st.integers(1, 5))
@settings(max_examples=60)
def test_what_switching_finds_are_disjoint_rings(linked: BoolArray, count: int) -> None:
    rings = disjoint_rings(linked, count, time_limit_s=0.02)
    if rings is not None:
        assert rings.shape == (count, len(linked))
        check_disjoint(rings, linked)


@given(digraphs_of_rings(), st.data())
@settings(max_examples=60)
def test_switching_from_given_rings(case: tuple[BoolArray, IntArray], data: st.DataObject) -> None:
    """All of the given rings that the digraph has are an answer; those it lacks an arc of are no hindrance."""
    linked, start = case
    check_disjoint(start, linked)
    rings = disjoint_rings(linked, len(start), time_limit_s=0.02, start=start)
    assert rings is not None
    check_disjoint(rings, linked)
    source, destination = data.draw(st.sampled_from(np.argwhere(linked).tolist()))
    linked[source, destination] = False
    for count in range(1, len(start) + 1):
        fewer = disjoint_rings(linked, count, time_limit_s=0.02, start=start)
        if fewer is not None:
            assert len(fewer) == count
            check_disjoint(fewer, linked)


@given(st.integers(5, 20), st.data(), seeds)
def test_edges_of_degree_four_are_two_hamiltonian_cycles(n: int, data: st.DataObject, seed: int) -> None:
    """Connected Cayley graphs of degree 4 on abelian groups all are (Bermond, Favaron, Maheo 1989)."""
    one, other = data.draw(st.lists(st.integers(1, (n - 1) // 2), min_size=2, max_size=2, unique=True))
    assume(np.gcd.reduce([one, other, n]) == 1)
    linked = circulant(n, (one, -one, other, -other)).linked_pairs
    order = np.random.default_rng(seed).permutation(n)
    renamed = linked[np.ix_(order, order)]
    cycles = hamiltonian_cycles_both_ways(renamed, 20.0, Random(seed))
    assert cycles is not None
    check_disjoint(np.concatenate([cycles, np.roll(cycles[:, ::-1], 1, axis=1)]), renamed)


@pytest.mark.parametrize("seed", [16, 18, 31])
def test_directions_from_which_no_swaps_lead_to_hamiltonian_cycles_are_drawn_anew(seed: int) -> None:
    linked = circulant(18, (7, -7, 5, -5)).linked_pairs
    order = np.random.default_rng(seed).permutation(18)
    assert hamiltonian_cycles_both_ways(linked[np.ix_(order, order)], 20.0, Random(seed)) is not None


# All rings


@given(digraphs(), st.integers(0, 130))
def test_every_ring_is_listed_or_there_are_too_many(linked: BoolArray, most: int) -> None:
    links = tuple(Link(a, b, 1.0, 0.0) for a, b in np.argwhere(linked).tolist())
    try:
        problem = RingProblem.of(Topology("drawn", len(linked), links))
    except TopologyError:
        return
    rings, found = rings_of(linked), problem.every_ring(most)
    if found is None:  # no more than a number of steps in all are taken
        assert len(rings) > most or len(rings) < 20
        found = problem.every_ring(10**6)
    assert found is not None
    assert sorted(map(tuple, found.tolist())) == sorted(rings)


# Loads and packings


@given(networks(), seeds)
def test_loads_are_those_of_a_count_hop_by_hop(topology: Topology, seed: int) -> None:
    every = rings_of(topology.linked_pairs)
    assume(every)
    random = Random(seed)
    rings = random.choices(every, k=random.randint(1, 5))
    weights = [random.randint(1, 2**40) for _ in rings]
    expected: Counter[int] = Counter()
    for ring, weight in zip(rings, weights, strict=True):
        for constraint, times in passes(topology, ring).items():
            expected[constraint] += weight * times
    loads = constraint_loads(topology, np.array(rings), weights)
    assert loads.tolist() == [expected[at] for at in range(len(topology.constraints))]
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    slowest = min(topology.constraints[at].bandwidth_bytes_per_s / Fraction(load) for at, load in expected.items())
    assert ring_rate_bytes_per_s(topology, np.array(rings), shares) == slowest * sum(weights)


def test_a_shared_capacity_just_above_the_links_does_not_hide_them() -> None:
    """One ring of three hops over links of 1 byte/s and a bus of hardly more than 3: the links limit it."""
    mesh = full_mesh(3, Fraction(1))
    bus = SharedCapacity("bus", 3 + Fraction(1, 10**10), tuple(link.name for link in mesh.links))
    ring = np.array([[0, 1, 2]])
    assert ring_rate_bytes_per_s(replace(mesh, shared=(bus,)), ring, [Fraction(1)]) == 1


@given(st.integers(1, 2**80), st.integers(1, 2**80))
def test_shares_of_any_denominator_are_exact(one: int, other: int) -> None:
    """Both rings pass every port of a switch, one passes each link of a mesh."""
    rings, shares = (
        np.array([[0, 1, 2], [0, 2, 1]], dtype=np.int32),
        (Fraction(one, one + other), Fraction(other, one + other)),
    )
    assert Decomposition(switch(3, 50), rings, 1, "drawn", shares).rate_bytes_per_s == 50
    assert Decomposition(full_mesh(3, 50), rings, 1, "drawn", shares).rate_bytes_per_s == 50 / max(shares)


@given(networks())
def test_a_packing_is_the_best_and_within_every_capacity(topology: Topology) -> None:
    every = rings_of(topology.linked_pairs)
    assume(every)
    packing = best_packing(RingProblem.of(topology), np.array(every))
    assert packing.rate_bytes_per_s == pytest.approx(best_rate(topology, every), rel=1e-9)
    carried: Counter[int] = Counter()
    for ring, share in zip(packing.rings.tolist(), packing.carried.tolist(), strict=True):
        assert share > 0
        for constraint, times in passes(topology, ring).items():
            carried[constraint] += share * times
    for constraint, bandwidth in carried.items():
        assert bandwidth <= float(topology.constraints[constraint].bandwidth_bytes_per_s) * (1 + 1e-9)


@st.composite
def whole_questions(draw: st.DrawFn) -> tuple[Topology, RingProblem, list[Ring], list[int], int]:
    """A network with some rings, how often each of its constraints may be used, and how many rings are wanted."""
    topology = draw(networks(4))
    rings = rings_of(topology.linked_pairs)
    assume(rings)
    problem = RingProblem.of(topology)
    some = st.lists(st.integers(0, 3), min_size=len(problem.bandwidths), max_size=len(problem.bandwidths))
    return topology, problem, rings, draw(some), draw(st.integers(1, 3))


def fits(problem: RingProblem, rings: tuple[Ring, ...], capacities: list[int]) -> bool:
    table = problem.uses.toarray()
    used = sum(table[:, problem.arc_at[hop]] for ring in rings for hop in hops(ring))
    return bool((used <= np.array(capacities)).all())


@given(whole_questions())
@settings(max_examples=60)
def test_whole_rings_within_capacities_are_found_exactly_where_there_are_some(
    question: tuple[Topology, RingProblem, list[Ring], list[int], int],
) -> None:
    """By mixed-integer programming and by CP-SAT, against all choices."""
    _, problem, rings, capacities, count = question
    possible = any(fits(problem, each, capacities) for each in combinations_with_replacement(rings, count))
    by_solver = rings_within(problem, capacities, count, 10.0)
    for found in (whole_packing(problem, np.array(rings), capacities, count), by_solver):
        assert isinstance(found, np.ndarray) == possible
        if isinstance(found, np.ndarray):
            chosen = tuple(tuple(ring) for ring in found.tolist())
            assert len(chosen) == count
            assert set(chosen) <= set(rings)
            assert fits(problem, chosen, capacities)
    assert possible or by_solver is Answer.IMPOSSIBLE


@given(networks(5), seeds)
@settings(max_examples=40)
def test_the_cheapest_ring_and_its_proof(topology: Topology, seed: int) -> None:
    """No ring costs less than what is said, and that is no less than the cost of the ring but for rounding."""
    problem = RingProblem.of(topology)
    costs = np.random.default_rng(seed).choice([0.0, 1 / 3, 0.123456789, 1.0], len(problem.arcs))
    ring, least = cheapest_ring(problem, costs, 10.0)
    every = [sum(costs[problem.arc_at[hop]] for hop in hops(each)) for each in rings_of(topology.linked_pairs)]
    if not every:
        assert ring is None
        assert least == float("inf")
        return
    assert ring is not None
    cost = sum(costs[problem.arc_at[hop]] for hop in hops(ring.tolist()))
    assert least - 1e-12 <= min(every) <= cost + 1e-12
    assert cost == pytest.approx(least, abs=1e-10)


# Shares

awkward_parts = st.lists(
    st.one_of(
        st.floats(1e-9, 1.0),
        st.sampled_from([1.0, 0.5, 1 / 3, 1 / 199, 0.1 + 1e-13, 1e-9, 0.0497123, 1e-3 + 1e-12, 7e-8]),
    ),
    min_size=1,
    max_size=12,
)


def shares_of(carried: list[float]) -> dict[int, Fraction]:
    """The share of each ring that is kept, where ring j carries `carried[j]`."""
    numbers = np.arange(len(carried))[:, None]
    rings, shares = with_exact_shares(Packing(numbers, np.array(carried), np.empty(0), numbers))
    return dict(zip(rings.ravel().tolist(), shares, strict=True))


@given(awkward_parts, st.sampled_from([1.0, 50e9, 1e-3]))
def test_shares_are_those_given_and_sum_to_one(parts: list[float], unit: float) -> None:
    """No share exceeds what was given by more than the rounding that `proved_optimal` forgives: else a link would."""
    carried = [part * unit for part in parts]
    whole, shares = sum(map(Fraction, carried)), shares_of(carried)
    assert sum(shares.values()) == 1
    assert min(shares.values()) > 0
    for ring, part in enumerate(carried):
        share, given_share = shares.get(ring, Fraction(0)), Fraction(part) / whole
        assert abs(share - given_share) <= 1e-9
        assert share <= given_share * (1 + Fraction(1, 10**9))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.lists(st.floats(-1e-14, 1e-14), min_size=8))
def test_small_fractions_are_seen_through_rounding(weights: list[int], noise: list[float]) -> None:
    carried = [weight * (1 + each) / 7 for weight, each in zip(weights, noise, strict=False)]
    assert shares_of(carried) == {ring: Fraction(weight, sum(weights)) for ring, weight in enumerate(weights)}


@pytest.mark.parametrize("bandwidth", ["1B/s", "20B/s", "1kB/s", "1.23456MB/s", "0.0497123GB/s", "13GB/s"])
@pytest.mark.parametrize("world_size", [5, 8])
def test_a_link_that_nearly_failed_costs_no_more_than_itself(world_size: int, bandwidth: str) -> None:
    """What enters rank 0 can be reached, however slow one of its links is."""
    found = decompose(with_links(full_mesh(world_size), [f"0-3={bandwidth}"]))
    check(found)
    assert found.rate_bytes_per_s >= (world_size - 2) * 50 * 10**9 * (1 - Fraction(1, 10**9))
    assert found.proved_optimal


# Whole searches


@given(networks())
@settings(max_examples=100)
def test_the_rate_is_the_optimum_over_all_rings(topology: Topology) -> None:
    check_best(topology)


@given(st.one_of(networks(4), link_graphs(4)), st.sampled_from([1, 2]))
@settings(max_examples=100)
def test_rings_of_a_fold_keep_it_and_carry_as_much_as_any(topology: Topology, fold: int) -> None:
    """As `decompose` promises: equal rings, no pair used more often, the limit reached; else there are none."""
    try:
        found = decompose(topology, fold=fold)
    except NoDecompositionError as error:
        told = str(error)
        assert told.splitlines() == [told]
        assert not has_equal_rings(topology, fold)
        return
    check(found)
    assert found.fold <= fold
    assert len(set(found.shares)) == 1
    assert found.proved_optimal


def has_equal_rings(topology: Topology, fold: int) -> bool:
    """Whether some rings carry the narrowest cut in equal shares and use no pair more often, by trying all choices."""
    every = [(passes(topology, ring), hops(ring)) for ring in rings_of(topology.linked_pairs)]
    limit = ring_cut(topology).bandwidth_bytes_per_s

    def completes(count: int, first: int, rooms: dict[int, int], pairs: Counter[tuple[int, int]]) -> bool:
        for at, (passed, hopped) in enumerate(every[first:], start=first) if count else ():
            left = {each: room - passed[each] for each, room in rooms.items()}
            used = pairs + Counter(hopped)
            if min(left.values()) >= 0 and max(used.values()) <= fold and completes(count - 1, at, left, used):
                return True
        return count == 0

    return any(
        completes(
            count, 0, {at: rooms_of(each, limit / count) for at, each in enumerate(topology.constraints)}, Counter()
        )
        for count in range(1, fold * (topology.world_size - 1) + 1)
    )


def rooms_of(constraint: Constraint, rate_bytes_per_s: Fraction) -> int:
    """How many rings of a rate a constraint carries."""
    return int(Fraction(constraint.bandwidth_bytes_per_s) / rate_bytes_per_s)


@pytest.mark.parametrize(("inside", "nic_bandwidth"), [("full-mesh", 1), ("full-mesh", 2), ("switch", 1)])
def test_nodes_of_three_have_one_fold_rings_unless_nics_are_the_limit(
    inside: Literal["full-mesh", "switch"], nic_bandwidth: int
) -> None:
    """K*_3 has no three paths that share no pair; that matters only where rings need all of them to fill the NICs."""
    topology = nodes(2, 3, inside, link_bandwidth_bytes_per_s=1, nic_bandwidth_bytes_per_s=nic_bandwidth)
    nics_limit = ring_cut(topology).bandwidth_bytes_per_s == 3 * nic_bandwidth
    assert nics_limit == (inside == "full-mesh" and nic_bandwidth == 1)
    if nics_limit:
        with pytest.raises(NoDecompositionError, match=r"proved impossible|no 3 Hamiltonian paths"):
            decompose(topology, fold=1)
    else:
        found = decompose(topology, fold=1)
        check(found)
        assert found.fold == 1
        assert found.proved_optimal


@given(link_graphs(5), st.integers(1, 3))
@settings(max_examples=60)
def test_so_many_lanes_are_the_best_so_many(topology: Topology, lanes: int) -> None:
    every = rings_of(topology.linked_pairs)
    assume(0 < len(every) <= 12)
    found = decompose(topology, lanes=lanes)
    check(found)
    best = max(best_rate(topology, list(chosen)) for chosen in combinations(every, min(lanes, len(every))))
    assert len(found.rings) <= lanes
    assert float(found.rate_bytes_per_s) == pytest.approx(best, rel=1e-8)
    assert found.proved_optimal


def test_a_slightly_faster_ring_is_the_best_of_one_lane() -> None:
    """Bandwidths that differ in the fifth digit: the best ring is that whose slowest link is fastest."""
    random = Random(0)
    for _ in range(10):
        links = [Link(a, b, 50e9 * (1 + random.randrange(12) * 1e-5), 0.0) for a, b in permutations(range(4), 2)]
        topology = Topology("nearly alike", 4, tuple(links))
        found = decompose(topology, lanes=1)
        bandwidths = {(link.source, link.destination): link.bandwidth_bytes_per_s for link in links}
        rings = rings_of(topology.linked_pairs)
        assert found.rate_bytes_per_s == max(min(bandwidths[hop] for hop in hops(ring)) for ring in rings)
        assert found.proved_optimal


def test_a_solver_that_fails_has_proved_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS now and then ends with an error of its own; that is neither rings nor a proof that there are none."""

    def failing(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(x=None, status=4, success=False, message="Solve error")

    monkeypatch.setattr(packing, "milp", failing)
    problem = RingProblem.of(full_mesh(4))
    rings = problem.every_ring(6)
    assert rings is not None
    with pytest.raises(Exception, match="Solve error"):
        whole_packing(problem, rings, [1] * 12, 2)


def test_the_best_two_where_presolving_fails() -> None:
    """Bandwidths on which HiGHS 1.12 ends with an error while it presolves the choice of two rings."""
    bandwidths = {
        (0, 1): 0.1930856028223477, (0, 2): 0.874643041786132, (0, 3): 0.7541892633914158, (1, 0): 0.11082986631564744,
        (1, 2): 0.6115446037847517, (1, 3): 0.0794611638962625, (2, 0): 0.49911163423219346, (2, 1): 0.8848721602427077,
        (2, 3): 0.9250437342046808, (3, 0): 0.8108633324359669, (3, 1): 0.938807385619295, (3, 2): 0.14258159424433337,
    }  # fmt: skip
    topology = Topology("drawn", 4, tuple(Link(a, b, each, 0.0) for (a, b), each in bandwidths.items()))
    every = rings_of(topology.linked_pairs)
    best = max(best_rate(topology, list(chosen)) for chosen in combinations(every, 2))
    found = decompose(topology, lanes=2)
    assert float(found.rate_bytes_per_s) == pytest.approx(best, rel=1e-9)
    assert found.proved_optimal


@given(link_graphs())
@settings(max_examples=50)
def test_rings_added_one_by_one_are_as_good_as_all_rings(topology: Topology) -> None:
    """The search for many ranks, on few: without listing all rings it proves the same optimum."""
    with settings_of(ring_search, MOST_LISTED=0, FIRST_LOOK_S=0.02):
        check_best(topology)


def unbalanced(small: int, large: int, cycle: int) -> Topology:
    """Links both ways between two sides of unequal size, and one way along a cycle within the larger one.

    A ring has to use large - small links of that cycle, so that rings carry cycle / (large - small) at most.
    """
    between = [link for a in range(small) for b in range(small, small + large) for link in both_ways(a, b, 1, 0)]
    within = [Link(small + place, small + (place + 1) % cycle, 1, 0) for place in range(cycle)]
    return Topology("unbalanced", small + large, (*between, *within))


@pytest.mark.parametrize(("small", "large", "cycle"), [(6, 9, 4), (6, 8, 3), (6, 11, 6)])
def test_an_optimum_below_the_cut_is_proved_by_prices(small: int, large: int, cycle: int) -> None:
    found = decompose(unbalanced(small, large, cycle))
    check(found)
    assert found.rate_bytes_per_s == Fraction(cycle, large - small)
    assert found.proved_optimal


def test_a_faster_link_takes_nothing_away() -> None:
    """A torus has four rings that share no link; that one link is twice as fast does not change that."""
    for shape in ((3, 3), (4, 4)):
        found = decompose(with_links(torus(shape), ["0-1=100GB/s"]), fold=1)
        check(found)
        assert (len(found.rings), found.fold) == (4, 1)


def test_two_nodes_behind_one_slow_link_have_a_ring() -> None:
    """Any one ring fills the link between two switches, so K*_6 having no five disjoint rings does not matter."""
    ports = [link for rank in range(6) for link in both_ways(rank, "left" if rank < 3 else "right", 50, 0)]
    found = decompose(Topology("two switches", 6, (*ports, *both_ways("left", "right", 25, 0))), fold=1)
    check(found)
    assert found.rate_bytes_per_s == 25
    assert found.fold == 1


# Without OR-tools

SEARCHED = [
    unbalanced(4, 6, 3),
    unbalanced(6, 9, 4),
    without_links(torus((4, 4)), ["0-1"]),
    with_links(nodes(2, 4), ["0-1=10GB/s"]),
    hypercube(4),
]


@pytest.mark.parametrize("topology", SEARCHED, ids=lambda each: each.name)
def test_without_or_tools_rings_are_right_and_what_is_not_proved_is_said(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_search, "is_installed", lambda: False)
    found = decompose(topology, time_limit_s=1.0)
    check(found)
    assert found.proved_optimal != ("not proved optimal" in found.reason)
    try:
        check(decompose(topology, fold=1, time_limit_s=1.0))
    except NoDecompositionError as error:
        told = str(error)
        reasons = ("not found in time", "proved impossible", "no number of equal rings")
        assert any(reason in told for reason in reasons), told


@given(link_graphs(5))
@settings(max_examples=25)
def test_without_or_tools_few_ranks_searched_as_if_many(topology: Topology) -> None:
    every = rings_of(topology.linked_pairs)
    with (
        settings_of(ring_search, MOST_LISTED=0, FIRST_LOOK_S=0.02),
        settings_of(exact_search, is_installed=lambda: False),
    ):
        try:
            found = decompose(topology, time_limit_s=0.1)
        except NoDecompositionError as error:
            told = str(error)
            assert "none was proved impossible" in told
            assert not every
            return
    check(found)
    assert float(found.rate_bytes_per_s) <= best_rate(topology, every) * (1 + 1e-8)
    assert found.proved_optimal or "not proved optimal" in found.reason


# Time and progress


class FakeSearches:
    """Searches that find nothing and take, on a clock of their own, a part of the time that they are given.

    `events` are, in order, what was said and which searches began: name, when, and how long they may take.
    """

    def __init__(self, patch: pytest.MonkeyPatch, part: float, patching_s: float) -> None:
        self.now_s = 0.0
        self.part = part
        self.events: list[str | tuple[str, float, float]] = []
        patch.setattr(time, "monotonic", lambda: self.now_s)
        patch.setattr(decomposition, "Patience", lambda limit_s, say: Patience(limit_s, say, self.now_s))
        patch.setattr(exact_search, "rings_within", self._taking_part("CP-SAT", Answer.UNKNOWN))
        patch.setattr(exact_search, "cheapest_ring", self._taking_part("CP-SAT for one ring", (None, 0.0)))
        for module in (ring_search, few_rings):
            patch.setattr(module, "disjoint_rings", self._taking_part("switching", None))
        patched = Patching.__call__

        def patching(patching: Patching, costs: npt.NDArray[np.float64]) -> IntArray | None:
            self.now_s += patching_s
            return patched(patching, costs)

        patch.setattr(Patching, "__call__", patching)

    def _taking_part(self, name: str, answer: object) -> Callable[..., object]:
        def search(*arguments: object) -> object:
            limit_s = next(each for each in arguments if isinstance(each, float))
            self.events.append((name, self.now_s, limit_s))
            self.now_s += limit_s * self.part
            return answer

        return search


TIMED = [
    without_links(torus((4, 4)), ["0-1"]),
    with_links(torus((4, 4)), ["0-1=37GB/s"]),
    with_links(nodes(2, 4), ["0-network=37GB/s"]),
    without_links(hypercube(5), ["0-1"]),
]


@pytest.mark.parametrize("topology", TIMED, ids=lambda each: each.name)
@pytest.mark.parametrize("lanes", [None, 2])
def test_no_search_is_given_more_time_than_is_left(
    topology: Topology, lanes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining cycles to a ring takes a second here; a round of such steps may come late, but not one per rank."""
    searches = FakeSearches(monkeypatch, part=1.0, patching_s=1.0)
    monkeypatch.setattr(few_rings, "_SECOND_LOOK_S", 0.1)
    decompose(topology, lanes=lanes, time_limit_s=10.0, say=searches.events.append)
    for event in searches.events:
        if not isinstance(event, str):
            name, began_s, limit_s = event
            assert began_s + limit_s <= 10.0 + 1e-9 or limit_s <= 0.1, name
    assert searches.now_s <= 20.0


@pytest.mark.parametrize("topology", TIMED, ids=lambda each: each.name)
@pytest.mark.parametrize("fold", [None, 1, 2])
def test_before_each_search_something_is_said(
    topology: Topology, fold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take half of the time, also the last one, for any ring at all, where no cycles could be joined."""
    searches = FakeSearches(monkeypatch, part=0.1, patching_s=0.0)
    monkeypatch.setattr(Patching, "__call__", lambda *_: None)
    with contextlib.suppress(NoDecompositionError):
        decompose(topology, fold, time_limit_s=10.0, say=searches.events.append)
    for before, event in pairwise(["", *searches.events]):
        if isinstance(event, str):
            assert event.splitlines() == [event]
        else:
            name, _, limit_s = event
            assert limit_s == 0 or (isinstance(before, str) and before), name


def test_patience_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = Patience(10.0, started_s=5.0)
    for now_s, left_s in ((5.0, 10.0), (9.0, 6.0), (15.0, 0.0), (16.0, 0.0)):
        monkeypatch.setattr(time, "monotonic", lambda now_s=now_s: now_s)
        assert patience.left_s == left_s


@pytest.mark.parametrize("limit_s", [0.0, 0.01, 0.02, 0.05, 0.1])
def test_little_time_is_no_interrupt(limit_s: float) -> None:
    """Searches also begin when hardly any time is left; they then end as they always do."""
    problem = RingProblem.of(hypercube(6))
    answer = rings_within(problem, [1] * len(problem.bandwidths), 6, limit_s)
    assert answer is Answer.UNKNOWN or isinstance(answer, np.ndarray)
    costs = np.random.default_rng(0).random(len(problem.arcs))
    ring, least = cheapest_ring(problem, costs, limit_s)
    assert (
        0 <= least <= (costs.sum() if ring is None else sum(costs[problem.arc_at[hop]] for hop in hops(ring.tolist())))
    )


# Ctrl-C

BUSY = """
from tasp_lab.builders import hypercube
from tasp_lab.exact_search import rings_within
from tasp_lab.ring_problem import RingProblem

cube = RingProblem.of(hypercube(6))
print("ready", flush=True)
rings_within(cube, [1] * len(cube.bandwidths), 6, 60.0)
"""


def test_ctrl_c_is_heard_while_cp_sat_searches() -> None:
    """The solver needs more than a minute for six rings of the 6-cube; the process ends as Python does on Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        interrupted_s = time.monotonic()
        _, told = process.communicate(timeout=30)
    assert time.monotonic() - interrupted_s < 5
    assert process.returncode == -signal.SIGINT
    assert told.splitlines()[-1] == "KeyboardInterrupt"


# The same every time

AGAIN = """
import sys
from tests.test_ring_search import digest_of_decompositions

print(digest_of_decompositions())
"""

REPEATED = [
    full_mesh(6),
    switch(5),
    circulant(9, (1, 2, 4)),
    hypercube(5),
    with_links(full_mesh(8), ["0-3=13GB/s"]),
    with_links(bidirectional_ring(5), ["0-1=100GB/s"]),
    with_links(nodes(2, 4), ["0-1=10GB/s"]),
    without_links(nodes(3, 4, "switch"), ["0-network"]),
    nodes(3, 3, "switch", "rails"),
    unbalanced(6, 9, 4),
]


def digest_of_decompositions() -> str:
    """A few characters for each of the decompositions, which tell them apart."""
    digests = []
    for topology in REPEATED:
        found = decompose(topology)
        told = f"{found.rings.tolist()} {found.shares} {found.reason} {found.ring_limit_bytes_per_s}"
        digests.append(hashlib.sha256(told.encode()).hexdigest()[:6])
    return " ".join(digests)


def test_rings_are_the_same_in_every_process() -> None:
    """Whatever the seed of hashes, and however the threads of a solver take turns."""
    told = {digest_of_decompositions()}
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-c", AGAIN], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        told.add(run.stdout.strip())
    assert len(told) == 1
