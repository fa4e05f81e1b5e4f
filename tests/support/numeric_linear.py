"""Contents of blocks and kernels of `tasp_lab.linear_attention.task` in float64, from the recurrence."""

from __future__ import annotations

import numpy as np

from tasp_lab.arrays import FloatArray
from tasp_lab.linear_attention import task as linear
from tests.support.numeric_executor import CannotExecuteError, Kernel, part_of
from tests.support.numeric_softmax import Inputs
from tests.support.world import KernelCall


class LinearNumbers:
    """Arrays (positions, heads, elements), and states (KV heads, elements x elements), of chunks with their decay."""

    def __init__(self, task: linear.LinearTask, seed: int = 0, inputs: Inputs | None = None) -> None:
        layer, self.task = task.workload, task
        random, size, kv_heads = np.random.default_rng(seed), layer.head_dim, layer.kv_head_count
        shapes = [(layer.sequence, heads, size) for heads in (layer.heads, kv_heads, kv_heads)]
        q, self.k, self.v = inputs or (random.normal(size=shape) for shape in shapes)
        self.decay, self.users = np.array(task.decay), layer.heads // kv_heads
        self.out, state = np.zeros_like(q), np.zeros((kv_heads, size, size))
        for i in range(layer.sequence):
            state = self.decay[:, None, None] * state + np.einsum("hd,he->hde", self.k[i], self.v[i])
            self.out[i] = np.einsum("hd,hde->he", q[i], np.repeat(state, self.users, axis=0))
        self.contents = {
            linear.QUERIES: q,
            linear.KEYS: np.concatenate([self.k, self.v], axis=2),
            linear.RESULTS: self.out,
        }
        self.columns = list(zip(task.tensor.tolist(), task.chunk.tolist(), task.group.tolist(), strict=True))
        self.block = {column: block for block, column in enumerate(self.columns)}

    def where(self, block: int) -> tuple[int, tuple[slice, slice]]:
        tensor, chunk, group = self.columns[block]
        if tensor not in self.contents:
            raise CannotExecuteError(f"block {block} has no positions")
        start = int(self.task.start[chunk])
        width = self.contents[tensor].shape[1] // self.task.head_groups
        return tensor, (slice(start, start + int(self.task.count[chunk])), self._heads(group, width))

    @staticmethod
    def _heads(group: int, width: int) -> slice:
        return slice(group * width, (group + 1) * width)

    def _kv_heads(self, group: int) -> slice:
        return self._heads(group, len(self.decay) // self.task.head_groups)

    def outputs(self, result: FloatArray) -> FloatArray:
        return result

    def content(self, block: int, part: int = -1) -> FloatArray:
        tensor, chunk, group = self.columns[block]
        own = self._kv_heads(group)
        if tensor == linear.CHUNK_STATES:
            total = self.decay[:, None] ** self.task.count[chunk]
            whole = np.concatenate(
                [self._state(chunk, int(self.task.start[chunk] + self.task.count[chunk])), total], axis=1
            )[own]
        elif tensor == linear.PREFIX_STATES:
            return part_of(np.array([self._state(j, int(self.task.start[chunk]))[own] for j in range(chunk)]), part)
        else:
            whole = self.contents[tensor][self.where(block)[1]]
        return whole if part < 0 else part_of(whole[None], part)

    def _state(self, chunk: int, end: int) -> FloatArray:
        """What a chunk adds to the state at position `end`."""
        own = self.task.start[chunk] + np.arange(self.task.count[chunk])
        decays = self.decay ** (end - 1 - own)[:, None]
        return np.einsum("ih,ihd,ihe->hde", decays, self.k[own], self.v[own]).reshape(len(self.decay), -1)

    def kernel(self, call: KernelCall) -> tuple[list[int], Kernel]:
        operands = [[self.columns[block] for block in each] for each in call.operands]
        groups = {group for each in operands for *_, group in each}
        if len(groups) != 1:
            raise CannotExecuteError(f"{call.kernel} of heads of groups {groups}")
        (group,) = groups
        (tensor, chunk), kernel = self._kernel(call, [[each[:2] for each in operand] for operand in operands],
                                               self.decay[self._kv_heads(group)])  # fmt: skip
        if (tensor, chunk, group) not in self.block:
            raise CannotExecuteError(f"{call.kernel} adds to chunk {chunk}")
        return [self.block[tensor, chunk, group]], kernel

    def _kernel(
        self, call: KernelCall, operands: list[list[tuple[int, int]]], decay: FloatArray
    ) -> tuple[tuple[int, int], Kernel]:
        size = self.task.workload.head_dim
        match call.kernel, operands, call.params:
            case "make_state", [[(linear.KEYS, chunk)]], ():

                def make_state(x: list[list[FloatArray]]) -> list[FloatArray]:
                    (k, v), count = np.split(x[0][0], 2, axis=2), len(x[0][0])
                    decays = decay ** np.arange(count - 1, -1, -1)[:, None]
                    state = np.einsum("ih,ihd,ihe->hde", decays, k, v).reshape(len(decay), -1)
                    return [np.concatenate([state, decay[:, None] ** count], axis=1)]

                return (linear.CHUNK_STATES, chunk), make_state
            case "attend", [[(linear.QUERIES, chunk)], [(linear.KEYS, _)]], (distance,):

                def attend(x: list[list[FloatArray]]) -> list[FloatArray]:
                    q, (k, v) = x[0][0], np.split(np.repeat(x[1][0], self.users, axis=1), 2, axis=2)
                    gap = distance + np.arange(len(q))[:, None] - np.arange(len(k))
                    decays = np.repeat(decay, self.users)[:, None, None] ** np.maximum(gap, 0) * (gap >= 0)
                    return [np.einsum("ihd,jhd,hij,jhe->ihe", q, k, decays, v)]

                return (linear.RESULTS, chunk), attend
            case "fold", [[_, *_] as states], (chunk,) if all(tensor == linear.CHUNK_STATES for tensor, _ in states):

                def fold(x: list[list[FloatArray]]) -> list[FloatArray]:
                    found, behind = np.zeros((len(decay), size * size)), np.ones((len(decay), 1))
                    for each in reversed(x[0]):
                        found, behind = found + behind * each[:, :-1], behind * each[:, -1:]
                    return [found]

                return (linear.PREFIX_STATES, chunk), fold
            case "apply_state", [[(linear.QUERIES, chunk)], [(linear.PREFIX_STATES, _)]], ():

                def apply_state(x: list[list[FloatArray]]) -> list[FloatArray]:
                    states = np.repeat(x[1][0].reshape(-1, size, size), self.users, axis=0)
                    decays = np.repeat(decay, self.users) ** (np.arange(len(x[0][0]))[:, None] + 1)
                    return [np.einsum("ihd,ih,hde->ihe", x[0][0], decays, states)]

                return (linear.RESULTS, chunk), apply_state
        raise CannotExecuteError(f"no kernel {call.kernel} of {operands} with {call.params}")
