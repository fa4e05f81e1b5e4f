"""Band masks: query row i attends to key row j iff ``low <= i - j <= high``.

`trim` removes fully masked rows and keys. Most of the remaining masks are full or causal; in the others every row
and every column intersects the band.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Band(NamedTuple):
    """A band trimmed to the rows and keys that are not fully masked, and the limits of i - j relative to them.

    The limits are no wider than the rectangle: ``low >= 1 - keys`` and ``high <= queries - 1``.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    low: int
    high: int

    @property
    def unmasked(self) -> bool:
        """Whether every row attends to every key."""
        return self.low <= 1 - self.keys and self.high >= self.queries - 1

    @property
    def causal(self) -> bool:
        """Whether row i attends to exactly the keys 0 .. i, counted from the top left, and some key is masked."""
        return self.low == 0 and self.high >= self.queries - 1 and not self.unmasked


EMPTY = Band(0, 0, 0, 0, 0, 0)
"""The band of a mask without any key."""


def trim(queries: int, keys: int, low: int, high: int) -> Band:
    """Drop fully masked rows and keys, which are at the ends since the mask is a band.

    A striped block, whose row i attends to the keys before i, is causal without its first row and last key:

    >>> band = trim(4, 4, low=1, high=3)
    >>> band, band.causal
    (Band(first_query=1, queries=3, first_key=0, keys=3, low=0, high=2), True)
    >>> trim(4, 4, low=-9, high=9).unmasked, trim(4, 4, low=4, high=9) == EMPTY
    (True, True)
    """
    first_query, end_query = max(0, low), min(queries, keys + high)
    first_key, end_key = max(0, -high), min(keys, queries - low)
    queries, keys, shift = end_query - first_query, end_key - first_key, first_query - first_key
    if low > high or queries <= 0 or keys <= 0:
        return EMPTY
    return Band(first_query, queries, first_key, keys, max(low - shift, 1 - keys), min(high - shift, queries - 1))


def window(band: Band) -> tuple[int, int]:
    """The band as flash-attn's window, aligned to the bottom right: keys to the left and right of row i; -1: no limit.

    The last row is aligned with the last key. In a trimmed band it attends to that key, so no limit is negative.

    >>> window(trim(2, 5, low=-3, high=1)), window(trim(4, 4, low=0, high=2))
    ((-1, 0), (2, 0))
    """
    offset = band.keys - band.queries
    left = -1 if band.high >= band.queries - 1 else band.high + offset
    right = -1 if band.low <= 1 - band.keys else -band.low - offset
    return left, right


def boolean_mask(band: Band, device: torch.device) -> torch.Tensor:
    """Bool [queries, keys], True where the key is masked.

    >>> boolean_mask(trim(2, 2, low=0, high=1), torch.device("cpu")).tolist()
    [[False, True], [False, False]]
    """
    return _inside(band, band.keys, torch.bool, device).logical_not_()


def additive_mask(band: Band, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[queries, keys], 0 inside the band and -inf elsewhere; the row stride is a multiple of 8, as GPU operators need.

    >>> additive_mask(trim(2, 2, low=0, high=1), torch.float32, torch.device("cpu")).tolist()
    [[0.0, -inf], [0.0, 0.0]]
    """
    return _inside(band, -(-band.keys // 8) * 8, dtype, device).log_()[:, : band.keys]


def _inside(band: Band, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(band.queries, columns, dtype=dtype, device=device).tril_(-band.low).triu_(-band.high)
