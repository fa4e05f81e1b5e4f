"""1-factors of digraphs, of which rings are a special case, and searches for rings that switch between factors.

A *1-factor* of a digraph is a set of arcs with one out of and one into every vertex: a permutation. A ring is a
1-factor that is a single cycle. The maximum number of arc-disjoint 1-factors follows from a maximum flow and is an
upper bound of the number of arc-disjoint rings.

Digraphs are bool arrays (n, n): entry [i, j] is whether there is an arc from vertex i to vertex j.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.rings.search_budget import SearchBudget


def regular_part(linked: BoolArray, degree: int, random: Random) -> BoolArray | None:
    """A random spanning subgraph with `degree` arcs out of and into every vertex; None if there is none.

    By a maximum flow from all sources to all destinations, which are shuffled.

    >>> int(regular_part(~np.eye(3, dtype=bool), 1, Random(0)).sum())
    3
    """
    from scipy.sparse import csr_array  # takes longer to import than most predictions take
    from scipy.sparse.csgraph import maximum_flow

    n = len(linked)
    if (linked.sum(axis=0) == degree).all() and (linked.sum(axis=1) == degree).all():
        return linked.copy()
    shuffled = np.ix_(*_shuffles(n, random))
    tails, heads = linked[shuffled].nonzero()
    source, sink, every = 2 * n, 2 * n + 1, np.arange(n)
    rows = np.concatenate([tails, np.full(n, source), n + every])
    columns = np.concatenate([n + heads, every, np.full(n, sink)])
    capacity = np.concatenate([np.ones(len(tails)), np.full(2 * n, degree)]).astype(np.int32)
    result = maximum_flow(csr_array((capacity, (rows, columns)), shape=(2 * n + 2, 2 * n + 2)), source, sink)
    if result.flow_value < n * degree:
        return None
    part = np.empty_like(linked)
    part[shuffled] = result.flow.toarray()[:n, n : 2 * n] > 0
    return part


def random_factors(regular: BoolArray, random: Random) -> IntArray:
    """A random decomposition of a regular digraph into 1-factors, an array (degree, n) of the successor of each vertex.

    A regular digraph always decomposes into 1-factors (Koenig, 1916).
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    left = regular.copy()
    n = len(left)
    factors = np.empty((int(left[0].sum()), n), dtype=np.int64)
    for factor in factors:
        rows, columns = _shuffles(n, random)
        match = maximum_bipartite_matching(csr_array(left[np.ix_(rows, columns)]), perm_type="column")
        factor[rows] = columns[match]
        left[np.arange(n), factor] = False
    return factors


def _shuffles(n: int, random: Random) -> tuple[IntArray, IntArray]:
    generator = np.random.default_rng(random.randrange(2**32))
    return generator.permutation(n), generator.permutation(n)


def rings_of(successors: Sequence[Sequence[int]] | IntArray) -> IntArray:
    """1-factors of one cycle each as an array (rings, n): the vertices in cycle order, starting with vertex 0.

    >>> rings_of([[2, 0, 1]])
    array([[0, 2, 1]])
    """
    factors = np.asarray(successors, dtype=np.int64)
    rings = np.zeros_like(factors)
    for position in range(1, factors.shape[1]):
        rings[:, position] = factors[np.arange(len(factors)), rings[:, position - 1]]
    return rings


# Rings over bidirectional links, found by switching squares between 2-factors.
#
# A *2-factor* of an undirected graph is a set of edges with two at every vertex: cycles that visit every vertex once. A
# 2-factor that is a single cycle is a Hamiltonian cycle; its two directions are two rings. A regular graph of degree 2k
# decomposes into k 2-factors (Petersen, 1891). If the edges of a square alternate between two of them, swapping these
# edges yields 2-factors again. In each factor this joins two cycles, splits one, or reverses a part of one. A swap is
# kept if it does not increase the number of cycles. Tori and hypercubes have many squares, and a few swaps per vertex
# suffice.


_SQUARE_WORSENING_PROBABILITY = 0.02
"""Probability of keeping a swap that adds one cycle."""

_SQUARE_START_OPERATIONS, _SQUARE_ARC_OPERATIONS, _SQUARE_SWAP_OPERATIONS = 200, 10, 5
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
        budget.spend(_SQUARE_START_OPERATIONS + _SQUARE_ARC_OPERATIONS * int(linked.sum()))
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
                budget.spend(_SQUARE_SWAP_OPERATIONS * _CHECK_INTERVAL)
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
        if more > 0 and self.random.random() > _SQUARE_WORSENING_PROBABILITY**more:
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


# Arc-disjoint rings of a digraph, found by switching between 1-factors.
#
# The search starts with as many arc-disjoint 1-factors as rings are requested. The union of two of them, as a bipartite
# graph of sources and destinations, decomposes into alternating closed walks. Swapping the arcs of one walk between the
# two yields 1-factors again. A swap is kept if it does not increase the number of cycles. Symmetric digraphs are first
# searched as 2-factors (above), which allow more swaps. The search is random with a fixed seed. Its failure proves
# nothing.

SWITCHING_OPERATIONS = 2_000_000
"""Operations of switching before another search that can also prove infeasibility."""

_START_OPERATIONS, _ARC_OPERATIONS, _SWAP_OPERATIONS = 200, 10, 8
"""Fixed cost of drawing 1-factors, cost per arc of them, and cost of one attempted swap."""

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
    random, every = Random(0), np.arange(len(linked))
    if regular_part(linked, count, random) is None:
        return None
    if count % 2 == 0 and (linked.sum(axis=0) == count).all() and (linked == linked.T).all():
        cycles = undirected_hamiltonian_cycles(linked, budget.half(), Random(0))
        if cycles is not None:
            return np.concatenate([cycles, np.roll(cycles[:, ::-1], 1, axis=1)])
    inside = [ring for ring in ([] if start is None else start) if linked[ring, np.roll(ring, -1)].all()]
    kept = [np.roll(ring, -1)[np.argsort(ring)] for ring in inside[:count]]  # successors
    while True:
        budget.spend(_START_OPERATIONS + _ARC_OPERATIONS * count * len(linked))
        left = linked.copy()
        for successors in kept:
            left[every, successors] = False
        part = regular_part(left, count - len(kept), random)
        if part is not None:
            switching = _Switching(np.stack([*kept, *random_factors(part, random)]), random)
            if switching.run(budget):
                return rings_of(switching.successors)
        if not budget.allows_more():
            return None
        kept = random.sample(kept, max(len(kept) - 2, 0))


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
