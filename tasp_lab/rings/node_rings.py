"""Rings over nodes that use every pair of ranks inside a node, and every NIC, equally.

There are ``u`` nodes of ``m`` ranks, and a NIC per rank. Ranks are numbered node by node, ``rank = node * m +
local``. A *node ring* follows a Hamiltonian path of node 0, hops to node 1, follows a path there, ..., and hops from
the last node back to its start. The ``m`` paths of `hamiltonian_paths` in every node give ``m`` node rings. In a step
in which every rank sends on every ring, each ordered pair of ranks inside a node carries one block, and each NIC
sends and receives one. ``K*_3`` and ``K*_5`` have no such paths; twice as many rings then use every pair and every
NIC twice.

Node rings are *rail-aligned* if every hop between nodes joins equal local ranks: the path on a node ends with the
local rank with which the path on the next node starts, and likewise from the last node to the first.

When rail-aligned rings exist
-----------------------------
Let rings use pairs and NICs ``f`` times: ``f = 2`` for ``m`` = 3 and 5, else 1. There are ``f m`` rings and ``f u m``
uses of NICs, and a ring through ``u`` nodes needs ``u`` of them. So each node holds ``f m`` Hamiltonian paths over all
its pairs. They define a permutation, *starts to ends*. Reversing all paths inverts it, and renaming the ranks
conjugates it. Rail-aligned rings close exactly if the product of the permutations of all nodes is the identity.

``u`` even
    Nodes in pairs, the second one inverse to the first.
``u`` odd
    Three nodes need conjugate permutations whose product is the identity; the other nodes are paired.
``m`` odd
    From 7 on, the paths are the decomposition of ``m + 1`` vertices without its last vertex, and starts to ends is one
    cycle ``c`` of odd length. So ``c``, ``c`` and the inverse of ``c c`` are conjugate; their product is the identity.
    For 3 and 5, zigzags have a rotation, mirrored ones its inverse; the same holds for both sets.
``m = 0 mod 4``
    Starts to ends is ``m / 2`` exchanges (`even_hamiltonian_paths`). The three exchanges of two pairs of four elements
    are conjugate and give the identity.
``m = 2 mod 4``, not 2
    ``m / 2`` exchanges are odd, and three odd permutations do not give the identity. Splitting the arcs of two or three
    zigzags into paths with two ends exchanged gives a cycle of length four and an odd number of exchanges, and three
    such permutations of six elements do. Paths are a head, a repeated piece and a tail, and each piece meets only its
    neighbours, so three successive numbers of pieces prove all; tried to ``m`` = 2050.
``m`` = 2, ``u`` odd
    Impossible for any order of the nodes: the only paths are 0 to 1 and 1 to 0, so a ring changes the local rank ``u``
    times and cannot return.

References
----------
Y. Wang et al., "TASP: Topology-aware Sequence Parallelism", arXiv:2509.26541, 2025: node rings without alignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import Int32Array
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.rings.complete_digraph import hamiltonian_cycles, zigzag_of

# Decompose the complete digraph into arc-disjoint directed Hamiltonian paths.
#
# The ``m (m - 1)`` arcs of ``K*_m`` split into ``m`` directed Hamiltonian paths exactly when ``m`` is neither 3 nor 5:
# every vertex then is the start of one path and the end of one, and joining all ends to all starts through one more
# vertex gives a decomposition of ``K*_{m+1}`` into Hamiltonian cycles; removing a vertex reverses this.
#
# ``m`` even: Walecki's zigzag ``0, 1, -1, 2, -2, ...`` modulo ``m``, rotated by the row number; its steps
# ``1, -2, 3, -4, ...`` are all different. ``m`` odd, 1 or at least 7: the cycles of `hamiltonian_cycles` for ``m + 1``,
# without their last vertex. ``m`` odd, every arc twice: the zigzag has every odd step twice and no even step; the
# mirrored zigzag has the even steps. No search is involved.


# Where K*_{m+1} has no decomposition into Hamiltonian cycles, K*_m has none into paths.
_IMPOSSIBLE: Final = (3, 5)


def hamiltonian_paths(m: int) -> Int32Array:
    """The arcs of the complete digraph on `m` vertices split into directed Hamiltonian paths, int32 (m, m).

    Row i lists the vertices of the path that starts with vertex i; the last column is a permutation. Every arc lies on
    exactly one row. Raises `NoDecompositionError` if `m` is 3 or 5, for which none exists, or below 1.

    >>> hamiltonian_paths(4).tolist()
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    if m in _IMPOSSIBLE:
        raise NoDecompositionError(
            f"K*_{m} does not split into {m} Hamiltonian paths: joined through one more vertex they would be {m} "
            f"arc-disjoint Hamiltonian cycles of K*_{m + 1}, which do not exist; {2 * m} paths that use every arc "
            f"exactly twice exist: two_fold_hamiltonian_paths({m})"
        )
    paths = _zigzags(m)
    if m % 2 == 1:  # each cycle is cut at its last vertex, which `_even_cycles` inserted into an arc of one path
        cycles = hamiltonian_cycles(m + 1).astype(np.int64)
        after = np.argmax(cycles == m, axis=1)[:, np.newaxis] + 1
        paths = np.take_along_axis(cycles, (after + np.arange(m)) % (m + 1), axis=1)
    return paths[np.argsort(paths[:, 0])].astype(np.int32)


def two_fold_hamiltonian_paths(m: int) -> Int32Array:
    """Directed Hamiltonian paths that cover every arc of the complete digraph exactly twice, int32 (2 m, m).

    Rows i and m + i start with vertex i; two rows end with each vertex. For even `m`, each path of `hamiltonian_paths`
    is listed twice. For odd `m` they are the zigzags and the mirrored zigzags; those of ``K*_3`` are all six paths.
    Raises `NoDecompositionError` if `m` is below 1.

    >>> two_fold_hamiltonian_paths(3).tolist()
    [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0]]
    """
    zigzags = _zigzags(m)
    mirrored = zigzags if m % 2 == 0 else (-zigzags % m)[np.argsort(-zigzags[:, 0] % m)]
    return np.vstack([zigzags, mirrored]).astype(np.int32)


def even_hamiltonian_paths(m: int) -> Int32Array:
    """Paths as in `hamiltonian_paths`, with an even permutation from starts to ends.

    The paths of `hamiltonian_paths` have this property unless ``m = 2 mod 4``. Then two zigzags exchange their ends:
    with ``h = m / 2``, the paths from ``0, 2, h, h + 2`` end at ``h + 2, h, 0, 2``, and every other path from ``i``
    still ends at ``i + h``.

    Parameters, returned array and errors are those of `hamiltonian_paths`; ``m = 2`` is refused too, since both
    paths of ``K*_2`` end at the other vertex.

    >>> even_hamiltonian_paths(6)[:, -1].tolist()
    [5, 4, 3, 0, 1, 2]
    """
    if m == 2:
        raise NoDecompositionError("K*_2 has only the paths 0 -> 1 and 1 -> 0, an odd permutation from starts to ends")
    paths = hamiltonian_paths(m)
    if m % 4 == 2:
        sign = 1 - 2 * (np.arange(m) % 2)
        for start, sums in _exchanged_zigzags(m).items():
            paths[start] = sign * np.cumsum(sign * [start, *map(int, sums)]) % m
    return paths


def _zigzags(m: int) -> npt.NDArray[np.int64]:
    """The zigzag through the integers modulo ``m``, rotated by the row number."""
    if m < 1:
        raise NoDecompositionError(f"a complete digraph needs at least 1 vertex, got m = {m}")
    return (zigzag_of(m) + np.arange(m)[:, np.newaxis]) % m


def _exchanged_zigzags(m: int) -> dict[int, str]:
    """Two or three paths by their starts, which use the arcs of the zigzags with these starts but exchange two ends.

    A path is given by the sums of neighbours along it, modulo ``m``; on the zigzag from ``i`` they alternate between
    ``2 i + 1`` and ``2 i``. Each repetition of a segment is shifted outwards on both sides of the zigzag: by four
    vertices, ``32`` by one.
    """
    repeats = m // 8
    if m % 8 == 2:
        return {0: "1" + "50141010" * repeats, 2: "54" + "05454145" * (repeats - 1) + "0545145"}
    return {
        0: "2014" + "05014101" * repeats + "0",
        2: "3545420" + "54541450" * (repeats - 1) + "545145" if repeats else "35452",
        m // 2 + 1: "32" * (m // 2 - 3) + "31531",
    }


# Three conjugate permutations whose product is the identity: two exchanges; a cycle of four and an exchange.
_THREE_OF_FOUR: Final = np.array([[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
_THREE_OF_SIX: Final = np.array([[1, 2, 3, 0, 5, 4], [1, 3, 4, 5, 2, 0], [4, 3, 5, 0, 1, 2]])


def node_rings(node_count: int, ranks_per_node: int, *, rail_aligned: bool | None = None) -> Int32Array:
    """The rings of nodes that use every pair of ranks inside a node, and every NIC, equally.

    With `rail_aligned`, hops between nodes join equal local ranks; None: where possible. Returns an int32 array
    (rings, node_count * ranks_per_node); each row lists the ranks of one ring, node by node. There are
    `ranks_per_node` rings, which use every pair of ranks inside a node and every NIC once; with 3 or 5 ranks per node,
    twice as many, which use them twice. Ring i starts with rank ``i % ranks_per_node``.

    Raises `NoDecompositionError` for fewer than 2 nodes or 1 rank, or for rail-aligned rings of an odd number of nodes
    of 2 ranks, which do not exist.

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
    if rail_aligned or (rail_aligned is None and not impossible):
        return _rail_aligned_rings(u, m)
    paths = two_fold_hamiltonian_paths(m) if m in _IMPOSSIBLE else hamiltonian_paths(m)
    return np.hstack([paths + node * m for node in range(u)]).astype(np.int32)  # the same path on every node


def rings_through_nics(nodes: Sequence[Sequence[Sequence[int]]], nics: int) -> Int32Array:
    """As many rings as NICs over nodes of different sizes, or whose ranks share NICs: none passes a NIC twice one way.

    `nodes` has for each node its NICs, for each of these its ranks, and `nics` is the least number of a node. Inside a
    node rings follow paths without a common link, where such paths begin and end at enough NICs, else each rank has
    the same successor in all of them. Returns an int32 array (nics, ranks); hops between nodes join any two NICs.

    >>> rings_through_nics([[[0], [1, 2]], [[3], [4], [5]]], 2).tolist()
    [[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]]
    """
    found = []
    for node in nodes:
        ranks = [rank for nic in sorted(node, key=len, reverse=True) for rank in nic]
        of_rank = {rank: number for number, nic in enumerate(node) for rank in nic}
        paths = np.empty((0, len(ranks)), dtype=np.int64)
        if len(ranks) not in _IMPOSSIBLE:
            named = hamiltonian_paths(len(ranks))
            names = np.empty(len(ranks), dtype=np.int64)  # a path of two ranks of a NIC, which is left out, ends there
            names[_along_cycles(named[:, -1])] = ranks
            paths = names[named]
        in_order = sorted(ranks)
        first = [in_order.index(min(nic)) for nic in node]
        turned = np.array([in_order[at:] + in_order[:at] for at in first])
        found.append(max((_apart(each, of_rank) for each in (turned, paths)), key=lambda each: min(len(each), nics)))
    return np.hstack([paths[:nics] for paths in found]).astype(np.int32)


def _apart(paths: npt.NDArray[np.int64], nic: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """Those of some paths that begin at different NICs, and end at different ones."""
    begun, ended, found = set[int](), set[int](), list[int]()
    for number, (start, end) in enumerate(paths[:, [0, -1]].tolist()):
        if nic[start] not in begun and nic[end] not in ended:
            begun.add(nic[start])
            ended.add(nic[end])
            found.append(number)
    return paths[found]


def is_rail_aligned(rings: Int32Array, ranks_per_node: int) -> bool:
    """Whether every hop between nodes joins equal local ranks.

    >>> is_rail_aligned(node_rings(2, 4), 4), is_rail_aligned(node_rings(2, 4, rail_aligned=False), 4)
    (True, False)
    """
    successors = np.roll(rings, -1, axis=1)
    same_node = rings // ranks_per_node == successors // ranks_per_node
    return bool(np.all(same_node | (rings % ranks_per_node == successors % ranks_per_node)))


def _rail_aligned_rings(node_count: int, m: int) -> Int32Array:
    """Every ring follows the path that starts where it arrives; each node renames the ranks of the paths.

    Two-fold paths form two sets of ``m``, each with a path from every rank, and a ring stays in its set. The
    permutation of the second set is the inverse of that of the first, and all of them are powers of one permutation,
    so the rings of both sets close.
    """
    if m in _IMPOSSIBLE:
        paths = two_fold_hamiltonian_paths(m)
    else:
        paths = hamiltonian_paths(m) if node_count % 2 == 0 else even_hamiltonian_paths(m)
    first_of_set = np.arange(len(paths)) // m * m
    local = paths[:, 0]
    rings = np.empty((len(paths), node_count, m), dtype=np.int32)
    ends_of_path = paths[:m, -1]
    closed = [] if node_count % 2 == 0 else _three_that_close(ends_of_path)
    # the permutation of every node: conjugates whose product is the identity
    every = closed + [ends_of_path, np.argsort(ends_of_path)] * ((node_count - len(closed)) // 2)
    for node, ends in enumerate(every):
        new_name = np.empty(m, dtype=np.int64)  # turns `ends_of_path` into its conjugate `ends`
        new_name[_along_cycles(ends_of_path)] = _along_cycles(ends)
        followed = new_name[paths[first_of_set + np.argsort(new_name)[local]]]
        rings[:, node] = followed + node * m
        local = followed[:, -1]
    return rings.reshape(len(paths), -1)


def _three_that_close(ends: npt.NDArray[np.integer]) -> list[npt.NDArray[np.integer]]:
    m = len(ends)
    if m % 2 == 1:
        return [ends, ends, np.argsort(ends[ends])]
    head = _THREE_OF_SIX if m % 4 == 2 else _THREE_OF_SIX[:, :0]
    fours = [_THREE_OF_FOUR + first for first in range(head.shape[1], m, 4)]
    return list(np.hstack([head, *fours]))


def _along_cycles(permutation: npt.NDArray[np.integer]) -> list[int]:
    """All elements, cycle by cycle, the longest cycles first."""
    successors: dict[int, int] = dict(enumerate(permutation.tolist()))
    cycles: list[list[int]] = []
    while successors:
        cycle = [next(iter(successors))]
        while (following := successors.pop(cycle[-1])) in successors:
            cycle.append(following)
        cycles.append(cycle)
    return [element for cycle in sorted(cycles, key=len, reverse=True) for element in cycle]
