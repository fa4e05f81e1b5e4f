"""Trials of linear attention: layers on random tensors, equal on all ranks, compared with float64."""

from __future__ import annotations

import torch

from runtime.executor.executor import Executor
from runtime.executor.message_io import Progress, no_progress
from runtime.executor.transports import Transport
from runtime.executor.views import DTYPES
from runtime.sequence_parallel.linear_layer import LinearLayer
from runtime.sequence_parallel.sharding import shard
from runtime.trials.attention import TOLERANCE, random_layer
from tasp_lab.errors import RunError
from tasp_lab.linear_attention.task import LinearTask
from tasp_lab.schedule.schedule import Schedule

Tensor = torch.Tensor


class LinearTrial:
    """A layer on one rank. Its check compares all rows with float64 and raises `RunError`."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: str = "cpu",
        progress: Progress = no_progress,
    ) -> None:
        assert isinstance(schedule.task, LinearTask), "a schedule of linear attention has a task"
        self._task, self._rank, self._checked = schedule.task, rank, True
        q, k, v, _ = random_layer(schedule.task.workload, DTYPES[schedule.task.workload.dtype], device)
        self._whole = q, k, v
        own_q, own_k, own_v = (shard(x, schedule.task.layout, rank) for x in self._whole)
        self._layer = LinearLayer(schedule, rank, own_q, own_k, own_v)
        self.executor = Executor(schedule, rank, transport, self._layer, device, progress)

    def set_up(self, checked: bool) -> None:
        self._checked = checked

    def check(self) -> None:
        """Compare the result with a single process."""
        if not self._checked or not self._layer.out.shape[1]:
            return
        q, k, v = self._whole
        exact = shard(exact_result(q, k, v, self._task.decay), self._task.layout, self._rank)
        error = float((self._layer.out.double() - exact).norm() / exact.norm())
        if not error <= TOLERANCE[DTYPES[self._task.workload.dtype]]:
            raise RunError(f"rank {self._rank}: the result differs from that of a single process by {error:.2g}")


def exact_result(q: Tensor, k: Tensor, v: Tensor, decay: tuple[float, ...]) -> Tensor:
    """Linear attention of a whole sequence in float64, by its recurrence: the state decays, then adds a position."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    per_head = torch.tensor(decay, dtype=torch.float64, device=q.device)[None, :, None, None]
    state = torch.zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=torch.float64, device=q.device)
    rows = []
    for at in range(q.shape[1]):
        state = per_head * state + torch.einsum("bhd,bhe->bhde", k[:, at], v[:, at])
        rows.append(torch.einsum("bhd,bhde->bhe", q[:, at], state.repeat_interleave(group, 1)))
    return torch.stack(rows, 1)
