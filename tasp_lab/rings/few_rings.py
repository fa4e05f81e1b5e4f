"""The best rings for a given maximum number of lanes.

The rate of one ring is at most the fastest link out of, and into, each rank; the rate of k rings is at most k times
that, and at most the narrowest cut. Link-disjoint rings reach this bound on uniform links. Otherwise the best k are
chosen among all rings, or among those of the full decomposition, by mixed-integer programming.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
from scipy.sparse import csr_array, eye_array, hstack, vstack

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.units import Number
from tasp_lab.rings.fractional_packing import best_packing, solve_milp, with_exact_shares
from tasp_lab.rings.link_loads import ring_rate_bytes_per_s
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.rings import Rings, fold_of
from tasp_lab.rings.search_budget import SearchBudget
from tasp_lab.rings.switching import SWITCHING_OPERATIONS, disjoint_rings
from tasp_lab.topology.graph import Topology, Vertex

_SELECTION_OPERATIONS = 5_000_000
"""Operations of the selection among many rings; a branch-and-bound node costs one per entry of the matrix."""

_MAX_CANDIDATES = 200
"""Of more rings than that, those with the largest shares are the candidates."""


def best_few(topology: Topology, known: Rings, lanes: int, ring_limit: Fraction, budget: SearchBudget) -> Rings:
    """At most `lanes` rings; `known` are more, and `ring_limit` bounds the rate of any rings, in bytes/s."""
    limit = min(ring_limit, lanes * max_of_one_ring(topology))
    best, best_rate = None, Fraction(0)
    for rings in _attempts(topology, known, lanes, budget):
        shares = rings.shares or (Fraction(1, len(rings.rings)),) * len(rings.rings)
        rate = ring_rate_bytes_per_s(topology, rings.rings, shares)
        if rate > best_rate:
            best, best_rate = rings, rate
        if rings.limit_bytes_per_s is not None:
            limit = min(limit, max(rings.limit_bytes_per_s, best_rate))
        if best_rate >= limit:
            break
    assert best is not None  # the first attempt always yields rings
    return replace(best, limit_bytes_per_s=limit)


def max_of_one_ring(topology: Topology) -> Fraction:
    """The minimum over all ranks of the fastest link out of, and into, the rank."""
    if topology.table.is_uniform:
        return Fraction(topology.links[0].bandwidth_bytes_per_s)
    fastest: dict[tuple[bool, Vertex], Number] = defaultdict(int)
    for link in topology.links:
        for end in ((False, link.source), (True, link.destination)):
            fastest[end] = max(fastest[end], link.bandwidth_bytes_per_s)
    return Fraction(min(bandwidth for (_, vertex), bandwidth in fastest.items() if isinstance(vertex, int)))


def _attempts(topology: Topology, known: Rings, lanes: int, budget: SearchBudget) -> Iterator[Rings]:
    yield _largest(known, lanes)
    problem = RingProblem.of(topology)
    listed = problem.all_rings(_MAX_CANDIDATES)
    if listed is None and problem.is_uniform:
        part = budget.at_most(SWITCHING_OPERATIONS)
        budget.progress(f"searching for {lanes} link-disjoint rings, within {part.left:,} operations")
        rings = disjoint_rings(problem.linked, lanes, part)
        if rings is not None:
            yield Rings(rings, 1, f"{lanes} rings that share no link")
    if listed is not None:
        chosen, proved = _chosen(problem, listed, lanes, budget)
        limit = ring_rate_bytes_per_s(topology, chosen.rings, chosen.shares) if proved else None
        yield replace(chosen, limit_bytes_per_s=limit)
    else:
        yield _chosen(problem, _largest(known, _MAX_CANDIDATES).rings, lanes, budget)[0]


def _largest(known: Rings, count: int) -> Rings:
    """The rings with the largest shares, with equal shares."""
    order = sorted(range(len(known.rings)), key=lambda ring: -known.shares[ring])[:count]
    return Rings(known.rings[order], fold_of(known.rings[order]), f"{len(order)} of {len(known.rings)}: {known.reason}")


def _chosen(problem: RingProblem, pool: IntArray, lanes: int, budget: SearchBudget) -> tuple[Rings, bool]:
    """The best packing of at most `lanes` rings of a pool, and whether it is proved optimal."""
    from scipy.optimize import Bounds, LinearConstraint

    part = budget.at_most(_SELECTION_OPERATIONS)
    budget.progress(f"choosing {lanes} of {len(pool)} rings, within {part.left:,} operations")
    loads, count = problem.loads(pool), len(pool)
    fastest = problem.relative_bandwidths.max()
    rows = vstack([
        hstack([loads, csr_array((loads.shape[0], count))]),
        hstack([eye_array(count), -fastest * eye_array(count)]),
        csr_array(np.repeat([0.0, 1.0], count)[None]),
    ])  # fmt: skip
    upper = np.concatenate([problem.relative_bandwidths, np.zeros(count), [lanes]])
    result = solve_milp(
        np.repeat([-1.0, 0.0], count),
        integrality=np.repeat([0, 1], count),
        bounds=Bounds(0, np.repeat([np.inf, 1.0], count)),
        constraints=LinearConstraint(rows.tocsr(), ub=upper),
        options={"node_limit": 1 + part.left // rows.nnz, "mip_rel_gap": 0.0},
    )
    part.spend((result.mip_node_count or 0) * rows.nnz)
    if result.status != 0:
        part.exhaust()
    used = np.flatnonzero(result.x[count:] > 0.5) if result.x is not None else np.arange(lanes)
    packing = best_packing(problem, pool[used])
    reason = f"the best {lanes} of {count} rings"
    rings, shares = with_exact_shares(packing)
    return Rings(rings, fold_of(rings), reason, shares), result.status == 0
