"""The forward and backward pass of attention on one rank, and both as one differentiable operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from runtime.executor.executor import Executor
from runtime.executor.transports import Transport
from runtime.kernels.registry import Kernel
from runtime.sequence_parallel.backward import BackwardLayer, Saved, retained_blocks
from runtime.sequence_parallel.forward import Layer, store_keys_and_values
from runtime.sequence_parallel.gradient_sums import Sums
from tasp_lab.attention.backward import dataflow_of
from tasp_lab.errors import RunError
from tasp_lab.schedule.buffer_layout import CallRow, RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule

Tensor = torch.Tensor


@dataclass(frozen=True)
class Plan:
    """The schedules, kernel and transport of one rank. `backward` is None if no gradients are required."""

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
    """The result, lse [batch, positions, heads], and the bytes of the memory that the backward pass needs."""
    schedule = plan.forward
    assert schedule.task is not None, "a schedule of attention has a task"
    layer = Layer(schedule, plan.rank, q, plan.kernel, plan.scale)

    def compute(row: CallRow) -> None:
        layer.call(row, memory[row.offset : row.offset + row.size_bytes])

    part = _part(schedule, plan.rank)
    executor = Executor(schedule, plan.rank, plan.transport, compute, device=q.device, part=part)
    memory = executor.memory  # its callbacks must not reference the executor: a cycle would delay freeing the memory
    store_keys_and_values(executor, schedule.task.workload, k, v)
    executor.prepare()
    executor.run()
    retained = q.new_empty(0, dtype=torch.uint8)  # not a view, which would keep the whole memory alive
    if plan.backward is not None and dataflow_of(plan.backward) == "rotate-kv-back":
        retained = retained_blocks(part, memory, _part(plan.backward, plan.rank), schedule)
    return *layer.result(), retained


def run_backward(plan: Plan, saved: Saved, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from the gradient of the result."""
    schedule = plan.backward
    assert schedule is not None, "a plan with a backward pass"
    layer = BackwardLayer(schedule, plan.rank, saved, dout, plan.kernel, plan.scale)

    def compute(row: CallRow) -> None:
        reads = memory[row.offset : row.offset + row.size_bytes]
        for place, values in zip(row.adds, layer.call(row, reads), strict=True):
            sums.add(place, values)

    def view(block: int, offset: int) -> Sequence[Tensor]:
        return layer.gradient(memory[offset : offset + int(schedule.block_bytes[block])])

    part = _part(schedule, plan.rank)
    sums = Sums(part, view)
    executor = Executor(schedule, plan.rank, plan.transport, compute, sums.join, saved.q.device, part=part)
    memory = executor.memory
    layer.store_resident(executor)
    executor.prepare()
    executor.run()
    return layer.result(executor)


class _Attention(torch.autograd.Function):
    """The autograd function of attention; all ranks run their backward passes in the same order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        out, lse, retained = run_forward(plan, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, retained)
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
