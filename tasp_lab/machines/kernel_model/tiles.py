"""Tiles of a call: how many there are, what each costs, and how they are handed out over the SMs of a GPU.

Forward, a tile is `rows` queries of a head and goes through the blocks of keys that its band touches; backward, it is
`rows` keys and goes through blocks of queries (Dao, FlashAttention-2, arXiv:2307.08691, sections 3.1 and 3.2). Where
there are too few tiles for all SMs, parts of the keys run beside each other (split-KV).

An SM holds up to `slots` tiles at once. They share its speed, which is 1 with all slots taken; a tile alone on its SM
reaches `alone` of it, because nothing else hides its latencies. The hardware gives the next tile to the first free
slot. Costs and times have one unit, the work that a full SM does in one unit of time.
"""

from __future__ import annotations

import heapq
import math
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.workload.kernel_shapes import KernelShape


def tile_columns(shape: KernelShape, rows: float, columns: int, splits: int = 1) -> FloatArray:
    """Columns of each tile of one head, in order of dispatch; 0 for a tile outside the band.

    A tile processes whole blocks of `columns`. With `splits`, the blocks of all columns are cut into so many parts of
    the same size, and a tile exists per part and `rows`.

    >>> from tasp_lab.workload.kernel_shapes import KernelShape
    >>> causal = KernelShape("attend", "softmax", "forward", "bf16", 1, 1, 1, 128, 512, 512, 0, 511, 0)
    >>> tile_columns(causal, 128, 64).tolist()
    [128.0, 256.0, 384.0, 512.0]
    """
    if shape.passing == "forward":
        along, across, low, high = shape.queries, shape.keys, -shape.high, -shape.low
    else:
        along, across, low, high = shape.keys, shape.queries, shape.low, shape.high
    first = np.arange(0.0, along, rows)
    last = np.minimum(first + rows, along) - 1
    begin = np.clip(first + low, 0, across) // columns
    end = -(-np.clip(last + high + 1, 0, across) // columns)
    if splits == 1:
        return np.asarray(np.maximum(end - begin, 0) * columns, float)
    part = math.ceil(math.ceil(across / columns) / splits)
    starts = part * np.arange(float(splits))[:, None]
    inside = np.minimum(end, starts + part) - np.maximum(begin, starts)
    return np.asarray(np.maximum(inside, 0) * columns, float).ravel()


SplitRule = Literal["never", "flash-attention-2", "flash-attention-3", "fill", "cudnn"]
"""``fill``: as many parts as fill the SMs (flash_attn/cute/interface.py, num_splits_heuristic, with num_splits=0)."""

_MAX_SPLITS = 128


def splits(
    rule: SplitRule, heads: int, queries: int, keys: int, head_dim: int, sms: int, rows: float, batch: int = 1
) -> int:
    """The number of parts that a kernel chooses for a forward call; `heads` are those of all of `batch`."""
    tiles, blocks = heads * math.ceil(queries / rows), math.ceil(keys / 128)
    if rule == "flash-attention-3":
        # hopper/heuristics.h bounds the parts by the tiles of one sequence, hopper/flash_prepare_scheduler.cu then
        # gives an SM a tenth more blocks than its share
        if tiles >= 0.8 * batch * sms or blocks <= 4:
            return 1
        return math.ceil(blocks / math.ceil(1.1 * tiles * blocks / sms))
    if rule == "flash-attention-2":
        block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
        return _flash_attention_2(heads * math.ceil(queries / 64), 2 * sms, math.ceil(keys / block))
    if rule == "cudnn":
        return _cudnn(tiles, heads * queries, sms, blocks)
    return max(1, min(sms // max(1, tiles), _MAX_SPLITS, blocks)) if rule == "fill" and blocks > 4 else 1


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


def _cudnn(tiles: int, rows: int, sms: int, blocks: int) -> int:
    """The power of two with the least latency, waves of tiles and then of merged rows, in blocks of keys; only calls
    that leave SMs idle are split. Rule and costs are those of choose_split_kv in NVIDIA/cudnn-frontend,
    python/cudnn/sdpa/fwd/heuristics.py of August 2026: a tile costs 21 blocks besides its own, a merged part 0.2.

    >>> _cudnn(36, 9 * 1024, 148, 486), _cudnn(144, 9 * 4096, 148, 486), _cudnn(16, 8 * 512, 148, 8)
    (4, 1, 1)
    """
    if tiles >= sms:
        return 1
    merged = 0.2 * math.ceil(rows / sms)
    counts = [1 << power for power in range(8) if 1 << power <= max(1, blocks // 2)]
    return min(counts, key=lambda n: math.ceil(tiles * n / sms) * (math.ceil(blocks / n) + 21) + merged * n)


_SIMULATED_WAVES = 3
"""So many last waves are simulated; the tiles before them keep all SMs busy."""


class Tiles(NamedTuple):
    """The tiles of `heads` heads, each with the same `costs` in order of dispatch, over SMs with so many slots.

    >>> Tiles(np.array([4.0, 4.0]), heads=3, sms=4).makespan()           # 6 tiles in two waves
    8.0
    >>> Tiles(np.array([1.0, 2.0, 3.0, 4.0]), heads=1, sms=2, longest_first=True).makespan()
    5.0
    >>> [Tiles(np.array([4.0, 4.0]), heads, sms=4).last_begins() for heads in (3, 2)]
    [4.0, 0.0]
    """

    costs: FloatArray
    heads: int
    sms: int
    slots: int = 1
    longest_first: bool = False

    def makespan(self, alone: float = 1.0) -> float:
        """The time until all tiles have ended."""
        costs, slots = self.costs[self.costs > 0], self.slots
        alone = alone if slots > 1 else 1.0
        count = len(costs) * self.heads
        if count == 0:
            return 0.0
        longest = float(costs.max())
        if count <= self.sms:
            return longest / alone
        if longest - float(costs.min()) <= 1e-9 * longest:  # full waves, then the rest spread over the SMs
            waves, rest = divmod(count, slots * self.sms)
            busiest = math.ceil(rest / self.sms)
            return waves * slots * longest + (busiest * longest / speed(busiest, slots, alone) if rest else 0.0)
        early, ends, _ = self._dispatched()
        by_sm = np.array(ends).reshape(slots, self.sms)
        by_sm[1:] = by_sm[1:, _shuffled(self.sms)]
        by_sm.sort(axis=0)
        time = by_sm[0]
        # towards the end SMs are less full, and a tile runs faster than at 1 / slots
        for done in range(1, slots):
            work = (by_sm[done] - by_sm[done - 1]) * (slots - done) / slots
            time = time + work / speed(slots - done, slots, alone)
        return max(early + float(time.max()), longest / alone)

    def last_begins(self) -> float:
        """The time until the last tile has begun, so until no tile waits for a slot."""
        if np.count_nonzero(self.costs > 0) * self.heads <= self.slots * self.sms:
            return 0.0
        early, _, begins = self._dispatched()
        return early + begins

    def _dispatched(self) -> tuple[float, list[float], float]:
        """The time before the last waves, when each slot is free after them, and when their last tile begins."""
        costs, heads, count = self.costs[self.costs > 0], self.heads, _SIMULATED_WAVES * self.slots * self.sms
        if self.longest_first:
            costs = np.sort(costs)[::-1]
            last = np.repeat(costs[-math.ceil(count / heads) :], heads)[-count:]
        else:
            last = np.tile(costs, min(heads, math.ceil(count / len(costs))))[-count:]
        early = max(float(costs.sum()) * heads - float(last.sum()), 0.0)
        return early / self.sms, *_dispatch(tuple(last.tolist()), self.sms, self.slots)


def speed(tiles: int, slots: int, alone: float) -> float:
    """The speed of an SM that holds so many tiles."""
    return 1.0 if slots == 1 else alone + (1 - alone) * (tiles - 1) / (slots - 1) if tiles < slots else 1.0


@cache
def _shuffled(sms: int) -> IntArray:
    """Which tiles share an SM follows no order that is documented: by chance, always the same."""
    return np.random.default_rng(0).permutation(sms)


@lru_cache(maxsize=64)  # a call ends, and its last tile begins
def _dispatch(costs: tuple[float, ...], sms: int, slots: int) -> tuple[list[float], float]:
    """When each slot is free at last, where slots of an SM run at 1 / slots each; and when the last tile begins."""
    places, begins = slots * sms, 0.0
    shared = [cost * slots for cost in costs]
    ends = shared[:places] + [0.0] * (places - len(shared))
    free = [(end, place) for place, end in enumerate(ends)]
    heapq.heapify(free)
    for cost in shared[places:]:
        begins, place = free[0]
        heapq.heapreplace(free, (begins + cost, place))
        ends[place] = begins + cost
    return ends, begins
