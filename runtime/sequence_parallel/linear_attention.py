"""Linear attention over a sequence that is spread over the ranks of a process group.

>>> import torch.distributed as dist
>>> from runtime import linear_attention
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))          # this rank's shard
>>> gates = -torch.rand(2, 16, 4)                                   # logarithms of decays
>>> linear_attention(q, k, v, gates=gates, schedule="lasp-2").shape
torch.Size([2, 16, 4, 8])
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from runtime.executor.copies import Copies
from runtime.executor.executor import Executor
from runtime.executor.transports import Group, Transport, make_transport
from runtime.sequence_parallel.agreement import Proposal, exchange, require_equal
from runtime.sequence_parallel.autograd import load_blocks, part_of
from runtime.sequence_parallel.call_inputs import (
    BOTH_PASSES,
    built_together,
    check_lengths,
    check_member,
    described_documents,
    known_to_all,
    mesh,
    passes_to_run,
    uncompiled,
    whole_numbers,
    workload_of_shard,
)
from runtime.sequence_parallel.linear_layer import LinearLayer
from tasp_lab.attention.options import AttentionOptions
from tasp_lab.errors import RunError, TaspLabError, WorkloadError
from tasp_lab.linear_attention.registry import linear_schedules
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
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Decay, Workload, documents_of

Tensor = torch.Tensor


@uncompiled
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Sequence[float] | None = None,
    gates: Tensor | None = None,
    schedule: str = "lasp-2",
    group: Group = None,
    causal: bool = True,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    topology: Topology | None = None,
    transport: str = "auto",
    options: AttentionOptions = BOTH_PASSES,
    timeout_s: float = 300.0,
) -> Tensor:
    """Linear attention of this rank's queries over the keys of all ranks; every rank of the group calls it.

    The state of a KV head is ``S_i = a_i S_(i-1) + k_i v_i``, the output ``o_i = q_i S_i``. Feature maps, scales and
    normalisation are the caller's. Computed in float32. Differentiable in q, k, v and the gates, as
    `runtime.sequence_parallel.api.attention` is; under torch.compile the call is a graph break.

    Parameters
    ----------
    q : [batch, positions, heads, head_dim], this rank's shard: consecutive positions, also of a packed batch (see
        `tasp_lab.workload.sequence_layout.contiguous`).
    k, v : [batch, positions, kv_heads, head_dim]; `heads` is a multiple of `kv_heads`.
    decay : the same a_i at all positions, a number above 0 and at most 1 per KV head; equal on all ranks.
    gates : the logarithm of each a_i, at most 0: [batch, positions, kv_heads], or a number per channel of the keys,
        [batch, positions, kv_heads, head_dim]; float32. Without either nothing decays. Checked on CPU only, since a
        GPU would have to wait.
    schedule : a name in `tasp_lab.linear_attention.registry.LINEAR`.
    causal : if False every query sees all keys, without decay.
    cu_seqlens : for packed batches, where in the sequence of all ranks each document begins, and where the last ends;
        states begin anew at each.
    group, topology, transport, options, timeout_s : see `runtime.sequence_parallel.api.attention_with_lse`.

    Returns the outputs, in shape and dtype of `q`.

    Raises `WorkloadError` for tensors and decays that don't fit together or to the schedule, `ScheduleError` for
    unknown names, `RunError` when the ranks don't agree or one is lost.
    """
    check_member(group)
    own: Proposal | TaspLabError
    given = [each for each in (q, k, v, gates) if each is not None]
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    try:
        workload = workload_of_shard(q, k, v, "causal" if causal else "full", window=None, cached=False)
        workload = replace(workload, kind="linear", decay=_decay_of(workload, k, decay, gates))
        decays = () if decay is None else tuple(float(each) for each in decay)
        documents = None if cu_seqlens is None else documents_of(whole_numbers(cu_seqlens))
        sender = make_transport(transport, timeout_s, group, q.device)
        passes = passes_to_run(options, wanted)
        own = {
            "kind": "linear",  # first: ranks that call the other function have other parameters
            "positions": q.shape[1],
            "documents": None if documents is None else described_documents(documents),
            "schedule": schedule,
            "topology": None if topology is None else topology.name,
            "gradients": wanted,
            "transport": transport,
            "channels": sender.channels,
            "decays": _described(decays),
            **asdict(options),
            **known_to_all(workload),
        }
    except TaspLabError as error:
        own = error
    everyone = exchange(own, q.device, group, timeout_s)
    require_equal(everyone, [name for name in everyone[0] if name != "positions"])
    lengths = [int(str(each["positions"])) for each in everyone]

    def build() -> tuple[Schedule, ...]:
        whole = replace(workload, sequence=max(1, sum(lengths)), documents=documents)
        found = _built_by_name(schedule, topology or mesh(len(lengths)), whole, None, passes, decays)
        layout = _task_of(found[0]).layout
        check_lengths(schedule, layout, lengths, [layout.length(rank) for rank in range(layout.world_size)])
        return found

    built = built_together(build, topology, q.device, group, timeout_s)
    plan = _Plan(built[0], built[1] if len(built) > 1 else None, dist.get_rank(group), sender)
    if plan.backward is None:
        return _run_forward(plan, q, k, v, gates)[0]
    out: Tensor = _LinearAttention.apply(q, k, v, gates, plan)  # type: ignore[no-untyped-call]
    return out


def _decay_of(workload: Workload, k: Tensor, decay: Sequence[float] | None, gates: Tensor | None) -> Decay:
    """Which decay a layer has. Raises `WorkloadError` for decays that are none, or of a wrong shape."""
    if decay is not None and gates is not None:
        raise WorkloadError(
            "decay and gates are both given, expected one of them: constant decays, or their logarithms"
        )
    if decay is not None:
        if len(decay) != workload.kv_head_count:
            raise WorkloadError(f"decay: {len(decay)} numbers, expected {workload.kv_head_count}, one per KV head")
        for head, each in enumerate(decay):
            if not 0 < each <= 1:
                raise WorkloadError(f"decay of KV head {head}: {each}, expected a number above 0 and at most 1")
        return "head"
    if gates is None:
        return "none"
    shapes: dict[tuple[int, ...], Decay] = {tuple(k.shape[:3]): "scalar", tuple(k.shape): "channel"}
    kind = shapes.get(tuple(gates.shape))
    if kind is None:
        raise WorkloadError(f"gates are {list(gates.shape)}, k is {list(k.shape)}, expected the shape of k with or "
                            "without its last dimension")  # fmt: skip
    if gates.dtype != torch.float32 or gates.device != k.device:
        raise WorkloadError(f"gates are {gates.dtype} on {gates.device}, expected torch.float32 on {k.device}")
    if gates.device.type == "cpu":
        wrong = ~((gates <= 0) & gates.isfinite())
        if wrong.any():
            raise WorkloadError(f"gates: {float(gates[wrong][0]):g}, expected finite numbers of at most 0, the "
                                "logarithms of decays of at most 1")  # fmt: skip
    return kind


def _described(decays: Sequence[float]) -> str:
    """In few letters that two lists of decays share only if they are the same."""
    digest = hashlib.sha256(repr(decays).encode()).hexdigest()[:8]
    return f"{min(decays):g} to {max(decays):g} ({digest})" if decays else "none"


@dataclass(frozen=True)
class _Plan:
    """The schedules and transport of one rank. `backward` is None if no gradients are required."""

    forward: Schedule
    backward: Schedule | None
    rank: int
    transport: Transport


def _run_forward(plan: _Plan, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs, and the bytes of the states that the backward pass starts with."""
    inputs = {QUERIES: (q,), KEYS: (k, v), GATES: () if gates is None else (gates,)}
    layer = LinearLayer(plan.forward, plan.rank, inputs)
    copies = _run(plan, plan.forward, layer, q.new_empty(0, dtype=torch.uint8), ())
    saved = [] if plan.backward is None else _saved(plan.forward, plan.backward, plan.rank)
    left = [copies.left_behind(forward) for _, forward in saved]
    return layer.outputs[RESULTS][0].to(q.dtype), torch.cat([q.new_empty(0, dtype=torch.uint8), *left])


def _run(plan: _Plan, schedule: Schedule, layer: LinearLayer, left: Tensor, blocks: Sequence[int]) -> Copies:
    """Run a pass; `left` are the states with which it starts, of these blocks."""
    part = part_of(schedule, plan.rank)
    executor = Executor(schedule, plan.rank, plan.transport, layer, left.device, part=part)
    load_blocks(executor.copies, blocks, left)
    executor.prepare()
    executor.run()
    return executor.copies


@lru_cache(maxsize=16)
def _saved(forward: Schedule, backward: Schedule, rank: int) -> list[tuple[int, int]]:
    """The states with which a rank starts its backward pass: their blocks there, and in the forward pass."""
    task = _task_of(backward)
    here, there = task.saved(_task_of(forward))
    own = backward.initial[rank, here] & (task.tensor[here] == PREFIX_STATES)
    return list(zip(here[own].tolist(), there[own].tolist(), strict=True))


class _LinearAttention(torch.autograd.Function):
    """Both passes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, plan: _Plan) -> Tensor:
        out, left = _run_forward(plan, q, k, v, gates)
        ctx.save_for_backward(q, k, v, gates, left)
        ctx.plan = plan
        return out

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a compiled function itself calls backward
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, gates, left), plan = ctx.saved_tensors, ctx.plan
        inputs = {QUERIES: (q, dout), KEYS: (k, v), GATES: () if gates is None else (gates,)}
        layer = LinearLayer(plan.backward, plan.rank, inputs)
        blocks = [block for block, _ in _saved(plan.forward, plan.backward, plan.rank)]
        try:
            _run(plan, plan.backward, layer, left, blocks)
        except RunError as error:
            raise RunError(f"{error}, in the backward pass") from None
        dq, dk, dv = (*layer.outputs[QUERY_GRADIENTS], *layer.outputs[KEY_GRADIENTS])
        dgates = layer.outputs[GATE_GRADIENTS][0] if plan.backward.task.has_gates else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dgates, None


def _task_of(schedule: Schedule) -> LinearTask:
    assert isinstance(schedule.task, LinearTask), "a schedule of linear attention has a task"
    return schedule.task


_built_by_name = lru_cache(maxsize=32)(linear_schedules)
"""Layers are called with the same schedules again and again."""
