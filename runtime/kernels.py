"""Attention kernels behind one name each: some query rows against some key rows, forward and backward.

Forward they give a `Partial`, with the log-sum-exp of the scores, which is what lets ranks attend to blocks in any
order (`runtime.merging`). Backward they give `Gradients`, which only need to be added.

Shapes: q is [batch, queries, heads, head_dim], k and v are [batch, keys, kv_heads, head_dim]; query head h uses KV
head h // (heads // kv_heads). Strides are free. The mask is a band: query row i sees key row j iff
``low <= i - j <= high`` (`runtime.bands`).

Forward, a row depends on the keys it sees and on nothing else: neither a NaN nor an infinity in another key reaches
it. Where it sees a NaN, or a score of +inf, the row is NaN, as softmax makes it. A row that sees no key, or only
scores of -inf, has lse -inf and out 0, so that it weighs nothing in a merge. Backward, numbers are taken to be finite,
but for lse: a NaN can reach the gradients of more rows and keys than see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from runtime.flash_attention import FlashAttention
from runtime.partials import Gradients, Partial
from runtime.reference import Reference
from runtime.sdpa import ScaledDotProduct
from tasp_lab.errors import RunError

__all__ = ["KERNELS", "Gradients", "Kernel", "Partial", "choose_kernel"]

Tensor = torch.Tensor


class Kernel(Protocol):
    """One implementation of attention."""

    name: str

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        """None, or in one line why it cannot."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        """Query row i sees key row j iff ``low <= i - j <= high``; shapes as in the module."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        """What these queries and these keys contribute to the gradients of q, k and v.

        `out`, as q, and `lse`, [batch, queries, heads], are the result and its log-sum-exp over all keys that the
        rows see anywhere, and `dout`, as q, is the gradient by `out`. So contributions add up to the gradients
        wherever keys and queries are cut. A row that sees no key here, or whose lse is -inf, contributes nothing.
        """


KERNELS: Mapping[str, Kernel] = {kernel.name: kernel for kernel in (FlashAttention(), ScaledDotProduct(), Reference())}
"""Kernels by name, the fastest first."""


def choose_kernel(name: str, dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernel:
    """A kernel by name; ``auto`` is flash-attn where it runs, else sdpa, and never the reference.

    Raises `RunError` for a name there is none of, and for what the kernel cannot compute.

    >>> choose_kernel("auto", torch.bfloat16, torch.device("cpu"), 64).name
    'sdpa'
    """
    if name == "auto":
        return _fastest(dtype, device, head_dim)
    if name not in KERNELS:
        raise RunError(f"there is no attention kernel {name!r}, expected auto, {', '.join(KERNELS)}")
    if why := KERNELS[name].supports(dtype, device, head_dim):
        raise RunError(f"the attention kernel {name} cannot run here: {why}")
    return KERNELS[name]


def _fastest(dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernel:
    for name in ("flash-attn", "sdpa"):
        if (why := KERNELS[name].supports(dtype, device, head_dim)) is None:
            return KERNELS[name]
    raise RunError(f"no fast attention kernel can run here, name the reference to have it; sdpa: {why}")
