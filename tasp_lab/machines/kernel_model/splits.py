"""Split-KV: how many parts of the keys run beside each other when there are too few tiles for all SMs."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

SplitRule = Literal["never", "flash-attention-2", "fill"]
"""``fill``: as many parts as fill the SMs (flash_attn/cute/interface.py, num_splits_heuristic)."""

_MAX_SPLITS = 128


def splits(rule: SplitRule, heads: int, queries: int, keys: int, head_dim: int, sms: int, rows: float) -> int:
    """The number of parts that a kernel chooses for a forward call."""
    if rule == "flash-attention-2":
        block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
        return _flash_attention_2(heads * math.ceil(queries / 64), 2 * sms, math.ceil(keys / block))
    if rule == "fill":
        blocks = math.ceil(keys / 128)
        return max(1, min(sms // max(1, heads * math.ceil(queries / rows)), _MAX_SPLITS, blocks)) if blocks > 4 else 1
    return 1


@cache
def _flash_attention_2(tiles: int, places: int, blocks: int) -> int:
    """The fewest parts that fill 85 % of the best achievable share of the last wave (csrc/flash_attn/flash_api.cpp,
    num_splits_heuristic, which counts two places per SM)."""
    if tiles >= 0.8 * places:
        return 1
    counts = range(1, min(_MAX_SPLITS, places, blocks) + 1)
    fair = [n for n in counts if n == 1 or math.ceil(blocks / n) != math.ceil(blocks / (n - 1))]
    filled = {n: (tiles * n / places) / math.ceil(tiles * n / places) for n in fair}
    best = max(filled.values())
    return next(n for n in fair if filled[n] >= 0.85 * best)
