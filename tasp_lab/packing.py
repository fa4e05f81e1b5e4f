"""The fastest rings by linear programming: a *fractional packing*, rings that carry unequal shares.

Ring j carries w_j bytes/s. What passes a constraint must not exceed its bandwidth; the sum of all w_j is sought as
large as can be. There are far too many rings to list for more than eight ranks or so, so rings are added as they are
needed: the dual solution puts a price on every constraint, and only a ring whose hops cost less than 1 in all can
improve the packing (column generation: P. Gilmore, R. Gomory, Operations Research 9, 1961). When no ring does, the
packing is optimal, and the prices prove it: no packing carries more than the sum of price times bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import LinearConstraint, linear_sum_assignment, linprog, milp
from scipy.sparse import csr_array

from tasp_lab.arrays import FloatArray, IntArray
from tasp_lab.factors import rings_of
from tasp_lab.ring_problem import RingProblem
from tasp_lab.rings import ENOUGH

_MOST_PARTS = 200
_FINEST = 2**50
"""Shares that are no multiples of a small fraction are rounded down to one of this many parts."""

_LEAST_SHARE = 1e-12
"""Rings that carry less of the whole are left out."""

_SOLVER_ERROR = 4
_AT_A_TIME = 8
_LEAST_POOL = 1000
_LEAST_GAIN = 1e-7


@dataclass(frozen=True, eq=False)
class Packing:
    """Rings, an int array (rings, world_size), with what each carries in bytes/s, and the price of each constraint.

    `pool` are the rings that there were to choose from.
    """

    rings: IntArray
    carried: FloatArray
    prices: FloatArray
    pool: IntArray

    @property
    def rate_bytes_per_s(self) -> float:
        """What all rings carry."""
        return float(self.carried.sum())


def best_packing(problem: RingProblem, rings: IntArray) -> Packing:
    """The packing of these rings that carries most. Rings that carry nothing are left out.

    >>> from tasp_lab.builders import full_mesh
    >>> problem = RingProblem.of(full_mesh(4, 50))
    >>> round(best_packing(problem, problem.every_ring(6)).rate_bytes_per_s)
    150
    """
    largest = float(max(problem.bandwidths))
    loads, most = problem.loads(rings), problem.relative_bandwidths
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = linprog(-np.ones(len(rings)), A_ub=loads, b_ub=most, method="highs", options=options)  # type: ignore[call-overload]
    carried = _within(loads, most, np.maximum(result.x, 0.0))
    used = carried > carried.sum() * _LEAST_SHARE
    return Packing(rings[used], carried[used] * largest, -np.asarray(result.ineqlin.marginals), rings)


def _within(loads: csr_array, most: FloatArray, carried: FloatArray) -> FloatArray:
    """What rings carry, less what rounding has put on a constraint too much: it counts where the constraint is slow."""
    room = np.minimum(1.0, most / np.maximum(loads @ carried, np.finfo(float).tiny))
    by_ring = loads.tocsc()
    least: FloatArray = np.minimum.reduceat(room[by_ring.indices], by_ring.indptr[:-1])
    return carried * least


def whole_packing(
    problem: RingProblem, rings: IntArray, capacities: Sequence[int], count: int, fold: int | None = None
) -> IntArray | None:
    """So many of these rings, each as often as need be, that use no constraint more often than its capacity.

    With `fold`, no pair of ranks is used more often than that.

    None if there are none: that is proved. For few rings only, by mixed-integer programming.

    >>> from tasp_lab.builders import full_mesh
    >>> problem = RingProblem.of(full_mesh(4))
    >>> whole_packing(problem, problem.every_ring(6), [1] * 12, 3) is None
    True
    """
    constraints = [LinearConstraint(problem.loads(rings), ub=np.array(capacities, dtype=float))]
    constraints.append(LinearConstraint(np.ones((1, len(rings))), lb=count, ub=count))
    if fold is not None:
        constraints.append(LinearConstraint(problem.hops(rings), ub=fold))
    integrality = np.ones(len(rings), dtype=np.int64)
    result = solve_whole(np.zeros(len(rings)), integrality=integrality, constraints=constraints)
    return None if result.x is None else np.repeat(rings, np.rint(result.x).astype(np.int64), axis=0)


def solve_whole(*arguments: Any, options: Any = None, **named: Any) -> Any:
    """scipy's `milp`, asked again without presolving where HiGHS fails because of that.

    Its result has no `x` only if there is no solution, or none was found in time.
    """
    ask: Any = milp
    result = ask(*arguments, options=options, **named)
    if result.status == _SOLVER_ERROR:
        result = ask(*arguments, options=dict(options or {}, presolve=False), **named)
    if result.status == _SOLVER_ERROR:
        raise RuntimeError(f"HiGHS: {result.message}")
    return result


def with_exact_shares(packing: Packing) -> tuple[IntArray, tuple[Fraction, ...]]:
    """The rings of a packing that carry something, and what each carries of the whole.

    Shares are fractions of a small denominator where rounding hides them; else they are rounded down, so that none
    carries more than it can, and rings that carry less than the finest share are left out.
    """
    carried = packing.carried
    for parts in range(1, _MOST_PARTS):
        whole = carried / carried.max() * parts
        if (np.abs(whole - np.rint(whole)) < ENOUGH / 10 * whole).all():
            weights = np.rint(whole).astype(np.int64)
            break
    else:
        weights = np.floor(carried / carried.sum() * _FINEST).astype(np.int64)
    used, total = weights > 0, int(weights.sum())
    return packing.rings[used], tuple(Fraction(weight, total) for weight in weights[used].tolist())


FindRing = Callable[[FloatArray], IntArray | None]
"""Given what each arc costs, a ring that costs little, as an array (world_size,); None if none is found."""


def improve(problem: RingProblem, packing: Packing, find: FindRing) -> Packing | None:
    """The packing with more rings to choose from, those that `find` gives; None if none of them costs less than 1.

    A few rings are found at a time, each at prices at which those before cost more.
    """
    prices = problem.uses.T @ packing.prices
    raised = prices.copy()
    found: list[IntArray] = []
    for _ in range(_AT_A_TIME):
        ring = find(raised)
        if ring is None:
            break
        arcs = problem.arc_at[ring, np.roll(ring, -1)]
        if prices[arcs].sum() > 1 - _LEAST_GAIN:
            break
        found.append(ring)
        raised[arcs] += 1 / problem.world_size
    if not found:
        return None
    latest = packing.pool[-max(_LEAST_POOL, len(problem.bandwidths)) :]
    return best_packing(problem, np.concatenate([packing.rings, latest, np.array(found)]))


class Patching:
    """A cheap ring: the cheapest 1-factor, its cycles joined where that costs least (R. Karp, SIAM J. Comput. 8, 1979).

    Small random costs break ties, so that asking again may give another ring.
    """

    def __init__(self, problem: RingProblem, random: Random) -> None:
        self.problem = problem
        self.random = np.random.default_rng(random.randrange(2**32))

    def __call__(self, costs: FloatArray) -> IntArray | None:
        """A ring for what each arc costs; None if the cycles cannot be joined."""
        best: tuple[float, IntArray] | None = None
        for _ in range(6):
            ring = self._attempt(costs)
            if ring is None:
                continue
            cost = float(costs[self.problem.arc_at[ring, np.roll(ring, -1)]].sum())
            if best is None or cost < best[0]:
                best = cost, ring
        return None if best is None else best[1]

    def _attempt(self, costs: FloatArray) -> IntArray | None:
        n, arcs = self.problem.world_size, self.problem.arcs
        noise = self.random.random(len(arcs)) * (1e-4 / n)
        forbidden = 10.0 * n * (1.0 + float(costs.max()))
        matrix = np.full((n, n), forbidden)
        matrix[arcs[:, 0], arcs[:, 1]] = costs + noise
        onward = linear_sum_assignment(matrix)[1].astype(np.int64)
        while (label := _labels(onward)).max() > 0:
            now = matrix[np.arange(n), onward]
            change = matrix[:, onward] - now[:, None]
            change = change + change.T
            change[label[:, None] == label[None, :]] = np.inf
            one, other = np.unravel_index(int(change.argmin()), change.shape)
            onward[[one, other]] = onward[[other, one]]
        if matrix[np.arange(n), onward].max() >= forbidden:
            return None
        ring: IntArray = rings_of(onward[None])[0]
        return ring


def _labels(onward: IntArray) -> npt.NDArray[np.int64]:
    """The number of the cycle on which each vertex lies."""
    label = np.full(len(onward), -1, dtype=np.int64)
    cycles = 0
    for start in range(len(onward)):
        vertex = start
        while label[vertex] < 0:
            label[vertex] = cycles
            vertex = int(onward[vertex])
        cycles += label[start] == cycles
    return label
