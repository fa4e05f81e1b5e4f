"""Theorems that prove a schedule valid by the form of its steps, so that it need not be replayed.

A replay takes time and memory for every transfer: 134 million in an AllGather around 511 rings of 512 ranks. A schedule
that fails a premise is not rejected but replayed.

Rings of an AllGather (`rings_prove`)
-------------------------------------
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

Circulations: blocks that follow paths along rings, and sums that follow them (`paths_prove`)
---------------------------------------------------------------------------------------------
Data block x of a path starts at position p of a ring, a permutation of the n ranks, and goes to positions p + d, p +
2 d, ... (modulo n), d being 1 or -1. *Index* k of the path is its rank after k hops. At step k the rank at index k
sends x to the rank at index k + 1, for k below `hops`. Calls of step k at the rank at index k read x and blocks that
stay at this rank; each adds one part to a result of the rank, and in a backward pass one to the sum y of the path. y
is given by the rank at index k at step k + 1 to the rank at index k + 1, from `first_use` on, the first index at
which a call adds to it elsewhere than at its owner; at index `last_gift` it is given to its owner instead.

Theorem. Let these premises hold, which `paths_prove` checks:

1. Rings are permutations of the ranks; 0 <= `hops` < n.
2. At the start x is complete at index 0 and at the owner, at no rank at index 1 to `hops`, and is promised only where
   it is at the start. Blocks that stay are at their owners. Nothing else is there at the start.
3. Elsewhere than at the owner, calls use x at indices from `first_use` to `last_use`, and `last_use` <= `hops`.
4. `last_use` <= `last_gift` < n, and the owner is not at an index from `first_use` to `last_gift`.
5. All that moves is received into buffers; y is promised at its owner and a result at its rank, nowhere else.

And these, which are properties of `tasp_lab.schedules.attention.circulation` and are tested, not checked: calls
compute each existing part of results and of sums once, at the rank where the block that stays is, at the step that is
the index of this rank (x may be read at the owner at any step).

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

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tasp_lab.core.arrays import BoolArray, IntArray, frozen, numbered
from tasp_lab.schedule.model import ScheduleModel, Traffic


def rings_prove(rings: IntArray, chunks: int, schedule: ScheduleModel) -> bool:
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
    windows = (row[rank * per_rank : (rank + 1) * per_rank] for rank, row in enumerate(initial))
    return all(each.all() for each in windows) and all(np.count_nonzero(row) == per_rank for row in initial)


def own_blocks(world_size: int, per_rank: int) -> BoolArray:
    """Bool array (world_size, world_size * per_rank): each rank holds `per_rank` blocks, rank 0 the first ones.

    The rows are windows of one array that nothing can write to, so it takes no more memory than two rows.

    >>> own_blocks(2, 3).astype(int).tolist()
    [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    """
    blocks = world_size * per_rank
    around = np.zeros(2 * blocks - per_rank, dtype=bool)
    around[blocks - per_rank : blocks] = True
    around = frozen("own blocks", around, np.bool_, 1, "an array of one dimension")
    return sliding_window_view(around, blocks)[::per_rank][::-1]


def all_blocks(world_size: int, blocks: int) -> BoolArray:
    """Bool array (world_size, blocks): every rank holds every block. Read-only; all rows share memory.

    >>> all_blocks(2, 3).astype(int).tolist()
    [[1, 1, 1], [1, 1, 1]]
    """
    return np.broadcast_to(np.ones(blocks, dtype=bool), (world_size, blocks))


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
    home_lane : the lane of that gift if it goes straight to its owner, -1 if along the ring, which has the ring's lane.
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
    home_lane: IntArray
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

    def bytes_by_place(self, size_bytes: IntArray) -> IntArray:
        """The bytes that leave each position of each ring, int array (rings, world_size); `size_bytes` by block."""
        n = self.rings.shape[1]
        # On each path a block is sent from some indices on: the first one, and how many.
        sent = [(self.block, np.zeros_like(self.hops), self.hops)]
        if self.following is not None and self.last_gift is not None:
            gifts = np.where(self.first_use < 0, 0, self.last_gift - self.first_use + 1)
            sent.append((self.following, np.maximum(self.first_use, 0), gifts))
        # The ledger is a running sum of what begins and ends to be sent at a position, twice around the ring.
        changes = np.zeros((len(self.rings), 2 * n), dtype=np.int64)
        for block, first, count in sent:
            begin, end = first, first + count
            if self.direction < 0:
                begin, end = 1 - end, 1 - begin
            begin = (self.start + begin) % n
            np.add.at(changes, (self.ring, begin), size_bytes[block])
            np.add.at(changes, (self.ring, begin + count), -size_bytes[block])
        ledger = changes.cumsum(axis=1)
        by_place: IntArray = ledger[:, :n] + ledger[:, n:]
        return by_place

    def traffic(self, size_bytes: IntArray) -> Traffic:
        """What is sent in all; `size_bytes` by block."""
        n, rings, directly = self.rings.shape[1], self.rings, self.home_lane >= 0
        first_place = self.ring * n + self.start
        # Blocks that move along rings at indices from `begin` to `end`, so many steps later than their index.
        moves = [(self.block, np.zeros_like(self.hops), self.hops, 0)]
        if self.following is not None and self.last_gift is not None:
            end = np.where(self.first_use < 0, -1, self.last_gift + ~directly)
            moves.append((self.following, self.first_use, end, 1))
        total, most = np.zeros((2, *rings.shape))
        for step in range(n + 1):
            load = np.zeros(rings.shape)
            for block, begin, end, later in moves:
                moving = (begin <= step - later) & (step - later < end)
                sizes = np.bincount(first_place, np.where(moving, size_bytes[block], 0), rings.size)
                load += np.roll(sizes.reshape(rings.shape), self.direction * (step - later), axis=1)
            total += load
            np.maximum(most, load, out=most)
        ring, place = np.nonzero(total)
        rows = [(rings[ring, place], np.roll(rings, -self.direction, axis=1)[ring, place], ring,
                 *(each[ring, place].astype(np.int64) for each in (total, most)))]  # fmt: skip
        if self.following is not None and self.last_gift is not None:
            home = np.flatnonzero(directly & (self.first_use >= 0))
            giver = rings[self.ring[home], (self.start + self.direction * self.last_gift)[home] % n]
            # Sums that go from one rank straight to another do so at one step.
            firsts, number = numbered(self.home_lane[home], giver, self.owner[home])
            sizes = np.bincount(number, size_bytes[self.following[home]], len(firsts)).astype(np.int64)
            rows.append((giver[firsts], self.owner[home[firsts]], self.home_lane[home[firsts]], sizes, sizes))
        columns = [np.concatenate(each) for each in zip(*rows, strict=True)]
        order = np.lexsort((columns[1], columns[0], columns[2]))
        return Traffic(*(each[order] for each in columns))


def paths_prove(
    paths: Paths,
    staying: IntArray,
    staying_owner: IntArray,
    results: IntArray,
    results_owner: IntArray,
    schedule: ScheduleModel,
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
    """Whether premises 1, 3 and 4 hold."""
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


def _start_right(paths: Paths, schedule: ScheduleModel) -> bool:
    """Premise 2 of the blocks that move."""
    first = paths.rings[paths.ring, paths.start]
    if not (schedule.initial[first, paths.block] & schedule.initial[paths.owner, paths.block]).all():
        return False
    rank, path = np.nonzero(schedule.initial[:, paths.block])
    index = paths.index_of(rank, path)
    return bool(((index == 0) | (index > paths.hops[path])).all())
