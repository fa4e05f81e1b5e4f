"""Partial results and gradients of attention over a subset of keys, and the application of band masks.

Partial results over disjoint keys are merged exactly by their log-sum-exp (`runtime.kernels.lse_merge`).
Gradients are additive: given the result and the log-sum-exp over all keys, the contributions of all query-key pairs are
summed.

A kernel implements a function over a non-empty band. The functions here call it with the rows and keys of the band,
all at once or in groups of rows, and pad its result to the original shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from runtime.kernels.bands import EMPTY, Band, trim

Tensor = torch.Tensor

ROWS_AT_ONCE = 512
"""Query rows per mask or matrix of scores; small enough that a narrow band is not computed as a full square."""


class Partial(NamedTuple):
    """The partial result of attention over a subset of keys.

    `out` is [batch, queries, heads, head_dim] in the kernel's dtype: the softmax-weighted mean of the values.
    `lse` is [batch, queries, heads], float32 (float64 for float64): the natural logarithm of the sum of
    exp(scale * q.k) over the unmasked keys of the row.
    """

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """The contributions of a set of queries and keys to their gradients, in the kernel's dtype or a wider one."""

    q: Tensor
    """[batch, queries, heads, head_dim]."""
    k: Tensor
    """[batch, keys, kv_heads, head_dim], summed over the query heads of a group."""
    v: Tensor
    """As `k`."""


class Rows(NamedTuple):
    """The query rows of a backward pass: `out` and `lse` over all keys, and the gradient of `out`."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def segment(self, first: int, end: int) -> Rows:
        return Rows(*(x[:, first:end] for x in self))

    def one_head_in(self, group: int, head: int) -> Rows:
        """This query head of every group."""
        return Rows(*(x[:, :, head::group] for x in self))


Compute = Callable[[Tensor, Tensor, Tensor, float, Band], Partial]
"""Attention of q to k and v over a non-empty band; all three tensors are trimmed to it."""

Differentiate = Callable[[Rows, Tensor, Tensor, float, Band], Gradients]
"""Gradients of rows, k and v over a non-empty band; all are trimmed to it."""


def over_band(compute: Compute, q: Tensor, k: Tensor, v: Tensor, scale: float, low: int, high: int) -> Partial:
    """Compute attention over the trimmed band, and pad the result with the fully masked rows."""
    band = trim(q.shape[1], k.shape[1], low, high)
    if band == EMPTY or not q.numel():  # the CPU operator crashes without keys or heads
        return Partial(torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf, dtype=lse_dtype(q.dtype)))
    trimmed_q = q.narrow(1, band.first_query, band.queries)
    trimmed_k, trimmed_v = (x.narrow(1, band.first_key, band.keys) for x in (k, v))
    out, lse = compute(trimmed_q, trimmed_k, trimmed_v, scale, band)
    place = band.first_query, q.shape[1]
    return Partial(_padded(out, *place), _padded(lse, *place, value=-math.inf))


def by_rows(compute: Compute, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, rows: int = 0) -> Partial:
    """Compute `rows` query rows at a time (0: `ROWS_AT_ONCE`), each group with its unmasked keys."""
    rows = rows or ROWS_AT_ONCE
    parts = [
        over_band(compute, q[:, first : first + rows], k, v, scale, band.low - first, band.high - first)
        for first in range(0, band.queries, rows)
    ]
    outs, lses = zip(*parts, strict=True)
    return parts[0] if len(parts) == 1 else Partial(torch.cat(outs, 1), torch.cat(lses, 1))


def gradients_over_band(
    differentiate: Differentiate, rows: Rows, k: Tensor, v: Tensor, scale: float, low: int, high: int
) -> Gradients:
    """Compute gradients over the trimmed band; all other gradients are 0.

    The log-sum-exp -inf of rows without keys is replaced by +inf, so that their weights exp(score - lse) are 0.
    """
    band = trim(rows.q.shape[1], k.shape[1], low, high)
    if band == EMPTY or not rows.q.numel():
        return Gradients(*map(torch.zeros_like, (rows.q, k, v)))
    trimmed = rows.segment(band.first_query, band.first_query + band.queries)
    trimmed = trimmed._replace(lse=trimmed.lse.masked_fill(trimmed.lse == -math.inf, math.inf))
    trimmed_k, trimmed_v = (x.narrow(1, band.first_key, band.keys) for x in (k, v))
    dq, dk, dv = differentiate(trimmed, trimmed_k, trimmed_v, scale, band)
    place = band.first_key, k.shape[1]
    return Gradients(_padded(dq, band.first_query, rows.q.shape[1]), _padded(dk, *place), _padded(dv, *place))


def gradients_by_rows(
    differentiate: Differentiate, rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band
) -> Gradients:
    """Compute gradients of `ROWS_AT_ONCE` query rows at a time, each group with its unmasked keys."""
    total = Gradients(*map(torch.zeros_like, (rows.q, k, v)))
    for first in range(0, band.queries, ROWS_AT_ONCE):
        end = min(first + ROWS_AT_ONCE, band.queries)
        part = trim(end - first, band.keys, band.low - first, band.high - first)  # drops keys only: no row is empty
        keys = slice(part.first_key, part.first_key + part.keys)
        found = differentiate(rows.segment(first, end), k[:, keys], v[:, keys], scale, part)
        total.q[:, first:end] = found.q
        total.k[:, keys] += found.k
        total.v[:, keys] += found.v
    return total


def gradients_by_head(
    differentiate: Differentiate, rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band
) -> Gradients:
    """Compute gradients of one query head per KV head at a time, for operators without GQA; keys are not copied."""
    group = rows.q.shape[2] // k.shape[2]
    dq = torch.empty_like(rows.q)
    dk, dv = (torch.zeros_like(x, dtype=lse_dtype(x.dtype)) for x in (k, v))
    for head in range(group):
        found = differentiate(rows.one_head_in(group, head), k, v, scale, band)
        dq[:, :, head::group] = found.q
        dk += found.k
        dv += found.v
    return Gradients(dq, dk.to(k.dtype), dv.to(v.dtype))


def _padded(x: Tensor, first: int, rows: int, value: float = 0) -> Tensor:
    """[batch, rows, ...] with x at the rows from `first` on, and `value` elsewhere."""
    before_and_after = (first, rows - first - x.shape[1])
    if not any(before_and_after):
        return x
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + before_and_after, value=value)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulation dtype for inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_contiguous(x: Tensor) -> Tensor:
    """x with contiguous rows, aligned to 16 bytes on a GPU: fused operators require this without checking."""
    readable = x.stride(-1) == 1 and (x.is_cpu or is_aligned(x))
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Whether every row is aligned to 16 bytes.

    >>> record = torch.zeros(4, 66, dtype=torch.bfloat16)      # rows of 64 elements, and one number of 4 bytes each
    >>> is_aligned(record[:, :64]), is_aligned(record[:, :64].contiguous())
    (False, True)
    """
    rows = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    return x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride, size in rows if size > 1)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """[batch, rows, heads, ...] as [batch, heads, rows, ...] and back."""
    return [x.transpose(1, 2) for x in tensors]
