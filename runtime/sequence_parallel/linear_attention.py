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

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from runtime.executor.copies import Copies
from runtime.executor.executor import Executor
from runtime.executor.transports import Group, Transport, make_transport
from runtime.kernels.linear_registry import Attend, choose_linear_kernel
from runtime.sequence_parallel.agreement import Call, Proposal
from runtime.sequence_parallel.autograd import backward_pass, load_blocks, part_of, saved_number
from runtime.sequence_parallel.call_inputs import (
    BOTH_PASSES,
    built_together,
    check_lengths,
    check_member,
    described_documents,
    described_layer,
    known_to_all,
    mesh,
    passes_to_run,
    uncompiled,
    whole_numbers,
    workload_of_shard,
)
from runtime.sequence_parallel.linear_inputs import check_ends, check_state, constant_decays, decay_of, described_decays
from runtime.sequence_parallel.linear_layer import Inputs, LinearLayer, SequenceEnds
from tasp_lab.core.errors import TaspLabError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.schedules.linear.task import (
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
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import documents_of

Tensor = torch.Tensor


class _Keywords(TypedDict, total=False):
    """Keywords of `linear_attention` that do not change the type of what it returns."""

    decay: Sequence[float] | Tensor | None
    gates: Tensor | None
    schedule: str
    group: Group
    causal: bool
    cu_seqlens: Sequence[int] | Tensor | None
    initial_state: Tensor | None
    topology: Topology | None
    kernel: str
    transport: str
    options: AttentionOptions
    timeout_s: float


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_final_state: Literal[False] = False, **keywords: Unpack[_Keywords]
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_final_state: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Tensor, Tensor | None]: ...


@uncompiled
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Sequence[float] | Tensor | None = None,
    gates: Tensor | None = None,
    schedule: str = "lasp-2",
    group: Group = None,
    causal: bool = True,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    topology: Topology | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    options: AttentionOptions = BOTH_PASSES,
    timeout_s: float = 300.0,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Linear attention of this rank's queries over the keys of all ranks; every rank of the group calls it.

    The state of a KV head is ``S_i = a_i S_(i-1) + k_i v_i``, the output ``o_i = q_i S_i``. Feature maps, scales and
    normalisation are the caller's. Computed in float32. Differentiable in q, k, v, the gates and the states, as
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
    schedule : a name in `tasp_lab.schedules.registry.LINEAR`.
    causal : if False every query sees all keys, without decay.
    cu_seqlens : for packed batches, where in the sequence of all ranks each document begins, and where the last ends;
        states begin anew at each.
    initial_state : the state before the first position, [batch, kv_heads, head_dim of k, head_dim of v], float32; 0 if
        None. Given on the rank that has the first position, None elsewhere. Its gradient is there, too.
    return_final_state : whether to return the state behind the last position, too, equal on all ranks. Neither state
        goes with packed documents, a full mask or schedules other than those in
        `tasp_lab.schedules.registry.state_schedules`.
    kernel : ``fla``, ``torch``, or ``auto``, the fastest that can do it (`runtime.kernels.linear_registry`).
    group, topology, transport, options, timeout_s : see `runtime.sequence_parallel.api.attention_with_lse`.

    Returns the outputs, in shape and dtype of `q`; with `return_final_state` also the state, a pair: the state
    is float32, on the rank that has the last position, and None elsewhere.

    Raises `WorkloadError` for tensors and decays that don't fit together or to the schedule, `ScheduleError` for
    unknown names, `RunError` when the ranks don't agree, no kernel can do it, or one is lost.
    """
    check_member(group)
    call = Call(group, timeout_s)
    own: Proposal | TaspLabError
    given = [each for each in (q, k, v, gates, initial_state) if each is not None]
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    try:
        workload = workload_of_shard(q, k, v, "causal" if causal else "full", window=None, cached=False)
        decays = constant_decays(workload, decay)
        workload = replace(workload, kind="linear", decay=decay_of(workload, k, decays, gates))
        documents = None if cu_seqlens is None else documents_of(whole_numbers(cu_seqlens))
        check_state(workload, initial_state, k.device)
        chosen = choose_linear_kernel(kernel, q.dtype, q.device)
        sender = make_transport(transport, timeout_s, group, q.device, call.number)
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
            "decays": described_decays(decays),
            "kernel": chosen.name,
            "initial_state": initial_state is not None,
            "final_state": bool(return_final_state),
            **asdict(options),
            **known_to_all(workload),
        }
    except TaspLabError as error:
        own = error
    everyone = call.agree(own, apart=("positions", "initial_state"))
    lengths = [int(str(each["positions"])) for each in everyone]
    with_state = [rank for rank, each in enumerate(everyone) if each["initial_state"]]
    if with_state or return_final_state:
        check_ends(schedule, causal, documents, with_state, lengths)

    def build() -> tuple[Schedule, ...]:
        whole = replace(workload, sequence=max(1, sum(lengths)), documents=documents)
        found = _built_by_name(schedule, topology or mesh(len(lengths)), whole, None, passes, decays)
        layout = _task_of(found[0]).layout
        check_lengths(schedule, layout, lengths, [layout.length(rank) for rank in range(layout.world_size)])
        return found

    built = built_together(build, topology, group, timeout_s)
    call.layer = described_layer(schedule, _task_of(built[0]).workload)
    rank = dist.get_rank(group)
    has_last = bool(return_final_state) and rank == max(each for each, length in enumerate(lengths) if length)
    attend = chosen.attend(q.dtype)
    plan = LinearPlan(built[0], built[1] if len(built) > 1 else None, rank, sender, has_last, attend)
    if plan.backward is None:
        out, state = _run_forward(plan, q, k, v, gates, initial_state)[:2]
    else:
        out, state = LinearAttention.apply(q, k, v, gates, initial_state, plan, call)  # type: ignore[no-untyped-call]
    return (out, state) if return_final_state else out


@dataclass(frozen=True)
class LinearPlan:
    """The schedules and transport of one rank. `backward` is None if no gradients are required."""

    forward: Schedule
    backward: Schedule | None
    rank: int
    transport: Transport
    gives_state: bool
    attend: Attend

    def layer(self, schedule: Schedule, inputs: Inputs, ends: SequenceEnds) -> LinearLayer:
        return LinearLayer(schedule, self.rank, inputs, ends, self.attend)


def _run_forward(
    plan: LinearPlan, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The outputs, the last state where this rank has it, and the bytes of the states for the backward pass."""
    inputs = {QUERIES: (q,), KEYS: (k, v), GATES: () if gates is None else (gates,)}
    layer = plan.layer(plan.forward, inputs, SequenceEnds(initial, plan.gives_state))
    copies = _run(plan, plan.forward, layer, q.new_empty(0, dtype=torch.uint8), ())
    saved = [] if plan.backward is None else _saved(plan.forward, plan.backward, plan.rank)
    left = [copies.left_behind(forward) for _, forward in saved]
    state = layer.final_state() if plan.gives_state else None
    saved_bytes = torch.cat([q.new_empty(0, dtype=torch.uint8), *left])
    plan.transport.give_back(copies.memory)
    return layer.outputs[RESULTS][0].to(q.dtype), state, saved_bytes


def _run(plan: LinearPlan, schedule: Schedule, layer: LinearLayer, left: Tensor, blocks: Sequence[int]) -> Copies:
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


class LinearAttention(torch.autograd.Function):
    """Both passes."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, initial: Tensor | None, plan: LinearPlan,
        call: Call,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        out, state, left = _run_forward(plan, q, k, v, gates, initial)
        ctx.save_for_backward(q, k, v, gates, initial, left, saved_number(call))
        ctx.plan, ctx.call = plan, call
        return out, state

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a compiled function itself calls backward
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, gates, initial, left, number = ctx.saved_tensors
        plan: LinearPlan = ctx.plan
        assert plan.backward is not None, "gradients were wanted when the forward pass was planned"
        inputs = {QUERIES: (q, dout), KEYS: (k, v), GATES: () if gates is None else (gates,)}
        layer = plan.layer(plan.backward, inputs, SequenceEnds(initial, final_gradient=dstate))
        blocks = [block for block, _ in _saved(plan.forward, plan.backward, plan.rank)]
        with backward_pass(ctx.call, number):
            copies = _run(plan, plan.backward, layer, left, blocks)
        plan.transport.give_back(copies.memory)
        dq, dk, dv = (*layer.outputs[QUERY_GRADIENTS], *layer.outputs[KEY_GRADIENTS])
        dgates = layer.outputs[GATE_GRADIENTS][0] if _task_of(plan.backward).has_gates else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dgates, layer.initial_gradient, None, None


def _task_of(schedule: Schedule) -> LinearTask:
    assert isinstance(schedule.task, LinearTask), "a schedule of linear attention has a task"
    return schedule.task


_built_by_name = lru_cache(maxsize=32)(linear_schedules)
"""Layers are called with the same schedules again and again."""
