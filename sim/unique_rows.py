"""Unique rows of columns, faster than sorting if there are few distinct values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tasp_lab.arrays import IntArray

Values = npt.NDArray[np.generic]

_FEW = 16


def numbered(*columns: Values) -> tuple[IntArray, IntArray]:
    """The first index of each distinct row, and for each row the position of its value in that list.

    `columns` are one or more arrays of equal length.

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
