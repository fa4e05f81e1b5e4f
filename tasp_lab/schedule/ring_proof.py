"""Validity of ring schedules by induction, without a replay.

There are m rings through all n ranks and p chunks per shard and ring. Block (r, j, q), chunk q of what rank r sends
around ring j, has the number ``(r m + j) p + q``. At step ``s = k p + q``, ``k`` from 0 to n - 2, the rank at position
i of ring j passes block (r, j, q) to the rank at position i + 1, where r is at position i - k (all modulo n).

Theorem. If every ring is a permutation of the ranks, if at the start each rank holds its own blocks, those of r = its
number, and no others, and if at the end every rank must hold all blocks, then the schedule is valid: a rank sends only
what it held when the step began, no block is delivered to a rank that holds it or twice, and the end condition holds.

Proof. *Sent when held*, by induction on k: at k = 0 position i sends its own block. What it sends at k > 0 was sent
to it by position i - 1 at k - 1, p steps earlier, since r is k - 1 positions behind i - 1. *Delivered once*: block
(r, j, q) is delivered at k to the position k + 1 after that of r, so at k = 0 ... n - 2 to each position once except
that of r. A ring has each rank at one position, hence each rank except r receives each block of r once, and r never.
*End condition*: these blocks and its own are all blocks. []

So there are ``n (n - 1) m p`` transfers. Nothing is dropped, so a rank holds the most at the end: all ``n m p`` blocks.

A schedule that fails a premise is not rejected but replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tasp_lab.core.arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule


def proves(rings: IntArray, chunks: int, schedule: Schedule) -> bool:
    """Whether the theorem proves a schedule whose steps are those of `rings`, an int array (rings, world_size)."""
    count, n = rings.shape
    blocks = n * count * chunks
    return (
        schedule.task is None
        and schedule.initial_part is None
        and (schedule.world_size == n and schedule.lanes >= count and chunks >= 1 and blocks > 0)
        and len(schedule.blocks) == blocks
        and not schedule.blocks.pools
        and bool((schedule.blocks.parts == 1).all())
        and are_permutations(rings)
        and all(row.all() for row in schedule.final)
        and _holds_own(schedule.initial, count * chunks)
    )


def are_permutations(rows: IntArray) -> bool:
    """Whether each row is a permutation of 0 to its length - 1.

    >>> are_permutations(np.array([[0, 2, 1], [1, 0, 2]])), are_permutations(np.array([[0, 1, 1]]))
    (True, False)
    """
    if not rows.size or rows.min() < 0 or rows.max() >= rows.shape[1]:
        return not rows.size
    seen = np.zeros(rows.shape, dtype=bool)
    np.put_along_axis(seen, rows, True, axis=1)
    return bool(seen.all())


def _holds_own(initial: BoolArray, per_rank: int) -> bool:
    """Whether each rank holds exactly its own `per_rank` blocks."""
    own = (row[rank * per_rank : (rank + 1) * per_rank] for rank, row in enumerate(initial))
    return all(each.all() for each in own) and all(np.count_nonzero(row) == per_rank for row in initial)


def own_blocks(world_size: int, per_rank: int) -> BoolArray:
    """Bool array (world_size, world_size * per_rank): each rank holds `per_rank` blocks, rank 0 the first ones.

    Read-only; the rows are windows of one array, so it takes no more memory than two rows.

    >>> own_blocks(2, 3).astype(int).tolist()
    [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    """
    blocks = world_size * per_rank
    around = np.zeros(2 * blocks - per_rank, dtype=bool)
    around[blocks - per_rank : blocks] = True
    return sliding_window_view(around, blocks)[::per_rank][::-1]


def all_blocks(world_size: int, blocks: int) -> BoolArray:
    """Bool array (world_size, blocks): every rank holds every block. Read-only; all rows share memory.

    >>> all_blocks(2, 3).astype(int).tolist()
    [[1, 1, 1], [1, 1, 1]]
    """
    return np.broadcast_to(np.ones(blocks, dtype=bool), (world_size, blocks))
