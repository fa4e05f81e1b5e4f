"""Attention kernels by name: attention of some query rows to some key rows, forward and backward.

The forward pass returns a `Partial` with the log-sum-exp of the scores, so that ranks can attend to blocks in any
order (`runtime.kernels.partials`). The backward pass returns `Gradients`, which are summed.

Shapes: q is [batch, queries, heads, head_dim], k is [batch, keys, kv_heads, head_dim]; v and the result have value_dim
elements per head, as many as keys or not. Query head h uses KV head h // (heads // kv_heads). Strides are arbitrary.
The mask is a band: query row i attends to key row j iff ``low <= i - j <= high`` (`runtime.kernels.partials`).

In the forward pass a row depends only on its unmasked keys: NaN and infinity in other keys do not affect it. If an
unmasked key yields NaN or a score of +inf, the row is NaN, as in softmax. A row without unmasked keys, or with scores
of -inf only, has lse -inf, or +inf as flash operators say, and out 0, and thus weight 0 in a merge. The backward pass
requires finite inputs except lse: a NaN may affect the gradients of rows and keys that do not attend to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from runtime.kernels.flash import FLASH_ATTENTION, FLASH_ATTENTION_3, FLASH_ATTENTION_4
from runtime.kernels.partials import Gradients, Kernel, Partial
from runtime.kernels.reference import REFERENCE
from runtime.kernels.sdpa import CUDNN, SDPA
from tasp_lab.core.errors import RunError

__all__ = ["KERNELS", "Gradients", "Kernel", "Partial", "choose_kernel"]


KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel for kernel in (FLASH_ATTENTION, SDPA, FLASH_ATTENTION_3, FLASH_ATTENTION_4, CUDNN, REFERENCE)
}
"""Kernels by name: those of ``auto``, the fastest first, then those that are chosen by name only."""


def choose_kernel(
    name: str, dtype: torch.dtype, device: torch.device, head_dim: int, value_dim: int | None = None
) -> Kernel:
    """A kernel by name; ``auto`` is flash-attn if supported, else sdpa, and never another one.

    Raises `RunError` for an unknown name, and for a dtype, device or widths of keys and of values, as many elements if
    None, that the kernel does not support.

    >>> choose_kernel("auto", torch.bfloat16, torch.device("cpu"), 64).name
    'sdpa'
    """
    automatic, values = (FLASH_ATTENTION.name, SDPA.name), value_dim or head_dim
    return choose(
        "attention", name, KERNELS, lambda kernel: kernel.supports(dtype, device, head_dim, values), device, automatic
    )


Kind = TypeVar("Kind")


def choose(
    kind: str, name: str, kernels: Mapping[str, Kind], why_not: Callable[[Kind], str | None], device: torch.device,
    automatic: Iterable[str],
) -> Kind:  # fmt: skip
    """A kernel by name, the first of `automatic` that can run for ``auto``; `why_not` is why one cannot run, or None.

    Raises `RunError` with those that can.
    """
    if name == "auto":
        for each in automatic:
            if (why := why_not(kernels[each])) is None:
                return kernels[each]
        raise RunError(f"no fast {kind} kernel can run here ({each}: {why}); 'reference' must be chosen by name")
    if name not in kernels:
        raise RunError(f"unknown {kind} kernel {name!r}, expected auto, {', '.join(kernels)}")
    if why := why_not(kernels[name]):
        able = [other for other, kernel in kernels.items() if why_not(kernel) is None]
        expected = f"expected {' or '.join(able)}" if able else "and no other kernel can, either"
        raise RunError(f"the {kind} kernel {name} cannot run on {device.type}: {why}; {expected}")
    return kernels[name]
