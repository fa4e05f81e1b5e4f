"""DeepSpeed-Ulysses (arXiv:2309.14509): ranks exchange positions for heads, attend, and exchange them back.

Each rank has a contiguous shard of every document and, between the exchanges, a group of heads
(`tasp_lab.schedules.attention.heads`). Step 0 is an all-to-all: group g of queries and keys goes to rank g. At step 1
each rank attends over all positions, with one call per piece of its group. Step 2 is the all-to-all back, of results or
of gradients. A KV head that several ranks use is copied to each of them, and its gradients from these ranks add up at
its owner, in float32.

Exchanged copies are kept. So the backward pass starts with all keys where the forward pass left them, but it sends the
queries again, as part of the inputs of the gradients.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.calls import BlockLists, Calls
from tasp_lab.schedule.composition.layers import in_chunks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.heads import check_heads, head_pieces, padded
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.attention.span_blocks import owner_schedule, span_task
from tasp_lab.schedules.attention.task import KEYS, QUERIES, AttentionTask
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import clip_band
from tasp_lab.workload.layer import Workload


@schedule(
    "ulysses",
    "softmax",
    follows="ranks",
    moves="all-to-alls of queries, keys and values, and of results; each rank attends with some of the heads",
    layout="contiguous",
    options=("gradient_dtype", "result_dtype", "padded_heads"),
)
def ulysses(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> tuple[Schedule, ...]:
    """The passes of ``ulysses``. Raises `ScheduleError` for fewer heads than ranks."""
    layer = _layer(name, topology, workload, options)
    return options.build(partial(_pass, name, topology, layer, options))


def _layer(name: str, topology: Topology, workload: Workload, options: AttentionOptions) -> Workload:
    """The layer with as many heads as are computed. Raises `ScheduleError` for fewer heads than ranks."""
    check_heads(name, workload, topology.world_size, topology.world_size)
    return padded(workload, topology.world_size) if options.padded_heads else workload


@schedule(
    "staged-ulysses",
    "softmax",
    follows="ranks",
    moves="the same for some heads after others: they come while ranks compute with those before",
    layout="contiguous",
    options=("gradient_dtype", "result_dtype", "stages", "padded_heads"),
)
def staged_ulysses(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The passes of ``staged-ulysses``: in `options.stages`, or as many as the heads of a rank can be cut into.

    Stages of the largest piece of heads have equally many, of others as equally many as possible.

    With the times K of all calls, C of the first all-to-all and D of the last one, Ulysses takes C + K + D. With s
    stages, whose calls are as fast, it is (C + D)/s + K where communication is hidden, so if K is the longest; where it
    is not, C + D + K/s. `tasp_lab.synthesis` found it on boards of GPUs without a switch of their own. Raises
    `ScheduleError` for fewer heads than ranks.
    """
    pieces = head_pieces(_layer(name, topology, workload, options), topology.world_size)
    largest = int(pieces.heads.argmax())
    heads, keys = int(pieces.heads[largest]), int(pieces.kv_heads[pieces.kv[largest]])
    most = min(options.stage_count, int(pieces.heads.min()))
    stages = max(each for each in range(1, most + 1) if heads % each == 0 and keys % each * (each % keys) == 0)
    return _in_stages(stages, name, topology, workload, replace(options, stages=DEFAULT_OPTIONS.stages))


@lru_cache(maxsize=1)  # options that allow more stages than there can be follow one another
def _in_stages(stages: int, *layer: Any) -> tuple[Schedule, ...]:
    return tuple(in_chunks(each, stages) for each in ulysses(*layer))


def _pass(name: str, topology: Topology, workload: Workload, options: AttentionOptions, backward: bool) -> Schedule:
    n, pieces = topology.world_size, head_pieces(workload, topology.world_size)
    dtype = options.wire_dtype(workload.dtype, backward=backward, sums=False)
    layout = attention_layout(name, workload, n)
    task = span_task(workload, layout, dtype, backward=backward, pieces=pieces)
    task = replace(task, home_dtype="fp32") if len(pieces.kv) > len(pieces.kv_heads) else task
    operands = _uses(task.blocks_of(QUERIES), np.arange(len(pieces.kv))), _uses(task.blocks_of(KEYS), pieces.kv)
    piece, block = np.concatenate(operands, axis=1)
    user = pieces.group[piece]
    owner, output, away = task.owner[block], task.output_of[block], user != task.owner[block]
    kept = no_copies(n, len(task.tensor))
    kept[user[away], block[away]] = True
    left = kept & (task.tensor == KEYS) if backward else None
    sent, back = away & ~(backward & (task.tensor[block] == KEYS)), away & (output >= 0)
    there = Step(owner[sent], user[sent], (user - owner - 1)[sent] % n, block[sent])
    gives = np.ones(np.count_nonzero(back), dtype=np.bool_)
    home = Step(user[back], owner[back], (owner - user - 1)[back] % n, output[back], gives)
    steps = there, Step.of((), [_calls(task, pieces.group, operands)]), home
    return owner_schedule(name, topology, task, steps, lanes=max(n - 1, 1), copies=left, kept=kept)


def _uses(blocks: IntArray, pieces: IntArray) -> IntArray:
    """The blocks of some pieces of heads, one after another: an int array (2, uses) of the index in `pieces`, and each.

    `blocks` are those of all pieces of a tensor.
    """
    uses = blocks.reshape(int(pieces.max()) + 1, -1)[pieces]
    return np.stack([np.repeat(np.arange(len(uses)), uses.shape[1]), uses.ravel()])


def _calls(task: AttentionTask, rank: IntArray, operands: tuple[IntArray, IntArray]) -> Calls:
    """One call per piece of query heads, at its rank; blocks in the order of places."""
    layer = task.workload
    lists = [
        BlockLists.of_sizes(np.bincount(piece), block[np.lexsort((task.start[block], piece))])
        for piece, block in operands
    ]
    keys = np.array([layer.sequence])
    counts = keys - layer.cached_keys, keys
    bands = clip_band(*task.run_bands(keys - counts[0], counts[0], np.zeros_like(keys), keys), *counts)
    return Calls(task.kernel, rank, tuple(lists), np.tile(np.stack(bands, axis=1), (len(rank), 1)))
