"""Rings over bidirectional links, found by switching squares between 2-factors.

A *2-factor* of an undirected graph is a set of edges with two at every vertex: cycles that visit every vertex once. A
2-factor that is a single cycle is a Hamiltonian cycle; its two directions are two rings. A regular graph of degree 2k
decomposes into k 2-factors (Petersen, 1891). If the edges of a square alternate between two of them, swapping these
edges yields 2-factors again. In each factor this joins two cycles, splits one, or reverses a part of one. A swap is
kept if it does not increase the number of cycles. Tori and hypercubes have many squares, and a few swaps per vertex
suffice.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.rings.factors import random_factors, rings_of
from tasp_lab.rings.search_budget import SearchBudget

_WORSENING_PROBABILITY = 0.02
"""Probability of keeping a swap that adds one cycle."""

_START_OPERATIONS, _ARC_OPERATIONS, _SWAP_OPERATIONS = 200, 10, 5
"""Fixed cost of drawing 2-factors, cost per link, and cost of one attempted swap."""

_CHECK_INTERVAL = 256
"""Attempts between two checks of the budget."""


def undirected_hamiltonian_cycles(linked: BoolArray, budget: SearchBudget, random: Random) -> IntArray | None:
    """A Hamiltonian decomposition of an undirected regular graph of even degree, an array (degree / 2, n).

    `linked` is a symmetric bool array (n, n). None if not found within the budget.

    >>> pentagram = ~np.eye(5, dtype=bool)
    >>> undirected_hamiltonian_cycles(pentagram, SearchBudget(10_000), Random(0)).shape
    (2, 5)
    """
    while True:
        budget.spend(_START_OPERATIONS + _ARC_OPERATIONS * int(linked.sum()))
        switching = _SquareSwitching(random_factors(_eulerian_orientation(linked, random), random), random)
        if switching.run(budget):
            return rings_of(switching.successors)
        if not budget.allows_more():
            return None


def _eulerian_orientation(linked: BoolArray, random: Random) -> BoolArray:
    """Direct the edges along random Euler circuits, so that each vertex has equal in-degree and out-degree.

    Random, because swaps may not lead to single cycles from any 2-factors of one orientation.
    """
    import networkx as nx

    directed = np.zeros_like(linked)
    edges = np.argwhere(np.triu(linked)).tolist()
    random.shuffle(edges)
    graph: nx.Graph[int] = nx.Graph((a, b) for a, b in edges)
    for part in nx.connected_components(graph):
        for source, destination in nx.eulerian_circuit(graph.subgraph(part)):
            directed[source, destination] = True
    return directed


class _SquareSwitching:
    """2-factors that swap squares: per factor the two neighbours of each vertex, its cycle and its successor."""

    def __init__(self, factors: IntArray, random: Random) -> None:
        self.count, self.n = factors.shape
        self.random = random
        self.around: list[list[list[int]]] = np.stack([np.argsort(factors, axis=1), factors], axis=2).tolist()
        self.successors = [[0] * self.n for _ in range(self.count)]
        self.label = [[0] * self.n for _ in range(self.count)]
        self.labels = 0
        self.cycles = sum(self._number(factor, range(self.n)) for factor in range(self.count))

    def run(self, budget: SearchBudget) -> bool:
        """Whether each factor became one cycle within the budget and the attempts for this start."""
        for attempt in range(400 * self.n + 20_000):
            if self.cycles == self.count:
                return True
            if attempt % _CHECK_INTERVAL == _CHECK_INTERVAL - 1:
                budget.spend(_SWAP_OPERATIONS * _CHECK_INTERVAL)
            if self.count == 1 or not budget.left:
                return False
            one, other = self.random.sample(range(self.count), 2)
            self._try(one, other, self.random.randrange(self.n))
        return False

    def _try(self, one: int, other: int, a: int) -> None:
        """Swap a square a, b, c, d with edges ab and cd in `one` and bc and da in `other`."""
        b = self.random.choice(self.around[one][a])
        c = self.random.choice(self.around[other][b])
        corners = [d for d in self.around[one][c] if d in self.around[other][a] and d != b]
        if c == a or not corners:
            return
        d = corners[0]
        more = self._change(one, a, b, c, d) + self._change(other, b, c, d, a)
        if more > 0 and self.random.random() > _WORSENING_PROBABILITY**more:
            return
        self.cycles += more
        self._exchange(one, a, b, c, d)
        self._exchange(other, b, c, d, a)

    def _change(self, factor: int, a: int, b: int, c: int, d: int) -> int:
        """Change in the number of cycles if edges bc and da replace ab and cd."""
        successors = self.successors[factor]
        if self.label[factor][a] != self.label[factor][c]:
            return -1
        same_direction = (successors[a] == b) == (successors[c] == d)
        return 1 if same_direction else 0

    def _exchange(self, factor: int, a: int, b: int, c: int, d: int) -> None:
        for vertex, old, new in ((a, b, d), (b, a, c), (c, d, b), (d, c, a)):
            pair = self.around[factor][vertex]
            pair[pair.index(old)] = new
        self._number(factor, (a, b, c, d))

    def _number(self, factor: int, vertices: Iterable[int]) -> int:
        """Relabel the cycles through these vertices; returns their number."""
        around, successors, label = self.around[factor], self.successors[factor], self.label[factor]
        before = self.labels
        for start in vertices:
            if label[start] > before:
                continue
            self.labels += 1
            previous, vertex = around[start][0], start
            while label[vertex] != self.labels:
                label[vertex] = self.labels
                one, other = around[vertex]
                successors[vertex] = other if one == previous else one
                previous, vertex = vertex, successors[vertex]
        return self.labels - before
