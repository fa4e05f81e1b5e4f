"""Layers of a network, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.calls import BlockLists, Calls, Task
from tasp_lab.schedule.composition.merged_steps import ShiftedSteps, check_world_sizes, tables_joined
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import DENSE, Dense, StackedTask
from tasp_lab.schedule.step import Step
from tasp_lab.workload.sequence_layout import SequenceLayout


@runtime_checkable
class LayerTask(Task, Protocol):
    """A task of a layer whose positions are distributed over ranks."""

    @property
    def layout(self) -> SequenceLayout: ...


def stacked(layers: Sequence[Schedule], overlap: int = 0, dense_flops: int | Sequence[int] | IntArray = 0) -> Schedule:
    """Forward passes of several layers as one schedule.

    Between two layers each rank makes its inputs of the second from its results of the first, in one ``dense`` call
    (projections, feed-forward network), which stays on the rank. All inputs and results are kept, as training needs
    them. Equal pools are shared.

    Parameters
    ----------
    layers : the schedules, with the same positions at every rank.
    overlap : how many steps before the end of a layer its ``dense`` calls run, and with them the layer behind begins. A
        step before the end at which the results are not all there is refused.
    dense_flops : FLOPs of a ``dense`` call, one number, or one per rank.

    Raises `ScheduleError` for schedules of different world sizes, positions or dtypes, for what is no forward pass of a
    layer, and if the overlap is too much.
    """
    check_world_sizes(layers)
    tasks = [_task_of(each, layers[0]) for each in layers]
    if len(layers) == 1:
        return layers[0]
    if np.size(dense_flops) not in (1, layers[0].world_size):
        raise ScheduleError(f"FLOPs of {np.size(dense_flops)} ranks, expected one number or {layers[0].world_size}")
    shortest = min(len(each.steps) for each in layers[:-1])
    if not 0 <= overlap <= shortest:
        raise ScheduleError(f"layers overlap by {overlap} steps, expected 0 to {shortest}")
    counts = [len(each.blocks) for each in layers]
    first = [0, *np.cumsum(counts)[:-1].tolist()]
    begin = [0]
    for each in layers[:-1]:
        begin.append(begin[-1] + len(each.steps) + 1 - overlap)
    dense, between = _dense(layers, first, np.broadcast_to(dense_flops, layers[0].world_size))
    last = len(layers) - 1
    return Schedule(
        name=", ".join(each.name for each in layers),
        world_size=layers[0].world_size,
        lanes=max(each.lanes for each in layers),
        blocks=tables_joined([each.blocks for each in layers]),
        initial=_side_by_side([each.initial & (number == 0) for number, each in enumerate(layers)]),
        final=_side_by_side([each.final & (number == last) for number, each in enumerate(layers)]),
        steps=ShiftedSteps(
            [each.steps for each in layers],
            begin,
            first,
            {start - 1: Step.of((), [calls]) for start, calls in zip(begin[1:], between, strict=True)},
        ),
        task=StackedTask(tasks, counts, dense),
        kept=_side_by_side([_kept(each) for each in layers]),
    )


def _task_of(schedule: Schedule, first: Schedule) -> LayerTask:
    """The task of a layer, which starts with complete inputs of the same positions as the first layer."""
    task = schedule.task
    if not isinstance(task, LayerTask) or task.passing != "forward" or schedule.initial_part is not None:
        raise ScheduleError(f"schedule {schedule.name!r} is no forward pass of a layer")
    assert isinstance(first.task, LayerTask), "the first layer is checked first"
    for rank in range(schedule.world_size):
        own, expected = (each.layout.positions(rank) for each in (task, first.task))
        if not np.array_equal(own, expected):
            raise ScheduleError(
                f"schedule {schedule.name!r} has other positions on rank {rank} than {first.name!r}: layout "
                f"{task.layout.name}, expected {first.task.layout.name}"
            )
    return task


def _dense(layers: Sequence[Schedule], first: Sequence[int], flops: IntArray) -> tuple[Dense, list[Calls]]:
    """The ``dense`` calls behind each layer but the last one: of every rank that has results of it."""
    sources: list[IntArray] = []
    targets: list[IntArray] = []
    costs, between = [], []
    for number, (before, after) in enumerate(pairwise(layers)):
        results = before.final & ~before.initial
        ranks = np.flatnonzero(results.any(axis=1))
        numbers = len(sources) + np.arange(len(ranks))
        sources += [np.flatnonzero(results[rank]) + first[number] for rank in ranks]
        targets += [np.flatnonzero(after.initial[rank]) + first[number + 1] for rank in ranks]
        costs.append(flops[ranks])
        lists = BlockLists.of(sources[int(numbers[0]) :])
        between.append(Calls(DENSE, ranks, (lists,), numbers[:, None]))
    return Dense(BlockLists.of(sources), BlockLists.of(targets), np.concatenate(costs)), between


def _kept(schedule: Schedule) -> BoolArray:
    kept = schedule.initial | schedule.final
    return kept if schedule.kept is None else kept | schedule.kept


def _side_by_side(tables: Sequence[BoolArray]) -> BoolArray:
    return np.concatenate(tables, axis=1)
