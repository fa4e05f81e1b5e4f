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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.executor.copies import Copies
from runtime.executor.messages import Group, Transport
from runtime.sequence_parallel.agreement import Proposal
from runtime.sequence_parallel.arguments import TIMEOUT_S, process_group
from runtime.sequence_parallel.calls import (
    DTYPE_NAMES,
    LayerCall,
    call_layer,
    check_lengths,
    lengths_of,
    uncompiled,
    with_digest,
)
from runtime.sequence_parallel.passes import run_pass, task_of
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import WorkloadError
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
    group: Group | DeviceMesh = None,
    *,
    topology: Topology | None = None,
    transport: str = "auto",
    timeout_s: float = TIMEOUT_S,
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

    Returns the shard in the layout `after`, [batch, positions, ...], in the dtype of `x`, also under `torch.autocast`.

    Raises `WorkloadError` for a tensor that does not fit the layout, `ScheduleError` for layouts that do not fit each
    other, `RunError` when the ranks don't agree or one is lost. What is wrong is found before data moves.
    """
    layer = _RelayoutCall(
        x, before, after, group=process_group(group), topology=topology, transport=transport, timeout_s=timeout_s
    )  # fmt: skip
    (out,) = call_layer(layer)
    moved: Tensor = out
    return moved


@dataclass
class _RelayoutCall(LayerCall):
    """A call of `relayout`; see `LayerCall`."""

    x: Tensor
    before: SequenceLayout
    after: SequenceLayout
    tensors: ClassVar[Sequence[str]] = ("x",)

    def propose(self, number: int) -> Proposal:
        x, n = self.x, dist.get_world_size(self.group)
        if x.dim() < 2 or x.dtype not in DTYPE_NAMES:
            raise WorkloadError(f"x is {list(x.shape)} of {x.dtype}, expected [batch, positions, ...] of "
                                f"{', '.join(map(str, DTYPE_NAMES))}")  # fmt: skip
        for layout in (self.before, self.after):
            if layout.world_size != n:
                raise WorkloadError(f"the {layout.name} layout is for {layout.world_size} ranks, the group has {n}")
        # A layer whose hidden states have as many bytes; their other dimensions count as one head.
        self.workload = Workload(
            self.before.sequence, x.shape[0], 1, head_dim=prod(x.shape[2:]), dtype=DTYPE_NAMES[x.dtype], mask="full"
        )
        return {
            "kind": RELAYOUT,
            "positions": x.shape[1],
            "before": _described(self.before),
            "after": _described(self.after),
            **self.proposed_transport(x.device, number),
            "batch": self.workload.batch,
            "elements": self.workload.head_dim,
            "dtype": self.workload.dtype,
        }

    def build(self, everyone: Sequence[Proposal], topology: Topology) -> tuple[Schedule, ...]:
        before = self.before
        expected = [before.length(rank) for rank in range(before.world_size)]
        check_lengths(RELAYOUT, before, lengths_of(everyone), expected)
        passes: Pass = "both" if self.gradients else "forward"
        return _built(topology, self.workload, before, self.after, passes)

    def described(self, schedules: Sequence[Schedule]) -> str:
        before, after = self.before, self.after
        return f"{RELAYOUT} of {before.sequence:,} positions, {before.name} to {after.name}, {self.workload.dtype}"

    def passes(self, schedules: tuple[Schedule, ...], everyone: Sequence[Proposal], rank: int) -> _Passes | None:
        return _Passes(schedules, rank, self.sender) if schedules[0].steps else None


@lru_cache(maxsize=32)
def _described(layout: SequenceLayout) -> str:
    """In few letters that two layouts share only if they are the same."""
    return with_digest(f"{layout.name} of {layout.sequence} positions", layout.position_spans)


@dataclass(frozen=True)
class _Passes:
    """Both passes of one rank; the backward pass goes the opposite way, and needs nothing of the forward pass."""

    schedules: tuple[Schedule, ...]
    rank: int
    transport: Transport
    outputs: ClassVar[int] = 1

    def forward(self, x: Tensor) -> tuple[tuple[Tensor], tuple[()]]:
        return (self._run(self.schedules[0], x),), ()

    def saved(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], kept: Sequence[Tensor]) -> tuple[()]:
        return ()

    def backward(self, saved: Sequence[Tensor], dout: Tensor) -> tuple[Tensor]:
        return (self._run(self.schedules[1], dout),)

    def _run(self, schedule: Schedule, x: Tensor) -> Tensor:
        """The shard of a rank after a pass, from that before it."""
        out = x.new_empty(x.shape[0], task_of(schedule, RelayoutTask).result_layout.length(self.rank), *x.shape[2:])
        rows = _rows(schedule, self.rank, x.device)
        for here, there in rows.staying:
            out[:, there] = x[:, here]

        def load(copies: Copies) -> None:
            for block, here in rows.leaving:
                states = x.index_select(1, here).transpose(0, 1)
                copies.store([block], [states.reshape(len(states), x.shape[0], 1, -1)])

        with run_pass(schedule, self.rank, self.transport, None, x.device, load) as copies:
            for block, there in rows.arriving:
                (states,) = copies.resident([block])
                out[:, there] = states.transpose(0, 1).reshape(x.shape[0], len(states), *x.shape[2:])
        return out


class _Rows(NamedTuple):
    """Where positions are in the shard of a rank before and after a pass, by block of those that come or go."""

    staying: Sequence[tuple[Tensor, Tensor]]
    leaving: Sequence[tuple[int, Tensor]]
    arriving: Sequence[tuple[int, Tensor]]


@lru_cache(maxsize=16)
def _rows(schedule: Schedule, rank: int, device: torch.device) -> _Rows:
    task = task_of(schedule, RelayoutTask)
    before, after = task.layout.positions(rank), task.result_layout.positions(rank)

    def rows(shard: IntArray, block: int) -> Tensor:
        return torch.from_numpy(np.searchsorted(shard, task.positions(block))).to(device)

    own, wanted = ({int(block) for block in np.flatnonzero(of == rank)} for of in (task.source, task.destination))
    return _Rows(
        [(rows(before, block), rows(after, block)) for block in own & wanted],
        [(block, rows(before, block)) for block in sorted(own - wanted)],
        [(block, rows(after, block)) for block in sorted(wanted - own)],
    )


_built = lru_cache(maxsize=32)(relayout_schedules)
"""Layers are called with the same layouts again and again."""
