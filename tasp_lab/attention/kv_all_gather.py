"""Keys and values gathered at every rank, as Llama 3 (arXiv:2407.21783) and Transformer Engine (`all_gather`) do.

Keys and values move along the steps of any AllGather of `tasp_lab.collectives.registry`: each shard is cut in the
proportions of its blocks. Then each rank attends over all that it sees, with one call per span of its queries, so
nothing of the gathering is hidden behind kernels, and calls are as few and as large as they can be.

- ``kv-all-gather``: around one ring, in the direction that sends fewer bytes.
- ``multi-ring-kv-all-gather``: around all rings of a decomposition.
- ``direct-kv-all-gather``: each rank sends to all others at once.
- ``trees-kv-all-gather``: along a packing of trees.

Copies of keys are kept, so the backward pass starts with the keys where the forward pass left them. Every rank first
computes its parts of all gradients. Those of keys are then given along the same paths in reverse, which is a
ReduceScatter: a rank gives its sum after all to which it had forwarded the keys have given theirs.

**Trimming.** A block goes only to ranks whose mask needs it and to those on the way there. Shards are contiguous, under
a causal mask zigzag, which balances the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention.circulation import cut_by_rank
from tasp_lab.attention.forward import single_rings
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.attention.registry import attention_layout
from tasp_lab.attention.span_blocks import owner_schedule
from tasp_lab.attention.task import KEY_GRADIENTS, KEYS, QUERIES, AttentionTask
from tasp_lab.collectives.all_gather import ring_all_gather
from tasp_lab.collectives.registry import collective
from tasp_lab.decomposition.decompose import Decomposition
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.calls import BlockLists, Calls, ranges
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_calls import clip_band
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout


def kv_all_gather(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    decomposition: Decomposition | None = None,
) -> tuple[Schedule, ...]:
    """The passes of ``kv-all-gather`` or of one with an AllGather of another name before it.

    Raises `ScheduleError` if the AllGather, or backward its way back, has no links.
    """
    layout = attention_layout(name, workload, topology.world_size)
    largest = workload.kv_bytes_per_position * max(layout.length(rank) for rank in range(topology.world_size))
    gather = name.removesuffix("kv-all-gather").removesuffix("-")
    try:
        if gather:
            found = [collective(gather, topology, largest, decomposition)]
        else:
            found = [ring_all_gather(topology, largest, ring[None]) for ring in single_rings(topology)]
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None

    def one_pass(backward: bool) -> Schedule:
        sums = gather != "direct"  # others add up gradients on their way
        dtype = options.wire_dtype(workload.dtype, backward=True, sums=sums) if backward else None
        along = (GatheredKeys.along(each, workload, layout, dtype, options.trim) for each in found)
        return min(along, key=lambda keys: keys.bytes_sent).schedule(name, topology)

    return options.build(one_pass)


@dataclass(frozen=True)
class GatheredKeys:
    """Keys that are gathered, or in a backward pass have been.

    Parameters
    ----------
    task : the blocks, spans of keys cut for the AllGather.
    calls : the calls of all ranks.
    steps : how keys are sent to ranks that call with them.
    copies : bool array (world_size, blocks), the keys of other ranks that each rank has afterwards.
    lanes : the lanes of the AllGather.
    """

    task: AttentionTask
    calls: Calls
    steps: Sequence[Step]
    copies: BoolArray
    lanes: int

    @classmethod
    def along(
        cls, gather: Schedule, workload: Workload, layout: SequenceLayout, gradient_dtype: str | None, trim: bool
    ) -> GatheredKeys:
        """The keys along an AllGather; a pass is the backward one if it has a gradient dtype.

        Without `trim` all keys are sent to all ranks, but gradients only where there are some.
        """
        own = [np.flatnonzero(row) for row in gather.initial]
        sizes = [gather.block_bytes[blocks].tolist() for blocks in own]
        shares = [[Fraction(size, sum(each)) for size in each] for each in sizes]
        task, piece = cut_by_rank(workload, layout, shares, "keys", gradient_dtype)
        task = replace(task, home_dtype="fp32")
        keys = task.blocks_of(KEYS)
        first = np.cumsum([0, *map(len, own)])[:-1]
        number = np.concatenate(own)[first[task.owner[keys]] + piece]
        pieces = BlockLists.of_sizes(
            np.bincount(number, minlength=len(gather.blocks)), keys[np.argsort(number, kind="stable")]
        )
        calls, steps = _calls(task), [_of_keys(step, pieces) for step in gather.steps]
        trimmed, copies = _trimmed(steps, _called(task, calls))
        if not trim:
            copies = np.broadcast_to(task.tensor == KEYS, copies.shape)
        sent = trimmed if trim or task.is_backward else steps
        return cls(task, calls, sent, copies & ~task.owned(KEYS), gather.lanes)

    @property
    def bytes_sent(self) -> int:
        """The bytes of keys that all ranks send."""
        return sum(int(self.task.block_bytes[step.block].sum()) for step in self.steps)

    def schedule(self, name: str, topology: Topology) -> Schedule:
        """The pass of this task."""
        task, copies, attend = self.task, self.copies, Step.of((), [self.calls])
        back = [_given_back(step, task) for step in self.steps[::-1]]
        return owner_schedule(
            name,
            topology,
            task,
            [attend, *back] if task.is_backward else [*self.steps, attend],
            lanes=self.lanes,
            circulating=dict.fromkeys((KEYS, KEY_GRADIENTS) if task.is_backward else (KEYS,)),
            copies=copies if task.is_backward else None,
            kept=copies,
        )


def _calls(task: AttentionTask) -> Calls:
    """A call per block of queries, in the order of positions, to all keys that it sees."""
    queries, keys = task.blocks_of(QUERIES), task.by_document(_by_position(task, task.blocks_of(KEYS)))
    queries = queries[np.lexsort((task.start[queries], task.owner[queries]))]
    rows = []
    for query in queries.tolist():
        others = keys[task.document[query]]
        others = others[others >= 0]
        low, high = task.tile_bands(np.full_like(others, query), others)
        rows.append(others[low <= high])
    seen = BlockLists.of(rows)
    positions = np.add.reduceat(task.count[seen.block], seen.offset[:-1])
    counts = task.count[queries], positions
    bands = clip_band(*task.run_bands(task.start[queries], counts[0], task.start[seen.first], counts[1]), *counts)
    alone = BlockLists.of_sizes(np.ones_like(queries), queries)
    return Calls(task.kernel, task.owner[queries], (alone, seen), np.stack(bands, axis=1))


def _by_position(task: AttentionTask, blocks: IntArray) -> IntArray:
    ordered: IntArray = blocks[np.argsort(task.start[blocks], kind="stable")]
    return ordered


def _called(task: AttentionTask, calls: Calls) -> BoolArray:
    """The keys that each rank calls with: bool array (world_size, blocks)."""
    found = np.zeros((task.layout.world_size, len(task.tensor)), dtype=np.bool_)
    keys = calls.operands[1]
    found[calls.rank[keys.owner], keys.block] = True
    return found


def _of_keys(step: Step, pieces: BlockLists) -> Step:
    """A step of the AllGather with the blocks of keys instead of its own."""
    entry, position = ranges(pieces.offset[step.block], pieces.offset[step.block + 1])
    return Step(step.source[entry], step.destination[entry], step.lane[entry], pieces.block[position])


def _trimmed(steps: Sequence[Step], called: BoolArray) -> tuple[list[Step], BoolArray]:
    """The steps without transfers that no call needs, and the blocks that each rank calls with or sends on."""
    needed, found = called.copy(), []
    for step in reversed(steps):
        used = needed[step.destination, step.block]
        source, destination, lane, block = (
            each[used] for each in (step.source, step.destination, step.lane, step.block)
        )
        needed[source, block] = True
        if len(block):
            found.append(Step(source, destination, lane, block))
    return found[::-1], needed


def _given_back(step: Step, task: AttentionTask) -> Step:
    """The gradients of the keys of a step, given the other way."""
    gives = np.ones(len(step), dtype=np.bool_)
    return Step(step.destination, step.source, step.lane, task.output_of[step.block], gives)
