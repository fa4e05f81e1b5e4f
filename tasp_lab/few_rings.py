"""Fewer rings on purpose: the best of no more than a given number of lanes.

One ring carries no more than the fastest link out of, and into, each rank; several no more than as many times that, nor
more than the narrowest cut. Rings that share no link reach this where links are alike. Else the best few are chosen
among all rings, or among those that many lanes would use, by mixed-integer programming.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import csr_array, eye_array, hstack, vstack

from tasp_lab.arrays import IntArray
from tasp_lab.links import MeshLinks
from tasp_lab.packing import best_packing, solve_whole, with_exact_shares
from tasp_lab.quantities import Number
from tasp_lab.ring_load import ring_rate_bytes_per_s
from tasp_lab.ring_problem import RingProblem
from tasp_lab.rings import Patience, Rings, fold_of
from tasp_lab.switching import FIRST_LOOK_S, disjoint_rings
from tasp_lab.topology import Topology, Vertex

_SECOND_LOOK_S = 5.0
"""How long the best are sought among others."""

_MOST_CHOSEN_FROM = 200
"""From more rings than that, those with the largest shares are taken."""


def best_few(topology: Topology, known: Rings, lanes: int, ring_limit: Fraction, patience: Patience) -> Rings:
    """At most `lanes` rings; `known` are more of them, `ring_limit` is what any rings can carry in bytes/s."""
    limit = min(ring_limit, lanes * _most_of_one_ring(topology))
    best, best_rate = None, Fraction(0)
    for rings in _attempts(topology, known, lanes, patience):
        shares = rings.shares or (Fraction(1, len(rings.rings)),) * len(rings.rings)
        rate = ring_rate_bytes_per_s(topology, rings.rings, shares)
        if rate > best_rate:
            best, best_rate = rings, rate
        if rings.limit_bytes_per_s is not None:
            limit = min(limit, max(rings.limit_bytes_per_s, best_rate))
        if best_rate >= limit:
            break
    assert best is not None  # the first attempt always gives rings
    return replace(best, limit_bytes_per_s=limit)


def _most_of_one_ring(topology: Topology) -> Fraction:
    """The least, over all ranks, of the fastest link out of a rank and into it."""
    if isinstance(topology.links, MeshLinks):
        return Fraction(topology.links.bandwidth_bytes_per_s)
    fastest: dict[tuple[bool, Vertex], Number] = defaultdict(int)
    for link in topology.links:
        for end in ((False, link.source), (True, link.destination)):
            fastest[end] = max(fastest[end], link.bandwidth_bytes_per_s)
    return Fraction(min(bandwidth for (_, vertex), bandwidth in fastest.items() if isinstance(vertex, int)))


def _attempts(topology: Topology, known: Rings, lanes: int, patience: Patience) -> Iterator[Rings]:
    yield _largest(known, lanes)
    problem = RingProblem.of(topology)
    every = problem.every_ring(_MOST_CHOSEN_FROM)
    if every is None and problem.is_uniform:
        limit_s = min(FIRST_LOOK_S, patience.left_s)
        patience.say(f"searching for {lanes} rings that share no link, up to {limit_s:.0f} s")
        rings = disjoint_rings(problem.linked, lanes, limit_s)
        if rings is not None:
            yield Rings(rings, 1, f"{lanes} rings that share no link")
    if every is not None:
        chosen, proved = _chosen(problem, every, lanes, patience)
        limit = ring_rate_bytes_per_s(topology, chosen.rings, chosen.shares) if proved else None
        yield replace(chosen, limit_bytes_per_s=limit)
    else:
        yield _chosen(problem, _largest(known, _MOST_CHOSEN_FROM).rings, lanes, patience)[0]


def _largest(known: Rings, count: int) -> Rings:
    """The rings with the largest shares, which they then carry equally."""
    order = sorted(range(len(known.rings)), key=lambda ring: -known.shares[ring])[:count]
    return Rings(known.rings[order], fold_of(known.rings[order]), f"{len(order)} of {len(known.rings)}: {known.reason}")


def _chosen(problem: RingProblem, pool: IntArray, lanes: int, patience: Patience) -> tuple[Rings, bool]:
    """The best of a pool, and whether it is proved: each ring carries something or nothing, at most `lanes` do."""
    limit_s = max(min(_SECOND_LOOK_S, patience.left_s), 0.1)
    patience.say(f"choosing {lanes} of {len(pool)} rings, up to {limit_s:.0f} s")
    loads, count = problem.loads(pool), len(pool)
    most = problem.relative_bandwidths.max()
    rows = vstack([
        hstack([loads, csr_array((loads.shape[0], count))]),
        hstack([eye_array(count), -most * eye_array(count)]),
        csr_array(np.repeat([0.0, 1.0], count)[None]),
    ])  # fmt: skip
    upper = np.concatenate([problem.relative_bandwidths, np.zeros(count), [lanes]])
    result = solve_whole(
        np.repeat([-1.0, 0.0], count),
        integrality=np.repeat([0, 1], count),
        bounds=Bounds(0, np.repeat([np.inf, 1.0], count)),
        constraints=LinearConstraint(rows.tocsr(), ub=upper),
        options={"time_limit": limit_s, "mip_rel_gap": 0.0},
    )
    used = np.flatnonzero(result.x[count:] > 0.5) if result.x is not None else np.arange(lanes)
    packing = best_packing(problem, pool[used])
    reason = f"the best {lanes} of {count} rings"
    rings, shares = with_exact_shares(packing)
    return Rings(rings, fold_of(rings), reason, shares), result.status == 0
