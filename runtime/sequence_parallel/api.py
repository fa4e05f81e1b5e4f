"""Exact attention over a sequence that is spread over the ranks of a process group.

>>> import torch.distributed as dist
>>> from runtime import attention
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> q, k, v = (torch.randn(2, 16, heads, 64) for heads in (8, 2, 2))       # this rank's shard
>>> attention(q, k, v, schedule="zigzag-ring-attention", causal=True).shape
torch.Size([2, 16, 8, 64])

Keywords of the call say what is attended to and where it runs. How schedules of a name are built travels in one object,
the same that predictions take:

>>> from tasp_lab.attention.options import AttentionOptions
>>> attention(q, k, v, schedule="tasp", options=AttentionOptions("both", trim=False, dataflow="rotate-q")).shape
torch.Size([2, 16, 8, 64])
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import ParamSpec, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist

from runtime.executor.transports import Group, make_transport
from runtime.executor.views import DTYPES
from runtime.kernels.registry import choose_kernel
from runtime.sequence_parallel.agreement import Proposal, exchange, require_equal
from runtime.sequence_parallel.autograd import Plan, attend
from tasp_lab.attention.backward import Passes, check_fit
from tasp_lab.attention.options import AttentionOptions
from tasp_lab.attention.registry import attention_schedules
from tasp_lab.attention.task import AttentionTask
from tasp_lab.errors import RunError, TaspLabError, WorkloadError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Mask, Workload, documents_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _uncompiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """torch.compile calls the function as it is: what ranks tell each other cannot be traced."""
    found: Callable[_Arguments, _Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


BOTH_PASSES = AttentionOptions("both")
"""Forward, and backward where gradients are wanted."""


class AttentionKeywords(TypedDict, total=False):
    """The keywords of `attention`; see `attention_with_lse`."""

    schedule: str | Schedule | Passes
    group: Group
    causal: bool
    window: int | None
    cu_seqlens: Sequence[int] | torch.Tensor | None
    scale: float | None
    topology: Topology | None
    kernel: str
    transport: str
    options: AttentionOptions
    timeout_s: float


@_uncompiled
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[AttentionKeywords]) -> torch.Tensor:
    """The result of `attention_with_lse` alone: attention of this rank's queries to the keys of all ranks.

    Under torch.compile the call is a graph break: what is before and after it is compiled, it itself runs as it is.
    """
    return attention_with_lse(q, k, v, **keywords)[0]


@_uncompiled
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
    scale: float | None = None,
    topology: Topology | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    options: AttentionOptions = BOTH_PASSES,
    timeout_s: float = 300.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks; every rank of the group calls it.

    The result is differentiable: every rank of the group then goes back through it, too, in the same order if there are
    several layers, and gets the gradients of its own shard. All ranks must want gradients, or none of them.

    Parameters
    ----------
    q : [batch, positions, heads, head_dim], this rank's shard: the positions that the schedule's layout assigns
        (`tasp_lab.attention.registry.attention_layout`, `runtime.sequence_parallel.sharding.shard`). float32, bfloat16
        or float16, any strides.
    k, v : [batch, positions, kv_heads, head_dim]; `heads` is a multiple of `kv_heads`.
    schedule : a name in `tasp_lab.attention.registry.ATTENTION`, such as ``tasp`` or ``usp:2x4``; or schedules for
        this workload and world size, as `tasp_lab.attention.registry.attention_schedules` builds them: a forward pass,
        or both as `tasp_lab.attention.backward.Passes` where gradients are wanted.
    group : the process group; all ranks if None.
    causal : whether a query sees only the keys at its position and before it.
    window : with `causal`, how many keys a query sees at most, its own included.
    cu_seqlens : for packed batches, where in the sequence of all ranks each document begins, and where the last ends;
        queries see keys of their own document only, and every document is placed by itself.
    scale : of the scores; 1 / sqrt(head_dim) if None.
    topology : whose rings ``tasp`` uses, and whose routes messages take; a full mesh if None.
    kernel : ``flash-attn``, ``sdpa``, ``reference``, or ``auto``, the fastest that can do it.
    transport : ``auto``, ``p2p``, ``batched`` or ``all-to-all`` (see `runtime.executor.transports`).
    options : how schedules are built by name, such as trimming, buffers and dtypes on the wire.
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
    if not dist.is_initialized():
        raise RunError("no process group: call torch.distributed.init_process_group first, or start with torchrun")
    if dist.get_rank(group) < 0:
        raise RunError("this process is not part of the group")
    own: Proposal | TaspLabError
    gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v))
    try:
        workload = _workload_of_shard(q, k, v, "causal" if causal else "full", window)
        documents = None if cu_seqlens is None else documents_of(_integers(cu_seqlens))
        chosen = choose_kernel(kernel, q.dtype, q.device, q.shape[3])
        sender = make_transport(transport, timeout_s, group, q.device)
        passes = _passes_to_run(options, gradients)
        own = {
            "positions": q.shape[1],
            "documents": None if documents is None else _described(documents),
            "schedule": _schedule_name(schedule),
            "topology": None if topology is None else topology.name,
            "gradients": gradients,
            "transport": transport,
            "channels": sender.channels,
            "scale": _finite(workload.head_dim**-0.5 if scale is None else scale),
            **asdict(options),
            **_known_to_all(workload),
        }
    except TaspLabError as error:
        own = error
    everyone = exchange(own, q.device, group, timeout_s)
    require_equal(everyone, [name for name in everyone[0] if name != "positions"])
    lengths = [int(str(each["positions"])) for each in everyone]
    try:
        whole = replace(workload, sequence=max(1, sum(lengths)), documents=documents)
        built = _schedules(schedule, topology or _mesh(len(lengths)), whole, passes)
        _demand_lengths(built[0], lengths)
        own = {"rings": "".join(each.digest for each in built)}
    except TaspLabError as error:
        if topology is None:
            raise
        own = error
    if topology is not None:  # a search for its rings may have ended differently on every rank
        require_equal(exchange(own, q.device, group, timeout_s), ["rings"])
    backward = built[1] if len(built) > 1 else None
    agreed_scale = float(str(everyone[0]["scale"]))
    return attend(Plan(built[0], backward, dist.get_rank(group), chosen, agreed_scale, sender), q, k, v)


def _passes_to_run(options: AttentionOptions, gradients: bool) -> AttentionOptions:
    """The options, for a forward pass alone where no gradients are wanted. Raises `WorkloadError`."""
    if gradients and options.passes != "both":
        raise WorkloadError(f"options: passes is {options.passes}, expected both, for gradients are wanted")
    if options.passes == "backward":
        raise WorkloadError("options: passes is backward, expected both, or forward where no gradients are wanted")
    return options if gradients else options.forward_only


def _schedule_name(schedule: str | Schedule | Passes) -> str:
    """In words that two schedules share only if they are the same."""
    if isinstance(schedule, str):
        return schedule
    given = _given(schedule)
    return " ".join([given[0].name, *(each.digest for each in given)])


def _given(schedule: Schedule | Passes) -> tuple[Schedule, ...]:
    return schedule if isinstance(schedule, Passes) else (schedule,)


def _integers(cu_seqlens: Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.tolist()
    return list(cu_seqlens)


def _workload_of_shard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, window: int | None) -> Workload:
    """The layer as far as one rank knows it: its sequence is a placeholder."""
    for name, each in (("q", q), ("k", k), ("v", v)):
        if each.dim() != 4:
            raise WorkloadError(f"{name} is {_shape(each)}, expected [batch, positions, heads, head_dim]")
        if each.dtype not in _NAMES or each.dtype != q.dtype or each.device != q.device:
            raise WorkloadError(f"{name} is {each.dtype} on {each.device}, q is {q.dtype} on {q.device}, expected one "
                                f"device and one dtype of {', '.join(str(dtype) for dtype in _NAMES)}")  # fmt: skip
    batch, positions, heads, head_dim = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[1], k.shape[3]) != (batch, positions, head_dim):
        raise WorkloadError(f"q is {_shape(q)}, k is {_shape(k)}, v is {_shape(v)}, expected equal batch, positions "
                            "and head_dim, and equal shapes of k and v")  # fmt: skip
    seen = None if window is None else int(window)
    return Workload(1, batch, heads, k.shape[2], head_dim, _NAMES[q.dtype], mask, seen)


def _finite(scale: float) -> float:
    if not math.isfinite(scale):
        raise WorkloadError(f"scale: {scale}, expected a finite number")
    return float(scale)


def _known_to_all(workload: Workload) -> dict[str, object]:
    """What every rank knows of the layer before the ranks have talked: all but how long it is."""
    return {name: value for name, value in asdict(workload).items() if name not in ("sequence", "documents")}


def _described(documents: tuple[int, ...]) -> str:
    """In few letters that two lists of documents share only if they are the same."""
    digest = hashlib.sha256(repr(documents).encode()).hexdigest()[:8]
    return f"{len(documents)} documents of {sum(documents)} positions ({digest})"


@lru_cache(maxsize=8)
def _mesh(world_size: int) -> Topology:
    return full_mesh(world_size)


def _schedules(
    schedule: str | Schedule | Passes, topology: Topology, workload: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """One for each pass: of that name, or the given ones if they fit. Raises `WorkloadError` and `ScheduleError`."""
    if isinstance(schedule, str):
        return _built_by_name(schedule, topology, workload, options=options)
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
_built_by_name = lru_cache(maxsize=32)(attention_schedules)
"""Layers are called with the same schedules again and again."""


def _demand_lengths(schedule: Schedule, lengths: Sequence[int]) -> None:
    """Raise `WorkloadError` unless every rank has as many positions as the layout gives it."""
    layout = _task_of(schedule).layout
    if len(lengths) != schedule.world_size:
        raise WorkloadError(f"the topology has {schedule.world_size} ranks, the group {len(lengths)}")
    for rank, length in enumerate(lengths):
        if length != layout.length(rank):
            raise WorkloadError(
                f"rank {rank} has {length} of {sum(lengths)} positions, the {layout.name} layout of "
                f"{schedule.name} assigns {layout.length(rank)} to it"
            )


def _task_of(schedule: Schedule) -> AttentionTask:
    assert isinstance(schedule.task, AttentionTask), "a schedule of attention has a task"
    return schedule.task


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))
