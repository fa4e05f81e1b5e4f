"""The numbers of a world: of its task, of stacked tasks, or of plain sums."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tasp_lab.arrays import FloatArray
from tasp_lab.attention.task import KEYS, QUERIES, RESULTS, AttentionTask
from tasp_lab.linear_attention import task as linear
from tasp_lab.schedule.calls import Task
from tasp_lab.schedule.stacked_task import StackedTask
from tests.support.linear_worlds import ChunkTask
from tests.support.numeric_chunks import ChunkNumbers
from tests.support.numeric_executor import CannotExecuteError, Kernel, Numbers, part_of
from tests.support.numeric_linear import LinearNumbers
from tests.support.numeric_softmax import Inputs, SoftmaxNumbers
from tests.support.world import KernelCall, World

assert (linear.KEYS, linear.QUERIES, linear.RESULTS) == (KEYS, QUERIES, RESULTS), "stacks name tensors of both alike"


def numbers_of(world: World) -> Numbers:
    """The numbers of a world's task; sums of random vectors if it has none."""
    if isinstance(world.task, ChunkTask):
        return ChunkNumbers(world.task)
    if isinstance(world.task, StackedTask):
        return StackedNumbers(world.task)
    return _layer_numbers(world.task) if world.task is not None else SumNumbers(world.blocks.parts.tolist())


def _layer_numbers(task: Task, seed: int = 0, inputs: Inputs | None = None) -> SoftmaxNumbers | LinearNumbers:
    if isinstance(task, AttentionTask):
        return SoftmaxNumbers(task, seed, inputs)
    assert isinstance(task, linear.LinearTask), "there is no other layer"
    return LinearNumbers(task, seed, inputs)


class SumNumbers:
    """Every part is a random vector, every block the sum of its parts."""

    def __init__(self, parts: list[int]) -> None:
        random = np.random.default_rng(0)
        self.parts = [random.normal(size=(each, 2)) for each in parts]

    def content(self, block: int, part: int = -1) -> FloatArray:
        return part_of(self.parts[block], part)

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        raise CannotExecuteError("there are no kernels")


class StackedNumbers:
    """Several layers. Inputs of one behind ``dense`` calls are linear in the outputs of the layer before."""

    def __init__(self, task: StackedTask) -> None:
        self.task, self.first = task, task.first_block.tolist()
        self.layers = [_layer_numbers(task.layers[0])]
        size = self.layers[0].out.shape[2]
        self.matrices = np.random.default_rng(1).normal(size=(len(task.layers), 3, size, size))
        for layer, (_, after) in enumerate(pairwise(task.layers), start=1):
            inputs = self._inputs(layer, self.layers[-1].out) if len(task.dense.sources) else None
            self.layers.append(_layer_numbers(after, layer, inputs))

    def _inputs(self, layer: int, out: FloatArray) -> Inputs:
        """Queries of all heads, keys and values of the first ones."""
        task = self.task.layers[layer]
        assert isinstance(task, AttentionTask | linear.LinearTask), "there is no other layer"
        q, k, v = (out @ matrix for matrix in self.matrices[layer])
        return q, k[:, : task.workload.kv_head_count], v[:, : task.workload.kv_head_count]

    def _layer(self, block: int) -> tuple[int, int]:
        """The layer of a block, and its number there."""
        layer = sum(block >= first for first in self.first[1:-1])
        return layer, block - self.first[layer]

    def content(self, block: int, part: int = -1) -> FloatArray:
        layer, own = self._layer(block)
        return self.layers[layer].content(own, part)

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        if call.kernel == "dense":
            return self._dense(call)
        own = [[self._layer(block) for block in each] for each in call.operands]
        layers = {layer for each in own for layer, _ in each}
        if len(layers) != 1:
            raise CannotExecuteError(f"{call.kernel} of layers {layers}")
        (layer,) = layers
        operands = tuple(tuple(block for _, block in each) for each in own)
        targets, compute = self.layers[layer].kernel(call._replace(operands=operands))
        return [target + self.first[layer] for target in targets], compute

    def _dense(self, call: KernelCall) -> tuple[list[int], Kernel]:
        """From what there is of the outputs of a layer, at their positions, to inputs of the next one."""
        dense = self.task.dense
        if len(call.operands) != 1 or len(call.params) != 1 or not 0 <= call.params[0] < len(dense.targets):
            raise CannotExecuteError(f"there is no dense call {call}")
        sources = [self._layer(block) for block in call.operands[0]]
        targets = [int(block) for block in dense.targets[call.params[0]]]
        behind = self._layer(targets[0])[0]
        before = self.layers[behind - 1]
        wheres = [before.where(own) if layer == behind - 1 else (-1, ()) for layer, own in sources]
        if any(tensor != RESULTS for tensor, _ in wheres):
            raise CannotExecuteError("dense reads results of the layer before")

        def compute(operands: list[list[FloatArray]]) -> list[FloatArray]:
            out = np.full_like(before.out, np.nan)
            for (_, index), result in zip(wheres, operands[0], strict=True):
                out[index] = before.outputs(result)
            q, k, v = self._inputs(behind, out)
            inputs = {QUERIES: q, KEYS: np.concatenate([k, v], axis=2)}
            found = [self.layers[behind].where(self._layer(target)[1]) for target in targets]
            return [inputs[tensor][index] for tensor, index in found]

        return targets, compute
