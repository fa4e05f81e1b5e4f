"""LASP-2 (arXiv:2502.07563): one AllGather of states, beside the attention within chunks.

Each rank makes the state of its chunk, which carries the chunk's total decay. The states move along the steps of any
AllGather of `tasp_lab.schedules.registry` while every rank attends within its chunk; then it folds the
states of the chunks before its own, with a full mask those of all others, and applies the sum to its queries. Backward
the same is done with the gradients of states of the chunks behind.

- ``lasp-2``: around one ring, in the direction that sends fewer bytes.
- ``multi-ring-lasp-2``: around all rings of a decomposition, each with some groups of KV heads.
- ``direct-lasp-2``: each rank sends to all others at once.
- ``trees-lasp-2``: along a packing of trees, each with some groups of KV heads.

**Trimming.** A state goes only to ranks that fold it and to those on the way there; as published, it goes to all ranks.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.calls import BlockLists
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.gathering import all_gathers, carried, shares_along, trimmed
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.linear.task import LinearTask, chunk_layout, layer_schedule
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


@schedule(
    "lasp-2",
    "linear",
    moves="the states of all chunks, around one ring, beside the attention within chunks",
    layout=chunk_layout,
    options=("trim",),
    moves_states=True,
)
@schedule(
    "multi-ring-lasp-2",
    "linear",
    moves="the same, around all rings",
    layout=chunk_layout,
    options=("trim",),
    moves_states=True,
    uses_rings=True,
)
@schedule(
    "direct-lasp-2",
    "linear",
    moves="the same, sent to all ranks at once",
    layout=chunk_layout,
    options=("trim",),
    moves_states=True,
)
@schedule(
    "trees-lasp-2",
    "linear",
    moves="the same, along a packing of trees",
    layout=chunk_layout,
    options=("trim",),
    moves_states=True,
)
def lasp2(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    decays: tuple[float, ...],
    *,
    decomposition: Decomposition | None = None,
) -> tuple[Schedule, ...]:
    """The passes of ``lasp-2`` or of one with an AllGather of another name before it.

    Raises `ScheduleError` if the AllGather has no links.
    """
    state_bytes = 4 * workload.batch * workload.kv_head_count * workload.head_dim * workload.value_size
    gather = name.removesuffix("lasp-2").removesuffix("-") or "ring"
    try:
        found = all_gathers(gather, topology, state_bytes, decomposition)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    layout = chunk_layout(workload, topology.world_size)

    def one_pass(backward: bool) -> Schedule:
        dtype = "fp32" if backward else None
        along = []
        for each in found:
            task = LinearTask(workload, layout, decays, dtype, _pieces(each, workload.kv_head_count))
            along.append(_along(name, topology, task, each, options.trim))
        return min(along, key=lambda schedule: int(schedule.bytes_by_rank().sum()))

    return options.build(one_pass)


def _along(name: str, topology: Topology, task: LinearTask, gather: Schedule, trim: bool) -> Schedule:
    """A pass along an AllGather, whose steps run beside the attention within chunks."""
    states, chunks = task.states, np.arange(len(task.owner))
    received, made = task.receivers, task.makers if trim else chunks
    if not len(received):
        return layer_schedule(name, topology, task, [Step.of((), [task.calls(states.within, chunks)])])
    needed = no_copies(topology.world_size, len(task.tensor))
    call, other = task.others(received, back=task.is_backward)
    needed[task.owner[received[call]][:, None], task.block(states.chunk, other[:, None], np.arange(task.pieces))] = True
    steps = [carried(each, _blocks_of(task, gather)) for each in gather.steps]
    needed_steps, copies = trimmed(steps, needed)
    if trim:
        steps = needed_steps
    else:
        copies = np.broadcast_to(task.tensor == states.chunk, copies.shape)
    beside = (task.calls(states.within, chunks),)
    first = steps[0]
    return layer_schedule(
        name,
        topology,
        task,
        [
            Step.of((), [task.calls(states.make, made)]),
            Step(first.source, first.destination, first.lane, first.block, calls=beside),
            *steps[1:],
            Step.of((), [task.calls(states.fold, received)]),
            Step.of((), [task.calls(states.apply, received)]),
        ],
        lanes=gather.lanes,
        kept=copies | task.owned(states.chunk),
    )


def _pieces(gather: Schedule, kv_heads: int) -> int:
    """The number of pieces of a state that come closest to the shares of the AllGather's blocks; the least of these."""
    shares = shares_along(gather)
    divisors = [each for each in range(1, kv_heads + 1) if kv_heads % each == 0]

    def excess(pieces: int) -> Fraction:
        """How much more than its share a block carries at worst."""
        return max(
            Fraction(count, pieces) / share
            for each in shares
            for share, count in zip(each, np.bincount(_block_of(each, pieces), minlength=len(each)), strict=True)
        )

    return min(divisors, key=excess)


def _block_of(shares: list[Fraction], pieces: int) -> IntArray:
    """For each of equal pieces, the number of the share that its middle lies in."""
    ends = np.cumsum(np.array(shares, dtype=object))
    middles = [Fraction(2 * piece + 1, 2 * pieces) for piece in range(pieces)]
    return np.array([int((ends <= each).sum()) for each in middles], dtype=np.int64)


def _blocks_of(task: LinearTask, gather: Schedule) -> BlockLists:
    """The states that each block of an AllGather stands for."""
    states, found = task.states, [np.zeros(0, dtype=np.int64)] * len(gather.blocks)
    shares = shares_along(gather)
    for chunk, rank in enumerate(task.owner.tolist()):
        own = np.flatnonzero(gather.initial[rank])
        place = _block_of(shares[rank], task.pieces)
        for number, block in enumerate(own.tolist()):
            pieces = np.flatnonzero(place == number)
            found[block] = task.block(states.chunk, np.full_like(pieces, chunk), pieces)
    return BlockLists.of(found)
