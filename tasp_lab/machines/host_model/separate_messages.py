"""Messages of two tensors as two messages: runtimes that send keys and values, or their gradients, one by one.

A shard that goes as several messages, as gradients that become ready one after another do, is left so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.host_model.runtime import Runtime
from tasp_lab.schedule.blocks import Kind
from tasp_lab.schedule.calls import ranges
from tasp_lab.schedule.dependencies import LANE, SENT, Edges
from tasp_lab.schedule.messages import MessageDependencies, Messages
from tasp_lab.schedule.schedule import Schedule


def with_separate_messages(schedule: Schedule, derived: MessageDependencies, runtime: Runtime) -> MessageDependencies:
    """The dependencies with two messages of equal size for each one that carries two tensors of a shard.

    They follow one another, and whoever waits for one of them waits for both.
    """
    if schedule.task is None or schedule.task.passing not in runtime.separate:
        return derived
    count = np.ones(len(derived), dtype=np.int64)
    count[: derived.first_call] += _carry_two_tensors(schedule, derived.messages)
    if count.max(initial=1) == 1:
        return derived
    first = np.cumsum(count) - count
    of_messages = count[: derived.first_call]
    messages = derived.messages.select(np.repeat(np.arange(derived.first_call), of_messages))
    again = np.flatnonzero(np.diff(np.repeat(np.arange(len(count)), count), prepend=-1) == 0)
    return replace(
        derived,
        messages=messages._replace(bytes=messages.bytes // np.repeat(of_messages, of_messages)),
        edges=Edges.joined([_of_messages(derived.edges, first, count), Edges.of(again - 1, again, SENT, LANE)]),
    )


def _carry_two_tensors(schedule: Schedule, messages: Messages) -> IntArray:
    """Whether each message is of one kind of two tensors, and has at least as many blocks as a shard; 0 or 1."""
    blocks, kind = schedule.blocks, schedule.blocks.kind[messages.blocks.first]
    pairs = np.array([_is_pair(each) for each in blocks.kinds])
    of_shard = np.bincount(blocks.kind, minlength=len(blocks.kinds)) / schedule.world_size
    different = schedule.blocks.kind[messages.blocks.block] != np.repeat(kind, messages.blocks.sizes)
    mixed = np.bincount(messages.blocks.owner[different], minlength=len(kind)) > 0
    found: IntArray = (pairs[kind] & ~mixed & (messages.blocks.sizes >= of_shard[kind])).astype(np.int64)
    return found


def _is_pair(kind: Kind) -> bool:
    """Whether the blocks of a kind are two tensors of one shape."""
    return len(kind.fields) == 2 and len({(each.dtype, each.shape) for each in kind.fields}) == 1


def _of_messages(edges: Edges, first: IntArray, count: IntArray) -> Edges:
    """The edges between all messages; on a lane from the last one to the first."""
    is_lane = edges.cause == LANE
    starts = np.where(is_lane, first[edges.before] + count[edges.before] - 1, first[edges.before])
    edge, before = ranges(starts, first[edges.before] + count[edges.before])
    after = edges.after[edge]
    other, last = ranges(first[after], np.where(is_lane[edge], first[after] + 1, first[after] + count[after]))
    return Edges(before[other], last, edges.event[edge][other], edges.cause[edge][other])
