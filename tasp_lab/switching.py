"""Rings of a digraph that share no arc, found by switching between 1-factors.

The search starts with as many arc-disjoint 1-factors (see `tasp_lab.factors`) as rings are wanted and lets two of them
exchange arcs: their union, seen from the sources to the destinations of its arcs, falls into alternating closed
walks, and the two may swap their arcs along each of these and stay 1-factors. A swap is kept when it leaves no more
cycles than there were. Links that go both ways are searched as 2-factors first (`tasp_lab.two_factors`), where more
swaps are possible.

The search is random, but the same every time. That it finds nothing proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from random import Random

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.factors import random_factors, regular_part, rings_of
from tasp_lab.two_factors import hamiltonian_cycles_both_ways

FIRST_LOOK_S = 2.0
"""How long switching, which proves nothing, is tried where another search can follow."""

_LONGEST_WALK = 8
"""Longer alternating walks change so much that they hardly ever help."""

_WORSE = 0.001
"""How likely a swap is kept that leaves one cycle more; squared for two."""


def disjoint_rings(
    linked: BoolArray, count: int, time_limit_s: float, start: IntArray | None = None
) -> IntArray | None:
    """So many rings that share no arc, as an array (count, n) whose rows start with vertex 0; None: not found.

    `linked` is a bool array (n, n). `start` are rings that share no arc, an array (any number, n): those which the
    digraph has are kept at first. Gives up at once when there are not even so many 1-factors.

    >>> square = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], dtype=bool)
    >>> disjoint_rings(square, 2, time_limit_s=1.0).shape
    (2, 4)
    """
    until_s = time.monotonic() + time_limit_s
    random = Random(0)
    if regular_part(linked, count, random) is None:
        return None
    if _goes_both_ways(linked, count):
        cycles = hamiltonian_cycles_both_ways(linked, time_limit_s / 2, random)
        if cycles is not None:
            return np.concatenate([cycles, np.roll(cycles[:, ::-1], 1, axis=1)])
    kept = _onward(linked, start)[:count]
    while True:
        factors = _complete(linked, count, kept, random)
        if factors is not None:
            switching = _Switching(factors, random)
            if switching.run(until_s):
                return rings_of(switching.onward)
        if time.monotonic() > until_s:
            return None
        kept = random.sample(kept, max(len(kept) - 2, 0))


def _onward(linked: BoolArray, rings: IntArray | None) -> list[IntArray]:
    """Where the rings that a digraph has go on to from each vertex."""
    found = []
    for ring in [] if rings is None else rings:
        onward = np.empty_like(ring)
        onward[ring] = np.roll(ring, -1)
        if linked[np.arange(len(ring)), onward].all():
            found.append(onward)
    return found


def _complete(linked: BoolArray, count: int, kept: list[IntArray], random: Random) -> IntArray | None:
    """So many 1-factors that share no arc, those which are kept among them; None if the rest has too few."""
    left = linked.copy()
    for onward in kept:
        left[np.arange(len(left)), onward] = False
    part = regular_part(left, count - len(kept), random)
    return None if part is None else np.concatenate([*(factor[None] for factor in kept), random_factors(part, random)])


def _goes_both_ways(linked: BoolArray, count: int) -> bool:
    regular = bool((linked.sum(axis=0) == count).all())
    return regular and count % 2 == 0 and bool((linked == linked.T).all())


class _Switching:
    """1-factors that swap arcs: where each goes on to from each vertex, and the vertex's cycle and place on it."""

    def __init__(self, factors: IntArray, random: Random) -> None:
        self.count, self.n = factors.shape
        self.random = random
        self.onward: list[list[int]] = factors.tolist()
        self.back: list[list[int]] = np.argsort(factors, axis=1).tolist()
        self.label = [[0] * self.n for _ in range(self.count)]
        self.place = [[0] * self.n for _ in range(self.count)]
        self.labels = 0
        self.cycles = [self._number(factor, range(self.n)) for factor in range(self.count)]

    def run(self, until_s: float) -> bool:
        """Whether all became rings before that time, or before there was no hope left in this start.

        Swaps keep the parity of the number of cycles, so half of all starts have no hope at all.
        """
        if (sum(self.cycles) - self.count) % 2 or (self.count == 1 and self.cycles[0] > 1):
            return False
        for attempt in range(1000 * self.n + 20_000):
            if sum(self.cycles) == self.count:
                return True
            if attempt % 256 == 255 and time.monotonic() > until_s:
                return False
            one, other = self._pick()
            sources = self._walk(one, other, self.random.randrange(self.n))
            if len(sources) > 1:
                self._try(one, other, sources)
        return False

    def _pick(self) -> tuple[int, int]:
        """Two 1-factors, one of them of several cycles three times out of four."""
        one, other = self.random.sample(range(self.count), 2)
        if self.random.random() < 0.75:
            several = [factor for factor, cycles in enumerate(self.cycles) if cycles > 1]
            one = self.random.choice(several)
        return (one, other) if one != other else self._pick()

    def _walk(self, one: int, other: int, start: int) -> list[int]:
        """The sources of the arcs on an alternating closed walk; none when it is long."""
        ahead, back = self.onward[other], self.back[one]
        sources = [start]
        while (following := back[ahead[sources[-1]]]) != start:
            if len(sources) == _LONGEST_WALK:
                return []
            sources.append(following)
        return sources

    def _try(self, one: int, other: int, sources: list[int]) -> None:
        more = self._change(one, other, sources), self._change(other, one, sources)
        if sum(more) > 0 and self.random.random() > _WORSE ** sum(more):
            return
        self.cycles[one] += more[0]
        self.cycles[other] += more[1]
        first, second = self.onward[one], self.onward[other]
        for source in sources:
            first[source], second[source] = second[source], first[source]
        for factor in (one, other):
            for source in sources:
                self.back[factor][self.onward[factor][source]] = source
            self._number(factor, sources)

    def _change(self, one: int, other: int, sources: list[int]) -> int:
        """How many cycles more `one` has once it goes on from the sources as `other` does.

        The sources cut the cycles of `one` into pieces, each of which ends at a source; going on as `other` does
        leads from the end of a piece to the start of another.
        """
        next_end, cycles = self._ends_of_pieces(one, sources)
        ahead, back = self.onward[other], self.back[one]
        left, after = set(sources), 0
        while left:
            source, after = left.pop(), after + 1
            while (source := next_end[back[ahead[source]]]) in left:
                left.remove(source)
        return after - cycles

    def _ends_of_pieces(self, factor: int, sources: list[int]) -> tuple[dict[int, int], int]:
        """For each source the next one along its cycle, and how many cycles the sources lie on."""
        label, place = self.label[factor], self.place[factor]
        on_cycle: dict[int, list[int]] = {}
        for source in sorted(sources, key=place.__getitem__):
            on_cycle.setdefault(label[source], []).append(source)
        next_end = {
            source: following
            for members in on_cycle.values()
            for source, following in zip(members, [*members[1:], members[0]], strict=True)
        }
        return next_end, len(on_cycle)

    def _number(self, factor: int, vertices: Iterable[int]) -> int:
        """Walk the cycles through these vertices and label them anew; returns how many they are."""
        onward, label, place = self.onward[factor], self.label[factor], self.place[factor]
        before = self.labels
        for start in vertices:
            if label[start] > before:
                continue
            self.labels += 1
            vertex, position = start, 0
            while label[vertex] != self.labels:
                label[vertex], place[vertex] = self.labels, position
                vertex, position = onward[vertex], position + 1
        return self.labels - before
