"""The shapes of the kernel calls of a schedule: each distinct one once, since its time may take long to find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.calls import Calls, Task
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.kernel_shapes import KernelName, KernelShape, ShapeRows, distinct_shapes


class CallShapes(NamedTuple):
    """The distinct shapes of calls; int arrays (calls,): the index of each call's shape, and its FLOPs."""

    distinct: tuple[KernelShape, ...]
    number: IntArray
    flops: IntArray


def call_shapes(task: Task | None, calls: Sequence[Calls]) -> CallShapes:
    """The shapes of calls, in their order."""
    if task is None or not calls:
        return CallShapes((), *np.zeros((2, 0), dtype=np.int64))
    kernels = list(dict.fromkeys(each.kernel for each in calls))
    names = [KernelName(kernel, task.kernels[kernel], task.dtype) for kernel in kernels]
    name = np.repeat([kernels.index(each.kernel) for each in calls], [len(each) for each in calls])
    rows = ShapeRows.joined([task.shapes(each) for each in calls])
    return CallShapes(*distinct_shapes(names, name, rows), rows.flops)


def shapes_by_rank(schedule: Schedule) -> list[dict[KernelShape, int]]:
    """For each rank, how many calls it makes of each shape."""
    calls = [each for step in schedule.steps for each in step.calls if len(each)]
    shapes, number, _ = call_shapes(schedule.task, calls)
    rank = np.concatenate([np.zeros(0, dtype=np.int64), *(each.rank for each in calls)])
    found: list[dict[KernelShape, int]] = [{} for _ in range(schedule.world_size)]
    pairs, counts = np.unique(rank * len(shapes) + number, return_counts=True)
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        found[pair // len(shapes)][shapes[pair % len(shapes)]] = count
    return found
