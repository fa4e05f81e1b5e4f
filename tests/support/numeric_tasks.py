"""The numbers of a world: of its task, of stacked tasks, or of plain sums."""

from __future__ import annotations

from itertools import chain

import numpy as np

from tasp_lab.arrays import FloatArray
from tasp_lab.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
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
    """Passes of layers. Inputs of one are linear in the outputs of the layer before; backward, by the chain rule.

    Without forward passes in the stack, the inputs of the layers are those of forward passes elsewhere.
    """

    def __init__(self, task: StackedTask) -> None:
        self.task, self.first = task, task.first_block.tolist()
        self.forward = [each.passing for each in task.layers].count("forward")
        self.layers = [_layer_numbers(task.layers[0])]
        size = self.layers[0].out.shape[2]
        self.matrices = np.random.default_rng(1).normal(size=(len(task.layers), 3, size, size)) / size
        for number, own in list(enumerate(task.layers))[1:]:
            if not len(task.dense.flops):
                self.layers.append(_layer_numbers(own, number))
            elif own.passing == "forward":
                self.layers.append(_layer_numbers(own, number, self._inputs(number, self.layers[-1].out)))
            else:
                assert isinstance(own, AttentionTask), "there is no other backward pass"
                inputs = self._softmax(self._forward_of(number)).inputs if self.forward else None
                self.layers.append(SoftmaxNumbers(own, number, inputs, self._gradient(number)))

    def _forward_of(self, number: int) -> int:
        return 2 * self.forward - 1 - number

    def _softmax(self, number: int) -> SoftmaxNumbers:
        found = self.layers[number]
        assert isinstance(found, SoftmaxNumbers), "there is no other backward pass"
        return found

    def _inputs(self, layer: int, out: FloatArray) -> Inputs:
        """Queries of all heads, keys and values of the first ones."""
        task = self.task.layers[layer]
        assert isinstance(task, AttentionTask | linear.LinearTask), "there is no other layer"
        q, k, v = (out @ matrix for matrix in self.matrices[layer])
        return q, k[:, : task.workload.kv_head_count], v[:, : task.workload.kv_head_count]

    def _gradient(self, number: int, gradients: Inputs | None = None) -> FloatArray | None:
        """The gradient of the results of backward pass `number`; None if it is the first one and the gradient is drawn.

        It follows from the `gradients` of the inputs of the layer computed before, by default those that are right.
        """
        if number == max(self.forward, 0):
            return None
        matrices = self.matrices[self._forward_of(number - 1) if self.forward else number]
        found = np.zeros_like(self.layers[0].out)
        for gradient, matrix in zip(gradients or self._softmax(number - 1).gradients, matrices, strict=True):
            found[:, : gradient.shape[1]] += gradient @ matrix.T
        return found

    def _layer(self, block: int) -> tuple[int, int]:
        """The layer of a block, and its number there."""
        layer = sum(block >= first for first in self.first[1:-1])
        return layer, block - self.first[layer]

    def content(self, block: int, part: int = -1) -> FloatArray:
        layer, own = self._layer(block)
        return self.layers[layer].content(own, part)

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        if call.kernel in ("dense", "dense_backward"):
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
        """From what there is of other layers, at its positions, to inputs of a layer."""
        dense = self.task.dense
        if len(call.params) != 1 or not 0 <= call.params[0] < len(dense.targets):
            raise CannotExecuteError(f"there is no call {call}")
        targets = [int(block) for block in dense.targets[call.params[0]]]
        number = self._layer(targets[0])[0]
        backward = self.task.layers[number].passing == "backward"
        if (call.kernel == "dense_backward") != backward:
            raise CannotExecuteError(f"{call.kernel} of the other pass")
        sources = [self._layer(block) for each in call.operands for block in each]
        places = [self.layers[layer].where(own) for layer, own in sources]
        if any(layer > number for layer, _ in sources):
            raise CannotExecuteError(f"{call.kernel} reads layers behind")

        def compute(operands: list[list[FloatArray]]) -> list[FloatArray]:
            read: dict[tuple[int, int], FloatArray] = {}
            for (layer, _), (tensor, index), value in zip(sources, places, chain(*operands), strict=True):
                whole = self.layers[layer].contents[tensor]
                read.setdefault((layer, tensor), np.full_like(whole, np.nan))[index] = value
            inputs = (self._backward_inputs if backward else self._forward_inputs)(number, read)
            found = [self.layers[number].where(self._layer(target)[1]) for target in targets]
            return [inputs[tensor][index] for tensor, index in found]

        return targets, compute

    def _read(self, read: dict[tuple[int, int], FloatArray], layer: int, tensor: int) -> FloatArray:
        """A tensor of a layer as far as it was read, NaN elsewhere."""
        return read.get((layer, tensor), np.full_like(self.layers[layer].contents[tensor], np.nan))

    def _forward_inputs(self, number: int, read: dict[tuple[int, int], FloatArray]) -> dict[int, FloatArray]:
        out = self.layers[number - 1].outputs(self._read(read, number - 1, RESULTS))
        q, k, v = self._inputs(number, out)
        return {QUERIES: q, KEYS: np.concatenate([k, v], axis=2)}

    def _backward_inputs(self, number: int, read: dict[tuple[int, int], FloatArray]) -> dict[int, FloatArray]:
        """The inputs of the gradients; and the keys, unless they are there from the start."""
        own, dout = self._softmax(number), self._softmax(number).dout
        if number > self.forward:
            dk, dv = np.split(self._read(read, number - 1, KEY_GRADIENTS), 2, axis=2)
            dout = self._gradient(number, (self._read(read, number - 1, QUERY_GRADIENTS), dk, dv))  # type: ignore[assignment]
        if not self.forward:
            return {QUERIES: own.record(own.inputs[0], own.contents[RESULTS], dout)}
        q, keys, results = (self._read(read, self._forward_of(number), each) for each in (QUERIES, KEYS, RESULTS))
        return {QUERIES: own.record(q, results, dout), KEYS: keys}
