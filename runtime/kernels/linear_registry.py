"""Kernels of causal linear attention within a chunk, by name: ``torch`` and ``fla``.

States are made, summed and applied by `runtime.kernels.linear_attention` with every kernel: those are products of
matrices. What a kernel replaces is `runtime.kernels.linear_attention.attend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from runtime.kernels.flash_linear_attention import FlashLinearAttention
from runtime.kernels.linear_attention import attend
from tasp_lab.core.errors import RunError

Tensor = torch.Tensor


class Attend(Protocol):
    """Outputs of a chunk from within it, shapes as in `runtime.kernels.linear_attention`; differentiable."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None, starts: Sequence[int] = (), /
    ) -> Tensor: ...


class LinearKernel(Protocol):
    """One implementation."""

    name: str

    def supports(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """None if supported, else the reason in one line."""

    def attend(self, dtype: torch.dtype) -> Attend:
        """The kernel for inputs of a dtype; what it is called with may have been widened to float32."""


class TorchKernel:
    """Tiles in torch operations, in float32 inside; on every device."""

    name = "torch"

    def supports(self, dtype: torch.dtype, device: torch.device) -> str | None:
        return None

    def attend(self, dtype: torch.dtype) -> Attend:
        return attend


LINEAR_KERNELS: Mapping[str, LinearKernel] = {each.name: each for each in (FlashLinearAttention(), TorchKernel())}
"""Kernels by name, the fastest first."""


def choose_linear_kernel(name: str, dtype: torch.dtype, device: torch.device) -> LinearKernel:
    """A kernel by name; ``auto`` is fla if supported, else torch.

    Raises `RunError` for an unknown name, and for a dtype or device that the kernel does not support.

    >>> choose_linear_kernel("auto", torch.bfloat16, torch.device("cpu")).name
    'torch'
    """
    if name == "auto":
        return next(each for each in LINEAR_KERNELS.values() if each.supports(dtype, device) is None)
    if name not in LINEAR_KERNELS:
        raise RunError(f"unknown kernel of linear attention {name!r}, expected auto, {', '.join(LINEAR_KERNELS)}")
    if why := LINEAR_KERNELS[name].supports(dtype, device):
        raise RunError(f"the linear attention kernel {name} cannot run on {device.type}: {why}; expected torch")
    return LINEAR_KERNELS[name]
