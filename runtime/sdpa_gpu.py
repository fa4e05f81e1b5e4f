"""The operators behind torch's scaled_dot_product_attention on a GPU, CUDA or ROCm, each called by one function.

Two are used: flash where it runs, for squares without a mask or plainly causal, and memory-efficient for the rest.
"""

from __future__ import annotations

import math

import torch

from runtime.bands import Band, additive_mask
from runtime.partials import Gradients, Partial, Rows, gradients_by_head, heads_first

Tensor = torch.Tensor


def gpu_head_dim(head_dim: int) -> str | None:
    """None, or in one line what head_dim GPU kernels take."""
    fits = head_dim % 8 == 0 and 0 < head_dim <= 256
    return None if fits else f"on cuda it takes a head_dim that is a multiple of 8 up to 256, not {head_dim}"


def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """Attention over a band that is not empty."""
    operator = _gpu_flash if _gpu_flash_runs(q, k, v, band) else _gpu_efficient
    return weightless(operator(q, k, v, scale, band))


def gradients_on_gpu(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """Gradients over a band that is not empty. Whether flash runs can depend on whether a gradient is wanted."""
    if _gpu_flash_runs(rows.q.detach().requires_grad_(), k, v, band):
        return _gpu_flash_gradients(rows, k, v, scale, band)
    return gradients_by_head(_gpu_efficient_gradients, rows, k, v, scale, band)


def weightless(found: Partial) -> Partial:
    """Flash kernels give a row of no weight the lse +inf; it differs from a row of NaN in that out is 0."""
    out, lse = found
    return Partial(out, lse.masked_fill((lse == math.inf) & (out[..., 0] == 0), -math.inf))


def _square_causal(band: Band) -> bool:
    return band.causal and band.queries == band.keys


def _gpu_flash_runs(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Whether torch's flash operator takes this mask and these tensors on this GPU."""
    if not (band.unmasked or _square_causal(band)):
        return False
    query, key, value = heads_first(q, k, v)
    grouped = q.shape[2] != k.shape[2]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, band.causal, grouped)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _gpu_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private flash operator; it groups heads itself."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = operator(*heads_first(q, k, v), 0.0, band.causal, scale=scale)
    return Partial(*heads_first(out, lse))


def _gpu_flash_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of torch's private flash operator for gradients; it groups heads itself.

    It takes the address of lse for that of contiguous rows.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
    dout, q, out, lse = heads_first(*rows)
    unused = _no_random_state(q)
    shape = (None, None, band.queries, band.keys)  # no tensors of sequence starts: all sequences are as long
    found = operator(
        dout, q, *heads_first(k, v), out, lse.contiguous(), *shape, 0.0, band.causal, unused, unused, scale=scale
    )
    return Gradients(*heads_first(*found))


def _gpu_efficient(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of torch's private memory-efficient operator.

    It wants as many KV heads as heads, so it is called once for each head of a group and no key is copied. Its lse
    is padded to whole tiles.
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
    """The only call of torch's private memory-efficient operator for gradients, with as many KV heads as heads.

    It takes the rows of out for contiguous, whatever their stride, and wants lse as its forward pass gives it: on
    CUDA padded to tiles of 32 rows, with +inf.
    """
    operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    dout, q, out, lse = heads_first(rows.dout, rows.q, rows.out.contiguous(), rows.lse)
    padding = 0 if torch.version.hip else -band.queries % 32
    lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf).contiguous()
    unused, wanted = _no_random_state(q), [True, True, True, False]
    dq, dk, dv, _ = operator(
        dout, q, *heads_first(k, v), _gpu_mask(rows.q, k, band), out, lse, unused, unused, 0.0, wanted,
        _square_causal(band), scale=scale,
    )  # fmt: skip
    return Gradients(*heads_first(dq, dk, dv))


def _gpu_mask(q: Tensor, k: Tensor, band: Band) -> Tensor | None:
    """What the memory-efficient operator must be told beside unmasked or square and causal."""
    if band.unmasked or _square_causal(band):
        return None
    return additive_mask(band, q.dtype, q.device).expand(q.shape[0], k.shape[2], -1, -1)


def _no_random_state(q: Tensor) -> Tensor:
    """Stands for the state of the random numbers of dropout, of which there is none."""
    return torch.zeros((), dtype=torch.int64, device=q.device)
