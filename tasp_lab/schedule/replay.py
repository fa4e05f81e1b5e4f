"""Replay of a schedule: tracks which rank holds which block and raises at the first broken rule."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.coverage import Coverage, Leaving
from tasp_lab.schedule.reduction import Parts, Reduction
from tasp_lab.schedule.step import Step
from tasp_lab.workload.attention_task import AttentionTask
from tasp_lab.workload.kernel_calls import Call

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule


MAX_HOLDINGS = 2**30
"""Maximum ranks x blocks of a replay, which needs three bytes per pair, about twenty with kernel calls."""


class _Data(NamedTuple):
    """The transfers of a step that copy blocks; gradient transfers, which accumulate, are excluded."""

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray

    @classmethod
    def of(cls, step: Step, first_gradient: int) -> _Data:
        whole = cls(step.source, step.destination, step.lane, step.block)
        copies = step.block < first_gradient
        return whole if copies.all() else cls(*(values[copies] for values in whole))

    @property
    def size(self) -> int:
        return len(self.block)


class Replay:
    """Replays a schedule symbolically, step by step; `held` is a bool array (world_size, blocks)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.blocks = len(schedule.block_bytes)
        shape = (schedule.world_size, self.blocks)
        if schedule.initial.shape != shape or schedule.final.shape != shape:
            raise ScheduleError(f"schedule {schedule.name!r}: initial and final must have the shape {shape}")
        if self.blocks and schedule.block_bytes.min() < 1:
            block = int(schedule.block_bytes.argmin())
            raise ScheduleError(f"schedule {schedule.name!r}: block {block} has no bytes")
        if schedule.buffers is not None and schedule.buffers < 2:
            raise ScheduleError(f"schedule {schedule.name!r}: {schedule.buffers} buffers, expected 2 or more")
        task = schedule.task
        if schedule.buffers is None and task is not None and task.is_backward:
            raise ScheduleError(f"schedule {schedule.name!r}: a backward pass without buffers, expected 2 or more")
        if task is not None and not np.array_equal(schedule.block_bytes, task.block_bytes):
            raise ScheduleError(f"schedule {schedule.name!r}: block_bytes are not those of its task")
        if task is not None:
            self._check_owned(task)
        if schedule.reduction is not None and (schedule.buffers is not None or task is not None):
            raise ScheduleError(f"schedule {schedule.name!r}: a reduction with buffers or a task, expected neither")
        if schedule.world_size * self.blocks > MAX_HOLDINGS:
            raise ScheduleError(
                f"schedule {schedule.name!r}: {schedule.world_size} ranks and {self.blocks} blocks are too many to "
                f"replay, expected at most {MAX_HOLDINGS} pairs of them"
            )
        self.held = schedule.initial.copy()
        self._in_buffers: deque[_Data] = deque()
        self._coverage = Coverage(task) if task is not None else None
        self._first_gradient = self.blocks if task is None else task.first_gradient

    def _check_owned(self, task: AttentionTask) -> None:
        """Check `initial` against ownership; a backward pass may also start with copies left by the forward pass."""
        schedule, owned = self.schedule, task.owned
        copied, missing = schedule.initial & ~owned, owned & ~schedule.initial
        allowed = task.circulating if task.is_backward else task.circulating[:0]
        if missing.any() or np.delete(copied, allowed, axis=1).any():
            raise ScheduleError(f"schedule {schedule.name!r}: initial differs from the ownership of its task")

    def run(self) -> int:
        """Replay every step; returns the number of transfers."""
        if self.schedule.reduction is not None:
            return self._reduce(self.schedule.reduction)
        count = 0
        holdings = int(self.held.sum())
        for index, step in enumerate(self.schedule.steps):
            if len(self._in_buffers) == self.schedule.buffers:
                holdings -= self._empty_oldest_buffer()
            self._check_range(index, step)
            data = _Data.of(step, self._first_gradient)
            self._check_held_by_source(index, data)
            leaving = self._leaving(index, step)
            self._check_calls(index, step)
            self._deliver(index, data)
            if self._coverage is not None and leaving is not None:
                self._coverage.move(leaving)
            count += len(step)
            holdings += data.size
            if self.schedule.buffers is not None:
                self._in_buffers.append(data)
                self._count(holdings)
        self._count(holdings)
        while self._in_buffers:
            self._empty_oldest_buffer()
        self._check_final()
        if self._coverage is not None:
            self._coverage.finish()
        return count

    def _reduce(self, reduction: Reduction) -> int:
        """Replay every step of a reduction; returns the number of transfers."""
        parts, count = Parts(reduction, self.schedule.initial), 0
        for index, step in enumerate(self.schedule.steps):
            self._check_range(index, step)
            self._check_calls(index, step)
            parts.move(index, step)
            count += len(step)
        parts.finish(self.schedule.final)
        return count

    def _leaving(self, index: int, step: Step) -> Leaving | None:
        """The gradient parts that a step sends: those present when it begins; None without gradients."""
        if self._coverage is None or self._first_gradient == self.blocks:
            return None
        gradients = step.block >= self._first_gradient
        return self._coverage.leaving(index, step.source[gradients], step.destination[gradients], step.block[gradients])

    def _empty_oldest_buffer(self) -> int:
        """Drop the arrivals of the oldest buffer, which is overwritten; returns their number."""
        step = self._in_buffers.popleft()
        self.held[step.destination, step.block] = False
        return step.size

    def _count(self, holdings: int) -> None:
        """Check that `holdings` blocks are held in all; a block delivered twice in one step counts once."""
        if int(self.held.sum()) != holdings:
            self._name_doubled_within_step()

    def _check_calls(self, index: int, step: Step) -> None:
        for call in step.calls:
            blocks = np.concatenate([call.queries, call.keys])
            if self._coverage is None:
                raise ScheduleError(f"step {index}: rank {call.rank} computes, but there is no task to compute")
            if not 0 <= call.rank < self.schedule.world_size or not self._are_blocks(call):
                raise ScheduleError(f"step {index}: rank {call.rank} computes with blocks {blocks.tolist()}, expected "
                                    "queries and keys of the task, one or more of each")  # fmt: skip
            missing = ~self.held[call.rank, blocks]
            if missing.any():
                raise ScheduleError(
                    f"step {index}: rank {call.rank} computes with block {blocks[missing.argmax()]}, "
                    "which it does not hold when the step begins"
                )
            self._coverage.add(index, call)

    def _are_blocks(self, call: Call) -> bool:
        """Whether the call has query blocks and key blocks of the task."""
        assert self.schedule.task is not None
        first_query = self.schedule.task.first_query
        return (
            len(call.queries) > 0
            and len(call.keys) > 0
            and bool(((call.queries >= first_query) & (call.queries < self._first_gradient)).all())
            and bool(((call.keys >= 0) & (call.keys < first_query)).all())
        )

    def _check_range(self, index: int, step: Step) -> None:
        n = self.schedule.world_size
        limits = ((step.source, n), (step.destination, n), (step.lane, self.schedule.lanes), (step.block, self.blocks))
        for values, limit in limits:
            if len(values) and (values.min() < 0 or values.max() >= limit):
                at = int(((values < 0) | (values >= limit)).argmax())
                raise ScheduleError(f"step {index}: {_name(step, at)}: there are {n} ranks, "
                                    f"{self.schedule.lanes} lanes and {self.blocks} blocks")  # fmt: skip
        to_itself = step.source == step.destination
        if to_itself.any():
            raise ScheduleError(f"step {index}: {_name(step, int(to_itself.argmax()))}: a rank sends to itself")

    def _check_held_by_source(self, index: int, step: _Data) -> None:
        missing = ~self.held[step.source, step.block]
        if missing.any():
            at = int(missing.argmax())
            raise ScheduleError(
                f"step {index}: {_name(step, at)}: "
                f"rank {step.source[at]} does not hold block {step.block[at]} when the step begins"
            )

    def _deliver(self, index: int, step: _Data) -> None:
        present = self.held[step.destination, step.block]
        if present.any():
            at = int(present.argmax())
            raise ScheduleError(
                f"step {index}: {_name(step, at)}: rank {step.destination[at]} already holds block {step.block[at]}"
            )
        self.held[step.destination, step.block] = True

    def _name_doubled_within_step(self) -> None:
        """Raise for the first block that two transfers of one step deliver to the same rank."""
        for index, step in enumerate(self.schedule.steps):
            key = step.destination * self.blocks + step.block
            order = np.argsort(key, kind="stable")
            doubled = np.flatnonzero(np.diff(key[order]) == 0)
            if len(doubled):
                at = int(order[doubled[0] + 1])
                raise ScheduleError(
                    f"step {index}: {_name(step, at)}: "
                    f"rank {step.destination[at]} receives block {step.block[at]} twice in this step"
                )

    def _check_final(self) -> None:
        wrong = np.argwhere(self.held != self.schedule.final)
        if len(wrong):
            rank, block = (int(value) for value in wrong[0])
            verb = "never received" if self.schedule.final[rank, block] else "should not have received"
            raise ScheduleError(f"after step {len(self.schedule.steps) - 1}: rank {rank} {verb} block {block}")


def _name(step: Step | _Data, at: int) -> str:
    return f"rank {step.source[at]} sends block {step.block[at]} to rank {step.destination[at]} on lane {step.lane[at]}"
