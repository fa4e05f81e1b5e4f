"""What one GPU shows of attention by others: calls, a copy beside a call, and rank 0 of several without links::

call = KernelCall("cudnn", CallShape(1, 64, 8, 128, 16384, 16384, True), "bwd")
call.problem(device)  # "" where it can be measured here, else what to install
call.rows(device)  # rows by the name of their table
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from runtime.kernels.registry import KERNELS
from runtime.kernels.timing import (
    Call,
    CallShape,
    Device,
    batch_s,
    kernel_calls,
    random_operands,
    time_s,
    wait_on_gpu,
)
from tasp_lab.core.errors import RunError, first_line

Calls = Mapping[str, Call]
"""The calls of the passes ``fwd`` and ``bwd``."""

Row = dict[str, object]
Rows = Mapping[str, list[Row]]
"""Rows by the name of their table, without its ending."""

KERNELS_TABLE, OVERLAP_TABLE, RANK_TABLE = "gpu-kernels", "overlap", "rank-0"
_REPEATS = 5


def dtype_on(device: Device) -> torch.dtype:
    """bfloat16 on a GPU, as its kernels have it."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _operands(shape: CallShape, device: Device) -> tuple[torch.Tensor, ...]:
    return random_operands(shape, device, dtype_on(device))


# The calls of libraries: of a shape, in one of their variants, on the first of so many ranks. What is a single call has
# neither variant nor ranks.


def by_autograd(attend: Call, operands: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Calls:
    """The passes of a function that torch differentiates; it takes `operands` where it finds them."""
    for each in operands:
        each.requires_grad_()
    out: Any = attend()
    return {"fwd": attend, "bwd": lambda: torch.autograd.grad(out, operands, dout.view_as(out), retain_graph=True)}


def transformer_engine(shape: CallShape, device: Device, variant: str = "thd", ranks: int = 1) -> Calls:
    """cuDNN by Transformer Engine, in a layout; on ranks the variant begins with how keys travel, like ``p2p thd``."""
    *travels, layout = variant.split()
    library = importlib.import_module("transformer_engine.pytorch")
    os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1"}  # cuDNN and nothing else
    packed = layout == "thd"
    mask = ("padding_causal" if shape.causal else "padding") if packed else ("causal" if shape.causal else "no_mask")
    sizes = {"num_gqa_groups": shape.kv_heads, "qkv_format": layout, "attn_mask_type": mask}
    attention = library.DotProductAttention(shape.heads, shape.head_dim, **sizes)
    if travels:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        attention.set_context_parallel_group(dist.group.WORLD, list(range(ranks)), stream, *travels)
    *operands, dout = _operands(shape, device)
    options: dict[str, Any] = {}
    if packed:  # lengths are those of all ranks
        operands = [each.flatten(0, 1) for each in operands]
        for name, length in (("q", shape.queries * ranks), ("kv", shape.keys * ranks)):
            ends = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * length
            options |= {f"cu_seqlens_{name}": ends, f"max_seqlen_{name}": length}
    return by_autograd(lambda: attention(*operands, **options), tuple(operands), dout)


def linear_attention(name: str) -> Callable[[CallShape, Device], Calls]:
    """An operator of flash-linear-attention, with a decay per head (``simple_gla``) or per channel (``gla``)."""

    def calls(shape: CallShape, device: Device) -> Calls:
        operator = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
        q, k, v, dout = _operands(shape, device)
        gates = torch.nn.functional.logsigmoid((q if name == "gla" else q[..., 0]).detach().float()) / 16
        return by_autograd(lambda: operator(q, k, v, g=gates, scale=1.0)[0], (q, k, v), dout)

    return calls


def _ring_flash_attn(shape: CallShape, device: Device, variant: str, ranks: int) -> Calls:
    function = getattr(importlib.import_module("ring_flash_attn"), f"{variant}_flash_attn_func")
    q, k, v, dout = _operands(shape, device)
    return by_autograd(lambda: function(q, k, v, causal=shape.causal), (q, k, v), dout)


def _yunchang(shape: CallShape, device: Device, variant: str, ranks: int) -> Calls:
    library = importlib.import_module("yunchang")
    ulysses, ring = map(int, variant.split("x"))
    library.set_seq_parallel_pg(ulysses, ring, 0, ranks)
    attention = library.LongContextAttention(ring_impl_type="zigzag" if shape.causal else "basic")
    q, k, v, dout = _operands(shape, device)
    return by_autograd(lambda: attention(q, k, v, causal=shape.causal), (q, k, v), dout)


def _hamilton(shape: CallShape, device: Device, variant: str, ranks: int) -> Calls:
    """TASP's own code, forward; all heads have keys of their own."""
    library = importlib.import_module("hamilton_attention")
    loops = library.gen_hamilton_circle(ranks)
    maps = {
        "out_mapping": library.calculate_out_mapping_circle(loops),
        "in_mapping": library.calculate_in_mapping_circle(loops),
    }
    sizes = (shape.batch, shape.queries * ranks, shape.heads, shape.head_dim)
    operands = library.get_circle_init_qkv_for_rank_dummy(loops, *sizes, device)
    attend = library.hamilton_attention_forward_full_flash_attn
    return {"fwd": lambda: attend(None, *operands, None, world_size=ranks, looping=loops, **maps)}


def _torch_ring(shape: CallShape, device: Device, variant: str, ranks: int) -> Calls:
    """The ring behind torch's ``context_parallel``, forward."""
    ring = importlib.import_module(_TORCH_RING)
    ring.set_rotate_method(variant)
    aten: Any = torch.ops.aten
    on_gpu = device.type == "cuda"
    flash = aten._scaled_dot_product_flash_attention if on_gpu else aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (each.transpose(1, 2).contiguous() for each in _operands(shape, device)[:3])
    attend = ring._templated_ring_attention
    return {"fwd": lambda: attend(dist.group.WORLD, 2, flash, q, k, v, is_causal=shape.causal)}


@dataclass(frozen=True)
class Library:
    """An implementation of attention, and its `calls`.

    `problem` is why it cannot run, or None; `install` what to do then. `runs` is in the name of a kernel of its
    calls: torch may take another one than it was asked for, whose time must not go into the table.
    """

    problem: Callable[[torch.dtype, Device, int, int], str | None]
    calls: Callable[..., Calls]
    install: str
    runs: str = ""

    def missing(self, name: str, shape: CallShape, device: Device) -> str:
        """One line on why it cannot run, and what to install; empty if it can."""
        problem = self.problem(dtype_on(device), device, shape.head_dim, shape.head_dim)
        return f"{name}: {problem}; install {self.install}" if problem else ""


def _of_ours(name: str, install: str, runs: str) -> Library:
    kernel = KERNELS[name]

    def calls(shape: CallShape, device: Device) -> Calls:
        return kernel_calls(kernel, shape, device, dtype_on(device))

    return Library(kernel.supports, calls, install, runs)


def _import(*modules: str) -> Callable[..., str | None]:
    """Why one of these modules cannot be imported."""
    return lambda *_: next(filter(None, map(_import_error, modules)), None)


@cache
def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # of libraries that look for a driver, too
        return f"{module} does not import: {first_line(error)}"
    return ""


_FLA = "flash-linear-attention"
_TE = "transformer_engine[pytorch] with --no-build-isolation"
_FLASH = "flash-attn with --no-build-isolation"
_TORCH_RING = "torch.distributed.tensor.experimental._context_parallel._attention"

LIBRARIES: dict[str, Library] = {
    "cudnn": _of_ours("cudnn", "torch for CUDA, on Hopper or later", "cudnn"),
    "cudnn-thd": Library(_import("transformer_engine.pytorch"), transformer_engine, _TE, "cudnn"),
    "flash-attention-2": _of_ours("flash-attn", _FLASH, "flash"),
    "flash-attention-3": _of_ours("flash-attn-3", "the folder hopper of github.com/Dao-AILab/flash-attention", "flash"),
    "torch-sdpa": _of_ours("sdpa", "torch", ""),
    "fla-chunk_simple_gla": Library(_import("fla.ops.simple_gla"), linear_attention("simple_gla"), _FLA),
    "fla-chunk_gla": Library(_import("fla.ops.gla"), linear_attention("gla"), _FLA),
    "transformer-engine": Library(_import("transformer_engine.pytorch"), transformer_engine, _TE),
    "ring-flash-attn": Library(_import("ring_flash_attn"), _ring_flash_attn, f"ring-flash-attn and {_FLASH}"),
    "yunchang": Library(_import("yunchang", "flash_attn"), _yunchang, f"yunchang and {_FLASH}"),
    "hamilton": Library(
        _import("hamilton_attention"), _hamilton, "H100-1 of infinigence/HamiltonAttention on PYTHONPATH"
    ),
    "torch": Library(_import(_TORCH_RING), _torch_ring, "torch"),
}
"""By the names of kernels in tables, and, from ``transformer-engine`` on, of those that spread a layer over ranks."""


# What is measured


@dataclass(frozen=True)
class Case:
    """One thing that is measured."""

    library: str
    shape: CallShape

    @property
    def label(self) -> str:
        batch, heads, kv_heads, head_dim, queries, keys, causal = self.shape
        mask = "causal" if causal else "full"
        return f"{self.library} {batch}x{heads}/{kv_heads}x{head_dim} {queries}x{keys} {mask}"

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables that `rows` are of."""
        raise NotImplementedError

    def problem(self, device: Device) -> str:
        """Why it cannot be measured here, with what to install; empty where it can."""
        return LIBRARIES[self.library].missing(self.library, self.shape, device)

    def rows(self, device: Device) -> Rows:
        raise NotImplementedError


@dataclass(frozen=True)
class KernelCall(Case):
    """The pass ``fwd`` or ``bwd`` of a call, timed and profiled."""

    passing: str

    @property
    def label(self) -> str:
        return f"{super().label} {self.passing}"

    @property
    def tables(self) -> tuple[str, ...]:
        return self.library, KERNELS_TABLE

    def rows(self, device: Device) -> Rows:
        library = LIBRARIES[self.library]
        call = library.calls(self.shape, device)[self.passing]
        seconds, kernels = time_s(call, device), kernels_of(call, device)
        ran = next((str(each["kernel"]) for each in kernels if library.runs in str(each["kernel"])), None)
        if ran is None:
            others = kernels[0]["kernel"] if kernels else "nothing"
            raise RunError(f"{self.label}: ran {others}, expected a kernel of {library.runs}")
        row = self.shape.row(self.passing, seconds) | {"ran": ran}
        what = {"what": self.label, "pass": self.passing}
        return {self.library: [row], KERNELS_TABLE: [what | each for each in kernels]}


@dataclass(frozen=True)
class RankZero(Case):
    """A layer of a library on rank 0 of `ranks`; `shape` has the queries and keys of this rank."""

    variant: str
    ranks: int = 8
    tables = (RANK_TABLE, KERNELS_TABLE)

    @property
    def label(self) -> str:
        return f"{super().label}, {self.variant}, rank 0 of {self.ranks}"

    def rows(self, device: Device) -> Rows:
        passes: list[Row] = []
        kernels: list[Row] = []
        shape = self.shape._asdict() | {"causal": int(self.shape.causal)}
        with first_of(self.ranks):
            for passing, call in LIBRARIES[self.library].calls(self.shape, device, self.variant, self.ranks).items():
                times = {"time_us": time_s(call, device), "host_us": host_s(call, device)}
                what = {"library": self.library, "variant": self.variant, "ranks": self.ranks, "pass": passing}
                passes.append({**what, **shape, **_microseconds(times)})
                kernels += [{"what": self.label, "pass": passing} | each for each in kernels_of(call, device)]
        return {RANK_TABLE: passes, KERNELS_TABLE: kernels}


@dataclass(frozen=True)
class Overlap(Case):
    """A forward call, and a copy that becomes ready `delay_us` after it began: the time of each, alone and together."""

    blocks: int
    copied_bytes: int
    delay_us: int
    high_priority: bool
    tables = (OVERLAP_TABLE,)

    @property
    def label(self) -> str:
        priority = "high" if self.high_priority else "normal"
        copied = f"{self.blocks} blocks, {self.copied_bytes >> 20} MiB, {self.delay_us} us, {priority}"
        return f"{super().label}, {copied}"

    def problem(self, device: Device) -> str:
        problem = _import_error("triton")
        return f"a copy of so many blocks: {problem}; install triton" if problem else super().problem(device)

    def rows(self, device: Device) -> Rows:
        source = torch.ones(self.copied_bytes // 4, dtype=torch.int32, device=device)
        into, launch_copy = source.clone(), importlib.import_module("runtime.kernels.fused_triton").launch_copy
        attend = LIBRARIES[self.library].calls(self.shape, device)["fwd"]

        def copy() -> None:
            launch_copy(into, source, self.blocks)

        alone = {"attention_alone_us": time_s(attend, device), "copy_alone_us": time_s(copy, device)}
        delay = round(self.delay_us * cycles_per_us(device))
        together = beside(attend, copy, delay, -1 if self.high_priority else 0)
        columns = {
            **vars(self), **self.shape._asdict(), "high_priority": int(self.high_priority),
            "causal": int(self.shape.causal), **_microseconds({**alone, **together}),
        }  # fmt: skip
        del columns["shape"]
        return {OVERLAP_TABLE: [columns]}


# How it is measured


def _microseconds(times_s: Mapping[str, float]) -> Row:
    return {name: f"{1e6 * seconds:.6g}" for name, seconds in times_s.items()}


def _synchronize(device: Device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_of(call: Call, device: Device) -> list[Row]:
    """The kernels that one call runs, on a processor operations of torch, the longest first: how often and how long."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        call()
        _synchronize(device)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"  # launches have no time on the device
    times_us = [(float(getattr(each, time_of)), each.key, each.count) for each in profiled.key_averages()]
    return [{"kernel": name, "calls": count, "time_us": f"{time_us:.6g}"}
            for time_us, name, count in sorted(times_us, key=lambda each: -each[0]) if time_us > 0]  # fmt: skip


def host_s(call: Call, device: Device) -> float:
    """The median time in which the host queues a call; on a processor that of the call."""
    times = []
    for _ in range(_REPEATS):
        _synchronize(device)
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    _synchronize(device)
    return statistics.median(times)


def cycles_per_us(device: Device) -> float:
    """The speed of the clock by which torch's kernel that only waits counts."""
    cycles = 2_000_000
    return cycles / (1e6 * batch_s(lambda: wait_on_gpu(cycles), 1, device))


def beside(attend: Call, copy: Call, delay_cycles: int, priority: int) -> dict[str, float]:
    """Medians in seconds of a call and of a copy on another stream that is ready some cycles later.

    The copy's time is from when it is ready, so it has what it waits for multiprocessors; both begin behind a kernel
    that only waits, so the host has queued all of them.
    """
    own, other = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    rows: list[tuple[float, ...]] = []
    for _ in range(1 + _REPEATS):  # the first run warms up
        torch.cuda.synchronize()
        start, called, ready, copied = (torch.cuda.Event(enable_timing=True) for _ in range(4))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            wait_on_gpu(2_000_000)
            start.record()
            attend()
            called.record()
        with torch.cuda.stream(other):
            other.wait_event(start)
            if delay_cycles:
                wait_on_gpu(delay_cycles)
            ready.record()
            copy()
            copied.record()
        torch.cuda.synchronize()
        call_ms, copy_ms = start.elapsed_time(called), ready.elapsed_time(copied)
        rows.append((call_ms, copy_ms, max(call_ms, start.elapsed_time(copied))))
    names = ("attention_us", "copy_us", "together_us")
    return {name: statistics.median(each) / 1e3 for name, each in zip(names, zip(*rows[1:], strict=True), strict=True)}


@contextlib.contextmanager
def first_of(ranks: int) -> Iterator[None]:
    """A context in which this process is rank 0 of a group whose collectives return at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
