"""The fused operators of torch's scaled_dot_product_attention: the kernels sdpa, on CPUs and GPUs, and cudnn."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from runtime.kernels.partials import (
    Band,
    Compute,
    Differentiate,
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
)
from runtime.kernels.reference import softmax_attention

Tensor = torch.Tensor


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
    by_head = partial(gradients_by_head, _cpu_gradient_operator)
    if band.unmasked or band.causal:
        return by_head(rows, k, v, scale, band)
    return gradients_by_rows(by_head, rows, k, v, scale, band)


def _cpu_gradient_operator(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private CPU operator for gradients; not every release supports GQA."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dout, q, out, lse = heads_first(*rows)
    mask = _cpu_mask(q, band)
    found = operator(dout, q, *heads_first(k, v), out, lse, 0.0, band.causal, attn_mask=mask, scale=scale)
    return Gradients(*heads_first(*found))


# The operators of torch's scaled_dot_product_attention on a GPU, CUDA or ROCm, each called by one function.
#
# Two are used: flash, if supported, for unmasked or square causal bands, and memory-efficient for all others.


def gpu_head_dim(head_dim: int) -> str | None:
    """None if GPU kernels support the head_dim, else the reason in one line."""
    fits = head_dim % 8 == 0 and 0 < head_dim <= 256
    return None if fits else f"on cuda it supports a head_dim that is a multiple of 8 up to 256, not {head_dim}"


def gpu_kernel(
    name: str, problem: Callable[[torch.device, int], str | None], compute: Compute, differentiate: Differentiate
) -> Kernel:
    """A fused kernel of 16-bit inputs on GPUs that supports GQA. Non-finite values: as those of `SDPA` on a GPU.

    `problem` is the reason, in one line, why a device or a head_dim is not supported.
    """

    def supports(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it supports torch.float16 and torch.bfloat16, not {dtype}"
        return problem(device, head_dim)

    return Kernel(name, supports, compute, differentiate)


def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """Attention over a non-empty band."""
    operator = _gpu_flash if _gpu_flash_runs(q, k, v, band) else _gpu_efficient
    return operator(q, k, v, scale, band)


def gradients_on_gpu(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """Gradients over a non-empty band. Support by flash can depend on whether a gradient is required."""
    if _gpu_flash_runs(rows.q.detach().requires_grad_(), k, v, band):
        return _gpu_flash_gradients(rows, k, v, scale, band)
    return gradients_by_head(_gpu_efficient_gradients, rows, k, v, scale, band)


def _square_causal(band: Band) -> bool:
    return band.causal and band.queries == band.keys


def _gpu_flash_runs(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Whether torch's flash operator supports this mask and these tensors on this GPU."""
    parameters = operator_parameters(q, k, v, band)
    return parameters is not None and torch.backends.cuda.can_use_flash_attention(parameters)


def operator_parameters(q: Tensor, k: Tensor, v: Tensor, band: Band) -> torch.backends.cuda.SDPAParams | None:
    """The parameters by which torch decides whether an operator without a mask runs; None where the band needs one."""
    if not (band.unmasked or _square_causal(band)):
        return None
    query, key, value = heads_first(q, k, v)
    grouped = q.shape[2] != k.shape[2]
    return torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, band.causal, grouped)


def _gpu_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private flash operator, which supports GQA."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = operator(*heads_first(q, k, v), 0.0, band.causal, scale=scale)
    return Partial(*heads_first(out, lse))


def _gpu_flash_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private flash operator for gradients, which supports GQA.

    It requires contiguous lse without checking.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
    dout, q, out, lse = heads_first(*rows)
    unused = no_random_state(q)
    shape = (None, None, band.queries, band.keys)  # no cumulative sequence lengths: all sequences have equal length
    found = operator(
        dout, q, *heads_first(k, v), out, lse.contiguous(), *shape, 0.0, band.causal, unused, unused, scale=scale
    )
    return Gradients(*heads_first(*found))


def _gpu_efficient(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private memory-efficient operator.

    It does not support GQA, so it is called once per query head of a group, which avoids copying keys. Its lse is
    padded to whole tiles.
    """
    group = q.shape[2] // k.shape[2]
    mask = _gpu_mask(q, k, band)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0], dtype=torch.float32)
    for head in range(group):
        heads = heads_first(q[:, :, head::group], k, v)
        one_out, one_lse, *_ = operator(*heads, mask, True, 0.0, _square_causal(band), scale=scale)
        out[:, :, head::group] = one_out.transpose(1, 2)
        lse[:, :, head::group] = one_lse[..., : band.queries].transpose(1, 2)
    return Partial(out, lse)


def _gpu_efficient_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private memory-efficient operator for gradients, which does not support GQA.

    It requires contiguous rows of out without checking, and lse in the format of its forward pass: on CUDA padded with
    +inf to tiles of 32 rows.
    """
    operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    dout, q, out, lse = heads_first(rows.dout, rows.q, rows.out.contiguous(), rows.lse)
    padding = 0 if torch.version.hip else -band.queries % 32
    lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf).contiguous()
    unused, output_mask = no_random_state(q), [True, True, True, False]
    dq, dk, dv, _ = operator(
        dout, q, *heads_first(k, v), _gpu_mask(rows.q, k, band), out, lse, unused, unused, 0.0, output_mask,
        _square_causal(band), scale=scale,
    )  # fmt: skip
    return Gradients(*heads_first(dq, dk, dv))


def _gpu_mask(q: Tensor, k: Tensor, band: Band) -> Tensor | None:
    """The mask of the memory-efficient operator; None if the band is unmasked or square and causal."""
    if band.unmasked or _square_causal(band):
        return None
    return additive_mask(band, q.dtype, q.device).expand(q.shape[0], k.shape[2], -1, -1)


def no_random_state(q: Tensor) -> Tensor:
    """A placeholder for the random state of dropout, which is not used."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


def _supports(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (device.type == "cpu")
    if device.type not in ("cpu", "cuda"):
        return f"it runs on cpu and cuda, not {device.type}"
    if dtype not in dtypes:
        return f"on {device.type} it supports {', '.join(map(str, dtypes))}, not {dtype}"
    return gpu_head_dim(head_dim) if device.type == "cuda" else None


SDPA = Kernel(
    "sdpa", _supports,
    lambda q, *others: (attend_on_gpu if q.is_cuda else _attend_on_cpu)(q, *others),
    lambda rows, *others: (gradients_on_gpu if rows.q.is_cuda else _gradients_on_cpu)(rows, *others),
    lambda q, backward: lse_dtype(q.dtype) if backward and q.is_cpu else q.dtype,
)  # fmt: skip
"""The fastest of torch's operators. Backward on a CPU all is float32 or wider: the operator accumulates in its dtype.

On a GPU a non-finite value can affect rows that do not attend to it, if they share a tile of the mask with a row that
does: a check would synchronise the stream.
"""


# The kernel cudnn: cuDNN's fused attention, on GPUs of compute capability 9 and 10 (Hopper, Blackwell).
#
# It has never been executed: no GPU was at hand. So it is chosen by name only, never by ``auto``. Masks that torch's
# operator lacks, and what `torch.backends.cuda.can_use_cudnn_attention` refuses, go to the operators of sdpa.


_OLDEST, _MOST_ELEMENTS = 9, 128


def _cudnn_problem(device: torch.device, head_dim: int) -> str | None:
    if head_dim % 8 or not 0 < head_dim <= _MOST_ELEMENTS:
        return f"it supports a head_dim that is a multiple of 8 up to {_MOST_ELEMENTS}, not {head_dim}"
    if torch.version.hip is not None or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "torch has no cuDNN here"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= _OLDEST else f"it needs compute capability {_OLDEST} or higher, not {major}.{minor}"


def _cudnn_attend(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    return (_cudnn_operator if _cudnn_runs(q, k, v, band) else attend_on_gpu)(q, k, v, scale, band)


def _cudnn_differentiate(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    runs = _cudnn_runs(rows.q.detach().requires_grad_(), k, v, band)
    return (_cudnn_gradient_operator if runs else gradients_on_gpu)(rows, k, v, scale, band)


def _cudnn_runs(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    parameters = operator_parameters(q, k, v, band)
    return parameters is not None and torch.backends.cuda.can_use_cudnn_attention(parameters)


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


CUDNN = gpu_kernel("cudnn", _cudnn_problem, _cudnn_attend, _cudnn_differentiate)
