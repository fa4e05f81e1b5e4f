"""Blocks of two tensors as two messages: runtimes that send keys and values, or their gradients, one by one.

Where a shard is several blocks, as the halves of a zigzag one, these are messages of their own already.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.runtimes.runtime import Runtime
from tasp_lab.schedule.blocks import Kind
from tasp_lab.schedule.calls import ranges
from tasp_lab.schedule.dependencies import LANE, SENT, Dependencies, Edges, Transfers
from tasp_lab.schedule.schedule import Schedule


def messages_of(schedule: Schedule, runtime: Runtime) -> IntArray:
    """How many messages of equal size each block is, an int array (blocks,)."""
    blocks = schedule.blocks
    separate = schedule.task is not None and schedule.task.passing in runtime.separate
    whole = np.bincount(blocks.kind, minlength=len(blocks.kinds)) <= schedule.world_size
    of_kind = [2 if separate and one and _is_pair(kind) else 1 for kind, one in zip(blocks.kinds, whole, strict=True)]
    found: IntArray = np.array(of_kind, dtype=np.int64)[blocks.kind]
    return found


def _is_pair(kind: Kind) -> bool:
    """Whether the blocks of a kind are two tensors of one shape."""
    return len(kind.fields) == 2 and len({(each.dtype, each.shape) for each in kind.fields}) == 1


def with_separate_messages(schedule: Schedule, derived: Dependencies, runtime: Runtime) -> Dependencies:
    """The dependencies with a transfer per message.

    Those of a block follow one another, and whoever waits for the block waits for all of them.
    """
    messages = messages_of(schedule, runtime)
    if not len(messages) or messages.max() == 1:
        return derived
    count = np.ones(len(derived), dtype=np.int64)
    count[: derived.first_call] = messages[derived.transfers.block]
    first = np.cumsum(count) - count
    again = np.flatnonzero(np.diff(np.repeat(np.arange(len(count)), count), prepend=-1) == 0)
    return replace(
        derived,
        transfers=Transfers(*(np.repeat(column, count[: derived.first_call]) for column in derived.transfers)),
        parts=derived.parts._replace(operation=first[derived.parts.operation]),
        reads=derived.reads._replace(operation=first[derived.reads.operation]),
        edges=Edges.joined([_of_messages(derived.edges, first, count), Edges.of(again - 1, again, SENT, LANE)]),
    )


def _of_messages(edges: Edges, first: IntArray, count: IntArray) -> Edges:
    """The edges between all messages; on a lane from the last one to the first."""
    is_lane = edges.cause == LANE
    starts = np.where(is_lane, first[edges.before] + count[edges.before] - 1, first[edges.before])
    edge, before = ranges(starts, first[edges.before] + count[edges.before])
    after = edges.after[edge]
    other, last = ranges(first[after], np.where(is_lane[edge], first[after] + 1, first[after] + count[after]))
    return Edges(before[other], last, edges.event[edge][other], edges.cause[edge][other])
