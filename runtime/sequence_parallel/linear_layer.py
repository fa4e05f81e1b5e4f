"""A layer of linear attention on one rank: its tensors, and the kernels of its task by name.

Gradients are vector-Jacobian products of the forward kernels, by automatic differentiation within a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.executor.copies import Work
from runtime.executor.sums import Parts
from runtime.executor.views import Views
from runtime.kernels import linear_attention as kernels
from runtime.kernels.linear_attention import Chunk, Forward, gradients_of
from runtime.kernels.linear_registry import Attend
from runtime.kernels.partials import constant
from runtime.sequence_parallel.passes import task_of
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.rank_part import CallRow, Operand
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.linear import task as tasks
from tasp_lab.schedules.linear.task import (
    GATE_GRADIENTS,
    GATES,
    KEY_GRADIENTS,
    KEYS,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    LinearTask,
)

Tensor = torch.Tensor

Inputs = Mapping[int, Sequence[Tensor]]
"""Tensors of a shard, [batch, positions, heads, ...], of any strides.

`KEYS`: k and v. `QUERIES`: q, backward also the gradient of the output. `GATES`, where the task has them: the logarithm
of the decays, [batch, positions, KV heads] or [batch, positions, KV heads, head_dim], float32.
"""


@dataclass(frozen=True)
class SequenceEnds:
    """States at the ends of a sequence, [batch, KV heads, head_dim, value_dim] in float32, on the rank at that end.

    `initial` is the state before the first position, by default 0; `wants_final` keeps what `LinearLayer.final_state`
    needs in a forward pass; `final_gradient` is the gradient of that state, in a backward pass.
    """

    initial: Tensor | None = None
    wants_final: bool = False
    final_gradient: Tensor | None = None


class LinearLayer(Work):
    """One rank's layer in one pass. Use a new instance for each run.

    The kernel ``attend`` of a chunk is `attend`, by default that of torch (`runtime.kernels.linear_registry`).

    `outputs` are those of the shard after a run, in float32, by tensor: `RESULTS`, or the gradients of all inputs.
    `initial_gradient` is that of `ends.initial` after a backward pass, None without such a state.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        inputs: Inputs,
        ends: SequenceEnds | None = None,
        attend: Attend = kernels.attend,
    ) -> None:
        self._task = task = task_of(schedule, LinearTask)
        self._is_causal = not task.is_full
        self._ends, self._attend_within = ends or SequenceEnds(), attend
        self._before_last: Tensor | None = None
        initial = self._ends.initial
        self.initial_gradient = None if initial is None else torch.zeros_like(initial)
        q, (k, v) = inputs[QUERIES][0], inputs[KEYS]
        like: Inputs = {RESULTS: (q.new_empty(*q.shape[:3], v.shape[3]),)}
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
        self._decays = constant(tuple(task.decays), torch.float64, q.device)
        self._kernels: Mapping[str, Callable[[CallRow, Sequence[Views]], Sequence[Views]]] = {
            tasks.MAKE_STATE: self._make_state,
            tasks.ATTEND: self._attend,
            tasks.ATTEND_BY_STATE: self._attend,
            tasks.FOLD: self._fold,
            tasks.ADVANCE: self._advance,
            tasks.COMBINE: self._combine,
            tasks.APPLY_STATE: self._apply_state,
            tasks.MAKE_GRADIENT_STATE: self._make_gradient_state,
            tasks.DIFFERENTIATE: self._differentiate,
            tasks.FOLD_BACK: self._fold,
            tasks.RETREAT: self._advance,
            tasks.COMBINE_BACK: self._combine,
            tasks.APPLY_GRADIENT_STATE: self._apply_gradient_state,
            tasks.DIFFERENTIATE_TILE: self._differentiate_tile,
            tasks.DIFFERENTIATE_BY_STATE: self._differentiate_tile,
        }

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        """Make a kernel call; returns what it adds to each target."""
        kernel = self._kernels.get(row.kernel)
        if kernel is None or row.kernel not in self._task.kernels:
            raise RunError(
                f"step {row.step}: there is no kernel {row.kernel!r} on {self._decays.device.type}, expected one of "
                f"{', '.join(self._task.kernels)}"
            )
        found = kernel(row, operands)
        return [Parts((place.block,), fields) for place, fields in zip(row.adds, found, strict=True)]

    def bound(self, blocks: Sequence[int]) -> Views:
        """The rows and heads of a block of an own chunk, [positions, batch, heads, ...] each."""
        (block,) = blocks
        first = self._first[self._chunk[block]]
        rows = slice(first, first + self._count[self._chunk[block]])
        heads = slice(*self._task.heads_of(block, self._tensor[block]))
        return [each[:, rows, heads].transpose(0, 1) for each in self._tensors[self._tensor[block]]]

    def final_state(self) -> Tensor:
        """The state behind the last position, on the rank that has it, after a forward pass that keeps it."""
        assert self._ends.wants_final, "the layer keeps what the last state needs only if asked"
        chunk = len(self._task.owner) - 1
        rows = slice(self._first[chunk], self._first[chunk] + int(self._task.count[chunk]))
        k, v, *gates = (each[:, rows].transpose(0, 1) for at in (KEYS, GATES) for each in self._tensors.get(at, ()))
        decays = self._in_kernel_shape(gates[0]) if gates else self._constant(slice(None))
        before = self._ends.initial if chunk == 0 else self._before_last
        return kernels.state_behind(before, k, v, decays, self._starts_in(chunk))

    def _make_state(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (k, v), *gates = operands
        decays, starts = self._decay(row, gates)
        own = kernels.state_behind(self._initial_of(row), k, v, decays, starts)
        return self._states(row, own, decays, starts)

    def _make_gradient_state(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q, dout), *gates = operands
        decays, starts = self._decay(row, gates)
        heads = self._heads(row)
        own = kernels.make_gradient_state(q, dout, heads.stop - heads.start, decays, starts)
        behind = self._final_gradient_of(row)
        if behind is not None:
            own = kernels.advance(behind, own, None if decays is None else kernels.total_decay(decays, len(q), starts))
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
        decays, starts = self._decay(row, gates)
        found, before = self._attended(row, q, k, v, decays), self._initial_of(row)
        return [(found if before is None else found + kernels.apply_state(q, before, decays, starts),)]

    def _attended(self, row: CallRow, q: Tensor, k: Tensor, v: Tensor, decays: Tensor | None) -> Tensor:
        """The outputs of queries for keys of the same chunk, or of one at the distance that the call has."""
        distance = row.params[0] if row.params else 0
        starts = self._starts(row.operands[0])
        by_state = row.kernel in (tasks.ATTEND_BY_STATE, tasks.DIFFERENTIATE_BY_STATE)
        if not self._is_causal:
            return kernels.apply_state(q, kernels.make_state(k, v))
        if distance == 0:
            return self._attend_within(q, k, v, decays, starts)
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
        before = self._whole(states)
        if self._ends.wants_final and self._is_last(row):
            self._before_last = before.clone()  # the memory of blocks is used again
        return [(kernels.apply_state(q, before, *self._decay(row, gates)),)]

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

    def _combine(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (first, *before), (second, *own) = operands
        totals = self._totals(row.operands[1], operands[1], len(row.adds))
        found = kernels.advance(first, second, None if totals is None else totals[0])
        return list(zip(*(torch.split(each, 1) for each in (found, *map(torch.mul, before, own))), strict=True))

    def _totals(self, operand: Operand, views: Views, pieces: int) -> Tensor | None:
        """The total decays of states, [states, pieces, batch, KV heads, channels], the last or the batch 1 if alike."""
        blocks = operand.blocks[::pieces]
        if self._task.workload.decay == "none":
            kept = [0.0 if any(len(self._task.resets(chunk)) for chunk in self._task.chunks_of(block)) else 1.0
                    for block in blocks]  # fmt: skip
            whole = constant(tuple(kept), torch.float32, self._decays.device)
            return None if all(kept) else whole.view(-1, 1, 1, 1, 1)
        decay = views[1]
        shaped = {"head": (slice(None), None, slice(None), None), "scalar": (..., None)}
        decay = decay[shaped.get(self._task.workload.decay, (...,))]
        return decay.reshape(len(blocks), pieces, *decay.shape[1:])

    def _differentiate(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q, dout), (k, v), states, *gates = operands
        decays, starts = self._decay(row, gates)
        behind = self._final_gradient_of(row)

        def forward(given: Chunk) -> list[Tensor]:
            q, k, v, gates, before = given
            out = self._attended(row, q, k, v, gates)
            if before is not None:
                out = out + kernels.apply_state(q, before, gates, starts)
            return [out] if behind is None else [out, kernels.state_behind(before, k, v, gates, starts)]

        chunk = Chunk(q, k, v, decays, self._before(row, states))
        return self._differentiated(row, forward, chunk, [dout] if behind is None else [dout, behind], bool(gates))

    def _apply_gradient_state(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (k, v), (gradients,), *more = operands
        states, gates = (more[0], more[1:]) if more else ((), ())
        decays, starts = self._decay(row, gates)
        before = self._before(row, states)

        def forward(given: Chunk) -> list[Tensor]:
            return [kernels.state_behind(given.before, given.k, given.v, given.gates, starts)]

        chunk = Chunk(None, k, v, decays, before)
        return self._differentiated(row, forward, chunk, [self._whole(gradients)], bool(gates))

    def _differentiate_tile(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        (q, dout), (k, v) = operands
        chunk = Chunk(q, k, v, self._constant(self._heads(row)), None)
        return self._differentiated(row, lambda given: [self._attended(row, *given[:4])], chunk, [dout], False)

    def _differentiated(
        self, row: CallRow, forward: Forward, chunk: Chunk, gradients: Sequence[Tensor], has_gates: bool
    ) -> Sequence[Views]:
        """What a call adds to the gradients of its tensors; that of the initial state is kept here."""
        is_first = self._initial_of(row) is not None
        wanted = [chunk.q is not None, True, True, has_gates, is_first]
        dq, dk, dv, dgates, dbefore = gradients_of(forward, chunk, wanted, gradients)
        if self.initial_gradient is not None and dbefore is not None:
            self.initial_gradient += dbefore
        found = {QUERY_GRADIENTS: [dq], KEY_GRADIENTS: [dk, dv], GATE_GRADIENTS: [dgates]}
        return self._by_tensor(row, {at: [each for each in of if each is not None] for at, of in found.items()})

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
            return self._constant(self._heads(row)), starts
        ((found,),) = gates
        return self._in_kernel_shape(found), starts

    def _in_kernel_shape(self, gates: Tensor) -> Tensor:
        return gates if self._task.workload.decay == "channel" else gates[..., None]

    def _heads(self, row: CallRow) -> slice:
        """The KV heads of a call."""
        return slice(*self._task.heads_of(row.operands[0].blocks[0], KEYS))

    def _constant(self, heads: slice) -> Tensor | None:
        """The logarithm of the constant decay per KV head, None without one."""
        return None if self._task.workload.decay != "head" else self._decays[heads].log().float().view(1, 1, -1, 1)

    def _starts(self, operand: Operand) -> Sequence[int]:
        return self._starts_in(self._chunk[operand.blocks[0]])

    def _starts_in(self, chunk: int) -> Sequence[int]:
        """Where documents start in a chunk; nowhere if all see each other, or if the sequence goes on from a state."""
        found: list[int] = self._task.resets(chunk).tolist()
        return found if self._is_causal and self._ends.initial is None else ()

    def _is_last(self, row: CallRow) -> bool:
        return int(self._chunk[row.operands[0].blocks[0]]) == len(self._task.owner) - 1

    def _initial_of(self, row: CallRow) -> Tensor | None:
        """The state before the first position, if the call is of the chunk that has it and there is one."""
        return self._ends.initial if self._chunk[row.operands[0].blocks[0]] == 0 else None

    def _final_gradient_of(self, row: CallRow) -> Tensor | None:
        """The gradient of the state behind the last position, if the call is of the chunk that has it."""
        return self._ends.final_gradient if self._is_last(row) else None

    def _before(self, row: CallRow, states: Views) -> Tensor | None:
        """The state before the chunk of a call, None if it is 0 or not needed."""
        return self._whole(states[0]) if states and len(states[0]) else self._initial_of(row)

    def _pieces(self, state: Tensor) -> Sequence[Tensor]:
        """States, [batch, KV heads, ...], in groups of heads."""
        return state.chunk(self._task.pieces, dim=1)

    @staticmethod
    def _whole(pieces: Tensor) -> Tensor:
        """Pieces of a state, [pieces, batch, KV heads of each, ...], with all heads."""
        return pieces.transpose(0, 1).flatten(1, 2)
