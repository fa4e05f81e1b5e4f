"""The shapes of kernel calls: all that their times depend on, in numbers; and bands, their masks.

Query i of a call attends to key j if low <= i - j <= high. Without a lower limit low is 1 - keys, without an upper
limit high is queries - 1; bands are *clipped* to these values. A band with low > high is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tasp_lab.core.arrays import IntArray, numbered

Passing = Literal["forward", "backward"]

ShapeKind = Literal["softmax", "linear", "dense"]
"""Softmax attention; a kernel of linear attention; anything else, of which only FLOPs and bytes are known."""

KINDS: tuple[ShapeKind, ...] = get_args(ShapeKind)

ProductKind = Literal["results", "inputs", "weights", "sums"]
"""What a matrix product makes: results of a layer, gradients of its inputs, those of its weights in 16 bits, or sums of
these in 32 bits, to which it adds."""


class Product(NamedTuple):
    """A matrix product: rows x inner dimension times inner dimension x columns; so many `copies` in one call."""

    rows: int
    inner: int
    columns: int
    kind: ProductKind
    copies: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.copies


class Segment(NamedTuple):
    """The queries and keys of one document in a call, and the band of their mask, clipped."""

    queries: int
    keys: int
    low: int
    high: int


class KernelShape(NamedTuple):
    """One kernel call.

    Attributes
    ----------
    kernel : its name in the task, like ``attend``.
    kind : see `ShapeKind`.
    passing : ``forward`` or ``backward``.
    dtype : of its operands.
    batch, heads, kv_heads, head_dim : those of this call.
    value_dim : elements per head of values; 0: as many as `head_dim`.
    values_in_keys : 1 where values are a part of the keys, which are read once; else 0.
    queries, keys : positions; a kernel of linear attention has 0 of what it does not read.
    low, high : the band of the mask.
    flops : FLOPs of the call; masked pairs are not counted.
    moved_bytes, launches : of ``dense`` calls, what element-wise work beside its matrices reads and writes, and its
        kernels.
    packed : of packed documents, what the call computes instead of the band: its sequences, in order.
    products : of ``dense`` calls, their matrix products; none where only FLOPs are known.
    """

    kernel: str
    kind: ShapeKind
    passing: Passing
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    low: int
    high: int
    flops: int
    moved_bytes: int = 0
    launches: int = 0
    value_dim: int = 0
    values_in_keys: int = 0
    packed: tuple[Segment, ...] = ()
    products: tuple[Product, ...] = ()

    @property
    def value_size(self) -> int:
        """Elements per head of values."""
        return self.value_dim or self.head_dim

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The sequences of the call: those of packed documents, else one."""
        return self.packed or (Segment(self.queries, self.keys, self.low, self.high),)

    @property
    def pairs(self) -> int:
        """The pairs of a query and a key that it attends to, of one head and one element of the batch.

        >>> causal = KernelShape("attend", "softmax", "forward", "bf16", 1, 1, 1, 64, 4, 4, 0, 3, 0)
        >>> causal.pairs, causal._replace(packed=(Segment(2, 2, 0, 1), Segment(2, 2, 0, 1))).pairs
        (10, 6)
        """
        return sum(int(pairs_in_band(low, high, queries, keys)) for queries, keys, low, high in self.segments)


Packing = tuple[Segment, ...] | tuple[Product, ...]
"""What a call consists of."""


class ShapeRows(NamedTuple):
    """The shapes of calls of a kernel, int arrays (calls,): numbers of `KernelShape`; `kind` is an index in `KINDS`.

    `packing` is an index in `packings`, the sequences of calls on packed documents or the products of ``dense`` ones; 0
    of all others.
    """

    kind: IntArray
    batch: IntArray
    heads: IntArray
    kv_heads: IntArray
    head_dim: IntArray
    queries: IntArray
    keys: IntArray
    low: IntArray
    high: IntArray
    flops: IntArray
    moved_bytes: IntArray
    launches: IntArray
    value_dim: IntArray
    values_in_keys: IntArray
    packing: IntArray
    packings: tuple[Packing, ...] = ((),)

    @classmethod
    def of(cls, kind: ShapeKind, flops: IntArray, **numbers: IntArray | int) -> ShapeRows:
        """Calls of one kind; numbers are 0 unless given, and may be common to all calls.

        >>> ShapeRows.of("dense", np.array([30, 40])).kind
        array([2, 2])
        """
        given: dict[str, IntArray | int] = {"kind": KINDS.index(kind), "flops": flops, **numbers}
        columns = (np.asarray(given.get(name, 0), dtype=np.int64) for name in cls._fields[:-1])
        return cls._make([*(np.broadcast_to(column, flops.shape) for column in columns), ((),)])

    @classmethod
    def joined(cls, parts: Sequence[ShapeRows]) -> ShapeRows:
        """The calls of all parts, one after another."""
        numbers: dict[Packing, int] = {(): 0}
        columns = [(np.zeros(0, dtype=np.int64),) * (len(cls._fields) - 1)]
        for part in parts:
            number = np.array([numbers.setdefault(each, len(numbers)) for each in part.packings])
            columns.append((*part[:-2], number[part.packing]))
        return cls._make([*(np.concatenate(each) for each in zip(*columns, strict=True)), tuple(numbers)])

    def with_packings(self, packings: Sequence[tuple[Segment, ...]]) -> ShapeRows:
        """The same calls on packed documents; `packings` are the sequences of each call, in the order of calls.

        The band of a call without sequences is empty.
        """
        numbers: dict[tuple[Segment, ...], int] = {(): 0}
        packing = np.array([numbers.setdefault(each, len(numbers)) for each in packings], dtype=np.int64)
        low, high = (np.where(packing, band, empty) for band, empty in ((self.low, 1), (self.high, 0)))
        return self._replace(packing=packing, packings=tuple(numbers), low=low, high=high)


class KernelName(NamedTuple):
    """What all calls of a kernel of a task have in common, see `KernelShape`."""

    kernel: str
    passing: Passing
    dtype: str


def distinct_shapes(
    names: Sequence[KernelName], name: IntArray, rows: ShapeRows
) -> tuple[tuple[KernelShape, ...], IntArray]:
    """The distinct shapes of calls, and for each call the index of its own; `name` are indices in `names`.

    >>> rows = ShapeRows.of("dense", np.array([30, 40, 30]))
    >>> shapes, number = distinct_shapes([KernelName("dense", "forward", "bf16")], np.zeros(3, dtype=int), rows)
    >>> [shape.flops for shape in shapes], number
    ([30, 40], array([0, 1, 0]))
    """
    *columns, packings = rows
    first, number = numbered(name, *columns)
    shapes = []
    for at, kind, *sizes, packing in np.stack([name, *columns], axis=1)[first].tolist():
        (kernel, passing, dtype), of_kind = names[at], KINDS[kind]
        consists: dict[str, Any] = {"products" if of_kind == "dense" else "packed": packings[packing]}
        shapes.append(KernelShape(kernel, of_kind, passing, dtype, *sizes, **consists))
    return tuple(shapes), number


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
