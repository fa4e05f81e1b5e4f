"""The kernel sdpa: the fused operators of torch's scaled_dot_product_attention, and their calls on a CPU."""

from __future__ import annotations

import torch

from runtime.kernels.bands import Band, additive_mask
from runtime.kernels.partials import (
    Gradients,
    Partial,
    Rows,
    by_rows,
    gradients_by_head,
    gradients_by_rows,
    gradients_over_band,
    heads_first,
    lse_dtype,
    over_band,
    rows_contiguous,
)
from runtime.kernels.reference import softmax_attention
from runtime.kernels.sdpa_gpu import attend_on_gpu, gpu_head_dim, gradients_on_gpu

Tensor = torch.Tensor


class ScaledDotProduct:
    """The fused operators of torch's scaled_dot_product_attention, which also return the log-sum-exp.

    On a GPU a non-finite value can affect rows that do not attend to it, if they share a tile of the mask with a row
    that does: a check would synchronise the stream.
    """

    name = "sdpa"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        dtypes = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (device.type == "cpu")
        if device.type not in ("cpu", "cuda"):
            return f"it runs on cpu and cuda, not {device.type}"
        if dtype not in dtypes:
            return f"on {device.type} it supports {', '.join(map(str, dtypes))}, not {dtype}"
        return gpu_head_dim(head_dim) if device.type == "cuda" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        return over_band(attend_on_gpu if q.is_cuda else _attend_on_cpu, q, k, v, scale, low, high)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        """As `Kernel.backward`. On a CPU all tensors are float32 or wider: the operator accumulates in their dtype."""
        dtype = q.dtype if q.is_cuda else lse_dtype(q.dtype)
        dout, out, k, v = (rows_contiguous(x.to(dtype)) for x in (dout, out, k, v))
        rows = Rows(dout, rows_contiguous(q.to(dtype)), out, lse)
        differentiate = gradients_on_gpu if q.is_cuda else _gradients_on_cpu
        return gradients_over_band(differentiate, rows, k, v, scale, low, high)


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    if band.unmasked or band.causal:
        return _cpu_operator(q, k, v, scale, band)
    return by_rows(_cpu_operator, q, k, v, scale, band)


def _cpu_operator(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private CPU operator. It supports GQA; its causal mask is aligned to the top left."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = _cpu_mask(q, band)
    found = operator(*heads_first(q, k, v), is_causal=band.causal, attn_mask=mask, scale=scale)
    return _repaired(Partial(*heads_first(*found)), q, k, v, scale, band)


def _cpu_mask(q: Tensor, band: Band) -> Tensor | None:
    return None if band.unmasked or band.causal else additive_mask(band, q.dtype, q.device)


def _repaired(found: Partial, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The result, with the rows recomputed for which the CPU operator may be wrong.

    In the operator non-finite values spread to rows that do not attend to them, a score of +inf can yield out 0, and a
    row without keys gets lse 0. All of these rows have non-finite out or lse, or lse 0, which is rare otherwise.
    """
    out, lse = found
    if out.sum(dtype=lse.dtype).isfinite() and lse.sum().isfinite() and lse.all():
        return found
    suspect = ~lse.isfinite() | (lse == 0) | ~out.isfinite().all(-1)
    q, k, v = q.to(lse.dtype), k.to(lse.dtype), v.to(lse.dtype)
    for row in suspect.any(2).any(0).nonzero().flatten().tolist():
        exact = over_band(softmax_attention, q.narrow(1, row, 1), k, v, scale, band.low - row, band.high - row)
        out.narrow(1, row, 1).copy_(exact.out)
        lse.narrow(1, row, 1).copy_(exact.lse)
    return found


def _gradients_on_cpu(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    if band.unmasked or band.causal:
        return _cpu_gradients(rows, k, v, scale, band)
    return gradients_by_rows(_cpu_gradients, rows, k, v, scale, band)


def _cpu_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    return gradients_by_head(_cpu_gradient_operator, rows, k, v, scale, band)


def _cpu_gradient_operator(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private CPU operator for gradients; not every release supports GQA."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dout, q, out, lse = heads_first(*rows)
    mask = _cpu_mask(q, band)
    found = operator(dout, q, *heads_first(k, v), out, lse, 0.0, band.causal, attn_mask=mask, scale=scale)
    return Gradients(*heads_first(*found))
