"""Trials of linear attention: layers on random tensors, equal on all ranks, compared with float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.executor.executor import Executor
from runtime.executor.message_io import Progress, no_progress
from runtime.executor.transports import Transport
from runtime.executor.views import DTYPES
from runtime.kernels import linear_attention as kernels
from runtime.kernels.linear_registry import choose_linear_kernel
from runtime.sequence_parallel.linear_layer import LinearLayer, state_blocks
from runtime.sequence_parallel.sharding import shard
from runtime.trials.attention import TOLERANCE, random_layer
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.schedule import Schedule
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
        assert isinstance(schedule.task, LinearTask), "a schedule of linear attention has a task"
        task = self._task = schedule.task
        self._schedule, self._rank, self._checked = schedule, rank, True
        q, k, v, dout = random_layer(task.workload, DTYPES[task.workload.dtype], device)
        gates = random_gates(task, k)
        self._whole: Mapping[int, Sequence[Tensor]] = {
            QUERIES: (q, dout) if task.is_backward else (q,),
            KEYS: (k, v),
            GATES: () if gates is None else (gates,),
        }
        inputs = {tensor: [shard(x, task.layout, rank) for x in each] for tensor, each in self._whole.items()}
        chosen = choose_linear_kernel("auto", q.dtype, q.device)
        self._layer = LinearLayer(schedule, rank, inputs, attend=chosen.attend(q.dtype))
        self.executor = Executor(schedule, rank, transport, self._layer, device, progress)

    def set_up(self, checked: bool) -> None:
        self._checked = checked
        gates, task = self._decays(), self._task
        k, v = (x.double().transpose(0, 1) for x in self._whole[KEYS])
        for block in state_blocks(self._schedule, self._rank):
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
            RESULTS: ("the result",),
            QUERY_GRADIENTS: ("dq",),
            KEY_GRADIENTS: ("dk", "dv"),
            GATE_GRADIENTS: ("dg",),
        }
        exact, sizes = self._exact(absolute=False), self._exact(absolute=True)
        share = self._task.layout.length(self._rank) / self._task.layout.sequence
        for tensor, found in self._layer.outputs.items():
            for name, ours, whole, size in zip(names[tensor], found, exact[tensor], sizes[tensor], strict=False):
                expected = shard(whole, self._task.layout, self._rank)
                scale = (float(size.norm()) ** 2 * share) ** 0.5  # the gradient of a gate of decay 0 has size 0
                error = float((ours.double() - expected).norm()) / max(scale, 1e-9)
                if not error <= TOLERANCE[DTYPES[self._task.workload.dtype]]:
                    raise RunError(f"rank {self._rank}: {name} differs from that of a single process by {error:.2g}")

    def _exact(self, absolute: bool) -> Mapping[int, Sequence[Tensor]]:
        """The outputs of the whole sequence, in float64; of absolute values, their size without cancellation of terms.

        That is the scale of rounding errors.
        """
        signed = [x.double() for x in (*self._whole[QUERIES], *self._whole[KEYS])]
        q, *dout, k, v = [x.abs() for x in signed] if absolute else signed
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *(each.double() for each in self._whole[GATES]))]
        out = self._attended(leaves[0], leaves[1], leaves[2], self._decays(*leaves[3:]))
        if not self._task.is_backward:
            return {RESULTS: [out.detach()]}
        dq, dk, dv, *dgates = torch.autograd.grad(out, leaves, dout[0])
        return {QUERY_GRADIENTS: [dq], KEY_GRADIENTS: [dk, dv], GATE_GRADIENTS: dgates}

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
        given = gates or self._whole[GATES]
        if given:
            found = given[0].transpose(0, 1)
            return found if found.dim() == 4 else found[..., None]
        if self._task.workload.decay == "none":
            return None
        decays = torch.tensor(self._task.decays, dtype=torch.float64, device=self._whole[KEYS][0].device)
        return decays.log().view(1, 1, -1, 1)


def random_gates(task: LinearTask, k: Tensor) -> Tensor | None:
    """Logarithms of random decays for keys [batch, positions, KV heads, head_dim]; None unless the task has gates."""
    if not task.has_gates:
        return None
    shape = k.shape if task.workload.decay == "channel" else k.shape[:3]
    random = torch.Generator().manual_seed(1)
    return (-2 * DECAY_RATE * torch.rand(shape, generator=random)).to(k.device)
