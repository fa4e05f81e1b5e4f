"""What calls of linear attention have besides queries, keys and values: decays, and states at a sequence's ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from tasp_lab.core.errors import ScheduleError, WorkloadError
from tasp_lab.schedules.registry import LINEAR, state_schedules
from tasp_lab.workload.layer import Decay, Workload

Tensor = torch.Tensor


def constant_decays(workload: Workload, decay: Sequence[float] | Tensor | None) -> tuple[float, ...]:
    """The decay of each KV head, () without any. Raises `WorkloadError` for anything else than a number for each."""
    if decay is None:
        return ()
    expected = f"expected {workload.kv_head_count} numbers, one per KV head"
    given = decay.tolist() if isinstance(decay, Tensor) else decay
    try:
        decays = tuple(float(each) for each in given)
    except (TypeError, ValueError):
        raise WorkloadError(f"decay: {str(given)[:40]}, {expected}") from None
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
    expected = [workload.batch, workload.kv_head_count, workload.head_dim, workload.head_dim]
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
    if schedule in LINEAR and schedule not in state_schedules():
        raise ScheduleError(f"schedule {schedule!r}: {what} does not apply to it, as it moves keys instead of states, "
                            f"expected one of {', '.join(state_schedules())}")  # fmt: skip
    first = next((rank for rank, length in enumerate(lengths) if length), 0)
    if with_state not in ([], [first]):
        ranks = ", ".join(map(str, with_state))
        raise WorkloadError(f"initial_state is given on rank {ranks}, expected rank {first} alone, which has the first "
                            "position")  # fmt: skip
    if not any(lengths):
        raise WorkloadError(f"{what} with 0 positions, expected at least 1")


def described_decays(decays: Sequence[float]) -> str:
    """In few letters that two lists of decays share only if they are the same."""
    digest = hashlib.sha256(repr(decays).encode()).hexdigest()[:8]
    return f"{min(decays):g} to {max(decays):g} ({digest})" if decays else "none"
