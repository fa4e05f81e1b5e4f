"""What the calls of several layers compute, as one task; ``dense`` and ``dense_backward`` calls between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, first_true
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import BlockLists, Calls, Contract, Effects, Passing, Task, ranges
from tasp_lab.workload.kernel_shapes import Product, ShapeRows

DENSE, DENSE_BACKWARD = "dense", "dense_backward"
"""The kernels that make inputs of a layer from what the layer computed before yields: of a forward pass from results,
of a backward pass from gradients. The parameter is the number of the call in `Dense`."""


class Dense(NamedTuple):
    """What each call between layers reads and makes; arrays (calls,): its FLOPs, and whether it is `DENSE_BACKWARD`.

    `moved_bytes` and `launches` are those of element-wise work beside the matrices, none if None. `part` is the part
    that is made of each block of `targets`, the first one if None: gradients of parameters are sums of parts of all
    ranks. `product` is an index in `products`, the matrix products of each call; None where only FLOPs are known.
    """

    sources: BlockLists
    targets: BlockLists
    flops: IntArray
    is_backward: BoolArray
    moved_bytes: IntArray | None = None
    part: IntArray | None = None
    launches: IntArray | None = None
    product: IntArray | None = None
    products: tuple[tuple[Product, ...], ...] = ((),)


NO_DENSE = Dense(BlockLists.of([]), BlockLists.of([]), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_))


@dataclass(frozen=True, eq=False)
class StackedTask:
    """The tasks of several layers, whose blocks follow each other in one table.

    Parameters
    ----------
    layers : the task of each layer.
    block_counts : the number of blocks of each.
    dense : the calls that make the inputs of layers, with numbers of blocks in the common table.
    ranks : int array (layers, ranks of a layer), the ranks that act as rank 0, 1, ... of each; None if each is itself.

    Raises `ScheduleError` unless all layers have one dtype, and each kernel is of one pass.
    """

    layers: Sequence[Task]
    block_counts: Sequence[int]
    dense: Dense = NO_DENSE
    ranks: IntArray | None = None

    def __post_init__(self) -> None:
        first = self.layers[0]
        for number, task in enumerate(self.layers):
            if task.dtype != first.dtype:
                raise ScheduleError(f"layer {number} is in {task.dtype}, expected {first.dtype} like layer 0")
            for kernel, passing in task.kernels.items():
                if self.kernels[kernel] != passing:
                    raise ScheduleError(f"layer {number}: kernel {kernel} is of the {passing} pass, "
                                        f"in another layer of the {self.kernels[kernel]} pass")  # fmt: skip

    @property
    def dtype(self) -> str:
        return self.layers[0].dtype

    @property
    def passing(self) -> Passing:
        """The pass of the layer that is computed last."""
        return self.layers[-1].passing

    @cached_property
    def kernels(self) -> Mapping[str, Passing]:
        """The pass of each kernel of any layer, and between them."""
        kernels: dict[str, Passing] = {DENSE: "forward", DENSE_BACKWARD: "backward"} if len(self.dense.flops) else {}
        return kernels | {kernel: passing for task in self.layers for kernel, passing in task.kernels.items()}

    @property
    def content(self) -> tuple[object, ...]:
        lists = (self.dense.sources, self.dense.targets)
        calls = tuple(tuple(tuple(each[call].tolist()) for call in range(len(each))) for each in lists)
        layers = tuple(task.content for task in self.layers)
        costs = tuple(zip(self.dense.flops.tolist(), self.dense.is_backward.tolist(), strict=True))
        more = tuple(
            None if each is None else tuple(each.tolist())
            for each in (self.dense.moved_bytes, self.dense.part, self.dense.launches, self.dense.product)
        )
        ranks = None if self.ranks is None else self.ranks.tolist()
        return "stacked", layers, tuple(self.block_counts), calls, costs, more, self.dense.products, repr(ranks)

    @cached_property
    def first_block(self) -> IntArray:
        """The first block of each layer, and the number of blocks: int array (layers + 1,)."""
        return np.concatenate([[0], np.cumsum(self.block_counts)]).astype(np.int64)

    @cached_property
    def contract(self) -> Contract:
        """The contracts of all layers, but results of dense calls start empty, and their operands need not stay."""
        contracts = [self._on_its_ranks(number, task.contract) for number, task in enumerate(self.layers)]
        columns = zip(*contracts, strict=True)
        owner, starts_at, ends_at, saved = (np.concatenate(column) for column in columns)
        made, read = self.dense.targets.block, self.dense.sources.block
        starts_at[made], saved[made], ends_at[read] = -1, False, -1
        return Contract(owner, starts_at, ends_at, saved)

    def _on_its_ranks(self, number: int, contract: Contract) -> Contract:
        if self.ranks is None:
            return contract
        ranks = np.append(self.ranks[number], -1)  # so that -1, no rank, stays -1
        owner, starts_at, ends_at = (ranks[each] for each in contract[:3])
        return Contract(owner, starts_at, ends_at, contract.saved)

    def check(self, blocks: Blocks) -> None:
        """Raise `ScheduleError` unless the blocks of each layer are those of its task."""
        for number, task in enumerate(self.layers):
            own = slice(self.first_block[number], self.first_block[number + 1])
            try:
                task.check(Blocks(blocks.kinds, blocks.kind[own], blocks.bytes[own], blocks.parts[own]))
            except ScheduleError as error:
                raise ScheduleError(f"layer {number}: {error}") from None

    def layer_of(self, blocks: IntArray) -> IntArray:
        """The layer of each of these blocks."""
        layers: IntArray = np.searchsorted(self.first_block, blocks, side="right") - 1
        return layers

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of these blocks exist, by the task of their layer."""
        layer = self.layer_of(blocks)
        rows = [np.flatnonzero(layer == number) for number in range(len(self.layers))]
        tables = [
            task.existing_parts(blocks[own] - first) if len(own) else np.zeros((0, 1), dtype=np.bool_)
            for task, own, first in zip(self.layers, rows, self.first_block.tolist(), strict=False)
        ]
        parts = np.zeros((len(blocks), max(each.shape[1] for each in tables)), dtype=np.bool_)
        for chosen, table in zip(rows, tables, strict=True):
            parts[chosen, : table.shape[1]] = table
        return parts

    def effects(self, calls: Calls) -> Effects:
        """The parts that calls yield. Raises `ScheduleError` for calls across layers, and for what a layer refuses."""
        if calls.kernel in (DENSE, DENSE_BACKWARD):
            return self._made(calls)
        of_tasks = []
        for number, chosen, of_layer in self._by_layer(calls):
            try:
                call, block, part = self.layers[number].effects(of_layer)
            except ScheduleError as error:
                raise ScheduleError(f"layer {number}: {error}") from None
            of_tasks.append((chosen[call], block + self.first_block[number], part))
        return Effects(*(np.concatenate(each) for each in zip(*of_tasks, strict=True)))

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call."""
        if calls.kernel in (DENSE, DENSE_BACKWARD):
            return self.dense.flops[self._dense_numbers(calls)]
        flops = np.zeros(len(calls), dtype=np.int64)
        for number, chosen, of_layer in self._by_layer(calls):
            flops[chosen] = self.layers[number].flops(of_layer)
        return flops

    def shapes(self, calls: Calls) -> ShapeRows:
        """The shape of each call, by the task of its layer."""
        if calls.kernel in (DENSE, DENSE_BACKWARD):
            dense, numbers = self.dense, self._dense_numbers(calls)
            moved, launches, packing = (
                0 if each is None else each[numbers] for each in (dense.moved_bytes, dense.launches, dense.product)
            )
            rows = ShapeRows.of("dense", self.flops(calls), moved_bytes=moved, launches=launches, packing=packing)
            return rows._replace(packings=dense.products)
        parts = [(chosen, self.layers[number].shapes(of_layer)) for number, chosen, of_layer in self._by_layer(calls)]
        rows = ShapeRows.joined([shapes for _, shapes in parts])
        place = np.argsort(np.concatenate([chosen for chosen, _ in parts]))
        return ShapeRows._make([*(column[place] for column in rows[:-1]), rows.packings])

    def _by_layer(self, calls: Calls) -> Iterator[tuple[int, IntArray, Calls]]:
        """The layers of calls: each with the indices of its calls, and the calls in numbers of the layer."""
        layer = np.full(len(calls), -1, dtype=np.int64)
        read = [(operand.owner, self.layer_of(operand.block)) for operand in calls.operands]
        for owner, of_block in read:
            layer[owner] = of_block
        across = [owner[layer[owner] != of_block] for owner, of_block in read]
        for what, wrong in (("of nothing", np.flatnonzero(layer < 0)), ("across layers", np.concatenate(across))):
            if len(wrong):
                blocks = [each[wrong[0]].tolist() for each in calls.operands]
                raise ScheduleError(f"rank {calls.rank[wrong[0]]}: {calls.kernel} {what}: blocks {blocks}")
        for number in np.unique(layer).tolist():
            chosen, first = np.flatnonzero(layer == number), self.first_block[number]
            of_layer = calls if len(chosen) == len(calls) else calls.select(chosen)
            operands = tuple(BlockLists(each.offset, each.block - first) for each in of_layer.operands)
            yield number, chosen, Calls(of_layer.kernel, of_layer.rank, operands, of_layer.params, of_layer.lane)

    def _made(self, calls: Calls) -> Effects:
        """The inputs that calls between layers make."""
        numbers = self._dense_numbers(calls)
        expected, merged = self.dense.sources.select(numbers), _merged(calls)
        wrong = expected.sizes != merged.sizes
        if not wrong.any():
            wrong = np.bincount(merged.owner, expected.block != merged.block, len(calls)) > 0
        if (at := first_true(wrong)) is not None:
            raise ScheduleError(
                f"rank {calls.rank[at]}: {calls.kernel} {numbers[at]} of blocks {merged[at].tolist()}, expected "
                f"{expected[at].tolist()}"
            )
        targets = self.dense.targets.select(numbers)
        if self.dense.part is None:
            return Effects(targets.owner, targets.block, np.zeros_like(targets.block))
        _, position = ranges(self.dense.targets.offset[numbers], self.dense.targets.offset[numbers + 1])
        return Effects(targets.owner, targets.block, self.dense.part[position])

    def _dense_numbers(self, calls: Calls) -> IntArray:
        count = len(self.dense.flops)
        if not calls.operands or calls.params.shape[1] != 1:
            raise ScheduleError(f"{calls.kernel} takes lists of blocks and one parameter, the number of the call")
        numbers: IntArray = calls.params[:, 0]
        wrong = (numbers < 0) | (numbers >= count)
        if (at := first_true(wrong)) is not None:
            raise ScheduleError(f"rank {calls.rank[at]}: {calls.kernel} {numbers[at]}, expected 0 to {count - 1}")
        if (at := first_true(self.dense.is_backward[numbers] != (calls.kernel == DENSE_BACKWARD))) is not None:
            expected = DENSE if calls.kernel == DENSE_BACKWARD else DENSE_BACKWARD
            raise ScheduleError(f"rank {calls.rank[at]}: {calls.kernel} {numbers[at]}, which is a call of {expected}")
        return numbers


def _merged(calls: Calls) -> BlockLists:
    """All blocks that each call reads, in ascending order."""
    call = np.concatenate([each.owner for each in calls.operands])
    block = np.concatenate([each.block for each in calls.operands])
    return BlockLists.of_sizes(np.bincount(call, minlength=len(calls)), block[np.lexsort((block, call))])
