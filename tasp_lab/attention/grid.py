"""Ranks in a grid: queries gathered along its rows, keys along its columns, results reduced to their owners.

``grid:YxX`` has Y rows of X consecutive ranks, such as the GPUs of a node. Step 0 gathers: each rank receives the
queries of the other ranks of its row, and the keys and values of those of its column. So any queries and any keys meet
at one rank, that of the row of the former and the column of the latter. At step 1 each rank attends; at step 2 partial
results are given to their owners, which merge them. A rank sends X - 1 times its queries and results, and Y - 1 times
its keys and values: with as many rows as columns, bytes fall with the square root of the number of ranks. This is what
StarTrail (arXiv:2407.00611) does with as many teams as a team has ranks; its rings are then left without a hop.

All transfers of a step are direct, on a lane per distance within the row or the column. A block goes only to ranks
whose mask needs it. Copies of keys are kept, so the backward pass starts with all keys where the forward pass left
them; it gathers the queries again, as part of the inputs of the gradients, and gives both gradients to their owners.

Shards are contiguous, under a causal mask zigzag: then any two shards make the same work, and so has every rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.attention.registry import attention_layout
from tasp_lab.attention.span_blocks import owner_schedule, span_task
from tasp_lab.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


def grid(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    split: tuple[int, int],
) -> tuple[Schedule, ...]:
    """The passes of ``grid:YxX``, `split` being Y and X."""
    return options.build(partial(_pass, name, topology, workload, options, split))


def _pass(
    name: str,
    topology: Topology,
    workload: Workload,
    options: AttentionOptions,
    split: tuple[int, int],
    backward: bool,
) -> Schedule:
    rows, columns = split
    n = rows * columns
    dtype = options.wire_dtype(workload.dtype, backward=backward, sums=False)
    task = replace(
        span_task(workload, attention_layout(name, workload, n), dtype, backward=backward), home_dtype="fp32"
    )
    calls = _calls(task, columns)
    used = np.zeros((n, len(task.tensor)), dtype=np.bool_)
    for operand in calls.operands:
        used[calls.rank[operand.owner], operand.block] = True
    user, block = np.nonzero(used & ~task.owned(KEYS, QUERIES))
    owner, output = task.owner[block], task.output_of[block]
    sent, back = ~(backward & (task.tensor[block] == KEYS)), output >= 0
    there = _step(owner[sent], user[sent], block[sent], split, gives=False)
    home = _step(user[back], owner[back], output[back], split, gives=True)
    kept = np.zeros_like(used)
    kept[user, block] = True
    left = kept & (task.tensor == KEYS) if backward else None
    steps = there, Step.of((), [calls]), home
    return owner_schedule(name, topology, task, steps, lanes=max(rows + columns - 2, 1), copies=left, kept=kept)


def _step(source: IntArray, destination: IntArray, block: IntArray, split: tuple[int, int], gives: bool) -> Step:
    """Transfers within rows or columns: first the lanes of rows, one per distance, then those of columns."""
    rows, columns = split
    across = (destination - source) % columns
    down = (destination - source) // columns % rows
    lane = np.where(source // columns == destination // columns, across - 1, columns - 1 + down - 1)
    return Step(source, destination, lane, block, np.full(len(block), gives))


def _calls(task: AttentionTask, columns: int) -> Calls:
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
