"""Aliases of NumPy array types, arrays that cannot change, and distinct values of arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tasp_lab.core.errors import ScheduleError, TaspLabError, of_type

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

Int32Array = npt.NDArray[np.int32]
"""The type of rings and of large tables, chosen to save memory."""

Table = npt.NDArray[np.void]
"""Rows of records."""


Scalar = TypeVar("Scalar", np.int64, np.int32, np.bool_)

_WANTED = {"i": ("iu", "whole numbers"), "b": ("b", "bool")}
"""By kind of dtype: the kinds that are converted to it, and how they are named in messages."""

_PLAIN: dict[type[np.generic], np.dtype[Any]] = {each: np.dtype(each) for each in (np.int64, np.int32, np.bool_)}
"""The dtypes that NumPy gives most arrays, which can be told without comparing their parts."""


def frozen(
    what: str,
    values: object,
    dtype: type[Scalar],
    dimensions: int | None,
    expected: str,
    error: type[TaspLabError] = ScheduleError,
) -> npt.NDArray[Scalar]:
    """An array of a caller as a plain one of this dtype whose values cannot change: a copy, unless it is one already.

    What is proved of an array must still hold when it is used, in the arithmetic of the dtype in which it was proved:
    products of a rank and a block wrap around in narrow ones. The copy lies in a `bytes` object, since NumPy's
    read-only flag protects nothing: who owns the memory can take it back, and other views may be writable. Axes that
    repeat, as `numpy.broadcast_to` makes them, still do.

    Parameters
    ----------
    what : the array in messages.
    dimensions : how many it must have; None for any number.
    expected : the array in the message for what is none, or has other dimensions.

    Raises `error` for what is no array, for masked arrays, for another kind of dtype, and for numbers out of range.

    >>> ranks = np.array([1, 2], dtype=np.uint8)
    >>> kept = frozen("ranks", ranks, np.int64, 1, "an array of shape (ranks,)")
    >>> ranks[0] = 7
    >>> kept * 200
    array([200, 400])
    """
    if type(values) is np.ndarray and values.dtype is _PLAIN[dtype] and dimensions in (None, values.ndim):
        # Most arrays are like this, and small: all that follows takes several times as long as to copy them.
        base = values.base if type(values.base) is not np.ndarray else values.base.base
        if type(base) is bytes:
            return values
        if values.flags.c_contiguous:
            return np.ndarray(values.shape, dtype, values.tobytes())
    if not isinstance(values, np.ndarray) or hasattr(values, "mask") or dimensions not in (None, values.ndim):
        raise error(of_type(what, values, expected))
    kinds, name = _WANTED[np.dtype(dtype).kind]
    if values.dtype.kind not in kinds:
        raise error(f"{what} is of {values.dtype}, expected {name}")
    memory: object = values
    while hasattr(memory, "base"):
        memory = memory.base
    if type(values) is np.ndarray and values.dtype == dtype and isinstance(memory, bytes):
        return values
    once = np.asarray(values)[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in values.strides)]
    if dtype is not np.bool_ and once.size and not np.can_cast(once.dtype, dtype):
        limits = np.iinfo(np.dtype(dtype).name)
        for value in (int(once.min()), int(once.max())):
            if not limits.min <= value <= limits.max:
                raise error(f"{what} has {value}, expected {limits.min} to {limits.max}")
    copy: npt.NDArray[Scalar] = np.ndarray(once.shape, dtype, once.astype(dtype, copy=False).tobytes())
    return copy if copy.shape == values.shape else np.broadcast_to(copy, values.shape)


def freeze(
    owner: object, names: Iterable[str], what: str, dtype: type[Scalar], dimensions: int | None, expected: str
) -> None:
    """Put `frozen` arrays in the place of these attributes of a dataclass; their names in messages follow `what`."""
    for name in names:
        values = frozen(f"{what}{name}", getattr(owner, name), dtype, dimensions, expected)
        object.__setattr__(owner, name, values)


def lock(owner: object) -> None:
    """Make the arrays that an object has computed for itself read-only; those of its caller are `frozen`."""
    for values in vars(owner).values():
        if isinstance(values, np.ndarray):
            values.flags.writeable = False


def whole_numbers(what: str, values: object) -> IntArray:
    """Numbers that are read at once, an array of one dimension: the array itself, or a `frozen` one if it is narrow."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1:
        return values
    return frozen(what, values, np.int64, 1, "an int array of one dimension")


def whole(what: str, value: object, error: type[TaspLabError] = ScheduleError) -> int:
    """A whole number of a caller, of any type of Python or NumPy, as an `int`. Raises `error` for anything else.

    >>> whole("lane", np.int8(100)) * 2
    200
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise error(of_type(what, value, "a whole number"))
    return int(value)


def first_true(flags: BoolArray) -> int | None:
    """The index of the first one that is True; None if none is."""
    return int(flags.argmax()) if flags.any() else None


def distinct(values: IntArray) -> IntArray:
    """The distinct values, ascending. On long arrays several times as fast as `numpy.unique`, which hashes them.

    >>> distinct(np.array([3, 1, 3]))
    array([1, 3])
    """
    values = _unrepeated(values)  # what comes several times mostly follows itself
    return _unrepeated(np.sort(values))


def _unrepeated(values: IntArray) -> IntArray:
    """The values without those that are as the one before."""
    differs = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    unrepeated: IntArray = values[differs]
    return unrepeated


def stable_order(*keys: IntArray) -> IntArray:
    """The stable order of rows of whole numbers, the first column first, like `numpy.lexsort` of reversed columns.

    Several times as fast on millions of rows: a value and its index are sorted as one number, by vector instructions.

    >>> stable_order(np.array([3, 1, 3, 1])).tolist(), stable_order(np.array([1, 0, 1]), np.array([7, 9, 5])).tolist()
    ([1, 3, 0, 2], [1, 2, 0])
    """
    if len(keys[0]) <= _FEW_ROWS:
        return np.lexsort(keys[::-1])
    index = np.arange(len(keys[0]))
    order, bits = None, len(index).bit_length()
    for key in reversed(keys):
        if order is None and (key[1:] >= key[:-1]).all():
            continue  # in order already
        low = int(key.min())
        if (int(key.max()) - low).bit_length() + bits >= _INT_BITS:
            following = np.argsort(key if order is None else key[order], kind="stable")
        else:
            packed = (key if order is None else key[order]).astype(np.int64) - low
            packed <<= bits
            packed |= index
            packed.sort()
            packed &= (1 << bits) - 1
            following = packed
        order = following if order is None else order[following]
    return index if order is None else order


_INT_BITS = 64

_FEW_ROWS = 4096
"""Rows that `numpy.lexsort` has in order twice as soon."""


def positions(ordered: IntArray, values: IntArray) -> IntArray:
    """`numpy.searchsorted`, which is many times as fast for many values in ascending order.

    >>> positions(np.array([2, 4]), np.array([4, 0, 5])).tolist()
    [1, 0, 2]
    """
    order = stable_order(values)
    found = np.empty(len(values), dtype=np.int64)
    found[order] = np.searchsorted(ordered, values[order])
    return found


def are_among(values: IntArray, others: IntArray) -> BoolArray:
    """`numpy.isin`, which hashes and takes several times as long on thousands of values.

    >>> are_among(np.array([5, 1, 3]), np.array([3, 2, 5])).tolist()
    [True, False, True]
    """
    if not len(others):
        return np.zeros(len(values), dtype=bool)
    ordered = np.sort(others)
    found: BoolArray = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return found


Values = npt.NDArray[np.generic]

_FEW = 16
"""Distinct values that are found one by one."""

_DENSE = 4
"""Integers are numbered by a table of their range if it has at most so many entries per value."""


def numbered(*columns: Values) -> tuple[IntArray, IntArray]:
    """The first index of each distinct row, and for each row the position of its value in that list.

    `columns` are one or more arrays of equal length.

    >>> [each.tolist() for each in numbered(np.array([7, 7, 3, 7]), np.array([0.5, 1.0, 0.5, 0.5]))]
    [[0, 1, 2], [0, 1, 2, 0]]
    """
    firsts, number = _numbered(columns[0])
    for column in columns[1:]:
        if (column[1:] == column[:-1]).all():
            continue  # as of most columns of calls
        others, other = _numbered(column)
        firsts, number = _numbered(number * len(others) + other)
    return firsts, number


def _numbered(values: Values) -> tuple[IntArray, IntArray]:
    if values.dtype.kind in "iu" and len(values):
        low = int(values.min())
        span = int(values.max()) - low + 1
        if span <= _DENSE * len(values) + _FEW:
            return _numbered_densely((values - low).astype(np.int64), span)
    firsts: list[int] = []
    number = np.full(len(values), -1)
    while (left := number < 0).any():
        if len(firsts) == _FEW:
            _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
            return first, inverse
        firsts.append(int(left.argmax()))
        number[values == values[firsts[-1]]] = len(firsts) - 1
    return np.array(firsts, dtype=np.int64), number


def _numbered_densely(values: IntArray, span: int) -> tuple[IntArray, IntArray]:
    """The unequal values in ascending order, as `distinct`, of values from 0 to `span`, by a table of all of them."""
    first = np.full(span, -1)
    first[values[::-1]] = np.arange(len(values) - 1, -1, -1)  # of several assignments the last one counts
    firsts = np.sort(first[first >= 0])
    number = np.empty(span, dtype=np.int64)
    number[values[firsts]] = np.arange(len(firsts))
    return firsts, number[values]
