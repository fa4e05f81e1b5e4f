"""Which ranks, switches and links of a topology are alike: colour refinement around each of its vertices.

One vertex is marked, and all are coloured by their links and the colours at the other ends, until no colour is split.
Vertices are alike if the same colours are around them, and links if they also lead to the same colour. Without the mark
all links of a torus of 3 x 4 would be alike; with it, neighbours in the rings of three are neighbours of each other.

A symmetry of the topology maps parts to parts that are alike. The reverse holds for machines, but not for all graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import IntArray, numbered
from tasp_lab.core.units import Number
from tasp_lab.topology.graph import Topology


def alike(topology: Topology, speeds: Sequence[Number] = ()) -> tuple[IntArray, IntArray]:
    """The class of each vertex and of each link, int arrays (vertices,) and (links,), as `vertices` and `links` are.

    Ranks of unequal `speeds` are not alike.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> [each.tolist() for each in alike(full_mesh(3), [1, 2, 1])]
    [[0, 1, 0], [0, 1, 2, 2, 1, 0]]
    """
    source, destination = topology.link_ends.T
    kinds = [*topology.switch_kinds.values()]
    node_sizes = np.bincount(topology.node_of_rank)[list(topology.node_of_rank)]
    of_ranks = numbered(node_sizes, np.array(speeds or node_sizes, dtype=float))[1]
    switches = [topology.world_size + kinds.index(kind) for kind in kinds]
    labels = np.concatenate([of_ranks, np.array(switches, dtype=np.int64)])
    sharing = {name: (len(each.links), each.bandwidth_bytes_per_s) for each in topology.shared for name in each.links}
    capacities = [sharing.get(link.name, (0, 0)) for link in topology.links] if sharing else [(0, 0)] * len(source)
    latencies_s = topology.table.latencies_s(np.arange(len(source)))
    shared_by, shared_bytes_per_s = np.array(capacities, dtype=float).reshape(-1, 2).T
    label = numbered(topology.link_bandwidths_bytes_per_s, latencies_s, shared_by, shared_bytes_per_s)[1]
    around, towards = np.zeros((2, max(len(labels), len(source))), dtype=np.uint64)
    for vertex in range(len(labels)):
        colours, classes = _mixed(2 * labels + (np.arange(len(labels)) == vertex)), 0
        while (count := len(np.unique(colours))) > classes:
            classes, sums = count, 3 * colours
            # different neighbourhoods have different sums but for a chance of 2**-64; sums have no order
            np.add.at(sums, source, _mixed(_mixed(2 * label) + colours[destination]))
            np.add.at(sums, destination, _mixed(_mixed(2 * label + 1) + colours[source]))
            colours = _mixed(sums)
        around[vertex] = _mixed(colours).sum(dtype=np.uint64)
        leaving = np.flatnonzero(source == vertex)
        towards[leaving] = colours[destination[leaving]]
    vertices = numbered(around[: len(labels)].view(np.int64))[1]
    return vertices, numbered(label, vertices[source], towards[: len(source)].view(np.int64))[1]


def _mixed(numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Each number as one that looks random, by splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)
