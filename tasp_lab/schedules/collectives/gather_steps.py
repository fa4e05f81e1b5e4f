"""The steps of an AllGather with other blocks in place of its own, sent only to ranks that have a use for them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tasp_lab.core.arrays import BoolArray
from tasp_lab.schedule.calls import BlockLists, ranges
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule


def shares_along(gather: Schedule) -> list[list[Fraction]]:
    """The shares in which an AllGather cuts the shard of each rank, one per block with which the rank starts."""
    sizes = [gather.block_bytes[own].tolist() for own in gather.initial]
    return [[Fraction(size, sum(each)) for size in each] for each in sizes]


def carried(step: Step, pieces: BlockLists, first_lane: int = 0) -> Step:
    """A step of an AllGather with blocks instead of its own: `pieces` are those of each of its blocks.

    Lanes are numbered from `first_lane` on.
    """
    entry, position = ranges(pieces.offset[step.block], pieces.offset[step.block + 1])
    source, destination, lane = (each[entry] for each in (step.source, step.destination, step.lane))
    return Step(source, destination, lane + first_lane, pieces.block[position])


def trimmed(steps: Sequence[Step], used: BoolArray) -> tuple[list[Step], BoolArray]:
    """The steps without transfers for which there is no use, and the blocks that each rank uses or sends on.

    `used` is a bool array (world_size, blocks), as is the second answer.
    """
    needed, found = used.copy(), []
    for step in reversed(steps):
        kept = needed[step.destination, step.block]
        source, destination, lane, block = (
            each[kept] for each in (step.source, step.destination, step.lane, step.block)
        )
        needed[source, block] = True
        if len(block):
            found.append(Step(source, destination, lane, block))
    return found[::-1], needed
