"""The size of each rank's memory, for all ranks together and without their layouts (`buffer_layout`)."""

from __future__ import annotations

import numpy as np

from tasp_lab.core.arrays import IntArray, distinct
from tasp_lab.schedule.buffer_layout import outside, residents, sums, wide_at_home
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step

_EMPTY, _ALONE, _SEVERAL = range(3)
"""What a resident sum has: nothing, one arrival that lies in its place, or anything else."""


def memory_bytes(schedule: Schedule) -> IntArray:
    """The size of each rank's memory in bytes, as an int array (world_size,)."""
    sizes = _Sizes(schedule)
    for step in schedule.steps if sizes.depends_on_steps else ():
        sizes.add(step)
    return sizes.memory_bytes()


class _Sizes:
    """The parts of the memory of each rank, step by step; a copy is a number ``rank * blocks + block``."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._blocks = schedule, schedule.blocks
        self._ranks, self._count = schedule.world_size, len(schedule.blocks)
        self._is_sum = sums(self._blocks)
        self._wide = wide_at_home(self._blocks)
        self._staging = self._is_sum & (self._blocks.pool < 0)
        self._content = (schedule.initial * np.uint8(_SEVERAL)).ravel() if self._staging.any() else None
        self._largest = np.zeros((len(self._blocks.pools), self._ranks), dtype=np.int64)
        self._staged = np.zeros(self._ranks, dtype=np.int64)
        self._all_stay = schedule.task is None and not self._blocks.pools
        self._coming: list[IntArray] = []

    @property
    def depends_on_steps(self) -> bool:
        return not self._all_stay or bool(self._staging.any())

    def add(self, step: Step) -> None:
        """Add what comes to all ranks at a step."""
        arriving = step.destination * self._count + step.block
        added = self._added(step.calls)
        rank, block = self._places(arriving)
        away = ~self._schedule.is_resident(rank, block)
        in_buffer = away | (self._is_sum[block] & (self._blocks.pool[block] >= 0))
        self._fill(arriving[in_buffer], added)
        own = ~in_buffer & outside(self._schedule, rank, block)
        np.add.at(self._staged, rank[own], self._blocks.bytes[block[own]])
        if self._content is not None:
            given = step.gives & self._staging[step.block]
            gone = step.source[given] * self._count + step.block[given]
            self._content[gone] = _EMPTY
            self._stage(self._in_memory(arriving), self._in_memory(added), gone)
        if not self._all_stay:
            self._coming.append(distinct(np.concatenate([arriving[~in_buffer], added])))

    def _places(self, copies: IntArray) -> tuple[IntArray, IntArray]:
        rank, block = np.divmod(copies, max(self._count, 1))
        return rank, block

    def _in_memory(self, copies: IntArray) -> IntArray:
        """The sums without a pool among these copies, without tensors of the caller."""
        rank, block = self._places(copies)
        return copies[self._staging[block] & ~outside(self._schedule, rank, block)]

    def _added(self, calls: tuple[Calls, ...]) -> IntArray:
        """The copies that calls add to, each once."""
        found = [np.zeros(0, dtype=np.int64)]
        for each in calls:
            assert self._schedule.task is not None, "a schedule with calls has a task"
            for _, batch in each.batches():
                effects = self._schedule.task.effects(batch)
                found.append(distinct(batch.rank[effects.call] * self._count + effects.block))
        return distinct(np.concatenate(found))

    def _fill(self, arriving: IntArray, added: IntArray) -> None:
        """Account for the buffers of a step: arrivals, and copies to which only calls add."""
        rank, block = self._places(added)
        begun = added[~self._schedule.is_resident(rank, block) & ~np.isin(added, arriving)]
        rank, block = self._places(np.concatenate([arriving, begun]))
        landing = np.zeros_like(self._largest)
        np.add.at(landing, (self._blocks.pool[block], rank), self._blocks.bytes[block])
        np.maximum(self._largest, landing, out=self._largest)

    def _stage(self, arriving: IntArray, added: IntArray, gone: IntArray) -> None:
        """Account for arrivals at resident sums without a pool, some of which are added to or given at this step."""
        assert self._content is not None
        copies, arrivals = np.unique(arriving, return_counts=True)
        parts = arrivals + np.isin(copies, added)
        before = self._content[copies]
        alone = (before == _EMPTY) & (parts == 1) & ~np.isin(copies, gone) & ~self._wide[self._places(copies)[1]]
        staged = np.where(alone, 0, arrivals + (before == _ALONE))
        called = added[~np.isin(added, copies)]
        moved = called[self._content[called] == _ALONE]
        for each, count in ((copies, staged), (moved, np.ones_like(moved))):
            rank, block = self._places(each)
            np.add.at(self._staged, rank, count * self._blocks.bytes[block])
        self._content[copies] = np.where(alone, _ALONE, _SEVERAL)
        self._content[called] = _SEVERAL

    def memory_bytes(self) -> IntArray:
        """The sizes for all steps so far."""
        buffers = np.array([pool.buffers for pool in self._blocks.pools], dtype=np.int64)
        return self._resident_bytes() + self._staged + buffers @ self._largest

    def _resident_bytes(self) -> IntArray:
        coming = distinct(np.concatenate([np.zeros(0, dtype=np.int64), *self._coming]))
        ends = np.searchsorted(coming, np.arange(self._ranks + 1) * self._count)
        blocks = coming % max(self._count, 1)
        rows = (residents(self._schedule, rank, blocks[ends[rank] : ends[rank + 1]]) for rank in range(self._ranks))
        return np.array([self._blocks.home_bytes[row].sum() for row in rows], dtype=np.int64)
