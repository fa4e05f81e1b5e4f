"""Searches for rings of any topology, which say what they proved.

Each stage yields rings that carry more than those before, until they carry what the narrowest cut lets any rings carry:

1. *Equal rings* on links that are all alike, each link used once, then twice: among all rings where there are few, by
   switching (`tasp_lab.switching`), by CP-SAT (`tasp_lab.exact_search`) where OR-tools is installed. Where ports or
   unequal links are shared, by CP-SAT alone, for few rings.
2. *Rings with shares*, by linear programming (`tasp_lab.packing`): over all rings where these can be listed, else over
   rings that are added as long as they help.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from random import Random

import numpy as np
from scipy.sparse.csgraph import connected_components

from tasp_lab import exact_search
from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import NoDecompositionError
from tasp_lab.exact_search import Answer
from tasp_lab.hamiltonian import hamiltonian_cycles
from tasp_lab.packing import Packing, Patching, best_packing, improve, whole_packing, with_exact_shares
from tasp_lab.quantities import format_bandwidth
from tasp_lab.ring_problem import RingProblem
from tasp_lab.rings import ENOUGH, Patience, Rings, fold_of
from tasp_lab.switching import FIRST_LOOK_S, disjoint_rings
from tasp_lab.topology import Topology

MOST_LISTED = 6000
"""With no more rings than that in all, the best shares are sought over all of them at once."""

_MOST_COMBINED = 400
"""With no more rings than that in all, whole rings are combined by mixed-integer programming."""

_MOST_CHOICES = 3000
"""Where ports are shared, equal rings are sought where rings times arcs are no more than that."""

_MOST_DECIDED = 6000
"""With more rings times arcs than that, CP-SAT hardly ever ends in time."""

_SECOND_LOOK_S = 5.0
"""How long few equal rings are sought where rings with shares are found at once."""

_WITHOUT_GAIN = 40
"""So many rounds of new rings that carry no more end the search for shares."""


class RingSearch:
    """A search for the rings of one topology that no rings can exceed in rate by more than `limit_bytes_per_s` says."""

    def __init__(self, topology: Topology, limit_bytes_per_s: Fraction, patience: Patience) -> None:
        self.topology = topology
        self.limit = limit_bytes_per_s
        self.patience = patience
        self.problem = RingProblem.of(topology)
        self.every = self.problem.every_ring(MOST_LISTED)
        if self.every is not None and not len(self.every):
            raise NoDecompositionError(f"{topology.name} has no ring at all: {self._why_none()}")

    def _why_none(self) -> str:
        """A rank that separates others, or that every way was tried."""
        linked = self.problem.linked
        for rank in range(self.problem.world_size):
            others = np.delete(np.delete(linked, rank, axis=0), rank, axis=1)
            if len(others) > 1 and connected_components(others, directed=True, connection="strong")[0] > 1:
                return f"without rank {rank} the others do not reach each other, and a ring passes each rank only once"
        return "all ways were tried"

    def best(self, known: list[IntArray]) -> Iterator[Rings]:
        """Equal rings of fold 1, of fold 2, then rings with shares, which may use the `known` ones, too."""
        found = list(known)
        for fold in (1, 2):
            rings, note = self.equal_rings(fold)
            if rings is not None:
                found.append(rings.rings)
                yield rings
            if note:
                self.patience.say(note)
        yield from self._with_shares(found)

    def equal_rings(self, fold: int, *, strictly: bool = False) -> tuple[Rings | None, str]:
        """Rings that carry the limit in equal shares and use no link more than `fold` times, or why there are none.

        A link that is faster than others may be used more often, and the same ring be given once with a larger share,
        unless the fold is meant strictly.
        """
        notes = []
        for count, capacities in self._questions(fold):
            rings, note = self._whole(count, capacities, fold, strictly=strictly)
            if rings is not None:
                return self._equal(rings, strictly=strictly), ""
            notes.append(f"{count} rings of fold {fold}: {note}")
        if notes:
            return None, "; ".join(notes)
        return None, f"no number of equal rings of fold {fold} makes up {format_bandwidth(self.limit)}"

    def _equal(self, rings: IntArray, *, strictly: bool) -> Rings:
        """Equal rings that carry the limit; the same ring several times is one with a larger share."""
        carry = f"carry {format_bandwidth(self.limit)}, as much as any rings can"
        if self.problem.is_uniform or strictly:
            fold = fold_of(rings)
            times = "share no link" if fold == 1 else "use no link more than twice"
            return Rings(rings, fold, f"{len(rings)} rings that {times} {carry}")
        distinct, times_found = np.unique(rings, axis=0, return_counts=True)
        shares = tuple(Fraction(int(times), len(rings)) for times in times_found)
        return Rings(distinct, fold_of(distinct), f"{len(distinct)} rings {carry}", shares)

    def _questions(self, fold: int) -> Iterator[tuple[int, list[int]]]:
        """Numbers of rings that would carry the limit, and how often they may then use each constraint."""
        bandwidths = self.problem.bandwidths
        for unit in sorted({each / parts for each in bandwidths for parts in range(1, fold + 1)}, reverse=True):
            count = self.limit / unit
            if count.denominator == 1 and (self.problem.is_uniform or count * len(self.problem.arcs) <= _MOST_CHOICES):
                yield int(count), [int(bandwidth / unit) for bandwidth in bandwidths]

    def _whole(
        self, count: int, capacities: list[int], fold: int, *, strictly: bool = True
    ) -> tuple[IntArray | None, str]:
        """So many rings within these capacities, or how the search for them ended."""
        most_of_pair = fold if strictly else None
        if self.every is not None and len(self.every) <= _MOST_COMBINED:
            return whole_packing(self.problem, self.every, capacities, count, most_of_pair), Answer.IMPOSSIBLE.value
        large = count * len(self.problem.arcs) > _MOST_DECIDED
        simple = self.problem.is_uniform and fold == 1
        if simple:
            rings = self._switched(
                count, self.patience.left_s / 2 if large else min(FIRST_LOOK_S, self.patience.left_s)
            )
            if rings is not None:
                return rings, ""
        if large:
            return None, f"{Answer.UNKNOWN.value}, too large a question for an exact search"
        if exact_search.is_installed():
            limit_s = self.patience.left_s / 2 if self.problem.is_uniform else min(_SECOND_LOOK_S, self.patience.left_s)
            self.patience.say(f"searching for {count} rings of fold {fold} by CP-SAT, up to {limit_s:.0f} s")
            answer = exact_search.rings_within(self.problem, capacities, count, limit_s, most_of_pair)
            return (None, answer.value) if isinstance(answer, Answer) else (answer, "")
        rings = self._switched(count, self.patience.left_s / 2) if simple else None
        return rings, f"{Answer.UNKNOWN.value}; OR-tools, which could prove more, is not installed"

    def _switched(self, count: int, limit_s: float, linked: BoolArray | None = None) -> IntArray | None:
        linked = self.problem.linked if linked is None else linked
        self.patience.say(f"searching for {count} rings that share no link by switching, up to {limit_s:.0f} s")
        n = self.problem.world_size
        nearly_complete = linked.sum() > 0.8 * n * (n - 1) and n not in (4, 6)
        start = hamiltonian_cycles(n).astype(np.int64) if nearly_complete else None
        return disjoint_rings(linked, count, limit_s, start)

    def most_disjoint(self) -> tuple[IntArray | None, bool]:
        """As many rings as can be found that share no link, on links that are all alike; and whether no more exist.

        None if the time was too short to find any.
        """
        proved = True
        for count in range(int(self.limit / self.problem.bandwidths[0]), 0, -1):
            rings, note = self._whole(count, [1] * len(self.problem.bandwidths), 1)
            if rings is not None:
                return rings, proved
            proved = proved and note == Answer.IMPOSSIBLE.value
        return None, False

    def _with_shares(self, found: list[IntArray]) -> Iterator[Rings]:
        if self.every is not None:
            packing = best_packing(self.problem, self.every)
            yield self._packed(packing, self._costs(packing, self.every).min(), f"all {len(self.every)} rings")
            return
        found = [*found, *self._over_fast_links()]
        find = Patching(self.problem, Random(0))
        self.patience.say(f"joining cycles to rings, up to {self.patience.left_s:.0f} s")
        start = list(found)
        for _ in range(2 * len(self.problem.linked)):
            ring = find(np.zeros(len(self.problem.arcs)))
            start += [] if ring is None else [ring[None]]
            if not self.patience.left_s:
                break
        if not start:
            start = self._any_ring()
        self.patience.say(f"improving rings with shares, up to {self.patience.left_s:.0f} s")
        packing, least = self._improved(best_packing(self.problem, np.unique(np.concatenate(start), axis=0)), find)
        yield self._packed(packing, least, "rings added one by one")

    def _over_fast_links(self) -> list[IntArray]:
        """Rings that share no link and use no link slower than most, where each pair has a link of its own."""
        problem = self.problem
        if not problem.has_own_links:
            return []
        usual = sorted(problem.bandwidths)[len(problem.bandwidths) // 2]
        own = (problem.uses.T @ problem.relative_bandwidths)[problem.arc_at]
        fast = problem.linked & (own >= float(usual / max(problem.bandwidths)) * (1 - ENOUGH))
        most = int(min(fast.sum(axis=0).min(), fast.sum(axis=1).min()))
        rings = self._switched(most, min(FIRST_LOOK_S, self.patience.left_s), fast) if most else None
        return [] if rings is None else [rings]

    def _any_ring(self) -> list[IntArray]:
        """One ring, by whatever finds one."""
        if exact_search.is_installed():
            self.patience.say(f"searching for any ring by CP-SAT, up to {self.patience.left_s / 2:.0f} s")
            ring, least = exact_search.cheapest_ring(
                self.problem, np.zeros(len(self.problem.arcs)), self.patience.left_s / 2
            )
            if ring is not None:
                return [ring[None]]
            if least == float("inf"):
                raise NoDecompositionError(f"{self.topology.name} has no ring at all: {self._why_none()}")
        rings = self._switched(1, self.patience.left_s / 2)
        if rings is None:
            raise NoDecompositionError(
                f"{self.topology.name}: no ring was found in {self.patience.limit_s:g} s, none was proved impossible"
            )
        return [rings]

    def _improved(self, packing: Packing, find: Patching) -> tuple[Packing, float]:
        """The best packing within the time, and what no ring costs less than at its prices (0: nothing was proved)."""
        limit, without_gain = float(self.limit) * (1 - ENOUGH), 0
        while packing.rate_bytes_per_s < limit and self.patience.left_s:
            better = improve(self.problem, packing, find) if without_gain < _WITHOUT_GAIN else None
            if better is None:
                if not exact_search.is_installed():
                    return packing, 0.0
                better, least = self._improved_exactly(packing)
                if better is None:
                    return packing, least
            gained = better.rate_bytes_per_s > packing.rate_bytes_per_s * (1 + ENOUGH)
            packing, without_gain = better, 0 if gained else without_gain + 1
        return packing, 0.0

    def _improved_exactly(self, packing: Packing) -> tuple[Packing | None, float]:
        costs = self.problem.uses.T @ packing.prices
        ring, least = exact_search.cheapest_ring(self.problem, costs, self.patience.left_s)
        if ring is None or self._costs(packing, ring[None])[0] > 1 - 1e-6:
            return None, least
        return best_packing(self.problem, np.concatenate([packing.pool, ring[None]])), least

    def _costs(self, packing: Packing, rings: IntArray) -> np.ndarray:
        """What each ring costs at the prices of a packing."""
        costs: np.ndarray = self.problem.loads(rings).T @ packing.prices
        return costs

    def _packed(self, packing: Packing, least: float, among: str) -> Rings:
        """A packing as rings; `least` is what no ring costs less than at its prices."""
        limit = self.limit
        if least > 0:
            largest = float(max(self.problem.bandwidths))
            by_prices = float(packing.prices @ self.problem.relative_bandwidths) * largest / least
            limit = min(limit, Fraction(by_prices))
        rings, shares = with_exact_shares(packing)
        reason = f"the best shares of {among}, by linear programming"
        return Rings(rings, fold_of(rings), reason, shares, limit)
