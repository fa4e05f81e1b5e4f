"""One call of a layer that all ranks make together: proposal, agreement, schedules, and both passes.

`call_layer` drives every public function of this package. What is particular to softmax attention, to linear attention
and to a change of layout is a `LayerCall`::

    out, lse = call_layer(SoftmaxCall(q, k, v, ...))

1. Each rank proposes its arguments (`LayerCall.propose`), and all ranks compare them.
2. All build the same schedules (`LayerCall.build`), one for each pass.
3. The forward pass runs (`LayerPasses.forward`); the backward pass runs where autograd asks for gradients, after the
   ranks have agreed once more that all of them go back through this call.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from runtime.executor.messages import Group, Transport
from runtime.executor.transports import make_transport
from runtime.executor.views import DTYPES
from runtime.sequence_parallel.agreement import Call, Proposal, agree
from runtime.sequence_parallel.arguments import (
    TIMEOUT_S,
    TYPES,
    check_tensor,
    check_timeout,
    check_transforms,
    is_timeout,
)
from runtime.sequence_parallel.failures import hosts_of
from tasp_lab.core.arguments import Argument, check_arguments
from tasp_lab.core.errors import RunError, TaspLabError, WorkloadError, first_line
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload, documents_of
from tasp_lab.workload.mask import Window
from tasp_lab.workload.sequence_layout import SequenceLayout

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that torch.compile does not trace, since the messages between ranks cannot be traced."""
    found: Callable[_Arguments, _Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


BOTH_PASSES = AttentionOptions("both")
"""Forward, and backward where gradients are wanted."""


class LayerPasses(Protocol):
    """Both passes of a layer on one rank."""

    outputs: ClassVar[int]
    """The number of outputs. Gradients flow through all of them."""

    @property
    def transport(self) -> Transport:
        """How the messages of both are sent."""

    def forward(self, *inputs: Any) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
        """The outputs, tensors and None, and what else the backward pass needs of this pass."""

    def saved(self, inputs: Sequence[Any], outputs: Sequence[Any], kept: Sequence[Any]) -> tuple[Any, ...]:
        """Which of the inputs, outputs and other tensors of the forward pass `backward` takes: tensors, and None."""

    def backward(self, saved: Sequence[Any], *gradients: Any) -> tuple[Any, ...]:
        """The gradient of each input from those of the outputs, None for what has none: also those of the outputs."""


@dataclass(kw_only=True)
class LayerCall(ABC):
    """What is particular to a kind of layer in `call_layer`; one instance per call and rank.

    `tensors` names the arguments that are tensors, `optional` those that may be None; `types` are those of the others.
    `apart` names what may differ between the proposals of ranks.
    """

    group: Group
    topology: Topology | None
    transport: str
    timeout_s: float
    tensors: ClassVar[Sequence[str]]
    optional: ClassVar[Sequence[str]] = ()
    types: ClassVar[Mapping[str, Argument]] = TYPES
    apart: ClassVar[Sequence[str]] = ("positions",)

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors with respect to which the call is differentiated, and None."""
        return tuple(getattr(self, name) for name in self.tensors)

    def check(self) -> None:
        """Raise `TaspLabError` for arguments of a wrong type, before anything is made of them."""
        check_arguments(vars(self), self.types)
        check_timeout(self.timeout_s)
        self.timeout_s = float(self.timeout_s)
        for name in self.tensors:
            if getattr(self, name) is not None or name not in self.optional:
                check_tensor(name, getattr(self, name))
        check_transforms(*self.inputs)
        for name, x in zip(self.tensors, self.inputs, strict=True):
            if self.gradients and x is not None and x.is_inference():  # autograd cannot save it
                raise WorkloadError(
                    f"{name} is an inference tensor, expected {name}.clone() where gradients are wanted"
                )

    @abstractmethod
    def propose(self, number: int) -> Proposal:
        """Check this rank's arguments, and describe them for the other ranks; `number` is that of the call.

        The first name is ``kind``: ranks that call another function have other names.
        """

    @abstractmethod
    def build(self, everyone: Sequence[Proposal], topology: Topology) -> tuple[Schedule, ...]:
        """The schedules, one for each pass. Raises `TaspLabError` where shards do not fit them."""

    @abstractmethod
    def described(self, schedules: Sequence[Schedule]) -> str:
        """The layer in few words, for errors."""

    @abstractmethod
    def passes(self, schedules: tuple[Schedule, ...], everyone: Sequence[Proposal], rank: int) -> LayerPasses | None:
        """The passes on this rank; None if the outputs are the inputs."""

    @property
    def builds_alike(self) -> bool:
        """Whether all ranks build the same schedules on one topology; a user's builder may not."""
        return True

    @cached_property
    def gradients(self) -> bool:
        """Whether the call is differentiated."""
        return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in self.inputs)

    def proposed_transport(self, device: torch.device, number: int) -> dict[str, object]:
        """Choose how messages of this call are sent, and describe it for the other ranks."""
        self.sender = make_transport(self.transport, self.timeout_s, self.group, device, number)
        return {
            "topology": None if self.topology is None else self.topology.name,
            "gradients": self.gradients,
            "transport": self.transport,
            "channels": self.sender.channels,
        }


def call_layer(layer: LayerCall) -> tuple[Any, ...]:
    """The outputs of a layer on this rank; all ranks of the group call it. Raises what `agreed_passes` raises."""
    passes, call = agreed_passes(layer)
    if passes is None:
        return layer.inputs
    return run_layer(passes, call, layer.gradients, *layer.inputs)


def run_layer(passes: LayerPasses, call: Call, gradients: bool, *inputs: Any) -> tuple[Any, ...]:
    """The outputs of a forward pass; if `gradients` are wanted, as one differentiable operation."""
    if not gradients:
        with call.running(passes.transport):
            return passes.forward(*inputs)[0]
    anchor = None
    if not any(x is not None and x.requires_grad for x in inputs):
        anchor = torch.empty(0, requires_grad=True)  # an input of another rank does, which needs this one to go back
    # The apply of torch inspects signatures first, for torch.func, which costs the host more than all else it does.
    is_transformed = torch._C._are_functorch_transforms_active()
    apply: Callable[..., tuple[Any, ...]] = (
        _Forward.apply if is_transformed else super(torch.autograd.Function, _Forward).apply
    )
    outputs = apply(passes, call, anchor, *inputs)
    return outputs[: passes.outputs]


def agreed_passes(layer: LayerCall) -> tuple[LayerPasses | None, Call]:
    """The passes on this rank, of which all ranks have the same schedules, and their number; a collective call.

    Raises `RunError` where ranks do not agree or one is lost, and what the layer raises on any rank.
    """
    if not dist.is_initialized():
        raise RunError("no process group: call torch.distributed.init_process_group first, or start with torchrun")
    try:
        rank = dist.get_rank(layer.group)
    except ValueError as error:
        raise RunError(f"group: {first_line(error)}") from None
    if rank < 0:
        raise RunError("this process is not part of the group")
    hosts = hosts_of(layer.group)
    timeout_s = float(layer.timeout_s) if is_timeout(layer.timeout_s) else TIMEOUT_S
    own: Proposal | Exception = {}
    # What is wrong here is agreed on, so all ranks raise.
    with hosts.together(lambda: "the preparation of a call", lambda e: isinstance(e, TaspLabError) or e is own):
        hosts.connect(timeout_s)  # after a failure, ranks also count their calls alike again
        call = Call(layer.group, timeout_s)
        try:
            layer.check()
            own = layer.propose(call.number)
        except Exception as error:
            own = error  # the other ranks wait for a proposal, so this rank raises once all have exchanged theirs
        everyone = call.agree(own, layer.apart)
        schedules = _built_together(layer, everyone)
        call.layer = layer.described(schedules)
        return layer.passes(schedules, everyone, rank), call


def cast_as_torch_does(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Tensors in the dtype to which `torch.autocast` casts the inputs of attention; as they are without it."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    lower = torch.get_autocast_dtype(kind)
    return [each.to(lower) if each.dtype in DTYPE_NAMES else each for each in tensors]


class _Forward(torch.autograd.Function):
    """The forward pass of a layer; its outputs are those of the layer, what else is kept, and the number of the call.

    With a `setup_context` of its own, `forward` runs on plain tensors also inside of `torch.func.grad` and `vjp`.
    """

    @staticmethod
    def forward(passes: LayerPasses, call: Call, anchor: torch.Tensor | None, *inputs: Any) -> tuple[Any, ...]:
        with call.running(passes.transport):
            outputs, kept = passes.forward(*inputs)
        return *outputs, *kept, torch.tensor(call.number, device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.passes, ctx.call, _, *given = inputs
        count = ctx.passes.outputs
        *kept, number = output[count:]
        saved = ctx.passes.saved(given, output[:count], kept)
        # A checkpoint without reentry replaces saved tensors by those of a forward pass that it runs again, with a
        # number of its own, and keeps everything else. So the number of the call is saved as a tensor, too.
        ctx.save_for_backward(*saved, *([number] if saved else []))
        ctx.mark_non_differentiable(*kept, number)
        ctx.set_materialize_grads(False)  # outputs without a gradient cost nothing in the backward pass

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # where a compiled function itself calls backward
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        passes: LayerPasses = ctx.passes
        call: Call = ctx.call
        *saved, number = ctx.saved_tensors or (None,)
        gradients = gradients[: passes.outputs]
        try:
            check_transforms(*gradients)
        except WorkloadError as error:
            call.agree_on_backward(problem=error)
            raise
        # Only with a graph can gradients be differentiated; torch.func always makes one, below which tensors are plain.
        run: Callable[..., tuple[Any, ...]] = _Backward.apply if torch.is_grad_enabled() else _Backward.forward
        found = run(passes, call, number, *saved, *gradients)
        return None, None, None, *found


class _Backward(torch.autograd.Function):
    """The backward pass, an operation of its own: without it, second derivatives would be 0 without a word."""

    @staticmethod
    def forward(passes: LayerPasses, call: Call, number: torch.Tensor | None, *tensors: Any) -> tuple[Any, ...]:
        saved, gradients = tensors[: -passes.outputs], tensors[-passes.outputs :]
        computed_as = None if number is None else int(number)
        call.agree_on_backward(computed_as)
        with call.running(passes.transport, computed_as, backward=True):
            return passes.backward(saved, *gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        raise WorkloadError("second derivatives of a layer are not computed, expected a loss without gradients in it")


def _built_together(layer: LayerCall, everyone: Sequence[Proposal]) -> tuple[Schedule, ...]:
    """The schedules that all ranks build. Raises `RunError` if they differ.

    They can only with a topology, as a search for its rings may end differently on every rank, and if a user's builder
    differs between processes.
    """
    if layer.topology is None and layer.builds_alike:
        return layer.build(everyone, _mesh(len(everyone)))
    own: Proposal | Exception
    try:
        built = layer.build(everyone, layer.topology or _mesh(len(everyone)))
        what = "rings" if layer.builds_alike else "the schedule of a user's builder"
        own = {what: "".join(schedule.digest for schedule in built)}
    except Exception as error:
        own = error
    agree(own, layer.group, layer.timeout_s)
    return built


@lru_cache(maxsize=8)
def _mesh(world_size: int) -> Topology:
    return full_mesh(world_size)


def lengths_of(everyone: Sequence[Proposal], name: str = "positions") -> list[int]:
    """The number of positions that each rank has proposed."""
    return [int(str(proposal[name])) for proposal in everyone]


def passes_to_run(options: AttentionOptions, gradients: bool) -> AttentionOptions:
    """The options, for a forward pass alone where no gradients are wanted. Raises `WorkloadError`."""
    if gradients and options.passes != "both":
        raise WorkloadError(f"options: passes is {options.passes}, expected both, for gradients are wanted")
    if options.passes == "backward":
        raise WorkloadError("options: passes is backward, expected both, or forward where no gradients are wanted")
    return options if gradients else options.forward_only


def documents_in(cu_seqlens: Sequence[int] | torch.Tensor | None) -> tuple[int, ...] | None:
    """The lengths of packed documents. Raises `WorkloadError`."""
    if isinstance(cu_seqlens, torch.Tensor):
        check_tensor("cu_seqlens", cu_seqlens)
        cu_seqlens = cu_seqlens.tolist()
    return None if cu_seqlens is None else documents_of(cu_seqlens)


def attention_proposal(
    kind: str, positions: int, workload: Workload, documents: tuple[int, ...] | None, options: AttentionOptions,
    **particular: object,
) -> dict[str, object]:  # fmt: skip
    """The proposal of a call of attention: what softmax and linear attention have in common, and the rest."""
    packed = None
    if documents is not None:
        packed = with_digest(f"{len(documents)} documents of {sum(documents)} positions", documents)
    return {
        "kind": kind,
        "positions": positions,
        "documents": packed,
        **particular,
        **asdict(options),
        **{name: value for name, value in asdict(workload).items() if name not in _NOT_KNOWN_YET},
        "value_dim": workload.value_size,
    }


_NOT_KNOWN_YET = ("sequence", "documents", "cached_keys", "ranges")
"""Facts of a layer that a rank has only after the exchange."""


def with_digest(text: str, value: object) -> str:
    """A text with a digest of a value, which two values share only if they are the same."""
    return f"{text} ({hashlib.sha256(repr(value).encode()).hexdigest()[:8]})"


def workload_of_shard(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, window: Window | None, cached: bool
) -> Workload:
    """The layer as far as one rank knows it: its sequence is a placeholder, and it has no cached keys."""
    for name, each in (("q", q), ("k", k), ("v", v)):
        if each.dim() != 4:
            raise WorkloadError(f"{name} is {list(each.shape)}, expected [batch, positions, heads, head_dim]")
        if each.dtype not in DTYPE_NAMES:
            raise WorkloadError(f"{name} is {each.dtype}, which is not supported, expected one of "
                                f"{', '.join(map(str, DTYPE_NAMES))}")  # fmt: skip
        if each.dtype != q.dtype or each.device != q.device:
            raise WorkloadError(f"{name} is {each.dtype} on {each.device}, q is {q.dtype} on {q.device}, expected one "
                                "dtype and one device")  # fmt: skip
    batch, positions, heads, head_dim = q.shape
    fits = k.shape[1] >= positions if cached else k.shape[1] == positions
    if not fits or k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[3]) != (batch, head_dim):
        equal = "batch and head_dim, as many keys as queries or more" if cached else "batch, positions and head_dim"
        raise WorkloadError(f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}, expected equal "
                            f"{equal}, and equal shapes of k and v but for the width of v")  # fmt: skip
    value_dim = None if v.shape[3] == head_dim else v.shape[3]
    return Workload(1, batch, heads, k.shape[2], head_dim, DTYPE_NAMES[q.dtype], mask, window, value_dim=value_dim)


def described_layer(schedule: str, workload: Workload) -> str:
    """A layer in few words, for errors.

    >>> described_layer("tasp", Workload(4096, heads=8, kv_heads=2, head_dim=64, mask="causal"))
    'tasp, 4,096 positions, 8 heads (2 KV heads) of 64, causal, bf16'
    """
    batch = f"batch {workload.batch}, " if workload.batch > 1 else ""
    heads = f"{workload.heads} heads ({workload.kv_head_count} KV heads) of {workload.widths}"
    return f"{schedule}, {workload.sequence:,} positions, {batch}{heads}, {workload.mask}, {workload.dtype}"


def check_lengths(
    schedule: str, layout: SequenceLayout, lengths: Sequence[int], expected: Sequence[int], what: str = "positions"
) -> None:
    """Raise `WorkloadError` unless every rank has as many positions as the layout of a schedule gives it."""
    if len(lengths) != layout.world_size:
        raise WorkloadError(f"the topology has {layout.world_size} ranks, the group {len(lengths)}")
    for rank, (length, wanted) in enumerate(zip(lengths, expected, strict=True)):
        if length != wanted:
            raise WorkloadError(
                f"rank {rank} has {length} of {sum(lengths)} {what}, the {layout.name} layout of {schedule} "
                f"assigns {wanted} to it"
            )
