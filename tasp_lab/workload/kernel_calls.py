"""Bands, the masks of kernel calls.

All masks are bands: query i attends to key j if low <= i - j <= high. Without a lower limit low is 1 - keys,
without an upper limit high is queries - 1; bands are *clipped* to these values. A band with low > high is empty.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.core.arrays import IntArray


def clip_band(
    low: IntArray | int, high: IntArray | int, queries: IntArray | int, keys: IntArray | int
) -> tuple[IntArray, IntArray]:
    """Clip the limits of a band to the numbers of queries and keys, element by element.

    >>> [limit.item() for limit in clip_band(-100, 100, queries=4, keys=3)]
    [-2, 3]
    """
    return np.maximum(low, 1 - np.asarray(keys)), np.minimum(high, np.asarray(queries) - 1)


def pairs_in_band(low: IntArray | int, high: IntArray | int, queries: IntArray | int, keys: IntArray | int) -> IntArray:
    """The number of pairs (i, j) in a band, element by element.

    >>> pairs_in_band(0, 99, queries=4, keys=4).item()          # causal: 1 + 2 + 3 + 4
    10
    """
    low, high = clip_band(low, high, queries, keys)
    queries, keys = np.asarray(queries), np.asarray(keys)
    inside = queries * keys - _corner(low - 1 + keys, queries, keys) - _corner(queries - 1 - high, queries, keys)
    return np.where(low > high, 0, inside)


def _corner(diagonals: IntArray, queries: IntArray, keys: IntArray) -> IntArray:
    """The number of pairs on the first `diagonals` diagonals of a rectangle, counted from a corner."""
    longest, shortest = np.maximum(queries, keys), np.minimum(queries, keys)
    growing = np.minimum(diagonals, shortest)
    level = np.clip(diagonals - shortest, 0, longest - shortest)
    shrinking = np.maximum(diagonals - longest, 0)
    corner: IntArray = growing * (growing + 1) // 2 + (level + shrinking) * shortest - shrinking * (shrinking + 1) // 2
    return corner
