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

from dataclasses import replace
from fractions import Fraction

import numpy as np

from tasp_lab.core.errors import ScheduleError
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import cut_spans
from tasp_lab.schedules.attention.gathering import all_gathers, gathered_pass, shares_along, steps_along
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import clip_band
from tasp_lab.workload.layer import Workload


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
        whole = [[Fraction(1)]] * layout.world_size
        cut = cut_spans(workload, layout, shares_along(found[0]), whole, dtype)
        task = replace(cut.task, home_dtype="fp32")
        ways = {KEYS: [steps_along(each, task, task.blocks_of(KEYS), cut.keys.ring) for each in found]}
        pools = dict.fromkeys((KEYS, KEY_GRADIENTS) if backward else (KEYS,))
        return gathered_pass(
            name, topology, task, _calls(task), ways, lanes=found[0].lanes, circulating=pools, trim=options.trim
        )

    return options.build(one_pass)


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
