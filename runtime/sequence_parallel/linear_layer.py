"""A layer of linear attention on one rank: its tensors, and the kernels of its task by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.executor.views import Views
from runtime.kernels import linear_attention
from tasp_lab.errors import RunError
from tasp_lab.linear_attention.task import (
    APPLY_STATE,
    ATTEND,
    FOLD,
    KEYS,
    MAKE_STATE,
    QUERIES,
    RESULTS,
    LinearTask,
)
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedule.schedule import Schedule

Tensor = torch.Tensor


class LinearLayer:
    """One rank's layer, forward. `q`, `k` and `v` are those of its shard, [batch, positions, heads, head_dim].

    `out` is the result after a run, in the shape of `q`, float32. Use a new instance for each run.
    """

    def __init__(self, schedule: Schedule, rank: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        assert isinstance(schedule.task, LinearTask), "a schedule of linear attention has a task"
        task = schedule.task
        self.out = torch.empty_like(q, dtype=torch.float32)
        self._tensors: Mapping[int, Sequence[Tensor]] = {KEYS: (k, v), QUERIES: (q,), RESULTS: (self.out,)}
        self._tensor, self._chunk, self._count = task.tensor.tolist(), task.chunk.tolist(), task.count.tolist()
        own = [chunk for chunk, owner in enumerate(task.owner.tolist()) if owner == rank]
        counts = [self._count[chunk] for chunk in own]
        self._first = {chunk: sum(counts[:before]) for before, chunk in enumerate(own)}
        self._task, self._decays = task, torch.tensor(task.decay, device=q.device)

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        """Make a kernel call; returns what it adds to its only target."""
        decay = self._decays[slice(*self._task.heads_of(row.operands[0].blocks[0], KEYS))]
        if row.kernel == MAKE_STATE:
            ((k, v),) = operands
            state, total_decay = linear_attention.make_state(k, v, decay)
            return [(state[None], total_decay[None])]
        if row.kernel == ATTEND:
            (q,), (k, v) = operands
            return [(linear_attention.attend(q, k, v, decay, row.params[0]),)]
        if row.kernel == FOLD:
            ((states, decays),) = operands
            return [(linear_attention.fold(states, decays)[None],)]
        if row.kernel == APPLY_STATE:
            (q,), (states,) = operands
            return [(linear_attention.apply_state(q, states[0], decay),)]
        raise RunError(
            f"step {row.step}: there is no kernel {row.kernel!r} on {self._decays.device.type}, expected one of "
            f"{', '.join(self._task.kernels)}"
        )

    def bound(self, blocks: Sequence[int]) -> Views:
        """The rows and heads of a block of an own chunk, [positions, batch, heads, head_dim] each."""
        (block,) = blocks
        first = self._first[self._chunk[block]]
        rows = slice(first, first + self._count[self._chunk[block]])
        heads = slice(*self._task.heads_of(block, self._tensor[block]))
        return [each[:, rows, heads].transpose(0, 1) for each in self._tensors[self._tensor[block]]]

    def sent(self, block: int) -> Views:
        return self.bound([block])
