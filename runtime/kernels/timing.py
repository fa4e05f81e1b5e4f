"""Times of the fastest attention kernel of this machine, by shape: a GPU's by CUDA events, else the processor's."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from statistics import median

import torch

from runtime.kernels.partials import lse_for_gradients
from runtime.kernels.registry import Kernel, choose_kernel
from tasp_lab.core.progress import ProgressCallback

_WARM_UP, _REPEATS = 2, 5
_GPU_SHAPES = [(heads, length, causal) for heads in (1, 8, 32) for length in (512, 2048, 8192) for causal in (0, 1)]
_CPU_SHAPES = [(heads, length, causal) for heads in (1, 4) for length in (128, 256, 512, 1024) for causal in (0, 1)]
_HEAD_DIM = 128


def measured_table(progress: ProgressCallback) -> str:
    """A table of kernel times as text (`tasp_lab.measure.readers.kernel_table`), forward and backward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    kernel = choose_kernel("auto", dtype, device, _HEAD_DIM)
    lines = [*_headers(device, kernel), "pass,dtype,causal,batch,heads,kv_heads,head_dim,seq_q,seq_k,time_us"]
    for heads, length, causal in _GPU_SHAPES if on_gpu else _CPU_SHAPES:
        progress(f"{kernel.name}: {heads} heads, {length} positions, {'causal' if causal else 'no mask'}")
        for passing, call in _calls(kernel, device, dtype, heads, length, causal).items():
            time_us = 1e6 * _time_s(call, device)
            lines.append(f"{passing},bfloat16,{causal},1,{heads},{heads},{_HEAD_DIM},{length},{length},{time_us:.6g}")
    return "\n".join(lines) + "\n"


def _headers(device: torch.device, kernel: Kernel) -> list[str]:
    name = "flash-attention-2" if device.type == "cuda" and kernel.name == "flash-attn" else f"torch-{kernel.name}"
    lines = [f"# source: measured here, torch {torch.__version__}", f"# kernel: {name}"]
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return [*lines, f"# gpu: {found.name}", f"# sms: {found.multi_processor_count}"]
    processor = re.sub(r"[^\w.-]+", "-", platform.machine())
    lines += ["# note: a processor: its cores stand for SMs, float32 for 16 bit", f"# gpu: cpu-{processor}"]
    return [*lines, f"# sms: {torch.get_num_threads()}", "# memory_gb_per_s: 10"]


def _calls(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, length: int, causal: int
) -> dict[str, Callable[[], object]]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, length, heads, _HEAD_DIM, device=device, dtype=dtype, generator=generator) for _ in range(4)
    )
    scale, low, high = _HEAD_DIM**-0.5, 0 if causal else 1 - length, length - 1
    out, lse = kernel.attend(q, k, v, scale=scale, low=low, high=high)
    lse = lse_for_gradients(lse)
    return {
        "fwd": lambda: kernel.attend(q, k, v, scale=scale, low=low, high=high),
        "bwd": lambda: kernel.backward(dout, q, k, v, out, lse, scale=scale, low=low, high=high),
    }


def _time_s(call: Callable[[], object], device: torch.device) -> float:
    """After calls that warm up, the median of some on a GPU, the least of some on a processor that others use, too."""
    for _ in range(_WARM_UP):
        call()
    return (median if device.type == "cuda" else min)([batch_s(call, 1, device) for _ in range(_REPEATS)])


def batch_s(call: Callable[[], object], count: int, device: torch.device) -> float:
    """The time of calls back to back: by events in the current stream, or by the host's clock."""
    if device.type == "cpu":
        began_s = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - began_s
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
