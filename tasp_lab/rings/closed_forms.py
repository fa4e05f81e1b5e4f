"""Rings known without a search: of complete digraphs, of nodes with one NIC per rank, single cycles, and meshes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.rings.complete_digraph import hamiltonian_cycles, two_fold_hamiltonian_cycles
from tasp_lab.rings.factors import rings_of
from tasp_lab.rings.node_rings import is_rail_aligned, node_rings
from tasp_lab.rings.rings import Decomposition, is_ring
from tasp_lab.topology.graph import Topology

MAX_RANKS_OF_COMPLETE = 4096
"""The 4095 rings of this many ranks take a gigabyte during verification."""


def closed_forms(topology: Topology, fold: int | None, rail_aligned: bool | None) -> Iterator[Decomposition]:
    """The known rings of a topology, best first. `fold` and `rail_aligned` are as in `decompose.decompose`.

    A larger fold than requested is returned where a theorem excludes equally fast rings of a smaller fold.
    """
    groups = _nodes_of(topology)
    if groups is not None:
        yield _of_nodes(topology, groups, fold, rail_aligned)
    elif rail_aligned:
        raise NoDecompositionError(f"{topology.name} has no rails: it does not consist of nodes with one NIC per rank")
    if groups is not None and topology.world_size > MAX_RANKS_OF_COMPLETE:
        return
    if topology.is_complete:
        own_links = len(topology.vertices) == topology.world_size and not topology.shared
        uniform = own_links and topology.table.is_uniform
        if fold != 1 or uniform or topology.world_size not in (4, 6):
            yield _of_complete_digraph(topology, fold)
    mesh = mesh_ring(topology)
    if mesh is not None and fold in (None, 1):
        both = np.concatenate([mesh.rings, mesh.rings[:, ::-1]])
        yield Decomposition(topology, both, 1, f"{mesh.reason}, each way")
    links = topology.linked_pairs
    if fold in (None, 1) and (links.sum(axis=0) == 1).all() and (links.sum(axis=1) == 1).all():
        yield Decomposition(topology, rings_of(links.argmax(axis=1)[None]), 1, "the topology is one directed ring")


def gray_ring(topology: Topology) -> Decomposition | None:
    """The ring of the reflected binary Gray code, whose neighbours differ in one digit; None if it is no ring here.

    It is one in every hypercube (Gilbert, "Gray codes and paths on the n-cube", 1958).

    >>> from tasp_lab.topology.builders import hypercube
    >>> gray_ring(hypercube(3)).rings.tolist()
    [[0, 1, 3, 2, 6, 7, 5, 4]]
    """
    ranks = np.arange(topology.world_size)
    order = ranks ^ ranks >> 1
    if topology.world_size & topology.world_size - 1 or topology.is_complete or not is_ring(topology, order.tolist()):
        return None
    return Decomposition(topology, order[None], 1, "the Gray code of the ranks")


def mesh_ring(topology: Topology) -> Decomposition | None:
    """A comb in a grid with an open side: along an even side, and back to and fro. None without such, or if none fits.

    >>> from tasp_lab.topology.builders import torus
    >>> mesh_ring(torus((2, 3), wraps=(False, False))).rings.tolist()
    [[1, 2, 5, 4, 3, 0]]
    """
    grid = topology.grid
    if grid is None or all(grid.wraps):  # of tori a search finds more
        return None
    even = next((at for at, side in enumerate(grid.sides) if side % 2 == 0), 0)
    rows = np.moveaxis(np.arange(topology.world_size).reshape(grid.sides), even, 0)
    while rows.ndim > 2:  # the last two dimensions as one: every other line of the last is passed backwards
        rows = rows.copy()
        rows[..., 1::2, :] = rows[..., 1::2, ::-1]
        rows = rows.reshape(*rows.shape[:-2], -1)
    rows = rows.reshape(len(rows), -1)
    teeth = [row[:0:-1] if at % 2 else row[1:] for at, row in enumerate(rows)]
    order = np.concatenate([*teeth, rows[::-1, 0]])
    fits = len(order) > 2 and is_ring(topology, order.tolist())
    return Decomposition(topology, order[None], 1, "a comb through the grid") if fits else None


def _of_complete_digraph(topology: Topology, fold: int | None) -> Decomposition:
    if (n := topology.world_size) > MAX_RANKS_OF_COMPLETE:
        raise NoDecompositionError(
            f"the {n - 1} rings of K*_{n} are too many, expected at most {MAX_RANKS_OF_COMPLETE} ranks"
        )
    if n in (4, 6) and fold != 1:
        reason = (
            f"K*_{n} has no {n - 1} rings that share no pair of ranks (Tillson 1980); "
            "these two-fold rings use each pair of ranks twice"
        )
        return Decomposition(topology, two_fold_hamiltonian_cycles(n), 2, reason)
    reason = f"K*_{n} decomposes into {n - 1} rings that share no pair of ranks"
    return _of_fold(Decomposition(topology, hamiltonian_cycles(n), 1, reason), fold)


def _of_fold(once: Decomposition, fold: int | None) -> Decomposition:
    if fold != 2:
        return once
    return Decomposition(once.topology, np.repeat(once.rings, 2, axis=0), 2, f"{once.reason}; each ring twice")


def _of_nodes(topology: Topology, groups: IntArray, fold: int | None, rail_aligned: bool | None) -> Decomposition:
    """The rings of (m-K_m-m)^u, renumbered from node-by-node ranks to the ranks in `groups`."""
    node_count, per_node = groups.shape
    by_node = node_rings(node_count, per_node, rail_aligned=rail_aligned)
    rings = groups.ravel()[by_node]
    least_fold = 2 if per_node in (3, 5) else 1
    times = "once" if least_fold == 1 else "twice"
    reason = (
        f"({per_node}-K_{per_node}-{per_node})^{node_count}: {len(rings)} rings of Hamiltonian paths inside the nodes "
        f"use every pair inside a node and every NIC {times}"
    )
    if least_fold == 2:
        reason += f"; K*_{per_node} has no {per_node} Hamiltonian paths that share no pair of ranks"
    if is_rail_aligned(by_node, per_node):
        reason += "; every hop between nodes joins equal local ranks"
    found = Decomposition(topology, rings, least_fold, reason)
    return _of_fold(found, fold) if least_fold == 1 else found


def _nodes_of(topology: Topology) -> IntArray | None:
    """The ranks of each node, an array (nodes, ranks per node), if the topology is nodes joined by one network.

    The network is the set of switches that reaches all ranks. Without it each rank must reach exactly the ranks of its
    own node, at least two. Ranks at the same position of two nodes are those with the shortest route between them.
    """
    n = topology.world_size
    if len(topology.vertices) == n:
        return None
    inside = topology.table.joined
    networks = 0
    for entries, exits in topology.crossings():
        if len(entries) == len(exits) == n:
            networks += 1
        else:
            inside[np.ix_(entries, exits)] = True
    np.fill_diagonal(inside, True)
    first_of_node = inside.argmax(axis=1)
    firsts, sizes = np.unique(first_of_node, return_counts=True)
    if networks != 1 or len(firsts) < 2 or sizes[0] < 2 or (sizes != sizes[0]).any():
        return None
    if not all((row == (first_of_node == own)).all() for row, own in zip(inside, first_of_node, strict=True)):
        return None
    members = [np.flatnonzero(inside[first]) for first in firsts]
    return np.array([members[0], *(_aligned_with(topology, members[0], each) for each in members[1:])])


def _aligned_with(topology: Topology, first: IntArray, others: IntArray) -> IntArray:
    """The ranks of another node in the order of their nearest ranks in the first, if these differ; else unchanged."""
    constraints, _ = topology.routes(np.repeat(first, len(others)), np.tile(others, len(first)))
    links = (constraints >= 0) & (constraints < len(topology.links))
    nearest = links.sum(axis=1).reshape(len(first), len(others)).argmin(axis=1)
    return others[nearest] if len(np.unique(nearest)) == len(others) else others


# Rings of a full mesh on which any two ranks are at each distance equally often.
#
# What leaves every rank of every ring for the rank d places before it, as results of TokenRing do, then loads all links
# equally, for each d. Rings that use each link once balance only d = 1 and d = n - 1.
#
# **Prime powers.** Let q be a prime power, and take the images of a ring (x_0, ..., x_{q-1}) of the elements of the
# field of q elements under all maps x -> ax + b with a not 0. For two ranks u, v and a distance d, exactly one such map
# takes x_i to u and x_{i+d} to v, for each i. So there are q of them, whatever u, v and d. The ring 0, 1, ..., q - 1
# (elements as numbers to base p, digit by digit) is its own image under adding q/p, so q (q-1) / p images are
# different: those of a prime are the q - 1 multiples of one ring; of 8 they are 28, of 4 all 6.
#
# **Even numbers of ranks** need more than n - 1 rings. Number the ranks by their place on one ring, let f(x) be the
# place of rank x on another. If no two ranks are at the same distance on both, f(x) - x is different for all x, so
# modulo n the sum of f(x) - x is that of all numbers, n (n-1) / 2, which is not 0 for even n; but the sums of f(x) and
# of x are equal. So any two rings put two ranks at the same distance, and the link between them carries twice.


def balanced_rings(n: int) -> IntArray | None:
    """Rings of n ranks, each from rank 0 on, an int array (rings, n); None unless n is a prime power.

    >>> balanced_rings(5).tolist()
    [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [0, 3, 1, 4, 2], [0, 4, 3, 2, 1]]
    >>> [0 if rings is None else len(rings) for rings in map(balanced_rings, (2, 4, 6, 8, 9, 16))]
    [1, 6, 0, 28, 24, 120]
    """
    prime = next((p for p in range(2, n + 1) if n % p == 0), 0)
    degree = next((k for k in range(1, n.bit_length() + 1) if prime**k == n), 0)
    if not degree:
        return None
    weights = prime ** np.arange(degree)
    digits = np.arange(n)[:, None] // weights % prime
    sums: IntArray = (digits[:, None] + digits) % prime @ weights
    images = sums[:, _multiples(digits, prime, weights)].reshape(-1, n)
    start = (images == 0).argmax(axis=1)
    rings: IntArray = np.unique(images[np.arange(len(images))[:, None], (start[:, None] + np.arange(n)) % n], axis=0)
    return rings


def _multiples(digits: IntArray, prime: int, weights: IntArray) -> IntArray:
    """All multiples of the elements of a field but those by 0, an array (n - 1, n)."""
    n, degree = digits.shape
    for reduced in product(range(prime), repeat=degree):
        # times x, where x to the power of the degree is `reduced`: digits move up, the highest one is reduced
        raised = np.pad(digits[:, :-1], ((0, 0), (1, 0))) + digits[:, -1:] * np.array(reduced)
        times = raised % prime @ weights
        powers = [np.arange(n)]
        while len(powers) < n and (times[powers[-1]][1] != 1):
            powers.append(times[powers[-1]])
        if len(powers) == n - 1 and np.array_equal(times[powers[-1]], powers[0]):
            return np.stack(powers)
    raise AssertionError(f"a field of {n} elements has a generator")
