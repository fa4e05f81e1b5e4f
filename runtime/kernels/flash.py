"""Kernels of FlashAttention, all called alike: torch's operators, and the package flash-attn.

torch's operators are FlashAttention-2 (the kernel sdpa on GPUs), until FlashAttention-3 or -4 is registered under the
same names (`torch.nn.attention.activate_flash_attention_impl`): the kernels flash-attn-3, on Hopper, and flash-attn-4,
on Hopper and Blackwell. flash-attn is the package of this name, releases 2.6.3 to 2.8, for CUDA and ROCm.

All take dense tensors [batch, rows, heads, head_dim], or sequences one after another, [rows, heads, head_dim], with
their cumulative lengths; windows, which are aligned to the bottom right; and groups of query heads. Values of another
width than keys are padded, unless an implementation takes both widths.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn import attention as implementations

from runtime.kernels.partials import (
    Band,
    Flash,
    Gradients,
    Kernel,
    Lengths,
    Native,
    Partial,
    padding_gradients,
    padding_values,
    window,
)
from tasp_lab.core.errors import first_line

Tensor = torch.Tensor

OLDEST = (2, 6, 3)
"""The release of flash-attn from which the log-sum-exp of sequences is [heads, rows] (its pull request 970)."""

TRITON_ON_AMD = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
"""flash-attn's variable that chooses the Triton backend instead of the compiled one."""


def gpu_head_dim(*widths: int, most: int = 256, wider: str = "") -> str | None:
    """None if GPU kernels support elements per head of keys and values, else the reason in one line."""
    at_fault = next((width for width in widths if width % 8 or not 0 < width <= most), None)
    expected = f"on cuda it supports a head_dim that is a multiple of 8 up to {most}{wider}"
    return None if at_fault is None else f"{expected}, not {at_fault}"


def gpu_kernel(
    name: str,
    problem: Callable[[torch.device, int, int], str | None],
    flash: Flash,
    compute: Callable[..., Partial] | None = None,
    differentiate: Callable[..., Gradients] | None = None,
) -> Kernel:
    """A fused kernel of 16-bit inputs on GPUs that supports GQA, by default as `flash` is called.

    `problem` is the reason, in one line, why a device or widths of keys and values are not supported. A non-finite
    value can affect rows that do not attend to it, if they share a tile of the mask with a row that does: a check would
    synchronise the stream.
    """

    def supports(dtype: torch.dtype, device: torch.device, head_dim: int, value_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        return gpu_problem(dtype, head_dim, value_dim) or problem(device, head_dim, value_dim)

    return Kernel(
        name, supports, compute or flash.attend, differentiate or flash.differentiate, flash_on=lambda device: flash
    )


def gpu_problem(dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Why kernels of FlashAttention take no tensors of a dtype and widths; None if they do."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"on cuda it supports torch.float16 and torch.bfloat16, not {dtype}"
    return gpu_head_dim(head_dim, value_dim)


# torch's operators.


def limits(band: Band, most: int) -> tuple[bool, int | None, int | None]:
    """Whether torch's operators are asked for a causal mask, and the window, both ends of which are limited or none.

    ROCm took -1, which is no limit on CUDA, as a limit (pytorch/pytorch pull request 173469), so no limit beside
    another one is `most`, the most rows of queries or keys.

    >>> limits(Band(0, 4, 0, 4, 0, 3), 4), limits(Band(0, 4, 0, 4, -3, 1), 4)
    ((True, None, None), (False, 1, 4))
    """
    left, right = window(band)
    if left < 0 and right <= 0:
        return right == 0, None, None
    return False, most if left < 0 else left, most if right < 0 else right


CAN_REGISTER = hasattr(implementations, "activate_flash_attention_impl")
"""Whether this release of torch lets other implementations register, as that of our tests does."""


_activated: set[str] = set()


def _use(implementation: str | None) -> None:
    """Let torch's operators be those of an implementation, None for what they are without our kernels."""
    current = implementations.current_flash_attention_impl() if CAN_REGISTER else implementation
    if current == implementation:
        return
    if implementation is not None:
        implementations.activate_flash_attention_impl(implementation)
        _activated.add(implementation)
    elif current in _activated:  # one that the program has chosen stays
        implementations.restore_flash_attention_impl()


def _torch_lengths(q: Tensor, k: Tensor, lengths: Lengths | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    return (None, None, q.shape[1], k.shape[1]) if lengths is None else lengths


def _torch_forward(
    implementation: str | None, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    """The only call of torch's private operator, with the schema of torch 2.13."""
    _use(implementation)
    shape = _torch_lengths(q, k, lengths)
    causal, left, right = limits(band, max(shape[2:]))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *shape, 0.0, causal, False, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse


def _torch_backward(
    implementation: str | None, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    band: Band, lengths: Lengths | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The only call of torch's private operator for gradients, with the schema of torch 2.13."""
    _use(implementation)
    shape = _torch_lengths(q, k, lengths)
    causal, left, right = limits(band, max(shape[2:]))
    unused = no_random_state(q)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *shape, 0.0, causal, unused, unused, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq, dk, dv


def no_random_state(q: Tensor) -> Tensor:
    """A placeholder for the random state of dropout, which is not read; nothing is launched to make it."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def _torch_flash(implementation: str | None, takes: Native = lambda keys, values: False) -> Flash:
    calls = partial(_torch_forward, implementation), partial(_torch_backward, implementation)
    return Flash(padding_values(calls[0], takes), padding_gradients(calls[1], takes))


def _taken_by_3(keys: int, values: int) -> bool:
    """Of other widths those of DeepSeek (hopper/flash_api.cpp of Dao-AILab/flash-attention: mha_fwd)."""
    return 128 < keys <= 192 and 96 < values <= 128


def _taken_by_4(keys: int, values: int) -> bool:
    """Any up to 128, and those of DeepSeek (flash_attn/cute/interface.py: is_deepseek_shape)."""
    return max(keys, values) <= 128 or (keys, values) == (192, 128)


def _problem_of_4(device: torch.device, head_dim: int, value_dim: int) -> str | None:
    if head_dim != value_dim and not _taken_by_4(head_dim, value_dim):
        return f"it supports values of another width than keys up to 128, and 192/128, not {head_dim}/{value_dim}"
    return _registered_problem("flash_attn.cute.interface", (9, 10), device)


def _registered_problem(module: str, capabilities: tuple[int, ...], device: torch.device, *_: int) -> str | None:
    """Why an implementation cannot be registered: its package does not import, or the GPU is another one."""
    if torch.version.hip is not None:
        return "it runs on GPUs of NVIDIA, not on those of AMD"
    if not CAN_REGISTER:
        return f"torch {torch.__version__} has no activate_flash_attention_impl, expected a later one"
    if at_fault := _import_problem(module):
        return at_fault
    major, minor = torch.cuda.get_device_capability(device)
    expected = " or ".join(map(str, capabilities))
    return None if major in capabilities else f"it runs on GPUs of compute capability {expected}, not {major}.{minor}"


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"its module {module} does not import: {first_line(error)}"
    return None


TORCH_FLASH = _torch_flash(None)
"""FlashAttention-2 in torch; on AMD that of AOTriton, on which windows and packed sequences were not verified."""

FLASH_ATTENTION_3 = gpu_kernel(
    "flash-attn-3", partial(_registered_problem, "flash_attn_interface", (9,)), _torch_flash("FA3", _taken_by_3)
)
"""FlashAttention-3 on Hopper. It has never been executed: no GPU was at hand. So it is chosen by name only."""

FLASH_ATTENTION_4 = gpu_kernel("flash-attn-4", _problem_of_4, _torch_flash("FA4", _taken_by_4))
"""FlashAttention-4 on Hopper and Blackwell; never executed either."""


# The package flash-attn.


def _package_problem(device: torch.device, *_: int) -> str | None:
    """Why flash-attn cannot be used. The package can be installed without its compiled module, so import that.

    Its Triton backend for AMD refuses windows in the backward pass, and a causal call is a window (0 to the right;
    `flash_attn_triton_amd/interface_v2.py`, `bwd`). So it is not used.
    """
    if torch.version.hip is not None and os.environ.get(TRITON_ON_AMD, "FALSE") == "TRUE":
        return f"its Triton backend ({TRITON_ON_AMD}) has no backward pass for causal masks; its CK backend has"
    if at_fault := _import_problem("flash_attn_2_cuda") or _import_problem("flash_attn.flash_attn_interface"):
        return at_fault
    version: str = importlib.import_module("flash_attn").__version__
    release = tuple(int(each) for each in version.split("+")[0].split(".post")[0].split(".")[:3])
    return None if release >= OLDEST else f"it is release {version}, expected {'.'.join(map(str, OLDEST))} or later"


def _package_lengths(lengths: Lengths | None) -> tuple[str, tuple[Any, ...]]:
    """The part of the name of its functions, and the arguments, that sequences have besides."""
    return ("", ()) if lengths is None else ("_varlen", lengths)


def _package_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    """The only call of flash-attn. Its first and last three results are the same in all releases."""
    kind, others = _package_lengths(lengths)
    forward = getattr(importlib.import_module("flash_attn.flash_attn_interface"), f"_flash_attn{kind}_forward")
    found = forward(q, k, v, *others, **options_of(forward, scale, band))
    return found[0], found[-3]


def _package_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, band: Band,
    lengths: Lengths | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The only call of flash-attn for gradients. What it returns differs between releases, what it fills does not."""
    kind, others = _package_lengths(lengths)
    backward = getattr(importlib.import_module("flash_attn.flash_attn_interface"), f"_flash_attn{kind}_backward")
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    backward(dout, q, k, v, out, lse, dq, dk, dv, *others, **options_of(backward, scale, band))
    return dq, dk, dv


def options_of(function: Callable[..., Any], scale: float, band: Band) -> dict[str, Any]:
    """The options of the installed release: the window is a pair or two numbers, and softcap was added later."""
    left, right = window(band)
    options = {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": (left, right) == (-1, 0),
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


FLASH_ATTENTION = gpu_kernel(
    "flash-attn", _package_problem, Flash(padding_values(_package_forward), padding_gradients(_package_backward))
)
"""The flash-attn package, for CUDA and ROCm."""
