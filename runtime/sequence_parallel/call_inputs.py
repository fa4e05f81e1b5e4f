"""What calls of softmax and of linear attention have in common: their inputs, agreed on before data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from runtime.executor.transports import Group
from runtime.executor.views import DTYPES
from runtime.sequence_parallel.agreement import Proposal, agree
from tasp_lab.core.errors import RunError, TaspLabError, WorkloadError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """torch.compile calls the function as it is: what ranks tell each other cannot be traced."""
    found: Callable[_Arguments, _Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


BOTH_PASSES = AttentionOptions("both")
"""Forward, and backward where gradients are wanted."""


def check_member(group: Group) -> None:
    """Raise `RunError` unless this process is part of the group."""
    if not dist.is_initialized():
        raise RunError("no process group: call torch.distributed.init_process_group first, or start with torchrun")
    if dist.get_rank(group) < 0:
        raise RunError("this process is not part of the group")


def passes_to_run(options: AttentionOptions, gradients: bool) -> AttentionOptions:
    """The options, for a forward pass alone where no gradients are wanted. Raises `WorkloadError`."""
    if gradients and options.passes != "both":
        raise WorkloadError(f"options: passes is {options.passes}, expected both, for gradients are wanted")
    if options.passes == "backward":
        raise WorkloadError("options: passes is backward, expected both, or forward where no gradients are wanted")
    return options if gradients else options.forward_only


def whole_numbers(cu_seqlens: Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.tolist()
    return list(cu_seqlens)


def workload_of_shard(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, window: int | None, cached: bool
) -> Workload:
    """The layer as far as one rank knows it: its sequence is a placeholder, and it has no cached keys."""
    for name, each in (("q", q), ("k", k), ("v", v)):
        if each.dim() != 4:
            raise WorkloadError(f"{name} is {_shape(each)}, expected [batch, positions, heads, head_dim]")
        if each.dtype not in DTYPE_NAMES:
            raise WorkloadError(f"{name} is {each.dtype}, which is not supported, expected one of "
                                f"{', '.join(map(str, DTYPE_NAMES))}")  # fmt: skip
        if each.dtype != q.dtype or each.device != q.device:
            raise WorkloadError(f"{name} is {each.dtype} on {each.device}, q is {q.dtype} on {q.device}, expected one "
                                "dtype and one device")  # fmt: skip
    batch, positions, heads, head_dim = q.shape
    fits = k.shape[1] >= positions if cached else k.shape[1] == positions
    if not fits or k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, head_dim):
        equal = "batch and head_dim, as many keys as queries or more" if cached else "batch, positions and head_dim"
        raise WorkloadError(f"q is {_shape(q)}, k is {_shape(k)}, v is {_shape(v)}, expected equal {equal}, "
                            "and equal shapes of k and v")  # fmt: skip
    seen = None if window is None else int(window)
    return Workload(1, batch, heads, k.shape[2], head_dim, DTYPE_NAMES[q.dtype], mask, seen)


def known_to_all(workload: Workload) -> dict[str, object]:
    """What every rank knows of the layer before the ranks have talked: all but how long it is."""
    return {
        name: value for name, value in asdict(workload).items() if name not in ("sequence", "documents", "cached_keys")
    }


def described_documents(documents: tuple[int, ...]) -> str:
    """In few letters that two lists of documents share only if they are the same."""
    digest = hashlib.sha256(repr(documents).encode()).hexdigest()[:8]
    return f"{len(documents)} documents of {sum(documents)} positions ({digest})"


def described_layer(schedule: str, workload: Workload) -> str:
    """A layer in few words, for errors.

    >>> described_layer("tasp", Workload(4096, heads=8, kv_heads=2, head_dim=64, mask="causal"))
    'tasp, 4,096 positions, 8 heads (2 KV heads) of 64, causal, bf16'
    """
    batch = f"batch {workload.batch}, " if workload.batch > 1 else ""
    heads = f"{workload.heads} heads ({workload.kv_head_count} KV heads) of {workload.head_dim}"
    return f"{schedule}, {workload.sequence:,} positions, {batch}{heads}, {workload.mask}, {workload.dtype}"


@lru_cache(maxsize=8)
def mesh(world_size: int) -> Topology:
    return full_mesh(world_size)


def built_together(
    build: Callable[[], tuple[Schedule, ...]],
    topology: Topology | None,
    group: Group,
    timeout_s: float,
) -> tuple[Schedule, ...]:
    """The schedules that all ranks build. Raises `RunError` if they differ.

    They can only with a topology, as a search for its rings may end differently on every rank.
    """
    if topology is None:
        return build()
    own: Proposal | TaspLabError
    try:
        built = build()
        own = {"rings": "".join(each.digest for each in built)}
    except TaspLabError as error:
        own = error
    agree(own, group, timeout_s)
    return built


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


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))
