"""Where the copies of blocks lie in the memory of each rank.

Each rank has one memory. It holds in this order:

1. the *resident* copies but tensors of the caller, each at a place of its own: those that calls read, kind by kind in
   the order in which they first do, then the others in the order of block numbers. Of kinds without a pool, these are
   the blocks that are ever at the rank; in a schedule without a task, all blocks, as in the buffer of a collective;
2. for each pool its buffers, each sized for the step at which the most bytes land in it. What comes at step s lands in
   buffer s mod b: arrivals in the order of the step, then the copies to which only calls of the rank add. Of these,
   the copies that calls read come first; the others are grouped by where they go next and by what they wait for, so
   that blocks which leave together lie side by side;
3. staging places.

What comes to a resident copy is received into its place only if it is data, or if nothing else comes to the copy until
it is given away. Any other sum lands in the buffer of its step or, without a pool, at a staging place of its own, and
is joined from there, as do all sums that are wider at home than on the wire. Resident copies of bound kinds at the rank
that owns them are tensors of the caller, into which nothing is received; at other ranks they lie in the memory.

Example: a ring of four ranks passes blocks of 8 bytes through a pool of two buffers. The memory of a rank has 24 bytes:
its own block at offset 0, one buffer at 8 and one at 16. What comes at steps 0 and 2 lies at 8, what comes at step 1 at
16. If two rings brought a block each, buffers would have 16 bytes: offsets 8 and 24, and a second block 8 bytes behind
the first.

Layouts are derived for several ranks at once, since a message needs the offsets at both of its ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, are_among, distinct, stable_order
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.dependencies import RESIDENT, Accesses, Uses
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import OncePerSchedule, Schedule

OUTSIDE = -1
"""In place of an offset: the copy is a tensor of the caller."""

Key = tuple[int, int]
"""A copy at a rank: a block, and the step at which it comes into a buffer, or `RESIDENT`."""


class Part(NamedTuple):
    """An arrival, or what a call adds."""

    operation: int
    block: int
    step: int
    since: int


def parts_of(derived: Accesses) -> Iterator[Part]:
    """All arrivals in the order of steps, then all that calls add."""
    uses = derived.parts
    columns = (uses.operation.tolist(), uses.block.tolist(), uses.step.tolist(), uses.since.tolist())
    return (Part(*row) for row in zip(*columns, strict=True))


@dataclass(frozen=True)
class RankLayout:
    """Offsets in the memory of one rank, in bytes: of copies, and of what is received, by operation.

    Copies that are not in `copies` are `OUTSIDE`.
    """

    copies: dict[Key, int]
    received: dict[int, int]
    memory_bytes: int

    def offset(self, block: int, since: int) -> int:
        return self.copies.get((block, since), OUTSIDE)


class Readiness:
    """What comes last to copies before they are read.

    `last_to_come` are two int arrays (parts,): the first and the last of what comes to a copy together with each part,
    that is at its step: a lane of a source, or a call.
    """

    def __init__(self, schedule: Schedule, derived: Accesses) -> None:
        transfers, parts = derived.transfers, derived.parts
        lane = -1 - (transfers.source * schedule.lanes + transfers.lane)
        names = np.concatenate([lane, derived.first_call + np.arange(len(derived.calls.step))])[parts.operation]
        last = np.empty_like(names)
        last[parts.first] = names  # of several assignments the last one counts
        self._step = parts.step
        self.last_to_come: tuple[IntArray, IntArray] = (names[parts.first], last[parts.first])

    def after(self, reads: Uses) -> tuple[IntArray, IntArray, IntArray]:
        """What comes last to copies that are read before they are: its step, -1 for nothing, and `last_to_come`."""
        step, first, last = (
            np.where(reads.first >= 0, np.append(column, 0)[reads.first], nothing)
            for column, nothing in zip((self._step, *self.last_to_come), (-1, 0, 0), strict=True)
        )
        return step, first, last


class Layouts:
    """The memories of some `ranks`, from what these change and read at each step.

    `received` is where each part of `derived.parts` is received, in the memory of its rank, in bytes; `OUTSIDE` for
    what calls add. `memory_bytes` is the size of each rank's memory.
    """

    def __init__(
        self, schedule: Schedule, ranks: Sequence[int], derived: Accesses, readiness: Readiness | None = None
    ) -> None:
        self._schedule, self._blocks, self._ranks = schedule, schedule.blocks, ranks
        self._derived, self._parts, self._size = derived, derived.parts, schedule.blocks.bytes
        self._steps = len(schedule.steps) + 1
        self._readiness = Readiness(schedule, derived) if readiness is None else readiness
        place = np.zeros(schedule.world_size, dtype=np.int64)
        place[list(ranks)] = np.arange(len(ranks))
        self._at = place[self._parts.rank]
        self._arrives = self._parts.operation < derived.first_call
        self._resident = self._parts.since == RESIDENT
        self._is_first = self._parts.first == np.arange(len(self._at))
        resident, resident_offset, end = self._resident_copies()
        # First what lands in buffers, behind the resident copies.
        self.received: IntArray = np.full(len(self._at), OUTSIDE)
        is_sum, pool = self._blocks.are_sums, self._blocks.pool
        to_buffer = ~self._resident | (is_sum[self._parts.block] & (pool[self._parts.block] >= 0))
        # What has a place of its own there: arrivals, and the first addition to a copy.
        lands = np.flatnonzero(np.where(self._arrives, to_buffer, ~self._resident & self._is_first))
        landed, end = self._fill_buffers(lands, end)
        self.received[lands] = np.where(self._arrives[lands], landed, OUTSIDE)
        # Then the other arrivals at resident copies: in their place, or at staging places behind all buffers.
        coming = np.flatnonzero(self._resident & self._arrives & ~to_buffer)
        rank, block = self._parts.rank[coming], self._parts.block[coming]
        elsewhere = outside(schedule, rank, block) | wide_at_home(self._blocks)[block]
        in_place = ~elsewhere & (~is_sum[block] | self._alone(coming))
        places, staged = coming[in_place], coming[~in_place]
        self.received[places] = resident_offset[np.searchsorted(resident, self._copy_keys(self._parts)[places])]
        self.received[staged], end = self._one_after_another(staged, end)
        self.memory_bytes = end
        if len(ranks) == schedule.world_size:
            memory_bytes.keep(schedule, lambda: end)
        # The places of copies: of resident ones by key, of those in buffers where the first of their parts landed.
        self._keys, self._offsets = resident, resident_offset
        self._landed = np.full(len(self._at), OUTSIDE)
        self._landed[lands] = landed

    def sent(self, reads: Uses) -> IntArray:
        """Where the copies that are read lie as they are sent, in bytes, or `OUTSIDE`: those are gathered first."""
        offset = np.append(self._landed, OUTSIDE)[reads.first]
        stay = np.flatnonzero(reads.since == RESIDENT)
        staying = reads.select(stay)
        offset[stay] = np.where(
            gathered(self._schedule, staying), OUTSIDE, self._resident_offset(self._copy_keys(staying))
        )
        return offset

    def of(self, rank: int) -> RankLayout:
        """The layout of one of the ranks."""
        blocks, parts = len(self._blocks), self._parts
        stays = np.flatnonzero(self._keys // blocks == rank)
        away = np.flatnonzero(~self._resident & self._is_first & (parts.rank == rank))
        keys = [
            *((block, RESIDENT) for block in (self._keys[stays] % max(blocks, 1)).tolist()),
            *zip(parts.block[away].tolist(), parts.step[away].tolist(), strict=True),
        ]
        offsets = np.concatenate([self._offsets[stays], self._landed[away]]).tolist()
        arrivals = np.flatnonzero(self._arrives & (parts.rank == rank))
        received = zip(parts.operation[arrivals].tolist(), self.received[arrivals].tolist(), strict=True)
        memory_bytes = int(self.memory_bytes[self._ranks.index(rank)])
        return RankLayout(dict(zip(keys, offsets, strict=True)), dict(received), memory_bytes)

    def _copy_keys(self, uses: Uses) -> IntArray:
        return uses.rank * len(self._blocks) + uses.block

    def _resident_offset(self, keys: IntArray) -> IntArray:
        if not len(self._keys):
            return np.full(len(keys), OUTSIDE)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._offsets[at], OUTSIDE)

    def _resident_copies(self) -> tuple[IntArray, IntArray, IntArray]:
        """The keys of resident copies, ascending, their offsets, and where they end at each rank."""
        keys, offsets, ends = [], [], []
        derived, parts, reads = self._derived, self._parts, self._derived.reads
        calls = np.flatnonzero(reads.operation >= derived.first_call)
        coming = _by_rank(parts.rank, parts.block, self._ranks)
        by_calls = _by_rank(reads.rank[calls], reads.block[calls], self._ranks)
        for rank, comes, read in zip(self._ranks, coming, by_calls, strict=True):
            blocks = _resident_blocks(self._schedule, rank, comes, read)
            size = self._blocks.home_bytes[blocks]
            end = np.cumsum(size)
            keys.append(rank * len(self._blocks) + blocks)
            offsets.append(end - size)
            ends.append(int(size.sum()))
        key, offset = np.concatenate(keys), np.concatenate(offsets)
        order = np.argsort(key)
        return key[order], offset[order], np.array(ends)

    def _fill_buffers(self, lands: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
        """Where what lands in buffers lies, and the end of all buffers of each rank; `end` is where they begin."""
        pools, parts = self._blocks.pools, self._parts
        pool, step, at = self._blocks.pool[parts.block[lands]], parts.step[lands], self._at[lands]
        buffer = (at * len(pools) + pool) * self._steps + step
        order = stable_order(buffer, *self._grouping(lands))
        # The offset within a buffer is a running sum of sizes, in sorted order, less its value where the buffer starts.
        size, starts = self._size[parts.block[lands[order]]], np.flatnonzero(np.diff(buffer[order], prepend=-1))
        before = np.cumsum(size) - size
        within = np.empty_like(before)
        within[order] = before - np.repeat(before[starts], np.diff(np.append(starts, len(order))))
        # All buffers of a pool are as large as the fullest one, so buffer s mod b begins at a multiple of that size.
        most = np.zeros((len(self._ranks), len(pools)), dtype=np.int64)
        np.maximum.at(most, (at, pool), within + self._size[parts.block[lands]])
        count = np.array([each.buffers for each in pools], dtype=np.int64)
        base = end[:, None] + np.cumsum(most * count, axis=1) - most * count
        buffers = count[pool] if len(pools) else pool
        return base[at, pool] + step % buffers * most[at, pool] + within, end + most @ count

    def _grouping(self, lands: IntArray) -> tuple[IntArray, ...]:
        """Sort keys of what lands together, the first one first.

        Example: at one step a rank receives blocks 1, 2 and 3. It sends 1 and 3 on along lane 0, and a call reads 2.
        So block 2 lies first, then 1 and 3, which leave as one message.
        """
        reads, parts, derived = self._derived.reads, self._parts, self._derived
        # A copy in a buffer has the number of its first part; resident copies at which sums land come behind.
        stays = self._resident[lands]
        staged = self._copy_keys(parts.select(lands[stays]))
        resident, number = np.unique(staged, return_inverse=True)
        copy = parts.first[lands]
        copy[stays] = len(self._at) + number
        read = np.flatnonzero(reads.since != RESIDENT)
        used, by = reads.first[read], reads.operation[read]
        if len(resident):
            staying = reads.select(np.flatnonzero(reads.since == RESIDENT))
            keys = self._copy_keys(staying)
            place = np.minimum(np.searchsorted(resident, keys), len(resident) - 1)
            those = np.flatnonzero(resident[place] == keys)
            used = np.concatenate([used, len(self._at) + place[those]])
            by = np.concatenate([by, staying.operation[those]])
        by_call = by >= derived.first_call
        free = np.ones(len(self._at) + len(resident), dtype=bool)
        free[used[by_call]] = False
        leaves = derived.transfers.destination * self._schedule.lanes + derived.transfers.lane
        goes = np.full(len(free), -1)
        goes[used[~by_call][::-1]] = leaves[by[~by_call][::-1]]  # of several assignments the last one counts
        free = free[copy]
        comes = (np.where(free, column[lands], 0) for column in self._readiness.last_to_come)
        return (free, np.where(free, goes[copy], -1), *comes)

    def _alone(self, arrivals: IntArray) -> BoolArray:
        """Whether each of these arrivals comes alone to an empty resident sum, until it is given away or to the end."""
        blocks, transfers = self._blocks, self._derived.transfers
        alone, concerned = np.zeros(len(self._at), dtype=bool), blocks.are_sums & (blocks.pool < 0)
        comes = np.flatnonzero(self._resident & concerned[self._parts.block])
        if len(comes):
            rank, block, step = (column[comes] for column in (self._parts.rank, self._parts.block, self._parts.step))
            moved = np.flatnonzero(transfers.gives & concerned[transfers.block])
            gifts = (transfers.source * len(blocks) + transfers.block)[moved] * self._steps + transfers.step[moved]
            gifts.sort()
            # The epoch of an arrival: how many gifts of all copies precede it, so it grows with each gift of its copy.
            copy = (rank * len(blocks) + block) * self._steps
            before, epoch = (np.searchsorted(gifts, copy + step, side=side) for side in ("left", "right"))
            _, cell = np.unique(copy * (len(gifts) + 1) + epoch, return_inverse=True)
            is_empty = (epoch > np.searchsorted(gifts, copy)) | ~self._schedule.initial[rank, block]
            # What is given at the step of an arrival may still be there when that arrives.
            alone[comes] = (np.bincount(cell)[cell] == 1) & (before == epoch) & is_empty
        return alone[arrivals]

    def _one_after_another(self, parts: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
        """Offsets of parts from the `end` of each rank's memory on, and its new end."""
        order = stable_order(self._at[parts])
        size, at = self._size[self._parts.block[parts[order]]], self._at[parts[order]]
        added = np.bincount(at, weights=size, minlength=len(self._ranks)).astype(np.int64)
        before = np.cumsum(size) - size
        offsets = np.empty_like(before)
        offsets[order] = end[at] + before - (np.cumsum(added) - added)[at]
        return offsets, end + added


def _by_rank(rank: IntArray, block: IntArray, ranks: Sequence[int]) -> Iterator[IntArray]:
    """The blocks of each of some ranks, in their order."""
    order = stable_order(rank)
    first, end = (np.searchsorted(rank[order], ranks, side=side).tolist() for side in ("left", "right"))
    return (block[order[slice(*each)]] for each in zip(first, end, strict=True))


def _resident_blocks(schedule: Schedule, rank: int, coming: IntArray, read_by_calls: IntArray) -> IntArray:
    """The blocks with a resident copy in the memory of a rank, in their order."""
    blocks = np.flatnonzero(residents(schedule, rank, coming))
    position = np.full(len(schedule.blocks), len(read_by_calls))
    position[read_by_calls[::-1]] = np.arange(len(read_by_calls))[::-1]  # the first of several: the last one counts
    is_read = position[blocks] < len(read_by_calls)
    kind = np.where(is_read, schedule.blocks.kind[blocks], len(schedule.blocks.kinds))
    ordered: IntArray = blocks[stable_order(kind, position[blocks])]
    return ordered


def resident_offsets(schedule: Schedule, rank: IntArray, block: IntArray) -> dict[int, int]:
    """Where the resident copies of a schedule lie in which nothing is received, in bytes, by ``rank * blocks + block``.

    `rank` and `block` are int arrays: what calls read, in their order.
    """
    offsets: dict[int, int] = {}
    ranks, nothing = range(schedule.world_size), np.zeros(0, dtype=np.int64)
    for number, read in zip(ranks, _by_rank(rank, block, ranks), strict=True):
        blocks = _resident_blocks(schedule, number, nothing, read)
        size = schedule.blocks.home_bytes[blocks]
        keys = number * len(schedule.blocks) + blocks
        offsets.update(zip(keys.tolist(), (np.cumsum(size) - size).tolist(), strict=True))
    return offsets


def residents(schedule: Schedule, rank: int, coming: IntArray) -> BoolArray:
    """Which blocks have a resident copy in the memory of a rank, to which the blocks `coming` come."""
    blocks = schedule.blocks
    is_outside = outside(schedule, rank, np.arange(len(blocks)))
    if schedule.task is None and not blocks.pools:
        return ~is_outside
    stays = schedule.initial[rank] | schedule.final[rank]
    if schedule.kept is not None:
        stays |= schedule.kept[rank]
    comes = np.zeros(len(blocks), dtype=bool)
    comes[coming] = True
    resident: BoolArray = (stays | (comes & (blocks.pool < 0))) & ~is_outside
    return resident


def wide_at_home(blocks: Blocks) -> BoolArray:
    """Which blocks are wider at home than on the wire."""
    return np.array([kind.is_wide_at_home for kind in blocks.kinds], dtype=bool)[blocks.kind]


def gathered(schedule: Schedule, reads: Uses) -> BoolArray:
    """Whether copies that are read do not lie in the memory as they are sent: they are of the caller, or narrowed."""
    elsewhere = outside(schedule, reads.rank, reads.block) | wide_at_home(schedule.blocks)[reads.block]
    is_gathered: BoolArray = (reads.since == RESIDENT) & elsewhere
    return is_gathered


def outside(schedule: Schedule, rank: IntArray | int, block: IntArray) -> BoolArray:
    """Which resident copies are tensors of the caller: those of bound kinds, at the ranks that own them."""
    blocks = schedule.blocks
    is_outside: BoolArray = np.array([kind.bound for kind in blocks.kinds], dtype=bool)[blocks.kind[block]]
    return is_outside if schedule.task is None else is_outside & (schedule.task.contract.owner[block] == rank)


# The size of each rank's memory, for all ranks together and without their layouts.


_EMPTY, _ALONE, _SEVERAL = range(3)
"""What a resident sum has: nothing, one arrival that lies in its place, or anything else."""


@OncePerSchedule
def memory_bytes(schedule: Schedule) -> IntArray:
    """The size of each rank's memory in bytes, as an int array (world_size,)."""
    sizes = _Sizes(schedule)
    for step in schedule.steps if sizes.depends_on_steps else ():
        sizes.add(step)
    return sizes.memory_bytes()


class _Sizes:
    """The parts of the memory of each rank, step by step; a copy is a number ``rank * blocks + block``."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._blocks = schedule, schedule.blocks
        self._ranks, self._count = schedule.world_size, len(schedule.blocks)
        self._is_sum = self._blocks.are_sums
        self._wide = wide_at_home(self._blocks)
        self._staging = self._is_sum & (self._blocks.pool < 0)
        self._content = (schedule.initial * np.uint8(_SEVERAL)).ravel() if self._staging.any() else None
        self._largest = np.zeros((len(self._blocks.pools), self._ranks), dtype=np.int64)
        self._staged = np.zeros(self._ranks, dtype=np.int64)
        self._all_stay = schedule.task is None and not self._blocks.pools
        self._coming: list[IntArray] = []

    @property
    def depends_on_steps(self) -> bool:
        return not self._all_stay or bool(self._staging.any())

    def add(self, step: Step) -> None:
        """Add what comes to all ranks at a step."""
        arriving = step.destination * self._count + step.block
        added = self._added(step.calls)
        rank, block = self._places(arriving)
        away = ~self._schedule.is_resident(rank, block)
        in_buffer = away | (self._is_sum[block] & (self._blocks.pool[block] >= 0))
        self._fill(arriving[in_buffer], added)
        is_outside = ~in_buffer & outside(self._schedule, rank, block)
        np.add.at(self._staged, rank[is_outside], self._blocks.bytes[block[is_outside]])
        if self._content is not None:
            is_moved = step.gives & self._staging[step.block]
            gone = step.source[is_moved] * self._count + step.block[is_moved]
            self._content[gone] = _EMPTY
            self._stage(self._in_memory(arriving), self._in_memory(added), gone)
        if not self._all_stay:
            self._coming.append(distinct(np.concatenate([arriving[~in_buffer], added])))

    def _places(self, copies: IntArray) -> tuple[IntArray, IntArray]:
        rank, block = np.divmod(copies, max(self._count, 1))
        return rank, block

    def _in_memory(self, copies: IntArray) -> IntArray:
        """The sums without a pool among these copies, without tensors of the caller."""
        rank, block = self._places(copies)
        return copies[self._staging[block] & ~outside(self._schedule, rank, block)]

    def _added(self, calls: tuple[Calls, ...]) -> IntArray:
        """The copies that calls add to, each once."""
        copies = [np.zeros(0, dtype=np.int64)]
        for group in calls:
            assert self._schedule.task is not None, "a schedule with calls has a task"
            for _, batch in group.batches():
                effects = self._schedule.task.effects(batch)
                copies.append(distinct(batch.rank[effects.call] * self._count + effects.block))
        return distinct(np.concatenate(copies))

    def _fill(self, arriving: IntArray, added: IntArray) -> None:
        """Account for the buffers of a step: arrivals, and copies to which only calls add."""
        rank, block = self._places(added)
        begun = added[~self._schedule.is_resident(rank, block) & ~are_among(added, arriving)]
        rank, block = self._places(np.concatenate([arriving, begun]))
        landing = np.zeros_like(self._largest)
        np.add.at(landing, (self._blocks.pool[block], rank), self._blocks.bytes[block])
        np.maximum(self._largest, landing, out=self._largest)

    def _stage(self, arriving: IntArray, added: IntArray, gone: IntArray) -> None:
        """Account for arrivals at resident sums without a pool, some of which are added to or given at this step."""
        assert self._content is not None
        copies, arrivals = np.unique(arriving, return_counts=True)
        parts = arrivals + are_among(copies, added)
        before = self._content[copies]
        alone = (before == _EMPTY) & (parts == 1) & ~are_among(copies, gone) & ~self._wide[self._places(copies)[1]]
        staged = np.where(alone, 0, arrivals + (before == _ALONE))
        called = added[~are_among(added, copies)]
        moved = called[self._content[called] == _ALONE]
        for changed, count in ((copies, staged), (moved, np.ones_like(moved))):
            rank, block = self._places(changed)
            np.add.at(self._staged, rank, count * self._blocks.bytes[block])
        self._content[copies] = np.where(alone, _ALONE, _SEVERAL)
        self._content[called] = _SEVERAL

    def memory_bytes(self) -> IntArray:
        """The sizes for all steps so far."""
        buffers = np.array([pool.buffers for pool in self._blocks.pools], dtype=np.int64)
        return self._resident_bytes() + self._staged + buffers @ self._largest

    def _resident_bytes(self) -> IntArray:
        coming = distinct(np.concatenate([np.zeros(0, dtype=np.int64), *self._coming]))
        ends = np.searchsorted(coming, np.arange(self._ranks + 1) * self._count)
        blocks = coming % max(self._count, 1)
        rows = (residents(self._schedule, rank, blocks[ends[rank] : ends[rank + 1]]) for rank in range(self._ranks))
        return np.array([self._blocks.home_bytes[row].sum() for row in rows], dtype=np.int64)
