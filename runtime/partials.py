"""Partials: what queries learn from some keys, and what part of the gradients these two give; how a mask cuts both.

Partials over disjoint keys are merged exactly by their log-sum-exp (`runtime.merging`). Gradients need no merging:
with the result and the log-sum-exp over all keys, each query and key give their part by themselves, and parts add up.

An implementation is a function over a band that is not empty; here it is given the rows and keys of the band, all at
once or some rows at a time, and its result is put back in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from runtime.bands import NOTHING, Band, trim

Tensor = torch.Tensor

ROWS_AT_ONCE = 512
"""How many query rows share one mask or one matrix of scores: few enough that a band is not computed as a square."""


class Partial(NamedTuple):
    """What queries learn from some keys.

    `out` is [batch, queries, heads, head_dim] in the kernel's dtype: the mean of the values, weighed by the softmax.
    `lse` is [batch, queries, heads], float32 (float64 for float64): the natural logarithm of the sum of
    exp(scale * q.k) over the keys that the row sees.
    """

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """What some queries and some keys add to the gradients of each other, in the kernel's dtype or a wider one."""

    q: Tensor
    """[batch, queries, heads, head_dim]."""
    k: Tensor
    """[batch, keys, kv_heads, head_dim], summed over the query heads of a group."""
    v: Tensor
    """As `k`."""


class Rows(NamedTuple):
    """Query rows as backward passes need them: `out` and `lse` over all keys, and the gradient of `out`."""

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
"""Attention of q to k and v over a band that is not empty; all three tensors are cut to it."""

Differentiate = Callable[[Rows, Tensor, Tensor, float, Band], Gradients]
"""Gradients of rows, k and v over a band that is not empty; all are cut to it."""


def over_band(compute: Compute, q: Tensor, k: Tensor, v: Tensor, scale: float, low: int, high: int) -> Partial:
    """Compute the part that the mask leaves, and add the rows that see nothing."""
    band = trim(q.shape[1], k.shape[1], low, high)
    if band == NOTHING or not q.numel():  # the CPU operator crashes on no keys and on no heads
        return Partial(torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf, dtype=lse_dtype(q.dtype)))
    q_seeing = q.narrow(1, band.first_query, band.queries)
    k_seen, v_seen = (x.narrow(1, band.first_key, band.keys) for x in (k, v))
    out, lse = compute(q_seeing, k_seen, v_seen, scale, band)
    place = band.first_query, q.shape[1]
    return Partial(_widened(out, *place), _widened(lse, *place, value=-math.inf))


def by_rows(compute: Compute, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, rows: int = 0) -> Partial:
    """Compute so many query rows at a time (0: `ROWS_AT_ONCE`), each with the keys that they see."""
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
    """Differentiate the part that the mask leaves; the gradients of all else are 0.

    Rows that weigh nothing get the log-sum-exp +inf, for exp(score - inf) is 0, as their weights must be.
    """
    band = trim(rows.q.shape[1], k.shape[1], low, high)
    if band == NOTHING or not rows.q.numel():
        return Gradients(*map(torch.zeros_like, (rows.q, k, v)))
    seeing = rows.segment(band.first_query, band.first_query + band.queries)
    seeing = seeing._replace(lse=seeing.lse.masked_fill(seeing.lse == -math.inf, math.inf))
    k_seen, v_seen = (x.narrow(1, band.first_key, band.keys) for x in (k, v))
    dq, dk, dv = differentiate(seeing, k_seen, v_seen, scale, band)
    place = band.first_key, k.shape[1]
    return Gradients(_widened(dq, band.first_query, rows.q.shape[1]), _widened(dk, *place), _widened(dv, *place))


def gradients_by_rows(
    differentiate: Differentiate, rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band
) -> Gradients:
    """Differentiate `ROWS_AT_ONCE` query rows at a time, each with the keys that they see."""
    total = Gradients(*map(torch.zeros_like, (rows.q, k, v)))
    for first in range(0, band.queries, ROWS_AT_ONCE):
        end = min(first + ROWS_AT_ONCE, band.queries)
        part = trim(end - first, band.keys, band.low - first, band.high - first)  # drops keys, for every row sees one
        keys = slice(part.first_key, part.first_key + part.keys)
        found = differentiate(rows.segment(first, end), k[:, keys], v[:, keys], scale, part)
        total.q[:, first:end] = found.q
        total.k[:, keys] += found.k
        total.v[:, keys] += found.v
    return total


def gradients_by_head(
    differentiate: Differentiate, rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band
) -> Gradients:
    """Differentiate one head of every group at a time, where as many KV heads as heads are wanted; copies no key."""
    group = rows.q.shape[2] // k.shape[2]
    dq = torch.empty_like(rows.q)
    dk, dv = (torch.zeros_like(x, dtype=lse_dtype(x.dtype)) for x in (k, v))
    for head in range(group):
        found = differentiate(rows.one_head_in(group, head), k, v, scale, band)
        dq[:, :, head::group] = found.q
        dk += found.k
        dv += found.v
    return Gradients(dq, dk.to(k.dtype), dv.to(v.dtype))


def _widened(x: Tensor, first: int, rows: int, value: float = 0) -> Tensor:
    """[batch, so many rows, ...] in which x is the rows from `first` on, and `value` the others."""
    before_and_after = (first, rows - first - x.shape[1])
    if not any(before_and_after):
        return x
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + before_and_after, value=value)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_contiguous(x: Tensor) -> Tensor:
    """Fused operators read each row as adjacent numbers, whatever its stride says, and on GPUs 16 bytes at a time."""
    readable = x.stride(-1) == 1 and (x.is_cpu or is_aligned(x))
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes.

    >>> record = torch.zeros(4, 66, dtype=torch.bfloat16)      # rows of 64 elements, and one number of 4 bytes each
    >>> is_aligned(record[:, :64]), is_aligned(record[:, :64].contiguous())
    (False, True)
    """
    rows = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    return x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride, size in rows if size > 1)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """[batch, rows, heads, ...] as [batch, heads, rows, ...] and back."""
    return [x.transpose(1, 2) for x in tensors]
