"""Which ranks, switches and links of a topology are alike: colour refinement around each of its vertices.

    vertices, links = alike(load_machine("h100-4x8").topology)     # one class of ranks, one of NICs in each direction

One vertex is marked, and all vertices are coloured by their links and the colours at the other ends, again and again,
until no colour is split. Two vertices are alike if the same colours are around them, and two links if they also lead to
the same colour. A symmetry of the topology maps parts to parts that are alike. The reverse, that parts which are alike
are symmetric, holds for the topologies of machines, though there are graphs for which it does not.

Without the mark, all links of a torus of 3 x 4 would be alike: each rank has four. With it, two neighbours of the
marked rank are neighbours of each other, in the rings of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import IntArray, numbered
from tasp_lab.topology.graph import Topology

Labels = Sequence[npt.NDArray[Any]]
"""Arrays of one length: ranks, or links, that differ in one of them are not alike."""

Colours = npt.NDArray[np.uint64]


def alike(topology: Topology, of_ranks: Labels = (), of_links: Labels = ()) -> tuple[IntArray, IntArray]:
    """The class of each vertex and of each link, int arrays (vertices,) and (links,), as `vertices` and `links` are.

    Parameters
    ----------
    of_ranks, of_links : what else tells them apart, such as speeds of ranks and the bytes that links carry.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> [each.tolist() for each in alike(full_mesh(3), [np.array([1, 2, 1])])]
    [[0, 1, 0], [0, 1, 2, 2, 1, 0]]
    """
    count, links = len(topology.vertices), len(topology.links)
    if topology.table.is_mesh and not topology.shared and not of_ranks and not of_links:
        return np.zeros(count, dtype=np.int64), np.zeros(links, dtype=np.int64)
    kinds = [*topology.switch_kinds.values()]
    node_sizes = np.bincount(topology.node_of_rank)[list(topology.node_of_rank)]
    ranks = numbered(node_sizes, *of_ranks)[1]
    # a capacity that links share is one more vertex, which is linked with both ends of each of them
    others = [*map(kinds.index, kinds), *(len(kinds) for _ in topology.shared)]
    labels = np.concatenate([ranks, topology.world_size + np.array(others, dtype=np.int64)])
    of_link = numbered(topology.link_bandwidths_bytes_per_s, topology.table.latencies_s(np.arange(links)), *of_links)[1]
    place = {link.name: index for index, link in enumerate(topology.links)} if topology.shared else {}
    rates = [float(each.bandwidth_bytes_per_s) for each in topology.shared]
    covered = [(place[name], at) for at, each in enumerate(topology.shared) for name in each.links]
    link, at = np.array(covered, dtype=np.int64).reshape(-1, 2).T
    capacity, rate_label = count + at, links + numbered(np.array(rates))[1][at]
    begins, ends = topology.link_ends.T
    source = np.concatenate([begins, begins[link], capacity])
    destination = np.concatenate([ends, capacity, ends[link]])
    refine = _Refinement(source, destination, np.concatenate([of_link, rate_label, rate_label]))
    around, towards = np.zeros(len(labels), dtype=np.uint64), np.zeros(links, dtype=np.uint64)
    by_source = np.argsort(begins, kind="stable")
    first = np.searchsorted(begins[by_source], np.arange(count + 1))
    for vertex in range(count):
        marked = 2 * labels.astype(np.uint64)
        marked[vertex] += np.uint64(1)
        colours = refine(_mixed(marked))
        around[vertex] = _mixed(colours).sum(dtype=np.uint64)
        leaving = by_source[first[vertex] : first[vertex + 1]]
        towards[leaving] = colours[ends[leaving]]
    vertices = numbered(around[:count].view(np.int64))[1]
    return vertices, numbered(of_link, vertices[begins], towards.view(np.int64))[1]


class _Refinement:
    """Splits colours of vertices by their links, the labels of these and the colours at their other ends."""

    def __init__(self, source: IntArray, destination: IntArray, labels: IntArray) -> None:
        self._source, self._destination = source, destination
        self._out, self._into = (_mixed((2 * labels + way).astype(np.uint64)) for way in (0, 1))

    def __call__(self, colours: Colours) -> Colours:
        found = 0
        while (count := len(np.unique(colours))) > found:
            found, around = count, np.zeros_like(colours)
            # different neighbourhoods have different sums but for a chance of 2**-64; sums have no order
            np.add.at(around, self._source, _mixed(self._out + colours[self._destination]))
            np.add.at(around, self._destination, _mixed(self._into + colours[self._source]))
            colours = _mixed(3 * colours + around)
        return colours


def _mixed(numbers: Colours) -> Colours:
    """Each number as another one that looks random, by splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Colours = mixed ^ (mixed >> np.uint64(31))
    return found
