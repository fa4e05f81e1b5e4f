"""Kernels of causal linear attention within a chunk, by name: ``torch`` and ``fla``.

States are made, summed and applied by `runtime.kernels.linear_attention` with every kernel: those are products of
matrices. What a kernel replaces is `runtime.kernels.linear_attention.attend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from runtime.kernels.linear_attention import attend
from runtime.kernels.partials import constant
from runtime.kernels.registry import choose
from tasp_lab.core.errors import first_line

Tensor = torch.Tensor


class Attend(Protocol):
    """Outputs of a chunk from within it, shapes as in `runtime.kernels.linear_attention`; differentiable."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None, starts: Sequence[int] = (), /
    ) -> Tensor: ...


@dataclass(frozen=True)
class LinearKernel:
    """One implementation.

    `supports` is why it cannot run with a dtype on a device, in one line, or None. `attend` is the kernel for inputs of
    a dtype; what it is called with may have been widened to float32.
    """

    name: str
    supports: Callable[[torch.dtype, torch.device], str | None]
    attend: Callable[[torch.dtype], Attend]


# The kernel fla: the Triton operators of flash-linear-attention 0.6, for GPUs.
#
# Never executed on a GPU yet: tested with a stand-in that has the same signatures.
#
# Inputs are bfloat16 or float16. The operators accumulate in float32, but in a forward pass they keep the states
# between their tiles of 64 positions in the dtype of the inputs, so outputs are as accurate as that dtype: 2^-8 in
# bfloat16. States between ranks stay in float32.


def _supported_by_fla(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it runs on cuda, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it supports torch.float16 and torch.bfloat16, not {dtype}"
    try:
        importlib.import_module("fla.ops.simple_gla")
        importlib.import_module("fla.ops.gla")
    except Exception as error:  # of Triton without a driver, too
        return f"flash-linear-attention does not import: {first_line(error)}"
    return None


def _attend_by_fla(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None, starts: Sequence[int] = ()
) -> Tensor:
    """`runtime.kernels.linear_attention.attend` with inputs rounded to a dtype; the result is float32."""
    positions, batch, heads = q.shape[:3]
    if not positions:
        return v.new_empty(0, batch, heads, v.shape[3], dtype=torch.float32)
    group = heads // k.shape[2]
    q, k, v = (each.transpose(0, 1).to(dtype) for each in (q, k, v))
    k, v = (each.repeat_interleave(group, 2) for each in (k, v))
    operator, options = _decayed(gates, positions, batch, group)
    inner = sorted({each for each in starts if each})
    if inner:  # documents lie in one row for the operators, whatever the batch
        ends = [row * positions + at for row in range(batch) for at in (0, *inner)]
        options["cu_seqlens"] = constant((*ends, batch * positions), torch.int64, q.device)
        options |= {name: options[name].flatten(0, 1)[None].contiguous() for name in ("g",) if name in options}
        q, k, v = (each.flatten(0, 1)[None] for each in (q, k, v))
    out, _ = operator(q.contiguous(), k.contiguous(), v.contiguous(), scale=1.0, output_final_state=False, **options)
    found: Tensor = out.float().reshape(batch, positions, heads, -1).transpose(0, 1)
    return found


def _decayed(
    gates: Tensor | None, positions: int, batch: int, group: int
) -> tuple[Callable[..., tuple[Tensor, Any]], dict[str, Any]]:
    """The operator for a decay, and its gates per query head."""
    simple = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    if gates is None:
        return simple, {}
    gates = gates.float().repeat_interleave(group, 2)
    if len(gates) == 1 and gates.shape[1] == 1 and gates.shape[3] == 1 and not gates.requires_grad:
        return simple, {"g_gamma": gates.flatten().contiguous()}
    given = gates.expand(positions, batch, *gates.shape[2:]).transpose(0, 1)
    if given.shape[3] == 1:
        return simple, {"g": given[..., 0].contiguous()}
    return importlib.import_module("fla.ops.gla").chunk_gla, {"g": given.contiguous()}


_FLA = LinearKernel("fla", _supported_by_fla, lambda dtype: partial(_attend_by_fla, dtype))
"""The operators ``chunk_simple_gla`` and, with a decay per channel, ``chunk_gla``."""

_TORCH = LinearKernel("torch", lambda dtype, device: None, lambda dtype: attend)
"""Tiles in torch operations, in float32 inside; on every device."""

LINEAR_KERNELS: Mapping[str, LinearKernel] = {"fla": _FLA, "torch": _TORCH}
"""Kernels by name, the fastest first."""


def choose_linear_kernel(name: str, dtype: torch.dtype, device: torch.device) -> LinearKernel:
    """A kernel by name; ``auto`` is fla if supported, else torch.

    Raises `RunError` for an unknown name, and for a dtype or device that the kernel does not support.

    >>> choose_linear_kernel("auto", torch.bfloat16, torch.device("cpu")).name
    'torch'
    """
    supports = lambda kernel: kernel.supports(dtype, device)  # noqa: E731
    return choose("linear attention", name, LINEAR_KERNELS, supports, device, automatic=LINEAR_KERNELS)
