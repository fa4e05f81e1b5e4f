"""The kernels flash-attn and flash-attn-3.

flash-attn is the package of this name, releases 2.5 to 2.8, for CUDA and ROCm. flash-attn-3 is FlashAttention-3 for
Hopper, a package of its own.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from runtime.kernels.partials import Band, Gradients, Partial, Rows, window
from runtime.kernels.sdpa import gpu_head_dim, gpu_kernel
from tasp_lab.core.errors import first_line

Tensor = torch.Tensor


TRITON_ON_AMD = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
"""flash-attn's variable that chooses the Triton backend instead of the compiled one."""


def _problem(device: torch.device, head_dim: int) -> str | None:
    """Why flash-attn cannot be used. The package can be installed without its compiled module, so import that.

    Its Triton backend for AMD refuses windows in the backward pass, and a causal call is a window (0 to the right;
    `flash_attn_triton_amd/interface_v2.py`, `bwd`). So it is not used.
    """
    if at_fault := gpu_head_dim(head_dim):
        return at_fault
    if torch.version.hip is not None and os.environ.get(TRITON_ON_AMD, "FALSE") == "TRUE":
        return f"its Triton backend ({TRITON_ON_AMD}) has no backward pass for causal masks; its CK backend has"
    try:
        importlib.import_module("flash_attn_2_cuda")
        importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError) as error:
        return f"its compiled module flash_attn_2_cuda does not import: {first_line(error)}"
    return None


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of flash-attn, which supports GQA. Its first and last three results are stable."""
    forward = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_forward
    found = forward(q, k, v, **options_of(forward, scale, band))
    out, lse = found[0], found[-3]
    return Partial(out, lse[..., : band.queries].transpose(1, 2))


def _flash_attn_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of flash-attn for gradients, which supports GQA.

    It requires contiguous lse without checking. Its return value differs between releases, its output arguments do not.
    """
    backward = importlib.import_module("flash_attn.flash_attn_interface")._flash_attn_backward
    lse = rows.lse.transpose(1, 2).contiguous()
    filled = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (rows.q, k, v)))
    backward(rows.dout, rows.q, k, v, rows.out, lse, *filled, **options_of(backward, scale, band))
    return filled


def options_of(function: Callable[..., Any], scale: float, band: Band) -> dict[str, Any]:
    """The options of the installed release: the window is a pair or two numbers, and softcap was added later."""
    left, right = window(band)
    options = {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": (left, right) == (-1, 0),
        "is_causal": (left, right) == (-1, 0),
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": 0.0,
        "alibi_slopes": None,
        "return_softmax": False,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return {name: options[name] for name in _option_names(function) & options.keys()}


@cache
def _option_names(function: Callable[..., Any]) -> frozenset[str]:
    """The parameter names of a function; torch wraps an operator and keeps its signature in `_init_fn`."""
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)


FLASH_ATTENTION = gpu_kernel("flash-attn", _problem, _flash_attn, _flash_attn_gradients)
"""The flash-attn package, for CUDA and ROCm."""


# The kernel flash-attn-3: FlashAttention-3 for Hopper, by its own package.
#
# It has never been executed: no GPU was at hand. So it is chosen by name only, never by ``auto``.


_INTERFACES, _HOPPER = ("flash_attn_interface", "flash_attn_3.flash_attn_interface"), 9
"""Where the package has its functions (hopper/flash_attn_interface.py in its repository), the first that imports."""


def _problem_3(device: torch.device, head_dim: int) -> str | None:
    if torch.version.hip is not None:
        return "it runs on GPUs of NVIDIA, not on those of AMD"
    try:
        _interface_3()
    except (ImportError, OSError) as error:
        return f"its module {_INTERFACES[0]} does not import: {first_line(error)}"
    major, minor = torch.cuda.get_device_capability(device)
    at_fault = None if major == _HOPPER else f"it runs on GPUs of compute capability 9, not {major}.{minor}"
    return gpu_head_dim(head_dim) or at_fault


@cache
def _interface_3() -> ModuleType:
    first, other = _INTERFACES
    try:
        return importlib.import_module(first)
    except ImportError as error:
        try:
            return importlib.import_module(other)
        except ImportError:
            raise error from None


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Partial:
    """The only call of FlashAttention-3, which supports GQA."""
    forward = _interface_3()._flash_attn_forward
    out, lse, *_ = forward(q, k, v, **_all_options(forward, 3, scale, band))
    return Partial(out, lse.transpose(1, 2))


def _flash_attn_3_gradients(rows: Rows, k: Tensor, v: Tensor, scale: float, band: Band) -> Gradients:
    """The only call of FlashAttention-3 for gradients, which supports GQA and fills what it is given."""
    backward = _interface_3()._flash_attn_backward
    lse = rows.lse.transpose(1, 2).contiguous()
    filled = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (rows.q, k, v)))
    options = _all_options(backward, 6, scale, band) | {"dq": filled.q, "dk": filled.k, "dv": filled.v}
    backward(rows.dout, rows.q, k, v, rows.out, lse, **options)
    return filled


def _all_options(function: Callable[..., Any], tensors: int, scale: float, band: Band) -> dict[str, Any]:
    """The options of the installed release; None for those that it requires after its tensors and that are unused."""
    parameters = list(inspect.signature(getattr(function, "_init_fn", function)).parameters.values())[tensors:]
    required = {each.name: None for each in parameters if each.default is each.empty}
    return required | options_of(function, scale, band)


FLASH_ATTENTION_3 = gpu_kernel("flash-attn-3", _problem_3, _flash_attn_3, _flash_attn_3_gradients)
"""FlashAttention-3 on GPUs of compute capability 9."""
