"""Splitting shards into chunks and lanes in proportion to the shares of rings."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import IntArray

MAX_LANES_OF_SHARES = 128
"""Approximate maximum number of lanes for unequal shares. More lanes match the shares better but need more messages."""


PAGE_BYTES, LOAD_BYTES = 4096, 16

MIN_UNITS = {PAGE_BYTES: 128, LOAD_BYTES: 1}
"""The units in which sizes are cut, and how many of them a chunk must have: with 128 pages, rounding is below 1 %."""


def split_count(count: int, shares: Sequence[Fraction]) -> list[int]:
    """Split a number of things in proportion to shares that sum to one, each part rounded down or up.

    The remainder after rounding down goes to the parts with the largest fractions, the first ones if equal.

    >>> split_count(10, [Fraction(1, 4)] * 4), split_count(10, [Fraction(2, 3), Fraction(1, 3)])
    ([3, 3, 2, 2], [7, 3])
    """
    exact = [count * share for share in shares]
    parts = [floor(each) for each in exact]
    by_loss = sorted(range(len(exact)), key=lambda part: parts[part] - exact[part])
    for part in by_loss[: count - sum(parts)]:
        parts[part] += 1
    return parts


def split_bytes(size_bytes: int, shares: Sequence[Fraction]) -> list[int]:
    """Split a size into chunks in proportion to shares that sum to one, in units of `unit_bytes`.

    >>> split_bytes(2**20, [Fraction(1, 3)] * 3), split_bytes(10, [Fraction(1, 4)] * 4)
    ([349536, 349520, 349520], [3, 3, 2, 2])
    """
    unit = unit_bytes(size_bytes, min(shares, default=Fraction(1)))
    return [unit * count for count in split_count(size_bytes // unit, shares)]


def unit_bytes(size_bytes: int, smallest_share: Fraction) -> int:
    """The unit in which a size is cut: a page, the 16 bytes that a thread of a GPU loads at once, or a byte.

    NCCL copies a message 16 bytes at a time only if both of its ends begin at a multiple of that (`reduceCopy` in
    `common_kernel.h`). So the unit divides the size, and no chunk is less than `MIN_UNITS` of it, which limits how
    much chunks differ by rounding.

    >>> [unit_bytes(size, Fraction(1, 7)) for size in (64 * 2**20, 2**20, 112, 96, 10**6 + 1)]
    [4096, 16, 16, 1, 1]
    """
    fits = (
        unit
        for unit, least in MIN_UNITS.items()
        if not size_bytes % unit and size_bytes * smallest_share >= unit * least
    )
    return next(fits, 1)


def lanes_of(shares: Sequence[Fraction]) -> list[int]:
    """Number of lanes of each ring: its share over the smallest share, limited by `MAX_LANES_OF_SHARES`.

    >>> lanes_of([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)])
    [2, 1, 1]
    """
    if not shares:
        return []
    finest = max(min(shares), Fraction(1, max(MAX_LANES_OF_SHARES, len(shares))))
    return [max(1, round(share / finest)) for share in shares]


def over_lanes(rings: npt.NDArray[np.integer], shares: Sequence[Fraction]) -> tuple[IntArray, list[Fraction]]:
    """Each ring repeated once per lane, and the share of each lane; these shares are about equal.

    `rings` is an int array (rings, world_size) with a share per ring. Lanes share links fairly, so a ring with a larger
    share needs more lanes.
    """
    lanes = lanes_of(shares)
    repeated = np.repeat(rings.astype(np.int64), lanes, axis=0)
    return repeated, [share / count for share, count in zip(shares, lanes, strict=True) for _ in range(count)]
