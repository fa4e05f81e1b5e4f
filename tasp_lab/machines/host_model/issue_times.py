"""When the host of each rank has issued each message and kernel call (`tasp_lab.machines.host_model.runtime`).

Hosts do not wait, so these times follow from the schedule alone: what a rank has issued before, in program order. A
message needs both its ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.units import Number
from tasp_lab.machines.host_model.runtime import Runtime
from tasp_lab.schedule.dependencies import CallTable
from tasp_lab.schedule.messages import MessageDependencies
from tasp_lab.schedule.schedule import Schedule


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


def issue_times(schedule: Schedule, derived: MessageDependencies, runtime: Runtime) -> IssueTimes | None:
    """When each message and call has been issued; None if nothing waits for the host.

    Collectives are single calls of a library, so only schedules with kernel calls wait.
    """
    if runtime.is_instant or schedule.task is None or not len(derived.calls.step):
        return None
    seconds = runtime.batch_s, runtime.of_call_s(schedule.task.passing)
    return _times(_issued(schedule, derived, runtime), derived.first_call, *seconds)


def _issued(schedule: Schedule, derived: MessageDependencies, runtime: Runtime) -> tuple[_Issued, _Issued, _Issued]:
    """What has been issued with each message at its source, at its destination, and with each call."""
    moved, calls = derived.messages, derived.calls
    kinds = 1 if runtime.batches == "step" else len(schedule.blocks.kinds)
    kind = schedule.blocks.kind[moved.blocks.first] if kinds > 1 else np.zeros_like(moved.step)
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
