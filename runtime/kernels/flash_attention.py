"""The kernel flash-attn: the package flash-attn, releases 2.5 to 2.8, for CUDA and ROCm."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from runtime.kernels.bands import Band, window
from runtime.kernels.partials import Gradients, Partial, Rows, gradients_over_band, over_band, rows_contiguous
from runtime.kernels.sdpa_gpu import gpu_head_dim, with_empty_rows
from tasp_lab.core.errors import first_line

Tensor = torch.Tensor


TRITON_ON_AMD = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
"""flash-attn's variable that chooses the Triton backend instead of the compiled one."""


class FlashAttention:
    """The flash-attn package, for CUDA and ROCm. Non-finite values: as in `ScaledDotProduct` on a GPU."""

    name = "flash-attn"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it supports torch.float16 and torch.bfloat16, not {dtype}"
        return gpu_head_dim(head_dim) or _import_problem()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        return over_band(_flash_attn, q, k, v, scale, low, high)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        dout, q, k, v, out = (rows_contiguous(x) for x in (dout, q, k, v, out))
        return gradients_over_band(_flash_attn_gradients, Rows(dout, q, out, lse), k, v, scale, low, high)


def _import_problem() -> str | None:
    """Why flash-attn cannot be used. The package can be installed without its compiled module, so import that.

    Its Triton backend for AMD refuses windows in the backward pass, and a causal call is a window (0 to the right;
    `flash_attn_triton_amd/interface_v2.py`, `bwd`). So it is not used.
    """
    if torch.version.hip is not None and os.environ.get(TRITON_ON_AMD, "FALSE") == "TRUE":
        return f"its Triton backend ({TRITON_ON_AMD}) has no backward pass for causal masks; its CK backend has"
    try:
        importlib.import_module("flash_attn_2_cuda")
        importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError) as error:
        return f"its compiled module flash_attn_2_cuda does not import: {first_line(error)}"
    return None


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of flash-attn, which supports GQA. Its first and last three results are stable."""
    forward = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_forward
    found = forward(q, k, v, **_options(forward, scale, band))
    out, lse = found[0], found[-3]
    return with_empty_rows(Partial(out, lse[..., : band.queries].transpose(1, 2)))


def _flash_attn_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of flash-attn for gradients, which supports GQA.

    It requires contiguous lse without checking. Its return value differs between releases, its output arguments do not.
    """
    backward = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_backward
    lse = rows.lse.transpose(1, 2).contiguous()
    filled = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (rows.q, k, v)))
    backward(rows.dout, rows.q, k, v, rows.out, lse, *filled, **_options(backward, scale, band))
    return filled


def _options(function: Callable[..., Any], scale: float, band: Band) -> dict[str, Any]:
    """The options of the installed release: the window is a pair or two numbers, and softcap was added later."""
    left, right = window(band)
    options = {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": (left, right) == (-1, 0),
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0,
        "alibi_slopes": None,
        "return_softmax": False,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return {name: options[name] for name in _option_names(function) & options.keys()}


@cache
def _option_names(function: Callable[..., Any]) -> frozenset[str]:
    """The parameter names of a function; torch wraps an operator and keeps its signature in `_init_fn`."""
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)
