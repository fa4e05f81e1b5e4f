"""Rings over nodes that use every pair of ranks inside a node, and every NIC, equally.

There are ``u`` nodes of ``m`` ranks, and a NIC per rank. Ranks are numbered node by node, ``rank = node * m + local``.
A *node ring* follows a Hamiltonian path of node 0, hops to node 1, follows a path there, ..., and hops from the last
node back to its start. The ``m`` paths of `hamiltonian_paths` in every node give ``m`` node rings. In a step in which
every rank sends on every ring, each ordered pair of ranks inside a node carries one block, and each NIC sends and
receives one. ``K*_3`` and ``K*_5`` have no such paths; twice as many rings then use every pair and every NIC twice.

Node rings are *rail-aligned* if every hop between nodes joins equal local ranks: the path on a node ends with the
local rank with which the path on the next node starts, and likewise from the last node to the first.

When rail-aligned rings exist
-----------------------------
The paths of a node define a permutation, *starts to ends*. Reversing all paths inverts it, and renaming the ranks
conjugates it. Rail-aligned rings close exactly if the product of the permutations of all nodes is the identity.

``u`` even
    Nodes in pairs, the second one inverse to the first.
``u`` odd, ``m`` odd
    Starts to ends is one cycle ``c`` through all ranks, and so is its square, since ``m`` is odd. Hence ``c``, ``c``
    and the inverse of ``c c`` are conjugate; their product is the identity. The other nodes are paired.
``u`` odd, ``m`` even, not 2
    `even_hamiltonian_paths` has cycles of length two, and for ``m = 2 mod 4`` also one of length four. On two
    cycles of length two, the three exchanges of two pairs of four elements are conjugate and give the identity; on the
    cycles of length four and two, three permutations of six elements do.
``u`` odd, ``m`` = 2
    Impossible for any order of the nodes: every ring changes the local rank in every node.

``docs/why/rings.md#7-rail-aligned-rings`` has the proofs.

References
----------
Y. Wang et al., "TASP: Topology-aware Sequence Parallelism", arXiv:2509.26541, 2025: node rings without alignment.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import Int32Array
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.rings.hamiltonian_paths import (
    even_hamiltonian_paths,
    hamiltonian_paths,
    two_fold_hamiltonian_paths,
)

__all__ = ["is_rail_aligned", "node_rings", "verify_node_rings"]

# Three conjugate permutations whose product is the identity: two exchanges; a cycle of four and an exchange.
_THREE_OF_FOUR: Final = np.array([[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
_THREE_OF_SIX: Final = np.array([[1, 2, 3, 0, 5, 4], [1, 3, 4, 5, 2, 0], [4, 3, 5, 0, 1, 2]])


def node_rings(node_count: int, ranks_per_node: int, *, rail_aligned: bool | None = None) -> Int32Array:
    """The rings of ``node_count`` nodes that use every pair of ranks inside a node, and every NIC, equally.

    Parameters
    ----------
    node_count : int
        Number of nodes, at least 2.
    ranks_per_node : int
        Ranks of a node, at least 1.
    rail_aligned : bool, optional
        Whether hops between nodes must join equal local ranks. None: where possible.

    Returns
    -------
    Int32Array
        Shape ``(rings, node_count * ranks_per_node)``; each row lists the ranks of one ring, node by node. There
        are ``ranks_per_node`` rings, which use every pair of ranks inside a node and every NIC once; with 3 or 5
        ranks per node, twice as many, which use them twice. Ring ``i`` starts with rank ``i % ranks_per_node``.

    Raises
    ------
    NoDecompositionError
        For fewer than 2 nodes or 1 rank, or for rail-aligned rings of an odd number of nodes of 2 ranks, which do
        not exist.

    Examples
    --------
    >>> node_rings(2, 2).tolist()
    [[0, 1, 3, 2], [1, 0, 2, 3]]
    >>> node_rings(2, 2, rail_aligned=False).tolist()
    [[0, 1, 2, 3], [1, 0, 3, 2]]
    """
    u, m = node_count, ranks_per_node
    if u < 2 or m < 1:
        raise NoDecompositionError(f"node rings of {u} x {m}: expected 2 or more nodes and 1 or more ranks per node")
    impossible = u % 2 == 1 and m == 2
    if rail_aligned and impossible:
        raise NoDecompositionError(
            f"rail-aligned node rings of {u} x 2 do not exist: a ring changes the local rank in each of the {u} nodes, "
            "an odd number, and cannot close"
        )
    align = not impossible if rail_aligned is None else rail_aligned
    rings = _rail_aligned_rings(u, m) if align else _plain_rings(u, m)
    verify_node_rings(rings, u, m)
    assert is_rail_aligned(rings, m) or not align
    return rings


def is_rail_aligned(rings: Int32Array, ranks_per_node: int) -> bool:
    """Whether every hop between nodes joins equal local ranks.

    >>> is_rail_aligned(node_rings(2, 4), 4), is_rail_aligned(node_rings(2, 4, rail_aligned=False), 4)
    (True, False)
    """
    successors = np.roll(rings, -1, axis=1)
    same_node = rings // ranks_per_node == successors // ranks_per_node
    return bool(np.all(same_node | (rings % ranks_per_node == successors % ranks_per_node)))


def verify_node_rings(rings: Int32Array, node_count: int, ranks_per_node: int) -> None:
    """Check that rings visit every rank, and use every pair inside a node and every NIC equally often.

    The number of uses is the number of rings over the ranks of a node. The NICs follow from the pairs: a rank sends
    and receives once on every ring, and equally often inside its node as every other rank.

    Raises
    ------
    NoDecompositionError
        Names the first invalid ring or pair.

    Examples
    --------
    >>> verify_node_rings(np.array([[0, 1, 2, 3], [1, 0, 3, 2]], dtype=np.int32), 2, 2)
    >>> verify_node_rings(np.array([[0, 1, 2, 3], [0, 1, 3, 2]], dtype=np.int32), 2, 2)
    Traceback (most recent call last):
    tasp_lab.core.errors.NoDecompositionError: pair 0 -> 1 is used 2 times, expected 1
    """
    u, m = node_count, ranks_per_node
    world_size = u * m
    if rings.ndim != 2 or rings.shape[1] != world_size or len(rings) % m or not len(rings):
        raise NoDecompositionError(f"expected a multiple of {m} rings of {world_size} ranks, got shape {rings.shape}")
    is_ring = np.all(np.sort(rings, axis=1) == np.arange(world_size), axis=1)
    if not is_ring.all():
        ring = int(np.argmin(is_ring))
        raise NoDecompositionError(f"ring {ring} does not visit each of the ranks 0..{world_size - 1} exactly once")
    fold = len(rings) // m
    successors = np.roll(rings, -1, axis=1)
    inside = rings // m == successors // m
    pairs = rings[inside].astype(np.int64) * m + successors[inside] % m
    uses = np.bincount(pairs, minlength=world_size * m).reshape(world_size, m)
    ranks = np.arange(world_size)
    uses[ranks, ranks % m] = fold  # no rank sends to itself
    if (uses != fold).any():
        rank, local = map(int, np.argwhere(uses != fold)[0])
        raise NoDecompositionError(
            f"pair {rank} -> {rank - rank % m + local} is used {uses[rank, local]} times, expected {fold}"
        )


def _plain_rings(node_count: int, m: int) -> Int32Array:
    """Every ring follows the same path on every node."""
    paths = two_fold_hamiltonian_paths(m) if m in (3, 5) else hamiltonian_paths(m)
    return np.hstack([paths + node * m for node in range(node_count)]).astype(np.int32)


def _rail_aligned_rings(node_count: int, m: int) -> Int32Array:
    """Every ring follows the path that starts where it arrives; each node renames the ranks of the paths.

    Two-fold paths form two sets of ``m``, each with a path from every rank, and a ring stays in its set. The
    permutation of the second set is the inverse of that of the first, and all of them are powers of one permutation,
    so the rings of both sets close.
    """
    if m in (3, 5):
        paths = two_fold_hamiltonian_paths(m)
    else:
        paths = hamiltonian_paths(m) if node_count % 2 == 0 else even_hamiltonian_paths(m)
    first_of_set = np.arange(len(paths)) // m * m
    local = paths[:, 0]
    rings = np.empty((len(paths), node_count, m), dtype=np.int32)
    for node, ends in enumerate(_ends_that_close(paths[:m, -1], node_count)):
        new_name = _renaming(paths[:m, -1], ends)
        followed = new_name[paths[first_of_set + np.argsort(new_name)[local]]]
        rings[:, node] = followed + node * m
        local = followed[:, -1]
    return rings.reshape(len(paths), -1)


def _ends_that_close(ends: npt.NDArray[np.integer], node_count: int) -> list[npt.NDArray[np.integer]]:
    """The permutation of every node: conjugates of ``ends`` whose product is the identity."""
    closed = [] if node_count % 2 == 0 else _three_that_close(ends)
    return closed + [ends, np.argsort(ends)] * ((node_count - len(closed)) // 2)


def _three_that_close(ends: npt.NDArray[np.integer]) -> list[npt.NDArray[np.integer]]:
    m = len(ends)
    if m % 2 == 1:
        return [ends, ends, np.argsort(ends[ends])]
    head = _THREE_OF_SIX if m % 4 == 2 else _THREE_OF_SIX[:, :0]
    fours = [_THREE_OF_FOUR + first for first in range(head.shape[1], m, 4)]
    return list(np.hstack([head, *fours]))


def _renaming(ends: npt.NDArray[np.integer], wanted: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The renaming of ranks that turns the permutation ``ends`` into its conjugate ``wanted``."""
    new_name = np.empty(len(ends), dtype=np.int64)
    new_name[_along_cycles(ends)] = _along_cycles(wanted)
    return new_name


def _along_cycles(permutation: npt.NDArray[np.integer]) -> list[int]:
    """All elements, cycle by cycle, the longest cycles first."""
    successors = permutation.tolist()
    cycles: list[list[int]] = []
    visited = [False] * len(successors)
    for first in range(len(successors)):
        cycle: list[int] = []
        element = first
        while not visited[element]:
            visited[element] = True
            cycle.append(element)
            element = successors[element]
        cycles.append(cycle)
    return [element for cycle in sorted(cycles, key=len, reverse=True) for element in cycle]
