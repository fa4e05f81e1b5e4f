"""Numbers for what is equal: of few different values by looking at each, which is much faster than sorting all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tasp_lab.arrays import IntArray

Values = npt.NDArray[np.generic]

_FEW = 16


def numbered(*columns: Values) -> tuple[IntArray, IntArray]:
    """Where each different row of some columns comes first, and for each row the number of its like in that list.

    Columns are arrays of equal length, one or more.

    >>> [each.tolist() for each in numbered(np.array([7, 7, 3, 7]), np.array([0.5, 1.0, 0.5, 0.5]))]
    [[0, 1, 2], [0, 1, 2, 0]]
    """
    firsts, number = _numbered(columns[0])
    for column in columns[1:]:
        others, other = _numbered(column)
        firsts, number = _numbered(number * len(others) + other)
    return firsts, number


def _numbered(values: Values) -> tuple[IntArray, IntArray]:
    firsts: list[int] = []
    number = np.full(len(values), -1)
    while (left := number < 0).any():
        if len(firsts) == _FEW:
            _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
            return first, inverse
        firsts.append(int(left.argmax()))
        number[values == values[firsts[-1]]] = len(firsts) - 1
    return np.array(firsts, dtype=np.int64), number
