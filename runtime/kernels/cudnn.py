"""The kernel cudnn: cuDNN's fused attention through torch, on GPUs of compute capability 9 and 10 (Hopper, Blackwell).

It has never been executed: no GPU was at hand. So it is chosen by name only, never by ``auto``. Masks that torch's
operator lacks, and what `torch.backends.cuda.can_use_cudnn_attention` refuses, go to the operators of the kernel sdpa.
"""

from __future__ import annotations

import torch

from runtime.kernels.partials import Band, Gradients, Partial, Rows, heads_first
from runtime.kernels.sdpa import GpuKernel, attend_on_gpu, gradients_on_gpu, no_random_state, operator_parameters

Tensor = torch.Tensor

_OLDEST, _MOST_ELEMENTS = 9, 128


def _problem(device: torch.device, head_dim: int) -> str | None:
    if head_dim % 8 or not 0 < head_dim <= _MOST_ELEMENTS:
        return f"it supports a head_dim that is a multiple of 8 up to {_MOST_ELEMENTS}, not {head_dim}"
    if torch.version.hip is not None or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "torch has no cuDNN here"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= _OLDEST else f"it needs compute capability {_OLDEST} or higher, not {major}.{minor}"


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


CUDNN = GpuKernel("cudnn", _problem, _attend, _differentiate)
