"""An attention layer on one rank: its tensors, and the kernels ``attend`` and ``differentiate`` by name.

The layer of a pass has the tensors of the rank's shard, by the tensors of `tasp_lab.schedules.attention.task`. Inputs
that a schedule does not bind are copied into the memory at the start. Outputs that it binds are accumulated in float32.

Backward, the inputs of queries are the query, the gradient of its result, the log-sum-exp and *delta*: the inner
product of a row's result and its gradient, the only information about the result that is needed. Kernels expect the
result itself. They receive it for the rank's own queries, else the shortest row with the same delta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch

from runtime.executor.copies import Copies, Work
from runtime.executor.sums import Parts
from runtime.executor.views import Views
from runtime.kernels import fused
from runtime.kernels.packed import PackedCall, attend_packed, gradients_packed
from runtime.kernels.partials import Partial, Rows, lse_for_gradients
from runtime.kernels.registry import Kernel
from runtime.sequence_parallel.passes import AttentionPasses, task_of
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import CallRow, RankPart
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import (
    ATTEND,
    KEY_GRADIENTS,
    KEYS,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    SCALE,
    TENSORS,
    AttentionTask,
)

Tensor = torch.Tensor

Inputs = Mapping[int, Sequence[Tensor]]
"""Tensors of a shard, [batch, its positions of that tensor, heads, ...], of any strides; they are not copied.

`KEYS`: k and v, or k alone where values are a part of it. `QUERIES`: q; backward also the gradient of the result, its
log-sum-exp and the result.
"""


class AttentionLayer(Work):
    """One rank's layer in one pass. Use a new instance for each run.

    `packed` is the task of the schedule with the documents of this call, if the schedule is that of any documents. Rows
    of a shard are in the order of positions, those of blocks in the order of places. A schedule with padded heads has
    more heads than the inputs, see `tasp_lab.schedules.attention.heads.padded`.
    """

    def __init__(
        self, schedule: Schedule, rank: int, kernel: Kernel, scale: float, inputs: Inputs,
        packed: AttentionTask | None = None,
    ) -> None:  # fmt: skip
        self._task, self._rank = packed or task_of(schedule, AttentionTask), rank
        self._kernel, self._scale = kernel, scale
        layer, (kv_heads, heads) = self._task.workload, (inputs[each][0].shape[2] for each in (KEYS, QUERIES))
        self._padded = layer.kv_head_count, layer.heads // layer.kv_head_count
        self._own = self._padded if layer.decode else (kv_heads, heads // kv_heads)
        if self._own != self._padded:
            inputs = {tensor: [self._with_padding(tensor, x) for x in each] for tensor, each in inputs.items()}
        self._packing = _packing_of(self._task, inputs[QUERIES][0].device) if self._task.is_packed else None
        if self._packing is not None:
            inputs = {tensor: self._packing.by_place(tensor, rank, each) for tensor, each in inputs.items()}
        self._shard = shard = _shard_of(schedule, rank)
        self._tensor, self._count, self._first, self._heads = shard.tensor, shard.count, shard.first, shard.heads
        if self._task.is_backward:
            q, dout, lse, out = inputs[QUERIES]
            inputs = {**inputs, QUERIES: (q, dout, lse_for_gradients(lse), out)}
        self._inputs = inputs
        self._bound: dict[tuple[int, ...], Views] = {}
        self._sums = {tensor: self._empty(tensor, torch.float32) for tensor in shard.bound}

    _attended: Partial
    """What a rank computes with its keys for all heads, of a decode layer whose results are scaled."""

    def load(self, copies: Copies) -> None:
        """Copy the inputs that are in the memory of a run into it, and make what is sent in place of others."""
        for blocks in _together(self._shard, copies.part, (KEYS, QUERIES)):
            copies.load(blocks, self._rows(self._on_the_wire(self._tensor[blocks[0]]), blocks))
        if _sends(self._shard, copies.part, QUERIES):
            self._on_the_wire(QUERIES)  # here, since several streams may send

    def output(self, copies: Copies, tensor: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """An output of the shard after a run, in a dtype: (out, lse) of results, whose lse is float32, or gradients.

        Results that were scaled have no lse.
        """
        if tensor in self._sums:
            found = self._sums[tensor]
        else:
            found = self._empty(tensor, dtype)
            for blocks in _together(self._shard, copies.part, (tensor,)):
                copies.read(blocks, self._rows(found, blocks))
        if self._packing is not None:
            found = self._packing.by_position(tensor, self._rank, found)
        if self._own != self._padded:
            found = [self._without_padding(tensor, x) for x in found]
        return (found[0].to(dtype), *found[1:]) if tensor == RESULTS else [each.to(dtype) for each in found]

    def _with_padding(self, tensor: int, x: Tensor) -> Tensor:
        """A tensor of the shard with zeros for the heads that the schedule has beside its own."""
        own, padded = ((kv, 1 if tensor == KEYS else heads) for kv, heads in (self._own, self._padded))
        found = x.new_zeros(*x.shape[:2], *padded, *x.shape[3:])
        found[:, :, : own[0], : own[1]] = x.reshape(*x.shape[:2], *own, *x.shape[3:])
        return found.flatten(2, 3)

    def _without_padding(self, tensor: int, x: Tensor) -> Tensor:
        own, padded = ((kv, 1 if tensor == KEY_GRADIENTS else heads) for kv, heads in (self._own, self._padded))
        return x.reshape(*x.shape[:2], *padded, *x.shape[3:])[:, :, : own[0], : own[1]].flatten(2, 3)

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        """Make a kernel call; returns the parts of the results or gradients of its operands."""
        if row.kernel not in self._task.kernels:
            device = self._inputs[QUERIES][0].device.type
            raise RunError(
                f"step {row.step}: there is no kernel {row.kernel!r} on {device}, expected {self._task.kernel!r}"
            )
        queries, keys = operands
        if row.kernel == SCALE:
            out, lse = self._attended
            scaled = out.float() * (lse - keys[0].logsumexp(1, keepdim=True)).exp()[..., None]
            scaled = scaled.view(*queries[0].shape[:3], -1).transpose(0, 1)
            return [Parts(self._shard.outputs(row.operands[0].blocks), [scaled])]
        low, high = row.params
        outputs: Sequence[Sequence[Tensor]]
        if row.kernel == ATTEND:
            (q,), (k, *values) = queries, keys
            v = values[0] if values else k[..., : self._task.workload.value_size]
            if self._task.workload.decode:  # the heads of all ranks, one query, which sees all of the keys
                one = q.flatten(1, 2).unsqueeze(1)
                part = self._kernel.attend(one, k, v, scale=self._scale, low=1 - k.shape[1], high=0)
                if self._task.is_scaled:
                    self._attended = part  # until the log-sum-exps of all ranks are here
                    return [Parts([row.adds[0].block], [part.lse.transpose(0, 1)])]
                outputs = [[each.view(*q.shape[:3], *each.shape[3:]) for each in part]]
            elif self._packing is None:
                outputs = [self._kernel.attend(q, k, v, scale=self._scale, low=low, high=high)]
            else:
                outputs = [attend_packed(self._kernel, q, k, v, self._scale, self._packing.call(row))]
        else:
            (q, dout, lse, out), (k, v) = queries, keys
            if row.operands[0].offset != OUTSIDE:
                out = fused.stand_in_for_out(dout, out)
            if self._packing is None:
                found = self._kernel.backward(dout, q, k, v, out, lse, scale=self._scale, low=low, high=high)
            else:
                rows = Rows(dout, q, out, lse)
                found = gradients_packed(self._kernel, rows, k, v, self._scale, self._packing.call(row))
            outputs = [(found.q,), (found.k, found.v)]
        return [
            Parts(self._shard.outputs(operand.blocks), [each.transpose(0, 1) for each in tensors])
            for operand, tensors in zip(row.operands, outputs, strict=False)
        ]

    def arranged(self, fields: Views) -> Views:
        return [each.transpose(0, 1) for each in fields]

    def bound(self, blocks: Sequence[int]) -> Views:
        """Inputs or outputs of own blocks, which are adjacent in the shard."""
        key = tuple(blocks)
        found = self._bound.get(key)
        if found is None:
            tensor = self._tensor[blocks[0]]
            found = self._rows(self._sums[tensor] if tensor in self._sums else self._inputs[tensor], blocks)
            if tensor == QUERIES and self._task.is_backward:
                q, dout, lse, out = found
                found = [q, dout, lse.permute(1, 2, 0).contiguous().permute(2, 0, 1), out]
            self._bound[key] = found
        return found

    def sent(self, block: int) -> Views:
        """As `bound`, of a block that is sent: queries with delta in place of the result."""
        tensor = self._tensor[block]
        return self._rows(self._sums[tensor] if tensor in self._sums else self._on_the_wire(tensor), [block])

    def _on_the_wire(self, tensor: int) -> Sequence[Tensor]:
        if tensor == QUERIES and self._task.is_backward:
            return (*self._inputs[tensor][:3], self._delta)
        return self._inputs[tensor]

    @cached_property
    def _delta(self) -> Tensor:
        _, dout, _, out = self._inputs[QUERIES]
        return fused.inner_products(dout, out)

    def _empty(self, tensor: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Tensors of the shard for an output; log-sum-exps are float32."""
        device = self._inputs[QUERIES][0].device
        return [
            torch.empty(shape, dtype=torch.float32 if name == "lse" else dtype, device=device)
            for name, shape in self._shard.shapes[tensor]
        ]

    def _rows(self, tensors: Sequence[Tensor], blocks: Sequence[int]) -> Views:
        """The rows and heads of own blocks that are adjacent in the shard, [positions, batch, heads, ...] each."""
        first, count = self._first[blocks[0]], sum([self._count[block] for block in blocks])
        assert self._first[blocks[-1]] + self._count[blocks[-1]] == first + count, "operands are adjacent in the shard"
        heads = self._heads[blocks[0]]
        some = [each if each.shape[1] == count else each.narrow(1, first, count) for each in tensors]
        if heads != slice(0, tensors[0].shape[2]):
            some = [each[:, :, heads] for each in some]
        return [each.transpose(0, 1) for each in some]


class _Packing:
    """What packed documents add to the calls of a task: prepared once for all layers that have them."""

    def __init__(self, task: AttentionTask, device: torch.device) -> None:
        self._task, self._device = task, device
        self._calls: dict[tuple[tuple[int, ...], ...], PackedCall] = {}
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor] | None] = {}

    def call(self, row: CallRow) -> PackedCall:
        """What a kernel call computes."""
        blocks = queries, keys = row.operands[0].blocks, row.operands[1].blocks
        if blocks not in self._calls:
            of_queries, of_keys = (int(self._task.count[list(each)].sum()) for each in blocks)
            segments = self._task.segments(queries, keys)
            self._calls[blocks] = PackedCall(segments, of_queries, of_keys, self._device)
        return self._calls[blocks]

    def by_place(self, tensor: int, rank: int, shard: Sequence[Tensor]) -> Sequence[Tensor]:
        """The rows of a shard in the order of places."""
        rows = self._rows_of(tensor, rank)
        return shard if rows is None else [each.index_select(1, rows[0]) for each in shard]

    def by_position(self, tensor: int, rank: int, shard: Sequence[Tensor]) -> Sequence[Tensor]:
        """The rows in the order of places in that of the shard again."""
        rows = self._rows_of(tensor, rank)
        return shard if rows is None else [each.index_select(1, rows[1]) for each in shard]

    def _rows_of(self, tensor: int, rank: int) -> tuple[Tensor, Tensor] | None:
        """The row of the shard at each place, and the place of each row; None if these are the same."""
        if (tensor, rank) not in self._rows:
            places = self._task.places_of(tensor, rank)
            to_shard = np.argsort(self._task.layout.positions_at(places))
            orders = [torch.from_numpy(each).to(self._device) for each in (np.argsort(to_shard), to_shard)]
            alike = np.array_equal(to_shard, np.arange(len(places)))
            self._rows[tensor, rank] = None if alike else (orders[0], orders[1])
        return self._rows[tensor, rank]


_packing_of = lru_cache(maxsize=16)(_Packing)
"""Layers of a model have the same documents, one after another."""


@dataclass(frozen=True, eq=False)
class _Shard:
    """The facts of a schedule that a layer needs, by block. `first` is where own blocks begin in the shard.

    `shapes` are the names and shapes of the shard's tensors, by output. `bound` are those that the caller has.
    """

    tensor: list[int]
    count: list[int]
    output_of: list[int]
    first: dict[int, int]
    heads: dict[int, slice]
    shapes: dict[int, list[tuple[str, tuple[int, ...]]]]
    bound: list[int]
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def outputs(self, blocks: tuple[int, ...]) -> list[int]:
        """The blocks of outputs of an operand's blocks."""
        if blocks not in self.known:
            self.known[blocks] = [self.output_of[block] for block in blocks]
        return self.known[blocks]


@lru_cache(maxsize=16)
def _shard_of(schedule: Schedule, rank: int) -> _Shard:
    task = task_of(schedule, AttentionTask)
    own = np.flatnonzero(task.owner == rank)
    first = np.zeros(len(own), dtype=np.int64)
    for tensor in np.unique(task.tensor[own]).tolist():
        of_tensor = task.tensor[own] == tensor
        first[of_tensor] = np.searchsorted(task.places_of(tensor, rank), task.start[own[of_tensor]])
    layer, shapes = task.workload, dict[int, list[tuple[str, tuple[int, ...]]]]()
    for tensor in (QUERY_GRADIENTS, KEY_GRADIENTS) if task.is_backward else (RESULTS,):
        of_rank = task.heads_at(tensor, rank)
        heads = of_rank.stop - of_rank.start
        rows = layer.batch, task.lengths_of(tensor)[rank], heads
        shapes[tensor] = [(each.name, (*rows, *each.shape[2:])) for each in task.fields_of(tensor, heads)]
    bound = {kind.name for kind in schedule.blocks.kinds if kind.bound}
    return _Shard(
        task.tensor.tolist(),
        task.count.tolist(),
        task.output_of.tolist(),
        dict(zip(own.tolist(), first.tolist(), strict=True)),
        {block: _own_heads(task, block) for block in own.tolist()},
        shapes,
        [tensor for tensor in shapes if TENSORS[tensor] in bound],
    )


def _own_heads(task: AttentionTask, block: int) -> slice:
    """The heads of a block among those of the tensor that its owner has."""
    before = task.heads_at(int(task.tensor[block]), int(task.owner[block])).start
    first, end = task.heads_of(block)
    return slice(first - before, end - before)


@lru_cache(maxsize=64)
def _sends(shard: _Shard, part: RankPart, tensor: int) -> bool:
    """Whether a rank sends blocks of a tensor that are its own."""
    return any(row.block in shard.first and shard.tensor[row.block] == tensor for row in part.sends)


@lru_cache(maxsize=64)
def _together(shard: _Shard, part: RankPart, tensors: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The own blocks of these tensors in the memory, those that are adjacent in the shard together and in its order."""
    found = list[list[int]]()
    own = [block for block in part.resident if block in shard.first and shard.tensor[block] in tensors]
    own.sort(key=lambda block: (shard.tensor[block], shard.heads[block].start, shard.first[block]))
    for before, block in zip([None, *own], own, strict=False):
        if before is None or not (
            shard.tensor[before] == shard.tensor[block]
            and shard.heads[before] == shard.heads[block]
            and shard.first[before] + shard.count[before] == shard.first[block]
        ):
            found.append([])
        found[-1].append(block)
    return [tuple(blocks) for blocks in found]


@dataclass(frozen=True)
class SoftmaxPasses(AttentionPasses):
    """Both passes of softmax attention on one rank.

    `packed` are the tasks of the passes with the documents of this call, if schedules are those of any documents.

    The forward pass has the inputs q, k, v and sinks, [heads] or None, and the outputs out, as `q` with the last
    dimension of v, and lse, [batch, heads, positions].

    A sink is one more term exp(sink) in the sum of every softmax of a head, as if all queries saw a key with this score
    whose value is 0. It only scales what the owner of a query has after all merges, so no message and no kernel call
    has it: backward, all ranks get results and log-sum-exps that include the sink, with which weights of keys are
    right. Its weight is exp(sink - lse), so its gradient is minus the sum of this weight times delta over queries.
    """

    kernel: Kernel
    scale: float
    packed: Sequence[AttentionTask] = ()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
        layer = self._layer(self.forward_schedule, {QUERIES: (q,), KEYS: (k, v)})
        with self.run(self.forward_schedule, layer, q.device) as copies:
            left = self.left_behind(copies)
            out, lse = layer.output(copies, RESULTS, q.dtype if sinks is None else torch.float32)
        if sinks is not None:
            out = (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(q.dtype)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        return (out, lse.transpose(1, 2)), (left,)

    def saved(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return *inputs, *outputs, *kept

    def backward(
        self, saved: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        schedule, (q, k, v, sinks, out, lse, left) = self.backward_schedule, saved
        assert schedule is not None, "gradients were wanted when the call was planned"
        dout = torch.zeros_like(out) if dout is None else dout
        if dlse is not None:
            dout, out = fused.with_lse_gradient(dout, out, dlse.transpose(1, 2))
        layer = self._layer(schedule, {QUERIES: (q, dout, lse.transpose(1, 2), out), KEYS: (k, v)})
        with self.run(schedule, layer, q.device, left) as copies:
            (dq,) = layer.output(copies, QUERY_GRADIENTS, dout.dtype)
            dk, dv = layer.output(copies, KEY_GRADIENTS, dout.dtype)
        if sinks is None:
            return dq, dk, dv, None
        weights, delta = torch.exp(sinks - lse.transpose(1, 2)), fused.inner_products(dout, out)
        return dq, dk, dv, -(weights * delta).sum((0, 1)).to(sinks.dtype)

    def _layer(self, schedule: Schedule, inputs: Inputs) -> AttentionLayer:
        packed = self.packed[schedule is self.backward_schedule] if self.packed else None
        return AttentionLayer(schedule, self.rank, self.kernel, self.scale, inputs, packed)
