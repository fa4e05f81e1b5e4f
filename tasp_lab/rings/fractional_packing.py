"""The fastest rings by linear programming: a *fractional packing*, rings that carry unequal shares.

Ring j carries w_j bytes/s. The load of each constraint must not exceed its bandwidth; the sum of all w_j is maximised.
Beyond about eight ranks there are too many rings to list, so rings are added on demand (column generation: P. Gilmore,
R. Gomory, Operations Research 9, 1961). The dual solution assigns a price to every constraint, and only a ring whose
hops cost less than 1 in total can improve the packing. If there is none, the packing is optimal, and the prices are the
certificate: no packing carries more than the sum of price times bandwidth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
from scipy.sparse import csr_array, eye_array, hstack, vstack

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.core.units import Number
from tasp_lab.rings.factors import SWITCHING_OPERATIONS, disjoint_rings, rings_of
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.rings import RELATIVE_TOLERANCE, Decomposition, fold_of
from tasp_lab.rings.search_budget import SearchBudget
from tasp_lab.topology.components import components
from tasp_lab.topology.graph import Topology, Vertex

_MAX_DENOMINATOR = 200
_FINEST_DENOMINATOR = 2**50
"""Shares that are not multiples of a simple fraction are rounded down to multiples of one over this."""

_MIN_SHARE = 1e-12
"""Rings with a smaller share are dropped."""

PATCHING_OPERATIONS = 1
"""Cost of a ring by `Patching`, per pair of vertices."""

_PROGRAM_OPERATIONS = 2000
"""Fixed cost of a linear program; each entry of its matrix adds one."""

_SOLVER_ERROR = 4
_RINGS_PER_ROUND = 8
_MIN_POOL = 1000
_MIN_GAIN = 1e-7


@dataclass(frozen=True, eq=False)
class Packing:
    """Rings, an int array (rings, world_size), the bytes/s that each carries, and the price of each constraint.

    `pool` holds the candidate rings.
    """

    rings: IntArray
    carried: FloatArray
    prices: FloatArray
    pool: IntArray

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes/s of all rings together."""
        return float(self.carried.sum())


def best_packing(problem: RingProblem, rings: IntArray) -> Packing:
    """The packing of these rings with the highest rate. Rings that carry nothing are dropped.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> problem = RingProblem.of(full_mesh(4, 50))
    >>> round(best_packing(problem, problem.all_rings(6)).rate_bytes_per_s)
    150
    """
    from scipy.optimize import linprog

    largest = float(max(problem.bandwidths))
    loads, capacities = problem.loads(rings), problem.relative_bandwidths
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = linprog(-np.ones(len(rings)), A_ub=loads, b_ub=capacities, method="highs", options=options)  # type: ignore[call-overload]
    carried = _scaled_to_capacities(loads, capacities, np.maximum(result.x, 0.0))
    used = carried > carried.sum() * _MIN_SHARE
    return Packing(rings[used], carried[used] * largest, -np.asarray(result.ineqlin.marginals), rings)


def _scaled_to_capacities(loads: csr_array, capacities: FloatArray, carried: FloatArray) -> FloatArray:
    """Scale rings down where rounding exceeds a capacity; the excess is relevant on slow constraints."""
    scale = np.minimum(1.0, capacities / np.maximum(loads @ carried, np.finfo(float).tiny))
    by_ring = loads.tocsc()
    smallest: FloatArray = np.minimum.reduceat(scale[by_ring.indices], by_ring.indptr[:-1])
    return carried * smallest


def integral_packing(
    problem: RingProblem, rings: IntArray, capacities: Sequence[int], count: int, fold: int | None = None
) -> IntArray | None:
    """`count` of these rings, with repetition, that use each constraint at most as often as its capacity.

    With `fold`, each pair of ranks is used at most `fold` times. None if there are none, which is then proved. For few
    rings only, by mixed-integer programming.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> problem = RingProblem.of(full_mesh(4))
    >>> integral_packing(problem, problem.all_rings(6), [1] * 12, 3) is None
    True
    """
    from scipy.optimize import LinearConstraint

    constraints = [LinearConstraint(problem.loads(rings), ub=np.array(capacities, dtype=float))]
    constraints.append(LinearConstraint(np.ones((1, len(rings))), lb=count, ub=count))
    if fold is not None:
        constraints.append(LinearConstraint(problem.hops(rings), ub=fold))
    integrality = np.ones(len(rings), dtype=np.int64)
    result = solve_milp(np.zeros(len(rings)), integrality=integrality, constraints=constraints)
    return None if result.x is None else np.repeat(rings, np.rint(result.x).astype(np.int64), axis=0)


def solve_milp(*arguments: Any, options: Any = None, **named: Any) -> Any:
    """scipy's `milp`, repeated without presolving if HiGHS fails because of it.

    The result has no `x` only if there is no solution, or none was found within the node limit.
    """
    from scipy.optimize import milp

    solve: Any = milp
    result = solve(*arguments, options=options, **named)
    if result.status == _SOLVER_ERROR:
        result = solve(*arguments, options=dict(options or {}, presolve=False), **named)
    if result.status == _SOLVER_ERROR:
        raise RuntimeError(f"HiGHS: {result.message}")
    return result


def with_exact_shares(packing: Packing) -> tuple[IntArray, tuple[Fraction, ...]]:
    """The rings of a packing with a nonzero share, and these shares.

    Shares become fractions with a small denominator if they equal these up to rounding. Otherwise they are rounded
    down, so that no capacity is exceeded, and rings below the finest share are dropped.
    """
    carried = packing.carried
    for parts in range(1, _MAX_DENOMINATOR):
        whole = carried / carried.max() * parts
        if (np.abs(whole - np.rint(whole)) < RELATIVE_TOLERANCE / 10 * whole).all():
            weights = np.rint(whole).astype(np.int64)
            break
    else:
        weights = np.floor(carried / carried.sum() * _FINEST_DENOMINATOR).astype(np.int64)
    used, total = weights > 0, int(weights.sum())
    return packing.rings[used], tuple(Fraction(weight, total) for weight in weights[used].tolist())


FindRing = Callable[[FloatArray], IntArray | None]
"""Maps the cost of each arc to a cheap ring, an array (world_size,), or None if none is found."""


def improve(problem: RingProblem, packing: Packing, find: FindRing) -> Packing | None:
    """The packing with candidate rings added by `find`; None if none of them costs less than 1.

    Several rings are added per round; prices along each ring are raised before the next is sought.
    """
    prices = problem.uses.T @ packing.prices
    raised = prices.copy()
    new_rings: list[IntArray] = []
    for _ in range(_RINGS_PER_ROUND):
        ring = find(raised)
        if ring is None:
            break
        arcs = problem.arcs_of(ring)
        if prices[arcs].sum() > 1 - _MIN_GAIN:
            break
        new_rings.append(ring)
        raised[arcs] += 1 / problem.world_size
    if not new_rings:
        return None
    latest = packing.pool[-max(_MIN_POOL, len(problem.bandwidths)) :]
    return best_packing(problem, np.concatenate([packing.rings, latest, np.array(new_rings)]))


def improvement_operations(problem: RingProblem, packing: Packing) -> int:
    """Operations of `improve` with `Patching`: some rings, and a linear program over the pool."""
    patching = _RINGS_PER_ROUND * PATCHING_OPERATIONS * problem.world_size**2
    entries_of_ring = problem.world_size * problem.uses.nnz // len(problem.arcs)
    return patching + _PROGRAM_OPERATIONS + len(packing.pool) * entries_of_ring


def least_cost(problem: RingProblem, costs: FloatArray) -> float:
    """A lower bound of the cost of a ring, for the cost of each arc: that of the cheapest 1-factor; 0 without one."""
    hops = np.arange(problem.world_size), _cheapest_factor(_matrix(problem, costs))
    return float(costs[problem.arc_at[hops]].sum()) if problem.linked[hops].all() else 0.0


def _matrix(problem: RingProblem, costs: FloatArray) -> FloatArray:
    """The cost of each pair of vertices; without an arc more than that of any ring."""
    matrix = np.full((problem.world_size,) * 2, 10.0 * problem.world_size * (1.0 + float(costs.max())))
    matrix[tuple(problem.arcs.T)] = costs
    return matrix


def _cheapest_factor(matrix: FloatArray) -> IntArray:
    """The successor of each vertex on the cheapest 1-factor, which has pairs without an arc if there is no other."""
    from scipy.optimize import linear_sum_assignment

    successors: IntArray = linear_sum_assignment(matrix)[1].astype(np.int64)
    return successors


class Patching:
    """A cheap ring: the cheapest 1-factor, its cycles joined where that costs least (R. Karp, SIAM J. Comput. 8, 1979).

    Small random costs break ties, so a second call may return another ring.
    """

    def __init__(self, problem: RingProblem, random: Random) -> None:
        self.problem = problem
        self.random = np.random.default_rng(random.randrange(2**32))

    def __call__(self, costs: FloatArray) -> IntArray | None:
        """A ring for the cost of each arc; None if the cycles cannot be joined."""
        rings = [ring for ring in (self._attempt(costs) for _ in range(6)) if ring is not None]
        return min(rings, key=lambda ring: float(costs[self.problem.arcs_of(ring)].sum()), default=None)

    def _attempt(self, costs: FloatArray) -> IntArray | None:
        every = np.arange(self.problem.world_size)
        noise = self.random.random(len(costs)) * (1e-4 / len(every))
        matrix = _matrix(self.problem, costs + noise)
        successors = _cheapest_factor(matrix)
        while (cycle := components(np.column_stack([every, successors]), len(every))).max() > 0:
            # Two vertices of different cycles exchange their successors, which joins the cycles.
            change = matrix[:, successors] - matrix[every, successors][:, None]
            change = np.where(cycle[:, None] == cycle, np.inf, change + change.T)
            one, other = np.unravel_index(int(change.argmin()), change.shape)
            successors[[one, other]] = successors[[other, one]]
        if not self.problem.linked[every, successors].all():
            return None
        ring: IntArray = rings_of(successors[None])[0]
        return ring


# The best rings for a given maximum number of lanes.
#
# The rate of one ring is at most the fastest link out of, and into, each rank; the rate of k rings is at most k times
# that, and at most the narrowest cut. Link-disjoint rings reach this bound on uniform links. Otherwise the best k are
# chosen among all rings, or among those of the full decomposition, by mixed-integer programming.


_SELECTION_OPERATIONS = 5_000_000
"""Operations of the selection among many rings; a branch-and-bound node costs one per entry of the matrix."""

_MAX_CANDIDATES = 200
"""Of more rings than that, those with the largest shares are the candidates."""


def best_few(known: Decomposition, lanes: int, ring_limit: Fraction, budget: SearchBudget) -> Decomposition:
    """At most `lanes` rings; `known` are more, and `ring_limit` bounds the rate of any rings, in bytes/s."""
    topology = known.topology
    limit = min(ring_limit, lanes * max_of_one_ring(topology))
    best = _largest(known, lanes)
    if best.rate_bytes_per_s >= limit:
        return replace(best, limit_bytes_per_s=limit)
    problem = RingProblem.of(topology)
    listed = problem.all_rings(_MAX_CANDIDATES)
    if listed is None and problem.is_uniform:
        part = budget.at_most(SWITCHING_OPERATIONS)
        budget.progress(f"searching for {lanes} link-disjoint rings, within {part.left:,} operations")
        disjoint = disjoint_rings(problem.linked, lanes, part)
        if disjoint is not None:
            best = _faster(best, Decomposition(topology, disjoint, 1, f"{lanes} rings that share no link"))
        if best.rate_bytes_per_s >= limit:
            return replace(best, limit_bytes_per_s=limit)
    pool = _largest(known, _MAX_CANDIDATES).rings if listed is None else listed
    packing, proved = _chosen(problem, pool, lanes, budget)
    rings, shares = with_exact_shares(packing)
    chosen = Decomposition(topology, rings, fold_of(rings), f"the best {lanes} of {len(pool)} rings", shares)
    best = _faster(best, chosen)
    if proved and listed is not None:
        limit = min(limit, best.rate_bytes_per_s)
    return replace(best, limit_bytes_per_s=limit)


def _faster(one: Decomposition, other: Decomposition) -> Decomposition:
    return other if other.rate_bytes_per_s > one.rate_bytes_per_s else one


def max_of_one_ring(topology: Topology) -> Fraction:
    """The minimum over all ranks of the fastest link out of, and into, the rank."""
    if topology.table.is_uniform:
        return Fraction(topology.links[0].bandwidth_bytes_per_s)
    fastest: dict[tuple[bool, Vertex], Number] = defaultdict(int)
    for link in topology.links:
        for end in ((False, link.source), (True, link.destination)):
            fastest[end] = max(fastest[end], link.bandwidth_bytes_per_s)
    return Fraction(min(bandwidth for (_, vertex), bandwidth in fastest.items() if isinstance(vertex, int)))


def _largest(known: Decomposition, count: int) -> Decomposition:
    """The rings with the largest shares, with equal shares."""
    order = sorted(range(len(known.rings)), key=lambda ring: -known.shares[ring])[:count]
    reason = f"{len(order)} of {len(known.rings)}: {known.reason}"
    return Decomposition(known.topology, known.rings[order], fold_of(known.rings[order]), reason)


def _chosen(problem: RingProblem, pool: IntArray, lanes: int, budget: SearchBudget) -> tuple[Packing, bool]:
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
    return best_packing(problem, pool[used]), result.status == 0
