"""Keys straight from their owner to the ranks whose mask needs them, in stages, as MagiAttention's group-cast does.

A rank first attends to the keys that it has. Meanwhile those that it needs of others arrive, from all at once, in
stages; as soon as a stage is there, it attends to it. Each key makes one transfer per rank that needs it, and no rank
receives a key that its mask does not need. With a full mask a rank sends n - 1 times its keys and values, as around a
ring.

**Cuts.** What a rank needs of a span of keys is a run of places for each span of its queries. The ends of these runs
cut the span. Without a window they are those of the span: a query sees all keys before it.

Backward, keys come again in the same stages. A step after a rank has differentiated with a stage, its part of the
gradients of these keys goes straight to their owners (group-reduce), which add it in float32. It is sent once, so by
default in the dtype of the layer.

**Stages.** Every stage has an equal part of the keys of every rank, so each loads the links as all of them together do,
on a mesh as behind a switch. Stages of some peers each would leave the links of a mesh to other peers idle. With s
stages, K the time of all calls and C that of all transfers, a pass takes about the longer of K + max(0, C/s - K/n) and
C + K/s (n - 1)/n: the first stage is hidden behind the calls at home, and the calls of the last stage come after the
last transfer. So few stages leave something exposed; many are small messages and calls.

**Memory.** Keys and gradients each have a pool of buffers, and a stage that has been used makes room for a later one.
Backward, keys are sent again instead of kept, as published: kept ones would be the keys of all ranks, for each layer of
a model until its backward pass, as `direct-kv-all-gather` does. So the backward pass sends twice the bytes of the
forward pass, beside 2.5 times its FLOPs. With as many buffers as stages all copies stay until the end of a pass.

Transfers use a lane per distance, those of gradients others than those of keys. Shards are contiguous, under a causal
mask zigzag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.calls import ranges
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.circulation import Circulation
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.attention.travel import (
    NO_GIFTS,
    PeerLanes,
    Route,
    Travel,
    TravelSteps,
    straight_home,
    travel_schedule,
)
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout


class NeededRuns(NamedTuple):
    """Runs of keys that the same ranks need, each as long as it can be, in the order of blocks and positions.

    `block` is the block of keys that a run is part of, `first` and `length` say which positions, int arrays (runs,).
    `users` are the other ranks that need it, a bool array (runs, world_size).
    """

    block: IntArray
    first: IntArray
    length: IntArray
    users: BoolArray


def needed_runs(task: AttentionTask) -> NeededRuns:
    """The runs of all keys of a task."""
    keys, (block, user, first, end) = task.blocks_of(KEYS), _needs(task)
    points = np.stack([np.concatenate([keys, keys, block, block]),
                       np.concatenate([np.zeros_like(keys), task.count[keys], first, end])])  # fmt: skip
    of, point = np.unique(points, axis=1)
    within = np.flatnonzero(of[1:] == of[:-1])
    most = int(task.count.max(initial=0)) + 1
    run_start = of[within] * most + point[within]
    need, run = ranges(*(np.searchsorted(run_start, block * most + each) for each in (first, end)))
    users = np.zeros((len(within), task.layout.world_size), dtype=np.bool_)
    users[run, user[need]] = True
    same = (of[within[1:]] == of[within[:-1]]) & (users[1:] == users[:-1]).all(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], ~same])[: len(within)])
    length = np.diff(point)[within]
    length = np.add.reduceat(length, starts) if len(starts) else length
    return NeededRuns(of[within[starts]], point[within[starts]], length, users[starts])


def _needs(task: AttentionTask) -> IntArray:
    """What spans of queries need of blocks of keys elsewhere: block, rank of the queries, first position, and end.

    Int array (4, pairs of a block of keys and one of queries; with ranges of such a pair several).
    """
    if task.workload.ranges is not None and task.layout.stride == 1:
        return _needs_of_ranges(task)
    key, query = (each.ravel() for each in np.meshgrid(task.blocks_of(KEYS), task.blocks_of(QUERIES), indexing="ij"))
    low, high = task.tile_bands(query, key)
    seen = (low <= high) & (task.owner[query] != task.owner[key])
    key, query, low, high = (each[seen] for each in (key, query, low, high))
    first, end = np.maximum(-high, 0), np.minimum(task.count[query] - low, task.count[key])
    return np.stack([key, task.owner[query], first, end])


def _needs_of_ranges(task: AttentionTask) -> IntArray:
    """As `_needs`: adjacent queries see adjacent keys of a range."""
    (keys, key, key_count), (queries, query, query_count) = (
        (blocks[entry], position, count)
        for blocks in (task.blocks_of(KEYS), task.blocks_of(QUERIES))
        for entry, _, position, count in [task.pieces_of(task.start[blocks], task.count[blocks])]
    )
    before = np.cumsum(key_count) - key_count
    at = before - before[np.searchsorted(keys, keys)]  # of each piece: its first position within its block
    found = [np.zeros((4, 0), dtype=np.int64)]
    for first, end, first_key, end_key, low, high in task.workload.slices.tolist():
        begin, last = np.maximum(query, first)[:, None], np.minimum(query + query_count, end)[:, None] - 1
        seen, stop = np.maximum(begin - high, first_key), np.minimum(last - low + 1, end_key)
        seen, stop = np.maximum(seen, key), np.minimum(stop, key + key_count)
        of_query, piece = np.nonzero(
            (begin <= last) & (seen < stop) & (task.owner[queries][:, None] != task.owner[keys])
        )
        ends = (each[of_query, piece] - key[piece] + at[piece] for each in (seen, stop))
        found.append(np.stack([keys[piece], task.owner[queries[of_query]], *ends]))
    return np.concatenate(found, axis=1)


def in_stages(task: AttentionTask, stages: int) -> tuple[AttentionTask, IntArray]:
    """The task with its keys cut into blocks, and the stage of each of them, an int array (blocks of keys,).

    Of those keys of a rank that the same other ranks need, each stage has an equal part, a position more or less. What
    no other rank needs is of stage 0.
    """
    pieces = np.array(list(_pieces(task, stages)), dtype=np.int64).reshape(-1, 4)
    block, first, count, stage = pieces.T
    columns = []
    for tensor in dict.fromkeys(task.tensor.tolist()):
        blocks = task.blocks_of(tensor)
        column = np.stack([task.tensor[blocks], task.owner[blocks], task.start[blocks], task.count[blocks]])
        if tensor in (KEYS, KEY_GRADIENTS):
            start = task.start[block] + first * task.layout.stride
            column = np.stack([np.full_like(block, tensor), task.owner[block], start, count])
        columns.append(column)
    tensors, owner, start, count = np.concatenate(columns, axis=1)
    cut = replace(task, tensor=tensors, owner=owner, start=start, count=count, first_head=None, heads=None)
    return cut, stage


def _pieces(task: AttentionTask, stages: int) -> Iterator[tuple[int, int, int, int]]:
    """Block, first position, positions and stage of each piece of a block of keys."""
    runs = needed_runs(task)
    users = np.column_stack([task.owner[runs.block], runs.users])
    group = np.unique(users, axis=0, return_inverse=True)[1].ravel()
    sizes = np.bincount(group, weights=runs.length).astype(np.int64).tolist()
    passed = [0] * len(sizes)
    parts = np.where(runs.users.any(axis=1), stages, 1)
    columns = (each.tolist() for each in (runs.block, runs.first, runs.length, group, parts))
    for block, first, count, of, into in zip(*columns, strict=True):
        before = passed[of]
        passed[of] += count
        ends = (-(-sizes[of] * part // into) - before for part in range(into + 1))
        for stage, (start, end) in enumerate(pairwise(min(max(each, 0), count) for each in ends)):
            if start < end:
                yield block, first + start, end - start, stage


@schedule(
    "direct-attention",
    "softmax",
    follows="ranks",
    moves="keys and values straight to the ranks whose mask needs them, in stages (MagiAttention)",
    options=("buffers", "gradient_dtype", "stages"),
)
def direct_attention(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The passes of ``direct-attention``. Raises `ScheduleError` if a transfer has no link."""
    layout = attention_layout(name, workload, topology.world_size)
    return options.build(partial(direct_pass, name, topology, workload, layout, options))


def direct_pass(
    name: str,
    topology: Topology,
    workload: Workload,
    layout: SequenceLayout,
    options: AttentionOptions,
    backward: bool,
) -> Schedule:
    """One pass, for any layout of the sequence."""
    dtype = options.wire_dtype(workload.dtype, backward=backward, sums=False)
    spans = span_task(workload, layout, dtype if backward else "fp32", backward=backward)
    task, stage = in_stages(replace(spans, home_dtype="fp32"), options.stage_count)
    n = topology.world_size
    arrival = np.repeat(np.arange(options.stage_count), n).reshape(-1, n)
    route = Route(np.zeros_like(arrival), arrival, straight_home(arrival) if backward else NO_GIFTS)
    ahead = np.arange(n)
    lanes = PeerLanes.by_distance(max((n - 1) * (1 + backward), 1), ahead - 1, -ahead % n + n - 2)
    # Hops around the ring of ascending ranks are distances here.
    travel = Travel(Circulation(task, np.arange(n)[None], np.zeros_like(stage)), route, lanes, stage)
    pools: dict[int, Pool | None] = {KEYS: Pool("keys", options.buffers)}
    kept = None
    if options.stage_count <= options.buffers:
        pools[KEYS], kept = None, travel.places()
    if backward:
        pools[KEY_GRADIENTS] = Pool("key gradients", min(options.buffers, options.stage_count + 1))
    return travel_schedule(name, topology, TravelSteps(travel), pools, kept=kept)
