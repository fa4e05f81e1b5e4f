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

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoRingError
from tasp_lab.core.units import format_bandwidth
from tasp_lab.rings import cp_sat
from tasp_lab.rings.complete_digraph import hamiltonian_cycles
from tasp_lab.rings.factors import SWITCHING_OPERATIONS, disjoint_rings
from tasp_lab.rings.fractional_packing import (
    PATCHING_OPERATIONS,
    Packing,
    Patching,
    best_packing,
    improve,
    improvement_operations,
    integral_packing,
    least_cost,
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
            raise NoRingError(f"{topology.name} has no ring at all: {self._why_none()}")

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
        problem, carry = self.problem, f"carry {format_bandwidth(self.limit)}, as much as any rings can"
        notes, bandwidths = [], problem.bandwidths
        # Equal rings of a rate `unit` reach the limit if a whole number of them does.
        for unit in sorted({each / parts for each in bandwidths for parts in range(1, fold + 1)}, reverse=True):
            count = self.limit / unit
            if count.denominator > 1 or not (problem.is_uniform or count * len(problem.arcs) <= _MAX_CHOICES):
                continue
            rings, note = self._integral(int(count), [int(each / unit) for each in bandwidths], fold, strictly=strictly)
            if rings is None:
                notes.append(f"{count} rings of fold {fold}: {note}")
                continue
            shares: tuple[Fraction, ...] = ()
            if problem.is_uniform or strictly:
                carry = f"that {'share no link' if fold_of(rings) == 1 else 'use no link more than twice'} {carry}"
            else:
                rings, times = np.unique(rings, axis=0, return_counts=True)
                shares = tuple(Fraction(each, int(times.sum())) for each in times.tolist())
            return Decomposition(self.topology, rings, fold_of(rings), f"{len(rings)} rings {carry}", shares), ""
        none = f"no number of equal rings of fold {fold} adds up to {format_bandwidth(self.limit)}"
        return None, "; ".join(notes) or none

    def max_disjoint(self) -> tuple[IntArray | None, bool]:
        """The most link-disjoint rings found on uniform links, and whether no more exist.

        None if the budget was too small to find any.
        """
        proved = True
        for count in range(int(self.limit / self.problem.bandwidths[0]), 0, -1):
            rings, note = self._integral(count, [1] * len(self.problem.bandwidths), 1)
            if rings is not None:
                return rings, proved
            proved = proved and note == cp_sat.IMPOSSIBLE
        return None, False

    def _integral(
        self, count: int, capacities: list[int], fold: int, *, strictly: bool = True
    ) -> tuple[IntArray | None, str]:
        """`count` rings within these capacities, or None and how the search ended."""
        max_of_pair = fold if strictly else None
        if self.listed is not None and len(self.listed) <= _MAX_COMBINED:
            return integral_packing(self.problem, self.listed, capacities, count, max_of_pair), cp_sat.IMPOSSIBLE
        large = count * len(self.problem.arcs) > _MAX_DECIDED
        decides = cp_sat.is_installed() and not large
        if self.problem.is_uniform and fold == 1:
            part = self.budget.at_most(SWITCHING_OPERATIONS) if decides else self.budget.half()
            rings = self._by_switching(count, part)
            if rings is not None:
                return rings, ""
        if not decides:
            why = ", too large for an exact search"
            return None, cp_sat.NOT_FOUND + (why if large else "; OR-tools, which could decide this, is not installed")
        part = self.budget.half() if self.problem.is_uniform else self.budget.at_most(_CP_SAT_OPERATIONS)
        self.budget.progress(f"searching for {count} rings of fold {fold} by CP-SAT, {_within(part)}")
        return cp_sat.rings_within(self.problem, capacities, count, part, max_of_pair)

    def _by_switching(self, count: int, budget: SearchBudget) -> IntArray | None:
        linked = self.problem.linked
        self.budget.progress(f"searching for {count} link-disjoint rings by switching, {_within(budget)}")
        n = self.problem.world_size
        nearly_complete = linked.sum() > 0.8 * n * (n - 1) and n not in (4, 6)
        start = hamiltonian_cycles(n).astype(np.int64) if nearly_complete else None
        return disjoint_rings(linked, count, budget, start)

    def _with_shares(self, so_far: list[IntArray]) -> Iterator[Decomposition]:
        problem, budget = self.problem, self.budget
        if self.listed is not None:
            packing = best_packing(problem, self.listed)
            least = (problem.loads(self.listed).T @ packing.prices).min()
            yield self._packed(packing, f"all {len(self.listed)} rings", float(least))
            return
        if so_far:
            few = self._with_few_beside(so_far)
            so_far.append(few.rings)
            yield self._packed(few, "known rings and rings added to them")
        find = Patching(problem, Random(0))
        budget.progress(f"joining cycles into rings, {_within(budget)}")
        start = list(so_far)
        for _ in range(2 * problem.world_size):
            ring = find(np.zeros(len(problem.arcs)))
            start += [] if ring is None else [ring[None]]
            budget.spend(PATCHING_OPERATIONS * problem.world_size**2)
            if not budget.allows_more():
                break
        if not start:
            start = [self._any_ring()]
        budget.progress(f"improving rings with shares, {_within(budget)}")
        packing, rounds = best_packing(problem, np.unique(np.concatenate(start), axis=0)), 0
        limit = float(self.limit) * (1 - RELATIVE_TOLERANCE)
        while packing.rate_bytes_per_s < limit and rounds < _MAX_ROUNDS_WITHOUT_GAIN and budget.allows_more():
            budget.spend(improvement_operations(problem, packing))
            better = improve(problem, packing, find)
            if better is None:
                break
            gained = better.rate_bytes_per_s > packing.rate_bytes_per_s * (1 + RELATIVE_TOLERANCE)
            packing, rounds = better, 0 if gained else rounds + 1
        yield self._packed(packing, "rings added one by one", least_cost(problem, problem.uses.T @ packing.prices))

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

    def _any_ring(self) -> IntArray:
        """One ring, by CP-SAT where it is installed, else by switching."""
        budget, problem, note = self.budget.half(), self.problem, ""
        if cp_sat.is_installed():
            self.budget.progress(f"searching for any ring by CP-SAT, {_within(budget)}")
            unlimited = [problem.world_size] * len(problem.bandwidths)
            ring, note = cp_sat.rings_within(problem, unlimited, 1, budget)
        else:
            ring = self._by_switching(1, budget) if budget.left else None
        if ring is not None:
            return ring
        if note == cp_sat.IMPOSSIBLE:
            raise NoRingError(f"{self.topology.name} has no ring at all: {self._why_none()}")
        unknown = f"{self.topology.name}: no ring was found within the search budget, nor proved impossible"
        raise NoRingError(unknown, proved=False)

    def _packed(self, packing: Packing, among: str, least: float = 0.0) -> Decomposition:
        """A packing as rings; `least` is a lower bound of the cost of a ring at its prices, 0 if unknown."""
        limit, largest = self.limit, float(max(self.problem.bandwidths))
        if least > 0:  # all bandwidths together cost so much, so rings of this cost carry no more than
            limit = min(limit, Fraction(float(packing.prices @ self.problem.relative_bandwidths) * largest / least))
        rings, shares = with_exact_shares(packing)
        reason = f"the best shares of {among}, by linear programming"
        return Decomposition(self.topology, rings, fold_of(rings), reason, shares, limit)


def _within(budget: SearchBudget) -> str:
    return f"within {budget.left:,} operations"
