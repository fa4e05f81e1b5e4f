"""Attention kernels by name: attention of some query rows to some key rows, forward and backward.

The forward pass returns a `Partial` with the log-sum-exp of the scores, so that ranks can attend to blocks in any
order (`runtime.kernels.partials`). The backward pass returns `Gradients`, which are summed.

Shapes: q is [batch, queries, heads, head_dim], k and v are [batch, keys, kv_heads, head_dim]; query head h uses KV
head h // (heads // kv_heads). Strides are arbitrary. The mask is a band: query row i attends to key row j iff
``low <= i - j <= high`` (`runtime.kernels.partials`).

In the forward pass a row depends only on its unmasked keys: NaN and infinity in other keys do not affect it. If an
unmasked key yields NaN or a score of +inf, the row is NaN, as in softmax. A row without unmasked keys, or with scores
of -inf only, has lse -inf, or +inf as flash operators say, and out 0, and thus weight 0 in a merge. The backward pass
requires finite inputs except lse: a NaN may affect the gradients of rows and keys that do not attend to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from runtime.kernels.cudnn import CUDNN
from runtime.kernels.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_3
from runtime.kernels.partials import Gradients, Partial
from runtime.kernels.reference import Reference
from runtime.kernels.sdpa import ScaledDotProduct
from tasp_lab.core.errors import RunError

__all__ = ["KERNELS", "Gradients", "Kernel", "Partial", "choose_kernel"]

Tensor = torch.Tensor


class Kernel(Protocol):
    """One implementation of attention."""

    @property
    def name(self) -> str: ...

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        """None if supported, else the reason in one line."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        """Query row i attends to key row j iff ``low <= i - j <= high``; shapes as in the module docstring."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        """The contributions of these queries and keys to the gradients of q, k and v.

        `out`, shaped as q, and `lse`, [batch, queries, heads], are the result and its log-sum-exp over all keys of
        the sequence; `dout`, shaped as q, is the gradient with respect to `out`. The contributions of any partition of
        queries and keys therefore sum to the gradients. `lse` is as `partials.lse_for_gradients` prepares it: a row
        with lse +inf contributes 0.
        """


_KERNELS: tuple[Kernel, ...] = (FLASH_ATTENTION, ScaledDotProduct(), FLASH_ATTENTION_3, CUDNN, Reference())

KERNELS: Mapping[str, Kernel] = {kernel.name: kernel for kernel in _KERNELS}
"""Kernels by name: those of ``auto``, the fastest first, then those that are chosen by name only."""


def choose_kernel(name: str, dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernel:
    """A kernel by name; ``auto`` is flash-attn if supported, else sdpa, and never another one.

    Raises `RunError` for an unknown name, and for a dtype, device or head_dim that the kernel does not support.

    >>> choose_kernel("auto", torch.bfloat16, torch.device("cpu"), 64).name
    'sdpa'
    """
    if name == "auto":
        return _fastest(dtype, device, head_dim)
    if name not in KERNELS:
        raise RunError(f"unknown attention kernel {name!r}, expected auto, {', '.join(KERNELS)}")
    if why := KERNELS[name].supports(dtype, device, head_dim):
        able = [each for each, kernel in KERNELS.items() if kernel.supports(dtype, device, head_dim) is None]
        expected = f"expected {' or '.join(able)}" if able else "and no other kernel can, either"
        raise RunError(f"the attention kernel {name} cannot run on {device.type}: {why}; {expected}")
    return KERNELS[name]


def _fastest(dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernel:
    for name in ("flash-attn", "sdpa"):
        if (why := KERNELS[name].supports(dtype, device, head_dim)) is None:
            return KERNELS[name]
    raise RunError(f"no fast attention kernel can run here (sdpa: {why}); 'reference' must be chosen by name")
