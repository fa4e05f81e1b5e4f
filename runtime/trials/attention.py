"""Trials of real attention: layers on random tensors, equal on all ranks, compared with a single process.

Some rows are compared in float64: of the result in a forward pass; in a backward pass of the gradients of queries and,
if the shards of all ranks are available, of the gradients of keys and values.
"""

from __future__ import annotations

import bisect
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from runtime.executor.executor import Executor
from runtime.executor.message_io import Progress
from runtime.executor.transports import Transport
from runtime.kernels.registry import KERNELS, Kernel, choose_kernel
from runtime.sequence_parallel.backward import BackwardLayer, Saved
from runtime.sequence_parallel.forward import DTYPES, Layer, keys_and_values, store_keys_and_values
from runtime.sequence_parallel.gradient_sums import Sums
from runtime.sequence_parallel.lse_merge import Accumulator
from runtime.sequence_parallel.sharding import shard, unshard
from tasp_lab.errors import RunError
from tasp_lab.schedule.buffer_layout import CallRow, Sum
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.workload.attention_task import AttentionTask

Tensor = torch.Tensor

GatherShards = Callable[[Tensor], Sequence[Tensor]]
"""Returns the shards of all ranks from each rank's own; a collective."""

_CHECKED_ROWS = 64
"""Number of rows checked on each rank."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Maximum relative error in norm; larger errors cannot be explained by rounding."""


class Exact(NamedTuple):
    """Exact values, and their size without cancellation of terms, which is the scale of rounding errors."""

    values: Tensor
    size: Tensor


class LayerTrial:
    """The base class of the trials of both passes. Checks raise `RunError`."""

    def __init__(self, schedule: Schedule, rank: int, transport: Transport, device: str, progress: Progress) -> None:
        assert schedule.task is not None, "a schedule of attention has a task"
        self.executor = Executor(schedule, rank, transport, self._call, self._join, device, progress)
        self._schedule, self._rank, self._task = schedule, rank, schedule.task
        self._workload = workload = schedule.task.workload
        self._layout = schedule.task.layout
        self._scale = workload.head_dim**-0.5
        dtype = DTYPES[workload.dtype]
        self._kernel: Kernel = choose_kernel("auto", dtype, torch.device(device), workload.head_dim)
        drawn = torch.Generator().manual_seed(0)
        shape = (workload.batch, workload.sequence)
        heads = (workload.heads, workload.kv_head_count, workload.kv_head_count, workload.heads)
        self._whole = [
            torch.randn(*shape, count, workload.head_dim, generator=drawn).to(dtype).to(device) for count in heads
        ]
        self._own = [shard(x, self._layout, rank) for x in self._whole]
        self._checked = True

    @abstractmethod
    def set_up(self, checked: bool) -> None: ...

    @abstractmethod
    def _call(self, row: CallRow) -> None: ...

    @abstractmethod
    def _join(self, each: Sum) -> None: ...

    def compute_alone(self) -> float:
        """Make all kernel calls of the rank on the current content of its memory; returns the time in seconds."""
        device = self.executor.memory.device
        began_s = _now(device)
        for row in self.executor.part.calls:
            self._call(row)
        return _now(device) - began_s

    def _rows(self) -> list[int]:
        """Some rows of the rank's shard."""
        count = self._layout.length(self._rank)
        return torch.linspace(0, count - 1, min(_CHECKED_ROWS, count)).long().tolist()

    def _document(self, position: int) -> tuple[int, int]:
        """Start and end of the document of a position."""
        starts = [*self._workload.document_starts.tolist(), self._workload.sequence]
        number = bisect.bisect_right(starts, position)
        return starts[number - 1], starts[number]

    def _keys_of(self, position: int) -> slice:
        """The unmasked keys of a query."""
        low, high = self._document(position)
        if self._workload.mask == "causal":
            high = position + 1
        return slice(low if self._workload.window is None else max(low, high - self._workload.window), high)

    def _compare(self, what: str, found: Tensor, expected: Sequence[Exact]) -> None:
        """Raise `RunError` if the rows differ by more than rounding."""
        values, sizes = (torch.cat(list(each), 1) for each in zip(*expected, strict=True))
        error, size = float((found.double() - values).square().sum()), float(sizes.square().sum())
        if not error <= _TOLERANCE[DTYPES[self._workload.dtype]] ** 2 * size:
            raise RunError(
                f"rank {self._rank}: {what} differs from single-process attention by {(error / size) ** 0.5:.2g}"
            )


class ForwardTrial(LayerTrial):
    """The forward pass."""

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        q, k, v, _ = self._own
        store_keys_and_values(self.executor, self._workload, k, v)
        self._layer = Layer(self._schedule, self._rank, q, self._kernel, self._scale)

    def _call(self, row: CallRow) -> None:
        self._layer.call(row, self.executor.reads(row))

    def _join(self, each: Sum) -> None:
        raise AssertionError(f"gradient block {each.block} in a forward pass")

    def check(self) -> None:
        if not self._checked or not (rows := self._rows()):
            return
        out, _ = self._layer.result()
        q, k, v, _ = self._whole
        expected = []
        for position in self._layout.positions(self._rank)[rows].tolist():
            keys, here = self._keys_of(position), slice(position, position + 1)
            row = _exact(q[:, here], k[:, keys], v[:, keys], self._scale)[0]
            expected.append(Exact(row, row))
        self._compare("the result", out[:, rows], expected)


class BackwardTrial(LayerTrial):
    """The backward pass, after a forward pass that is computed once without communication."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: str,
        progress: Progress,
        gather_shards: GatherShards | None,
    ) -> None:
        super().__init__(schedule, rank, transport, device, progress)
        self._gather_shards = gather_shards
        q, k, v, self._dout = self._own
        out, lse = _forward_alone(self._task, rank, self._kernel, self._scale, q, *self._whole[1:3])
        self._saved = Saved(q, k, v, out, lse, self._retained())

    def _retained(self) -> Tensor:
        """The keys and values of other ranks that an untrimmed forward pass would have retained, as bytes."""
        task, workload = self._task, self._workload
        copies = [block for block in self.executor.part.resident if task.owner[block] != self._rank]
        positions = [torch.arange(task.count[block]) * task.layout.stride + int(task.start[block]) for block in copies]
        at = torch.cat([torch.zeros(0, dtype=torch.int64), *positions]).to(self._own[0].device)
        retained = self.executor.memory.new_empty(len(at) * workload.kv_bytes_per_position)
        for place, values in zip(keys_and_values(retained, workload), self._whole[1:3], strict=True):
            place.copy_(values[:, at])
        return retained

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        self._layer = BackwardLayer(self._schedule, self._rank, self._saved, self._dout, self._kernel, self._scale)
        self._sums = Sums(self.executor.part, self._gradient)
        self._layer.store_resident(self.executor)

    def _gradient(self, block: int, offset: int) -> Sequence[Tensor]:
        return self._layer.gradient(self.executor.block(block, offset))

    def _call(self, row: CallRow) -> None:
        for place, values in zip(row.adds, self._layer.call(row, self.executor.reads(row)), strict=True):
            self._sums.add(place, values)

    def _join(self, each: Sum) -> None:
        self._sums.join(each)

    def check(self) -> None:
        if not self._checked:
            return
        dq, dk, dv = self._layer.result(self.executor)
        rows = self._rows()
        positions = self._layout.positions(self._rank)[rows].tolist()
        if rows:
            self._compare("dq", dq[:, rows], [self._exact_dq(position) for position in positions])
        if self._gather_shards is None:
            return
        out, lse = (unshard(self._gather_shards(x), self._layout) for x in (self._saved.out, self._saved.lse))
        if rows:
            expected = [self._exact_dk_dv(position, out, lse) for position in positions]
            self._compare("dk", dk[:, rows], [each[0] for each in expected])
            self._compare("dv", dv[:, rows], [each[1] for each in expected])

    def _exact_dq(self, position: int) -> Exact:
        q, k, v, dout = self._whole
        keys, here = self._keys_of(position), slice(position, position + 1)
        out, lse = _exact(q[:, here], k[:, keys], v[:, keys], self._scale)
        return _exact_gradients(dout[:, here], q[:, here], k[:, keys], v[:, keys], out, lse, self._scale)[0]

    def _exact_dk_dv(self, position: int, out: Tensor, lse: Tensor) -> tuple[Exact, Exact]:
        """The exact gradients of a key and value, from all queries that attend to it and their results."""
        q, k, v, dout = self._whole
        low, high = self._document(position)
        if self._workload.mask == "causal":
            low = position
        if self._workload.window is not None:
            high = min(high, position + self._workload.window)
        by, here = slice(low, high), slice(position, position + 1)
        queries = dout[:, by], q[:, by], k[:, here], v[:, here], out[:, by], lse[:, by]
        return _exact_gradients(*queries, self._scale)[1:]


def layer_trial(
    schedule: Schedule,
    rank: int,
    transport: Transport,
    device: str,
    progress: Progress,
    gather_shards: GatherShards | None = None,
) -> ForwardTrial | BackwardTrial:
    """The trial of a schedule, forward or backward."""
    assert schedule.task is not None, "a schedule of attention has a task"
    if schedule.task.is_backward:
        return BackwardTrial(schedule, rank, transport, device, progress, gather_shards)
    return ForwardTrial(schedule, rank, transport, device, progress)


def _exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one query to all of the given keys."""
    return KERNELS["reference"].attend(q, k, v, scale=scale, low=1 - k.shape[1], high=0)


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
    """A rank's result and lse, from its queries and the keys and values of the whole sequence, tile by tile."""
    total = Accumulator(q.shape[0], q.shape[1], q.shape[2], q.shape[3], q.device)
    keys = task.blocks_of("keys")
    first = 0
    for query in task.blocks_of("queries")[task.owner[task.first_query : task.first_gradient] == rank]:
        low, high = (limits[0].tolist() for limits in task.bands(query[None], keys))
        rows = int(task.count[query])
        for key in (each for each in keys.tolist() if low[each] <= high[each]):
            start, stride = int(task.start[key]), task.layout.stride
            at = slice(start, start + (int(task.count[key]) - 1) * stride + 1, stride)
            here = q[:, first : first + rows]
            total.add(first, kernel.attend(here, k[:, at], v[:, at], scale=scale, low=low[key], high=high[key]))
        first += rows
    return total.result(q.dtype)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
