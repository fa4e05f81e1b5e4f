"""What the host of each rank issues, and when; what each rank computes in all.

::

    derived = messages_under(schedule, machine)              # messages, calls and what they wait for
    issued = issue_times(schedule, derived, machine.host)    # when the hosts have issued them
    busy_s(schedule, machine.compute)                           # seconds of kernel calls of each rank

**Messages that wait for kernel calls.** Where a rank sends on a block that it also computes with, both are ready at
once. Without priority of messages over kernels (`Machine.overlaps` is false), the kernel goes first, at
either end: GPUs hand out the thread blocks of the older kernel first, and the message gets multiprocessors once none of
them waits. That is at once if all fit, and most of the time of a call of many waves. Gradients of keys that leave while
the next call begins are ready with it, too. A backward call begins with a short kernel (row sums of dO * O), behind
which the first message gets in; a second one finds the main kernel before it.

Most libraries wait for all messages of a step at once, their own sends among them, so calls wait for sends, too.

**Two tensors as two messages.** Some libraries send keys and values, or their gradients, one by one. A shard that goes
as several messages, as gradients that become ready one after another do, is left so.

**Issue times.** Hosts do not wait, so the times follow from the schedule alone: what a rank has issued before, in
program order. A message needs both its ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.units import Number
from tasp_lab.machines.host import HostModel
from tasp_lab.machines.machine import Compute, Machine
from tasp_lab.schedule.blocks import Kind
from tasp_lab.schedule.calls import ranges
from tasp_lab.schedule.dependencies import ARRIVED, BLOCK, HANDED_OUT, LANE, SENT, CallTable, Edges, shapes_by_rank
from tasp_lab.schedule.messages import MessageDependencies, Messages, message_dependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import AttentionTask


def busy_s(schedule: Schedule, compute: Compute, rank_speeds: Sequence[Number] = ()) -> list[Number]:
    """The sum of the times of the kernel calls of each rank; `rank_speeds` are those of `Machine`."""
    ranks = shapes_by_rank(schedule)
    different = {id(rank): rank for rank in ranks}
    times_s = {shape: compute.time_s(shape) for shape in dict.fromkeys(chain.from_iterable(different.values()))}
    of_rank: dict[int, Number] = {
        which: sum(count * times_s[shape] for shape, count in rank.items()) for which, rank in different.items()
    }
    sums_s = [of_rank[id(rank)] for rank in ranks]
    if not rank_speeds:
        return sums_s
    return [sum_s / speed for sum_s, speed in zip(sums_s, rank_speeds, strict=True)]


def messages_under(schedule: Schedule, machine: Machine) -> MessageDependencies:
    """The messages of a schedule, and what messages and calls wait for, on the hosts of a machine.

    A host model that posts a batch for each kind of block has no message of two kinds.
    """
    host = machine.host
    derived = message_dependencies(schedule, kinds_apart=host.batches == "kind")
    derived = with_separate_messages(schedule, derived, host)
    if not len(derived.calls.step):
        return derived
    edges = [derived.edges]
    if not machine.overlaps:
        edges += _after_calls(schedule, derived)
    if host.waits_for_sends:
        edges.append(_after_sends(schedule, derived))
    return replace(derived, edges=Edges.joined(edges))


def _after_calls(schedule: Schedule, derived: MessageDependencies) -> list[Edges]:
    """Messages wait for calls at both ends: keys for those of their step, the second half of sums for the next ones."""
    moved, second = derived.messages, _second_sums(schedule, derived.messages)
    waits = [(np.flatnonzero(_reads_beside(schedule, derived)), 0), (np.flatnonzero(second), 1)]
    follows = _follows_sums(schedule, derived, second)
    edges = []
    for which, later in waits:
        for end in (moved.source, moved.destination):
            transfer, call = _calls_of(schedule, derived, end[which], moved.step[which] + later)
            before = np.flatnonzero(~follows[call]) if later else slice(None)
            edges.append(Edges.of(call[before], which[transfer[before]], HANDED_OUT, BLOCK))
    return edges


def _follows_sums(schedule: Schedule, derived: MessageDependencies, second: BoolArray) -> BoolArray:
    """Whether each operation is a call that waits for sums of the step before, so that the sums have left by then.

    It waits for them to arrive, or for the memory of the `second` half of them, which otherwise wait for the call.
    """
    edges, steps = derived.edges, derived.messages.step
    latest = np.full(len(derived), -2)  # the last step of sums that each operation waits for
    for sums, events, last in (
        (_is_sum(schedule, derived.messages), edges.event == ARRIVED, derived.first_buffer),
        (second, edges.event == SENT, len(derived)),
    ):
        into = np.flatnonzero((edges.before < derived.first_call) & events & (edges.after < last))
        into = into[sums[edges.before[into]]]
        np.maximum.at(latest, edges.after[into], steps[edges.before[into]])
    freed = np.flatnonzero(edges.before >= derived.first_buffer)
    np.maximum.at(latest, edges.after[freed], latest[edges.before[freed]])
    found = np.zeros(len(derived), dtype=bool)
    calls = slice(derived.first_call, derived.first_buffer)
    found[calls] = latest[calls] == derived.calls.step - 1
    return found


def _after_sends(schedule: Schedule, derived: MessageDependencies) -> Edges:
    """The calls of a step wait until what their rank has sent at the step before has left, but for sums."""
    moved = derived.messages
    sent = np.flatnonzero(~_is_sum(schedule, moved))
    transfer, call = _calls_of(schedule, derived, moved.source[sent], moved.step[sent] + 1)
    return Edges.of(sent[transfer], call, SENT, BLOCK)


def _reads_beside(schedule: Schedule, derived: MessageDependencies) -> BoolArray:
    """Whether calls of its step and sender read a block of each message."""
    calls, moved = derived.calls, derived.messages
    steps, blocks, reader = len(schedule.steps), len(schedule.blocks), calls.reads.owner
    read = (calls.rank[reader] * steps + calls.step[reader]) * blocks + calls.reads.block
    owner = moved.blocks.owner
    sent = (moved.source[owner] * steps + moved.step[owner]) * blocks + moved.blocks.block
    found: BoolArray = np.bincount(owner[np.isin(sent, read)], minlength=len(moved.step)) > 0
    return found


def _second_sums(schedule: Schedule, moved: Messages) -> BoolArray:
    """Whether each message is in the second half of the sums that its rank sends on its lane at its step."""
    is_sum = _is_sum(schedule, moved)
    cell = (moved.step * schedule.world_size + moved.source) * schedule.lanes + moved.lane
    order = np.flatnonzero(is_sum)[np.argsort(cell[is_sum], kind="stable")]
    found = np.zeros(len(cell), dtype=bool)
    _, first, count = np.unique(cell[order], return_index=True, return_counts=True)
    found[order] = np.arange(len(order)) - np.repeat(first, count) >= np.repeat(-(-count // 2), count)
    return found


def _is_sum(schedule: Schedule, moved: Messages) -> BoolArray:
    """Whether each message has sums only."""
    is_sum = np.array([bool(kind.join) for kind in schedule.blocks.kinds], dtype=bool)
    data = moved.blocks.owner[~is_sum[schedule.blocks.kind[moved.blocks.block]]]
    found: BoolArray = np.bincount(data, minlength=len(moved.step)) == 0
    return found


def _calls_of(
    schedule: Schedule, derived: MessageDependencies, rank: IntArray, step: IntArray
) -> tuple[IntArray, IntArray]:
    """The calls of these ranks at these steps: for each the index in `rank`, and the operation."""
    calls, steps = derived.calls, len(schedule.steps)
    cell = calls.rank * steps + calls.step
    order = np.argsort(cell, kind="stable")
    wanted = np.where(step < steps, rank * steps + step, -1)
    first, last = (np.searchsorted(cell[order], wanted, side=side) for side in ("left", "right"))
    which, place = ranges(first, last)
    return which, order[place] + derived.first_call


def with_separate_messages(schedule: Schedule, derived: MessageDependencies, host: HostModel) -> MessageDependencies:
    """The dependencies with two messages of equal size for each one that carries two tensors of a shard.

    They follow one another, and whoever waits for one of them waits for both.
    """
    if schedule.task is None or schedule.task.passing not in host.separate:
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
    blocks, sorts = schedule.blocks, _sorts(schedule)
    sort = sorts[messages.blocks.first]
    pairs = np.array([_is_pair(each) for each in blocks.kinds])[blocks.kind[messages.blocks.first]]
    of_shard = np.bincount(sorts) / schedule.world_size
    different = sorts[messages.blocks.block] != np.repeat(sort, messages.blocks.sizes)
    mixed = np.bincount(messages.blocks.owner[different], minlength=len(sort)) > 0
    found: IntArray = (pairs & ~mixed & (messages.blocks.sizes >= of_shard[sort])).astype(np.int64)
    return found


def _sorts(schedule: Schedule) -> IntArray:
    """The kind of each block, one for blocks of a tensor with different numbers of heads: int array (blocks,)."""
    return schedule.task.tensor if isinstance(schedule.task, AttentionTask) else schedule.blocks.kind


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


class IssueTimes(NamedTuple):
    """The distinct times in seconds, ascending; for each message, then each call, the index of its own, int array."""

    times_s: Sequence[Number]
    number: IntArray

    def of(self, operation: int) -> Number:
        """The time of a message or call by its number."""
        return self.times_s[int(self.number[operation])]


class _Issued(NamedTuple):
    """How many batches and calls a rank has issued, int arrays (operations,)."""

    batches: IntArray
    calls: IntArray


def issue_times(schedule: Schedule, derived: MessageDependencies, host: HostModel) -> IssueTimes | None:
    """When each message and call has been issued; None if nothing waits for the host.

    Collectives are single calls of a library, so only schedules with kernel calls wait.
    """
    if host.is_instant or schedule.task is None or not len(derived.calls.step):
        return None
    seconds = host.batch_s, host.of_call_s(schedule.task.passing)
    return _times(_issued(schedule, derived, host), derived.first_call, *seconds)


def _issued(schedule: Schedule, derived: MessageDependencies, host: HostModel) -> tuple[_Issued, _Issued, _Issued]:
    """What has been issued with each message at its source, at its destination, and with each call."""
    moved, calls = derived.messages, derived.calls
    kind = np.zeros_like(moved.step) if host.batches == "step" else _sorts(schedule)[moved.blocks.first]
    kinds = int(kind.max(initial=0)) + 1
    posted = np.zeros((schedule.world_size, len(schedule.steps), kinds), dtype=np.int64)
    posted[moved.source, moved.step, kind] = posted[moved.destination, moved.step, kind] = 1
    batches = posted.reshape(len(posted), -1).cumsum(axis=1).reshape(posted.shape)
    made = np.zeros(posted.shape[:2], dtype=np.int64)
    np.add.at(made, (calls.rank, calls.step), 1)
    before = made.cumsum(axis=1) - made
    at_source, at_destination = (
        _Issued(batches[rank, moved.step, kind], before[rank, moved.step]) for rank in (moved.source, moved.destination)
    )
    own = _Issued(batches[calls.rank, calls.step, -1], before[calls.rank, calls.step] + 1 + _place(calls))
    return at_source, at_destination, own


def _place(calls: CallTable) -> IntArray:
    """How many calls of its rank and step precede each."""
    cell = calls.rank * (int(calls.step.max()) + 1) + calls.step
    order = np.argsort(cell, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.searchsorted(cell[order], cell[order])
    return place


def _times(issued: tuple[_Issued, _Issued, _Issued], messages: int, batch_s: Number, call_s: Number) -> IssueTimes:
    """The times; of a message the later one of its ends."""
    batches, calls = (np.concatenate(column) for column in zip(*issued, strict=True))
    width = int(calls.max()) + 1
    pairs, pair = np.unique(batches * width + calls, return_inverse=True)
    seconds = [each // width * batch_s + each % width * call_s for each in pairs.tolist()]
    times_s = sorted(set(seconds))
    place = {each: number for number, each in enumerate(times_s)}
    number = np.array([place[each] for each in seconds], dtype=np.int64)[pair]
    latest = np.maximum(number[:messages], number[messages : 2 * messages])
    return IssueTimes(times_s, np.concatenate([latest, number[2 * messages :]]))
