"""Connected components of vertices, of links given by their ends: `components(topology.link_ends, vertices)`."""

from __future__ import annotations

import numpy as np

from tasp_lab.core.arrays import IntArray, distinct


def components(ends: IntArray, size: int) -> IntArray:
    """The connected component of each of `size` vertices, over links with these ends in either direction.

    Components are numbered in the order of their first vertices. Vertices take over the lowest number of their
    neighbours, and the number of the vertex with that number, until nothing changes: a few rounds where switches join
    all ranks, logarithmic in the length of a chain.

    >>> components(np.array([[0, 3], [4, 1]]), 5).tolist()
    [0, 1, 2, 0, 1]
    """
    lowest = np.arange(size)
    sources, destinations = ends.T
    while True:
        before = lowest
        low = np.minimum(before[sources], before[destinations])
        lowest = before.copy()
        # The representatives of both ends take the lower number, so that whole components join at once.
        for joining in (before[sources], before[destinations]):
            np.minimum.at(lowest, joining, low)
        lowest = lowest[lowest]
        if np.array_equal(lowest, before):
            return np.unique(lowest, return_inverse=True)[1].astype(np.int64)


def strong_components(ends: IntArray, size: int) -> IntArray:
    """The strongly connected component of each of `size` vertices, over links with these ends.

    >>> strong_components(np.array([[0, 1], [1, 0], [1, 2]]), 3).tolist()
    [0, 0, 1]
    """
    forward, back = (distinct(ends[:, which] @ np.array([size, 1])) for which in ([0, 1], [1, 0]))
    if np.array_equal(forward, back):  # where every link has an opposite one, direction does not matter
        return components(ends, size)
    from scipy.sparse import coo_array  # takes longer to import than most predictions take
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=(size, size))
    label = connected_components(graph.tocsr(), directed=True, connection="strong")[1]
    first, number = np.unique(label, return_index=True, return_inverse=True)[1:]
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[number]
