"""Keys and values gathered at every rank, as Llama 3 (arXiv:2407.21783) and Transformer Engine (`all_gather`) do.

Keys and values move along the steps of any AllGather of `tasp_lab.schedules.registry`: each shard is cut in
the proportions of its blocks. Then each rank attends over all that it sees, with one call per span of its queries, so
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
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import cut_spans
from tasp_lab.schedules.attention.gathering import (
    all_gathers,
    bytes_of,
    given_back,
    made_by,
    read_by,
    shares_along,
    steps_along,
    trimmed,
)
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import owner_schedule
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import clip_band
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout


@schedule(
    "kv-all-gather",
    "softmax",
    follows="ranks",
    moves="keys and values gathered around one ring; then one kernel call per span of queries",
    options=("trim", "gradient_dtype"),
)
@schedule(
    "multi-ring-kv-all-gather",
    "softmax",
    follows="ranks",
    moves="the same, gathered around all rings",
    options=("trim", "gradient_dtype"),
    uses_rings=True,
)
@schedule(
    "direct-kv-all-gather",
    "softmax",
    follows="ranks",
    moves="the same, sent to all ranks at once",
    options=("trim", "gradient_dtype"),
)
@schedule(
    "trees-kv-all-gather", "softmax", moves="the same, along a packing of trees", options=("trim", "gradient_dtype")
)
def kv_all_gather(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    *,
    decomposition: Decomposition | None = None,
) -> tuple[Schedule, ...]:
    """The passes of ``kv-all-gather`` or of one with an AllGather of another name before it.

    Raises `ScheduleError` if the AllGather, or backward its way back, has no links.
    """
    layout = attention_layout(name, workload, topology.world_size)
    largest = workload.kv_bytes_per_position * max(layout.length(rank) for rank in range(topology.world_size))
    gather = name.removesuffix("kv-all-gather").removesuffix("-") or "ring"
    try:
        found = all_gathers(gather, topology, largest, decomposition)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None

    def one_pass(backward: bool) -> Schedule:
        sums = gather != "direct"  # others add up gradients on their way
        dtype = options.wire_dtype(workload.dtype, backward=True, sums=sums) if backward else None
        ways = [_gathered(each, workload, layout, dtype, options.trim) for each in found]
        task, calls, steps, copies = min(ways, key=lambda way: bytes_of(way.steps, way.task))
        attend = Step.of((), [calls])
        return owner_schedule(
            name,
            topology,
            task,
            [attend, *given_back(steps, task)] if backward else [*steps, attend],
            lanes=found[0].lanes,
            circulating=dict.fromkeys((KEYS, KEY_GRADIENTS) if backward else (KEYS,)),
            copies=copies if backward else None,
            kept=copies,
        )

    return options.build(one_pass)


class _Gathered(NamedTuple):
    """A pass with keys that are gathered, or backward have been: its task, all calls, and how keys are sent.

    `copies` are the keys of other ranks that each rank has afterwards, a bool array (world_size, blocks).
    """

    task: AttentionTask
    calls: Calls
    steps: Sequence[Step]
    copies: BoolArray


def _gathered(
    gather: Schedule, workload: Workload, layout: SequenceLayout, gradient_dtype: str | None, trim: bool
) -> _Gathered:
    """The keys along an AllGather; a pass is the backward one if it has a gradient dtype.

    Without `trim` all keys are sent to all ranks, but gradients only where there are some.
    """
    whole = [[Fraction(1)]] * layout.world_size
    cut = cut_spans(workload, layout, shares_along(gather), whole, gradient_dtype)
    task = replace(cut.task, home_dtype="fp32")
    calls, steps = _calls(task), steps_along(gather, task, task.blocks_of(KEYS), cut.keys.ring)
    used, copies = trimmed(steps, read_by(calls, task) & (task.tensor == KEYS))
    if not trim:
        copies = np.broadcast_to(task.tensor == KEYS, copies.shape)
    if task.is_backward:  # packed documents: keys between others may meet no query of a call
        used, _ = trimmed(steps, made_by(calls, task))
    return _Gathered(task, calls, used if trim or task.is_backward else steps, copies & ~task.owned(KEYS))


def _calls(task: AttentionTask) -> Calls:
    """A call per block of queries, in the order of positions, to all keys that it sees."""
    queries, keys = task.blocks_of(QUERIES), task.blocks_of(KEYS)
    queries = queries[np.lexsort((task.start[queries], task.owner[queries]))]
    keys = keys[np.argsort(task.start[keys], kind="stable")]
    rows = []
    for query in queries.tolist():
        low, high = task.tile_bands(np.full_like(keys, query), keys)
        visible = np.flatnonzero(low <= high)  # keys between them have other documents at most
        rows.append(keys[visible[0] : visible[-1] + 1])
    seen = BlockLists.of(rows)
    positions = np.add.reduceat(task.count[seen.block], seen.offset[:-1])
    counts = task.count[queries], positions
    bands = clip_band(*task.run_bands(task.start[queries], counts[0], task.start[seen.first], counts[1]), *counts)
    alone = BlockLists.of_sizes(np.ones_like(queries), queries)
    return Calls(task.kernel, task.owner[queries], (alone, seen), np.stack(bands, axis=1))
