"""The kernel flash-attn-3: FlashAttention-3 for Hopper through torch, in place of torch's own flash operator.

It has never been executed: no GPU was at hand. So it is chosen by name only, never by ``auto``.

torch 2.11 or later overrides its private flash operators with those of the package (`torch.nn.attention._fa3`, a
prototype), so the calls are those of `runtime.kernels.sdpa_gpu`: masks that flash operators lack go to the
memory-efficient one. The override holds for the whole process, also for the kernel sdpa.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch
import torch.nn.attention

from runtime.kernels.partials import Gradients, Partial
from runtime.kernels.sdpa_cpu import ScaledDotProduct
from runtime.kernels.sdpa_gpu import gpu_head_dim
from tasp_lab.core.errors import first_line

Tensor = torch.Tensor

_NAME, _PACKAGE, _HOPPER = "FA3", "flash_attn_interface", 9


class FlashAttention3:
    """FlashAttention-3 on GPUs of compute capability 9. Non-finite values: as in `ScaledDotProduct` on a GPU."""

    name = "flash-attn-3"

    def supports(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it supports torch.float16 and torch.bfloat16, not {dtype}"
        return gpu_head_dim(head_dim) or _import_problem() or _gpu_problem(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, low: int, high: int) -> Partial:
        _activate()
        return ScaledDotProduct().attend(q, k, v, scale=scale, low=low, high=high)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        _activate()
        return ScaledDotProduct().backward(dout, q, k, v, out, lse, scale=scale, low=low, high=high)


def _import_problem() -> str | None:
    """Why FlashAttention-3 cannot be used through torch."""
    implementations: list[str] = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
    if _NAME not in implementations:
        return f"torch {torch.__version__} has no way to activate {_NAME}"
    try:
        importlib.import_module(_PACKAGE)
    except (ImportError, OSError) as error:
        return f"its module {_PACKAGE} does not import: {first_line(error)}"
    return None


def _gpu_problem(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "it runs on GPUs of NVIDIA, not on those of AMD"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major == _HOPPER else f"it runs on GPUs of compute capability 9, not {major}.{minor}"


@cache
def _activate() -> None:
    """Let torch's flash operators be those of FlashAttention-3 from now on."""
    torch.nn.attention.activate_flash_attention_impl(_NAME)
