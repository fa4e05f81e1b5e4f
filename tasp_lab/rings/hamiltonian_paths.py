"""Decompose the complete digraph into arc-disjoint directed Hamiltonian paths.

The ``m (m - 1)`` arcs of the complete digraph ``K*_m`` split into ``m`` directed Hamiltonian paths exactly when ``m``
is neither 3 nor 5. Every vertex then is the start of one path and the end of one: it has ``m - 1`` outgoing arcs, one
on every path that does not end there. Joining all ends to all starts through one more vertex gives a decomposition of
``K*_{m+1}`` into Hamiltonian cycles, and removing a vertex reverses this; so the paths exist exactly where the cycles
of `tasp_lab.rings.complete_digraph` do.

Construction by ``m``
---------------------
``m`` even
    Walecki's zigzag ``0, 1, -1, 2, -2, ...`` modulo ``m``, rotated by the row number: its steps
    ``1, -2, 3, -4, ...`` are all different modulo ``m``.
``m`` odd, 1 or at least 7
    The cycles of `hamiltonian_cycles` for ``m + 1``, without their last vertex.
``m`` odd, every arc twice
    The zigzag has every odd step twice and no even step; the mirrored zigzag has the even steps.

The map from starts to ends is a permutation of the vertices. `even_hamiltonian_paths` returns paths with an even
permutation, as rings over an odd number of nodes require (`tasp_lab.rings.node_rings`).

No search is involved. Every result passes `verify_paths` before it is returned.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import Int32Array
from tasp_lab.core.errors import NoDecompositionError
from tasp_lab.rings.complete_digraph import hamiltonian_cycles

__all__ = ["even_hamiltonian_paths", "hamiltonian_paths", "two_fold_hamiltonian_paths", "verify_paths"]

# Where K*_{m+1} has no decomposition into Hamiltonian cycles, K*_m has none into paths.
_IMPOSSIBLE: Final = (3, 5)


def hamiltonian_paths(m: int) -> Int32Array:
    """Split the arcs of the complete digraph on ``m`` vertices into directed Hamiltonian paths.

    Parameters
    ----------
    m : int
        Number of vertices, at least 1.

    Returns
    -------
    Int32Array
        Shape ``(m, m)``. Row ``i`` lists the vertices of the path that starts with vertex ``i``; the last column is a
        permutation. Every arc lies on exactly one row.

    Raises
    ------
    NoDecompositionError
        If ``m`` is 3 or 5, for which none exists, or if ``m`` is below 1.

    Examples
    --------
    >>> hamiltonian_paths(4).tolist()
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    _check_vertex_count(m)
    if m in _IMPOSSIBLE:
        raise NoDecompositionError(
            f"K*_{m} does not split into {m} Hamiltonian paths: joined through one more vertex they would be {m} "
            f"arc-disjoint Hamiltonian cycles of K*_{m + 1}, which do not exist; {2 * m} paths that use every arc "
            f"exactly twice exist: two_fold_hamiltonian_paths({m})"
        )
    return _verified(_zigzags(m) if m % 2 == 0 else _without_last_vertex(hamiltonian_cycles(m + 1)), fold=1)


def two_fold_hamiltonian_paths(m: int) -> Int32Array:
    """Cover every arc of the complete digraph exactly twice with directed Hamiltonian paths.

    For even ``m``, each path of `hamiltonian_paths` is listed twice. For odd ``m`` they are the zigzags and the
    mirrored zigzags; those of ``K*_3`` are all six paths.

    Parameters
    ----------
    m : int
        Number of vertices, at least 1.

    Returns
    -------
    Int32Array
        Shape ``(2 m, m)``. Rows ``i`` and ``m + i`` start with vertex ``i``; two rows end with each vertex.

    Raises
    ------
    NoDecompositionError
        If ``m`` is below 1.

    Examples
    --------
    >>> two_fold_hamiltonian_paths(3).tolist()
    [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0]]
    """
    _check_vertex_count(m)
    zigzags = _zigzags(m)
    mirrored = zigzags if m % 2 == 0 else _sorted_by_start(-zigzags % m)
    return _verified(np.vstack([zigzags, mirrored]), fold=2)


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
        for start, sums in _exchanged_zigzags(m).items():
            paths[start] = _path_of_sums(start, sums, m)
    return _verified(paths, fold=1)


def verify_paths(paths: Int32Array, m: int, fold: int) -> None:
    """Check that each row is a Hamiltonian path and that no arc, start or end is used more than ``fold`` times.

    With ``fold * m`` rows, each of them is then used exactly ``fold`` times.

    Parameters
    ----------
    paths : Int32Array
        Shape ``(number of paths, m)``; each row lists the vertices ``0 .. m - 1`` in path order.
    m : int
        Number of vertices.
    fold : int
        How many paths may share one arc.

    Raises
    ------
    NoDecompositionError
        Names the first invalid path, arc, start or end.

    Examples
    --------
    >>> verify_paths(np.array([[0, 1], [1, 0]], dtype=np.int32), m=2, fold=1)
    >>> verify_paths(np.array([[0, 1, 2], [1, 0, 2]], dtype=np.int32), m=3, fold=1)
    Traceback (most recent call last):
    tasp_lab.core.errors.NoDecompositionError: 2 paths end with vertex 2, more than 1
    """
    if paths.ndim != 2 or paths.shape[1] != m:
        raise NoDecompositionError(f"expected rows of {m} vertices, got an array of shape {paths.shape}")
    is_path = np.all(np.sort(paths, axis=1) == np.arange(m), axis=1)
    if not is_path.all():
        path = int(np.argmin(is_path))
        raise NoDecompositionError(f"path {path} does not visit each of the vertices 0..{m - 1} exactly once")
    arcs = paths[:, :-1].astype(np.int64) * m + paths[:, 1:]
    uses = np.bincount(arcs.ravel(), minlength=m * m)
    if uses.max() > fold:
        arc = int(np.argmax(uses > fold))
        raise NoDecompositionError(f"arc {arc // m} -> {arc % m} is used {uses[arc]} times, more than {fold}")
    for what, column in (("start", 0), ("end", -1)):
        uses = np.bincount(paths[:, column], minlength=m)
        if uses.max() > fold:
            vertex = int(np.argmax(uses > fold))
            raise NoDecompositionError(f"{uses[vertex]} paths {what} with vertex {vertex}, more than {fold}")


def _verified(paths: npt.NDArray[np.integer], fold: int) -> Int32Array:
    converted = paths.astype(np.int32)
    verify_paths(converted, paths.shape[1], fold)
    return converted


def _check_vertex_count(m: int) -> None:
    if m < 1:
        raise NoDecompositionError(f"a complete digraph needs at least 1 vertex, got m = {m}")


def _zigzags(m: int) -> npt.NDArray[np.int64]:
    """The zigzag through the integers modulo ``m``, rotated by the row number."""
    index = np.arange(m)
    zigzag = np.where(index % 2 == 1, (index + 1) // 2, -(index // 2))
    return (zigzag + index[:, np.newaxis]) % m


def _without_last_vertex(cycles: Int32Array) -> npt.NDArray[np.integer]:
    """Cut every cycle at its last vertex.

    For an even number of vertices, `hamiltonian_cycles` inserts the last vertex into the arcs of one Hamiltonian path
    and closes that path as the last cycle. The map from starts to ends is therefore that path reversed: one cycle
    through all vertices.
    """
    m = len(cycles)
    after = np.argmax(cycles == m, axis=1)[:, np.newaxis] + 1
    return _sorted_by_start(np.take_along_axis(cycles, (after + np.arange(m)) % (m + 1), axis=1))


def _sorted_by_start(paths: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    return paths[np.argsort(paths[:, 0])]


def _exchanged_zigzags(m: int) -> dict[int, str]:
    """Two or three paths by their starts, which use the arcs of the zigzags with these starts but exchange two ends.

    A path is given by the sums of neighbours along it; on the zigzag from ``i`` they alternate between ``2 i + 1`` and
    ``2 i``. Each repetition of a segment is shifted outwards on both sides of the zigzag: by four vertices, ``32`` by
    one.
    """
    repeats = m // 8
    if m % 8 == 2:
        return {
            0: "1" + "50141010" * repeats,
            2: "54" + "05454145" * (repeats - 1) + "0545145",
        }
    return {
        0: "2014" + "05014101" * repeats + "0",
        2: "3545420" + "54541450" * (repeats - 1) + "545145" if repeats else "35452",
        m // 2 + 1: "32" * (m // 2 - 3) + "31531",
    }


def _path_of_sums(start: int, sums: str, m: int) -> npt.NDArray[np.int64]:
    """The path from `start` whose neighbours have the given sums modulo ``m``."""
    sign = 1 - 2 * (np.arange(m) % 2)
    return sign * np.cumsum(sign * [start, *map(int, sums)]) % m
