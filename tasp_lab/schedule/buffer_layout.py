"""Where the copies of blocks lie in the memory of each rank.

Each rank has one memory. It holds in this order:

1. the *resident* copies whose kind is not bound, each at a place of its own: those that calls read, in the order in
   which they first do, then the others in the order of block numbers. Of kinds without a pool, these are the blocks
   that are ever at the rank; in a schedule without a task, all blocks, as in the buffer of a collective;
2. for each pool its buffers, each sized for the step at which the most bytes land in it. What comes at step s lands in
   buffer s mod b: arrivals in the order of the step, then the copies to which only calls of the rank add;
3. staging places.

What comes to a resident copy is received into its place only if it is data, or if nothing else comes to the copy until
it is given away. Any other sum lands in the buffer of its step or, without a pool, at a staging place of its own, and
is joined from there. Resident copies of bound kinds are tensors of the caller, into which nothing is received.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.dependencies import RESIDENT, Dependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step

OUTSIDE = -1
"""In place of an offset: the copy is a tensor of the caller."""

Key = tuple[int, int]
"""A copy at a rank: a block, and the step at which it comes into a buffer, or `RESIDENT`."""


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


def rank_layout(schedule: Schedule, rank: int, steps: Iterable[Step], derived: Dependencies) -> RankLayout:
    """The layout of a rank, from what it has to do with each step and the dependencies of that."""
    sizes: list[int] = schedule.block_bytes.tolist()
    copies: dict[Key, int] = {}
    end = 0
    for block in _resident_blocks(schedule, rank, derived):
        copies[block, RESIDENT] = end
        end += sizes[block]
    landed = _landed(schedule, derived, _alone(schedule, rank, steps, derived))
    received: dict[int, int] = {}
    for pool, by_step in zip(schedule.blocks.pools, landed.in_buffers, strict=True):
        most = max((sum(sizes[each.block] for each in landing) for landing in by_step.values()), default=0)
        for step, landing in by_step.items():
            offset = end + step % pool.buffers * most
            for each in landing:
                if each.since != RESIDENT:
                    copies.setdefault((each.block, each.since), offset)
                received[each.operation] = offset
                offset += sizes[each.block]
        end += pool.buffers * most
    for each in landed.in_place:
        received[each.operation] = copies[each.block, RESIDENT]
    for each in landed.staged:
        received[each.operation] = end
        end += sizes[each.block]
    return RankLayout(copies, received, end)


class Part(NamedTuple):
    """An arrival, or what a call adds."""

    operation: int
    block: int
    step: int
    since: int


class _Landed(NamedTuple):
    """What comes to a rank: into the buffers of each pool by step, into places, and to staging places."""

    in_buffers: list[dict[int, list[Part]]]
    in_place: list[Part]
    staged: list[Part]


def parts_of(derived: Dependencies) -> Iterator[Part]:
    """All arrivals in the order of steps, then all that calls add."""
    uses = derived.parts
    columns = (uses.operation.tolist(), uses.block.tolist(), uses.step.tolist(), uses.since.tolist())
    return (Part(*row) for row in zip(*columns, strict=True))


def _landed(schedule: Schedule, derived: Dependencies, alone: frozenset[int]) -> _Landed:
    blocks, found = schedule.blocks, _Landed([{} for _ in schedule.blocks.pools], [], [])
    pool, is_sum, outside = blocks.pool.tolist(), sums(blocks).tolist(), bound(blocks).tolist()
    seen: set[Key] = set()
    for part in parts_of(derived):
        block, resident = part.block, part.since == RESIDENT
        arrives = part.operation < derived.first_call
        if resident and not arrives:
            continue
        if not resident or (is_sum[block] and pool[block] >= 0):
            if arrives or (block, part.step) not in seen:
                found.in_buffers[pool[block]].setdefault(part.step, []).append(part)
            seen.add((block, part.step))
        elif not outside[block] and (not is_sum[block] or part.operation in alone):
            found.in_place.append(part)
        else:
            found.staged.append(part)
    return found


def _alone(schedule: Schedule, rank: int, steps: Iterable[Step], derived: Dependencies) -> frozenset[int]:
    """The parts that come alone to an empty resident copy, until it is given away or to the end."""
    given: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        for block in step.block[step.gives & (step.source == rank)].tolist():
            given.setdefault(block, []).append(index)
    together: dict[tuple[int, int], list[int]] = {}
    for part in parts_of(derived):
        if part.since == RESIDENT:
            gone = given.get(part.block, ())
            epoch = bisect_right(gone, part.step)
            together.setdefault((part.block, epoch), []).append(part.operation)
            if part.step in gone:  # what is given is still there when it may arrive
                together[part.block, epoch].append(part.operation)
    initial = schedule.initial[rank]
    return frozenset(
        parts[0]
        for (block, epoch), parts in together.items()
        if len(parts) == 1 and not (epoch == 0 and initial[block])
    )


def _resident_blocks(schedule: Schedule, rank: int, derived: Dependencies) -> list[int]:
    """The blocks with a resident copy in the memory of a rank, in their order."""
    blocks = np.flatnonzero(residents(schedule, rank, derived.parts.block))
    reads = derived.reads
    by_calls = reads.block[reads.operation >= derived.first_call]
    read, first = np.unique(by_calls, return_index=True)
    position = np.full(len(schedule.blocks), len(by_calls))
    position[read] = first
    found: list[int] = blocks[np.argsort(position[blocks], kind="stable")].tolist()
    return found


def residents(schedule: Schedule, rank: int, coming: IntArray) -> BoolArray:
    """Which blocks have a resident copy in the memory of a rank, to which the blocks `coming` come."""
    blocks = schedule.blocks
    if schedule.task is None and not blocks.pools:
        return ~bound(blocks)
    stays = schedule.initial[rank] | schedule.final[rank]
    if schedule.kept is not None:
        stays |= schedule.kept[rank]
    comes = np.zeros(len(blocks), dtype=bool)
    comes[coming] = True
    found: BoolArray = (stays | (comes & (blocks.pool < 0))) & ~bound(blocks)
    return found


def sums(blocks: Blocks) -> BoolArray:
    """Which blocks have parts that are joined."""
    return np.array([bool(kind.join) for kind in blocks.kinds], dtype=bool)[blocks.kind]


def bound(blocks: Blocks) -> BoolArray:
    """Which blocks are of bound kinds."""
    return np.array([kind.bound for kind in blocks.kinds], dtype=bool)[blocks.kind]
