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

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any, ClassVar, Literal, TypedDict, Unpack, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from runtime.executor.messages import Group
from runtime.kernels.linear_registry import Attend, choose_linear_kernel
from runtime.sequence_parallel.agreement import Proposal
from runtime.sequence_parallel.arguments import TIMEOUT_S, TYPES, check_tensor, process_group
from runtime.sequence_parallel.calls import (
    BOTH_PASSES,
    LayerCall,
    attention_proposal,
    call_layer,
    cast_as_torch_does,
    check_lengths,
    described_layer,
    documents_in,
    lengths_of,
    passes_to_run,
    uncompiled,
    with_digest,
    workload_of_shard,
)
from runtime.sequence_parallel.keywords import names_checked
from runtime.sequence_parallel.linear_layer import LinearLayer, SequenceEnds
from runtime.sequence_parallel.passes import AttentionPasses, task_of
from tasp_lab.core.arguments import Argument
from tasp_lab.core.errors import RunError, ScheduleError, WorkloadError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.schedules.linear.task import (
    GATE_GRADIENTS,
    GATES,
    KEY_GRADIENTS,
    KEYS,
    QUERIES,
    QUERY_GRADIENTS,
    RESULTS,
    LinearTask,
)
from tasp_lab.schedules.registry import LINEAR, is_own, state_schedules
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Decay, Workload

Tensor = torch.Tensor


class _Keywords(TypedDict, total=False):
    """Keywords of `linear_attention` that do not change the type of what it returns."""

    decay: Sequence[float] | Tensor | None
    gates: Tensor | None
    schedule: str
    group: Group | DeviceMesh
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
@names_checked
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Sequence[float] | Tensor | None = None,
    gates: Tensor | None = None,
    schedule: str = "lasp-2",
    group: Group | DeviceMesh = None,
    causal: bool = True,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    topology: Topology | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    options: AttentionOptions = BOTH_PASSES,
    timeout_s: float = TIMEOUT_S,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Linear attention of this rank's queries over the keys of all ranks; every rank of the group calls it.

    The state of a KV head is ``S_i = a_i S_(i-1) + k_i v_i``, the output ``o_i = q_i S_i``. Feature maps, scales and
    normalisation are the caller's. Computed in float32; under `torch.autocast` q, k and v are cast as torch casts the
    inputs of attention. Differentiable in q, k, v, the gates and the states, as
    `runtime.sequence_parallel.api.attention` is; under torch.compile the call is a graph break.

    Parameters
    ----------
    q : [batch, positions, heads, head_dim], this rank's shard: consecutive positions, also of a packed batch (see
        `tasp_lab.workload.sequence_layout.contiguous`).
    k, v : [batch, positions, kv_heads, head_dim], v of any width; `heads` is a multiple of `kv_heads`.
    decay : the same a_i at all positions, a number above 0 and at most 1 per KV head; equal on all ranks. Constants:
        a tensor that requires a gradient is refused.
    gates : the logarithm of each a_i, at most 0: [batch, positions, kv_heads], or a number per channel of the keys,
        [batch, positions, kv_heads, head_dim]; float32. Without either nothing decays. Checked on CPU only, since a
        GPU would have to wait.
    schedule : a name in `tasp_lab.schedules.registry.LINEAR`.
    causal : if False every query sees all keys, without decay.
    cu_seqlens : for packed batches, where in the sequence of all ranks each document begins, and where the last ends;
        states begin anew at each.
    initial_state : the state before the first position, [batch, kv_heads, head_dim of k, head_dim of v], float32; 0 if
        None. Given on the rank that has the first position, None elsewhere. Its gradient is there, too; if nothing
        else requires one, all ranks go back through the call nevertheless.
    return_final_state : whether to return the state behind the last position, too, equal on all ranks. Neither state
        goes with packed documents, a full mask or schedules other than those in
        `tasp_lab.schedules.registry.state_schedules`.
    kernel : ``fla``, ``torch``, or ``auto``, the fastest that can do it (`runtime.kernels.linear_registry`).
    group, topology, transport, options, timeout_s : see `runtime.sequence_parallel.api.attention_with_lse`.

    Returns the outputs, [batch, positions, heads, elements of v] in the dtype of `q`; with `return_final_state` also
    the state, a pair: the state is float32, on the rank that has the last position, and None elsewhere.

    Raises `WorkloadError` for tensors and decays that don't fit together or to the schedule, `ScheduleError` for
    unknown names, `RunError` when the ranks don't agree, no kernel can do it, or one is lost.
    """
    layer = _LinearCall(
        q, k, v, gates, initial_state, decay=decay, schedule=schedule, causal=causal, cu_seqlens=cu_seqlens,
        return_final_state=return_final_state, topology=topology, kernel=kernel, transport=transport, options=options,
        group=process_group(group), timeout_s=timeout_s,
    )  # fmt: skip
    out, state = call_layer(layer)
    return (out, state) if return_final_state else out


@dataclass
class _LinearCall(LayerCall):
    """A call of `linear_attention`; see `LayerCall`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    initial_state: Tensor | None
    _: KW_ONLY
    decay: Sequence[float] | Tensor | None
    schedule: str
    causal: bool
    cu_seqlens: Sequence[int] | Tensor | None
    return_final_state: bool
    kernel: str
    options: AttentionOptions
    tensors: ClassVar[Sequence[str]] = ("q", "k", "v", "gates", "initial_state")
    optional: ClassVar[Sequence[str]] = ("gates", "initial_state")
    types: ClassVar[Mapping[str, Argument]] = {
        **TYPES,
        "schedule": Argument((str,), "the name of a schedule", ScheduleError),
        "decay": Argument((), ""),  # numbers, which are checked with the heads
    }
    apart: ClassVar[Sequence[str]] = ("positions", "initial_state", "records_gradients")

    @property
    def builds_alike(self) -> bool:
        return is_own(self.schedule)

    @cached_property
    def gradients(self) -> bool:
        """Whether tensors that all ranks have are differentiated; `_differentiate_state` adds the state."""
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.inputs[:-1])

    def propose(self, number: int) -> Proposal:
        self.q, self.k, self.v = q, k, v = cast_as_torch_does(self.q, self.k, self.v)
        workload = workload_of_shard(q, k, v, "causal" if self.causal else "full", window=None, cached=False)
        self.decays = constant_decays(workload, self.decay)
        decay = decay_of(workload, k, self.decays, self.gates)
        self.workload = workload = replace(workload, kind="linear", decay=decay)
        self.documents = documents_in(self.cu_seqlens)
        check_state(workload, self.initial_state, k.device)
        self.chosen = choose_linear_kernel(self.kernel, q.dtype, q.device)
        decays = with_digest(f"{min(self.decays):g} to {max(self.decays):g}", self.decays) if self.decays else "none"
        return attention_proposal(
            "linear", q.shape[1], workload, self.documents, self.options, schedule=self.schedule,
            **self.proposed_transport(q.device, number), decays=decays,
            kernel=self.chosen.name, final_state=bool(self.return_final_state),
            initial_state=None if self.initial_state is None else self.initial_state.requires_grad,
            records_gradients=torch.is_grad_enabled(),
        )  # fmt: skip

    def build(self, everyone: Sequence[Proposal], topology: Topology) -> tuple[Schedule, ...]:
        lengths = lengths_of(everyone)
        with_state = [rank for rank, proposal in enumerate(everyone) if proposal["initial_state"] is not None]
        if with_state or self.return_final_state:
            check_ends(self.schedule, self.workload.visible.is_causal, self.documents, with_state, lengths)
        self._differentiate_state(everyone)
        to_run = passes_to_run(self.options, self.gradients)
        whole = replace(self.workload, sequence=max(1, sum(lengths)), documents=self.documents)
        built = _built_by_name(self.schedule, topology, whole, None, to_run, self.decays)
        layout = task_of(built[0], LinearTask).layout
        check_lengths(self.schedule, layout, lengths, [layout.length(rank) for rank in range(layout.world_size)])
        return built

    def _differentiate_state(self, everyone: Sequence[Proposal]) -> None:
        """Want gradients if the initial state does, which is on one rank: the way back to it goes through all ranks.

        Raises `RunError` if a rank does not record operations, so its loss would not go back.
        """
        wanted = [each["initial_state"] and each["records_gradients"] for each in everyone]
        if not any(wanted):
            return
        for rank, each in enumerate(everyone):
            if not each["records_gradients"]:
                raise RunError(f"rank {rank}: the call is under torch.no_grad, expected none there, as the "
                               f"initial_state on rank {wanted.index(True)} requires a gradient")  # fmt: skip
        self.gradients = True

    def described(self, schedules: Sequence[Schedule]) -> str:
        return described_layer(self.schedule, task_of(schedules[0], LinearTask).workload)

    def passes(self, schedules: tuple[Schedule, ...], everyone: Sequence[Proposal], rank: int) -> LinearPasses:
        last = max((each for each, length in enumerate(lengths_of(everyone)) if length), default=-1)
        backward = schedules[1] if len(schedules) > 1 else None
        has_last, attend = self.return_final_state and rank == last, self.chosen.attend(self.q.dtype)
        return LinearPasses(schedules[0], backward, rank, self.sender, has_last, attend)


@dataclass(frozen=True)
class LinearPasses(AttentionPasses):
    """Both passes of linear attention on one rank.

    The forward pass has the inputs q, k, v, gates and the state before the first position, and the outputs out and,
    on the rank that `gives_state`, the state behind the last position.
    """

    gives_state: bool
    attend: Attend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, initial: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor]]:
        inputs = {QUERIES: (q,), KEYS: (k, v), GATES: () if gates is None else (gates,)}
        ends = SequenceEnds(initial, self.gives_state)
        layer = LinearLayer(self.forward_schedule, self.rank, inputs, ends, self.attend)
        with self.run(self.forward_schedule, layer, q.device) as copies:
            left = self.left_behind(copies)
            state = layer.final_state() if self.gives_state else None
        return (layer.outputs[RESULTS][0].to(q.dtype), state), (left,)

    def saved(self, inputs: Sequence[Any], outputs: Sequence[Any], kept: Sequence[Any]) -> tuple[Any, ...]:
        return *inputs, *kept

    def backward(self, saved: Sequence[Any], dout: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        schedule, (q, k, v, gates, initial, left) = self.backward_schedule, saved
        assert schedule is not None, "gradients were wanted when the call was planned"
        dout = q.new_zeros(*q.shape[:3], v.shape[3]) if dout is None else dout
        inputs = {QUERIES: (q, dout), KEYS: (k, v), GATES: () if gates is None else (gates,)}
        layer = LinearLayer(schedule, self.rank, inputs, SequenceEnds(initial, final_gradient=dstate), self.attend)
        with self.run(schedule, layer, q.device, left):
            pass
        dq, dk, dv = (*layer.outputs[QUERY_GRADIENTS], *layer.outputs[KEY_GRADIENTS])
        dgates = layer.outputs[GATE_GRADIENTS][0] if task_of(schedule, LinearTask).has_gates else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dgates, layer.initial_gradient


_built_by_name = lru_cache(maxsize=32)(linear_schedules)
"""Layers are called with the same schedules again and again."""


# What calls of linear attention have besides queries, keys and values: decays, and states at a sequence's ends.


def constant_decays(workload: Workload, decay: Sequence[float] | Tensor | None) -> tuple[float, ...]:
    """The decay of each KV head, () without any. Raises `WorkloadError` for anything else than a number for each."""
    if decay is None:
        return ()
    expected = f"expected {workload.kv_head_count} numbers, one per KV head"
    if isinstance(decay, Tensor):
        check_tensor("decay", decay)
        if decay.requires_grad:
            raise WorkloadError("decay requires a gradient, which constants have not, expected it in gates, as "
                                "decay.log().expand(*q.shape[:2], -1)")  # fmt: skip
        decay = decay.tolist()
    is_list = isinstance(decay, Iterable) and not isinstance(decay, Mapping | Set)
    numbers: list[Any] = list(decay) if is_list else [None]
    if not all(isinstance(each, Real) and not isinstance(each, bool) for each in numbers):
        raise WorkloadError(f"decay: {str(decay)[:40]}, {expected}")
    decays = tuple(map(float, numbers))
    if len(decays) != workload.kv_head_count:
        raise WorkloadError(f"decay: {len(decays)} given, {expected}")
    for head, each in enumerate(decays):
        if not 0 < each <= 1:
            raise WorkloadError(f"decay of KV head {head}: {each}, expected a number above 0 and at most 1")
    return decays


def decay_of(workload: Workload, k: Tensor, decays: Sequence[float], gates: Tensor | None) -> Decay:
    """Which decay a layer has. Raises `WorkloadError` for constant decays and gates, and for gates of a wrong shape."""
    if decays and gates is not None:
        raise WorkloadError(
            "decay and gates are both given, expected one of them: constant decays, or their logarithms"
        )
    if gates is None:
        return "head" if decays else "none"
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


def check_state(workload: Workload, state: Tensor | None, device: torch.device) -> None:
    """Raise `WorkloadError` for an initial state of a wrong shape, dtype or device."""
    if state is None:
        return
    expected = [workload.batch, workload.kv_head_count, workload.head_dim, workload.value_size]
    if list(state.shape) != expected:
        raise WorkloadError(f"initial_state is {list(state.shape)}, expected {expected}: batch, kv_heads, head_dim of "
                            "k and of v")  # fmt: skip
    if state.dtype != torch.float32:
        raise WorkloadError(f"initial_state is {state.dtype}, expected torch.float32: a sum over many positions loses "
                            "in half precision what is small beside it")  # fmt: skip
    if state.device != device:
        raise WorkloadError(f"initial_state is on {state.device}, expected {device}, as k is")


def check_ends(
    schedule: str, causal: bool, documents: Sequence[int] | None, with_state: Sequence[int], lengths: Sequence[int]
) -> None:
    """Raise an error for states at the ends of a sequence where there are none, or on a wrong rank."""
    what = "initial_state" if with_state else "return_final_state"
    if not causal:
        raise WorkloadError(f"{what} with causal=False: every query sees all keys, expected a causal mask")
    if documents is not None:
        raise WorkloadError(f"{what} with cu_seqlens: every document begins with a state of its own, expected one "
                            "sequence")  # fmt: skip
    if schedule in LINEAR and not LINEAR[schedule].moves_states:
        raise ScheduleError(f"schedule {schedule!r}: {what} does not apply to it, as it moves keys instead of states, "
                            f"expected one of {', '.join(state_schedules())}")  # fmt: skip
    first = next((rank for rank, length in enumerate(lengths) if length), 0)
    if with_state not in ([], [first]):
        ranks = ", ".join(map(str, with_state))
        raise WorkloadError(f"initial_state is given on rank {ranks}, expected rank {first} alone, which has the first "
                            "position")  # fmt: skip
    if not any(lengths):
        raise WorkloadError(f"{what} with 0 positions, expected at least 1")
