"""The messages of a schedule: what both engines simulate and the executor posts. Derived from the schedule alone.

>>> from tasp_lab.schedules.build import attention_schedules
>>> from tasp_lab.topology.builders import full_mesh
>>> from tasp_lab.workload.layer import Workload
>>> layer = Workload(64, heads=1, head_dim=1, mask="full")
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, distinct, stable_order
from tasp_lab.schedule.calls import BlockLists
from tasp_lab.schedule.dependencies import (
    Accesses,
    Buffers,
    CallTable,
    Copies,
    Edges,
    Transfers,
    accesses,
    in_order,
    operations_of,
    steps_of,
)
from tasp_lab.schedule.schedule import Schedule, remembered


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


@remembered(most=256, transfers=1_000_000)  # of both passes of a family, whose groups have two orders
def message_dependencies(schedule: Schedule, kinds_apart: bool = False) -> MessageDependencies:
    """The messages of a schedule, its calls and buffers, and what waits for what.

    `kinds_apart`: as libraries other than ours send them, no message has blocks of two kinds.
    """
    if schedule.reordered is not None:
        of, order = schedule.reordered
        return _reordered(message_dependencies(of, kinds_apart=kinds_apart), order)
    transfers, calls = operations_of(schedule, schedule.steps)
    copies = Copies(schedule, transfers, calls)
    derived = Accesses(transfers, calls, copies.parts, copies.reads)
    group = schedule.blocks.kind if kinds_apart else np.zeros_like(schedule.blocks.kind)
    numbers = np.arange(len(transfers.step))
    message, order = _joined(schedule, range(schedule.world_size), derived, numbers, group)
    is_first = message == numbers
    number, size = (np.cumsum(is_first) - 1)[message], schedule.block_bytes
    blocks = BlockLists.of_sizes(np.bincount(number), transfers.block[order[stable_order(number[order])]])
    first = transfers.select(np.flatnonzero(is_first))
    size_bytes = np.add.reduceat(size[blocks.block], blocks.offset[:-1]) if len(numbers) else size[blocks.block]
    messages = Messages(first.step, first.source, first.destination, first.lane, size_bytes, blocks)
    others = len(messages.step) + np.arange(len(calls.step) + len(copies.buffers.step))
    on_lanes = in_order(np.arange(len(messages.step)), messages.source * schedule.lanes + messages.lane)
    edges = copies.edges_between(np.concatenate([number, others]), on_lanes)
    return MessageDependencies(messages, calls, copies.buffers, edges)


def _reordered(found: MessageDependencies, order: IntArray) -> MessageDependencies:
    """The messages, calls and buffers of a schedule whose ranks have other names: rank i is called ``order[i]``."""
    messages, calls, buffers = found.messages, found.calls, found.buffers
    source, destination = order[messages.source], order[messages.destination]
    return MessageDependencies(
        messages._replace(source=source, destination=destination), calls._replace(rank=order[calls.rank]),
        buffers._replace(rank=order[buffers.rank]), found.edges,
    )  # fmt: skip


def joint_messages(schedule: Schedule, rank: int, transfers: Transfers) -> IntArray:
    """The message of each transfer of a rank, the number of the first one in it; `transfers` are all of the rank.

    Int array (transfers of the rank,), in their order.
    """
    shared = np.flatnonzero(_repeated(_ends_and_lanes(schedule, transfers)))
    if not len(shared):
        return np.arange(len(transfers.step))
    ends = np.concatenate([transfers.source[shared], transfers.destination[shared]])
    ranks = distinct(np.append(ends, rank)).tolist()
    derived = accesses(schedule, ranks, steps_of(schedule, *ranks))
    of_rank = np.flatnonzero((derived.transfers.source == rank) | (derived.transfers.destination == rank))
    return _joined(schedule, ranks, derived, of_rank, np.zeros_like(schedule.blocks.kind))[0]


def _ends_and_lanes(schedule: Schedule, transfers: Transfers) -> IntArray:
    """A number for the step, the ends and the lane of each transfer."""
    ends = (transfers.step * schedule.world_size + transfers.source) * schedule.world_size + transfers.destination
    return ends * schedule.lanes + transfers.lane


def _repeated(*columns: IntArray) -> BoolArray:
    """Whether each row of some columns occurs more than once, or, very rarely, another one with the same hash."""
    row = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        row += column.astype(np.uint64)
        row *= np.uint64(0x9E3779B97F4A7C15)
        row ^= row >> np.uint64(29)
    order = np.argsort(row)
    again = np.flatnonzero(np.diff(row[order]) == 0)
    repeated = np.zeros(len(order), dtype=bool)
    repeated[order[again]] = repeated[order[again + 1]] = True
    return repeated


def _joined(
    schedule: Schedule, ranks: Sequence[int], derived: Accesses, of_rank: IntArray, group: IntArray
) -> tuple[IntArray, IntArray]:
    """The messages of the transfers `of_rank`, from the accesses of `ranks`, which include their ends.

    `group` is an int array (blocks,); the blocks of a message are of one group. Returns two int arrays: the first
    transfer in the message of each, as an index in `of_rank`, and all these indices in an order in which those of a
    message are as they lie in memory.
    """
    message, order = np.arange(len(of_rank)), np.arange(len(of_rank))
    transfers = derived.transfers.select(of_rank)
    cell = _ends_and_lanes(schedule, transfers)
    several = np.flatnonzero(_repeated(cell))
    if not len(several):
        return message, order
    # Memories are laid out only for what may go together: the keys of a ring and their gradients never do, for one.
    from tasp_lab.schedule.buffer_layout import OUTSIDE, Layouts, Readiness, gathered

    reads = derived.reads.select(np.searchsorted(derived.reads.operation, of_rank[several]))
    lies = np.flatnonzero(~gathered(schedule, reads))
    readiness = Readiness(schedule, derived)
    columns = (cell[several], group[transfers.block[several]], *readiness.after(reads))
    chosen = lies[_repeated(*(column[lies] for column in columns))]
    if not len(chosen):
        return message, order
    alike, candidates = [column[chosen] for column in columns], several[chosen]
    layouts = Layouts(schedule, ranks, derived, readiness)
    received = layouts.received[np.searchsorted(derived.parts.operation, of_rank[candidates])]
    sent = layouts.sent(reads.select(chosen))
    size = schedule.block_bytes[transfers.block[candidates]]
    # What one rank receives at one step lies at different places, so blocks side by side follow each other. Blocks of 8
    # bytes at 0, 8 and 24 on one lane, which lie at 40, 48 and 56 at their source, are two messages: the third one
    # would not lie behind the second.
    by_place = stable_order(alike[0], received)
    before, after = by_place[:-1], by_place[1:]
    joins = received[before] != OUTSIDE
    for offset in (received, sent):
        joins &= offset[after] == offset[before] + size[before]
    for column in alike:
        joins &= column[after] == column[before]
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    placed = candidates[by_place]
    message[placed] = np.repeat(np.minimum.reduceat(placed, starts), np.diff(np.append(starts, len(placed))))
    order[candidates] = placed
    return message, order
