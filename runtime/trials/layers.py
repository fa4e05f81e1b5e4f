"""Trials of real attention, softmax and linear: layers on random tensors, equal on all ranks, checked in float64.

Of softmax attention some rows are compared: of the result in a forward pass; in a backward pass of the gradients of
queries and, if the shards of all ranks are available, of the gradients of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from runtime.executor.actions import Progress, no_progress
from runtime.executor.executor import Executor
from runtime.executor.messages import Transport
from runtime.executor.views import DTYPES, store
from runtime.kernels import fused
from runtime.kernels import linear_attention as kernels
from runtime.kernels.linear_registry import choose_linear_kernel
from runtime.kernels.registry import KERNELS, Kernel, choose_kernel
from runtime.sequence_parallel.layer import AttentionLayer
from runtime.sequence_parallel.linear_layer import LinearLayer
from runtime.sequence_parallel.passes import blocks_left, task_of
from runtime.sequence_parallel.sharding import shard, unshard
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.schedules.linear import task as linear
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.packing import Rows, range_segments

Tensor = torch.Tensor

GatherShards = Callable[[Tensor], Sequence[Tensor]]
"""Returns the shards of all ranks from each rank's own; a collective."""

_CHECKED_ROWS = 64
"""Number of rows checked on each rank."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Maximum relative error in norm; larger errors cannot be explained by rounding."""


class Exact(NamedTuple):
    """Exact values, and their size without cancellation of terms, which is the scale of rounding errors."""

    values: Tensor
    size: Tensor


def check_close(rank: int, what: str, found: Tensor, exact: Tensor, size: float, workload: Workload) -> None:
    """Raise `RunError` if tensors differ by more than rounding of numbers of this norm."""
    error = float((found.double() - exact).norm()) / max(size, 1e-9)  # the gradient of a gate of decay 0 has size 0
    if not error <= TOLERANCE[DTYPES[workload.dtype]]:
        raise RunError(f"rank {rank}: {what} differs from single-process attention by {error:.2g}")


class AttentionTrial:
    """A pass of a layer on one rank. Its check raises `RunError`.

    Before a backward pass, the results of the forward pass are computed once without communication.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: str = "cpu",
        progress: Progress = no_progress,
        gather_shards: GatherShards | None = None,
    ) -> None:
        self._schedule, self._rank, self._task = schedule, rank, task_of(schedule, AttentionTask)
        self._workload, self._layout = self._task.workload, self._task.layout
        self._scale, dtype = self._workload.head_dim**-0.5, DTYPES[self._workload.dtype]
        dims = self._workload.head_dim, self._workload.value_size
        kernel = choose_kernel("auto", dtype, torch.device(device), *dims)
        self._gather_shards = gather_shards
        self._positions = self._task.positions_of(QUERIES, rank)
        self._whole = random_layer(self._workload, dtype, device)
        self._heads = self._task.heads_at(QUERIES, rank)
        q, dout = (x[:, torch.from_numpy(self._positions), self._heads] for x in (self._whole[0], self._whole[3]))
        at, heads = torch.from_numpy(self._task.positions_of(KEYS, rank)), self._task.heads_at(KEYS, rank)
        keys = [x[:, at, heads] for x in self._whole[1 : 3 - self._workload.values_in_keys]]
        queries: tuple[Tensor, ...] = (q,)
        if self._task.is_backward:
            self.out, self.lse = _forward_alone(self._task, rank, kernel, self._scale, q, *self._whole[1:3])
            queries = (q, dout, self.lse, self.out)
        self._layer = AttentionLayer(schedule, rank, kernel, self._scale, {QUERIES: queries, KEYS: keys})
        self.executor = Executor(schedule, rank, transport, self._layer, device, progress)
        self._checked = True

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        self._layer.load(self.executor.copies)
        self.executor.copies.load_bytes(blocks_left(self._schedule, self._rank), self._left_by_the_forward_pass)

    @cached_property
    def _left_by_the_forward_pass(self) -> Tensor:
        """The keys and values of other ranks with which the pass starts, as bytes."""
        task, kind = self._task, self._schedule.blocks.kind_of
        found = [self.executor.memory[:0]]
        for block in blocks_left(self._schedule, self._rank):
            data = self.executor.memory.new_empty(int(task.block_bytes[block]))
            places = int(task.start[block]) + task.layout.stride * np.arange(task.count[block])
            at = torch.from_numpy(task.layout.positions_at(places)).to(data.device)
            heads = slice(*task.heads_of(block))
            fields = kind(block).fields
            store(data, fields, [x[:, at, heads].transpose(0, 1) for x in self._whole[1 : 1 + len(fields)]])
            found.append(data)
        return torch.cat(found)

    def check(self) -> None:
        """Compare some rows with a single process."""
        if not self._checked:
            return
        count = len(self._positions)
        rows = torch.linspace(0, count - 1, min(_CHECKED_ROWS, count)).long().tolist()
        positions: list[int] = self._positions[rows].tolist()
        if not self._task.is_backward:
            out, *_ = self._output(RESULTS)
            exact = [row[:, :, self._heads] for row, _ in map(self._exact_row, positions)]
            self._compare("the result", out[:, rows], [Exact(row, row) for row in exact])
            return
        (dq,), (dk, dv) = self._output(QUERY_GRADIENTS), self._output(KEY_GRADIENTS)
        self._compare("dq", dq[:, rows], [self._exact_dq(position) for position in positions])
        if self._gather_shards is None:
            return
        whole = [unshard(self._gather_shards(x), self._layout) for x in (self.out, self.lse)]
        expected = [self._exact_dk_dv(position, *whole) for position in positions]
        self._compare("dk", dk[:, rows], [each[0] for each in expected])
        self._compare("dv", dv[:, rows], [each[1] for each in expected])

    def _output(self, tensor: int) -> Sequence[Tensor]:
        return self._layer.output(self.executor.copies, tensor, DTYPES[self._workload.dtype])

    def _compare(self, what: str, found: Tensor, expected: Sequence[Exact]) -> None:
        """Raise `RunError` if the rows differ by more than rounding."""
        if not expected:
            return
        values, sizes = (torch.cat(list(each), 1) for each in zip(*expected, strict=True))
        check_close(self._rank, what, found, values, float(sizes.norm()), self._workload)

    def _inputs_of(self, position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A query, the keys and values that it attends to, and the gradient of its result."""
        q, k, v, dout = self._whole
        keys, here = torch.from_numpy(self._workload.keys_of(position)), slice(position, position + 1)
        return q[:, here], k[:, keys], v[:, keys], dout[:, here]

    def _exact_row(self, position: int) -> tuple[Tensor, Tensor]:
        """The result of a query and its log-sum-exp."""
        q, k, v, _ = self._inputs_of(position)
        return KERNELS["reference"].attend(q, k, v, scale=self._scale, low=1 - k.shape[1], high=0)

    def _exact_dq(self, position: int) -> Exact:
        q, k, v, dout = self._inputs_of(position)
        return _exact_gradients(dout, q, k, v, *self._exact_row(position), self._scale)[0]

    def _exact_dk_dv(self, position: int, out: Tensor, lse: Tensor) -> tuple[Exact, Exact]:
        """The exact gradients of a key and value, from all queries that attend to it and their results."""
        q, k, v, dout = self._whole
        by = torch.from_numpy(self._workload.queries_of(position))
        here = slice(position, position + 1)
        queries = dout[:, by], q[:, by], k[:, here], v[:, here], out[:, by], lse[:, by]
        return _exact_gradients(*queries, self._scale)[1:]


def random_layer(workload: Workload, dtype: torch.dtype, device: str) -> Sequence[Tensor]:
    """Queries, keys, values and the gradient of the result, equal on all ranks."""
    drawn, shape = torch.Generator().manual_seed(0), (workload.batch, workload.sequence)
    heads, keys, values = (workload.heads, workload.kv_head_count), workload.head_dim, workload.value_size
    rows = (heads[0], keys), (heads[1], keys), (heads[1], values), (heads[0], values)
    q, k, v, dout = (torch.randn(*shape, *each, generator=drawn).to(dtype).to(device) for each in rows)
    return q, k, k[..., :values] if workload.values_in_keys else v, dout


def _exact_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Exact, Exact, Exact]:
    """The gradients of queries and keys without a mask, in float64; out and lse are over all keys."""
    group = q.shape[2] // k.shape[2]
    dout, q, k, v, out, lse = (x.double() for x in (dout, q, k, v, out, lse))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * scale - lse.transpose(1, 2)[..., None]).exp()
    by_weight = torch.einsum("bihd,bjhd->bhij", dout, v)
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    by_score, size = weights * (by_weight - delta) * scale, weights * (by_weight.abs() + delta.abs()) * scale

    def to_queries(weights: Tensor, keys: Tensor) -> Tensor:
        return torch.einsum("bhij,bjhd->bihd", weights, keys)

    def to_keys(weights: Tensor, queries: Tensor) -> Tensor:
        found = torch.einsum("bhij,bihd->bjhd", weights, queries)
        return found.reshape(*found.shape[:2], -1, group, found.shape[3]).sum(3)

    return (
        Exact(to_queries(by_score, k), to_queries(size, k.abs())),
        Exact(to_keys(by_score, q), to_keys(size, q.abs())),
        Exact(to_keys(weights, dout), to_keys(weights, dout.abs())),
    )


def _forward_alone(
    task: AttentionTask, rank: int, kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """A rank's result and lse, from its queries and the keys and values of the whole sequence, run by run."""
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.float32)
    lse = torch.full_like(q[..., 0], -math.inf, dtype=torch.float32)
    stride, positions = task.layout.stride, task.positions_of(QUERIES, rank)
    keys = [run for each in range(task.layout.world_size) for run in _runs(task, KEYS, each)]
    for query in _runs(task, QUERIES, rank):
        first = int(np.searchsorted(positions, query.position))
        parts = ((key, part) for key in keys for part in range_segments([query], [key], task.workload.slices, stride))
        for key, ((of_queries,), (of_keys,), (*_, low, high)) in parts:
            rows = slice(first + of_queries.start, first + of_queries.stop)
            at = key.position + stride * torch.arange(of_keys.start, of_keys.stop)
            partial = kernel.attend(q[:, rows], k[:, at], v[:, at], scale=scale, low=low, high=high)
            fused.merge(out[:, rows], lse[:, rows], *partial)
    return out.to(q.dtype), lse


def _runs(task: AttentionTask, tensor: int, rank: int) -> list[Rows]:
    """The runs of a rank, each of one document and the rows of a tensor of its own."""
    spans = np.array([(span.start, span.count) for span in task.spans_of(tensor)[rank]], dtype=np.int64).reshape(-1, 2)
    _, _, position, count = task.pieces_of(*spans.T)
    return [Rows(first, 0, length) for first, length in zip(position.tolist(), count.tolist(), strict=True)]


# Linear attention: all rows are compared.


DECAY_RATE = 0.1
"""Mean of the negative logarithms of random decays: a state halves in seven positions."""


class LinearTrial:
    """A pass of a layer on one rank. Its check compares all rows with float64 and raises `RunError`.

    Before a backward pass, the states of the forward pass are computed once without communication.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: str = "cpu",
        progress: Progress = no_progress,
    ) -> None:
        task = self._task = task_of(schedule, linear.LinearTask)
        self._schedule, self._rank, self._checked = schedule, rank, True
        q, k, v, dout = random_layer(task.workload, DTYPES[task.workload.dtype], device)
        gates = random_gates(task, k)
        self._whole: Mapping[int, Sequence[Tensor]] = {
            linear.QUERIES: (q, dout) if task.is_backward else (q,),
            linear.KEYS: (k, v),
            linear.GATES: () if gates is None else (gates,),
        }
        inputs = {tensor: [shard(x, task.layout, rank) for x in each] for tensor, each in self._whole.items()}
        chosen = choose_linear_kernel("auto", q.dtype, q.device)
        self._layer = LinearLayer(schedule, rank, inputs, attend=chosen.attend(q.dtype))
        self.executor = Executor(schedule, rank, transport, self._layer, device, progress)

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        gates, task = self._decays(), self._task
        k, v = (x.double().transpose(0, 1) for x in self._whole[linear.KEYS])
        for block in blocks_left(self._schedule, self._rank):
            chunk = int(task.chunk[block])
            before = slice(0, int(task.start[chunk]))
            starts = [each for each in self._starts() if each < before.stop]
            rows = gates if gates is None or len(gates) == 1 else gates[before]
            state = kernels.make_state(k[before], v[before], rows, starts)
            if task.is_full:
                behind = slice(before.stop + int(task.count[chunk]), None)
                state = state + kernels.make_state(k[behind], v[behind])
            piece = state.chunk(task.pieces, dim=1)[int(task.piece[block])]
            self.executor.copies.store([block], (piece[None],))

    def check(self) -> None:
        """Compare the result or all gradients with a single process."""
        if not self._checked or not self._task.layout.length(self._rank):
            return
        names = {
            linear.RESULTS: ("the result",),
            linear.QUERY_GRADIENTS: ("dq",),
            linear.KEY_GRADIENTS: ("dk", "dv"),
            linear.GATE_GRADIENTS: ("dg",),
        }
        exact, sizes = self._exact(absolute=False), self._exact(absolute=True)
        share = self._task.layout.length(self._rank) / self._task.layout.sequence
        for tensor, found in self._layer.outputs.items():
            for name, ours, whole, size in zip(names[tensor], found, exact[tensor], sizes[tensor], strict=False):
                expected = shard(whole, self._task.layout, self._rank)
                check_close(self._rank, name, ours, expected, float(size.norm()) * share**0.5, self._task.workload)

    def _exact(self, absolute: bool) -> Mapping[int, Sequence[Tensor]]:
        """The outputs of the whole sequence, in float64; of absolute values, their size without cancellation of terms.

        That is the scale of rounding errors.
        """
        signed = [x.double() for x in (*self._whole[linear.QUERIES], *self._whole[linear.KEYS])]
        q, *dout, k, v = [x.abs() for x in signed] if absolute else signed
        leaves = [
            x.detach().requires_grad_() for x in (q, k, v, *(each.double() for each in self._whole[linear.GATES]))
        ]
        out = self._attended(leaves[0], leaves[1], leaves[2], self._decays(*leaves[3:]))
        if not self._task.is_backward:
            return {linear.RESULTS: [out.detach()]}
        dq, dk, dv, *dgates = torch.autograd.grad(out, leaves, dout[0])
        return {linear.QUERY_GRADIENTS: [dq], linear.KEY_GRADIENTS: [dk, dv], linear.GATE_GRADIENTS: dgates}

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, decays: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if self._task.is_full:
            return kernels.apply_state(q, kernels.make_state(k, v)).transpose(0, 1)
        return kernels.attend(q, k, v, decays, self._starts()).transpose(0, 1)

    def _starts(self) -> list[int]:
        """Where documents start."""
        found: list[int] = self._task.workload.document_starts.tolist()
        return found

    def _decays(self, *gates: Tensor) -> Tensor | None:
        """The gates of the whole sequence in the shape that kernels take; of the layer unless given."""
        given = gates or self._whole[linear.GATES]
        if given:
            found = given[0].transpose(0, 1)
            return found if found.dim() == 4 else found[..., None]
        if self._task.workload.decay == "none":
            return None
        decays = torch.tensor(self._task.decays, dtype=torch.float64, device=self._whole[linear.KEYS][0].device)
        return decays.log().view(1, 1, -1, 1)


def random_gates(task: linear.LinearTask, k: Tensor) -> Tensor | None:
    """Logarithms of random decays for keys [batch, positions, KV heads, head_dim]; None unless the task has gates."""
    if not task.has_gates:
        return None
    shape = k.shape if task.workload.decay == "channel" else k.shape[:3]
    random = torch.Generator().manual_seed(1)
    return (-2 * DECAY_RATE * torch.rand(shape, generator=random)).to(k.device)
