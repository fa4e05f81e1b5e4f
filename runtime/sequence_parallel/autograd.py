"""The forward and backward pass of attention on one rank, and both as one differentiable operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from runtime.executor.copies import Copies
from runtime.executor.executor import Executor
from runtime.executor.messages import Transport
from runtime.kernels.registry import Kernel
from runtime.sequence_parallel.agreement import Call
from runtime.sequence_parallel.layer import AttentionLayer
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.rank_part import RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask

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


class Saved(NamedTuple):
    """Tensors that the forward pass saves on a rank: [batch, positions of the shard, heads or kv_heads, head_dim].

    `lse` is [batch, positions, heads]. `left` holds, as bytes and in the order of their numbers, the blocks of other
    ranks with which the backward pass starts, as the forward pass has left them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    left: Tensor


def attend(plan: Plan, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of a rank's queries: the result, as `q` in shape and dtype, and lse, [batch, heads, positions].

    Differentiable in q, k and v where the plan has a backward pass; lse is not.
    """
    if plan.backward is None:
        out, lse, _ = run_forward(plan, q, k, v)
    else:
        out, lse = _Attention.apply(q, k, v, plan, call)  # type: ignore[no-untyped-call]
    return out, lse.transpose(1, 2)


def run_forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, lse [batch, positions, heads], and the bytes of the memory that the backward pass needs."""
    layer = AttentionLayer(plan.forward, plan.rank, plan.kernel, plan.scale, {QUERIES: (q,), KEYS: (k, v)})
    copies = _run(plan, plan.forward, layer, q.new_empty(0, dtype=torch.uint8))
    left = q.new_empty(0, dtype=torch.uint8)  # not a view, which would keep the whole memory alive
    if plan.backward is not None:
        left = torch.cat([left, *(copies.left_behind(block) for block in copies_of_others(plan.backward, plan.rank))])
    out, lse = layer.output(copies, RESULTS, q.dtype)
    plan.transport.give_back(copies.memory)
    return out, lse, left


def run_backward(plan: Plan, saved: Saved, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from the gradient of the result."""
    assert plan.backward is not None, "a plan with a backward pass"
    inputs = {QUERIES: (saved.q, dout, saved.lse, saved.out), KEYS: (saved.k, saved.v)}
    layer = AttentionLayer(plan.backward, plan.rank, plan.kernel, plan.scale, inputs)
    copies = _run(plan, plan.backward, layer, saved.left)
    (dq,) = layer.output(copies, QUERY_GRADIENTS, dout.dtype)
    dk, dv = layer.output(copies, KEY_GRADIENTS, dout.dtype)
    plan.transport.give_back(copies.memory)
    return dq, dk, dv


def _run(plan: Plan, schedule: Schedule, layer: AttentionLayer, left: Tensor) -> Copies:
    """Run a pass; `left` are the blocks of other ranks with which it starts, as the pass before has left them."""
    part = part_of(schedule, plan.rank)
    executor = Executor(schedule, plan.rank, plan.transport, layer, left.device, part=part)
    layer.load(executor.copies)
    load_copies_of_others(executor.copies, schedule, left)
    executor.prepare()
    executor.run()
    return executor.copies


@lru_cache(maxsize=16)
def copies_of_others(schedule: Schedule, rank: int) -> list[int]:
    """The blocks of other ranks with which a rank starts a pass."""
    assert isinstance(schedule.task, AttentionTask), "a schedule of attention has a task"
    found: list[int] = np.flatnonzero(schedule.initial[rank] & (schedule.task.owner != rank)).tolist()
    return found


def load_copies_of_others(copies: Copies, schedule: Schedule, left: Tensor) -> None:
    """Copy the blocks of other ranks, in the order of their numbers, into the memory."""
    load_blocks(copies, copies_of_others(schedule, copies.part.rank), left)


def load_blocks(copies: Copies, blocks: Sequence[int], left: Tensor) -> None:
    """Copy the bytes of resident blocks, one after the other in `left`, into the memory."""
    start = 0
    for block in blocks:
        place = copies.data(block, copies.part.resident[block])
        place.copy_(left[start : start + len(place)])
        start += len(place)


def saved_number(call: Call) -> Tensor:
    """The number of a call as a tensor, to be saved with those of its forward pass.

    A checkpoint without reentry replaces saved tensors by those of a forward pass that it runs again, with a number of
    its own, and keeps everything else.
    """
    return torch.tensor(call.number, device="cpu")


@contextmanager
def backward_pass(call: Call, saved: Tensor | None = None) -> Iterator[None]:
    """The backward pass of a call, with its `saved_number` if it saves tensors: agreed on first, and named in errors.

    Raises `RunError` if the ranks run different passes, or if one is lost.
    """
    computed_as = None if saved is None else int(saved)
    call.agree_on_backward(computed_as)
    try:
        yield
    except RunError as error:
        raise RunError(f"{error}, in the backward pass of {call.described(computed_as)}") from None


class _Attention(torch.autograd.Function):
    """The autograd function of attention; all ranks run their backward passes in the same order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, left = run_forward(plan, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, left, saved_number(call))
        ctx.mark_non_differentiable(lse)
        ctx.plan, ctx.call = plan, call
        return out, lse

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a compiled function itself calls backward
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *saved, number = ctx.saved_tensors
        with backward_pass(ctx.call, number):
            return *run_backward(ctx.plan, Saved(*saved), dout), None, None


@lru_cache(maxsize=16)
def part_of(schedule: Schedule, rank: int) -> RankPart:
    """The part of a rank. Layers are called with the same schedules again and again."""
    return rank_part(schedule, rank)
