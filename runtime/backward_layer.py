"""The backward pass of an attention layer on one rank: what stays, what travels in the buffer, gradients that grow.

Keys and values travel as in `runtime.layer`, and their gradients lie in the same order, [positions, 2, batch, kv_heads,
head_dim]. Where queries travel instead, each position has a record: the queries and the gradient of their result,
[batch, heads, head_dim] each, then the log-sum-exp and *delta*, [batch, heads] each in float32; gradients are
[positions, batch, heads, head_dim].

Delta is the product of a row's result with its gradient, all that a backward pass needs of the result. Kernels want the
result itself; they get the shortest row of which the product with the gradient is delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.executor import Executor
from runtime.kernels import Kernel
from runtime.layer import DTYPES, first_positions, keys_and_values, put_keys_home
from tasp_lab.attention_task import AttentionTask
from tasp_lab.rooms import CallRow, RankPart
from tasp_lab.schedule import Schedule
from tasp_lab.workload import Workload

Tensor = torch.Tensor


class Saved(NamedTuple):
    """What a forward pass leaves on a rank: [batch, positions of the shard, heads or kv_heads, head_dim].

    `lse` is [batch, positions, heads]. `left` is what lies in the buffer of a ``reversed`` pass behind the rank's own
    keys and values: those that the forward pass ended with, as bytes; empty else.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    left: Tensor


class BackwardLayer:
    """One rank's layer on its way back. A second run needs a new one."""

    def __init__(self, schedule: Schedule, rank: int, saved: Saved, dout: Tensor, kernel: Kernel, scale: float) -> None:
        assert schedule.task is not None, "a schedule of attention has a task"
        self._task: AttentionTask = schedule.task
        self._workload = schedule.task.workload
        self._saved, self._dout, self._kernel, self._scale = saved, dout, kernel, scale
        self._first = first_positions(schedule.task, rank)
        stays = [saved.q] if schedule.task.travellers == "keys" else [saved.k, saved.v]
        self._gradients = [torch.zeros_like(x, dtype=torch.float32) for x in stays]
        self._gradient_dtype = DTYPES[schedule.task.gradient_dtype or "fp32"]

    def put_home(self, executor: Executor) -> None:
        """Fill a buffer with what travels from here, and its own gradients with 0."""
        saved, workload = self._saved, self._workload
        if self._task.travellers == "keys":
            put_keys_home(executor, workload, saved.k, saved.v)
            own = saved.k.shape[1] * workload.kv_bytes_per_position
            executor.buffer[own : own + saved.left.numel()].copy_(saved.left)
        else:
            delta = (self._dout.float() * saved.out.float()).sum(-1)
            home = executor.buffer[: saved.q.shape[1] * self._task.query_bytes_per_position]
            for place, values in zip(
                query_records(home, workload), (saved.q, self._dout, saved.lse, delta), strict=True
            ):
                place.copy_(values)
        own_gradients(executor).zero_()

    def call(self, row: CallRow, travelling: Tensor) -> list[Sequence[Tensor]]:
        """Make a kernel call on travelling blocks, given as their bytes; returns the part of each one's gradient."""
        blocks, staying = self._task.sides(row.call)
        first, rows = self._first[int(staying[0])], int(self._task.count[staying].sum())
        here = slice(first, first + rows)
        saved, backward = self._saved, self._kernel.backward
        scale, low, high = self._scale, row.call.low, row.call.high
        if self._task.travellers == "keys":
            k, v = keys_and_values(travelling, self._workload)
            dout, q, out, lse = (x[:, here] for x in (self._dout, saved.q, saved.out, saved.lse))
            found = backward(dout, q, k, v, out, lse, scale=scale, low=low, high=high)
            stays, travels = [found.q], [found.k, found.v]
        else:
            q, dout, lse, delta = query_records(_aligned(travelling), self._workload)
            k, v, out = saved.k[:, here], saved.v[:, here], stand_in_for_out(dout, delta)
            found = backward(dout, q, k, v, out, lse, scale=scale, low=low, high=high)
            stays, travels = [found.k, found.v], [found.q]
        for total, values in zip(self._gradients, stays, strict=True):
            total[:, here] += values
        counts = self._task.count[blocks].tolist()
        return list(zip(*(torch.split(x, counts, 1) for x in travels), strict=True))

    def gradient(self, memory: Tensor) -> Sequence[Tensor]:
        """Views of bytes of gradient blocks, [batch, positions, heads, head_dim]: of keys and values, or of queries."""
        workload, values = self._workload, memory.view(self._gradient_dtype)
        if self._task.travellers == "keys":
            rows = values.view(-1, 2, workload.batch, workload.kv_head_count, workload.head_dim)
            return rows[:, 0].transpose(0, 1), rows[:, 1].transpose(0, 1)
        return (values.view(-1, workload.batch, workload.heads, workload.head_dim).transpose(0, 1),)

    def result(self, executor: Executor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, in their shapes and dtype."""
        dtype, home = self._saved.q.dtype, self.gradient(own_gradients(executor))
        first, *others = (x.to(dtype, copy=True) for x in [*self._gradients, *home])  # views would keep the buffer
        if self._task.travellers == "keys":
            return first, others[0], others[1]
        return others[1], first, others[0]


def own_gradients(executor: Executor) -> Tensor:
    """The bytes of a rank's own gradients, which lie side by side."""
    blocks = executor.part.gradients
    sizes = [executor.block(block, offset).numel() for block, offset in blocks.items()]
    first = min(blocks.values(), default=0)
    return executor.buffer[first : first + sum(sizes)]


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
    """The bytes where float32 may lie; gradients of 16 bits and an odd number of values may have shifted them."""
    return memory if memory.storage_offset() % 4 == 0 else memory.clone()


def stand_in_for_out(dout: Tensor, delta: Tensor) -> Tensor:
    """The shortest rows whose products with the rows of dout are delta, in the dtype of dout.

    No longer than any result with these products, so it rounds no worse. dout is [batch, positions, heads, head_dim],
    delta [batch, positions, heads].

    >>> stand_in_for_out(torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), torch.tensor([[[50.0]]])).flatten().tolist()
    [6.0, 8.0]
    """
    rows = dout.float()
    largest = rows.abs().amax(-1, keepdim=True)  # so that no square is too small for float32
    unit = rows / largest.masked_fill(largest == 0, 1)
    lengths = unit.square().sum(-1, keepdim=True) * largest
    return (unit * (delta[..., None] / lengths.masked_fill(lengths == 0, 1))).to(dout.dtype)


def left_behind(forward: RankPart, buffer: Tensor, backward: RankPart, schedule: Schedule) -> Tensor:
    """What a forward pass leaves in a rank's buffer of what the backward pass starts with, in its order, as bytes."""
    assert schedule.task is not None, "a schedule of attention has a task"
    sizes = schedule.block_bytes
    places = {row.block: row.offset for row in forward.receives}
    copies = [block for block in backward.home if schedule.task.owner[block] != backward.rank]
    return torch.cat([buffer[:0], *(buffer[places[block] : places[block] + int(sizes[block])] for block in copies)])
