"""Both passes of attention on one rank: forward, backward, and the two as one differentiable operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from runtime.backward_layer import BackwardLayer, Saved, left_behind
from runtime.executor import Executor
from runtime.kernels import Kernel
from runtime.layer import Layer, put_keys_home
from runtime.sums import Sums
from runtime.transport import Transport
from tasp_lab.attention_backward import way_of
from tasp_lab.errors import RunError
from tasp_lab.rooms import CallRow, RankPart, rank_part
from tasp_lab.schedule import Schedule

Tensor = torch.Tensor


@dataclass(frozen=True)
class Plan:
    """What a rank runs. `backward` is None where no gradient is wanted."""

    forward: Schedule
    backward: Schedule | None
    rank: int
    kernel: Kernel
    scale: float
    transport: Transport


def attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of a rank's queries: the result, as `q` in shape and dtype, and lse, [batch, heads, positions].

    Differentiable in q, k and v where the plan has a backward pass; lse is not.
    """
    if plan.backward is None:
        out, lse, _ = run_forward(plan, q, k, v)
    else:
        out, lse = _Attention.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
    return out, lse.transpose(1, 2)


def run_forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, lse [batch, positions, heads], and what has to be kept of the buffer for the backward pass."""
    schedule = plan.forward
    assert schedule.task is not None, "a schedule of attention has a task"
    layer = Layer(schedule, plan.rank, q, plan.kernel, plan.scale)

    def compute(row: CallRow) -> None:
        layer.call(row, buffer[row.offset : row.offset + row.size_bytes])

    part = _part(schedule, plan.rank)
    executor = Executor(schedule, plan.rank, plan.transport, compute, device=q.device, part=part)
    buffer = executor.buffer  # what an executor calls must not hold it: memory of a cycle is not freed at once
    put_keys_home(executor, schedule.task.workload, k, v)
    executor.prepare()
    executor.run()
    left = q.new_empty(0, dtype=torch.uint8)  # no view of the buffer, which would keep all of it
    if plan.backward is not None and way_of(plan.backward) == "reversed":
        left = left_behind(part, buffer, _part(plan.backward, plan.rank), schedule)
    return *layer.result(), left


def run_backward(plan: Plan, saved: Saved, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of the result."""
    schedule = plan.backward
    assert schedule is not None, "a plan with a backward pass"
    layer = BackwardLayer(schedule, plan.rank, saved, dout, plan.kernel, plan.scale)

    def compute(row: CallRow) -> None:
        reads = buffer[row.offset : row.offset + row.size_bytes]
        for place, values in zip(row.adds, layer.call(row, reads), strict=True):
            sums.add(place, values)

    def view(block: int, offset: int) -> Sequence[Tensor]:
        return layer.gradient(buffer[offset : offset + int(schedule.block_bytes[block])])

    part = _part(schedule, plan.rank)
    sums = Sums(part, view)
    executor = Executor(schedule, plan.rank, plan.transport, compute, sums.join, saved.q.device, part=part)
    buffer = executor.buffer
    layer.put_home(executor)
    executor.prepare()
    executor.run()
    return layer.result(executor)


class _Attention(torch.autograd.Function):
    """Attention as autograd sees it; on all ranks the backward passes run in the same order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        out, lse, left = run_forward(plan, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, left)
        ctx.mark_non_differentiable(lse)
        ctx.plan = plan
        return out, lse

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a compiled function itself calls backward
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        try:
            return *run_backward(ctx.plan, Saved(*ctx.saved_tensors), dout), None
        except RunError as error:
            raise RunError(f"{error}, in the backward pass") from None


@lru_cache(maxsize=16)
def _part(schedule: Schedule, rank: int) -> RankPart:
    return rank_part(schedule, rank)
