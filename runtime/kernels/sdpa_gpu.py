"""The operators of torch's scaled_dot_product_attention on a GPU, CUDA or ROCm, each called by one function.

Two are used: flash, if supported, for unmasked or square causal bands, and memory-efficient for all others.
"""

from __future__ import annotations

import math

import torch

from runtime.kernels.bands import Band, additive_mask
from runtime.kernels.partials import Gradients, Partial, Rows, gradients_by_head, heads_first

Tensor = torch.Tensor


def gpu_head_dim(head_dim: int) -> str | None:
    """None if GPU kernels support the head_dim, else the reason in one line."""
    fits = head_dim % 8 == 0 and 0 < head_dim <= 256
    return None if fits else f"on cuda it supports a head_dim that is a multiple of 8 up to 256, not {head_dim}"


def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """Attention over a non-empty band."""
    operator = _gpu_flash if _gpu_flash_runs(q, k, v, band) else _gpu_efficient
    return with_empty_rows(operator(q, k, v, scale, band))


def gradients_on_gpu(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """Gradients over a non-empty band. Support by flash can depend on whether a gradient is required."""
    if _gpu_flash_runs(rows.q.detach().requires_grad_(), k, v, band):
        return _gpu_flash_gradients(rows, k, v, scale, band)
    return gradients_by_head(_gpu_efficient_gradients, rows, k, v, scale, band)


def with_empty_rows(found: Partial) -> Partial:
    """The result with lse -inf for rows without keys: flash kernels return +inf and out 0 for these rows."""
    out, lse = found
    return Partial(out, lse.masked_fill((lse == math.inf) & (out[..., 0] == 0), -math.inf))


def _square_causal(band: Band) -> bool:
    return band.causal and band.queries == band.keys


def _gpu_flash_runs(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Whether torch's flash operator supports this mask and these tensors on this GPU."""
    if not (band.unmasked or _square_causal(band)):
        return False
    query, key, value = heads_first(q, k, v)
    grouped = q.shape[2] != k.shape[2]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, band.causal, grouped)
    return torch.backends.cuda.can_use_flash_attention(parameters)


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
    unused = _no_random_state(q)
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
    unused, output_mask = _no_random_state(q), [True, True, True, False]
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


def _no_random_state(q: Tensor) -> Tensor:
    """A placeholder for the random state of dropout, which is not used."""
    return torch.zeros((), dtype=torch.int64, device=q.device)
