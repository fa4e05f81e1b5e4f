"""Layers of a network, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.calls import BlockLists, Calls, Task
from tasp_lab.schedule.composition.merged_steps import ShiftedSteps, check_size, check_world_sizes, tables_joined
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import DENSE, DENSE_BACKWARD, Dense, StackedTask
from tasp_lab.schedule.step import Step
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout


@runtime_checkable
class LayerTask(Task, Protocol):
    """A task of a layer whose positions are distributed over ranks."""

    @property
    def workload(self) -> Workload: ...
    @property
    def layout(self) -> SequenceLayout: ...

    def inputs(self) -> BoolArray:
        """Which blocks each rank makes of what the layer computed before yields: (world_size, blocks)."""

    def saved(self, forward: Task) -> tuple[IntArray, IntArray]:
        """The blocks that a backward pass has from its forward pass, and the same blocks there."""


def stacked(
    layers: Sequence[Schedule],
    overlap: int = 0,
    dense_flops: int | Sequence[int] | IntArray = 0,
    dense_backward_flops: int | Sequence[int] | IntArray = 0,
) -> Schedule:
    """Passes of several layers as one schedule: forward, backward, or forward and then backward.

    Layers are in the order in which they are computed: forward passes from the first layer of the network to the last
    one, backward passes from the last one to the first.

    Between two forward passes each rank makes its inputs of the second from its results of the first, in one ``dense``
    call (projections, feed-forward network), which stays on the rank. Before a backward pass it makes the inputs of the
    gradients, in one ``dense_backward`` call, from the gradients of the layer computed before. If the forward pass of
    the layer is in the stack, the call also reads its inputs and results; else these are saved copies, there from the
    start, as are the gradients that the first of these layers begins with. All inputs, results and gradients are kept,
    as training needs them. Equal pools are shared.

    Parameters
    ----------
    layers : the schedules, with the same positions at every rank.
    overlap : how many steps before the end of a layer the calls behind it run, and with them the layer behind begins. A
        step before the end at which what they read is not all there is refused.
    dense_flops, dense_backward_flops : FLOPs of a call of this name, one number, or one per rank.

    Raises `ScheduleError` for schedules of different world sizes, positions or dtypes, for what is no pass of a layer,
    for passes in another order, for a backward pass that needs more than its own blocks of its forward pass in the
    stack, and if the overlap is too much.
    """
    check_world_sizes(layers)
    tasks = [_task_of(each, layers[0]) for each in layers]
    if len(layers) == 1:
        return layers[0]
    forward_of = _forward_of(layers, tasks)
    shortest = min(len(each.steps) for each in layers[:-1])
    if not 0 <= overlap <= shortest:
        raise ScheduleError(f"layers overlap by {overlap} steps, expected 0 to {shortest}")
    counts = [len(each.blocks) for each in layers]
    check_size(f"a stack of {len(layers)} layers", layers[0].world_size, sum(counts))
    inputs = _inputs(layers, tasks, forward_of)
    begin = [0]
    for each in layers[:-1]:
        begin.append(begin[-1] + len(each.steps) + 1 - overlap)
    costs = [_per_rank(each, layers[0].world_size) for each in (dense_flops, dense_backward_flops)]
    dense, between = _dense(layers, inputs, costs)
    last = len(layers) - 1
    return Schedule(
        name=", ".join(each.name for each in layers),
        world_size=layers[0].world_size,
        lanes=max(each.lanes for each in layers),
        blocks=tables_joined([each.blocks for each in layers]),
        initial=_side_by_side([each.initial & ~made for each, made in zip(layers, inputs.made, strict=True)]),
        final=_side_by_side([each.final & (number == last) for number, each in enumerate(layers)]),
        steps=ShiftedSteps(
            [each.steps for each in layers],
            begin,
            [0, *np.cumsum(counts)[:-1].tolist()],
            {start - 1: Step.of((), [calls]) for start, calls in zip(begin[1:], between, strict=True)},
        ),
        task=StackedTask(tasks, counts, dense),
        kept=_side_by_side([_kept(each) for each in layers]),
    )


def _task_of(schedule: Schedule, first: Schedule) -> LayerTask:
    """The task of a layer, which starts with complete inputs of the same positions as the first layer."""
    task = schedule.task
    if not isinstance(task, LayerTask) or schedule.initial_part is not None:
        raise ScheduleError(f"schedule {schedule.name!r} is no pass of a layer")
    if task.workload.cached_keys:
        raise ScheduleError(
            f"schedule {schedule.name!r} starts with {task.workload.cached_keys} cached keys, which no layer of a "
            "stack computes, expected none"
        )
    assert isinstance(first.task, LayerTask), "the first layer is checked first"
    for rank in range(schedule.world_size):
        own, expected = (each.layout.positions(rank) for each in (task, first.task))
        if not np.array_equal(own, expected):
            raise ScheduleError(
                f"schedule {schedule.name!r} has other positions on rank {rank} than {first.name!r}: layout "
                f"{task.layout.name}, expected {first.task.layout.name}"
            )
    return task


def _forward_of(layers: Sequence[Schedule], tasks: Sequence[LayerTask]) -> list[int | None]:
    """The layer with the forward pass of each backward pass; None if it is not in the stack, and of forward passes."""
    passes = [task.passing for task in tasks]
    forward = passes.count("forward")
    if passes != sorted(passes, reverse=True):
        raise ScheduleError(f"passes in the order {', '.join(passes)}, expected forward passes, then backward passes")
    if forward in (0, len(layers)):
        return [None] * len(layers)
    if 2 * forward != len(layers):
        raise ScheduleError(f"{forward} forward and {len(layers) - forward} backward passes, expected equally many")
    for number in range(forward, len(layers)):
        own, its = len(layers) - 1 - number, tasks[number]
        if (its.workload, its.layout) != (tasks[own].workload, tasks[own].layout):
            raise ScheduleError(
                f"layer {number}, {layers[number].name!r}, is no backward pass of layer {own}, {layers[own].name!r}"
            )
    return [None] * forward + list(reversed(range(forward)))


class _Inputs(NamedTuple):
    """By layer: the blocks that the call before it makes, and those that this call reads, as tables of all layers."""

    made: Sequence[BoolArray]
    read: Sequence[Sequence[BoolArray]]


def _inputs(layers: Sequence[Schedule], tasks: Sequence[LayerTask], forward_of: Sequence[int | None]) -> _Inputs:
    """What the call before each layer makes of what.

    Without its forward pass in the stack a backward pass starts with all that this has left.
    """
    nothing = [np.zeros_like(each.initial) for each in layers]
    made, read = [nothing[0]], [nothing]
    for number in range(1, len(layers)):
        schedule, task, forward = layers[number], tasks[number], forward_of[number]
        own, reads = task.inputs(), [each.copy() for each in nothing]
        reads[number - 1] |= layers[number - 1].final & ~layers[number - 1].initial
        if forward is not None:
            reads[forward] |= layers[forward].final | layers[forward].initial
            blocks, same = task.saved(tasks[forward])
            left = schedule.initial[:, blocks] & _kept(layers[forward])[:, same]
            own[:, blocks] |= left
            reads[forward][:, same] |= left
        if task.passing == "forward" or forward is not None:
            _check_all_made(number, schedule, own)
        made.append(own)
        read.append(reads)
    return _Inputs(made, read)


def _check_all_made(number: int, schedule: Schedule, made: BoolArray) -> None:
    other = schedule.initial & ~made
    if other.any():
        rank, block = np.argwhere(other)[0].tolist()
        raise ScheduleError(
            f"layer {number}, {schedule.name!r}: rank {rank} starts with {schedule.blocks.name(block)}, expected its "
            "own inputs and what the forward pass keeps there"
        )


def _dense(layers: Sequence[Schedule], inputs: _Inputs, costs: Sequence[IntArray]) -> tuple[Dense, list[Calls]]:
    """The calls before each layer but the first one: of every rank that has inputs there."""
    sources: list[IntArray] = []
    targets: list[IntArray] = []
    flops, is_backward, between = [], [], []
    for number in range(1, len(layers)):
        backward, made = int(_is_backward(layers[number])), inputs.made[number]
        first = sum(len(each.blocks) for each in layers[:number])
        ranks = np.flatnonzero(made.any(axis=1))
        read = _side_by_side(inputs.read[number])[ranks]
        calls = len(sources) + np.arange(len(ranks))
        operands = _by_kind(layers, read)
        between.append(Calls((DENSE, DENSE_BACKWARD)[backward], ranks, operands, calls[:, None]))
        sources += [np.flatnonzero(row) for row in read]
        targets += [np.flatnonzero(row) + first for row in made[ranks]]
        flops.append(costs[backward][ranks])
        is_backward.append(np.full(len(ranks), bool(backward)))
    dense = Dense(BlockLists.of(sources), BlockLists.of(targets), np.concatenate(flops), np.concatenate(is_backward))
    return dense, between


def _by_kind(layers: Sequence[Schedule], read: BoolArray) -> tuple[BlockLists, ...]:
    """The blocks that calls read, a row each, as operands: one for each kind of each layer that any of them reads."""
    kinds = np.concatenate([each.blocks.kind for each in layers])
    layer = np.repeat(np.arange(len(layers)), [len(each.blocks) for each in layers])
    used = read.any(axis=0)
    operands = np.unique(np.stack([layer, kinds])[:, used], axis=1).T.tolist()
    own = [(layer == number) & (kinds == kind) for number, kind in operands]
    return tuple(BlockLists.of([np.flatnonzero(row & each) for row in read]) for each in own)


def _is_backward(schedule: Schedule) -> bool:
    return schedule.task is not None and schedule.task.passing == "backward"


def _per_rank(flops: int | Sequence[int] | IntArray, world_size: int) -> IntArray:
    if np.size(flops) not in (1, world_size):
        raise ScheduleError(f"FLOPs of {np.size(flops)} ranks, expected one number or {world_size}")
    return np.broadcast_to(flops, world_size)


def _kept(schedule: Schedule) -> BoolArray:
    kept = schedule.initial | schedule.final
    return kept if schedule.kept is None else kept | schedule.kept


def _side_by_side(tables: Sequence[BoolArray]) -> BoolArray:
    return np.concatenate(tables, axis=1)
