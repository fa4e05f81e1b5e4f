"""Decompose the complete digraph into arc-disjoint directed Hamiltonian cycles.

The complete digraph ``K*_n`` has an arc from every vertex to every other one. Its ``n (n - 1)`` arcs split
into ``n - 1`` directed Hamiltonian cycles exactly when ``n`` is neither 4 nor 6 [2]_ [3]_.

Construction by ``n``
---------------------
``n`` prime
    Cycle ``k`` is ``0, k, 2k, ...`` modulo ``n``.
``n`` odd, not prime
    Walecki's zigzag ``0, 1, -1, 2, -2, ...`` through the integers modulo ``n - 1``, closed through one extra
    vertex and then rotated [1]_.
``n`` even, at least 8
    The zigzag cycles on ``n - 1`` vertices, and a Hamiltonian path that takes one arc from each of them. The
    last vertex is inserted into each of those arcs; the path, closed through the last vertex, is the missing
    cycle. The path comes from a table of formulas: four rows serve ``n = 0 mod 4``, four ``n = 2 mod 4``.

The table is proved for all ``n``: within a run of a path the arcs lie on distinct zigzag cycles, so only the
joins between runs must lie on exactly the remaining cycles. Along every second ``n`` of a row both are linear
functions, and the tests compare them as such, for all ``n`` at once.

No search is involved. Time is proportional to the ``n (n - 1)`` entries of the result, with a logarithmic factor
for sorting; memory is about one and a half times a large result.

References
----------
.. [1] E. Lucas, "Recreations mathematiques", vol. 2, 1883, where the zigzag is credited to Walecki.
.. [2] J.-C. Bermond and V. Faber, "Decomposition of the complete directed graph into k-circuits", Journal of
   Combinatorial Theory, Series B 21 (1976), 146-155.
.. [3] T. W. Tillson, "A Hamiltonian decomposition of K*_2m, 2m >= 8", Journal of Combinatorial Theory,
   Series B 29 (1980), 68-74.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import Int32Array
from tasp_lab.core.errors import NoDecompositionError

# Entries processed at a time: enough for speed, few enough that the result dominates memory.
_BLOCK_ENTRIES: Final = 2**16

# Maximum number of arc-disjoint Hamiltonian cycles of the two complete digraphs without a decomposition.
_MAX_CYCLES: Final = {4: 2, 6: 4}

_TWO_FOLD_OF_SIX: Final = (
    "012435", "012543", "021534", "024513", "034521", "035142", "041325", "041532", "052314", "054231",
)  # fmt: skip


class _Family(NamedTuple):
    """Rainbow paths for ``n = first + k * period``, k = 0, 1, ...; a period of 0 means ``n = first`` only.

    With ``m = n - 2``, the vertices ``0, step, 2 step, ...`` modulo ``m`` are cut into runs. Run ``i`` starts
    at index ``starts[i] + k * growth[i]``. The path visits the runs in the given order; the number after the
    last run stands for the extra vertex of the zigzag. The step is ``halves * m / 2 + offset``.
    """

    period: int
    first: int
    halves: int
    offset: int
    starts: tuple[int, ...]
    growth: tuple[int, ...]
    order: tuple[int, ...]


_FAMILIES: Final = tuple(
    _Family(*row)
    for row in (
        (16, 8, 1, -2, (0, 1, 2, 4), (0, 2, 4, 10), (4, 1, 0, 3, 2)),
        (16, 12, 1, -2, (0, 1, 2, 6), (0, 2, 4, 10), (4, 3, 2, 1, 0)),
        (16, 16, 1, -2, (0, 2, 4, 9), (0, 2, 4, 10), (4, 3, 2, 1, 0)),
        (16, 20, 1, -2, (0, 2, 4, 11), (0, 2, 4, 10), (4, 1, 0, 3, 2)),
        (0, 10, 0, 1, (0, 1, 2, 5), (0, 0, 0, 0), (0, 4, 1, 3, 2)),
        (12, 14, 1, 1, (0, 1, 2, 4, 7, 10), (0, 1, 2, 4, 7, 10), (5, 3, 1, 0, 4, 2, 6)),
        (12, 18, 0, 3, (0, 1, 3, 7, 11, 14, 15), (0, 0, 2, 5, 8, 10, 11), (5, 3, 2, 6, 1, 7, 4, 0)),
        (12, 22, 0, 3, (0, 1, 2, 4, 7, 12, 17), (0, 0, 1, 2, 4, 7, 10), (3, 6, 1, 5, 7, 4, 2, 0)),
    )
)


def hamiltonian_cycles(n: int) -> Int32Array:
    """The arcs of the complete digraph on `n` vertices split into directed Hamiltonian cycles, int32 (n - 1, n).

    Each row lists the vertices of one cycle and starts with vertex 0; the arc from the last vertex back to 0 closes it.
    Every arc of the digraph lies on exactly one row. Raises `NoDecompositionError` if `n` is 4 or 6, for which none
    exists, or below 1.

    >>> hamiltonian_cycles(5).tolist()
    [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [0, 3, 1, 4, 2], [0, 4, 3, 2, 1]]
    """
    if n < 1:
        raise NoDecompositionError(f"a complete digraph needs at least 1 vertex, got n = {n}")
    if n in _MAX_CYCLES:
        raise NoDecompositionError(
            f"K*_{n} has at most {_MAX_CYCLES[n]} of the {n - 1} requested arc-disjoint Hamiltonian cycles; "
            f"{2 * (n - 1)} cycles that use every arc exactly twice exist: two_fold_hamiltonian_cycles({n})"
        )
    cycles = np.empty((n - 1, n), dtype=np.int32)
    filled = 0
    is_prime = n >= 2 and all(n % divisor for divisor in range(2, int(n**0.5) + 1))
    for block in _multiples(n) if is_prime else _zigzag_cycles(n) if n % 2 else _even_cycles(n):
        shift = np.argmax(block == 0, axis=1)[:, np.newaxis]  # every row starts with vertex 0
        cycles[filled : filled + len(block)] = np.take_along_axis(block, (np.arange(n) + shift) % n, axis=1)
        filled += len(block)
    return cycles


def two_fold_hamiltonian_cycles(n: int) -> Int32Array:
    """Directed Hamiltonian cycles that cover every arc of the complete digraph exactly twice, int32 (2 (n - 1), n).

    They replace the missing decompositions of 4 and 6 vertices: all six cycles of ``K*_4``, and ten cycles of ``K*_6``
    found by search. For any other `n`, each cycle of `hamiltonian_cycles` is listed twice. Raises
    `NoDecompositionError` if `n` is below 1.

    >>> two_fold_hamiltonian_cycles(4).tolist()
    [[0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3], [0, 2, 3, 1], [0, 3, 1, 2], [0, 3, 2, 1]]
    """
    if n == 4:
        cycles = np.array([(0, *rest) for rest in permutations((1, 2, 3))], dtype=np.int32)
    elif n == 6:
        cycles = np.array([[int(digit) for digit in row] for row in _TWO_FOLD_OF_SIX], dtype=np.int32)
    else:
        cycles = np.repeat(hamiltonian_cycles(n), 2, axis=0)
    return cycles


def verify_cycles(cycles: Int32Array, n: int, fold: int) -> None:
    """Check that each row, of shape (cycles, n), is a Hamiltonian cycle and that no arc is on more than `fold` of them.

    With ``fold * (n - 1)`` rows, every arc is then used exactly `fold` times. Raises `NoDecompositionError` naming the
    first ring that is not a Hamiltonian cycle, or else the first arc that is used too often.

    >>> verify_cycles(np.array([[0, 1, 2], [0, 2, 1]], dtype=np.int32), n=3, fold=1)
    >>> verify_cycles(np.array([[0, 1, 2], [1, 2, 0]], dtype=np.int32), n=3, fold=1)
    Traceback (most recent call last):
    tasp_lab.core.errors.NoDecompositionError: arc 0 -> 1 is used 2 times, more than 1; first in rings [0, 1]
    """
    if cycles.ndim != 2 or cycles.shape[1] != n:
        raise NoDecompositionError(f"expected rows of {n} vertices, got an array of shape {cycles.shape}")
    arcs = np.empty(cycles.shape, dtype=np.min_scalar_type(n * n))
    for rows in _row_blocks(len(cycles), n):
        is_cycle = np.all(np.sort(cycles[rows], axis=1) == np.arange(n), axis=1)
        if not is_cycle.all():
            ring = rows.start + int(np.argmin(is_cycle))
            raise NoDecompositionError(f"ring {ring} does not visit each of the vertices 0..{n - 1} exactly once")
        arcs[rows] = _arcs(cycles[rows], n)
    in_order = arcs.ravel()
    in_order.sort()
    again = np.flatnonzero(in_order[fold:] == in_order[:-fold])
    if len(again):
        arc = int(in_order[again[0]])
        uses = np.searchsorted(in_order, arc, side="right") - again[0]
        rings = [ring for ring in range(len(cycles)) if arc in _arcs(cycles[ring : ring + 1], n)][: fold + 1]
        raise NoDecompositionError(
            f"arc {arc // n} -> {arc % n} is used {uses} times, more than {fold}; first in rings {rings}"
        )


def _arcs(cycles: Int32Array, n: int) -> npt.NDArray[np.int64]:
    """Each arc as ``n * tail + head``, in the shape of the cycles."""
    return cycles.astype(np.int64) * n + np.roll(cycles, -1, axis=1)


def _row_blocks(count: int, width: int) -> Iterator[slice]:
    """Split `count` rows into blocks of about `_BLOCK_ENTRIES` entries."""
    height = max(1, _BLOCK_ENTRIES // width)
    for first in range(0, count, height):
        yield slice(first, min(first + height, count))


def _multiples(n: int) -> Iterator[npt.NDArray[np.int64]]:
    """For prime ``n``, the multiples of 1, of 2, ..., of ``n - 1``, in blocks of rows."""
    for rows in _row_blocks(n - 1, n):
        yield np.multiply.outer(np.arange(rows.start + 1, rows.stop + 1), np.arange(n)) % n


def _zigzag_cycles(n: int) -> Iterator[npt.NDArray[np.int64]]:
    """All cycles for odd ``n``, in blocks: extra vertex ``n - 1``, then the zigzag rotated by the row number.

    The rotation by half a turn is the reversed cycle, so this is also Walecki's undirected decomposition.
    """
    around = n - 1
    index, zigzag = np.arange(around), zigzag_of(around)
    for rows in _row_blocks(around, n):
        yield np.insert((zigzag + index[rows, np.newaxis]) % around, 0, around, axis=1)


def zigzag_of(count: int) -> npt.NDArray[np.int64]:
    """Walecki's zigzag 0, 1, -1, 2, -2, ..., so many integers."""
    index = np.arange(count)
    return np.where(index % 2 == 1, (index + 1) // 2, -(index // 2))


def _even_cycles(n: int) -> Iterator[npt.NDArray[np.int64]]:
    """All cycles for even ``n``, in blocks: the zigzags with a new vertex in the path's arc, then the path."""
    path, around = _rainbow_path(n), n - 2
    tail = np.empty(around, dtype=np.int64)
    tail[_owner(path[:-1], path[1:], around)] = path[:-1]
    for rows, zigzags in zip(_row_blocks(around, n - 1), _zigzag_cycles(n - 1), strict=True):
        column = np.argmax(zigzags == tail[rows, np.newaxis], axis=1)
        # In the flattened array "before the next entry" stays inside the row, even after its last vertex.
        places = np.arange(len(zigzags)) * (n - 1) + column + 1
        yield np.insert(zigzags.ravel(), places, n - 1).reshape(-1, n)
    yield np.append(path, n - 1)[np.newaxis]


def _rainbow_path(n: int) -> npt.NDArray[np.int64]:
    """A Hamiltonian path on ``n - 1`` vertices with one arc from each zigzag cycle, for even ``n``."""
    family = next(row for row in _FAMILIES if n >= row.first and (n - row.first) % (row.period or n) == 0)
    turns = (n - family.first) // (family.period or n)
    around = n - 2
    step = family.halves * (around // 2) + family.offset
    cuts = [start + turns * growth for start, growth in zip(family.starts, family.growth, strict=True)]
    runs = [*np.split(np.arange(around) * step % around, cuts[1:]), np.array([around])]
    return np.concatenate([runs[run] for run in family.order])


def _owner(tail: npt.NDArray[np.int64], head: npt.NDArray[np.int64], around: int) -> npt.NDArray[np.int64]:
    """The row of `_zigzag_cycles` that holds each arc; the extra vertex is ``around``.

    The difference of an arc identifies it in the zigzag: the odd ones go from ``-j`` to ``j + 1``, the even
    ones from ``j`` to ``-j``; solving for the rotation gives the row. In a run of a path the difference is
    constant, so its rows are distinct and only the joins between runs could clash.
    """
    difference = (head - tail) % around
    row = np.where(difference % 2 == 1, tail + (difference - 1) // 2, tail + difference // 2 - around // 2)
    row = np.where(head == around, tail - around // 2, row)
    return np.where(tail == around, head, row) % around
