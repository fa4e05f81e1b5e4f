"""Exact attention over a sequence that is spread over the ranks of a process group.

>>> import torch.distributed as dist
>>> from runtime import attention
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> q, k, v = (torch.randn(2, 16, heads, 64) for heads in (8, 2, 2))       # this rank's shard
>>> attention(q, k, v, schedule="zigzag-ring-attention", causal=True).shape
torch.Size([2, 16, 8, 64])

Keywords set the mask and where the call runs. Options of schedules are one object, the same that predictions take:

>>> from tasp_lab.schedules.attention.options import AttentionOptions
>>> attention(q, k, v, schedule="tasp", options=AttentionOptions("both", trim=False, dataflow="rotate-q")).shape
torch.Size([2, 16, 8, 64])
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from runtime.executor.kept import Kept
from runtime.executor.messages import Group
from runtime.kernels.registry import choose_kernel
from runtime.sequence_parallel.agreement import Call, Proposal
from runtime.sequence_parallel.arguments import (
    TIMEOUT_S,
    TYPES,
    check_tensor,
    check_timeout,
    check_transforms,
    process_group,
)
from runtime.sequence_parallel.calls import (
    BOTH_PASSES,
    LayerCall,
    agreed_passes,
    attention_proposal,
    call_layer,
    cast_as_torch_does,
    check_lengths,
    described_layer,
    documents_in,
    lengths_of,
    passes_to_run,
    run_layer,
    uncompiled,
    with_digest,
    workload_of_shard,
)
from runtime.sequence_parallel.keywords import check_names, names_checked
from runtime.sequence_parallel.layer import SoftmaxPasses
from runtime.sequence_parallel.passes import task_of
from tasp_lab.core.arguments import check_arguments
from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import Passes, check_fit
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import KEYS, QUERIES, TENSORS, AttentionTask
from tasp_lab.schedules.build import attention_layout, attention_schedules, groups_on
from tasp_lab.schedules.registry import LINEAR, is_own
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import RANGES, Window
from tasp_lab.workload.ranges import MaskRange, ranges_of
from tasp_lab.workload.sequence_layout import SequenceLayout


class CallKeywords(TypedDict, total=False):
    """The keywords of `attention`; see `attention_with_lse`."""

    schedule: str | Schedule | Passes
    group: Group | DeviceMesh
    causal: bool
    window: Window | None
    cu_seqlens: Sequence[int] | torch.Tensor | None
    ranges: tuple[MaskRange | Sequence[Any], ...] | str | None
    cached_keys: int
    sinks: torch.Tensor | None
    scale: float | None
    topology: Topology | None
    kernel: str
    transport: str
    options: AttentionOptions
    timeout_s: float


def check_keywords(keywords: CallKeywords) -> None:
    """Raise `TaspLabError` for a keyword that `attention` does not have, and for one of a wrong type."""
    check_names(keywords, CallKeywords.__annotations__)
    check_arguments(keywords, TYPES)
    check_timeout(keywords.get("timeout_s", TIMEOUT_S))
    process_group(keywords.get("group"))


@uncompiled
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[CallKeywords]) -> torch.Tensor:
    """The result of `attention_with_lse` alone: attention of this rank's queries to the keys of all ranks.

    Under torch.compile the call is a graph break: what is before and after it is compiled, it itself runs as it is.
    """
    return attention_with_lse(q, k, v, **keywords)[0]


@uncompiled
@names_checked
def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    schedule: str | Schedule | Passes = "tasp",
    group: Group | DeviceMesh = None,
    causal: bool = False,
    window: Window | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    ranges: tuple[MaskRange | Sequence[Any], ...] | str | None = None,
    cached_keys: int = 0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    topology: Topology | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    options: AttentionOptions = BOTH_PASSES,
    timeout_s: float = TIMEOUT_S,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks; every rank of the group calls it.

    The result is differentiable: every rank of the group then goes back through it, too, in the same order if there are
    several layers, and gets the gradients of its own shard. If orders differ, all ranks raise `RunError`. All ranks
    must want gradients, or none of them. `torch.func.grad` and `vjp` work as `backward` does; second derivatives and
    other transforms, such as vmap and forward-mode differentiation, raise `WorkloadError`. Passes are not captured in
    CUDA graphs: `prepare` a layer for that.

    Parameters
    ----------
    q : [batch, positions, heads, head_dim], this rank's shard: the positions that the schedule's layout assigns
        (`tasp_lab.schedules.build.attention_layout`, `runtime.sequence_parallel.sharding.shard`). float32,
        bfloat16 or float16, any strides. Under `torch.autocast` they are cast as torch's own attention casts them.
    k, v : [batch, positions, kv_heads, head_dim], v of any width, such as 128 beside keys of 192; `heads` is a multiple
        of `kv_heads`. With `cached_keys` they are of the cached positions of the rank, too, which come first.
    schedule : a name in `tasp_lab.schedules.registry.ATTENTION`, such as ``tasp`` or ``usp:2x4``; or
        schedules for this workload and world size, as `tasp_lab.schedules.build.attention_schedules`
        builds them: a forward pass, or both as `tasp_lab.schedules.attention.backward.Passes` where gradients are
        wanted.
    group : the process group, or a `DeviceMesh` of one dimension; all ranks if None.
    causal : whether a query sees only the keys at its position and before it.
    window : with `causal`, how many keys a query sees at most, its own included. Or flash-attn's pair (left, right):
        how many keys before and after its own position, None or -1 for all; with `causal` the second is 0.
    cu_seqlens : for packed batches, where in the sequence of all ranks each document begins, and where the last ends;
        queries see keys of their own document only, and every document is placed by itself.
    ranges : in place of `causal`, `window` and `cu_seqlens`, the mask of the sequence of all ranks as ranges of queries
        and keys, such as ``[((0, 4096), (0, 4096), "causal"), ((4096, 8192), (0, 8192))]``
        (`tasp_lab.workload.ranges`); the shards are those of `attention_layout` for them.
    cached_keys : how many positions of the sequence of all ranks, from its first, have keys and values only. The others
        lie as the layout assigns them after these (`tasp_lab.workload.sequence_layout.SequenceLayout.after`). No
        gradients.
    sinks : [heads], of any floating dtype: a logit per head, as gpt-oss learns it, that is one more term of the sum in
        every softmax (`s_aux` of transformers); the log-sum-exp includes it. All ranks pass the same one. Each gets the
        part of its gradient that is due to the queries of the rank; as of all parameters, parts are summed over ranks.
    scale : of the scores; 1 / sqrt(head_dim) if None.
    topology : whose rings ``tasp`` uses, and whose routes messages take; a full mesh if None.
    kernel : ``flash-attn``, ``sdpa``, ``flash-attn-3``, ``flash-attn-4``, ``cudnn``, ``reference``, or ``auto``,
        flash-attn or sdpa.
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
    The result, in the dtype of `q` (of what it is cast to), [batch, positions, heads, elements of v], contiguous; and
    the log-sum-exp of its scores, [batch, heads, positions] in float32. A loss may depend on either or both, not on the
    same ones on all ranks.

    Raises
    ------
    `WorkloadError` for arguments of a wrong type, tensors that are not dense or don't fit together or to the schedule,
    and for gradients wanted of a forward pass alone; `ScheduleError` for unknown names; `RunError` when the ranks don't
    agree, no kernel can do it, or a rank is lost. What is wrong is found before data moves, and names the rank.
    What a kernel raises in a pass, on this rank; `RunError` that names this rank and its error on the others, there or,
    if they had their results, in their next call. All ranks may then call again.
    """
    layer = _SoftmaxCall(
        q, k, v, schedule=schedule, causal=causal, window=window, cu_seqlens=cu_seqlens, ranges=ranges,
        cached_keys=cached_keys, sinks=sinks, scale=scale, topology=topology, kernel=kernel, transport=transport,
        options=options,
        group=process_group(group), timeout_s=timeout_s,
    )  # fmt: skip
    out, lse = call_layer(layer)
    return out, lse


@uncompiled
def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[CallKeywords]
) -> PreparedAttention:  # fmt: skip
    """`attention` of tensors like these, on which all ranks agree here, once; every rank of the group calls it.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v = (torch.randn(1, 16, heads, 64) for heads in (8, 2, 2))
    >>> layer = prepare(q, k, v, schedule="zigzag-ring-attention", causal=True)
    >>> [layer(q, k, v).shape for _ in range(3)]                               # nothing is compared between ranks here
    [torch.Size([1, 16, 8, 64]), torch.Size([1, 16, 8, 64]), torch.Size([1, 16, 8, 64])]
    >>> dist.destroy_process_group()

    Only shapes, dtypes, device, and whether gradients are wanted, are taken from the tensors. Keywords and errors are
    those of `attention_with_lse`.
    """
    check_names(keywords, CallKeywords.__annotations__)
    arguments = inspect.signature(attention_with_lse).bind(q, k, v, **keywords)
    arguments.apply_defaults()
    group = process_group(arguments.arguments.pop("group"))
    layer = _SoftmaxCall(**arguments.arguments, group=group, prepared=True)
    passes, call = agreed_passes(layer)
    assert isinstance(passes, SoftmaxPasses), "attention has passes"
    call.prepared = True
    return PreparedAttention(passes, call, layer.inputs, layer.gradients)


class PreparedAttention:
    """Attention of tensors of one shape in the memory of this layer; made by `prepare`.

    Calls compare nothing between ranks, so all ranks must make them, and go back through them, in the same order.
    They follow one another on a GPU, whatever streams they are made in. After the first call of each pass a CUDA graph
    may capture further ones: schedules, memory, views and communicators are there, and the host waits for nothing.
    """

    def __init__(self, passes: SoftmaxPasses, call: Call, like: Sequence[torch.Tensor | None], gradients: bool) -> None:
        self._passes, self._call = replace(passes, kept=Kept(2, in_one_order=True)), call
        self._like, self._gradients = [_facts_of(each) for each in like], gradients

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result. Raises `WorkloadError` for tensors that are not like those of `prepare`."""
        return self.with_lse(q, k, v, sinks)[0]

    @uncompiled
    def with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attention_with_lse`."""
        names = _SoftmaxCall.tensors
        for name, each in zip(names, (q, k, v, sinks), strict=True):
            if name != "sinks" or each is not None:
                check_tensor(name, each)
        check_transforms(q, k, v, sinks)
        inputs = *cast_as_torch_does(q, k, v), sinks
        for name, each, expected in zip(names, inputs, self._like, strict=True):
            if (facts := _facts_of(each)) != expected:
                raise WorkloadError(f"{name} is {facts}, expected {expected}, for which the layer was prepared")
        gradients = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
        if gradients and not self._gradients:
            raise WorkloadError("gradients are wanted, expected none, as the layer was prepared with tensors that "
                                "require none")  # fmt: skip
        out, lse = run_layer(self._passes, self._call, gradients, *inputs)
        return out, lse


def _facts_of(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"{list(x.shape)} of {x.dtype} on {x.device}"


@dataclass
class _SoftmaxCall(LayerCall):
    """A call of `attention_with_lse`; see `LayerCall`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    _: KW_ONLY
    sinks: torch.Tensor | None
    schedule: str | Schedule | Passes
    causal: bool
    window: Window | None
    cu_seqlens: Sequence[int] | torch.Tensor | None
    ranges: tuple[MaskRange | Sequence[Any], ...] | str | None
    cached_keys: int
    scale: float | None
    kernel: str
    options: AttentionOptions
    prepared: bool = False
    tensors: ClassVar[Sequence[str]] = ("q", "k", "v", "sinks")
    optional: ClassVar[Sequence[str]] = ("sinks",)
    apart: ClassVar[Sequence[str]] = ("positions", "queries")

    @property
    def builds_alike(self) -> bool:
        return not isinstance(self.schedule, str) or is_own(self.schedule)

    def propose(self, number: int) -> Proposal:
        self.q, self.k, self.v = cast_as_torch_does(self.q, self.k, self.v)
        q, cached_keys, mask = self.q, int(self.cached_keys), "causal" if self.causal else "full"
        self.ranges = None if self.ranges is None else ranges_of(self.ranges)
        if self.ranges is not None and self.causal:
            raise WorkloadError("causal beside ranges, expected one of them: each range has a mask of its own")
        self.workload = workload = workload_of_shard(q, self.k, self.v, mask, self.window, bool(cached_keys))
        if (sinks := self.sinks) is not None:
            if sinks.shape != (workload.heads,) or not sinks.is_floating_point() or sinks.device != q.device:
                raise WorkloadError(f"sinks is {_facts_of(sinks)}, expected [{workload.heads}], one for each head of "
                                    f"q, of a floating dtype on {q.device}")  # fmt: skip
            workload = replace(workload, sinks=True)  # ranks agree on it; schedules are the same without
        if self.gradients and cached_keys:
            raise WorkloadError(
                f"cached_keys: {cached_keys}, expected 0 where gradients are wanted, or call under torch.no_grad()"
            )
        self.documents = documents_in(self.cu_seqlens)
        self.chosen = choose_kernel(self.kernel, q.dtype, q.device, q.shape[3], self.v.shape[3])
        self.to_run = passes_to_run(self.options, self.gradients)
        scale = workload.head_dim**-0.5 if self.scale is None else self.scale
        if not abs(scale) <= torch.finfo(torch.float32).max:  # of scores; NaN is not, either
            raise WorkloadError(f"scale: {str(scale)[:40]}, expected a finite number of float32")
        return attention_proposal(
            "softmax", self.k.shape[1], workload, self.documents, self.options, schedule=_schedule_name(self.schedule),
            **self.proposed_transport(q.device, number), queries=q.shape[1], cached_keys=cached_keys,
            scale=float(scale), prepared=self.prepared,
            ranges=self.ranges and with_digest(f"{len(self.ranges)} ranges", self.ranges),
        )  # fmt: skip

    def build(self, everyone: Sequence[Proposal], topology: Topology) -> tuple[Schedule, ...]:
        keys, queries = lengths_of(everyone), lengths_of(everyone, "queries")
        self.whole = whole = replace(
            self.workload, sequence=max(1, sum(keys)), documents=self.documents, cached_keys=self.cached_keys,
            mask=self.workload.mask if self.ranges is None else RANGES.name, ranges=self.ranges,
        )  # fmt: skip
        if sum(keys) != sum(queries) + whole.cached_keys:
            raise WorkloadError(f"{sum(queries)} queries and {sum(keys)} keys on all ranks, expected "
                                f"{whole.cached_keys} keys more than queries, the cached ones")  # fmt: skip
        scheduled = whole
        if isinstance(self.schedule, str) and (whole.documents or whole.ranges) and whole.visible.is_of_order:
            # Schedules depend on documents and ranges only through their layouts, so one is built for all batches.
            plain = replace(whole, documents=None, ranges=None, mask=self.workload.mask)
            self.layout, layout = (
                attention_layout(self.schedule, each, topology.world_size, self.to_run) for each in (whole, plain)
            )
            scheduled = plain if layout.spans == self.layout.spans else whole
        built = _schedules(self.schedule, topology, scheduled, self.to_run)
        task = task_of(built[0], AttentionTask)
        for lengths, tensor in ((keys, KEYS), (queries, QUERIES)):
            what = TENSORS[tensor] if task.workload.cached_keys else "positions"
            check_lengths(built[0].name, task.layout, lengths, task.lengths_of(tensor), what)
        return built

    def described(self, schedules: Sequence[Schedule]) -> str:
        name = self.schedule if isinstance(self.schedule, str) else schedules[0].name
        return described_layer(name, task_of(schedules[0], AttentionTask).workload)

    def passes(self, schedules: tuple[Schedule, ...], everyone: Sequence[Proposal], rank: int) -> SoftmaxPasses:
        backward = schedules[1] if len(schedules) > 1 else None
        scale, packed = float(str(everyone[0]["scale"])), tuple[AttentionTask, ...]()
        built_for = task_of(schedules[0], AttentionTask).workload
        if (built_for.documents, built_for.ranges) != (self.documents, self.ranges):
            packed = _packed(schedules, self.whole, self.layout)
        return SoftmaxPasses(schedules[0], backward, rank, self.sender, self.chosen, scale, packed)


def _schedule_name(schedule: str | Schedule | Passes) -> str:
    """In words that two schedules share only if they are the same."""
    if isinstance(schedule, str):
        return schedule
    given = _given(schedule)
    return " ".join([given[0].name, *(each.digest for each in given)])


def _given(schedule: Schedule | Passes) -> tuple[Schedule, ...]:
    return schedule if isinstance(schedule, Passes) else (schedule,)


def _schedules(
    schedule: str | Schedule | Passes, topology: Topology, workload: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """One for each pass: of that name, or the given ones if they fit. Raises `WorkloadError` and `ScheduleError`."""
    if isinstance(schedule, str):
        return _built_by_name(schedule, topology, workload, options)
    given = _given(schedule)
    for each in given:
        made_for = each.task.workload if isinstance(each.task, AttentionTask) else None
        fits = made_for is not None and replace(made_for, sinks=False) in (
            workload, replace(workload, value_dim=workload.value_size)
        )  # fmt: skip
        if not fits or each.world_size != topology.world_size:
            raise WorkloadError(
                f"the schedule is for {each.world_size} ranks and {made_for or 'no attention'}, "
                f"expected {topology.world_size} ranks and {workload}"
            )
    if options.passes == "both" and len(given) < 2:
        raise WorkloadError("gradients are required, but the schedule has no backward pass; expected attention_passes")
    if task_of(given[0], AttentionTask).is_backward:
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
    if task_of(built[0], AttentionTask).layout != expected:
        raise WorkloadError(
            f"groups of schedule {schedule!r} on {topology.name} are {groups_on(schedule, topology, options)}, but "
            "auto gave ranks their shards as of consecutive groups, expected options with groups, here and in "
            "attention_layout"
        )
    return built


@lru_cache(maxsize=16)
def _packed(schedules: tuple[Schedule, ...], workload: Workload, layout: SequenceLayout) -> tuple[AttentionTask, ...]:
    """The tasks of schedules with the documents or ranges of a layer, which those of a model have in common."""
    tasks = [task_of(each, AttentionTask) for each in schedules]  # which may have padded heads
    packed: dict[str, Any] = {"documents": workload.documents, "mask": workload.mask, "ranges": workload.ranges}
    return tuple(replace(each, workload=replace(each.workload, **packed), layout=layout) for each in tasks)


class SequenceParallelAttention(torch.nn.Module):
    """`runtime.attention` with its keywords, whose types are checked here; `sinks` may be its parameter.

    It takes the place of `torch.nn.functional.scaled_dot_product_attention`, but with positions before heads: q is
    [batch, positions, heads, head_dim], k and v are [batch, positions, kv_heads, head_dim], this rank's shard; v may
    have another last dimension.

    >>> SequenceParallelAttention(schedule="tasp", causal=True)
    SequenceParallelAttention(schedule=tasp, causal=True)
    """

    def __init__(self, **keywords: Unpack[CallKeywords]) -> None:
        super().__init__()
        check_keywords(keywords)
        self.sinks = keywords.pop("sinks", None)  # as an attribute, torch moves and saves it where it is a parameter
        self.keywords = keywords

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `runtime.attention`, with its errors."""
        keywords: CallKeywords = {**self.keywords, "sinks": self.sinks}
        return attention(q, k, v, **keywords)

    def extra_repr(self) -> str:
        """The keywords that were given, schedules and topologies by their names."""
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.keywords.items())


def _shown(value: object) -> object:
    value = value.forward if isinstance(value, Passes) else value
    return value.name if isinstance(value, Schedule | Topology) else value
