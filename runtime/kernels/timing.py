"""Times of attention kernels on this machine, by shape: a GPU's by CUDA events, else the processor's::

    calls = kernel_calls(KERNELS["cudnn"], CallShape(1, 64, 8, 128, 16384, 16384, True), device, torch.bfloat16)
    time_s(calls["bwd"], device)

`measured_table` is a whole table of the fastest kernel.
"""

from __future__ import annotations

import contextlib
import datetime
import platform
import re
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch

from runtime.kernels.partials import lse_for_gradients
from runtime.kernels.registry import Kernel, choose_kernel
from runtime.linux import installed_version
from tasp_lab.core.progress import ProgressCallback

_WARM_UP, _REPEATS = 2, 5
_GPU_SHAPES = [(heads, length, causal) for heads in (1, 8, 32) for length in (512, 2048, 8192) for causal in (0, 1)]
_CPU_SHAPES = [(heads, length, causal) for heads in (1, 4) for length in (128, 256, 512, 1024) for causal in (0, 1)]
_HEAD_DIM = 128
_SOFTWARE = (
    "triton", "flash-attn", "flash-attn-3", "transformer-engine", "flash-linear-attention", "ring-flash-attn",
    "yunchang",
)  # fmt: skip
"""Distributions whose versions tables state."""

_LEAD_CYCLES = 1_000_000
"""About 0.5 ms, in which the host queues a call, so that events around it measure the GPU and not the host."""

COLUMNS = ("pass", "dtype", "causal", "batch", "heads", "kv_heads", "head_dim", "seq_q", "seq_k", "time_us")
"""Columns of a table of kernel times, as `tasp_lab.measure.readers.kernel_table` reads it."""

Call = Callable[[], object]
"""Queues the work that is timed."""

Device = torch.device


def the_device() -> Device:
    """The current GPU, or the processor."""
    return Device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: Device) -> str:
    """The name of a GPU, else ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch uses one thread of the host: tensors are small, and threads that wait take its cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CallShape(NamedTuple):
    """The shape of an attention call; a causal mask ends at the bottom right."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    causal: bool

    def row(self, passing: str, seconds: float) -> dict[str, object]:
        """A row of a table of kernel times, by column."""
        batch, heads, kv_heads, head_dim, queries, keys, causal = self
        cells = (passing, "bfloat16", int(causal), batch, heads, kv_heads, head_dim, queries, keys)
        return dict(zip(COLUMNS, (*cells, f"{1e6 * seconds:.6g}"), strict=True))


def measured_table(progress: ProgressCallback) -> str:
    """A table of kernel times as text (`tasp_lab.measure.readers.kernel_table`), forward and backward."""
    device = the_device()
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    kernel = choose_kernel("auto", dtype, device, _HEAD_DIM)
    name = "flash-attention-2" if on_gpu and kernel.name == "flash-attn" else f"torch-{kernel.name}"
    lines = [*table_headers(device, name), ",".join(COLUMNS)]
    for heads, length, causal in _GPU_SHAPES if on_gpu else _CPU_SHAPES:
        progress(f"{kernel.name}: {heads} heads, {length} positions, {'causal' if causal else 'no mask'}")
        shape = CallShape(1, heads, heads, _HEAD_DIM, length, length, bool(causal))
        for passing, call in kernel_calls(kernel, shape, device, dtype).items():
            lines.append(",".join(map(str, shape.row(passing, time_s(call, device)).values())))
    return "\n".join(lines) + "\n"


def table_headers(device: torch.device, kernel: str = "") -> list[str]:
    """The headers of a table of what was measured here, of one `kernel` if it is named."""
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [f"# source: measured here, torch {torch.__version__}", f"# date: {today}"]
    lines += [f"# kernel: {kernel}"] if kernel else []
    versions = {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()} if torch.version.cuda else {}  # type: ignore[no-untyped-call]
    versions |= {each: version for each in _SOFTWARE if (version := installed_version(each))}
    lines += [f"# software: {', '.join(f'{name} {version}' for name, version in versions.items())}"] * bool(versions)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return [*lines, f"# gpu: {found.name}", f"# sms: {found.multi_processor_count}"]
    processor = re.sub(r"[^\w.-]+", "-", platform.machine())
    lines += ["# note: a processor: its cores stand for SMs, float32 for 16 bit", f"# gpu: cpu-{processor}"]
    return [*lines, f"# sms: {torch.get_num_threads()}", "# memory_gb_per_s: 10"]


def kernel_calls(kernel: Kernel, shape: CallShape, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """The calls of both passes, on random numbers."""
    q, k, v, dout = random_operands(shape, device, dtype)
    scale, low, high = shape.head_dim**-0.5, _lowest(shape), shape.queries - 1
    out, lse = kernel.attend(q, k, v, scale=scale, low=low, high=high)
    lse = lse_for_gradients(lse)
    return {
        "fwd": lambda: kernel.attend(q, k, v, scale=scale, low=low, high=high),
        "bwd": lambda: kernel.backward(dout, q, k, v, out, lse, scale=scale, low=low, high=high),
    }


def _lowest(shape: CallShape) -> int:
    return (shape.queries if shape.causal else 1) - shape.keys


def random_operands(shape: CallShape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of out, [batch, positions, heads, head_dim]."""
    generator = torch.Generator(device).manual_seed(0)
    rows = ((shape.queries, shape.heads), (shape.keys, shape.kv_heads), (shape.keys, shape.kv_heads),
            (shape.queries, shape.heads))  # fmt: skip
    return tuple(
        torch.randn(shape.batch, *each, shape.head_dim, device=device, dtype=dtype, generator=generator)
        for each in rows
    )


def time_s(call: Call, device: torch.device) -> float:
    """After calls that warm up, the median of some on a GPU, the least of some on a processor that others use, too."""
    for _ in range(_WARM_UP):
        call()
    times = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            wait_on_gpu(_LEAD_CYCLES)
        times.append(batch_s(call, 1, device))
    return (median if device.type == "cuda" else min)(times)


def wait_on_gpu(cycles: int) -> None:
    """Queue a kernel of one thread that only waits; the only call of torch's private one."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


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
