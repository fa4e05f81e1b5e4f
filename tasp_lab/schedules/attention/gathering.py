"""Blocks gathered along an AllGather, and what is computed with them reduced to their owners on its way back.

The shard of each rank is cut in the proportions of its blocks in the AllGather. A block goes only to ranks that use it
and to those on the way there. What ranks compute for a block, parts of a sum, is given along the same paths in reverse,
which is a ReduceScatter: a rank gives its sum after all to which it had forwarded the block have given theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.calls import BlockLists, Calls, ranges
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import single_rings
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.topology.graph import Topology


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


def all_gathers(
    name: str, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None
) -> list[Schedule]:
    """The AllGathers of a name to choose from: one, or a single ring in each direction."""
    if name != "ring":
        return [collective(name, topology, shard_bytes, decomposition)]
    return [ring_all_gather(topology, shard_bytes, ring[None]) for ring in single_rings(topology)]


def steps_along(
    gather: Schedule, task: AttentionTask, blocks: IntArray, piece: IntArray, first_lane: int = 0
) -> list[Step]:
    """The steps of an AllGather with these blocks of a task instead of its own; `piece` is the share of each of them.

    Lanes are numbered from `first_lane` on.
    """
    first = np.cumsum([0, *gather.initial.sum(axis=1)])[:-1]
    number = np.nonzero(gather.initial)[1][first[task.owner[blocks]] + piece]
    order = np.argsort(number, kind="stable")
    pieces = BlockLists.of_sizes(np.bincount(number, minlength=len(gather.blocks)), blocks[order])
    return [carried(step, pieces, first_lane) for step in gather.steps]


def read_by(calls: Calls, task: AttentionTask) -> BoolArray:
    """The blocks that each rank calls with: bool array (world_size, blocks)."""
    found = no_copies(task.layout.world_size, len(task.tensor))
    for operand in calls.operands:
        found[calls.rank[operand.owner], operand.block] = True
    return found


def made_by(calls: Calls, task: AttentionTask) -> BoolArray:
    """The blocks of keys and queries for which each rank computes something: bool array (world_size, blocks)."""
    found = no_copies(task.layout.world_size, len(task.tensor) + 1)
    for _, batch in calls.batches():
        effects = task.effects(batch)
        found[batch.rank[effects.call], effects.block] = True
    made: BoolArray = found[:, task.output_of]  # the last column, of no block, is False
    return made


def given_back(steps: Sequence[Step], task: AttentionTask, first_lane: int = 0) -> list[Step]:
    """What is computed for the blocks of these steps, given the other way in reverse order.

    Lanes are those of the way out, numbered from `first_lane` on: a lane of a rank has one destination.
    """
    found = []
    for step in reversed(steps):
        gives = np.ones(len(step), dtype=np.bool_)
        found.append(Step(step.destination, step.source, step.lane + first_lane, task.output_of[step.block], gives))
    return found


def bytes_of(steps: Sequence[Step], task: AttentionTask) -> int:
    """The bytes that all ranks send."""
    return sum(int(task.block_bytes[step.block].sum()) for step in steps)
