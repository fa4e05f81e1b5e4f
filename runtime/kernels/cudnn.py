"""The kernel cudnn: cuDNN's fused attention through torch, on GPUs of compute capability 9 and 10 (Hopper, Blackwell).

It has never been executed: no GPU was at hand. So it is chosen by name only, never by ``auto``. Masks that torch's
operator lacks, and what `torch.backends.cuda.can_use_cudnn_attention` refuses, go to the operators of the kernel sdpa.
"""

from __future__ import annotations

import torch

from runtime.kernels.partials import (
    Band,
    Gradients,
    Partial,
    Rows,
    gradients_over_band,
    heads_first,
    over_band,
    rows_contiguous,
)
from runtime.kernels.sdpa import attend_on_gpu, gradients_on_gpu, no_random_state, operator_parameters

Tensor = torch.Tensor

_OLDEST, _MOST_ELEMENTS = 9, 128


class Cudnn:
    """cuDNN's attention for 16-bit inputs. Non-finite values: as in `ScaledDotProduct` on a GPU."""

    name = "cudnn"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it supports torch.float16 and torch.bfloat16, not {dtype}"
        if head_dim % 8 or not 0 < head_dim <= _MOST_ELEMENTS:
            return f"it supports a head_dim that is a multiple of 8 up to {_MOST_ELEMENTS}, not {head_dim}"
        if torch.version.hip is not None or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            return "torch has no cuDNN here"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= _OLDEST else f"it needs compute capability {_OLDEST} or higher, not {major}.{minor}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        return over_band(_attend, q, k, v, scale, low, high)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        dout, q, k, v, out = (rows_contiguous(x) for x in (dout, q, k, v, out))
        return gradients_over_band(_differentiate, Rows(dout, q, out, lse), k, v, scale, low, high)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    return (_operator if _runs(q, k, v, band) else attend_on_gpu)(q, k, v, scale, band)


def _differentiate(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    runs = _runs(rows.q.detach().requires_grad_(), k, v, band)
    return (_gradient_operator if runs else gradients_on_gpu)(rows, k, v, scale, band)


def _runs(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    parameters = operator_parameters(q, k, v, band)
    return parameters is not None and torch.backends.cuda.can_use_cudnn_attention(parameters)


def _operator(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private cuDNN operator, which supports GQA. Its lse may have a last dimension of 1."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = operator(*heads_first(q, k, v), None, True, 0.0, band.causal, scale=scale)
    return Partial(*heads_first(out, lse.reshape(out.shape[:3])))


def _gradient_operator(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private cuDNN operator for gradients, with lse as its forward pass returns it."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    dout, q, out, lse = heads_first(*rows)
    unused = no_random_state(q)
    found = operator(
        dout, q, *heads_first(k, v), out, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None,
        band.queries, band.keys, 0.0, band.causal, scale=scale,
    )  # fmt: skip
    return Gradients(*heads_first(*found))
