"""An attention layer on one rank: its tensors, and the kernels ``attend`` and ``differentiate`` by name.

The layer of a pass has the tensors of the rank's shard, by the tensors of `tasp_lab.attention.task`. Inputs that a
schedule does not bind are copied into the memory at the start. Outputs that it binds are accumulated in float32.

Backward, the inputs of queries are the query, the gradient of its result, the log-sum-exp and *delta*: the inner
product of a row's result and its gradient, the only information about the result that is needed. Kernels expect the
result itself. They receive it for the rank's own queries, else the shortest row with the same delta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from runtime.executor.copies import Copies
from runtime.executor.views import Views
from runtime.kernels.registry import Kernel
from tasp_lab.attention.task import (
    ATTEND,
    KEY_GRADIENTS,
    KEYS,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    TENSORS,
    AttentionTask,
)
from tasp_lab.errors import RunError
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedule.schedule import Schedule

Tensor = torch.Tensor

Inputs = Mapping[int, Sequence[Tensor]]
"""Tensors of a shard, [batch, positions of the shard, heads, ...], of any strides; they are not copied.

`KEYS`: k and v. `QUERIES`: q; backward also the gradient of the result, its log-sum-exp and the result.
"""


class AttentionLayer:
    """One rank's layer in one pass. Use a new instance for each run."""

    def __init__(self, schedule: Schedule, rank: int, kernel: Kernel, scale: float, inputs: Inputs) -> None:
        assert isinstance(schedule.task, AttentionTask), "a schedule of attention has a task"
        self._task, self._rank, self._kernel, self._scale = schedule.task, rank, kernel, scale
        self._count: list[int] = self._task.count.tolist()
        own = np.flatnonzero(self._task.owner == rank)
        first = np.searchsorted(self._task.layout.positions(rank), self._task.start[own])
        self._first: dict[int, int] = dict(zip(own.tolist(), first.tolist(), strict=True))
        self._inputs = inputs
        bound = {kind.name for kind in schedule.blocks.kinds if kind.bound}
        outputs = (QUERY_GRADIENTS, KEY_GRADIENTS) if self._task.is_backward else (RESULTS,)
        self._sums = {each: self._empty(each, torch.float32) for each in outputs if TENSORS[each] in bound}

    def load(self, copies: Copies) -> None:
        """Copy the inputs that are in the memory of a run into it."""
        for blocks in self._runs(copies, (KEYS, QUERIES)):
            copies.store(blocks, self._rows(self._on_the_wire(int(self._task.tensor[blocks[0]])), blocks))

    def output(self, copies: Copies, tensor: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """An output of the shard after a run, in a dtype: (out, lse) of results, whose lse is float32, or gradients."""
        if tensor in self._sums:
            found = self._sums[tensor]
        else:
            found = self._empty(tensor, dtype)
            for blocks in self._runs(copies, (tensor,)):
                for place, values in zip(self._rows(found, blocks), copies.resident(blocks), strict=True):
                    place.copy_(values)
        return (found[0].to(dtype), found[1]) if tensor == RESULTS else [each.to(dtype) for each in found]

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        """Make a kernel call; returns the parts of the results or gradients of its operands."""
        if row.kernel != self._task.kernel:
            raise RunError(f"step {row.step}: unknown kernel {row.kernel!r}, expected {self._task.kernel!r}")
        queries, keys = ([each.transpose(0, 1) for each in operand] for operand in operands)
        low, high = row.params
        outputs: Sequence[Sequence[Tensor]]
        if row.kernel == ATTEND:
            (q,), (k, v) = queries, keys
            outputs = [self._kernel.attend(q, k, v, scale=self._scale, low=low, high=high)]
        else:
            (q, dout, lse, out), (k, v) = queries, keys
            if row.operands[0].offset != OUTSIDE:
                out = stand_in_for_out(dout, out)
            found = self._kernel.backward(dout, q, k, v, out, lse, scale=self._scale, low=low, high=high)
            outputs = [(found.q,), (found.k, found.v)]
        parts: dict[int, Views] = {}
        for operand, tensors in zip(row.operands, outputs, strict=False):
            counts = [self._count[block] for block in operand.blocks]
            pieces = zip(*(torch.split(each.transpose(0, 1), counts) for each in tensors), strict=True)
            parts |= zip(self._task.output_of[list(operand.blocks)].tolist(), pieces, strict=True)
        return [parts[place.block] for place in row.adds]

    def bound(self, blocks: Sequence[int]) -> Views:
        """Inputs or outputs of own blocks, which are adjacent in the shard."""
        tensor = int(self._task.tensor[blocks[0]])
        return self._rows(self._sums[tensor] if tensor in self._sums else self._inputs[tensor], blocks)

    def sent(self, block: int) -> Views:
        """As `bound`, of a block that is sent: queries with delta in place of the result."""
        tensor = int(self._task.tensor[block])
        return self._rows(self._sums[tensor] if tensor in self._sums else self._on_the_wire(tensor), [block])

    def _on_the_wire(self, tensor: int) -> Sequence[Tensor]:
        if tensor == QUERIES and self._task.is_backward:
            return (*self._inputs[tensor][:3], self._delta)
        return self._inputs[tensor]

    @cached_property
    def _delta(self) -> Tensor:
        _, dout, _, out = self._inputs[QUERIES]
        return (dout.float() * out.float()).sum(-1)

    def _empty(self, tensor: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Tensors of the shard for an output; log-sum-exps are float32."""
        layer, positions = self._task.workload, self._task.layout.length(self._rank)
        heads = layer.kv_head_count if tensor == KEY_GRADIENTS else layer.heads
        device = self._inputs[QUERIES][0].device
        return [
            torch.empty(
                layer.batch, positions, heads, *field.shape[2:],
                dtype=torch.float32 if field.name == "lse" else dtype, device=device,
            )
            for field in self._task.fields_of(tensor)
        ]  # fmt: skip

    def _rows(self, tensors: Sequence[Tensor], blocks: Sequence[int]) -> Views:
        """The rows and heads of own blocks that are adjacent in the shard, [positions, batch, heads, ...] each."""
        first = self._first[blocks[0]]
        end = self._first[blocks[-1]] + self._count[blocks[-1]]
        assert end - first == sum(self._count[block] for block in blocks), "operands are adjacent in the shard"
        heads = slice(*self._task.heads_of(blocks[0]))
        return [each[:, first:end, heads].transpose(0, 1) for each in tensors]

    def _runs(self, copies: Copies, tensors: Sequence[int]) -> Iterator[list[int]]:
        """The own blocks of these tensors in the memory, in runs that are adjacent there and in the shard."""
        task, places = self._task, copies.part.resident
        own = [block for block in places if block in self._first and task.tensor[block] in tensors]
        own.sort(key=places.__getitem__)
        run = own[:1]
        for before, block in pairwise(own):
            adjacent = places[before] + int(task.block_bytes[before]) == places[block]
            same = task.tensor[before] == task.tensor[block] and task.heads_of(before) == task.heads_of(block)
            if not (adjacent and same and self._first[before] + self._count[before] == self._first[block]):
                yield run
                run = []
            run.append(block)
        if run:
            yield run


def stand_in_for_out(dout: Tensor, delta: Tensor) -> Tensor:
    """The shortest rows whose inner products with the rows of dout are delta, in the dtype of dout.

    They are no longer than the actual result, so rounding is no worse. dout is [batch, positions, heads, head_dim],
    delta [batch, positions, heads].

    >>> stand_in_for_out(torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), torch.tensor([[[50.0]]])).flatten().tolist()
    [6.0, 8.0]
    """
    rows = dout.float()
    largest = rows.abs().amax(-1, keepdim=True)  # avoids underflow of the squares in float32
    unit = rows / largest.masked_fill(largest == 0, 1)
    lengths = unit.square().sum(-1, keepdim=True) * largest
    return (unit * (delta[..., None] / lengths.masked_fill(lengths == 0, 1))).to(dout.dtype)
