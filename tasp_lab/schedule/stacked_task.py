"""What the calls of several layers compute, as one task; ``dense`` calls between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.calls import BlockLists, Calls, Effects, Task

DENSE = "dense"
"""The kernel that makes inputs of a layer from results of the layer before; its parameter is its number in `Dense`."""


class Dense(NamedTuple):
    """What each ``dense`` call reads and makes, and its FLOPs, int array (calls,)."""

    sources: BlockLists
    targets: BlockLists
    flops: IntArray


NO_DENSE = Dense(BlockLists.of([]), BlockLists.of([]), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class StackedTask:
    """The tasks of several layers, whose blocks follow each other in one table.

    Parameters
    ----------
    layers : the task of each layer.
    block_counts : the number of blocks of each.
    dense : the calls that make the inputs of layers from results, with numbers of blocks in the common table.

    Raises `ScheduleError` unless all layers have one dtype and are of one pass.
    """

    layers: Sequence[Task]
    block_counts: Sequence[int]
    dense: Dense = NO_DENSE

    def __post_init__(self) -> None:
        first = self.layers[0]
        for number, task in enumerate(self.layers):
            if (task.dtype, task.passing) != (first.dtype, first.passing):
                raise ScheduleError(
                    f"layer {number} is a {task.passing} pass in {task.dtype}, expected a {first.passing} pass in "
                    f"{first.dtype} like layer 0"
                )

    @property
    def dtype(self) -> str:
        return self.layers[0].dtype

    @property
    def passing(self) -> Literal["forward", "backward"]:
        return self.layers[0].passing

    @property
    def content(self) -> tuple[object, ...]:
        lists = (self.dense.sources, self.dense.targets)
        calls = tuple(tuple(tuple(each[call].tolist()) for call in range(len(each))) for each in lists)
        layers = tuple(task.content for task in self.layers)
        return "stacked", layers, tuple(self.block_counts), calls, tuple(self.dense.flops.tolist())

    @cached_property
    def first_block(self) -> IntArray:
        """The first block of each layer, and the number of blocks: int array (layers + 1,)."""
        return np.concatenate([[0], np.cumsum(self.block_counts)]).astype(np.int64)

    def check(self, sizes_bytes: IntArray, parts: IntArray) -> None:
        """Raise `ScheduleError` unless the blocks of each layer are those of its task."""
        for number, task in enumerate(self.layers):
            own = slice(self.first_block[number], self.first_block[number + 1])
            try:
                task.check(sizes_bytes[own], parts[own])
            except ScheduleError as error:
                raise ScheduleError(f"layer {number}: {error}") from None

    def _layer_of(self, blocks: IntArray) -> IntArray:
        layers: IntArray = np.searchsorted(self.first_block, blocks, side="right") - 1
        return layers

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of these blocks exist, as their layers say."""
        layer = self._layer_of(blocks)
        rows = [np.flatnonzero(layer == number) for number in range(len(self.layers))]
        found = [
            task.existing_parts(blocks[own] - first) if len(own) else np.zeros((0, 1), dtype=np.bool_)
            for task, own, first in zip(self.layers, rows, self.first_block.tolist(), strict=False)
        ]
        parts = np.zeros((len(blocks), max(each.shape[1] for each in found)), dtype=np.bool_)
        for own, each in zip(rows, found, strict=True):
            parts[own, : each.shape[1]] = each
        return parts

    def effects(self, calls: Calls) -> Effects:
        """The parts that calls yield. Raises `ScheduleError` for calls across layers, and for what a layer refuses."""
        if calls.kernel == DENSE:
            return self._made(calls)
        found = []
        for number, chosen, own in self._by_layer(calls):
            try:
                call, block, part = self.layers[number].effects(own)
            except ScheduleError as error:
                raise ScheduleError(f"layer {number}: {error}") from None
            found.append((chosen[call], block + self.first_block[number], part))
        return Effects(*(np.concatenate(each) for each in zip(*found, strict=True)))

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call."""
        if calls.kernel == DENSE:
            return self.dense.flops[self._dense_numbers(calls)]
        found = np.zeros(len(calls), dtype=np.int64)
        for number, chosen, own in self._by_layer(calls):
            found[chosen] = self.layers[number].flops(own)
        return found

    def _by_layer(self, calls: Calls) -> Iterator[tuple[int, IntArray, Calls]]:
        """The layers of calls: each with the indices of its calls, and with these as the layer knows them."""
        layer = np.full(len(calls), -1, dtype=np.int64)
        for operand in calls.operands:
            layer[operand.owner] = self._layer_of(operand.block)
        across = [operand.owner[layer[operand.owner] != self._layer_of(operand.block)] for operand in calls.operands]
        for what, wrong in (("of nothing", np.flatnonzero(layer < 0)), ("across layers", np.concatenate(across))):
            if len(wrong):
                blocks = [each[wrong[0]].tolist() for each in calls.operands]
                raise ScheduleError(f"rank {calls.rank[wrong[0]]}: {calls.kernel} {what}: blocks {blocks}")
        for number in np.unique(layer).tolist():
            chosen, first = np.flatnonzero(layer == number), self.first_block[number]
            own = calls.select(chosen)
            operands = tuple(BlockLists(each.offset, each.block - first) for each in own.operands)
            yield number, chosen, Calls(own.kernel, own.rank, operands, own.params, own.lane)

    def _made(self, calls: Calls) -> Effects:
        """The inputs that ``dense`` calls make."""
        numbers = self._dense_numbers(calls)
        expected, found = self.dense.sources.select(numbers), calls.operands[0]
        wrong = expected.sizes != found.sizes
        if not wrong.any():
            wrong = np.bincount(found.owner, expected.block != found.block, len(calls)) > 0
        if wrong.any():
            at = int(wrong.argmax())
            raise ScheduleError(
                f"rank {calls.rank[at]}: {DENSE} {numbers[at]} of blocks {found[at].tolist()}, expected "
                f"{expected[at].tolist()}"
            )
        targets = self.dense.targets.select(numbers)
        return Effects(targets.owner, targets.block, np.zeros_like(targets.block))

    def _dense_numbers(self, calls: Calls) -> IntArray:
        count = len(self.dense.flops)
        if len(calls.operands) != 1 or calls.params.shape[1] != 1:
            raise ScheduleError(f"{DENSE} takes results and one parameter, the number of the call")
        numbers: IntArray = calls.params[:, 0]
        wrong = (numbers < 0) | (numbers >= count)
        if wrong.any():
            at = int(wrong.argmax())
            raise ScheduleError(f"rank {calls.rank[at]}: {DENSE} {numbers[at]}, expected 0 to {count - 1}")
        return numbers
