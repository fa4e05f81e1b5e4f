"""1-factors of digraphs, of which rings are a special case.

A *1-factor* of a digraph is a set of arcs with one out of and one into every vertex: a permutation. A ring is a
1-factor that is a single cycle. The maximum number of arc-disjoint 1-factors follows from a maximum flow and is an
upper bound of the number of arc-disjoint rings.

Digraphs are bool arrays (n, n): entry [i, j] is whether there is an arc from vertex i to vertex j.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching, maximum_flow

from tasp_lab.core.arrays import BoolArray, IntArray


def regular_part(linked: BoolArray, degree: int, random: Random) -> BoolArray | None:
    """A random spanning subgraph with `degree` arcs out of and into every vertex; None if there is none.

    >>> int(regular_part(~np.eye(3, dtype=bool), 1, Random(0)).sum())
    3
    """
    n = len(linked)
    if (linked.sum(axis=0) == degree).all() and (linked.sum(axis=1) == degree).all():
        return linked.copy()
    rows, columns = _shuffles(n, random)
    shuffled = _regular_part(linked[np.ix_(rows, columns)], degree)
    if shuffled is None:
        return None
    part = np.empty_like(linked)
    part[np.ix_(rows, columns)] = shuffled
    return part


def _regular_part(linked: BoolArray, degree: int) -> BoolArray | None:
    """Deterministic, by a maximum flow from all sources to all destinations."""
    n = len(linked)
    tails, heads = linked.nonzero()
    source, sink, every = 2 * n, 2 * n + 1, np.arange(n)
    rows = np.concatenate([tails, np.full(n, source), n + every])
    columns = np.concatenate([n + heads, every, np.full(n, sink)])
    capacity = np.concatenate([np.ones(len(tails)), np.full(2 * n, degree)]).astype(np.int32)
    result = maximum_flow(csr_array((capacity, (rows, columns)), shape=(2 * n + 2, 2 * n + 2)), source, sink)
    if result.flow_value < n * degree:
        return None
    part: BoolArray = result.flow.toarray()[:n, n : 2 * n] > 0
    return part


def random_factors(regular: BoolArray, random: Random) -> IntArray:
    """A random decomposition of a regular digraph into 1-factors, an array (degree, n) of the successor of each vertex.

    A regular digraph always decomposes into 1-factors (Koenig, 1916).
    """
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
