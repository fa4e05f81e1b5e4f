"""A layer of linear attention on one rank: its tensors, and the kernels of its task by name.

Gradients are vector-Jacobian products of the forward kernels, by automatic differentiation within a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from runtime.executor.views import Views
from runtime.kernels import linear_attention as kernels
from tasp_lab.errors import RunError
from tasp_lab.linear_attention import task as tasks
from tasp_lab.linear_attention.task import (
    GATE_GRADIENTS,
    GATES,
    KEY_GRADIENTS,
    KEYS,
    PREFIX_STATES,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    LinearTask,
)
from tasp_lab.schedule.rank_part import CallRow, Operand
from tasp_lab.schedule.schedule import Schedule

Tensor = torch.Tensor

Inputs = Mapping[int, Sequence[Tensor]]
"""Tensors of a shard, [batch, positions, heads, ...], of any strides.

`KEYS`: k and v. `QUERIES`: q, backward also the gradient of the output. `GATES`, where the task has them: the logarithm
of the decays, [batch, positions, KV heads] or [batch, positions, KV heads, head_dim], float32.
"""


class LinearLayer:
    """One rank's layer in one pass. Use a new instance for each run.

    `outputs` are those of the shard after a run, in float32, by tensor: `RESULTS`, or the gradients of all inputs.
    """

    def __init__(self, schedule: Schedule, rank: int, inputs: Inputs) -> None:
        assert isinstance(schedule.task, LinearTask), "a schedule of linear attention has a task"
        task = schedule.task
        self._task = task
        self._is_causal = task.workload.mask == "causal"
        q, (k, v) = inputs[QUERIES][0], inputs[KEYS]
        like: Inputs = {RESULTS: (q,)}
        if task.is_backward:
            like = {QUERY_GRADIENTS: (q,), KEY_GRADIENTS: (k, v), GATE_GRADIENTS: inputs.get(GATES, ())}
        self.outputs = {
            tensor: [torch.zeros_like(each, dtype=torch.float32) for each in tensors]
            for tensor, tensors in like.items()
        }
        self._tensors: Mapping[int, Sequence[Tensor]] = {**inputs, **self.outputs}
        self._tensor, self._chunk, self._count = task.tensor.tolist(), task.chunk.tolist(), task.count.tolist()
        own = [chunk for chunk, owner in enumerate(task.owner.tolist()) if owner == rank]
        counts = [self._count[chunk] for chunk in own]
        self._first = {chunk: sum(counts[:before]) for before, chunk in enumerate(own)}
        self._decays = torch.tensor(task.decays, device=q.device, dtype=torch.float64)
        self._kernels: Mapping[str, Callable[[CallRow, Sequence[Views]], Sequence[Views]]] = {
            tasks.MAKE_STATE: self._make_state,
            tasks.ATTEND: self._attend,
            tasks.ATTEND_BY_STATE: self._attend,
            tasks.FOLD: self._fold,
            tasks.ADVANCE: self._advance,
            tasks.APPLY_STATE: self._apply_state,
            tasks.MAKE_GRADIENT_STATE: self._make_gradient_state,
            tasks.DIFFERENTIATE: self._differentiate,
            tasks.FOLD_BACK: self._fold,
            tasks.RETREAT: self._advance,
            tasks.APPLY_GRADIENT_STATE: self._apply_gradient_state,
            tasks.DIFFERENTIATE_TILE: self._differentiate_tile,
            tasks.DIFFERENTIATE_BY_STATE: self._differentiate_tile,
        }

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        """Make a kernel call; returns what it adds to each target."""
        kernel = self._kernels.get(row.kernel)
        if kernel is None or row.kernel not in self._task.kernels:
            raise RunError(
                f"step {row.step}: there is no kernel {row.kernel!r} on {self._decays.device.type}, expected one of "
                f"{', '.join(self._task.kernels)}"
            )
        return kernel(row, operands)

    def bound(self, blocks: Sequence[int]) -> Views:
        """The rows and heads of a block of an own chunk, [positions, batch, heads, ...] each."""
        (block,) = blocks
        first = self._first[self._chunk[block]]
        rows = slice(first, first + self._count[self._chunk[block]])
        heads = slice(*self._task.heads_of(block, self._tensor[block]))
        return [each[:, rows, heads].transpose(0, 1) for each in self._tensors[self._tensor[block]]]

    def sent(self, block: int) -> Views:
        return self.bound([block])

    def _make_state(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (k, v), *gates = operands
        decays, starts = self._decay(row, gates)
        return self._states(row, kernels.make_state(k, v, decays, starts), decays, starts)

    def _make_gradient_state(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q, dout), *gates = operands
        decays, starts = self._decay(row, gates)
        own = kernels.make_gradient_state(q, dout, self._kv_heads(row), decays, starts)
        return self._states(row, own, decays, starts)

    def _states(self, row: CallRow, state: Tensor, decays: Tensor | None, starts: Sequence[int]) -> Sequence[Views]:
        """A state that a chunk makes, cut in pieces, with the chunk's total decay where the task has one."""
        pieces = self._pieces(state)
        if self._task.workload.decay == "none":
            return [(piece[None],) for piece in pieces]
        assert decays is not None, "there are decays"
        positions = self._count[self._chunk[row.operands[0].blocks[0]]]
        totals = self._pieces(kernels.total_decay(decays, positions, starts))
        shape = {"head": lambda each: each[0, :, 0], "scalar": lambda each: each[..., 0]}
        found = [shape.get(self._task.workload.decay, lambda each: each)(each) for each in totals]
        return [(piece[None], total[None]) for piece, total in zip(pieces, found, strict=True)]

    def _attend(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q,), (k, v), *gates = operands
        return [(self._attended(row, q, k, v, self._constant(row) if not gates else self._decay(row, gates)[0]),)]

    def _attended(self, row: CallRow, q: Tensor, k: Tensor, v: Tensor, decays: Tensor | None) -> Tensor:
        """The outputs of queries for keys of the same chunk, or of one at the distance that the call has."""
        distance = row.params[0] if row.params else 0
        starts = self._starts(row.operands[0])
        by_state = row.kernel in (tasks.ATTEND_BY_STATE, tasks.DIFFERENTIATE_BY_STATE)
        if not self._is_causal:
            return kernels.apply_state(q, kernels.make_state(k, v))
        if distance == 0:
            return kernels.attend(q, k, v, decays, starts)
        seen, first = self._starts(row.operands[1]), min(starts, default=len(q))
        if by_state:
            gap = distance - len(k)  # positions between the chunks, over which the state decays further
            state = kernels.make_state(k, v, decays, seen)
            state = state if decays is None else state * torch.exp(decays[0] * gap)[..., None]
            return kernels.apply_state(q, state, decays, starts)
        last = max(seen, default=0)
        found = kernels.attend_at_distance(q[:first], k[last:], v[last:], decays, distance - last)
        return torch.cat([found, found.new_zeros(len(q) - first, *found.shape[1:])])

    def _apply_state(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q,), (states,), *gates = operands
        return [(kernels.apply_state(q, self._whole(states), *self._decay(row, gates)),)]

    def _fold(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        ((states, *_),) = operands
        pieces = len(row.adds)
        in_chunks = states.unflatten(0, (-1, pieces))  # type: ignore[no-untyped-call]
        if not self._is_causal:
            return [(each[None],) for each in in_chunks.sum(0)]
        totals = self._totals(row.operands[0], operands[0], pieces)
        if row.kernel == tasks.FOLD_BACK:
            in_chunks, totals = in_chunks.flip(0), None if totals is None else totals.flip(0)
        return [(each[None],) for each in kernels.fold(in_chunks, totals)]

    def _advance(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        before, (own, *_) = operands
        if not before or not len(before[0]):
            return [(own,)]
        totals = self._totals(row.operands[1], operands[1], 1)
        return [(kernels.advance(before[0], own, None if totals is None else totals[0]),)]

    def _totals(self, operand: Operand, views: Views, pieces: int) -> Tensor | None:
        """The total decays of states, [chunks, pieces, batch, KV heads, channels], the last or the batch 1 if alike."""
        chunks = [self._chunk[block] for block in operand.blocks[::pieces]]
        if self._task.workload.decay == "none":
            kept = [0.0 if len(self._task.resets(chunk)) else 1.0 for chunk in chunks]
            return None if all(kept) else self._decays.new_tensor(kept, dtype=torch.float32).view(-1, 1, 1, 1, 1)
        decay = views[1]
        shaped = {"head": (slice(None), None, slice(None), None), "scalar": (..., None)}
        decay = decay[shaped.get(self._task.workload.decay, (...,))]
        return decay.reshape(len(chunks), pieces, *decay.shape[1:])

    def _differentiate(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q, dout), (k, v), states, *gates = operands
        decays, starts = self._decay(row, gates)
        before = _copy(self._whole(states[0])) if _some(states) else None

        def forward(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
            decay = gates[0] if gates else decays
            out = self._attended(row, q, k, v, decay)
            return out if before is None else out + kernels.apply_state(q, before, decay, starts)

        dq, dk, dv, *dgates = _gradients(forward, [q, k, v, *([decays] if gates and decays is not None else [])], dout)
        return self._by_tensor(row, {QUERY_GRADIENTS: [dq], KEY_GRADIENTS: [dk, dv], GATE_GRADIENTS: dgates})

    def _apply_gradient_state(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (k, v), (gradients,), *more = operands
        states, gates = (more[0], more[1:]) if more else ((), ())
        decays, starts = self._decay(row, gates)
        before = _copy(self._whole(states[0])) if _some(states) else None

        def forward(k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
            decay = gates[0] if gates else decays
            own = kernels.make_state(k, v, decay, starts)
            if before is None or decay is None:
                return own
            return kernels.advance(before, own, kernels.total_decay(decay, len(k), starts))

        inputs = [k, v, *([decays] if gates and decays is not None else [])]
        dk, dv, *dgates = _gradients(forward, inputs, self._whole(gradients))
        return self._by_tensor(row, {KEY_GRADIENTS: [dk, dv], GATE_GRADIENTS: dgates})

    def _differentiate_tile(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q, dout), (k, v) = operands
        decays = self._constant(row)
        dq, dk, dv = _gradients(lambda q, k, v: self._attended(row, q, k, v, decays), [q, k, v], dout)
        return self._by_tensor(row, {QUERY_GRADIENTS: [dq], KEY_GRADIENTS: [dk, dv]})

    def _by_tensor(self, row: CallRow, found: Mapping[int, Sequence[Tensor]]) -> Sequence[Views]:
        """Gradients in the order of the targets; those of gates in the shape that these have."""
        shaped = dict(found)
        if self._task.workload.decay == "scalar":
            shaped[GATE_GRADIENTS] = [each[..., 0] for each in found.get(GATE_GRADIENTS, ())]
        return [shaped[self._tensor[place.block]] for place in row.adds]

    def _decay(self, row: CallRow, gates: Sequence[Views]) -> tuple[Tensor | None, Sequence[int]]:
        """The gates of the chunk of a call, in the shape that kernels take, and where documents start in it."""
        starts = self._starts(row.operands[0])
        if not gates:
            return self._constant(row), starts
        ((found,),) = gates
        return found if self._task.workload.decay == "channel" else found[..., None], starts

    def _constant(self, row: CallRow) -> Tensor | None:
        """The logarithm of the constant decay per KV head, None without one."""
        if self._task.workload.decay != "head":
            return None
        heads = slice(*self._task.heads_of(row.operands[0].blocks[0], KEYS))
        return self._decays[heads].log().float().view(1, 1, -1, 1)

    def _kv_heads(self, row: CallRow) -> int:
        first, end = self._task.heads_of(row.operands[0].blocks[0], KEYS)
        return end - first

    def _starts(self, operand: Operand) -> Sequence[int]:
        """Where documents start in the chunk of a block; nowhere if all positions see each other."""
        found: list[int] = self._task.resets(self._chunk[operand.blocks[0]]).tolist()
        return found if self._is_causal else ()

    def _pieces(self, state: Tensor) -> Sequence[Tensor]:
        """States, [batch, KV heads, ...], in groups of heads."""
        return state.chunk(self._task.pieces, dim=1)

    @staticmethod
    def _whole(pieces: Tensor) -> Tensor:
        """Pieces of a state, [pieces, batch, KV heads of each, ...], with all heads."""
        return pieces.transpose(0, 1).flatten(1, 2)


def _some(views: Views) -> bool:
    return bool(views) and len(views[0]) > 0


def _gradients(forward: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> Sequence[Tensor]:
    """The products of a gradient with the Jacobians of a function, in float32, by automatic differentiation."""
    with torch.enable_grad():
        leaves = [_copy(each).requires_grad_() for each in inputs]
        out = forward(*leaves)
        return torch.autograd.grad(out, leaves, gradient.to(out.dtype), materialize_grads=True)


def _copy(operand: Tensor) -> Tensor:
    """A float32 copy for automatic differentiation, which refuses tensors of a memory that changes anywhere."""
    return operand.detach().to(torch.float32, copy=True)


def state_blocks(schedule: Schedule, rank: int) -> list[int]:
    """The blocks of states with which a rank starts a pass."""
    assert isinstance(schedule.task, LinearTask), "a schedule of linear attention has a task"
    found: list[int] = np.flatnonzero(schedule.initial[rank] & (schedule.task.tensor == PREFIX_STATES)).tolist()
    return found
