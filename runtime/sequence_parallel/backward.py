"""The backward pass of an attention layer on one rank: stationary and circulating tensors, and gradient accumulation.

Circulating keys and values have the format of `runtime.sequence_parallel.forward`; their gradients have the same order,
[positions, 2, batch, kv_heads, head_dim]. Circulating queries form one record per position: the query and the gradient
of its result, [batch, heads, head_dim] each, then the log-sum-exp and *delta*, [batch, heads] each in float32; their
gradients are [positions, batch, heads, head_dim].

Delta is the inner product of a row's result and its gradient, and the only information about the result that a
backward pass needs. Kernels expect the result itself, so they receive the shortest row with the same delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.executor.executor import Executor
from runtime.kernels.registry import Kernel
from runtime.sequence_parallel.forward import (
    DTYPES,
    first_positions,
    keys_and_values,
    store_keys_and_values,
)
from tasp_lab.schedule.buffer_layout import CallRow, RankPart
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.attention_task import AttentionTask
from tasp_lab.workload.layer import Workload

Tensor = torch.Tensor


class Saved(NamedTuple):
    """Tensors that the forward pass saves on a rank: [batch, positions of the shard, heads or kv_heads, head_dim].

    `lse` is [batch, positions, heads]. `retained` holds, as bytes, the other ranks' keys and values with which a
    ``rotate-kv-back`` pass starts, as the forward pass left them; it is empty for other dataflows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    retained: Tensor


class BackwardLayer:
    """One rank's layer in the backward pass. Use a new instance for each run."""

    def __init__(self, schedule: Schedule, rank: int, saved: Saved, dout: Tensor, kernel: Kernel, scale: float) -> None:
        assert schedule.task is not None, "a schedule of attention has a task"
        self._task: AttentionTask = schedule.task
        self._workload = schedule.task.workload
        self._saved, self._dout, self._kernel, self._scale = saved, dout, kernel, scale
        self._first = first_positions(schedule.task, rank)
        stationary = [saved.q] if schedule.task.circulating_side == "keys" else [saved.k, saved.v]
        self._gradients = [torch.zeros_like(x, dtype=torch.float32) for x in stationary]
        self._gradient_dtype = DTYPES[schedule.task.gradient_dtype or "fp32"]

    def store_resident(self, executor: Executor) -> None:
        """Copy the rank's circulating tensors into the memory, and set its own gradients to 0."""
        saved, workload = self._saved, self._workload
        if self._task.circulating_side == "keys":
            store_keys_and_values(executor, workload, saved.k, saved.v)
            own = saved.k.shape[1] * workload.kv_bytes_per_position
            executor.memory[own : own + saved.retained.numel()].copy_(saved.retained)
        else:
            delta = (self._dout.float() * saved.out.float()).sum(-1)
            resident = executor.memory[: saved.q.shape[1] * self._task.query_bytes_per_position]
            for place, values in zip(
                query_records(resident, workload), (saved.q, self._dout, saved.lse, delta), strict=True
            ):
                place.copy_(values)
        own_gradients(executor).zero_()

    def call(self, row: CallRow, circulating: Tensor) -> list[Sequence[Tensor]]:
        """Make a kernel call on circulating blocks, given as bytes; returns its contributions to their gradients."""
        blocks, stationary = self._task.sides(row.call)
        first, rows = self._first[int(stationary[0])], int(self._task.count[stationary].sum())
        here = slice(first, first + rows)
        saved, backward = self._saved, self._kernel.backward
        scale, low, high = self._scale, row.call.low, row.call.high
        if self._task.circulating_side == "keys":
            k, v = keys_and_values(circulating, self._workload)
            dout, q, out, lse = (x[:, here] for x in (self._dout, saved.q, saved.out, saved.lse))
            found = backward(dout, q, k, v, out, lse, scale=scale, low=low, high=high)
            stationary_gradients, circulating_gradients = [found.q], [found.k, found.v]
        else:
            q, dout, lse, delta = query_records(_aligned(circulating), self._workload)
            k, v, out = saved.k[:, here], saved.v[:, here], stand_in_for_out(dout, delta)
            found = backward(dout, q, k, v, out, lse, scale=scale, low=low, high=high)
            stationary_gradients, circulating_gradients = [found.k, found.v], [found.q]
        for total, values in zip(self._gradients, stationary_gradients, strict=True):
            total[:, here] += values
        counts = self._task.count[blocks].tolist()
        return list(zip(*(torch.split(x, counts, 1) for x in circulating_gradients), strict=True))

    def gradient(self, memory: Tensor) -> Sequence[Tensor]:
        """Views of bytes of gradient blocks, [batch, positions, heads, head_dim]: of keys and values, or of queries."""
        workload, values = self._workload, memory.view(self._gradient_dtype)
        if self._task.circulating_side == "keys":
            rows = values.view(-1, 2, workload.batch, workload.kv_head_count, workload.head_dim)
            return rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)
        return (values.view(-1, workload.batch, workload.heads, workload.head_dim).transpose(0, 1),)

    def result(self, executor: Executor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, in their shapes and dtype."""
        dtype, resident = self._saved.q.dtype, self.gradient(own_gradients(executor))
        first, *others = (x.to(dtype, copy=True) for x in [*self._gradients, *resident])  # views would keep the memory
        if self._task.circulating_side == "keys":
            return first, others[0], others[1]
        return others[1], first, others[0]


def own_gradients(executor: Executor) -> Tensor:
    """The bytes of a rank's own gradients, which are contiguous."""
    blocks = executor.part.gradients
    sizes = [executor.block(block, offset).numel() for block, offset in blocks.items()]
    first = min(blocks.values(), default=0)
    return executor.memory[first : first + sum(sizes)]


def query_records(memory: Tensor, workload: Workload) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of bytes as q and dout, [batch, positions, heads, head_dim], lse and delta, [batch, positions, heads]."""
    rows = memory.view(-1, 2 * workload.query_bytes_per_position + 8 * workload.batch * workload.heads)
    ends = [0, *(workload.query_bytes_per_position * count for count in (1, 2))]
    ends += [ends[-1] + 4 * workload.batch * workload.heads, rows.shape[1]]
    dtypes = [DTYPES[workload.dtype]] * 2 + [torch.float32] * 2
    shapes = [(workload.batch, workload.heads, workload.head_dim)] * 2 + [(workload.batch, workload.heads)] * 2
    q, dout, lse, delta = (
        rows[:, first:end].view(dtype).view(len(rows), *shape).transpose(0, 1)
        for first, end, dtype, shape in zip(ends, ends[1:], dtypes, shapes, strict=False)
    )
    return q, dout, lse, delta


def _aligned(memory: Tensor) -> Tensor:
    """The bytes, aligned for float32; an odd number of 16-bit gradients before them may have broken the alignment."""
    return memory if memory.storage_offset() % 4 == 0 else memory.clone()


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


def retained_blocks(forward: RankPart, memory: Tensor, backward: RankPart, schedule: Schedule) -> Tensor:
    """The other ranks' blocks with which the backward pass starts, in its order, as bytes of the forward memory."""
    assert schedule.task is not None, "a schedule of attention has a task"
    sizes = schedule.block_bytes
    places = {row.block: row.offset for row in forward.receives}
    copies = [block for block in backward.resident if schedule.task.owner[block] != backward.rank]
    return torch.cat([memory[:0], *(memory[places[block] : places[block] + int(sizes[block])] for block in copies)])
