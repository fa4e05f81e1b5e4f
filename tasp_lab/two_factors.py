"""Rings over links that go both ways, found by switching squares between 2-factors.

A *2-factor* of an undirected graph is a set of edges with two at every vertex: cycles that visit every vertex once. One
of a single cycle is a Hamiltonian cycle, and walked both ways it is two rings. A regular graph of degree 2k falls into
k 2-factors (Petersen, 1891). Where a square's edges belong to two of them in turn, the two may swap these edges and
stay 2-factors. In each, that joins two cycles, splits one, or turns a part of one around. A swap is kept when it leaves
no more cycles than there were; tori and hypercubes are full of squares, and a few swaps per vertex are enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from random import Random

import networkx as nx
import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.factors import random_factors, rings_of

_WORSE = 0.02
"""How likely a swap is kept that leaves one cycle more."""


def hamiltonian_cycles_both_ways(linked: BoolArray, time_limit_s: float, random: Random) -> IntArray | None:
    """The edges of an undirected graph of even degree as Hamiltonian cycles, an array (degree / 2, n).

    `linked` is a symmetric bool array (n, n) with as many links at every vertex. None: not found in that time.

    >>> pentagram = ~np.eye(5, dtype=bool)
    >>> hamiltonian_cycles_both_ways(pentagram, 1.0, Random(0)).shape
    (2, 5)
    """
    until_s = time.monotonic() + time_limit_s
    while True:
        switching = _SquareSwitching(random_factors(_one_way(linked, random), random), random)
        if switching.run(until_s):
            return rings_of(switching.onward)
        if time.monotonic() > until_s:
            return None


def _one_way(linked: BoolArray, random: Random) -> BoolArray:
    """Each edge in one direction, so that as many lead out of each vertex as into it: along drawn Euler circuits.

    Drawn, because the 2-factors of one direction may all be ones from which no swaps lead to single cycles.
    """
    directed = np.zeros_like(linked)
    edges = np.argwhere(np.triu(linked)).tolist()
    random.shuffle(edges)
    graph: nx.Graph[int] = nx.Graph((a, b) for a, b in edges)
    for part in nx.connected_components(graph):
        for source, destination in nx.eulerian_circuit(graph.subgraph(part)):
            directed[source, destination] = True
    return directed


class _SquareSwitching:
    """2-factors that swap squares: the two neighbours of each vertex, and its cycle and direction of travel."""

    def __init__(self, factors: IntArray, random: Random) -> None:
        self.count, self.n = factors.shape
        self.random = random
        self.around: list[list[list[int]]] = np.stack([np.argsort(factors, axis=1), factors], axis=2).tolist()
        self.onward = [[0] * self.n for _ in range(self.count)]
        self.label = [[0] * self.n for _ in range(self.count)]
        self.labels = 0
        self.cycles = sum(self._number(factor, range(self.n)) for factor in range(self.count))

    def run(self, until_s: float) -> bool:
        """Whether each became one cycle before that time, or before there was no hope left in this start."""
        for attempt in range(400 * self.n + 20_000):
            if self.cycles == self.count:
                return True
            if self.count == 1 or (attempt % 256 == 255 and time.monotonic() > until_s):
                return False
            one, other = self.random.sample(range(self.count), 2)
            self._try(one, other, self.random.randrange(self.n))
        return False

    def _try(self, one: int, other: int, a: int) -> None:
        """Swap a square a, b, c, d from a, whose edges ab and cd are of `one` and bc and da of `other`."""
        b = self.random.choice(self.around[one][a])
        c = self.random.choice(self.around[other][b])
        corners = [d for d in self.around[one][c] if d in self.around[other][a] and d != b]
        if c == a or not corners:
            return
        d = corners[0]
        more = self._change(one, a, b, c, d) + self._change(other, b, c, d, a)
        if more > 0 and self.random.random() > _WORSE**more:
            return
        self.cycles += more
        self._exchange(one, a, b, c, d)
        self._exchange(other, b, c, d, a)

    def _change(self, factor: int, a: int, b: int, c: int, d: int) -> int:
        """How many cycles more there are with edges bc and da in place of ab and cd."""
        onward = self.onward[factor]
        if self.label[factor][a] != self.label[factor][c]:
            return -1
        same_direction = (onward[a] == b) == (onward[c] == d)
        return 1 if same_direction else 0

    def _exchange(self, factor: int, a: int, b: int, c: int, d: int) -> None:
        for vertex, old, new in ((a, b, d), (b, a, c), (c, d, b), (d, c, a)):
            pair = self.around[factor][vertex]
            pair[pair.index(old)] = new
        self._number(factor, (a, b, c, d))

    def _number(self, factor: int, vertices: Iterable[int]) -> int:
        """Walk the cycles through these vertices and label them anew; returns how many they are."""
        around, onward, label = self.around[factor], self.onward[factor], self.label[factor]
        before = self.labels
        for start in vertices:
            if label[start] > before:
                continue
            self.labels += 1
            previous, vertex = around[start][0], start
            while label[vertex] != self.labels:
                label[vertex] = self.labels
                one, other = around[vertex]
                onward[vertex] = other if one == previous else one
                previous, vertex = vertex, onward[vertex]
        return self.labels - before
