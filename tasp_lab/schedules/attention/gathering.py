"""Blocks gathered along an AllGather, and what is computed with them reduced to their owners on its way back.

    task = cut_spans(workload, layout, shares_along(gather), whole).task
    ways = {KEYS: [steps_along(gather, task, task.blocks_of(KEYS), ring)]}
    schedule = gathered_pass("kv-all-gather", topology, task, calls, ways, lanes=gather.lanes)

The shard of each rank is cut in the proportions of its blocks in the AllGather. A block goes only to ranks that use it
and to those on the way there. What ranks compute for a block, parts of a sum, is given along the same paths in reverse,
which is a ReduceScatter: a rank gives its sum after all to which it had forwarded the block have given theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from operator import itemgetter

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.calls import BlockLists, Calls, ranges
from tasp_lab.schedule.composition.sequence import NO_STEP, joined
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import single_rings
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
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


def gathered_pass(
    name: str,
    topology: Topology,
    task: AttentionTask,
    calls: Calls,
    ways: Mapping[int, Sequence[Sequence[Step]]],
    *,
    lanes: int,
    home_lane: int = 0,
    circulating: Mapping[int, Pool | None] | None = None,
    trim: bool = True,
) -> Schedule:
    """The pass in which blocks are gathered, all calls are made at one step, and what they yield returns.

    Copies of keys are kept, so a backward pass starts with all keys where the forward pass has left them.

    Parameters
    ----------
    calls : those of all ranks.
    ways : by tensor, keys or queries, the steps of AllGathers to choose from; that which sends the fewest bytes is.
    lanes, home_lane : all lanes, and by how much the lane of what returns is above that of its block.
    circulating : see `tasp_lab.schedules.attention.span_blocks.owner_schedule`.
    trim : whether blocks go only where they are used; what returns does anyway.
    """
    used, made = _read_by(calls, task), _made_by(calls, task)
    there, home, kept = list[Sequence[Step]](), list[Sequence[Step]](), no_copies(*used.shape)
    for tensor, gathers in ways.items():
        is_sent, found = tensor == QUERIES or not task.is_backward, []
        for steps in gathers:
            (needed, copies), (used_for, _) = trimmed(steps, used), trimmed(steps, made)
            if not trim:
                needed, copies = [*steps], np.broadcast_to(task.tensor == tensor, used.shape)
            # Packed documents: keys between others are read, but may meet no query of a call, so have no gradient.
            sent_bytes = _bytes_of(used_for if task.is_backward else needed, task)
            found.append((sent_bytes, needed if is_sent else [], _given_back(used_for, task, home_lane), copies))
        _, outward, back, copies = min(found, key=itemgetter(0))
        there.append(outward)
        home.append(back)
        kept |= copies
    kept &= ~task.owned(KEYS, QUERIES)
    return owner_schedule(
        name,
        topology,
        task,
        [*_at_once(there), Step.of((), [calls]), *_at_once(home)],
        lanes=lanes,
        circulating=circulating,
        copies=kept & (task.tensor == KEYS) if task.is_backward else None,
        kept=kept,
    )


def _at_once(sides: Sequence[Sequence[Step]]) -> list[Step]:
    return [joined(steps) for steps in zip_longest(*sides, fillvalue=NO_STEP)]


def _read_by(calls: Calls, task: AttentionTask) -> BoolArray:
    """The blocks that each rank calls with: bool array (world_size, blocks)."""
    found = no_copies(task.layout.world_size, len(task.tensor))
    for operand in calls.operands:
        found[calls.rank[operand.owner], operand.block] = True
    return found


def _made_by(calls: Calls, task: AttentionTask) -> BoolArray:
    """The blocks of keys and queries for which each rank computes something: bool array (world_size, blocks)."""
    found = no_copies(task.layout.world_size, len(task.tensor) + 1)
    for _, batch in calls.batches():
        effects = task.effects(batch)
        found[batch.rank[effects.call], effects.block] = True
    made: BoolArray = found[:, task.output_of]  # the last column, of no block, is False
    return made


def _given_back(steps: Sequence[Step], task: AttentionTask, home_lane: int) -> list[Step]:
    """What is computed for the blocks of these steps, given the other way in reverse order.

    Lanes are those of the way out, numbered from `home_lane` on: a lane of a rank has one destination.
    """
    found = []
    for step in reversed(steps):
        gives = np.ones(len(step), dtype=np.bool_)
        found.append(Step(step.destination, step.source, step.lane + home_lane, task.output_of[step.block], gives))
    return found


def _bytes_of(steps: Sequence[Step], task: AttentionTask) -> int:
    """The bytes that all ranks send."""
    return sum(int(task.block_bytes[step.block].sum()) for step in steps)
