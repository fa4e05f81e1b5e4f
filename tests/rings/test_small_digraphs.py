"""Every digraph on two to five vertices, up to the names of the vertices, against a search that shares no code.

A digraph on n vertices is a whole number: bit i says whether its i-th arc is there, of all n (n - 1) in order. The
least number among those of all relabellings stands for the class. Rings are listed as permutations, and the number of
rings that share no arc, the best shares and the narrowest cut are found by trying all rings and all sets of vertices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise, permutations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import linprog

from tasp_lab.core.errors import NoDecompositionError, TopologyError
from tasp_lab.rings.decompose import decompose
from tasp_lab.topology.graph import Link, Topology
from tests.rings.test_decompose import check
from tests.support.routes import direct

Arc = tuple[int, int]
Ring = tuple[int, ...]

CLASSES = {2: 3, 3: 16, 4: 218, 5: 9608}
"""Digraphs on n vertices up to isomorphism: OEIS A000273."""

STRONG_CLASSES = {2: 1, 3: 5, 4: 83, 5: 5048}
"""Those of them in which every vertex reaches every other: OEIS A035512."""

PORTIONS = [(2, 0, 1), (3, 0, 1), (4, 0, 1), *((5, first, 8) for first in range(8))]
"""Vertices, and which classes of them are looked at together: every so many, from the first."""

BANDWIDTH_BYTES_PER_S = Fraction(7, 3)


@cache
def arcs_of(n: int) -> tuple[Arc, ...]:
    return tuple(permutations(range(n), 2))


@cache
def canonical(n: int) -> npt.NDArray[np.int64]:
    """For each digraph the one that stands for its class."""
    arcs = arcs_of(n)
    half = len(arcs) // 2
    least = np.arange(2 ** len(arcs))
    for order in permutations(range(n)):
        places = [arcs.index((order[a], order[b])) for a, b in arcs]
        low, high = moved_bits(places[:half]), moved_bits(places[half:])
        np.minimum(least, (high[:, None] | low).ravel(), out=least)
    return least


def moved_bits(places: list[int]) -> npt.NDArray[np.int64]:
    """All numbers of so many bits, with bit i of each moved to `places[i]`."""
    numbers = np.arange(2 ** len(places))
    return sum(((numbers >> bit & 1) << place for bit, place in enumerate(places)), np.zeros_like(numbers))


def class_numbers(n: int) -> list[int]:
    least = canonical(n)
    numbers: list[int] = np.flatnonzero(least == np.arange(len(least))).tolist()
    return numbers


def arcs_in(n: int, digraph: int) -> list[Arc]:
    return [arc for bit, arc in enumerate(arcs_of(n)) if digraph >> bit & 1]


def number_of(n: int, arcs: list[Arc]) -> int:
    return sum(1 << arcs_of(n).index(arc) for arc in arcs)


def arcs_along(ring: Ring) -> list[Arc]:
    return list(pairwise((*ring, ring[0])))


@cache
def all_rings(n: int) -> tuple[tuple[Ring, int], ...]:
    """Each ring of the complete digraph with the number of its arcs."""
    rings = [(0, *others) for others in permutations(range(1, n))]
    return tuple((ring, number_of(n, arcs_along(ring))) for ring in rings)


def rings_in(n: int, digraph: int) -> list[int]:
    """The rings of a digraph, each as the number of its arcs."""
    return [ring for _, ring in all_rings(n) if ring & ~digraph == 0]


def is_strong(n: int, digraph: int) -> bool:
    """Whether every set of vertices can be left."""
    return cut_limit(n, digraph) > 0


def cut_limit(n: int, digraph: int) -> int:
    """The fewest arcs that leave a set of vertices."""
    arcs = arcs_in(n, digraph)
    sets = (set(inside) for size in range(1, n) for inside in combinations(range(n), size))
    return min(sum(a in inside and b not in inside for a, b in arcs) for inside in sets)


@cache
def max_disjoint(rings: tuple[int, ...]) -> int:
    """The most of these rings of which no two share an arc."""
    if not rings:
        return 0
    first, others = rings[0], rings[1:]
    with_first = 1 + max_disjoint(tuple(ring for ring in others if not ring & first))
    return max(with_first, max_disjoint(others))


@cache
def best_shares(n: int, digraph: int) -> float:
    """What the rings of a digraph carry at best when every arc carries 1, by linear programming over all of them."""
    rings = rings_in(n, digraph)
    passes = [[ring >> arc & 1 for ring in rings] for arc in range(len(arcs_of(n)))]
    result = linprog([-1.0] * len(rings), A_ub=np.array(passes), b_ub=np.ones(len(passes)))
    assert result.fun is not None
    return -result.fun


def best_rate(n: int, rings: list[int]) -> float:
    """The same, worked out once for all digraphs with the same rings under other names."""
    union = int(np.bitwise_or.reduce(rings))
    return best_shares(n, int(canonical(n)[union]))


def topology_of(n: int, digraph: int) -> Topology:
    links = tuple(Link(a, b, BANDWIDTH_BYTES_PER_S, Fraction(0)) for a, b in arcs_in(n, digraph))
    return Topology(f"digraph {n}.{digraph}", n, links)


def strong_classes(n: int, first: int, step: int) -> Iterator[tuple[int, Topology]]:
    for digraph in class_numbers(n)[first::step]:
        if is_strong(n, digraph):
            yield digraph, topology_of(n, digraph)


@pytest.mark.parametrize("n", CLASSES)
def test_there_are_as_many_classes_as_are_known(n: int) -> None:
    numbers = class_numbers(n)
    assert len(numbers) == CLASSES[n]
    assert sum(is_strong(n, digraph) for digraph in numbers) == STRONG_CLASSES[n]


@pytest.mark.parametrize("n", CLASSES)
def test_a_digraph_in_which_not_all_reach_each_other_is_no_topology(n: int) -> None:
    for digraph in class_numbers(n):
        if not is_strong(n, digraph):
            with pytest.raises(TopologyError, match="is not connected: no way from rank 0 to rank"):
                topology_of(n, digraph)


@pytest.mark.parametrize(("n", "first", "step"), PORTIONS)
def test_the_rate_is_the_optimum_over_all_rings(n: int, first: int, step: int) -> None:
    for digraph, topology in strong_classes(n, first, step):
        rings = rings_in(n, digraph)
        if not rings:
            with pytest.raises(
                NoDecompositionError, match=r"has no ring at all: (without rank|the search was exhaustive)"
            ):
                decompose(direct(topology))
            forwarded = decompose(topology)
            check(forwarded)
            assert forwarded.search_complete
            continue
        found = decompose(topology)
        check(found)
        assert float(found.rate_bytes_per_s / BANDWIDTH_BYTES_PER_S) == pytest.approx(best_rate(n, rings), rel=1e-9)
        assert found.proved_optimal
        assert found.ring_limit_bytes_per_s <= cut_limit(n, digraph) * BANDWIDTH_BYTES_PER_S


@pytest.mark.parametrize(("n", "first", "step"), PORTIONS)
def test_one_fold_rings_are_as_many_as_the_cut_allows_or_proved_not_to_exist(n: int, first: int, step: int) -> None:
    for digraph, topology in strong_classes(n, first, step):
        most, limit = max_disjoint(tuple(rings_in(n, digraph))), cut_limit(n, digraph)
        try:
            found = decompose(topology, fold=1)
        except NoDecompositionError as error:
            told = str(error)
            assert max_named(told) == most < limit
            continue
        check(found)
        assert len(found.rings) == limit == most
        assert found.fold == 1
        assert found.proved_optimal


def max_named(message: str) -> int:
    """How many rings that share no arc a message says there are at most."""
    if "no ring at all" in message:
        return 0
    named = re.search(r"has at most (\d+) of|(\d+) link-disjoint rings exist, and no more", message)
    assert named, message
    return int(named[1] or named[2])


@pytest.mark.parametrize("n", CLASSES)
def test_a_ring_needs_no_vertex_that_separates_others(n: int) -> None:
    """The reason for no ring at all is true: without the rank that is named, the others do not reach each other."""
    for digraph, topology in strong_classes(n, 0, 1 if n < 5 else 4):
        if rings_in(n, digraph):
            continue
        with pytest.raises(NoDecompositionError) as error:
            decompose(direct(topology))
        separating = [rank for rank in range(n) if separates(n, digraph, rank)]
        named = re.search(r"without rank (\d+) the others", str(error.value))
        assert int(named[1]) in separating if named else not separating


def separates(n: int, digraph: int, rank: int) -> bool:
    others = [each for each in range(n) if each != rank]
    arcs = [(a, b) for a, b in arcs_in(n, digraph) if rank not in (a, b)]
    sets = (set(inside) for size in range(1, n - 1) for inside in combinations(others, size))
    return any(not any(a in inside and b not in inside for a, b in arcs) for inside in sets)
