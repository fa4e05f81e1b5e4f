"""The kernel fla: the Triton operators of flash-linear-attention 0.6, for GPUs.

Never executed on a GPU yet: tested with a stand-in that has the same signatures.

Inputs are bfloat16 or float16. The operators accumulate in float32, but in a forward pass they keep the states between
their tiles of 64 positions in the dtype of the inputs, so outputs are as accurate as that dtype: 2^-8 in bfloat16.
States between ranks stay in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tasp_lab.core.errors import first_line

Tensor = torch.Tensor


class FlashLinearAttention:
    """The operators ``chunk_simple_gla`` and, with a decay per channel, ``chunk_gla``."""

    name = "fla"

    def supports(self, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it supports torch.float16 and torch.bfloat16, not {dtype}"
        return _import_problem()

    def attend(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return partial(attend, dtype)


def attend(
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
        options["cu_seqlens"] = torch.tensor([*ends, batch * positions], device=q.device)
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


def _import_problem() -> str | None:
    """Why flash-linear-attention cannot be imported."""
    try:
        importlib.import_module("fla.ops.simple_gla")
        importlib.import_module("fla.ops.gla")
    except Exception as error:  # of Triton without a driver, too
        return f"flash-linear-attention does not import: {first_line(error)}"
    return None
