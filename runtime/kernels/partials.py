"""Partial results and gradients of attention over a subset of keys, and the application of band masks.

Partial results over disjoint keys are merged exactly by their log-sum-exp (`runtime.kernels.fused`).
Gradients are additive: given the result and the log-sum-exp over all keys, the contributions of all query-key pairs are
summed.

A kernel implements a function over a non-empty band. The functions here call it with the rows and keys of the band,
all at once or in groups of rows, and pad its result to the original shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

Tensor = torch.Tensor


# Band masks: query row i attends to key row j iff ``low <= i - j <= high``.
#
# `trim` removes fully masked rows and keys. Most of the remaining masks are full or causal; in the others every row
# and every column intersects the band.


class Band(NamedTuple):
    """A band trimmed to the rows and keys that are not fully masked, and the limits of i - j relative to them.

    The limits are no wider than the rectangle: ``low >= 1 - keys`` and ``high <= queries - 1``.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    low: int
    high: int

    @property
    def unmasked(self) -> bool:
        """Whether every row attends to every key."""
        return self.low <= 1 - self.keys and self.high >= self.queries - 1

    @property
    def causal(self) -> bool:
        """Whether row i attends to exactly the keys 0 .. i, counted from the top left, and some key is masked."""
        return self.low == 0 and self.high >= self.queries - 1 and not self.unmasked


EMPTY = Band(0, 0, 0, 0, 0, 0)
"""The band of a mask without any key."""


def trim(queries: int, keys: int, low: int, high: int) -> Band:
    """Drop fully masked rows and keys, which are at the ends since the mask is a band.

    A striped block, whose row i attends to the keys before i, is causal without its first row and last key:

    >>> band = trim(4, 4, low=1, high=3)
    >>> band, band.causal
    (Band(first_query=1, queries=3, first_key=0, keys=3, low=0, high=2), True)
    >>> trim(4, 4, low=-9, high=9).unmasked, trim(4, 4, low=4, high=9) == EMPTY
    (True, True)
    """
    first_query, end_query = max(0, low), min(queries, keys + high)
    first_key, end_key = max(0, -high), min(keys, queries - low)
    queries, keys, shift = end_query - first_query, end_key - first_key, first_query - first_key
    if low > high or queries <= 0 or keys <= 0:
        return EMPTY
    return Band(first_query, queries, first_key, keys, max(low - shift, 1 - keys), min(high - shift, queries - 1))


def window(band: Band) -> tuple[int, int]:
    """The band as flash-attn's window, aligned to the bottom right: keys to the left and right of row i; -1: no limit.

    The last row is aligned with the last key. In a trimmed band it attends to that key, so no limit is negative.

    >>> window(trim(2, 5, low=-3, high=1)), window(trim(4, 4, low=0, high=2))
    ((-1, 0), (2, 0))
    """
    offset = band.keys - band.queries
    left = -1 if band.high >= band.queries - 1 else band.high + offset
    right = -1 if band.low <= 1 - band.keys else -band.low - offset
    return left, right


def boolean_mask(band: Band, device: torch.device) -> torch.Tensor:
    """Bool [queries, keys], True where the key is masked.

    >>> boolean_mask(trim(2, 2, low=0, high=1), torch.device("cpu")).tolist()
    [[False, True], [False, False]]
    """
    return _inside(band, torch.bool, device).logical_not_()


def additive_mask(band: Band, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[queries, keys], 0 inside the band and -inf elsewhere.

    >>> additive_mask(trim(2, 2, low=0, high=1), torch.float32, torch.device("cpu")).tolist()
    [[0.0, -inf], [0.0, 0.0]]
    """
    return _inside(band, dtype, device).log_()


def _inside(band: Band, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(band.queries, band.keys, dtype=dtype, device=device).tril_(-band.low).triu_(-band.high)


ROWS_AT_ONCE = 512
"""Query rows per mask or matrix of scores; small enough that a narrow band is not computed as a full square."""


class Partial(NamedTuple):
    """The partial result of attention over a subset of keys.

    `out` is [batch, queries, heads, value_dim] in the kernel's dtype: the softmax-weighted mean of the values.
    `lse` is [batch, queries, heads], float32 (float64 for float64): the natural logarithm of the sum of
    exp(scale * q.k) over the unmasked keys of the row, -inf without any; +inf, with out 0, means the same.
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
    """[batch, keys, kv_heads, value_dim], summed as `k`."""


class Rows(NamedTuple):
    """The query rows of a backward pass: `out` and `lse` over all keys, and the gradient of `out`."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def segment(self, first: int, end: int) -> Rows:
        return Rows(*(x[:, first:end] for x in self))


Compute = Callable[[Tensor, Tensor, Tensor, float, Band], Partial]
"""Attention of q to k and v over a non-empty band; all three tensors are trimmed to it."""

Differentiate = Callable[[Rows, Tensor, Tensor, float, Band], Gradients]
"""Gradients of rows, k and v over a non-empty band; all are trimmed to it."""


class Lengths(NamedTuple):
    """Sequences one after another: int32 cumulative lengths of queries and of keys, and the longest of each."""

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


@dataclass(frozen=True)
class Flash:
    """How one implementation is called.

    Parameters
    ----------
    forward : of q, k, v, scale, band and lengths, which are None of dense tensors: the result and its log-sum-exp,
        [batch, heads, queries] or [heads, rows].
    backward : of the gradient of the result, q, k, v, the result, its contiguous log-sum-exp, scale, band and lengths:
        the gradients of q, k and v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
        """Attention over a non-empty band, of dense tensors."""
        out, lse = self.forward(q, k, v, scale, band, None)
        return Partial(out, lse.transpose(1, 2))

    def differentiate(self, rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
        """Gradients over a non-empty band, of dense tensors."""
        dout, q, out, lse = rows
        return Gradients(*self.backward(dout, q, k, v, out, lse.transpose(1, 2).contiguous(), scale, band, None))


Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Native = Callable[[int, int], bool]
"""Whether an operator takes such keys and values, elements per head."""


def padding_values(forward: Forward, takes: Native = lambda keys, values: False) -> Forward:
    """The forward pass of an operator that takes values as wide as keys, and others that it `takes`.

    The narrower ones are padded with zeros, which add nothing to scores, and nothing to other elements of results.
    """

    def padded(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        keys, values = k.shape[-1], v.shape[-1]
        if keys == values or takes(keys, values):
            return forward(q, k, v, *rest)
        out, lse = forward(*(_widened(x, max(keys, values)) for x in (q, k, v)), *rest)
        return out[..., :values], lse

    return padded


def padding_gradients(backward: Backward, takes: Native = lambda keys, values: False) -> Backward:
    """As `padding_values`, of a backward pass."""

    def padded(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = k.shape[-1], v.shape[-1]
        if keys == values or takes(keys, values):
            return backward(dout, q, k, v, out, *rest)
        dq, dk, dv = backward(*(_widened(x, max(keys, values)) for x in (dout, q, k, v, out)), *rest)
        return dq[..., :keys], dk[..., :keys], dv[..., :values]

    return padded


def _widened(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


@dataclass(eq=False)
class Kernel:
    """One implementation of attention; shapes and masks are those of `runtime.kernels.registry`.

    Parameters
    ----------
    supports : why a dtype, device, head_dim and value_dim are not supported, in one line, or None.
    compute, differentiate : both passes over a non-empty band, for tensors with contiguous rows.
    dtype_of : the dtype in which queries are computed, forward, or backward if True.
    flash_on : how FlashAttention is called on a device (`runtime.kernels.flash`), if this kernel is that there, so that
        one call takes packed sequences.
    """

    name: str
    supports: Callable[[torch.dtype, torch.device, int, int], str | None]
    compute: Compute
    differentiate: Differentiate
    dtype_of: Callable[[Tensor, bool], torch.dtype] = lambda q, backward: q.dtype
    flash_on: Callable[[torch.device], Flash | None] = lambda device: None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        """Query row i attends to key row j iff ``low <= i - j <= high``."""
        dtype = self.dtype_of(q, False)
        q, k, v = (rows_contiguous(x if x.dtype == dtype else x.to(dtype)) for x in (q, k, v))
        return over_band(self.compute, q, k, v, scale, low, high)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        """The contributions of these queries and keys to the gradients of q, k and v.

        `out`, [batch, queries, heads, value_dim], and `lse`, [batch, queries, heads], are the result and its
        log-sum-exp over all keys of the sequence; `dout`, shaped as `out`, is the gradient with respect to it. The
        contributions of any partition of queries and keys therefore sum to the gradients. `lse` is as
        `lse_for_gradients` prepares it: a row with lse +inf contributes 0.
        """
        dtype = self.dtype_of(q, True)
        dout, q, k, v, out = (rows_contiguous(x if x.dtype == dtype else x.to(dtype)) for x in (dout, q, k, v, out))
        return gradients_over_band(self.differentiate, Rows(dout, q, out, lse), k, v, scale, low, high)


def over_band(compute: Compute, q: Tensor, k: Tensor, v: Tensor, scale: float, low: int, high: int) -> Partial:
    """Compute attention over the trimmed band, and pad the result with the fully masked rows."""
    band = trim(q.shape[1], k.shape[1], low, high)
    if band == EMPTY or not q.numel():  # the CPU operator crashes without keys or heads
        return no_keys(q, v)
    trimmed_q = q.narrow(1, band.first_query, band.queries)
    trimmed_k, trimmed_v = (x.narrow(1, band.first_key, band.keys) for x in (k, v))
    out, lse = compute(trimmed_q, trimmed_k, trimmed_v, scale, band)
    place = band.first_query, q.shape[1]
    return Partial(_padded(out, *place), _padded(lse, *place, value=-math.inf))


def no_keys(q: Tensor, v: Tensor) -> Partial:
    """The result of queries that attend to no key."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    return Partial(out, torch.full_like(q[..., 0], -math.inf, dtype=lse_dtype(q.dtype)))


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
    """Compute gradients over the trimmed band; all other gradients are 0."""
    band = trim(rows.q.shape[1], k.shape[1], low, high)
    if band == EMPTY or not rows.q.numel():
        return Gradients(*map(torch.zeros_like, (rows.q, k, v)))
    trimmed = rows.segment(band.first_query, band.first_query + band.queries)
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
        found = differentiate(Rows(*(x[:, :, head::group] for x in rows)), k, v, scale, band)
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


def lse_for_gradients(lse: Tensor) -> Tensor:
    """The log-sum-exp as backward passes take it: +inf for rows without keys, whose weights exp(score - lse) are 0.

    [batch, queries, heads], contiguous as [batch, heads, queries], as fused operators require.

    >>> lse_for_gradients(torch.tensor([[[0.0, -math.inf]]]))
    tensor([[[0., inf]]])
    """
    prepared = torch.empty_like(lse.transpose(1, 2), memory_format=torch.contiguous_format)
    torch.nan_to_num(lse.transpose(1, 2), nan=math.nan, posinf=math.inf, neginf=math.inf, out=prepared)
    return prepared.transpose(1, 2)


@lru_cache(maxsize=4096)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that every pass needs, on a device.

    Kept, as a copy from pageable memory makes the host wait for the GPU, and cannot be captured in a graph.

    >>> constant((0, 3), torch.int32, torch.device("cpu")) is constant((0, 3), torch.int32, torch.device("cpu"))
    True
    """
    with torch.inference_mode(False):  # a pass that differentiates may use what one of inference made
        return torch.tensor(values, dtype=dtype, device=device)


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
