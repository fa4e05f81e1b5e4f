"""Arc-disjoint rings of a digraph, found by switching between 1-factors.

The search starts with as many arc-disjoint 1-factors (see `tasp_lab.rings.factors`) as rings are requested.
The union of two of them, as a bipartite graph of sources and destinations, decomposes into alternating closed walks.
Swapping the arcs of one walk between the two yields 1-factors again. A swap is kept if it does not increase the number
of cycles. Symmetric digraphs are first searched as 2-factors (`tasp_lab.rings.two_factors`), which allow more
swaps.

The search is random with a fixed seed. A failed search proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.rings.factors import random_factors, regular_part, rings_of
from tasp_lab.rings.search_budget import SearchBudget
from tasp_lab.rings.two_factors import undirected_hamiltonian_cycles

SWITCHING_OPERATIONS = 2_000_000
"""Operations of switching before another search that can also prove infeasibility."""

_START_OPERATIONS, _ARC_OPERATIONS, _SWAP_OPERATIONS = 200, 10, 8
"""Fixed cost of drawing 1-factors, cost per arc of them, and cost of one attempted swap."""

_CHECK_INTERVAL = 256
"""Attempts between two checks of the budget."""

_MAX_WALK = 8
"""Maximum length of an alternating walk; longer ones rarely help."""

_WORSENING_PROBABILITY = 0.001
"""Probability of keeping a swap that adds one cycle; squared for two."""


def disjoint_rings(
    linked: BoolArray, count: int, budget: SearchBudget, start: IntArray | None = None
) -> IntArray | None:
    """`count` arc-disjoint rings, an array (count, n) whose rows start with vertex 0; None if not found.

    `linked` is a bool array (n, n). `start` are arc-disjoint rings, an array (any number, n); those that the digraph
    contains are part of the first attempt. Returns at once if there are fewer arc-disjoint 1-factors than `count`.

    >>> square = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], dtype=bool)
    >>> disjoint_rings(square, 2, SearchBudget(10_000)).shape
    (2, 4)
    """
    random = Random(0)
    if regular_part(linked, count, random) is None:
        return None
    if _is_symmetric_regular(linked, count):
        cycles = undirected_hamiltonian_cycles(linked, budget.half(), Random(0))
        if cycles is not None:
            return np.concatenate([cycles, np.roll(cycles[:, ::-1], 1, axis=1)])
    kept = _successors(linked, start)[:count]
    while True:
        budget.spend(_START_OPERATIONS + _ARC_OPERATIONS * count * len(linked))
        factors = _complete(linked, count, kept, random)
        if factors is not None:
            switching = _Switching(factors, random)
            if switching.run(budget):
                return rings_of(switching.successors)
        if not budget.allows_more():
            return None
        kept = random.sample(kept, max(len(kept) - 2, 0))


def _successors(linked: BoolArray, rings: IntArray | None) -> list[IntArray]:
    """The successor of each vertex on those rings that the digraph contains."""
    found = []
    for ring in [] if rings is None else rings:
        successors = np.empty_like(ring)
        successors[ring] = np.roll(ring, -1)
        if linked[np.arange(len(ring)), successors].all():
            found.append(successors)
    return found


def _complete(linked: BoolArray, count: int, kept: list[IntArray], random: Random) -> IntArray | None:
    """`count` arc-disjoint 1-factors that include the kept ones; None if the remaining arcs have too few."""
    left = linked.copy()
    for successors in kept:
        left[np.arange(len(left)), successors] = False
    part = regular_part(left, count - len(kept), random)
    return None if part is None else np.concatenate([*(factor[None] for factor in kept), random_factors(part, random)])


def _is_symmetric_regular(linked: BoolArray, count: int) -> bool:
    regular = bool((linked.sum(axis=0) == count).all())
    return regular and count % 2 == 0 and bool((linked == linked.T).all())


class _Switching:
    """1-factors that swap arcs: per factor the successor of each vertex, its cycle, and its position on it."""

    def __init__(self, factors: IntArray, random: Random) -> None:
        self.count, self.n = factors.shape
        self.random = random
        self.successors: list[list[int]] = factors.tolist()
        self.predecessors: list[list[int]] = np.argsort(factors, axis=1).tolist()
        self.label = [[0] * self.n for _ in range(self.count)]
        self.position = [[0] * self.n for _ in range(self.count)]
        self.labels = 0
        self.cycles = [self._number(factor, range(self.n)) for factor in range(self.count)]

    def run(self, budget: SearchBudget) -> bool:
        """Whether all factors became rings within the budget and the attempts for this start.

        Swaps preserve the parity of the number of cycles, so half of all starts cannot succeed.
        """
        if (sum(self.cycles) - self.count) % 2 or (self.count == 1 and self.cycles[0] > 1):
            return False
        for attempt in range(1000 * self.n + 20_000):
            if sum(self.cycles) == self.count:
                return True
            if attempt % _CHECK_INTERVAL == _CHECK_INTERVAL - 1:
                budget.spend(_SWAP_OPERATIONS * _CHECK_INTERVAL)
                if not budget.left:
                    return False
            one, other = self._pick()
            sources = self._walk(one, other, self.random.randrange(self.n))
            if len(sources) > 1:
                self._try(one, other, sources)
        return False

    def _pick(self) -> tuple[int, int]:
        """Two 1-factors; with probability 3/4 one of them has several cycles."""
        one, other = self.random.sample(range(self.count), 2)
        if self.random.random() < 0.75:
            several = [factor for factor, cycles in enumerate(self.cycles) if cycles > 1]
            one = self.random.choice(several)
        return (one, other) if one != other else self._pick()

    def _walk(self, one: int, other: int, start: int) -> list[int]:
        """The sources of the arcs of an alternating closed walk; none if it exceeds `_MAX_WALK`."""
        ahead, predecessors = self.successors[other], self.predecessors[one]
        sources = [start]
        while (following := predecessors[ahead[sources[-1]]]) != start:
            if len(sources) == _MAX_WALK:
                return []
            sources.append(following)
        return sources

    def _try(self, one: int, other: int, sources: list[int]) -> None:
        more = self._change(one, other, sources), self._change(other, one, sources)
        if sum(more) > 0 and self.random.random() > _WORSENING_PROBABILITY ** sum(more):
            return
        self.cycles[one] += more[0]
        self.cycles[other] += more[1]
        first, second = self.successors[one], self.successors[other]
        for source in sources:
            first[source], second[source] = second[source], first[source]
        for factor in (one, other):
            for source in sources:
                self.predecessors[factor][self.successors[factor][source]] = source
            self._number(factor, sources)

    def _change(self, one: int, other: int, sources: list[int]) -> int:
        """Change in the number of cycles of `one` if it takes the arcs of `other` from the sources.

        The sources cut the cycles of `one` into segments, each ending at a source; the arcs of `other` lead from the
        end of a segment to the start of another.
        """
        next_end, cycles = self._segment_ends(one, sources)
        ahead, predecessors = self.successors[other], self.predecessors[one]
        left, after = set(sources), 0
        while left:
            source, after = left.pop(), after + 1
            while (source := next_end[predecessors[ahead[source]]]) in left:
                left.remove(source)
        return after - cycles

    def _segment_ends(self, factor: int, sources: list[int]) -> tuple[dict[int, int], int]:
        """The next source along the cycle of each source, and the number of cycles that contain sources."""
        label, position = self.label[factor], self.position[factor]
        on_cycle: dict[int, list[int]] = {}
        for source in sorted(sources, key=position.__getitem__):
            on_cycle.setdefault(label[source], []).append(source)
        next_end = {
            source: following
            for members in on_cycle.values()
            for source, following in zip(members, [*members[1:], members[0]], strict=True)
        }
        return next_end, len(on_cycle)

    def _number(self, factor: int, vertices: Iterable[int]) -> int:
        """Relabel the cycles through these vertices; returns their number."""
        successors, label, position = self.successors[factor], self.label[factor], self.position[factor]
        before = self.labels
        for start in vertices:
            if label[start] > before:
                continue
            self.labels += 1
            vertex, index = start, 0
            while label[vertex] != self.labels:
                label[vertex], position[vertex] = self.labels, index
                vertex, index = successors[vertex], index + 1
        return self.labels - before
