"""Merging of partial attention results over disjoint sets of keys by their log-sum-exp (lse).

Each partial result is weighted by its share of the sum of exponentials::

    lse' = logaddexp(lse, lse_b)
    out' = out * exp(lse - lse') + out_b * exp(lse_b - lse')

as in online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The result does not
depend on the order and grouping of the keys, up to rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from runtime.kernels.partials import Partial


class Accumulator:
    """The running result of one rank: out [batch, queries, heads, head_dim], lse [batch, queries, heads].

    Rows without any key have out 0 and lse -inf. A partial row with lse -inf has weight 0, whatever its out.

    >>> total = Accumulator(1, 2, 1, 1, torch.device("cpu"))
    >>> one = Partial(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1))
    >>> total.add(1, one)
    >>> total.add(1, Partial(3 * one.out, one.lse))
    >>> [x.flatten().tolist() for x in total.result(torch.float32)]
    [[0.0, 2.0], [-inf, 0.6931471824645996]]
    """

    def __init__(
        self,
        batch: int,
        queries: int,
        heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._out = torch.zeros(batch, queries, heads, head_dim, dtype=dtype, device=device)
        self._lse = torch.full((batch, queries, heads), -math.inf, dtype=dtype, device=device)
        self._written = np.zeros(queries, dtype=bool)

    def add(self, first: int, partial: Partial) -> None:
        """Merge a partial for the query rows from `first` on, in place; the first partial of a row is copied."""
        end = first + partial.out.shape[1]
        out, lse = self._out[:, first:end], self._lse[:, first:end]
        if self._written[first:end].any():
            merge(out, lse, partial)
        else:
            copy(out, lse, partial)
        self._written[first:end] = True

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows so far: out in this dtype (the accumulator's own tensor if that is its dtype) and lse."""
        return self._out.to(dtype), self._lse


def copy(out: torch.Tensor, lse: torch.Tensor, other: Partial) -> None:
    """Copy a partial, whose rows of weight 0 may have any out."""
    out.copy_(_masked(other))
    lse.copy_(other.lse)


def merge(out: torch.Tensor, lse: torch.Tensor, other: Partial) -> None:
    """Merge in place. The NaN of -inf - -inf must become weight 0 on both sides; the NaN of inf - inf must remain."""
    total = torch.logaddexp(lse, other.lse).to(lse.dtype)
    weight = (lse - total).exp_().masked_fill_(lse == -math.inf, 0)
    other_weight = (other.lse - total).exp_().masked_fill_(other.lse == -math.inf, 0)
    out.mul_(weight[..., None]).addcmul_(_masked(other), other_weight[..., None])
    lse.copy_(total)


def _masked(partial: Partial) -> torch.Tensor:
    """Out with 0 in the rows of weight 0; on a GPU always a copy, since a check would synchronise the stream."""
    nothing = partial.lse == -math.inf
    if nothing.is_cpu and not (nothing.any() and partial.out[nothing].any()):
        return partial.out
    return partial.out.masked_fill(nothing[..., None], 0)
