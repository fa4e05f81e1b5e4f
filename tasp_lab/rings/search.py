"""Ring search for arbitrary topologies, in stages that report what they proved.

Each stage yields rings with a higher rate, until they reach the bound of the narrowest cut:

1. *Equal rings* on uniform links, each link used once, then twice: by enumeration if there are few rings, by switching
   (`tasp_lab.rings.factors`), and by CP-SAT (`tasp_lab.rings.cp_sat`) if OR-tools is installed. With shared ports or
   unequal links, by CP-SAT alone, for small instances.
2. *Rings with shares*, by linear programming (`tasp_lab.rings.fractional_packing`): over all rings if these can
   be listed; else over the fastest known rings with a few more beside them, since every ring costs messages; else by
   column generation, which chooses up to one ring per constraint.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from random import Random

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.core.units import format_bandwidth
from tasp_lab.rings import cp_sat
from tasp_lab.rings.complete_digraph import hamiltonian_cycles
from tasp_lab.rings.cp_sat import Answer
from tasp_lab.rings.factors import SWITCHING_OPERATIONS, disjoint_rings
from tasp_lab.rings.fractional_packing import (
    PATCHING_OPERATIONS,
    Packing,
    Patching,
    best_packing,
    improve,
    improvement_operations,
    integral_packing,
    with_exact_shares,
)
from tasp_lab.rings.problem import RingProblem
from tasp_lab.rings.rings import RELATIVE_TOLERANCE, Decomposition, fold_of
from tasp_lab.rings.search_budget import SearchBudget
from tasp_lab.topology.components import strong_components
from tasp_lab.topology.graph import Topology

MAX_LISTED = 6000
"""Maximum number of rings to list; the best shares are then computed over all of them at once."""

_MAX_COMBINED = 400
"""Maximum number of listed rings to combine by mixed-integer programming."""

_MAX_CHOICES = 3000
"""Maximum number of rings times arcs in a search for equal rings with shared ports."""

_MAX_DECIDED = 6000
"""Maximum number of rings times arcs for CP-SAT; beyond it CP-SAT rarely ends within any budget."""

_CP_SAT_OPERATIONS = 5_000_000
"""Operations of CP-SAT for equal rings if rings with shares follow."""

_BESIDE_OPERATIONS = 1_000_000
"""Operations of the search for a few rings beside known ones."""

_LOAD_EXPONENT = 4
"""Power of its load that a constraint costs a ring beside known ones: far more if it is full."""

_MAX_ROUNDS_WITHOUT_GAIN = 40
"""Number of consecutive rounds without a higher rate that ends column generation."""


class RingSearch:
    """A search for the rings of one topology. `limit_bytes_per_s` is an upper bound of the rate of any rings."""

    def __init__(self, topology: Topology, limit_bytes_per_s: Fraction, budget: SearchBudget) -> None:
        self.topology = topology
        self.limit = limit_bytes_per_s
        self.budget = budget
        self.problem = RingProblem.of(topology)
        self.listed = self.problem.all_rings(MAX_LISTED)
        if self.listed is not None and not len(self.listed):
            raise NoDecompositionError(f"{topology.name} has no ring at all: {self._why_none()}")

    def _why_none(self) -> str:
        """A rank whose removal separates the others, or that the search was exhaustive."""
        linked = self.problem.linked
        for rank in range(self.problem.world_size):
            others = np.delete(np.delete(linked, rank, axis=0), rank, axis=1)
            if len(others) > 1 and strong_components(np.argwhere(others), len(others)).any():
                return f"without rank {rank} the others do not reach each other, and a ring passes each rank only once"
        return "the search was exhaustive"

    def best(self, known: list[IntArray]) -> Iterator[Decomposition]:
        """Equal rings of fold 1, then of fold 2, then rings with shares, which may include the `known` ones."""
        so_far = list(known)
        for fold in (1, 2):
            rings, note = self.equal_rings(fold)
            if rings is not None:
                so_far.append(rings.rings)
                yield rings
            if note:
                self.budget.progress(note)
        yield from self._with_shares(so_far)

    def equal_rings(self, fold: int, *, strictly: bool = False) -> tuple[Decomposition | None, str]:
        """Rings that reach the limit with equal shares and use no link more than `fold` times, or why there are none.

        Unless `strictly`, a faster link may be used more often, and a repeated ring is returned once with a larger
        share.
        """
        notes = []
        for count, capacities in self._equal_counts(fold):
            rings, note = self._integral(count, capacities, fold, strictly=strictly)
            if rings is not None:
                return self._equal(rings, strictly=strictly), ""
            notes.append(f"{count} rings of fold {fold}: {note}")
        if notes:
            return None, "; ".join(notes)
        return None, f"no number of equal rings of fold {fold} adds up to {format_bandwidth(self.limit)}"

    def _equal(self, rings: IntArray, *, strictly: bool) -> Decomposition:
        """Equal rings that reach the limit; repetitions of a ring become one ring with a larger share."""
        carry = f"carry {format_bandwidth(self.limit)}, as much as any rings can"
        if self.problem.is_uniform or strictly:
            fold = fold_of(rings)
            times = "share no link" if fold == 1 else "use no link more than twice"
            return Decomposition(self.topology, rings, fold, f"{len(rings)} rings that {times} {carry}")
        distinct, times_found = np.unique(rings, axis=0, return_counts=True)
        shares = tuple(Fraction(int(times), len(rings)) for times in times_found)
        return Decomposition(self.topology, distinct, fold_of(distinct), f"{len(distinct)} rings {carry}", shares)

    def _equal_counts(self, fold: int) -> Iterator[tuple[int, list[int]]]:
        """Numbers of equal rings that would reach the limit, each with the capacity of every constraint in rings."""
        bandwidths = self.problem.bandwidths
        for unit in sorted({each / parts for each in bandwidths for parts in range(1, fold + 1)}, reverse=True):
            count = self.limit / unit
            if count.denominator == 1 and (self.problem.is_uniform or count * len(self.problem.arcs) <= _MAX_CHOICES):
                yield int(count), [int(bandwidth / unit) for bandwidth in bandwidths]

    def _integral(
        self, count: int, capacities: list[int], fold: int, *, strictly: bool = True
    ) -> tuple[IntArray | None, str]:
        """`count` rings within these capacities, or None and how the search ended."""
        max_of_pair = fold if strictly else None
        if self.listed is not None and len(self.listed) <= _MAX_COMBINED:
            return integral_packing(self.problem, self.listed, capacities, count, max_of_pair), Answer.IMPOSSIBLE.value
        large = count * len(self.problem.arcs) > _MAX_DECIDED
        simple = self.problem.is_uniform and fold == 1
        if simple:
            rings = self._by_switching(
                count, self.budget.half() if large else self.budget.at_most(SWITCHING_OPERATIONS)
            )
            if rings is not None:
                return rings, ""
        if large:
            return None, f"{Answer.UNKNOWN.value}, too large for an exact search"
        if cp_sat.is_installed():
            budget = self.budget.half() if self.problem.is_uniform else self.budget.at_most(_CP_SAT_OPERATIONS)
            self.budget.progress(f"searching for {count} rings of fold {fold} by CP-SAT, {_within(budget)}")
            answer = cp_sat.rings_within(self.problem, capacities, count, budget, max_of_pair)
            return (None, answer.value) if isinstance(answer, Answer) else (answer, "")
        rings = self._by_switching(count, self.budget.half()) if simple else None
        return rings, f"{Answer.UNKNOWN.value}; OR-tools, which could decide this, is not installed"

    def _by_switching(self, count: int, budget: SearchBudget, linked: BoolArray | None = None) -> IntArray | None:
        linked = self.problem.linked if linked is None else linked
        self.budget.progress(f"searching for {count} link-disjoint rings by switching, {_within(budget)}")
        n = self.problem.world_size
        nearly_complete = linked.sum() > 0.8 * n * (n - 1) and n not in (4, 6)
        start = hamiltonian_cycles(n).astype(np.int64) if nearly_complete else None
        return disjoint_rings(linked, count, budget, start)

    def max_disjoint(self) -> tuple[IntArray | None, bool]:
        """The most link-disjoint rings found on uniform links, and whether no more exist.

        None if the budget was too small to find any.
        """
        proved = True
        for count in range(int(self.limit / self.problem.bandwidths[0]), 0, -1):
            rings, note = self._integral(count, [1] * len(self.problem.bandwidths), 1)
            if rings is not None:
                return rings, proved
            proved = proved and note == Answer.IMPOSSIBLE.value
        return None, False

    def _with_shares(self, so_far: list[IntArray]) -> Iterator[Decomposition]:
        if self.listed is not None:
            packing = best_packing(self.problem, self.listed)
            yield self._packed(packing, self._costs(packing, self.listed).min(), f"all {len(self.listed)} rings")
            return
        if so_far:
            few = self._with_few_beside(so_far)
            so_far.append(few.rings)
            yield self._packed(few, 0.0, "known rings and rings added to them")
        so_far = [*so_far, *self._over_fast_links()]
        find = Patching(self.problem, Random(0))
        self.budget.progress(f"joining cycles into rings, {_within(self.budget)}")
        start = list(so_far)
        for _ in range(2 * len(self.problem.linked)):
            ring = find(np.zeros(len(self.problem.arcs)))
            start += [] if ring is None else [ring[None]]
            self.budget.spend(PATCHING_OPERATIONS * self.problem.world_size**2)
            if not self.budget.allows_more():
                break
        if not start:
            start = self._any_ring()
        self.budget.progress(f"improving rings with shares, {_within(self.budget)}")
        packing, least = self._improved(best_packing(self.problem, np.unique(np.concatenate(start), axis=0)), find)
        yield self._packed(packing, least, "rings added one by one")

    def _with_few_beside(self, so_far: list[IntArray]) -> Packing:
        """The fastest of the known rings, and rings over what they leave free, one by one while each adds to the rate.

        Each goes where the load is lowest. Prices do not show that: of many constraints that are full together they
        may name a single one.
        """
        problem, budget = self.problem, self.budget.at_most(_BESIDE_OPERATIONS)
        budget.progress(f"adding rings to known ones, {_within(budget)}")
        find, bandwidths = Patching(problem, Random(0)), np.array([float(each) for each in problem.bandwidths])
        best = max((best_packing(problem, rings) for rings in so_far), key=lambda each: each.rate_bytes_per_s)
        while budget.allows_more():
            budget.spend(improvement_operations(problem, best))
            loads = problem.loads(best.rings) @ best.carried / bandwidths
            ring = find(problem.uses.T @ loads**_LOAD_EXPONENT)
            if ring is None:
                break
            more = best_packing(problem, np.concatenate([best.rings, ring[None]]))
            if more.rate_bytes_per_s <= best.rate_bytes_per_s * (1 + RELATIVE_TOLERANCE):
                break
            best = more
        return best

    def _over_fast_links(self) -> list[IntArray]:
        """Link-disjoint rings on the links of at least median bandwidth, if each pair has its own link."""
        problem = self.problem
        if not problem.has_own_links:
            return []
        median = sorted(problem.bandwidths)[len(problem.bandwidths) // 2]
        bandwidth = (problem.uses.T @ problem.relative_bandwidths)[problem.arc_at]
        fast = problem.linked & (bandwidth >= float(median / max(problem.bandwidths)) * (1 - RELATIVE_TOLERANCE))
        most = int(min(fast.sum(axis=0).min(), fast.sum(axis=1).min()))
        rings = self._by_switching(most, self.budget.at_most(SWITCHING_OPERATIONS), fast) if most else None
        return [] if rings is None else [rings]

    def _any_ring(self) -> list[IntArray]:
        """One ring, by CP-SAT where it is installed, else by switching."""
        budget = self.budget.half()
        if cp_sat.is_installed():
            self.budget.progress(f"searching for any ring by CP-SAT, {_within(budget)}")
            ring, least = cp_sat.cheapest_ring(self.problem, np.zeros(len(self.problem.arcs)), budget)
            if ring is not None:
                return [ring[None]]
            if least == float("inf"):
                raise NoDecompositionError(f"{self.topology.name} has no ring at all: {self._why_none()}")
        elif budget.left and (rings := self._by_switching(1, budget)) is not None:
            return [rings]
        raise NoDecompositionError(
            f"{self.topology.name}: no ring was found within the search budget, nor proved impossible"
        )

    def _improved(self, packing: Packing, find: Patching) -> tuple[Packing, float]:
        """The best packing within the budget, and a lower bound of the cost of a ring at its prices (0 if unknown)."""
        limit, without_gain = float(self.limit) * (1 - RELATIVE_TOLERANCE), 0
        while packing.rate_bytes_per_s < limit and self.budget.allows_more():
            self.budget.spend(improvement_operations(self.problem, packing))
            better = improve(self.problem, packing, find) if without_gain < _MAX_ROUNDS_WITHOUT_GAIN else None
            if better is None:
                if not cp_sat.is_installed():
                    return packing, 0.0
                better, least = self._improved_exactly(packing)
                if better is None:
                    return packing, least
            gained = better.rate_bytes_per_s > packing.rate_bytes_per_s * (1 + RELATIVE_TOLERANCE)
            packing, without_gain = better, 0 if gained else without_gain + 1
        return packing, 0.0

    def _improved_exactly(self, packing: Packing) -> tuple[Packing | None, float]:
        costs = self.problem.uses.T @ packing.prices
        ring, least = cp_sat.cheapest_ring(self.problem, costs, self.budget)
        if ring is None or self._costs(packing, ring[None])[0] > 1 - 1e-6:
            return None, least
        return best_packing(self.problem, np.concatenate([packing.pool, ring[None]])), least

    def _costs(self, packing: Packing, rings: IntArray) -> np.ndarray:
        """The cost of each ring at the prices of a packing."""
        costs: np.ndarray = self.problem.loads(rings).T @ packing.prices
        return costs

    def _packed(self, packing: Packing, least: float, among: str) -> Decomposition:
        """A packing as rings; `least` is a lower bound of the cost of a ring at its prices."""
        limit = self.limit
        if least > 0:
            largest = float(max(self.problem.bandwidths))
            by_prices = float(packing.prices @ self.problem.relative_bandwidths) * largest / least
            limit = min(limit, Fraction(by_prices))
        rings, shares = with_exact_shares(packing)
        reason = f"the best shares of {among}, by linear programming"
        return Decomposition(self.topology, rings, fold_of(rings), reason, shares, limit)


def _within(budget: SearchBudget) -> str:
    return f"within {budget.left:,} operations"
