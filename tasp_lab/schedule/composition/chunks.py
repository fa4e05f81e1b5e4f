"""Blocks cut into chunks that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Field
from tasp_lab.schedule.calls import Task
from tasp_lab.schedule.composition.merged_steps import check_size, joined, renumbered, tables_joined
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedule.step import LazySteps, Step
from tasp_lab.workload.layer import MAX_SUM


@runtime_checkable
class HeadsTask(Task, Protocol):
    """A task whose blocks are of heads that can be computed group by group."""

    @property
    def tensor(self) -> IntArray: ...
    @property
    def block_bytes(self) -> IntArray: ...
    @property
    def parts(self) -> IntArray: ...

    def fields_of(self, tensor: int) -> tuple[Field, ...]:
        """The tensors of a block, in the order of its bytes."""

    def in_head_groups(self, groups: int) -> tuple[HeadsTask, IntArray]:
        """The task with the heads of each block cut into equal groups, and the blocks that these are.

        Returns an int array (blocks, groups): the number of each group of the heads of each block. Blocks one after
        another remain so for each group. Raises `ScheduleError` for heads that are not a multiple of `groups`.
        """


def in_chunks(schedule: Schedule, chunks: int) -> Schedule:
    """A schedule whose blocks are cut into chunks, each a step behind the one before it.

    A rank can then forward the first chunk of a block, or compute with it, while it receives the next one. Chunk q
    does at step s + q what the block did at step s, and so do kernel calls. So every chunk follows the rules that the
    block follows, and the bytes and FLOPs are the same.

    Blocks of collectives are cut into chunks of about equal size; chunk q of block b is block ``b * chunks + q``. Those
    of layers are cut into equal groups of heads, which do not depend on each other.

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
    own_part, block = schedule.initial_part, np.empty(cut.number.size, dtype=np.int64)
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
        initial_part=None if own_part is None else np.broadcast_to(own_part, schedule.initial.shape)[:, block],
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
    kinds = [replace(kind, fields=heads.fields_of(tensor)) for kind, tensor in zip(blocks.kinds, tensors, strict=True)]
    kind = np.empty(number.size, dtype=np.int64)
    kind[number] = blocks.kind[:, None]
    return _Cut(Blocks(kinds, kind, heads.block_bytes, heads.parts), heads, number)


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
    found = []
    for layer, first, end in zip(task.layers, task.first_block, task.first_block[1:], strict=False):
        used, kind = np.unique(blocks.kind[first:end], return_inverse=True)
        kinds = [blocks.kinds[each] for each in used.tolist()]
        found.append(_cut(Blocks(kinds, kind, blocks.bytes[first:end], blocks.parts[first:end]), layer, chunks))
    numbers = [each.number + first * chunks for each, first in zip(found, task.first_block, strict=False)]
    return _Cut(
        tables_joined([each.blocks for each in found]),
        StackedTask(
            [each.task for each in found if each.task],
            [count * chunks for count in task.block_counts],
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
        return renumbered(step, lambda block: self.number[block, chunk], lambda rank: rank)
