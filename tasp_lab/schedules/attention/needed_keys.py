"""Keys cut where the set of ranks whose mask needs them changes, so that no rank receives a key that it does not need.

What a rank needs of a span of keys is a run of positions for each span of its queries in the same document. The ends of
these runs cut the span. Without a window they are those of the span: a query sees all keys before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.calls import ranges
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, AttentionTask


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

    Int array (4, pairs of a block of keys and one of queries).
    """
    keys, queries = (task.by_document(task.blocks_of(each)) for each in (KEYS, QUERIES))
    document, at, other = np.nonzero((keys >= 0)[:, :, None] & (queries >= 0)[:, None])
    key, query = keys[document, at], queries[document, other]
    low, high = task.tile_bands(query, key)
    seen = (low <= high) & (task.owner[query] != task.owner[key])
    key, query, low, high = (each[seen] for each in (key, query, low, high))
    first, end = np.maximum(-high, 0), np.minimum(task.count[query] - low, task.count[key])
    return np.stack([key, task.owner[query], first, end])


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
