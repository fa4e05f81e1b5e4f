"""How shards are cut into pieces by shares."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np
import numpy.typing as npt

from tasp_lab.arrays import IntArray

MOST_LANES_OF_SHARES = 128
"""About so many lanes at most where shares are unequal; more follow the shares better, and cost more messages."""


def split_bytes(size_bytes: int, shares: Sequence[Fraction]) -> list[int]:
    """Cut a size into pieces in proportion to shares that sum to one, each rounded down or up.

    What rounding down leaves goes to the pieces that lost most by it, the first of them first.

    >>> split_bytes(10, [Fraction(1, 4)] * 4), split_bytes(10, [Fraction(2, 3), Fraction(1, 3)])
    ([3, 3, 2, 2], [7, 3])
    """
    exact = [size_bytes * share for share in shares]
    pieces = [floor(each) for each in exact]
    by_loss = sorted(range(len(exact)), key=lambda piece: pieces[piece] - exact[piece])
    for piece in by_loss[: size_bytes - sum(pieces)]:
        pieces[piece] += 1
    return pieces


def lanes_of(shares: Sequence[Fraction]) -> list[int]:
    """How many lanes each ring takes: as many as its share holds the smallest, unless that makes too many lanes.

    >>> lanes_of([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)])
    [2, 1, 1]
    """
    if not shares:
        return []
    finest = max(min(shares), Fraction(1, max(MOST_LANES_OF_SHARES, len(shares))))
    return [max(1, round(share / finest)) for share in shares]


def over_lanes(rings: npt.NDArray[np.integer], shares: Sequence[Fraction]) -> tuple[IntArray, list[Fraction]]:
    """Each ring as often as it takes lanes, with the share of each lane: about equal shares all of them.

    `rings` is an int array (rings, world_size) with a share per ring. Links are shared fairly between lanes, so a ring
    with a larger share needs more of them.
    """
    lanes = lanes_of(shares)
    repeated = np.repeat(rings.astype(np.int64), lanes, axis=0)
    return repeated, [share / count for share, count in zip(shares, lanes, strict=True) for _ in range(count)]
