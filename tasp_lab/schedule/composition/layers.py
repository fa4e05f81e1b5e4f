"""Layers of a network, one after another, and blocks cut into chunks that follow each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Pool
from tasp_lab.schedule.calls import BlockLists, Calls, Task
from tasp_lab.schedule.composition.sequence import (
    ShiftedSteps,
    check_size,
    check_world_sizes,
    joined,
    renumbered,
    tables_joined,
)
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import DENSE, DENSE_BACKWARD, Dense, StackedTask
from tasp_lab.workload.layer import MAX_SUM, Workload
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
    for layer in layers[:-1]:
        begin.append(begin[-1] + len(layer.steps) + 1 - overlap)
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
        kept=_side_by_side([each.initial | each.left for each in layers]),
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
        layout, expected = tasks[number].layout, tasks[number - 1].result_layout
        if layout.position_spans == expected.position_spans:
            continue
        for rank in range(layers[0].world_size):
            if not np.array_equal(layout.positions(rank), expected.positions(rank)):
                raise ScheduleError(
                    f"schedule {layers[number].name!r} has other positions on rank {rank} than "
                    f"{layers[number - 1].name!r}: layout {layout.name}, expected {expected.name}"
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
        layer, its = len(layers) - 1 - number, tasks[number]
        forward_task = tasks[layer]
        ends = forward_task.result_layout, forward_task.layout
        if (its.workload, its.layout, its.result_layout) != (forward_task.workload, *ends):
            raise ScheduleError(
                f"layer {number}, {layers[number].name!r}, is no backward pass of layer {layer}, {layers[layer].name!r}"
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
        inputs = task.contract.inputs(schedule.world_size)
        reads = {number - 1: layers[number - 1].final}
        if forward is not None:
            of_forward = reads.get(forward, False) | layers[forward].final | layers[forward].initial
            blocks, same = task.saved(tasks[forward])
            left = schedule.initial[:, blocks] & (layers[forward].initial | layers[forward].left)[:, same]
            inputs[:, blocks] |= left
            of_forward[:, same] |= left
            reads[forward] = of_forward
        if task.passing == "forward" or forward is not None:
            _check_all_made(number, schedule, inputs)
        made.append(inputs)
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
    lists = []
    for layer, table in read.items():
        kinds = layers[layer].blocks.kind
        for kind in np.unique(kinds[table.any(axis=0)]).tolist():
            of_kind = kinds == kind
            lists.append(BlockLists.of([np.flatnonzero(row & of_kind) + first_block[layer] for row in table]))
    return tuple(lists)


def _is_backward(schedule: Schedule) -> bool:
    return schedule.task is not None and schedule.task.passing == "backward"


def _computes(schedule: Schedule) -> bool:
    """Whether it is a layer: a re-layout has no kernels."""
    return schedule.task is not None and bool(schedule.task.kernels)


def _per_rank(flops: int | Sequence[int] | IntArray, world_size: int) -> IntArray:
    if np.size(flops) not in (1, world_size):
        raise ScheduleError(f"FLOPs of {np.size(flops)} ranks, expected one number or {world_size}")
    return np.broadcast_to(flops, world_size)


def _side_by_side(tables: Sequence[BoolArray]) -> BoolArray:
    return np.concatenate(tables, axis=1)


# Blocks cut into chunks that follow each other.


@runtime_checkable
class HeadsTask(Task, Protocol):
    """A task whose blocks are of heads that can be computed group by group."""

    @property
    def tensor(self) -> IntArray: ...

    def blocks(self, pools: Mapping[int, Pool | None], bound: Collection[int]) -> Blocks:
        """The blocks of a schedule of this task; `pools` and what is `bound` by tensor."""

    def in_head_groups(self, groups: int) -> tuple[HeadsTask, IntArray]:
        """The task with the heads of each block cut into groups, and the blocks that these are.

        Returns an int array (blocks, groups): the number of each group of the heads of each block. A block of fewer
        heads may be the same one for several groups. Blocks one after another remain so for each group. Raises
        `ScheduleError` for heads that cannot be cut.
        """


def in_chunks(schedule: Schedule, chunks: int) -> Schedule:
    """A schedule whose blocks are cut into chunks, each a step behind the one before it.

    A rank can then forward the first chunk of a block, or compute with it, while it receives the next one. Chunk q
    does at step s + q what the block did at step s, and so do kernel calls. So every chunk follows the rules that the
    block follows, and the bytes and FLOPs are the same.

    Blocks of collectives are cut into chunks of about equal size; chunk q of block b is block ``b * chunks + q``. Those
    of layers are cut into equal groups of heads, which do not depend on each other. Keys of fewer heads than there are
    chunks are shared: they are sent with the first chunk that uses them, their gradients given with the last one.

    Raises `ScheduleError` for more chunks than bytes, for heads that chunks do not divide, for kernel calls of a task
    that has no heads, and for stacks, whose ``dense`` calls need all heads of a layer.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> print(in_chunks(ring_all_gather(full_mesh(2), 5), 2).steps[0])
    0->1 lane 0 block 0
    1->0 lane 0 block 2
    """
    if chunks == 1:
        return schedule
    check_size(f"{schedule.name} in {chunks} chunks", schedule.world_size, len(schedule.blocks) * chunks)
    try:
        cut = _cut(schedule.blocks, schedule.task, chunks)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {schedule.name!r} in {chunks} chunks: {error}") from None
    part, block = schedule.initial_part, np.empty(len(cut.blocks), dtype=np.int64)
    block[cut.number] = np.arange(len(cut.number))[:, None]
    return Schedule(
        name=schedule.name,
        world_size=schedule.world_size,
        lanes=schedule.lanes,
        blocks=cut.blocks,
        initial=schedule.initial[:, block],
        final=schedule.final[:, block],
        steps=ChunkedSteps(schedule.steps, cut.number),
        task=cut.task,
        fused=schedule.fused,
        initial_part=None if part is None else np.broadcast_to(part, schedule.initial.shape)[:, block],
        kept=None if schedule.kept is None else schedule.kept[:, block],
    )


class _Cut(NamedTuple):
    """Chunks of blocks: their table and task, and the number of each chunk of each block, (blocks, chunks)."""

    blocks: Blocks
    task: Task | None
    number: IntArray


def _cut(blocks: Blocks, task: Task | None, chunks: int) -> _Cut:
    if chunks < 1:
        raise ScheduleError("expected 1 chunk or more")
    if task is None:
        return _cut_bytes(blocks, chunks)
    if isinstance(task, StackedTask):
        return _cut_stack(blocks, task, chunks)
    if not isinstance(task, HeadsTask):
        raise ScheduleError("its kernel calls read whole blocks, expected a collective or a layer with heads")
    heads, number = task.in_head_groups(chunks)
    tensors = [int(task.tensor[(blocks.kind == each).argmax()]) for each in range(len(blocks.kinds))]
    pools = {tensor: kind.pool for kind, tensor in zip(blocks.kinds, tensors, strict=True)}
    bound = {tensor for kind, tensor in zip(blocks.kinds, tensors, strict=True) if kind.bound}
    return _Cut(heads.blocks(pools, bound), heads, number)


def _cut_bytes(blocks: Blocks, chunks: int) -> _Cut:
    smallest = int(blocks.bytes.min(initial=MAX_SUM))
    if chunks > smallest:
        raise ScheduleError(f"expected 1 to {smallest}, as a chunk has a byte or more")
    size, remainder = np.divmod(blocks.bytes[:, None], chunks)
    sizes = (size + (np.arange(chunks) < remainder)).ravel()
    cut = Blocks(blocks.kinds, blocks.kind.repeat(chunks), sizes, blocks.parts.repeat(chunks))
    return _Cut(cut, None, np.arange(len(cut)).reshape(-1, chunks))


def _cut_stack(blocks: Blocks, task: StackedTask, chunks: int) -> _Cut:
    if len(task.dense.flops):
        raise ScheduleError("its dense calls read all heads of a layer, expected chunks of each layer before stacking")
    cuts = []
    for layer, first, end in zip(task.layers, task.first_block, task.first_block[1:], strict=False):
        used, kind = np.unique(blocks.kind[first:end], return_inverse=True)
        kinds = [blocks.kinds[each] for each in used.tolist()]
        cuts.append(_cut(Blocks(kinds, kind, blocks.bytes[first:end], blocks.parts[first:end]), layer, chunks))
    counts = [len(each.blocks) for each in cuts]
    numbers = [each.number + first for each, first in zip(cuts, np.cumsum([0, *counts]), strict=False)]
    return _Cut(
        tables_joined([each.blocks for each in cuts]),
        StackedTask(
            [each.task for each in cuts if each.task],
            counts,
            ranks=task.ranks,
        ),
        np.concatenate(numbers),
    )


@dataclass(frozen=True, eq=False)
class ChunkedSteps(LazySteps):
    """At each step chunk q of the blocks does what the blocks did q steps before.

    `number` is an int array (blocks, chunks), the block of each chunk.
    """

    whole: Sequence[Step]
    number: IntArray

    def __len__(self) -> int:
        return len(self.whole) + self.number.shape[1] - 1 if len(self.whole) else 0

    def step(self, index: int) -> Step:
        first, last = max(0, index - self.number.shape[1] + 1), min(index, len(self.whole) - 1)
        return joined([self._chunk(self.whole[each], index - each) for each in range(first, last + 1)])

    def _chunk(self, step: Step, chunk: int) -> Step:
        # A block that several chunks share is sent for the first of them; what they add to it is given for the last.
        now, last = self.number[step.block, chunk], self.number.shape[1] - 1
        beside = self.number[step.block, np.clip(chunk + np.where(step.gives, 1, -1), 0, last)]
        ends = np.where(step.gives, chunk == last, chunk == 0) | (beside != now)
        if not ends.all():
            source, destination, lane = step.source[ends], step.destination[ends], step.lane[ends]
            step = Step(source, destination, lane, step.block[ends], step.gives[ends], step.calls)
        return renumbered(step, lambda block: self.number[block, chunk], lambda rank: rank)
