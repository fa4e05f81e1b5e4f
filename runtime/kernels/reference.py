"""The reference kernel: attention and its gradients by their definition, in float64.

With weights P, result O and the gradient D of a loss with respect to O, the gradients of attention are::

    P  = exp(scale Q K^T - lse)              0 where masked
    dV = P^T D
    dS = P * (D V^T - rowsum(D * O))         the gradient with respect to the scores
    dQ = scale dS K,    dK = scale dS^T Q

as in FlashAttention (Dao, Fu, Ermon, Rudra and Re, 2022, appendix B.2). A row depends on the other keys only through
lse and O, so the contributions of disjoint sets of keys can be added.
"""

from __future__ import annotations

import math

import torch

from runtime.kernels.partials import (
    Band,
    Gradients,
    Kernel,
    Partial,
    Rows,
    boolean_mask,
    by_rows,
    gradients_by_rows,
)

Tensor = torch.Tensor


def _exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """Softmax attention in the dtype of the inputs.

    Weight 0 times a non-finite value is NaN, so if there are such values each row is computed separately.
    """
    rows = 0 if band.unmasked or v.isfinite().all() else 1
    return by_rows(softmax_attention, q, k, v, scale, band, rows)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """Attention over a band with one matrix of scores, in the dtype of the inputs."""
    scores = _products(_grouped(q, k), k) * scale
    if not band.unmasked:
        scores.masked_fill_(boolean_mask(band, q.device)[:, None, None], -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bikgj,bjkd->bikgd", scores.softmax(-1), v)
    return Partial(out.masked_fill_(lse[..., None] == -math.inf, 0).flatten(2, 3), lse.flatten(2, 3))


def _softmax_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The formulas of the module docstring, with one matrix of weights."""
    dout, q, out, lse = (_grouped(x, k) for x in rows)
    weights = (_products(q, k) * scale - lse[..., None]).exp_()
    if not band.unmasked:
        weights.masked_fill_(boolean_mask(band, q.device)[:, None, None], 0)
    dscores = (_products(dout, v) - (dout * out).sum(-1, keepdim=True)) * weights * scale
    dq = torch.einsum("bikgj,bjkd->bikgd", dscores, k).flatten(2, 3)
    dk = torch.einsum("bikgj,bikgd->bjkd", dscores, q)
    dv = torch.einsum("bikgj,bikgd->bjkd", weights, dout)
    return Gradients(dq, dk, dv)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[batch, queries, heads, ...] as [batch, queries, kv_heads, query heads per KV head, ...]."""
    return x.reshape(*x.shape[:2], k.shape[2], x.shape[2] // k.shape[2], *x.shape[3:])


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Inner products of queries and keys, [batch, queries, kv_heads, query heads per KV head, keys]."""
    return torch.einsum("bikgd,bjkd->bikgj", q, k)


REFERENCE = Kernel(
    "reference",
    lambda dtype, device, *widths: None if dtype.is_floating_point else f"it supports floating point, not {dtype}",
    _exact_attention,
    lambda rows, *others: gradients_by_rows(_softmax_gradients, rows, *others),
    lambda q, backward: torch.float64,
)  # fmt: skip
"""Softmax attention by its definition, in float64 on any device."""
