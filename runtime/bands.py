"""Bands: masks by which query row i sees key row j iff ``low <= i - j <= high``.

`trim` cuts one to the rows and keys that matter, after which most masks are none at all or plainly causal, and the
rest have a diagonal in every row and every column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Band(NamedTuple):
    """A mask cut to the queries that see a key and the keys that are seen, and the limits of i - j among them.

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
        """Whether every row sees every key."""
        return self.low <= 1 - self.keys and self.high >= self.queries - 1

    @property
    def causal(self) -> bool:
        """Whether row i sees the keys 0 .. i, counted from the first of each, and that is a mask."""
        return self.low == 0 and self.high >= self.queries - 1 and not self.unmasked


NOTHING = Band(0, 0, 0, 0, 0, 0)


def trim(queries: int, keys: int, low: int, high: int) -> Band:
    """Drop the rows that see no key and the keys that no row sees; both are at the ends, for the mask is a band.

    A striped block, whose row i sees the keys before i, is plainly causal without its first row and last key:

    >>> band = trim(4, 4, low=1, high=3)
    >>> band, band.causal
    (Band(first_query=1, queries=3, first_key=0, keys=3, low=0, high=2), True)
    >>> trim(4, 4, low=-9, high=9).unmasked, trim(4, 4, low=4, high=9) == NOTHING
    (True, True)
    """
    first_query, end_query = max(0, low), min(queries, keys + high)
    first_key, end_key = max(0, -high), min(keys, queries - low)
    queries, keys, shift = end_query - first_query, end_key - first_key, first_query - first_key
    if low > high or queries <= 0 or keys <= 0:
        return NOTHING
    return Band(first_query, queries, first_key, keys, max(low - shift, 1 - keys), min(high - shift, queries - 1))


def window(band: Band) -> tuple[int, int]:
    """The band as flash-attn counts it, from the bottom right: how far left and right row i sees; -1: no limit.

    The last row stands at the last key. In a trimmed band it sees that key, so neither limit is ever negative.

    >>> window(trim(2, 5, low=-3, high=1)), window(trim(4, 4, low=0, high=2))
    ((-1, 0), (2, 0))
    """
    offset = band.keys - band.queries
    left = -1 if band.high >= band.queries - 1 else band.high + offset
    right = -1 if band.low <= 1 - band.keys else -band.low - offset
    return left, right


def hidden(band: Band, device: torch.device) -> torch.Tensor:
    """Bool [queries, keys], which row does not see which key.

    >>> hidden(trim(2, 2, low=0, high=1), torch.device("cpu")).tolist()
    [[False, True], [False, False]]
    """
    return _inside(band, band.keys, torch.bool, device).logical_not_()


def additive_mask(band: Band, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[queries, keys], 0 where seen and -inf elsewhere; rows start at multiples of 8, as GPU operators want them.

    >>> additive_mask(trim(2, 2, low=0, high=1), torch.float32, torch.device("cpu")).tolist()
    [[0.0, -inf], [0.0, 0.0]]
    """
    return _inside(band, -(-band.keys // 8) * 8, dtype, device).log_()[:, : band.keys]


def _inside(band: Band, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(band.queries, columns, dtype=dtype, device=device).tril_(-band.low).triu_(-band.high)
