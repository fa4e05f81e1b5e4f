"""Hidden states of a sequence that is spread over the ranks of a process group, moved to another sequence layout.

>>> import torch.distributed as dist
>>> from runtime import relayout
>>> from tasp_lab.workload.sequence_layout import contiguous, zigzag
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> x = torch.randn(2, 16, 256)                                     # this rank's shard
>>> torch.equal(relayout(x, contiguous(16, 1), zigzag(16, 1)), x)   # one rank has all positions in any layout
True
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from runtime.executor.executor import Executor
from runtime.executor.messages import Group, Transport
from runtime.executor.transports import make_transport
from runtime.sequence_parallel.agreement import Call, Proposal
from runtime.sequence_parallel.autograd import backward_pass, part_of
from runtime.sequence_parallel.call_inputs import (
    DTYPE_NAMES,
    built_together,
    check_lengths,
    check_member,
    mesh,
    uncompiled,
)
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import TaspLabError, WorkloadError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.hybrid.relayout import RELAYOUT, RelayoutTask
from tasp_lab.schedules.hybrid.relayout import relayout as relayout_schedules
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

Tensor = torch.Tensor


@uncompiled
def relayout(
    x: Tensor,
    before: SequenceLayout,
    after: SequenceLayout,
    group: Group = None,
    *,
    topology: Topology | None = None,
    transport: str = "auto",
    timeout_s: float = 300.0,
) -> Tensor:
    """The shard that this rank has of a sequence in another layout; every rank of the group calls it.

    Differentiable, as `runtime.sequence_parallel.api.attention` is: gradients go back the opposite way. Under
    torch.compile the call is a graph break.

    Parameters
    ----------
    x : [batch, positions, ...], this rank's shard in the layout `before`: float32, bfloat16 or float16, any strides.
    before, after : the layouts, equal on all ranks. Only positions that get another owner are sent; if there are none,
        the result is `x` itself.
    group, topology, transport, timeout_s : see `runtime.sequence_parallel.api.attention_with_lse`.

    Returns the shard in the layout `after`, [batch, positions, ...], in the dtype of `x`.

    Raises `WorkloadError` for a tensor that does not fit the layout, `ScheduleError` for layouts that do not fit each
    other, `RunError` when the ranks don't agree or one is lost. What is wrong is found before data moves.
    """
    check_member(group)
    call = Call(group, timeout_s)
    own: Proposal | TaspLabError
    wanted = torch.is_grad_enabled() and x.requires_grad
    try:
        workload = _workload_of(x, before)
        for layout in (before, after):
            _check_world_size(layout, dist.get_world_size(group))
        sender = make_transport(transport, timeout_s, group, x.device, call.number)
        own = {
            "kind": RELAYOUT,  # first: ranks that call another function have other parameters
            "positions": x.shape[1],
            "before": _described(before),
            "after": _described(after),
            "topology": None if topology is None else topology.name,
            "gradients": wanted,
            "transport": transport,
            "channels": sender.channels,
            "batch": workload.batch,
            "elements": workload.head_dim,
            "dtype": workload.dtype,
        }
    except TaspLabError as error:
        own = error
    everyone = call.agree(own, apart=("positions",))
    lengths = [int(str(each["positions"])) for each in everyone]

    def build() -> tuple[Schedule, ...]:
        check_lengths(RELAYOUT, before, lengths, [before.length(rank) for rank in range(before.world_size)])
        passes: Pass = "both" if wanted else "forward"
        return _built(topology or mesh(len(lengths)), workload, before, after, passes)

    built = built_together(build, topology, group, timeout_s)
    if not built[0].steps:
        return x
    call.layer = f"{RELAYOUT} of {before.sequence:,} positions, {before.name} to {after.name}, {workload.dtype}"
    plan = _Plan(built, dist.get_rank(group), sender)
    if not wanted:
        return _run(plan, built[0], x)
    out: Tensor = _Relayout.apply(x, plan, call)  # type: ignore[no-untyped-call]
    return out


def _workload_of(x: Tensor, before: SequenceLayout) -> Workload:
    """A layer whose hidden states have as many bytes; their other dimensions count as one head."""
    if x.dim() < 2 or x.dtype not in DTYPE_NAMES:
        raise WorkloadError(f"x is {list(x.shape)} of {x.dtype}, expected [batch, positions, ...] of "
                            f"{', '.join(map(str, DTYPE_NAMES))}")  # fmt: skip
    return Workload(before.sequence, x.shape[0], 1, head_dim=prod(x.shape[2:]), dtype=DTYPE_NAMES[x.dtype])


def _check_world_size(layout: SequenceLayout, world_size: int) -> None:
    if layout.world_size != world_size:
        raise WorkloadError(f"the {layout.name} layout is for {layout.world_size} ranks, the group has {world_size}")


@lru_cache(maxsize=32)
def _described(layout: SequenceLayout) -> str:
    """In few letters that two layouts share only if they are the same."""
    digest = hashlib.sha256(repr(layout.spans).encode()).hexdigest()[:8]
    return f"{layout.name} of {layout.sequence} positions ({digest})"


@dataclass(frozen=True)
class _Plan:
    """The schedules, the second one if gradients are wanted, and the transport of one rank."""

    passes: tuple[Schedule, ...]
    rank: int
    transport: Transport


def _run(plan: _Plan, schedule: Schedule, x: Tensor) -> Tensor:
    """The shard of a rank after a pass, from that before it."""
    executor = Executor(schedule, plan.rank, plan.transport, device=x.device, part=part_of(schedule, plan.rank))
    out = x.new_empty(x.shape[0], _task_of(schedule).result_layout.length(plan.rank), *x.shape[2:])
    rows = _rows(schedule, plan.rank, x.device)
    for here, there in rows.staying:
        out[:, there] = x[:, here]
    for block, here in rows.leaving:
        states = x.index_select(1, here).transpose(0, 1)
        executor.copies.store([block], [states.reshape(len(states), x.shape[0], 1, -1)])
    executor.prepare()
    executor.run()
    for block, there in rows.arriving:
        (states,) = executor.copies.resident([block])
        out[:, there] = states.transpose(0, 1).reshape(x.shape[0], len(states), *x.shape[2:])
    plan.transport.give_back(executor.memory)
    return out


class _Rows(NamedTuple):
    """Where positions are in the shard of a rank before and after a pass, by block of those that come or go."""

    staying: Sequence[tuple[Tensor, Tensor]]
    leaving: Sequence[tuple[int, Tensor]]
    arriving: Sequence[tuple[int, Tensor]]


@lru_cache(maxsize=16)
def _rows(schedule: Schedule, rank: int, device: torch.device) -> _Rows:
    task = _task_of(schedule)
    before, after = task.layout.positions(rank), task.result_layout.positions(rank)

    def rows(shard: IntArray, block: int) -> Tensor:
        return torch.from_numpy(np.searchsorted(shard, task.positions(block))).to(device)

    own, wanted = ({int(block) for block in np.flatnonzero(of == rank)} for of in (task.source, task.destination))
    return _Rows(
        [(rows(before, block), rows(after, block)) for block in own & wanted],
        [(block, rows(before, block)) for block in sorted(own - wanted)],
        [(block, rows(after, block)) for block in sorted(wanted - own)],
    )


class _Relayout(torch.autograd.Function):
    """Both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, call: Call) -> Tensor:
        ctx.plan, ctx.call = plan, call
        return _run(plan, plan.passes[0], x)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a compiled function itself calls backward
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        with backward_pass(ctx.call):
            return _run(ctx.plan, ctx.plan.passes[1], dout), None, None


def _task_of(schedule: Schedule) -> RelayoutTask:
    assert isinstance(schedule.task, RelayoutTask), "the schedule of a re-layout has a task"
    return schedule.task


_built = lru_cache(maxsize=32)(relayout_schedules)
"""Layers are called with the same layouts again and again."""
