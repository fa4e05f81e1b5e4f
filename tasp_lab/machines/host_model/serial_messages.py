"""Messages that wait for kernel calls: those of a runtime without priority of messages over kernels.

Where a rank sends on a block that it also computes with, both are ready at once. The kernel goes first, at either end:
GPUs hand out the thread blocks of the older kernel first, and the message gets multiprocessors once none of them waits.
That is at once if all fit, and most of the time of a call of many waves.

Gradients of keys that leave while the next call begins are ready with it, too. A backward call begins with a short
kernel (row sums of dO * O), behind which the first message gets in; a second one finds the main kernel before it.

Most libraries wait for all messages of a step at once, their own sends among them, so calls wait for sends, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.machines.host_model.runtime import Runtime
from tasp_lab.machines.host_model.separate_messages import with_separate_messages
from tasp_lab.schedule.calls import ranges
from tasp_lab.schedule.dependencies import BLOCK, HANDED_OUT, SENT, Edges
from tasp_lab.schedule.messages import MessageDependencies, Messages, message_dependencies
from tasp_lab.schedule.schedule import Schedule


def messages_under(schedule: Schedule, runtime: Runtime) -> MessageDependencies:
    """The messages of a schedule, and what messages and calls wait for, under a runtime.

    A runtime that posts a batch for each kind of block has no message of two kinds.
    """
    derived = message_dependencies(schedule, kinds_apart=runtime.batches == "kind")
    derived = with_separate_messages(schedule, derived, runtime)
    if not len(derived.calls.step):
        return derived
    edges = [derived.edges]
    if not runtime.overlaps:
        edges += _after_calls(schedule, derived)
    if runtime.waits_for_sends:
        edges.append(_after_sends(schedule, derived))
    return replace(derived, edges=Edges.joined(edges))


def _after_calls(schedule: Schedule, derived: MessageDependencies) -> list[Edges]:
    """Messages wait for calls at both ends: keys for those of their step, the second half of sums for the next ones."""
    moved = derived.messages
    waits = [(np.flatnonzero(_reads_beside(schedule, derived)), 0), (np.flatnonzero(_second_sums(schedule, moved)), 1)]
    edges = []
    for which, later in waits:
        for end in (moved.source, moved.destination):
            transfer, call = _calls_of(schedule, derived, end[which], moved.step[which] + later)
            edges.append(Edges.of(call, which[transfer], HANDED_OUT, BLOCK))
    return edges


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
