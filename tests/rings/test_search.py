"""The parts of the search for rings, each against a slower way to the same answer, and what holds of any search."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, permutations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.choices import DEFAULT_SEARCH_BUDGET
from tasp_lab.core.errors import NoDecompositionError, TopologyError
from tasp_lab.rings import cp_sat as exact_search
from tasp_lab.rings import fractional_packing
from tasp_lab.rings import search as ring_search
from tasp_lab.rings.cp_sat import IMPOSSIBLE, NOT_FOUND, rings_within
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.factors import disjoint_rings, random_factors, regular_part, undirected_hamiltonian_cycles
from tasp_lab.rings.fractional_packing import (
    Packing,
    Patching,
    best_packing,
    integral_packing,
    least_cost,
    with_exact_shares,
)
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.rings import RELATIVE_TOLERANCE, Decomposition, constraint_loads, ring_rate_bytes_per_s
from tasp_lab.rings.search_budget import SearchBudget
from tasp_lab.topology.builders import bidirectional_ring, circulant, full_mesh, hypercube, nodes, switch, torus
from tasp_lab.topology.cuts import ring_cut
from tasp_lab.topology.graph import Constraint, Link, SharedCapacity, Topology, Vertex, both_ways
from tests.rings.test_decompose import check
from tests.support.links import with_links, without_links
from tests.support.routes import direct
from tests.support.signals import hear_interrupts

ROOT = Path(__file__).parents[2]

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
def networks(draw: st.DrawFn, max_ranks: int = 5) -> Topology:
    """Few ranks and switches, links of unequal bandwidth, capacities that links share; most ranks are on a cycle."""
    world_size = draw(st.integers(2, max_ranks))
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


def check_best(topology: Topology) -> None:
    """Rings that are proved to carry as much as all rings can, or a refusal where there is no ring."""
    every = rings_of(topology.linked_pairs)
    if not every:
        with pytest.raises(NoDecompositionError, match="has no ring at all"):
            decompose(direct(topology))
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
    rings = disjoint_rings(linked, count, SearchBudget(20_000))
    if rings is not None:
        assert rings.shape == (count, len(linked))
        check_disjoint(rings, linked)


@given(digraphs_of_rings(), st.data())
@settings(max_examples=60)
def test_switching_from_given_rings(case: tuple[BoolArray, IntArray], data: st.DataObject) -> None:
    """All of the given rings that the digraph has are an answer; those it lacks an arc of are no hindrance."""
    linked, start = case
    check_disjoint(start, linked)
    rings = disjoint_rings(linked, len(start), SearchBudget(20_000), start)
    assert rings is not None
    check_disjoint(rings, linked)
    source, destination = data.draw(st.sampled_from(np.argwhere(linked).tolist()))
    linked[source, destination] = False
    for count in range(1, len(start) + 1):
        fewer = disjoint_rings(linked, count, SearchBudget(20_000), start)
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
    cycles = undirected_hamiltonian_cycles(renamed, SearchBudget(2 * 10**7), Random(seed))
    assert cycles is not None
    check_disjoint(np.concatenate([cycles, np.roll(cycles[:, ::-1], 1, axis=1)]), renamed)


@pytest.mark.parametrize("seed", [16, 18, 31])
def test_directions_from_which_no_swaps_lead_to_hamiltonian_cycles_are_drawn_anew(seed: int) -> None:
    linked = circulant(18, (7, -7, 5, -5)).linked_pairs
    order = np.random.default_rng(seed).permutation(18)
    assert (
        undirected_hamiltonian_cycles(linked[np.ix_(order, order)], SearchBudget(2 * 10**7), Random(seed)) is not None
    )


# All rings


@given(digraphs(), st.integers(0, 130))
def test_every_ring_is_listed_or_there_are_too_many(linked: BoolArray, most: int) -> None:
    links = tuple(Link(a, b, 1.0, 0.0) for a, b in np.argwhere(linked).tolist())
    try:
        problem = RingProblem.of(Topology("drawn", len(linked), links))
    except TopologyError:
        return
    rings, found = rings_of(linked), problem.all_rings(most)
    if found is None:  # no more than a number of steps in all are taken
        assert len(rings) > most or len(rings) < 20
        found = problem.all_rings(10**6)
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
    by_solver, note = rings_within(problem, capacities, count, SearchBudget(10**7))
    for found in (integral_packing(problem, np.array(rings), capacities, count), by_solver):
        assert isinstance(found, np.ndarray) == possible
        if isinstance(found, np.ndarray):
            chosen = tuple(tuple(ring) for ring in found.tolist())
            assert len(chosen) == count
            assert set(chosen) <= set(rings)
            assert fits(problem, chosen, capacities)
    assert possible or note == IMPOSSIBLE


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

    def completes(count: int, first: int, buffers: dict[int, int], pairs: Counter[tuple[int, int]]) -> bool:
        for at, (passed, hopped) in enumerate(every[first:], start=first) if count else ():
            left = {each: buffer - passed[each] for each, buffer in buffers.items()}
            used = pairs + Counter(hopped)
            if min(left.values()) >= 0 and max(used.values()) <= fold and completes(count - 1, at, left, used):
                return True
        return count == 0

    return any(
        completes(
            count, 0, {at: buffers_of(each, limit / count) for at, each in enumerate(topology.constraints)}, Counter()
        )
        for count in range(1, fold * (topology.world_size - 1) + 1)
    )


def buffers_of(constraint: Constraint, rate_bytes_per_s: Fraction) -> int:
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

    monkeypatch.setattr("scipy.optimize.milp", failing)
    problem = RingProblem.of(full_mesh(4))
    rings = problem.all_rings(6)
    assert rings is not None
    with pytest.raises(Exception, match="Solve error"):
        integral_packing(problem, rings, [1] * 12, 2)


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


@pytest.mark.parametrize(("node_count", "ranks"), [(2, 8), (3, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("nic", [40, 94, 250])
def test_what_rings_by_formula_leave_of_nics_takes_few_more_rings(node_count: int, ranks: int, nic: int) -> None:
    """Rings by formula fill the ports and not the NICs: one more over all NICs reaches the cut, ports and NICs."""
    topology = nodes(
        node_count, ranks, "switch", link_bandwidth_bytes_per_s=345, nic_bandwidth_bytes_per_s=nic, nic_latency_s=0
    )
    found = decompose(topology)
    check(found)
    assert found.proved_optimal
    assert len(found.rings) <= ranks + 2


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
    found = decompose(topology, search_budget=10**6)
    check(found)
    assert found.proved_optimal != ("not proved optimal" in found.reason)
    try:
        check(decompose(topology, fold=1, search_budget=10**6))
    except NoDecompositionError as error:
        told = str(error)
        reasons = ("not found within the search budget", "proved impossible", "no number of equal rings")
        assert any(reason in told for reason in reasons), told


@given(link_graphs(5), st.booleans())
@settings(max_examples=50)
def test_few_ranks_searched_as_if_many(topology: Topology, solver: bool) -> None:
    """Without listing all rings: what is found is right, and what is said to be proved is."""
    every = rings_of(topology.linked_pairs)
    with (
        settings_of(ring_search, MAX_LISTED=0, SWITCHING_OPERATIONS=20_000),
        settings_of(exact_search, is_installed=lambda: solver),
    ):
        try:
            found = decompose(direct(topology), search_budget=10**5)
        except NoDecompositionError as error:
            told = str(error)
            assert "no ring at all" in told or "nor proved impossible" in told
            assert not every
            forwarded = decompose(topology, search_budget=10**5)
            check(forwarded)
            assert forwarded.reason.startswith(f"one ring, in which ranks forward: {told}")
            assert forwarded.search_complete == ("no ring at all" in told)
            return
    check(found)
    best = best_rate(topology, every)
    assert float(found.rate_bytes_per_s) <= best * (1 + 1e-8)
    assert float(found.ring_limit_bytes_per_s) >= best * (1 - 1e-8)
    assert found.proved_optimal or "not proved optimal" in found.reason


@given(networks(5), seeds)
@settings(max_examples=40)
def test_no_ring_costs_less_than_the_least_cost(topology: Topology, seed: int) -> None:
    problem = RingProblem.of(topology)
    costs = np.random.default_rng(seed).choice([0.0, 1 / 3, 0.123456789, 1.0], len(problem.arcs))
    every = [sum(costs[problem.arc_at[hop]] for hop in hops(each)) for each in rings_of(topology.linked_pairs)]
    assert 0 <= least_cost(problem, costs) <= min(every, default=float("inf")) + 1e-12


# Budgets and progress


class FakeSearches:
    """Searches that find nothing and use a part of the budget that they are given.

    `events` are, in order, what was reported and which searches began: name, and how much work they may do.
    """

    def __init__(self, patch: pytest.MonkeyPatch, part: Fraction) -> None:
        self.part = part
        self.events: list[str | tuple[str, int]] = []
        patch.setattr(exact_search, "rings_within", self._using_part("CP-SAT", (None, NOT_FOUND)))
        for module in (ring_search, fractional_packing):
            patch.setattr(module, "disjoint_rings", self._using_part("switching", None))

    def _using_part(self, name: str, answer: object) -> Callable[..., object]:
        def search(*arguments: object) -> object:
            budget = next(each for each in arguments if isinstance(each, SearchBudget))
            self.events.append((name, budget.left))
            budget.spend(int(budget.left * self.part))
            return answer

        return search

    @property
    def granted(self) -> list[int]:
        return [event[1] for event in self.events if not isinstance(event, str)]


SEARCHED_LONG = [
    without_links(torus((4, 4)), ["0-1"]),
    with_links(torus((4, 4)), ["0-1=37GB/s"]),
    with_links(nodes(2, 4), ["0-network=37GB/s"]),
    without_links(hypercube(5), ["0-1"]),
]


@pytest.mark.parametrize("topology", SEARCHED_LONG, ids=lambda each: each.name)
@pytest.mark.parametrize("lanes", [None, 2])
def test_searches_use_no_more_than_the_budget(
    topology: Topology, lanes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every search uses all that it is given here, so that all together must not be given more than there is."""
    searches = FakeSearches(monkeypatch, part=Fraction(1))
    decompose(topology, lanes=lanes, search_budget=10**6, progress=searches.events.append)
    assert searches.events
    assert sum(searches.granted) <= 10**6


@pytest.mark.parametrize("topology", SEARCHED_LONG, ids=lambda each: each.name)
@pytest.mark.parametrize("fold", [None, 1, 2])
def test_before_each_search_something_is_said(
    topology: Topology, fold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each uses a tenth of its budget, also the last one, for any ring at all, where no cycles could be joined."""
    searches = FakeSearches(monkeypatch, part=Fraction(1, 10))
    monkeypatch.setattr(Patching, "__call__", lambda *_: None)
    with contextlib.suppress(NoDecompositionError):
        decompose(topology, fold, search_budget=10**7, progress=searches.events.append)
    for before, event in pairwise(["", *searches.events]):
        if isinstance(event, str):
            assert event.splitlines() == [event]
        else:
            name, budget = event
            assert isinstance(before, str), name
            assert f"{budget:,} operations" in before, name


@given(st.integers(1, 10**6), st.lists(st.tuples(st.sampled_from(["half", "at most"]), st.integers(0, 10**6))))
def test_a_part_of_a_budget_uses_the_whole(operations: int, parts: list[tuple[str, int]]) -> None:
    """What parts use is used of the whole, which never goes below 0; only a part that the whole limits ends it."""
    budget = SearchBudget(operations)
    for kind, spent in parts:
        before = budget.left
        part = budget.half() if kind == "half" else budget.at_most(spent + 1)
        assert part.left == (before // 2 if kind == "half" else min(spent + 1, before))
        granted = part.left
        part.spend(spent)
        assert before - budget.left == granted - part.left == min(spent, granted)
        more = part.allows_more()
        assert more == (spent < granted)
        assert part.ran_out == (not more)


@pytest.mark.parametrize(("cap", "limited_by_the_whole"), [(4, False), (5, False), (6, True)])
def test_a_part_with_a_cap_of_its_own_does_not_say_that_the_whole_ran_out(cap: int, limited_by_the_whole: bool) -> None:
    """A larger budget would not change what such a part finds."""
    budget = SearchBudget(5)
    budget.at_most(cap).half().exhaust()
    assert budget.ran_out == limited_by_the_whole


@pytest.mark.parametrize("operations", [1, 10_000, 20_000, 50_000, 100_000])
def test_a_small_budget_is_no_interrupt(operations: int) -> None:
    """Searches also begin when hardly any budget is left; they then end as they always do."""
    problem = RingProblem.of(hypercube(6))
    rings, note = rings_within(problem, [1] * len(problem.bandwidths), 6, SearchBudget(operations))
    assert rings is not None or note == NOT_FOUND


# The laws of a search


BUDGETS = [1, 3_000, 10_000, 30_000, 100_000, 300_000]

drawn_bandwidths = st.sampled_from([Fraction(5), Fraction(37, 5), Fraction(50)])


@st.composite
def lattices(draw: st.DrawFn) -> Topology:
    """Small networks with a link that is missing or slow, for which there is no closed form."""
    topology = draw(st.sampled_from([torus((3, 4)), torus((4, 4)), hypercube(4), full_mesh(7), nodes(2, 4)]))
    link = draw(st.sampled_from(topology.links))
    slow = draw(drawn_bandwidths)
    return with_links(topology, [f"{link.source}>{link.destination}={float(slow)}GB/s"])


@given(lattices(), st.sampled_from([None, 1, 3]), st.booleans())
@settings(max_examples=12)
def test_a_larger_budget_never_finds_less(topology: Topology, lanes: int | None, solver: bool) -> None:
    """The rate never falls with the budget, with and without OR-tools; complete searches all find the same."""
    best, complete = Fraction(0), None
    with settings_of(exact_search, is_installed=lambda: solver), settings_of(ring_search, MAX_LISTED=0):
        for operations in BUDGETS:
            try:
                found = decompose(topology, lanes=lanes, search_budget=operations)
            except NoDecompositionError:
                assert not best, operations
                continue
            assert found.rate_bytes_per_s >= best * (1 - Fraction(RELATIVE_TOLERANCE)), operations
            best = max(best, found.rate_bytes_per_s)
            same = found.rings.tolist(), found.shares
            assert complete in (None, same), operations
            complete = same if found.search_complete else complete


@given(lattices(), st.sampled_from(BUDGETS), st.sampled_from([0.25, 8.0, 2.0**20]))
@settings(max_examples=10)
def test_links_faster_by_a_power_of_two_have_the_same_rings(topology: Topology, operations: int, factor: float) -> None:
    """Nothing is rounded then, so that every search does the same, whatever its budget."""
    once, again = (decompose(each, search_budget=operations) for each in (topology, topology.scaled(factor)))
    assert again.rate_bytes_per_s == once.rate_bytes_per_s * Fraction(factor)
    assert (again.rings == once.rings).all()
    assert (again.shares, again.search_complete) == (once.shares, once.search_complete)


@given(link_graphs(5), st.sampled_from([1 / 3, 7.0, 1e6]))
@settings(max_examples=30)
def test_links_faster_by_a_factor_carry_more_by_that_factor(topology: Topology, factor: float) -> None:
    try:
        once = decompose(topology)
    except NoDecompositionError:
        return
    again = decompose(topology.scaled(factor))
    assert once.proved_optimal
    assert again.proved_optimal
    assert float(again.rate_bytes_per_s / once.rate_bytes_per_s) == pytest.approx(factor, rel=1e-8)


@given(link_graphs(5), st.data())
@settings(max_examples=40)
def test_another_link_takes_nothing_away(topology: Topology, data: st.DataObject) -> None:
    """Of rings that are proved the best: whatever they are, they also exist with one link more."""
    missing = [pair for pair in permutations(range(topology.world_size), 2) if not topology.linked_pairs[pair]]
    assume(missing)
    source, destination = data.draw(st.sampled_from(missing))
    link = Link(source, destination, data.draw(drawn_bandwidths), 0)
    more = Topology("one link more", topology.world_size, (*topology.links, link))
    try:
        before = decompose(direct(topology))
    except NoDecompositionError:
        return
    after = decompose(more)
    assert before.proved_optimal
    assert after.proved_optimal
    assert after.rate_bytes_per_s >= before.rate_bytes_per_s * (1 - Fraction(RELATIVE_TOLERANCE))


def test_a_search_that_its_budget_ended_says_so() -> None:
    """A mesh of nine with a slow link has rings with shares that reach the cut; one operation does not find them."""
    topology = with_links(full_mesh(9), ["0-3=13GB/s"])
    cut_short, whole = (decompose(topology, search_budget=each) for each in (1, DEFAULT_SEARCH_BUDGET))
    assert (cut_short.search_complete, cut_short.proved_optimal) == (False, False)
    assert "a larger search budget may find better ones" in cut_short.reason
    assert whole.proved_optimal
    assert cut_short.rate_bytes_per_s < whole.rate_bytes_per_s
    assert decompose(full_mesh(8), search_budget=1).search_complete


# Ctrl-C

BUSY = """
from tasp_lab.rings import cp_sat as exact_search
from tasp_lab.topology.builders import hypercube
from tasp_lab.rings.cp_sat import rings_within
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.search_budget import SearchBudget

wait = exact_search.wait


def announced_wait(futures, **options):
    print("searching", flush=True)
    return wait(futures, **options)


exact_search.wait = announced_wait
cube = RingProblem.of(hypercube(6))
rings_within(cube, [1] * len(cube.bandwidths), 6, SearchBudget(10**9))
"""


def test_ctrl_c_is_heard_while_cp_sat_searches() -> None:
    """The solver needs more than a minute for six rings of the 6-cube; the process ends as Python does on Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "searching\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert told.splitlines()[-1] == "KeyboardInterrupt"


# The same every time

AGAIN = """
import sys
from tests.rings.test_search import digest_of_decompositions

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
    for topology, operations in itertools.product(REPEATED, (1, 30_000, DEFAULT_SEARCH_BUDGET)):
        found = decompose(topology, search_budget=operations)
        told = f"{found.rings.tolist()} {found.shares} {found.reason} {found.ring_limit_bytes_per_s}"
        digests.append(hashlib.sha256(told.encode()).hexdigest()[:6])
    return " ".join(digests)


def test_rings_are_the_same_in_every_process() -> None:
    """Whatever the seed of hashes, however busy the cores are, and however the threads of a solver take turns."""
    beside_each_other = [
        subprocess.Popen(
            [sys.executable, "-c", AGAIN], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    told = {digest_of_decompositions()} | {process.communicate()[0].strip() for process in beside_each_other}
    assert [process.returncode for process in beside_each_other] == [0, 0]
    assert len(told) == 1
