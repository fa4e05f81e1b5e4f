"""Aliases of NumPy array types."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

Int32Array = npt.NDArray[np.int32]
Int8Array = npt.NDArray[np.int8]
"""The types of rings and paths, and of large tables, chosen to save memory."""

Table = npt.NDArray[np.void]
"""Rows of records."""


def distinct(values: IntArray) -> IntArray:
    """The distinct values, ascending. On long arrays several times as fast as `numpy.unique`, which hashes them.

    >>> distinct(np.array([3, 1, 3]))
    array([1, 3])
    """
    ordered = np.sort(values)
    found: IntArray = ordered[np.concatenate([[True], np.diff(ordered) > 0])[: len(ordered)]]
    return found
