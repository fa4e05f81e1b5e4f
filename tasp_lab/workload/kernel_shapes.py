"""The shape of a kernel call: all that its time depends on, in numbers."""

from __future__ import annotations

from typing import Literal, NamedTuple

ShapeKind = Literal["softmax", "linear", "dense"]
"""Softmax attention; a kernel of linear attention; anything else, of which only the FLOPs are known."""


class KernelShape(NamedTuple):
    """One kernel call.

    Attributes
    ----------
    kernel : its name in the task, like ``attend``.
    kind : see `ShapeKind`.
    passing : ``forward`` or ``backward``.
    dtype : of its operands.
    batch, heads, kv_heads, head_dim : those of this call.
    queries, keys : positions; of a kernel of linear attention, `keys` is 0 where it reads queries only.
    low, high : the band of the mask (`tasp_lab.workload.kernel_calls`).
    flops : FLOPs of the call; masked pairs are not counted.
    """

    kernel: str
    kind: ShapeKind
    passing: Literal["forward", "backward"]
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    low: int
    high: int
    flops: int
