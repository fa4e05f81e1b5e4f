"""Ranks in a grid: queries gathered along its rows, keys along its columns, results reduced to their owners.

``grid:YxX`` has Y rows of X consecutive ranks, such as the GPUs of a node. Step 0 gathers: each rank receives the
queries of the other ranks of its row, and the keys and values of those of its column. So any queries and any keys meet
at one rank, that of the row of the former and the column of the latter. At step 1 each rank attends; at step 2 partial
results are given to their owners, which merge them. A rank sends X - 1 times its queries and results, and Y - 1 times
its keys and values: with as many rows as columns, bytes fall with the square root of the number of ranks. This is what
StarTrail (arXiv:2407.00611) does with as many teams as a team has ranks; its rings are then left without a hop.

All transfers of a step are direct, on a lane per distance within the row or the column and per way. A block goes only
to ranks whose mask needs it. Copies of keys are kept, so the backward pass starts with all keys where the forward pass
left them; it gathers the queries again, as part of the inputs of the gradients, and gives both gradients to their
owners.

``grid:YxX:GATHER`` gathers along an AllGather of `tasp_lab.schedules.registry`, ``ring``, ``multi-ring`` or
``trees``, on the links of a row and on those of a column, which must be the same in all rows and in all columns. What
is computed returns along the same paths in reverse and is added up on its way, in float32 unless asked for otherwise:
a ReduceScatter. As many blocks are sent as directly if all ranks need them; under a causal mask they pass ranks that do
not. Spans are cut for the AllGathers, but kernel calls are the same.

Shards are contiguous, under a causal mask zigzag: then any two shards make the same work, and so has every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import NoDecompositionError, ScheduleError, TopologyError
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.composition.groups import replicated
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import cut_spans
from tasp_lab.schedules.attention.gathering import all_gathers, gathered_pass, shares_along, steps_along
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.collectives.all_gather import direct_all_gather
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.derived import equal_parts
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


@schedule(
    "grid:YxX",
    "softmax",
    follows="ranks",
    moves="queries gathered along Y rows of X ranks, keys and values along columns; results back",
    options=("gradient_dtype", "result_dtype", "groups"),
    variants=("ring", "multi-ring", "trees"),
    members=1,
)
def grid(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    *,
    split: tuple[int, int],
    variant: str,
) -> tuple[Schedule, ...]:
    """The passes of ``grid:YxX``, `split` being Y and X; `variant` is the name of an AllGather, or empty for direct.

    Raises `ScheduleError` if the AllGather, or its way back, has no links, and if rows or columns have different links.
    """
    layout = attention_layout(name, workload, topology.world_size)
    ranks, longest = np.arange(topology.world_size).reshape(split), max(map(layout.length, range(topology.world_size)))
    try:
        keys = _gathers(topology, variant, ranks.T, longest * workload.kv_bytes_per_position)
        queries = _gathers(topology, variant, ranks, longest * workload.query_bytes_per_position)
    except (ScheduleError, TopologyError, NoDecompositionError) as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    return options.build(partial(_pass, name, topology, workload, options, split, variant, keys, queries))


def _gathers(topology: Topology, variant: str, groups: IntArray, shard_bytes: int) -> list[Schedule]:
    """AllGathers in all of these groups of ranks, an int array (groups, ranks), to choose from."""
    if variant:
        found = all_gathers(variant, equal_parts(topology, groups), shard_bytes)
    else:
        found = [direct_all_gather(full_mesh(groups.shape[1]), shard_bytes)]
    return [replicated(each, groups) for each in found]


def _pass(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    split: tuple[int, int],
    variant: str,
    of_keys: Sequence[Schedule],
    of_queries: Sequence[Schedule],
    backward: bool,
) -> Schedule:
    layout = attention_layout(name, workload, topology.world_size)
    dtype = options.wire_dtype(workload.dtype, backward=backward, sums=bool(variant))
    shares = shares_along(of_keys[0]), shares_along(of_queries[0])
    cut = cut_spans(workload, layout, *shares, dtype if backward else None)
    task = replace(cut.task, home_dtype="fp32", result_dtype="fp32" if backward else dtype)
    calls = _calls(span_task(workload, layout, dtype, backward=backward), task, split[1])
    lanes = _lanes(of_queries)
    there = lanes + _lanes(of_keys)
    ways = {
        QUERIES: [steps_along(each, task, task.blocks_of(QUERIES), cut.queries.ring) for each in of_queries],
        KEYS: [steps_along(each, task, task.blocks_of(KEYS), cut.keys.ring, lanes) for each in of_keys],
    }
    return gathered_pass(name, topology, task, calls, ways, lanes=max(2 * there, 1), home_lane=there)


def _lanes(gathers: Sequence[Schedule]) -> int:
    return gathers[0].lanes if len(gathers[0].steps) else 0


def _calls(spans: AttentionTask, task: AttentionTask, columns: int) -> Calls:
    """The calls of all ranks on whole spans, with the blocks of the task that they are cut into."""
    calls = _calls_on_spans(spans, columns)
    queries, keys = (
        _in_pieces(lists, spans, task, tensor) for lists, tensor in zip(calls.operands, (QUERIES, KEYS), strict=True)
    )
    return replace(calls, operands=(queries, keys))


def _in_pieces(lists: BlockLists, spans: AttentionTask, task: AttentionTask, tensor: int) -> BlockLists:
    """Lists of spans of a tensor as lists of the blocks that they are cut into; both are in the order of shards."""
    whole, cut = spans.blocks_of(tensor), task.blocks_of(tensor)
    end, piece_end = np.cumsum(spans.count[whole]), np.cumsum(task.count[cut])
    pieces = BlockLists.of_sizes(np.bincount(np.searchsorted(end, piece_end), minlength=len(whole)), cut)
    number = np.searchsorted(whole, lists.block)
    sizes = np.bincount(lists.owner, weights=pieces.sizes[number], minlength=len(lists)).astype(np.int64)
    return BlockLists.of_sizes(sizes, pieces.select(number).block)


def _calls_on_spans(task: AttentionTask, columns: int) -> Calls:
    """The calls of all ranks: one for queries in a row that all see the same keys fully, and one per other tile.

    Queries and keys are in the order of positions, so that blocks of a list lie side by side in the order of reading.
    """
    row, column = np.divmod(task.owner, columns)
    found = []
    for rank in range(task.layout.world_size):
        here = (task.tensor == QUERIES) & (row == rank // columns), (task.tensor == KEYS) & (column == rank % columns)
        queries, keys = (blocks[np.argsort(task.start[blocks])] for blocks in map(np.flatnonzero, here))
        if not len(queries) or not len(keys):
            continue
        low, high = task.tile_bands(queries[:, None], keys)
        seen = low <= high
        full = seen & (low == 1 - task.count[keys]) & (high == task.count[queries][:, None] - 1)
        calls = [
            (query, int(key), [[queries[query]], [keys[key]]], (int(low[query, key]), int(high[query, key])))
            for query, key in np.argwhere(seen & ~full).tolist()
        ]
        for first, end in _runs(full):
            others = keys[full[first]]
            if len(others):
                band = 1 - int(task.count[others].sum()), int(task.count[queries[first:end]].sum()) - 1
                calls.append((first, int(full[first].argmax()), [queries[first:end].tolist(), others.tolist()], band))
        found += [(rank, operands, band) for _, _, operands, band in sorted(calls, key=lambda call: call[:2])]
    return Calls.of(task.kernel, found)


def _runs(rows: BoolArray) -> list[tuple[int, int]]:
    """The first row and the end of each run of equal rows."""
    changes = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
    ends = [0, *changes.tolist(), len(rows)]
    return list(pairwise(ends))
