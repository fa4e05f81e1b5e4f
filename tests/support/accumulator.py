"""A running result of attention, to which partial results are merged."""

from __future__ import annotations

import math

import numpy as np
import torch

from runtime.kernels import fused
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
        fused.merge(out, lse, *partial, empty=not self._written[first:end].any())
        self._written[first:end] = True

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows so far: out in this dtype (the accumulator's own tensor if that is its dtype) and lse."""
        return self._out.to(dtype), self._lse
