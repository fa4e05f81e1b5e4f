"""The numbers of a world: of its task, of stacked tasks, or of plain sums."""

from __future__ import annotations

from itertools import chain

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.schedule.calls import Task
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.hybrid.relayout import RelayoutTask
from tasp_lab.schedules.linear import task as linear
from tests.support.numeric_executor import CannotExecuteError, Kernel, Numbers, Sums, part_of
from tests.support.numeric_linear import LinearNumbers
from tests.support.numeric_softmax import Inputs, SoftmaxNumbers
from tests.support.world import KernelCall, World

assert (linear.KEYS, linear.QUERIES, linear.RESULTS) == (KEYS, QUERIES, RESULTS), "stacks name tensors of both alike"


def numbers_of(world: World) -> Numbers:
    """The numbers of a world's task; sums of random vectors if it computes nothing."""
    if isinstance(world.task, StackedTask):
        return StackedNumbers(world.task)
    if isinstance(world.task, RelayoutTask):
        return SumNumbers(world.blocks.parts.tolist())
    return _layer_numbers(world.task) if world.task is not None else SumNumbers(world.blocks.parts.tolist())


def _layer_numbers(
    task: Task, seed: int = 0, inputs: Inputs | None = None, dout: FloatArray | None = None
) -> SoftmaxNumbers | LinearNumbers:
    if isinstance(task, AttentionTask):
        return SoftmaxNumbers(task, seed, inputs, dout)
    assert isinstance(task, linear.LinearTask), "there is no other layer"
    return LinearNumbers(task, seed, inputs, dout)


HIDDEN = -1
"""The tensor of a re-layout."""


class RelayoutNumbers(Sums):
    """Hidden states, or their gradients, an array (positions, heads, elements)."""

    def __init__(self, task: RelayoutTask, hidden: FloatArray) -> None:
        self.task, self.out = task, hidden
        self.gradients = (hidden,)
        self.contents = {HIDDEN: hidden}

    def where(self, block: int) -> tuple[int, tuple[IntArray, slice]]:
        return HIDDEN, (self.task.positions(block), slice(None))

    def outputs(self, result: FloatArray) -> FloatArray:
        return result

    def content(self, block: int, part: int = -1) -> FloatArray:
        whole: FloatArray = self.out[self.task.positions(block)]
        return whole if part < 0 else part_of(whole[None], part)

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        raise CannotExecuteError("a re-layout has no kernels")


class SumNumbers(Sums):
    """Every part is a random vector, every block the sum of its parts."""

    def __init__(self, parts: list[int]) -> None:
        random = np.random.default_rng(0)
        self.parts = [random.normal(size=(each, 2)) for each in parts]

    def content(self, block: int, part: int = -1) -> FloatArray:
        return part_of(self.parts[block], part)

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        raise CannotExecuteError("there are no kernels")


class StackedNumbers:
    """Passes of layers. Inputs of one follow from the outputs of the layer before; backward, by the chain rule.

    Without forward passes in the stack, the inputs of the layers are those of forward passes elsewhere.
    """

    def __init__(self, task: StackedTask) -> None:
        self.task, self.first = task, task.first_block.tolist()
        self.forward = [each.passing for each in task.layers].count("forward")
        self.layers: list[SoftmaxNumbers | LinearNumbers | RelayoutNumbers] = [_layer_numbers(task.layers[0])]
        layer = self.layers[0].task.workload
        self.size, self.value_size = layer.head_dim, layer.value_size
        size = max(self.size, self.value_size)  # matrices between narrower vectors are their first rows and columns
        self.matrices = np.random.default_rng(1).normal(size=(len(task.layers), 3, size, size)) / size
        for number, own in list(enumerate(task.layers))[1:]:
            self.layers.append(self._behind(number, own))

    def _behind(self, number: int, own: Task) -> SoftmaxNumbers | LinearNumbers | RelayoutNumbers:
        """The numbers of a layer behind others."""
        if not len(self.task.dense.flops):
            return _layer_numbers(own, number)
        if isinstance(own, RelayoutTask):
            gradient = self._gradient(number) if own.is_backward else None
            return RelayoutNumbers(own, self._hidden(number, self.layers[-1].out) if gradient is None else gradient)
        if own.passing == "forward":
            return _layer_numbers(own, number, self._inputs(number, self.layers[-1].out))
        inputs = self._softmax(self._forward_of(number)).inputs if self.forward else None
        return _layer_numbers(own, number, inputs, self._gradient(number))

    def _forward_of(self, number: int) -> int:
        return 2 * self.forward - 1 - number

    def _softmax(self, number: int) -> SoftmaxNumbers:
        found = self.layers[number]
        assert isinstance(found, SoftmaxNumbers), "there are no other passes of a training step"
        return found

    def _inputs(self, layer: int, out: FloatArray) -> Inputs:
        """Queries of all heads, keys and values of the first ones."""
        task = self.task.layers[layer]
        assert isinstance(task, AttentionTask | linear.LinearTask), "there is no other layer"
        bounded, widths = self._bounded(layer - 1, out), (self.size, self.size, self.value_size)
        matrices = zip(self.matrices[layer], widths, strict=True)
        q, k, v = (bounded @ matrix[: bounded.shape[2], :width] for matrix, width in matrices)
        return q, k[:, : task.workload.kv_head_count], v[:, : task.workload.kv_head_count]

    def _hidden(self, layer: int, out: FloatArray) -> FloatArray:
        """What moves in a re-layout."""
        bounded = self._bounded(layer - 1, out)
        found: FloatArray = bounded @ self.matrices[layer][0][: bounded.shape[2], : self.size]
        return found

    def _bounded(self, layer: int, out: FloatArray) -> FloatArray:
        """What a layer yields; of linear attention bounded, as it does not normalise and scores could overflow."""
        return np.tanh(out) if isinstance(self.layers[layer], LinearNumbers) else out

    def _gradient(self, number: int, gradients: tuple[FloatArray, ...] | None = None) -> FloatArray | None:
        """The gradient of the results of backward pass `number`; None if it is the first one and the gradient is drawn.

        It follows from the `gradients` of the inputs of the layer computed before, by default those that are right.
        """
        if number == max(self.forward, 0):
            return None
        matrices = self.matrices[self._forward_of(number - 1) if self.forward else number]
        width = self.size if isinstance(self.task.layers[number], RelayoutTask) else self.value_size
        found = np.zeros((*self.layers[0].out.shape[:2], width))
        for gradient, matrix in zip(gradients or self.layers[number - 1].gradients, matrices, strict=False):
            found[:, : gradient.shape[1]] += gradient @ matrix[:width, : gradient.shape[2]].T
        return found

    def _layer(self, block: int) -> tuple[int, int]:
        """The layer of a block, and its number there."""
        layer = sum(block >= first for first in self.first[1:-1])
        return layer, block - self.first[layer]

    def content(self, block: int, part: int = -1) -> FloatArray:
        layer, own = self._layer(block)
        return self.layers[layer].content(own, part)

    def joined(self, block: int, how: str, first: FloatArray, second: FloatArray) -> FloatArray:
        layer, own = self._layer(block)
        return self.layers[layer].joined(own, how, first, second)

    def may_be_saved(self, block: int) -> bool:
        layer, own = self._layer(block)
        return self.layers[layer].may_be_saved(own)

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
        """The inputs of a layer; gates do not depend on what the layer before yields."""
        before, own = self.layers[number - 1], self.layers[number]
        out = before.outputs(self._read(read, number - 1, HIDDEN if HIDDEN in before.contents else RESULTS))
        if isinstance(own, RelayoutNumbers):
            return {HIDDEN: self._hidden(number, out)}
        q, k, v = self._inputs(number, out)
        gates = {linear.GATES: own.contents[linear.GATES]} if isinstance(own, LinearNumbers) else {}
        return {QUERIES: q, KEYS: np.concatenate([k, v], axis=2), **gates}

    def _gradients(self, number: int, read: dict[tuple[int, int], FloatArray]) -> tuple[FloatArray, ...]:
        """The gradients of the inputs of a layer."""
        if HIDDEN in self.layers[number].contents:
            return (self._read(read, number, HIDDEN),)
        dk, dv = np.split(self._read(read, number, KEY_GRADIENTS), [self.size], axis=2)
        return self._read(read, number, QUERY_GRADIENTS), dk, dv

    def _backward_inputs(self, number: int, read: dict[tuple[int, int], FloatArray]) -> dict[int, FloatArray]:
        """The inputs of the gradients; and the keys, unless they are there from the start."""
        dout = self._gradient(number, self._gradients(number - 1, read)) if number > self.forward else None
        found = self.layers[number]
        if isinstance(found, RelayoutNumbers):
            assert dout is not None, "a stack begins with a layer"
            return {HIDDEN: dout}
        if isinstance(found, LinearNumbers):
            assert not self.forward, "there are no other training steps"
            return {QUERIES: np.concatenate([found.q, found.dout if dout is None else dout], axis=2)}
        own = found
        dout = own.dout if dout is None else dout
        if not self.forward:
            return {QUERIES: own.record(own.inputs[0], own.contents[RESULTS], dout)}
        q, keys, results = (self._read(read, self._forward_of(number), each) for each in (QUERIES, KEYS, RESULTS))
        return {QUERIES: own.record(q, results, dout), KEYS: keys}
