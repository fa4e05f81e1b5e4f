"""The fused operators of torch's scaled_dot_product_attention: the kernels sdpa, on CPUs and GPUs, and cudnn."""

from __future__ import annotations

from functools import partial

import torch

from runtime.kernels.flash import TORCH_FLASH, gpu_head_dim, gpu_kernel, gpu_problem, no_random_state
from runtime.kernels.partials import (
    Band,
    Gradients,
    Kernel,
    Partial,
    Rows,
    additive_mask,
    by_rows,
    gradients_by_head,
    gradients_by_rows,
    heads_first,
    lse_dtype,
    over_band,
    padding_gradients,
    padding_values,
)
from runtime.kernels.reference import softmax_attention

Tensor = torch.Tensor

_OLDEST_FLASH = 8
"""The compute capability of GPUs of NVIDIA from which torch's FlashAttention-2 runs."""


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    if band.unmasked or band.causal:
        return _cpu_operator(q, k, v, scale, band)
    return by_rows(_cpu_operator, q, k, v, scale, band)


def _cpu_operator(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private CPU operator. It supports GQA; its causal mask is aligned to the top left."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = _cpu_mask(q, band)

    def attend(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = operator(*heads_first(*qkv), is_causal=band.causal, attn_mask=mask, scale=scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

    return _repaired(Partial(*padding_values(attend)(q, k, v)), q, k, v, scale, band)


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
    by_head = partial(gradients_by_head, _cpu_gradient_operator)
    if band.unmasked or band.causal:
        return by_head(rows, k, v, scale, band)
    return gradients_by_rows(by_head, rows, k, v, scale, band)


def _cpu_gradient_operator(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private CPU operator for gradients; not every release supports GQA."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask, (dout, q, out, lse) = _cpu_mask(rows.q, band), rows

    def differentiate(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = operator(*heads_first(*tensors), 0.0, band.causal, attn_mask=mask, scale=scale)
        dq, dk, dv = heads_first(*found)
        return dq, dk, dv

    return Gradients(*padding_gradients(differentiate)(dout, q, k, v, out, lse))


def _old_gpu(device: torch.device) -> str | None:
    """Why torch's FlashAttention does not run on a GPU of NVIDIA; None if it does."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= _OLDEST_FLASH else f"it needs compute capability 8 or higher, not {major}.{minor}"


def _supports(dtype: torch.dtype, device: torch.device, head_dim: int, value_dim: int) -> str | None:
    if device.type == "cuda":
        return gpu_problem(dtype, head_dim, value_dim) or _old_gpu(device)
    if device.type != "cpu":
        return f"it runs on cpu and cuda, not {device.type}"
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return None if dtype in dtypes else f"on cpu it supports {', '.join(map(str, dtypes))}, not {dtype}"


SDPA = Kernel(
    "sdpa", _supports,
    lambda q, *others: (TORCH_FLASH.attend if q.is_cuda else _attend_on_cpu)(q, *others),
    lambda rows, *others: (TORCH_FLASH.differentiate if rows.q.is_cuda else _gradients_on_cpu)(rows, *others),
    lambda q, backward: lse_dtype(q.dtype) if backward and q.is_cpu else q.dtype,
    lambda device: TORCH_FLASH if device.type == "cuda" else None,
)  # fmt: skip
"""torch's operators: that of CPUs, whose backward pass is float32 or wider, since it accumulates in its dtype; and
FlashAttention-2 on GPUs.
"""


# The kernel cudnn: cuDNN's fused attention, on GPUs of compute capability 9 and 10 (Hopper, Blackwell).
#
# It has never been executed: no GPU was at hand. So it is chosen by name only, never by ``auto``. Bands that torch's
# operator lacks, and what `torch.backends.cuda.can_use_cudnn_attention` refuses, go to torch's FlashAttention.


_OLDEST, _MOST_ELEMENTS, _WIDER = 9, 128, (192, 128)
"""Compute capability; elements of keys and of values per head, and a wider pair of both (torch's
check_cudnn_tensor_shapes in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""


def _cudnn_problem(device: torch.device, head_dim: int, value_dim: int) -> str | None:
    at_fault = gpu_head_dim(head_dim, value_dim, most=_MOST_ELEMENTS, wider=", or 192 with values of 128")
    if at_fault and (head_dim, value_dim) != _WIDER:
        return at_fault
    if torch.version.hip is not None or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "torch has no cuDNN here"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= _OLDEST else f"it needs compute capability {_OLDEST} or higher, not {major}.{minor}"


def _cudnn_attend(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    return (_cudnn_operator if _cudnn_runs(q, k, v, band) else TORCH_FLASH.attend)(q, k, v, scale, band)


def _cudnn_differentiate(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    # support can depend on whether a gradient is required
    runs = _cudnn_runs(rows.q.detach().requires_grad_(), k, v, band)
    return (_cudnn_gradient_operator if runs else TORCH_FLASH.differentiate)(rows, k, v, scale, band)


def _cudnn_runs(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Whether torch's cuDNN operator supports this mask and these tensors on this GPU."""
    if not (band.unmasked or (band.causal and band.queries == band.keys)):
        return False
    query, key, value = heads_first(q, k, v)
    grouped = q.shape[2] != k.shape[2]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, band.causal, grouped)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def _cudnn_operator(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private cuDNN operator, which supports GQA. Its lse may have a last dimension of 1."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = operator(*heads_first(q, k, v), None, True, 0.0, band.causal, scale=scale)
    return Partial(*heads_first(out, lse.reshape(out.shape[:3])))


def _cudnn_gradient_operator(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private cuDNN operator for gradients, with lse as its forward pass returns it."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    dout, q, out, lse = heads_first(*rows)
    unused = no_random_state(q)
    found = operator(
        dout, q, *heads_first(k, v), out, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None,
        band.queries, band.keys, 0.0, band.causal, scale=scale,
    )  # fmt: skip
    return Gradients(*heads_first(*found))


CUDNN = gpu_kernel("cudnn", _cudnn_problem, TORCH_FLASH, _cudnn_attend, _cudnn_differentiate)
