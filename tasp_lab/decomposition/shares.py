"""Splitting shards into chunks and lanes in proportion to the shares of rings."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np
import numpy.typing as npt

from tasp_lab.arrays import IntArray

MAX_LANES_OF_SHARES = 128
"""Approximate maximum number of lanes for unequal shares. More lanes match the shares better but need more messages."""


def split_bytes(size_bytes: int, shares: Sequence[Fraction]) -> list[int]:
    """Split a size into chunks in proportion to shares that sum to one, each rounded down or up.

    The remainder after rounding down goes to the chunks with the largest fractions, the first ones if equal.

    >>> split_bytes(10, [Fraction(1, 4)] * 4), split_bytes(10, [Fraction(2, 3), Fraction(1, 3)])
    ([3, 3, 2, 2], [7, 3])
    """
    exact = [size_bytes * share for share in shares]
    chunks = [floor(each) for each in exact]
    by_loss = sorted(range(len(exact)), key=lambda chunk: chunks[chunk] - exact[chunk])
    for chunk in by_loss[: size_bytes - sum(chunks)]:
        chunks[chunk] += 1
    return chunks


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
