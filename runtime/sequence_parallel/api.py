"""Exact attention over a sequence that is spread over the ranks of a process group.

>>> import torch.distributed as dist
>>> from runtime import attention
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> q, k, v = (torch.randn(2, 16, heads, 64) for heads in (8, 2, 2))       # this rank's shard
>>> attention(q, k, v, schedule="zigzag-ring-attention", causal=True).shape
torch.Size([2, 16, 8, 64])

Keywords of the call say what is attended to and where it runs. How schedules of a name are built travels in one object,
the same that predictions take:

>>> from tasp_lab.schedules.attention.options import AttentionOptions
>>> attention(q, k, v, schedule="tasp", options=AttentionOptions("both", trim=False, dataflow="rotate-q")).shape
torch.Size([2, 16, 8, 64])
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist

from runtime.executor.transports import Group, make_transport
from runtime.kernels.registry import choose_kernel
from runtime.sequence_parallel.agreement import Call, Proposal
from runtime.sequence_parallel.autograd import Plan, attend
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
from tasp_lab.core.errors import ScheduleError, TaspLabError, WorkloadError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes, check_fit
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEYS, QUERIES, TENSORS, AttentionTask
from tasp_lab.schedules.build import attention_layout, attention_schedules, groups_on
from tasp_lab.schedules.registry import LINEAR
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload, documents_of


class AttentionKeywords(TypedDict, total=False):
    """The keywords of `attention`; see `attention_with_lse`."""

    schedule: str | Schedule | Passes
    group: Group
    causal: bool
    window: int | None
    cu_seqlens: Sequence[int] | torch.Tensor | None
    cached_keys: int
    scale: float | None
    topology: Topology | None
    kernel: str
    transport: str
    options: AttentionOptions
    timeout_s: float


@uncompiled
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[AttentionKeywords]) -> torch.Tensor:
    """The result of `attention_with_lse` alone: attention of this rank's queries to the keys of all ranks.

    Under torch.compile the call is a graph break: what is before and after it is compiled, it itself runs as it is.
    """
    return attention_with_lse(q, k, v, **keywords)[0]


@uncompiled
def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    schedule: str | Schedule | Passes = "tasp",
    group: Group = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    cached_keys: int = 0,
    scale: float | None = None,
    topology: Topology | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    options: AttentionOptions = BOTH_PASSES,
    timeout_s: float = 300.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks; every rank of the group calls it.

    The result is differentiable: every rank of the group then goes back through it, too, in the same order if there are
    several layers, and gets the gradients of its own shard. If orders differ, all ranks raise `RunError`. All ranks
    must want gradients, or none of them. Passes are not captured in CUDA graphs
    (docs/decisions/0020-copy-engines-and-graphs.md).

    Parameters
    ----------
    q : [batch, positions, heads, head_dim], this rank's shard: the positions that the schedule's layout assigns
        (`tasp_lab.schedules.build.attention_layout`, `runtime.sequence_parallel.sharding.shard`). float32,
        bfloat16 or float16, any strides.
    k, v : [batch, positions, kv_heads, head_dim]; `heads` is a multiple of `kv_heads`. With `cached_keys` they are of
        the cached positions of the rank, too, which come first.
    schedule : a name in `tasp_lab.schedules.registry.ATTENTION`, such as ``tasp`` or ``usp:2x4``; or
        schedules for this workload and world size, as `tasp_lab.schedules.build.attention_schedules`
        builds them: a forward pass, or both as `tasp_lab.schedules.attention.backward.Passes` where gradients are
        wanted.
    group : the process group; all ranks if None.
    causal : whether a query sees only the keys at its position and before it.
    window : with `causal`, how many keys a query sees at most, its own included.
    cu_seqlens : for packed batches, where in the sequence of all ranks each document begins, and where the last ends;
        queries see keys of their own document only, and every document is placed by itself.
    cached_keys : how many positions of the sequence of all ranks, from its first, have keys and values only. The others
        lie as the layout assigns them after these (`tasp_lab.workload.sequence_layout.SequenceLayout.after`). No
        gradients.
    scale : of the scores; 1 / sqrt(head_dim) if None.
    topology : whose rings ``tasp`` uses, and whose routes messages take; a full mesh if None.
    kernel : ``flash-attn``, ``sdpa``, ``flash-attn-3``, ``reference``, or ``auto``, flash-attn or sdpa.
    transport : ``auto``, ``p2p``, ``batched``, ``all-to-all`` or ``symmetric-memory`` (see
        `runtime.executor.transports`).
    options : how schedules are built by name, such as trimming, buffers and dtypes on the wire. `groups` decides which
        rank has which shard, so `attention_layout` takes it, too; ``auto`` is refused if it is not ``consecutive`` on
        the topology.
        A `schedule` given as an object has been built with its own. `passes` is ``both``, where no gradients are wanted
        also ``forward``.
    timeout_s : how long to wait for another rank; on GPUs, once data moves, the group's own timeout applies.

    Returns
    -------
    The result, in shape and dtype of `q`, contiguous; and the log-sum-exp of its scores, [batch, heads, positions] in
    float32, through which no gradient flows.

    Raises
    ------
    `WorkloadError` for tensors that don't fit together or to the schedule, and for gradients wanted of a forward pass
    alone; `ScheduleError` for unknown names; `RunError` when the ranks don't agree, no
    kernel can do it, or a rank is lost. What is wrong is found before data moves, and names the rank.
    """
    check_member(group)
    call = Call(group, timeout_s)
    own: Proposal | TaspLabError
    gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    try:
        workload = workload_of_shard(q, k, v, "causal" if causal else "full", window, bool(cached_keys))
        _check_cached(cached_keys, gradients)
        documents = None if cu_seqlens is None else documents_of(whole_numbers(cu_seqlens))
        chosen = choose_kernel(kernel, q.dtype, q.device, q.shape[3])
        sender = make_transport(transport, timeout_s, group, q.device, call.number)
        passes = passes_to_run(options, gradients)
        own = {
            "kind": "softmax",  # first: ranks that call the other function have other parameters
            "positions": k.shape[1],
            "queries": q.shape[1],
            "cached_keys": int(cached_keys),
            "documents": None if documents is None else described_documents(documents),
            "schedule": _schedule_name(schedule),
            "topology": None if topology is None else topology.name,
            "gradients": gradients,
            "transport": transport,
            "channels": sender.channels,
            "scale": _finite(workload.head_dim**-0.5 if scale is None else scale),
            **asdict(options),
            **known_to_all(workload),
        }
    except TaspLabError as error:
        own = error
    everyone = call.agree(own, apart=("positions", "queries"))
    lengths, queries = ([int(str(each[name])) for each in everyone] for name in ("positions", "queries"))

    def build() -> tuple[Schedule, ...]:
        whole = replace(workload, sequence=max(1, sum(lengths)), documents=documents, cached_keys=int(cached_keys))
        if sum(lengths) != sum(queries) + whole.cached_keys:
            raise WorkloadError(f"{sum(queries)} queries and {sum(lengths)} keys on all ranks, expected "
                                f"{whole.cached_keys} keys more than queries, the cached ones")  # fmt: skip
        built = _schedules(schedule, topology or mesh(len(lengths)), whole, passes)
        _check_lengths(built[0], lengths, KEYS)
        _check_lengths(built[0], queries, QUERIES)
        return built

    built = built_together(build, topology, group, timeout_s)
    name = schedule if isinstance(schedule, str) else built[0].name
    call.layer = described_layer(name, _task_of(built[0]).workload)
    backward = built[1] if len(built) > 1 else None
    agreed_scale = float(str(everyone[0]["scale"]))
    return attend(Plan(built[0], backward, dist.get_rank(group), chosen, agreed_scale, sender), call, q, k, v)


def _schedule_name(schedule: str | Schedule | Passes) -> str:
    """In words that two schedules share only if they are the same."""
    if isinstance(schedule, str):
        return schedule
    given = _given(schedule)
    return " ".join([given[0].name, *(each.digest for each in given)])


def _given(schedule: Schedule | Passes) -> tuple[Schedule, ...]:
    return schedule if isinstance(schedule, Passes) else (schedule,)


def _check_cached(cached_keys: int, gradients: bool) -> None:
    if gradients and cached_keys:
        raise WorkloadError(
            f"cached_keys: {cached_keys}, expected 0 where gradients are wanted, or call under torch.no_grad()"
        )


def _finite(scale: float) -> float:
    if not math.isfinite(scale):
        raise WorkloadError(f"scale: {scale}, expected a finite number")
    return float(scale)


def _schedules(
    schedule: str | Schedule | Passes, topology: Topology, workload: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """One for each pass: of that name, or the given ones if they fit. Raises `WorkloadError` and `ScheduleError`."""
    if isinstance(schedule, str):
        return _built_by_name(schedule, topology, workload, options)
    given = _given(schedule)
    for each in given:
        made_for = each.task.workload if isinstance(each.task, AttentionTask) else None
        if made_for != workload or each.world_size != topology.world_size:
            raise WorkloadError(
                f"the schedule is for {each.world_size} ranks and {made_for or 'no attention'}, "
                f"expected {topology.world_size} ranks and {workload}"
            )
    if options.passes == "both" and len(given) < 2:
        raise WorkloadError("gradients are required, but the schedule has no backward pass; expected attention_passes")
    if _task_of(given[0]).is_backward:
        raise WorkloadError("the schedule is a backward pass, expected a forward pass or both")
    if len(given) > 1:
        _check_fit(*given)
    return given if options.passes == "both" else given[:1]


_check_fit = lru_cache(maxsize=32)(check_fit)


@lru_cache(maxsize=32)
def _built_by_name(
    schedule: str, topology: Topology, workload: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The schedules of a name. Layers are called with the same ones again and again.

    Raises `WorkloadError` for groups that the layout of the shards does not follow unless it knew the topology.
    """
    if schedule in LINEAR:
        raise ScheduleError(f"schedule {schedule!r} is for linear attention, expected one for softmax attention, "
                            "or call runtime.linear_attention")  # fmt: skip
    built = attention_schedules(schedule, topology, workload, options=options)
    expected = attention_layout(schedule, workload, topology.world_size, options)
    if _task_of(built[0]).layout != expected:
        raise WorkloadError(
            f"groups of schedule {schedule!r} on {topology.name} are {groups_on(schedule, topology, options)}, but "
            "auto gave ranks their shards as of consecutive groups, expected options with groups, here and in "
            "attention_layout"
        )
    return built


def _check_lengths(schedule: Schedule, lengths: Sequence[int], tensor: int) -> None:
    """Raise `WorkloadError` unless every rank has as many positions of a tensor as the layout gives it."""
    task = _task_of(schedule)
    what = TENSORS[tensor] if task.workload.cached_keys else "positions"
    check_lengths(schedule.name, task.layout, lengths, task.lengths_of(tensor), what)


def _task_of(schedule: Schedule) -> AttentionTask:
    assert isinstance(schedule.task, AttentionTask), "a schedule of attention has a task"
    return schedule.task
