"""Validity of circulations without a replay: blocks that follow paths along rings, and sums that follow them.

Data block x of a path starts at position p of a ring, a permutation of the n ranks, and goes to positions p + d, p +
2 d, ... (modulo n), d being 1 or -1. *Index* k of the path is its rank after k hops. At step k the rank at index k
sends x to the rank at index k + 1, for k below `hops`. Calls of step k at the rank at index k read x and blocks that
stay at this rank; each adds one part to a result of the rank, and in a backward pass one to the sum y of the path. y
is given by the rank at index k at step k + 1 to the rank at index k + 1, from `first_use` on, the first index at
which a call adds to it elsewhere than at its owner; at index `last_gift` it is given to its owner instead.

Theorem. Let these premises hold, which `proves` checks:

1. Rings are permutations of the ranks; 0 <= `hops` < n.
2. At the start x is complete at index 0 and at the owner, at no rank at index 1 to `hops`, and is promised only where
   it is at the start. Blocks that stay are at their owners. Nothing else is there at the start.
3. Elsewhere than at the owner, calls use x at indices from `first_use` to `last_use`, and `last_use` <= `hops`.
4. `last_use` <= `last_gift` < n, and the owner is not at an index from `first_use` to `last_gift`.
5. All that moves is received into buffers; y is promised at its owner and a result at its rank, nowhere else.

And these, which are properties of `tasp_lab.schedules.attention.circulation` and are tested, not checked: calls compute
each existing part of results and of sums once, at the rank where the block that stays is, at the step that is the index
of this rank (x may be read at the owner at any step).

Then the schedule is valid.

Proof. *x*: ranks at indices 0 to `hops` are distinct, as `hops` < n. By induction on k, x is at index k from step k
on, and not before, unless k = 0: it came at step k - 1 from index k - 1, where it was. It is used only at step k, as
operand and as source, when it is still in its buffer, since pools have two buffers or more. So P1 and P2 hold, and
P4, since no rank receives x twice, or where it is at the start.

*y*: by induction on k from `first_use` on, at step k the rank at index k has nothing of y when the step begins. Then
the parts of its calls come, and what index k - 1 had at the end of step k - 1: all parts of indices `first_use` to k,
which are disjoint, since each call is at one rank only. They meet in the buffer of step k, and at step k + 1 they are
given: P4, P5 and P7. There is a part, since there is one at `first_use`: P1. The owner, at none of these indices,
receives the union of all at step `last_gift` + 1. It keeps it and has no other parts than those of its own calls: y
is complete there at the end (P8), and is at no other rank. Nothing reads results or y, and the owner never sends y:
P6. []
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.ring_proof import are_permutations

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Paths:
    """Paths of blocks along rings, int arrays with an entry per path unless another shape is given.

    Parameters
    ----------
    rings : int array (rings, world_size).
    direction : 1, or -1 to go against the rings.
    lanes : the number of lanes that the steps use.
    block : the data block x.
    ring, start : the ring of a path and the position on it at which x starts.
    hops : the number of hops of x.
    owner : the rank where x stays for good and where y is promised.
    first_use, last_use : the first and the last index at which calls use x, other than at its owner; -1 if none.
    following : the sum y of each path; None in a forward pass, which has none.
    last_gift : the index from which y is given to its owner; of no meaning without a use or a sum.
    """

    rings: IntArray
    direction: int
    lanes: int
    block: IntArray
    ring: IntArray
    start: IntArray
    hops: IntArray
    owner: IntArray
    first_use: IntArray
    last_use: IntArray
    following: IntArray | None = None
    last_gift: IntArray | None = None

    def index_of(self, rank: IntArray, path: IntArray) -> IntArray:
        """The index of a rank on a path."""
        place = np.argsort(self.rings, axis=1)[self.ring[path], rank]
        index: IntArray = self.direction * (place - self.start[path]) % self.rings.shape[1]
        return index

    @property
    def transfers(self) -> int:
        """The number of transfers of all steps."""
        gifts = 0
        if self.last_gift is not None:
            gifts = int((self.last_gift - self.first_use + 1)[self.first_use >= 0].sum())
        return int(self.hops.sum()) + gifts


def proves(
    paths: Paths,
    staying: IntArray,
    staying_owner: IntArray,
    results: IntArray,
    results_owner: IntArray,
    schedule: Schedule,
) -> bool:
    """Whether the theorem proves a schedule whose steps are those of `paths`.

    Parameters
    ----------
    staying, staying_owner : the data blocks that calls read where they are from the start, and these ranks.
    results, results_owner : the sums that calls add to and that are not sent, and their ranks.
    """
    following = paths.block[:0] if paths.following is None else paths.following
    everything = np.concatenate([paths.block, following, staying, results])
    moving, sums = np.concatenate([paths.block, following]), np.concatenate([following, results])
    owners = np.concatenate([paths.owner[: len(following)], results_owner])
    return (
        schedule.task is not None
        and schedule.initial_part is None
        and schedule.lanes >= paths.lanes
        and np.array_equal(np.sort(everything), np.arange(len(schedule.blocks)))
        and _are_paths(paths, schedule.world_size)
        and bool((schedule.blocks.buffers[moving] > 0).all())
        and not schedule.initial[:, sums].any()
        and _are_only_at(schedule.final, sums, owners)
        and bool(schedule.initial[staying_owner, staying].all())
        and _start_right(paths, schedule)
        and not (schedule.final & ~schedule.initial)[:, np.concatenate([paths.block, staying])].any()
    )


def _are_paths(paths: Paths, world_size: int) -> bool:
    """Premises 1, 3 and 4."""
    n = paths.rings.shape[1]
    everywhere = np.arange(len(paths.block))
    used = paths.first_use >= 0
    right = (paths.ring >= 0) & (paths.ring < len(paths.rings)) & (paths.start >= 0) & (paths.start < n)
    right &= (paths.owner >= 0) & (paths.owner < n) & (paths.hops >= 0) & (paths.hops < n)
    right &= ~used | ((paths.first_use <= paths.last_use) & (paths.last_use <= paths.hops))
    if n != world_size or not are_permutations(paths.rings) or not right.all():
        return False
    if paths.following is None or paths.last_gift is None:
        return paths.following is paths.last_gift
    owner = paths.index_of(paths.owner, everywhere)
    right = (paths.last_use <= paths.last_gift) & (paths.last_gift < n)
    right &= (owner < paths.first_use) | (owner > paths.last_gift)
    return bool((right | ~used).all())


def _are_only_at(held: BoolArray, blocks: IntArray, ranks: IntArray) -> bool:
    """Whether each of these blocks is at its rank and at no other."""
    return bool(held[ranks, blocks].all()) and int(np.count_nonzero(held[:, blocks])) == len(blocks)


def _start_right(paths: Paths, schedule: Schedule) -> bool:
    """Premise 2 of the blocks that move."""
    first = paths.rings[paths.ring, paths.start]
    if not (schedule.initial[first, paths.block] & schedule.initial[paths.owner, paths.block]).all():
        return False
    rank, path = np.nonzero(schedule.initial[:, paths.block])
    index = paths.index_of(rank, path)
    return bool(((index == 0) | (index > paths.hops[path])).all())
