"""The messages of a schedule: what both engines simulate and the executor posts. Derived from the schedule alone.

>>> from tasp_lab.attention.registry import attention_schedules
>>> from tasp_lab.topology.builders import full_mesh
>>> from tasp_lab.workload.layer import Workload
>>> layer = Workload(64, heads=1, head_dim=1)
>>> forward = attention_schedules("zigzag-ring-attention", full_mesh(4), layer)[0]
>>> forward.transfers, len(message_dependencies(forward).messages.step)  # the halves of a shard go together
(24, 12)

Transfers of one step from one rank to another on one lane are one message if their blocks lie side by side in the
memories of both ends, in the same order, and become ready together: what comes last to their copies at the source is
the same kernel call, or came from the same rank on the same lane, or nothing does. So none of them waits for a kernel
call or a rank for which it would not wait alone. What is gathered before it is sent is a message by itself.

A message waits for all that its transfers wait for, and whatever waits for one of them waits for the whole message.
Both ends belong to one step, and what a message waits for belongs to earlier steps of any rank, so a message of
several blocks cannot cause a deadlock. On a lane, messages follow one another in the order of their first transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray, distinct
from tasp_lab.schedule.buffer_layout import OUTSIDE, Layouts
from tasp_lab.schedule.calls import BlockLists
from tasp_lab.schedule.dependencies import (
    HANDED_OUT,
    HOST,
    LANE,
    Accesses,
    Buffers,
    CallTable,
    Dependencies,
    Edges,
    Transfers,
    Uses,
    accesses,
    dependencies,
    in_order,
    steps_of,
)
from tasp_lab.schedule.schedule import Schedule

_EVENTS, _CAUSES = HANDED_OUT + 1, HOST + 1


class Messages(NamedTuple):
    """All messages in the order of steps, arrays (messages,).

    `bytes` is the size of a message, `blocks` are its blocks in the order in which they lie in memory.
    """

    step: IntArray
    source: IntArray
    destination: IntArray
    lane: IntArray
    bytes: IntArray
    blocks: BlockLists

    def select(self, chosen: IntArray) -> Messages:
        """The messages with these numbers, in this order."""
        step, source, destination, lane, size_bytes = (column[chosen] for column in self[:5])
        return Messages(step, source, destination, lane, size_bytes, self.blocks.select(chosen))

    def rows(self) -> Iterator[tuple[int, int, int, int, int, list[int]]]:
        """The messages as rows of these columns."""
        columns = (self.step, self.source, self.destination, self.lane, self.bytes)
        return zip(*(column.tolist() for column in columns), self.blocks.lists(), strict=True)


@dataclass(frozen=True, eq=False)
class MessageDependencies:
    """The messages, kernel calls and buffers of a schedule, numbered in this order, and their edges.

    Calls, buffers and edges are those of `tasp_lab.schedule.dependencies`, with messages in place of transfers.
    """

    messages: Messages
    calls: CallTable
    buffers: Buffers
    edges: Edges

    @property
    def first_call(self) -> int:
        return len(self.messages.step)

    @property
    def first_buffer(self) -> int:
        return self.first_call + len(self.calls.step)

    def __len__(self) -> int:
        return self.first_buffer + len(self.buffers.step)


@lru_cache(maxsize=1)
def message_dependencies(schedule: Schedule, kinds_apart: bool = False) -> MessageDependencies:
    """The messages of a schedule, its calls and buffers, and what waits for what.

    `kinds_apart`: as libraries other than ours send them, no message has blocks of two kinds. Those of the last
    schedule are kept: predictions simulate it with and without compute.
    """
    derived = dependencies(schedule)
    transfers, size = derived.transfers, schedule.block_bytes
    shared = np.flatnonzero(_share(schedule, transfers))
    if not len(shared):
        blocks = BlockLists(np.arange(derived.first_call + 1), transfers.block)
        messages = _messages(transfers, size[transfers.block], blocks)
        return MessageDependencies(messages, derived.calls, derived.buffers, derived.edges)
    layouts = Layouts(schedule, range(schedule.world_size), derived)
    together = schedule.blocks.kind if kinds_apart else np.zeros_like(schedule.blocks.kind)
    message, place = np.arange(derived.first_call), np.zeros(derived.first_call, dtype=np.int64)
    first, place[shared] = _joined(schedule, derived, layouts, shared, together)
    message[shared] = shared[first]
    is_first = message == np.arange(len(message))
    firsts = np.flatnonzero(is_first)
    number = (np.cumsum(is_first) - 1)[message]
    blocks = BlockLists.of_sizes(np.bincount(number), transfers.block[np.lexsort((place, number))])
    size_bytes = np.add.reduceat(size[blocks.block], blocks.offset[:-1])
    messages = _messages(Transfers._make(column[firsts] for column in transfers), size_bytes, blocks)
    return MessageDependencies(messages, derived.calls, derived.buffers, _edges(schedule, derived, messages, number))


def _messages(first: Transfers, size_bytes: IntArray, blocks: BlockLists) -> Messages:
    """Messages with the steps, ends and lanes of their first transfers."""
    return Messages(first.step, first.source, first.destination, first.lane, size_bytes, blocks)


def _edges(schedule: Schedule, derived: Dependencies, messages: Messages, number: IntArray) -> Edges:
    """The edges with messages in place of transfers, each once; `number` is the message of each transfer."""
    count = len(messages.step)
    operations = np.concatenate([number, np.arange(count, count + len(derived) - derived.first_call)])
    old = derived.edges
    kept = np.flatnonzero((old.cause != LANE) | (old.before >= derived.first_call))
    edges = Edges(operations[old.before[kept]], operations[old.after[kept]], old.event[kept], old.cause[kept])
    pair = (edges.before * len(operations) + edges.after) * _EVENTS * _CAUSES
    pair, what = np.divmod(distinct(pair + edges.event * _CAUSES + edges.cause), _EVENTS * _CAUSES)
    once = Edges(*np.divmod(pair, len(operations)), *np.divmod(what, _CAUSES))
    on_lanes = in_order(np.arange(count), messages.source * schedule.lanes + messages.lane)
    return Edges.joined([on_lanes, once])


def joint_messages(schedule: Schedule, rank: int, transfers: Transfers) -> IntArray:
    """The message of each transfer of a rank, the number of the first one in it; `transfers` are all of the rank.

    Int array (transfers of the rank,), in their order.
    """
    shared = np.flatnonzero(_share(schedule, transfers))
    if not len(shared):
        return np.arange(len(transfers.step))
    ends = np.concatenate([transfers.source[shared], transfers.destination[shared]])
    ranks = [rank, *(each for each in distinct(ends).tolist() if each != rank)]
    steps = steps_of(schedule, *ranks)
    derived = accesses(schedule, ranks, steps)
    layouts = Layouts(schedule, ranks, derived)
    own = np.flatnonzero((derived.transfers.source == rank) | (derived.transfers.destination == rank))
    return _joined(schedule, derived, layouts, own, np.zeros_like(schedule.blocks.kind))[0]


def _share(schedule: Schedule, transfers: Transfers) -> BoolArray:
    """Whether each transfer has the step, ends and lane of another one."""
    ends = (transfers.step * schedule.world_size + transfers.source) * schedule.world_size + transfers.destination
    key = ends * schedule.lanes + transfers.lane
    order = np.argsort(key, kind="stable")
    again = np.diff(key[order]) == 0
    found = np.zeros(len(key), dtype=bool)
    found[order[:-1][again]] = found[order[1:][again]] = True
    return found


def _joined(
    schedule: Schedule, derived: Accesses, layouts: Layouts, own: IntArray, together: IntArray
) -> tuple[IntArray, IntArray]:
    """The messages of the transfers `own`, which have both ends at ranks of the layouts, and their order in memory.

    Only blocks of one group in `together`, int array (blocks,), share a message. Two int arrays of `own`: the
    first one in the message of each, as an index, and a place; by these, those of a message are as they lie in memory.
    """
    received, sent, ready = _ends(derived, layouts, own)
    transfers = Transfers._make(column[own] for column in derived.transfers)
    size = schedule.block_bytes[transfers.block]
    same = (transfers.step, transfers.source, transfers.destination, transfers.lane, together[transfers.block])
    order = np.lexsort((received, *same))
    before, after = order[:-1], order[1:]
    joins = (received[before] != OUTSIDE) & (sent[before] != OUTSIDE)
    for offset in (received, sent):
        joins &= offset[after] == offset[before] + size[before]
    for column in (*same, *ready):
        joins &= column[after] == column[before]
    starts = np.flatnonzero(np.concatenate([[True], ~joins])[: len(order)])
    sizes = np.diff(np.append(starts, len(order)))
    first = np.minimum.reduceat(order, starts) if len(order) else order
    found, place = np.empty_like(order), np.empty_like(order)
    found[order], place[order] = np.repeat(first, sizes), np.arange(len(order))
    return found, place


def _ends(
    derived: Accesses, layouts: Layouts, transfers: IntArray
) -> tuple[IntArray, IntArray, tuple[IntArray, IntArray, IntArray]]:
    """Where the data of transfers lie at their destinations and sources, and what comes last to them there."""
    number = np.full(len(derived.transfers.step) + len(derived.calls.step), OUTSIDE)
    number[transfers] = np.arange(len(transfers))
    arrives = np.flatnonzero(number[derived.parts.operation] >= 0)
    leaves = np.flatnonzero(number[derived.reads.operation] >= 0)
    reads = Uses(*(column[leaves] for column in derived.reads))

    def of_transfers(operations: IntArray, values: IntArray) -> IntArray:
        found = np.full(len(transfers), OUTSIDE)
        found[number[operations]] = values
        return found

    received = of_transfers(derived.parts.operation[arrives], layouts.received[arrives])
    sent = of_transfers(reads.operation, layouts.sent(reads))
    step, first, last = (of_transfers(reads.operation, column) for column in layouts.ready_after(reads))
    return received, sent, (step, first, last)
