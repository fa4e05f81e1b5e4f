"""What every rank holds when blocks travel around rings: known without a replay.

There are m rings through all n ranks and p pieces per shard and ring. Block (r, j, q), piece q of what rank r sends
around ring j, has the number ``(r m + j) p + q``. At step ``s = k p + q``, ``k`` from 0 to n - 2, the rank at position
i of ring j passes block (r, j, q) to the rank at position i + 1, where r is at position i - k (all modulo n).

Theorem. If every ring is a permutation of the ranks, if at the start each rank holds its own blocks, those of r = its
number, and nothing else, and if in the end everybody is to hold everything, then the schedule is valid: a rank sends
only what it held when the step began, nothing is delivered where it is or twice, and all ends where it belongs.

Proof. *Sent when held*, by induction on k: at position i - 0 is the owner of what is sent at k = 0. What position i
sends at k > 0 was sent to it by position i - 1 at k - 1, since r is as far from there as k - 1 says, and p steps
earlier. *Delivered once*: block (r, j, q) is delivered at k to the position k + 1 behind that of r, so at
k = 0 ... n - 2 to each position once but that of r. A ring has each rank at one position, hence each rank but r gets
each block of r once, and r never. *All in the end*: that, and what each rank began with, is everything. []

So there are ``n (n - 1) m p`` transfers. Nothing is dropped, so a rank holds most in the end: all ``n m p`` blocks.

Nothing here refuses a schedule: where a premise fails, a replay finds out what is wrong, if anything is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tasp_lab.arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from tasp_lab.schedule import Schedule


def proves(rings: IntArray, pieces: int, schedule: Schedule) -> bool:
    """Whether the theorem proves a schedule whose steps are those of `rings`, an int array (rings, world_size)."""
    count, n = rings.shape
    blocks = n * count * pieces
    return (
        schedule.task is None
        and schedule.rooms is None
        and schedule.reduction is None
        and (schedule.world_size == n and schedule.lanes >= count and pieces >= 1 and blocks > 0)
        and schedule.block_bytes.shape == (blocks,)
        and schedule.initial.shape == schedule.final.shape == (n, blocks)
        and int(schedule.block_bytes.min()) >= 1
        and are_permutations(rings)
        and all(row.all() for row in schedule.final)
        and _holds_own(schedule.initial, count * pieces)
    )


def are_permutations(rows: IntArray) -> bool:
    """Whether each row has each number below the length of the rows once.

    >>> are_permutations(np.array([[0, 2, 1], [1, 0, 2]])), are_permutations(np.array([[0, 1, 1]]))
    (True, False)
    """
    if not rows.size or rows.min() < 0 or rows.max() >= rows.shape[1]:
        return not rows.size
    met = np.zeros(rows.shape, dtype=bool)
    np.put_along_axis(met, rows, True, axis=1)
    return bool(met.all())


def _holds_own(initial: BoolArray, per_rank: int) -> bool:
    """Whether each rank holds its own blocks, so many, and no others."""
    own = (row[rank * per_rank : (rank + 1) * per_rank] for rank, row in enumerate(initial))
    return all(each.all() for each in own) and all(np.count_nonzero(row) == per_rank for row in initial)


def own_blocks(world_size: int, per_rank: int) -> BoolArray:
    """Bool array (world_size, world_size * per_rank): each rank holds so many blocks, those of rank 0 coming first.

    Each row is a window on the same numbers, so that this takes no more memory than two rows. It is read-only.

    >>> own_blocks(2, 3).astype(int).tolist()
    [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    """
    blocks = world_size * per_rank
    around = np.zeros(2 * blocks - per_rank, dtype=bool)
    around[blocks - per_rank : blocks] = True
    return sliding_window_view(around, blocks)[::per_rank][::-1]


def all_blocks(world_size: int, blocks: int) -> BoolArray:
    """Bool array (world_size, blocks): everybody holds everything. Its rows are one and the same; it is read-only.

    >>> all_blocks(2, 3).astype(int).tolist()
    [[1, 1, 1], [1, 1, 1]]
    """
    return np.broadcast_to(np.ones(blocks, dtype=bool), (world_size, blocks))
