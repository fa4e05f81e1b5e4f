"""Layers of a network, one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.calls import BlockLists, Calls, Task
from tasp_lab.schedule.composition.merged_steps import ShiftedSteps, check_size, check_world_sizes, tables_joined
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import DENSE, DENSE_BACKWARD, Dense, StackedTask
from tasp_lab.schedule.step import Step
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout


@runtime_checkable
class LayerTask(Task, Protocol):
    """A task of a layer whose positions are distributed over ranks, or of a re-layout between two layers."""

    @property
    def workload(self) -> Workload: ...
    @property
    def layout(self) -> SequenceLayout:
        """Where positions lie at the start."""

    @property
    def result_layout(self) -> SequenceLayout:
        """Where they lie in the end: for a layer as at the start."""

    def saved(self, forward: Task) -> tuple[IntArray, IntArray]:
        """The blocks that a backward pass has from its forward pass, and the same blocks there."""


def stacked(
    layers: Sequence[Schedule],
    overlap: int = 0,
    dense_flops: int | Sequence[int] | IntArray = 0,
    dense_backward_flops: int | Sequence[int] | IntArray = 0,
    name: str = "",
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

    Layers may be of different kinds of attention. A re-layout stands between those that have other positions at a rank;
    it counts as a layer here, but the call before it has no FLOPs.

    Parameters
    ----------
    layers : the schedules; each begins with the positions at every rank with which the one before ends.
    overlap : how many steps before the end of a layer the calls behind it run, and with them the layer behind begins. A
        step before the end at which what they read is not all there is refused.
    dense_flops, dense_backward_flops : FLOPs of a call of this name, one number, or one per rank.
    name : of the stack; by default the names of all layers.

    Raises `ScheduleError` for schedules of different world sizes, positions or dtypes, for what is no pass of a layer,
    for passes in another order, for a backward pass that needs more than its own blocks of its forward pass in the
    stack, and if the overlap is too much.
    """
    check_world_sizes(layers)
    tasks = [_task_of(each) for each in layers]
    _check_positions(layers, tasks)
    if len(layers) == 1:
        return replace(layers[0], name=name) if name else layers[0]
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
        name=name or ", ".join(each.name for each in layers),
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


def _task_of(schedule: Schedule) -> LayerTask:
    """The task of a layer, which starts with complete inputs."""
    task = schedule.task
    if not isinstance(task, LayerTask) or schedule.initial_part is not None:
        raise ScheduleError(f"schedule {schedule.name!r} is no pass of a layer")
    if task.workload.cached_keys:
        raise ScheduleError(
            f"schedule {schedule.name!r} starts with {task.workload.cached_keys} cached keys, which no layer of a "
            "stack computes, expected none"
        )
    return task


def _check_positions(layers: Sequence[Schedule], tasks: Sequence[LayerTask]) -> None:
    """Raise `ScheduleError` unless each layer begins with the positions with which the one before ends."""
    for number in range(1, len(layers)):
        found, expected = tasks[number].layout, tasks[number - 1].result_layout
        if found.spans == expected.spans:
            continue
        for rank in range(layers[0].world_size):
            if not np.array_equal(found.positions(rank), expected.positions(rank)):
                raise ScheduleError(
                    f"schedule {layers[number].name!r} has other positions on rank {rank} than "
                    f"{layers[number - 1].name!r}: layout {found.name}, expected {expected.name}"
                )


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
        forward_task = tasks[own]
        ends = forward_task.result_layout, forward_task.layout
        if (its.workload, its.layout, its.result_layout) != (forward_task.workload, *ends):
            raise ScheduleError(
                f"layer {number}, {layers[number].name!r}, is no backward pass of layer {own}, {layers[own].name!r}"
            )
    return [None] * forward + list(reversed(range(forward)))


class _Inputs(NamedTuple):
    """By layer: the blocks that the call before it makes, and those that this call reads, by the layer they are of."""

    made: Sequence[BoolArray]
    read: Sequence[Mapping[int, BoolArray]]


def _inputs(layers: Sequence[Schedule], tasks: Sequence[LayerTask], forward_of: Sequence[int | None]) -> _Inputs:
    """What the call before each layer makes of what.

    Without its forward pass in the stack a backward pass starts with all that this has left.
    """
    made: list[BoolArray] = [np.zeros_like(layers[0].initial)]
    read: list[Mapping[int, BoolArray]] = [{}]
    for number in range(1, len(layers)):
        schedule, task, forward = layers[number], tasks[number], forward_of[number]
        own = task.contract.inputs(schedule.world_size)
        reads = {number - 1: layers[number - 1].final}
        if forward is not None:
            of_forward = reads.get(forward, False) | layers[forward].final | layers[forward].initial
            blocks, same = task.saved(tasks[forward])
            left = schedule.initial[:, blocks] & _kept(layers[forward])[:, same]
            own[:, blocks] |= left
            of_forward[:, same] |= left
            reads[forward] = of_forward
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
    first_block = np.cumsum([0, *(len(each.blocks) for each in layers)]).tolist()
    sources: list[IntArray] = []
    targets: list[IntArray] = []
    flops, is_backward, between = [], [], []
    for number in range(1, len(layers)):
        backward, made = int(_is_backward(layers[number])), inputs.made[number]
        ranks = np.flatnonzero(made.any(axis=1))
        read = {layer: table[ranks] for layer, table in sorted(inputs.read[number].items())}
        calls = len(sources) + np.arange(len(ranks))
        operands = _by_kind(layers, read, first_block)
        between.append(Calls((DENSE, DENSE_BACKWARD)[backward], ranks, operands, calls[:, None]))
        for call in range(len(ranks)):
            sources.append(np.concatenate([np.flatnonzero(read[each][call]) + first_block[each] for each in read]))
        targets += [np.flatnonzero(row) + first_block[number] for row in made[ranks]]
        flops.append(costs[backward][ranks] * _computes(layers[number]))
        is_backward.append(np.full(len(ranks), bool(backward)))
    dense = Dense(BlockLists.of(sources), BlockLists.of(targets), np.concatenate(flops), np.concatenate(is_backward))
    return dense, between


def _by_kind(
    layers: Sequence[Schedule], read: Mapping[int, BoolArray], first_block: Sequence[int]
) -> tuple[BlockLists, ...]:
    """The blocks that calls read, a row each, as operands: one for each kind of each layer that any of them reads."""
    found = []
    for layer, table in read.items():
        kinds = layers[layer].blocks.kind
        for kind in np.unique(kinds[table.any(axis=0)]).tolist():
            own = kinds == kind
            found.append(BlockLists.of([np.flatnonzero(row & own) + first_block[layer] for row in table]))
    return tuple(found)


def _is_backward(schedule: Schedule) -> bool:
    return schedule.task is not None and schedule.task.passing == "backward"


def _computes(schedule: Schedule) -> bool:
    """Whether it is a layer: a re-layout has no kernels."""
    return schedule.task is not None and bool(schedule.task.kernels)


def _per_rank(flops: int | Sequence[int] | IntArray, world_size: int) -> IntArray:
    if np.size(flops) not in (1, world_size):
        raise ScheduleError(f"FLOPs of {np.size(flops)} ranks, expected one number or {world_size}")
    return np.broadcast_to(flops, world_size)


def _kept(schedule: Schedule) -> BoolArray:
    kept = schedule.initial | schedule.final
    return kept if schedule.kept is None else kept | schedule.kept


def _side_by_side(tables: Sequence[BoolArray]) -> BoolArray:
    return np.concatenate(tables, axis=1)
