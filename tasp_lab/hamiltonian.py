"""Decompose the complete digraph into arc-disjoint directed Hamiltonian cycles.

The complete digraph ``K*_n`` has an arc from every vertex to every other one. Its ``n (n - 1)`` arcs split
into ``n - 1`` directed Hamiltonian cycles exactly when ``n`` is neither 4 nor 6 [2]_ [3]_.

Which ``n`` uses what
---------------------
``n`` prime
    Cycle ``k`` is ``0, k, 2k, ...`` modulo ``n``.
``n`` odd, not prime
    Walecki's zigzag ``0, 1, -1, 2, -2, ...`` through the integers modulo ``n - 1``, closed through one extra
    vertex and then rotated [1]_.
``n`` even, at least 8
    The zigzag cycles on ``n - 1`` vertices, and a Hamiltonian path that takes one arc from each of them. The
    last vertex is inserted into each of those arcs; the path, closed through the last vertex, is the missing
    cycle. The path comes from a table of formulas. Four rows serve the multiples of 4 from 12 on. The others
    serve ``n = 2 mod 4``, all but 1262 of those below 2082; beyond, about 1 in 40 such ``n`` is missing and
    refused. The rows were checked for every even ``n`` to 20000, not proved.

Nothing is searched for. Time and memory are proportional to the ``n (n - 1)`` entries of the answer, with a
logarithmic factor for sorting. Every answer passes `verify_cycles` before it is returned.

References
----------
.. [1] E. Lucas, "Recreations mathematiques", vol. 2, 1883, where the zigzag is credited to Walecki.
.. [2] J.-C. Bermond and V. Faber, "Decomposition of the complete directed graph into k-circuits", Journal of
   Combinatorial Theory, Series B 21 (1976), 146-155.
.. [3] T. W. Tillson, "A Hamiltonian decomposition of K*_2m, 2m >= 8", Journal of Combinatorial Theory,
   Series B 29 (1980), 68-74.
"""

from __future__ import annotations

from itertools import permutations
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tasp_lab.errors import NoDecompositionError

__all__ = ["IntArray", "hamiltonian_cycles", "two_fold_hamiltonian_cycles", "verify_cycles"]

IntArray: TypeAlias = npt.NDArray[np.int32]

# The most arc-disjoint Hamiltonian cycles in the two complete digraphs that have no decomposition.
_MOST_CYCLES: Final = {4: 2, 6: 4}

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
        (0, 8, 0, 1, (0, 1, 4), (0, 0, 0), (3, 0, 2, 1)),
        (16, 12, 1, -2, (0, 1, 2, 6), (0, 2, 4, 10), (4, 3, 2, 1, 0)),
        (16, 16, 1, -2, (0, 2, 4, 9), (0, 2, 4, 10), (4, 3, 2, 1, 0)),
        (16, 20, 1, -2, (0, 2, 4, 11), (0, 2, 4, 10), (4, 1, 0, 3, 2)),
        (16, 24, 1, -2, (0, 3, 6, 14), (0, 2, 4, 10), (4, 1, 0, 3, 2)),
        (20, 14, 0, 5, (0, 1, 9), (0, 2, 16), (1, 0, 3, 2)),
        (20, 26, 0, 5, (0, 2, 17), (0, 2, 14), (0, 2, 3, 1)),
        (28, 14, 0, 7, (0, 1, 6, 9, 11), (0, 2, 14, 22, 26), (0, 4, 5, 3, 2, 1)),
        (28, 18, 0, 7, (0, 2, 3, 6, 14), (0, 2, 6, 10, 22), (0, 2, 4, 5, 1, 3)),
        (28, 22, 0, 7, (0, 1, 7, 10, 13), (0, 2, 10, 14, 18), (0, 4, 5, 1, 3, 2)),
        (28, 26, 0, 7, (0, 5, 12, 15, 19), (0, 6, 14, 18, 22), (0, 2, 4, 5, 3, 1)),
        (28, 34, 0, 7, (0, 11, 22, 26, 30), (0, 10, 18, 22, 26), (0, 4, 5, 3, 2, 1)),
        (40, 30, 1, -5, (0, 2, 15, 20), (0, 2, 20, 28), (0, 4, 1, 3, 2)),
        (40, 50, 1, -5, (0, 2, 9, 23), (0, 2, 8, 20), (3, 2, 0, 4, 1)),
        (44, 34, 0, 11, (0, 1, 10, 19, 28), (0, 2, 14, 26, 38), (0, 3, 1, 4, 5, 2)),
        (44, 38, 0, 11, (0, 2, 5, 8, 11), (0, 2, 6, 10, 14), (0, 4, 5, 3, 2, 1)),
        (44, 50, 0, 11, (0, 2, 11, 20, 41), (0, 2, 10, 18, 38), (0, 3, 2, 4, 5, 1)),
        (44, 54, 0, 11, (0, 35, 40, 45, 50), (0, 30, 34, 38, 42), (0, 3, 1, 4, 5, 2)),
        (44, 62, 0, 11, (0, 8, 14, 35, 41), (0, 6, 10, 26, 30), (0, 2, 4, 5, 1, 3)),
        (48, 10, 1, 3, (0, 1, 2, 3, 6), (0, 12, 16, 20, 36), (0, 3, 1, 5, 2, 4)),
        (48, 22, 1, -3, (0, 1, 8, 12), (0, 4, 20, 28), (2, 1, 3, 4, 0)),
        (68, 34, 0, 17, (0, 1, 8, 14, 27), (0, 2, 18, 30, 58), (0, 4, 5, 2, 1, 3)),
        (68, 74, 0, 17, (0, 2, 23, 44, 53), (0, 2, 22, 42, 50), (0, 4, 5, 3, 2, 1)),
        (68, 86, 0, 17, (0, 2, 17, 32, 47), (0, 2, 14, 26, 38), (0, 3, 2, 4, 5, 1)),
        (76, 94, 0, 19, (0, 39, 51, 56, 70), (0, 32, 42, 46, 58), (0, 5, 4, 1, 3, 2)),
        (76, 98, 0, 19, (0, 33, 68, 71, 79), (0, 26, 54, 56, 62), (0, 2, 5, 1, 4, 3)),
        (84, 38, 0, 7, (0, 4, 16, 32, 33), (0, 10, 38, 74, 78), (0, 3, 1, 4, 5, 2)),
        (84, 94, 0, 7, (0, 24, 64, 68, 85), (0, 22, 58, 62, 78), (0, 3, 2, 4, 5, 1)),
        (104, 90, 1, 13, (0, 51, 73, 78, 86), (0, 60, 86, 92, 102), (0, 3, 2, 5, 4, 1)),
        (104, 110, 1, 13, (0, 21, 35, 102, 104), (0, 20, 34, 98, 100), (0, 4, 1, 3, 5, 2)),
        (104, 130, 1, 13, (0, 15, 47, 74, 76), (0, 12, 38, 60, 62), (0, 3, 2, 5, 4, 1)),
        (0, 198, 0, 69, (0, 17, 53, 133, 169), (0, 0, 0, 0, 0), (0, 2, 4, 1, 5, 3)),
    )
)


def hamiltonian_cycles(n: int) -> IntArray:
    """Split the arcs of the complete digraph on ``n`` vertices into directed Hamiltonian cycles.

    Parameters
    ----------
    n : int
        Number of vertices, at least 1.

    Returns
    -------
    IntArray
        Shape ``(n - 1, n)``. Each row lists the vertices of one cycle and starts with vertex 0; the arc from
        the last vertex back to 0 closes it. Every arc of the digraph lies on exactly one row.

    Raises
    ------
    NoDecompositionError
        If ``n`` is 4 or 6, where none exists, if ``n`` is below 1, or if no formula is known here for ``n``.

    Examples
    --------
    >>> hamiltonian_cycles(5).tolist()
    [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [0, 3, 1, 4, 2], [0, 4, 3, 2, 1]]
    """
    if n < 1:
        raise NoDecompositionError(f"a complete digraph needs at least 1 vertex, got n = {n}")
    if n in _MOST_CYCLES:
        raise NoDecompositionError(
            f"K*_{n} has at most {_MOST_CYCLES[n]} of the {n - 1} arc-disjoint Hamiltonian cycles asked for; "
            f"{2 * (n - 1)} cycles that use every arc exactly twice exist: two_fold_hamiltonian_cycles({n})"
        )
    if n == 1:
        return np.empty((0, 1), dtype=np.int32)
    if _is_prime(n):
        cycles = np.multiply.outer(np.arange(1, n), np.arange(n)) % n
    elif n % 2 == 1:
        cycles = _zigzag_cycles(n)
    else:
        cycles = _insert_last_vertex(_zigzag_cycles(n - 1), _rainbow_path(n))
    return _checked(cycles, n, fold=1)


def two_fold_hamiltonian_cycles(n: int) -> IntArray:
    """Cover every arc of the complete digraph exactly twice with directed Hamiltonian cycles.

    This is what 4 and 6 vertices have in place of a decomposition: all six cycles of ``K*_4``, and ten cycles
    of ``K*_6`` found by search. For any other ``n``, each cycle of `hamiltonian_cycles` is listed twice.

    Parameters
    ----------
    n : int
        Number of vertices, at least 1.

    Returns
    -------
    IntArray
        Shape ``(2 (n - 1), n)``; rows as in `hamiltonian_cycles`.

    Raises
    ------
    NoDecompositionError
        If `hamiltonian_cycles` has no answer and ``n`` is neither 4 nor 6.

    Examples
    --------
    >>> two_fold_hamiltonian_cycles(4).tolist()
    [[0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3], [0, 2, 3, 1], [0, 3, 1, 2], [0, 3, 2, 1]]
    """
    if n == 4:
        cycles = np.array([(0, *rest) for rest in permutations((1, 2, 3))])
    elif n == 6:
        cycles = np.array([[int(digit) for digit in row] for row in _TWO_FOLD_OF_SIX])
    else:
        cycles = np.repeat(hamiltonian_cycles(n), 2, axis=0)
    return _checked(cycles, n, fold=2)


def verify_cycles(cycles: IntArray, n: int, fold: int) -> None:
    """Check that each row is a Hamiltonian cycle and that no arc is used more than ``fold`` times.

    With ``fold * (n - 1)`` rows this means that every arc is used exactly ``fold`` times.

    Parameters
    ----------
    cycles : IntArray
        Shape ``(number of cycles, n)``; each row lists the vertices ``0 .. n - 1`` in the order of travel.
    n : int
        Number of vertices.
    fold : int
        How many cycles may share one arc.

    Raises
    ------
    NoDecompositionError
        Naming the first ring that is not a Hamiltonian cycle, or else the first arc that is used too often.

    Examples
    --------
    >>> verify_cycles(np.array([[0, 1, 2], [0, 2, 1]], dtype=np.int32), n=3, fold=1)
    >>> verify_cycles(np.array([[0, 1, 2], [1, 2, 0]], dtype=np.int32), n=3, fold=1)
    Traceback (most recent call last):
    tasp_lab.errors.NoDecompositionError: arc 0 -> 1 is used 2 times, more than 1; first in rings [0, 1]
    """
    if cycles.ndim != 2 or cycles.shape[1] != n:
        raise NoDecompositionError(f"expected rows of {n} vertices, got an array of shape {cycles.shape}")
    is_cycle = np.all(np.sort(cycles, axis=1) == np.arange(n), axis=1)
    if not is_cycle.all():
        ring = int(np.argmin(is_cycle))
        raise NoDecompositionError(f"ring {ring} does not visit each of the vertices 0..{n - 1} exactly once")
    arcs = cycles.astype(np.int64) * n + np.roll(cycles, -1, axis=1)
    uses = np.bincount(arcs.ravel(), minlength=n * n)
    if uses.max() > fold:
        arc = int(np.argmax(uses > fold))
        rings = np.flatnonzero((arcs == arc).any(axis=1))[: fold + 1].tolist()
        raise NoDecompositionError(
            f"arc {arc // n} -> {arc % n} is used {uses[arc]} times, more than {fold}; first in rings {rings}"
        )


def _checked(cycles: npt.NDArray[np.integer], n: int, fold: int) -> IntArray:
    """Rotate every row so that it starts with vertex 0, and verify the result."""
    shift = np.argmax(cycles == 0, axis=1)[:, np.newaxis]
    rotated = np.take_along_axis(cycles, (np.arange(n) + shift) % n, axis=1).astype(np.int32)
    verify_cycles(rotated, n, fold)
    return rotated


def _is_prime(n: int) -> bool:
    return n >= 2 and all(n % divisor for divisor in range(2, int(n**0.5) + 1))


def _zigzag_cycles(n: int) -> npt.NDArray[np.int64]:
    """All ``n - 1`` cycles for odd ``n``: extra vertex ``n - 1``, then the zigzag rotated by the row number.

    The rotation by half a turn is the reversed cycle, so this is also Walecki's undirected decomposition.
    """
    around = n - 1
    index = np.arange(around)
    zigzag = np.where(index % 2 == 1, (index + 1) // 2, -(index // 2))
    rotated = (zigzag + index[:, np.newaxis]) % around
    return np.insert(rotated, 0, around, axis=1)


def _rainbow_path(n: int) -> npt.NDArray[np.int64]:
    """A Hamiltonian path on ``n - 1`` vertices with one arc from each zigzag cycle, for even ``n``."""
    for family in _FAMILIES:
        turns, rest = divmod(n - family.first, family.period or n)
        if turns >= 0 and rest == 0:
            break
    else:
        raise NoDecompositionError(f"no formula is known here for K*_{n}, although a decomposition exists")
    around = n - 2
    step = family.halves * (around // 2) + family.offset
    cuts = [start + turns * growth for start, growth in zip(family.starts, family.growth, strict=True)]
    pieces = [*np.split(np.arange(around) * step % around, cuts[1:]), np.array([around])]
    return np.concatenate([pieces[piece] for piece in family.order])


def _owner(tail: npt.NDArray[np.int64], head: npt.NDArray[np.int64], around: int) -> npt.NDArray[np.int64]:
    """The row of `_zigzag_cycles` that holds each arc; the extra vertex is ``around``.

    An arc of the zigzag is known by its difference alone: the odd ones go from ``-j`` to ``j + 1``, the even
    ones from ``j`` to ``-j``; solving for the rotation gives the row. In a run of a path the difference is
    constant, so its rows are distinct and only the joins between runs could clash.
    """
    difference = (head - tail) % around
    row = np.where(difference % 2 == 1, tail + (difference - 1) // 2, tail + difference // 2 - around // 2)
    row = np.where(head == around, tail - around // 2, row)
    return np.where(tail == around, head, row) % around


def _insert_last_vertex(zigzags: npt.NDArray[np.int64], path: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Insert a new vertex into the path's arc on every row; append the path closed through that vertex."""
    around, width = zigzags.shape
    tail = path[:-1]
    row = _owner(tail, path[1:], around)
    column = np.argmax(zigzags[row] == tail[:, np.newaxis], axis=1)
    # In the flattened array "before the next entry" stays inside the row, even after its last vertex.
    longer = np.insert(zigzags.ravel(), row * width + column + 1, width).reshape(around, width + 1)
    return np.vstack([longer, np.append(path, width)])
