"""Kernel calls of attention one by one, as tests read and change them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tasp_lab.schedule.blocks import Blocks, Pool
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask


class Call(NamedTuple):
    """A rank computes with blocks of queries and of keys: query i with key j if low <= i - j <= high."""

    rank: int
    queries: list[int]
    keys: list[int]
    low: int
    high: int


def calls_of(step: Step) -> list[Call]:
    """The calls of a step, in their order."""
    rows = [row for calls in step.calls for row in calls.rows()]
    return [Call(rank, queries, keys, low, high) for rank, (queries, keys), (low, high) in rows]


def as_arrays(task: AttentionTask, calls: Iterable[Call]) -> tuple[Calls, ...]:
    rows = [(each.rank, [each.queries, each.keys], [each.low, each.high]) for each in calls]
    return (Calls.of(task.kernel, rows),) if rows else ()


def circulates(schedule: Schedule, tensor: int) -> bool:
    """Whether blocks of a tensor are received into buffers."""
    assert isinstance(schedule.task, AttentionTask)
    return bool(schedule.blocks.buffers[schedule.task.blocks_of(tensor)].any())


def buffers_of(schedule: Schedule) -> int:
    """The buffers of what circulates."""
    return max(pool.buffers for pool in schedule.blocks.pools)


def with_buffers(schedule: Schedule, buffers: int) -> Blocks:
    """The blocks of a schedule whose pools have another number of buffers."""
    kinds = [
        kind if kind.pool is None else replace(kind, pool=Pool(kind.pool.name, buffers))
        for kind in schedule.blocks.kinds
    ]
    return Blocks(kinds, schedule.blocks.kind, schedule.blocks.bytes, schedule.blocks.parts)


INPUTS, OUTPUTS = (KEYS, QUERIES), (RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS)
"""Tensors that calls read, and those that they add to."""
