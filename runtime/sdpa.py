"""The kernel sdpa: the fused operators behind torch's scaled_dot_product_attention, and those for a CPU."""

from __future__ import annotations

import torch

from runtime.bands import Band, additive_mask
from runtime.partials import (
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
from runtime.reference import softmax_attention
from runtime.sdpa_gpu import attend_on_gpu, gpu_head_dim, gradients_on_gpu

Tensor = torch.Tensor


class ScaledDotProduct:
    """The fused operators behind torch's scaled_dot_product_attention, which also give the log-sum-exp.

    On a GPU a value that is not finite can reach rows that do not see it, where they share a tile of a mask with rows
    that do: finding out would stall the stream.
    """

    name = "sdpa"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        dtypes = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (device.type == "cpu")
        if device.type not in ("cpu", "cuda"):
            return f"it runs on cpu and cuda, not {device.type}"
        if dtype not in dtypes:
            return f"on {device.type} it takes {', '.join(map(str, dtypes))}, not {dtype}"
        return gpu_head_dim(head_dim) if device.type == "cuda" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        return over_band(attend_on_gpu if q.is_cuda else _attend_on_cpu, q, k, v, scale, low, high)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        """On a CPU in float32 at least, the result too: its operator adds up 16-bit gradients in 16 bits."""
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
    """The only call of torch's private CPU operator; it counts causal from the top left and groups heads itself."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = _cpu_mask(q, band)
    found = operator(*heads_first(q, k, v), is_causal=band.causal, attn_mask=mask, scale=scale)
    return _repaired(Partial(*heads_first(*found)), q, k, v, scale, band)


def _cpu_mask(q: Tensor, band: Band) -> Tensor | None:
    return None if band.unmasked or band.causal else additive_mask(band, q.dtype, q.device)


def _repaired(found: Partial, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The rows that the CPU operator may have got wrong, computed again.

    Whatever is not finite spreads to rows that do not see it, a score of +inf can end as out 0, and a row without
    weight gets lse 0. All of these show as out or lse not finite or as lse 0, which is rare otherwise.
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
    """The only call of torch's private CPU operator for gradients; not every release of it groups heads."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dout, q, out, lse = heads_first(*rows)
    mask = _cpu_mask(q, band)
    found = operator(dout, q, *heads_first(k, v), out, lse, 0.0, band.causal, attn_mask=mask, scale=scale)
    return Gradients(*heads_first(*found))
