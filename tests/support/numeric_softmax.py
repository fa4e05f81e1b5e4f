"""Contents of blocks and kernels of softmax attention, forward and backward, in float64.

What is right is computed for the whole sequence at once, from the softmax and its derivative. Results are numerators
and denominators of scores that are not shifted, so that their merge is an addition.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import MASKS
from tests.support.numeric_executor import CannotExecuteError, Kernel, Sums, part_of
from tests.support.world import KernelCall

Inputs = tuple[FloatArray, FloatArray, FloatArray]
"""Queries, keys and values of a layer, arrays (positions, heads, elements)."""


class SoftmaxNumbers(Sums):
    """Blocks of an attention layer, arrays (positions, heads, elements); `inputs` and `dout` are drawn unless given."""

    def __init__(
        self, task: AttentionTask, seed: int = 0, inputs: Inputs | None = None, dout: FloatArray | None = None
    ) -> None:
        layer, self.task = task.workload, task
        random = np.random.default_rng(seed)
        of_queries, of_keys = (layer.sequence, layer.heads), (layer.sequence, layer.kv_head_count)
        self.size, values = layer.head_dim, layer.value_size
        shapes = [(*of_queries, self.size), (*of_keys, self.size), (*of_keys, values)]
        q, k, v = inputs or (0.7 * random.normal(size=shape) for shape in shapes)
        dout = random.normal(size=(*of_queries, values)) if dout is None else dout
        self.inputs: Inputs = (q, k, v)
        keys, values = (np.repeat(each, layer.heads // layer.kv_head_count, axis=1) for each in (k, v))
        weights = np.exp(np.einsum("ihd,jhd->hij", q, keys)) * _visible(task)
        denominator = weights.sum(axis=2)
        p = weights / denominator[:, :, None]
        self.out = np.einsum("hij,jhd->ihd", p, values)
        delta = (self.out * dout).sum(axis=2)
        ds = p * (np.einsum("ihd,jhd->hij", dout, values) - delta.T[:, :, None])
        self.dout, self.lse = dout, np.log(denominator).T
        found = [np.einsum("hij,ihd->jhd", x, y) for x, y in ((ds, q), (p, dout))]
        dk, dv = (x.reshape(*of_keys, -1, x.shape[2]).sum(axis=2) for x in found)
        record = [q, dout, self.lse[:, :, None], delta[:, :, None]]
        self.gradients: Inputs = (np.einsum("hij,jhd->ihd", ds, keys), dk, dv)
        self.contents = {
            QUERIES: np.concatenate(record, axis=2) if task.is_backward else q,
            KEYS: np.concatenate([k, v], axis=2),
            RESULTS: np.concatenate([np.einsum("hij,jhd->ihd", weights, values), denominator.T[:, :, None]], axis=2),
            QUERY_GRADIENTS: self.gradients[0],
            KEY_GRADIENTS: np.concatenate([dk, dv], axis=2),
        }
        first, heads = task.first_head, task.heads
        assert first is not None
        assert heads is not None
        self.columns = list(
            zip(*(x.tolist() for x in (task.tensor, task.start, task.count, first, heads)), strict=True)
        )
        self.block = {column: block for block, column in enumerate(self.columns)}

    def where(self, block: int) -> tuple[int, tuple[IntArray, slice]]:
        tensor, start, count, first, heads = self.columns[block]
        layout = self.task.layout
        positions = layout.positions_at(start + layout.stride * np.arange(count))  # blocks are runs of places
        return tensor, (positions, slice(first, first + heads))

    def outputs(self, result: FloatArray) -> FloatArray:
        return result[:, :, :-1] / result[:, :, -1:]

    def record(self, q: FloatArray, result: FloatArray, dout: FloatArray) -> FloatArray:
        """The inputs of the gradients of queries, whole or in part, from their results and the gradient of these."""
        delta = (self.outputs(result) * dout).sum(axis=2, keepdims=True)
        return np.concatenate([q, dout, np.log(result[:, :, -1:]), delta], axis=2)

    def content(self, block: int, part: int = -1) -> FloatArray:
        tensor, index = self.where(block)
        whole: FloatArray = self.contents[tensor][index]
        return whole if part < 0 else part_of(whole[None], part)

    def joined(self, block: int, how: str, first: FloatArray, second: FloatArray) -> FloatArray:
        """Results are merged by their log-sum-exp; added up they are sums of outputs, and of logarithms."""
        if self.where(block)[0] != RESULTS:
            return super().joined(block, how, first, second)
        if how == "merge":
            return first + second
        with np.errstate(invalid="ignore"):  # rows that see no key
            out = self.outputs(first) + self.outputs(second)
        denominator = first[:, :, -1:] * second[:, :, -1:]  # the exponential of the sum of logarithms
        return np.concatenate([out * denominator, denominator], axis=2)

    def may_be_saved(self, block: int) -> bool:
        return self.task.is_backward and self.where(block)[0] == KEYS

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        if call.kernel not in ("attend", "differentiate") or len(call.operands) != 2 or len(call.params) != 2:
            raise CannotExecuteError(f"no kernel {call.kernel} of these operands")
        if (call.kernel == "differentiate") != self.task.is_backward:
            raise CannotExecuteError(f"{call.kernel} in the other pass")
        for blocks, tensor in zip(call.operands, (QUERIES, KEYS), strict=True):
            if not blocks or any(self.columns[block][0] != tensor for block in blocks):
                raise CannotExecuteError(f"{call.kernel} of blocks of the wrong tensor")
            if len({self.columns[block][4] for block in blocks}) > 1:
                raise CannotExecuteError("blocks of different numbers of heads form no tensor")
        queries, keys = call.operands
        cuts = [np.cumsum([self.columns[block][2] for block in each])[:-1].tolist() for each in call.operands]

        seen = self._seen(call)

        def attend(operands: list[list[FloatArray]]) -> list[FloatArray]:
            q, k, v = self._operands(operands)
            weights = np.exp(np.einsum("ihd,jhd->hij", q, k)) * seen
            numerator, denominator = np.einsum("hij,jhd->ihd", weights, v), weights.sum(axis=2).T[:, :, None]
            return np.split(np.concatenate([numerator, denominator], axis=2), cuts[0])

        def differentiate(operands: list[list[FloatArray]]) -> list[FloatArray]:
            record, k, v = self._operands(operands)
            both = self.size + v.shape[2]
            q, dout, lse, delta = np.split(record, [self.size, both, both + 1], axis=2)
            p = np.exp(np.einsum("ihd,jhd->hij", q, k) - lse.transpose(1, 0, 2)) * seen
            ds = p * (np.einsum("ihd,jhd->hij", dout, v) - delta.transpose(1, 0, 2))
            dkv = np.concatenate([np.einsum("hij,ihd->jhd", ds, q), np.einsum("hij,ihd->jhd", p, dout)], axis=2)
            dkv = dkv.reshape(len(dkv), operands[1][0].shape[1], -1, dkv.shape[2]).sum(axis=2)
            return [*np.split(np.einsum("hij,jhd->ihd", ds, k), cuts[0]), *np.split(dkv, cuts[1])]

        if not self.task.is_backward:
            return [self.block[(RESULTS, *self.columns[each][1:])] for each in queries], attend
        gradients = [self.block[(QUERY_GRADIENTS, *self.columns[each][1:])] for each in queries]
        return [*gradients, *(self.block[(KEY_GRADIENTS, *self.columns[each][1:])] for each in keys)], differentiate

    def _operands(self, operands: list[list[FloatArray]]) -> Inputs:
        """Queries, keys and values of all their heads."""
        q, kv = (np.concatenate(each) for each in operands)
        kv = np.repeat(kv, q.shape[1] // kv.shape[1], axis=1)
        k, v = np.split(kv, [self.size], axis=2)
        return q, k, v

    def _seen(self, call: KernelCall) -> FloatArray:
        """What is in the band of a call, and of packed documents also in the mask."""
        layout = self.task.layout
        places = [
            np.concatenate(
                [
                    start + layout.stride * np.arange(count)
                    for _, start, count, *_ in map(self.columns.__getitem__, blocks)
                ]
            )
            for blocks in call.operands
        ]
        distance = np.arange(len(places[0]))[:, None] - np.arange(len(places[1]))
        seen = (call.params[0] <= distance) & (distance <= call.params[1])
        if self.task.is_packed:
            seen &= _visible(self.task)[np.ix_(*map(layout.positions_at, places))] > 0
        return seen.astype(np.float64)


def _visible(task: AttentionTask) -> FloatArray:
    """Which positions see which, from the definition of the mask."""
    layer, position = task.workload, np.arange(task.workload.sequence)
    document = np.repeat(np.arange(len(layer.documents or (0,))), layer.documents or (layer.sequence,))
    ahead = position[:, None] - position
    seen = document[:, None] == document
    if layer.mask == "causal":
        seen &= ahead >= 0
    elif layer.mask != "full":  # one that a test has added
        mask = MASKS[layer.mask]
        assert mask.low is not None
        assert mask.high is not None
        seen &= (mask.low <= ahead) & (ahead <= mask.high)
    return (seen & in_window(layer, ahead)).astype(np.float64)


def in_window(layer: Workload, ahead: Any) -> Any:
    """Whether the window of a layer lets a query see a key that it is so many positions ahead of; also of arrays."""
    n, window = layer.sequence, layer.window
    before, after = (window - 1, n) if isinstance(window, int) else window or (n, n)
    before, after = (n if side is None else side for side in (before, after))
    return (-after <= ahead) & (ahead <= before)
