"""The same layer by our executor and by code of others: results, processor time, kernels, copies and bytes of a step.

``python -m experiments.benchmarks.beside_others`` writes ``experiments/benchmarks/results/beside_others.md``.

- torch: the ring behind ``torch.distributed.tensor.experimental.context_parallel``. The context itself has no rule for
  the attention of CPUs (torch 2.13), so its ring is called with that operator.
- ring-flash-attn (``pip install --no-deps ring-flash-attn==0.1.8``): zigzag, with that operator in the place of
  flash-attn. Without the package its rows are missing.
- Transformer Engine does not run without GPUs. Its counts are those of its source, see `transformer_engine`.

What is counted is what the Python code of each would launch on a GPU beside attention: every operation that is neither
a view nor an allocation; what torch.jit would fuse is counted one by one. Ours is counted as it runs on GPUs
(`tests.support.helper_kernels`).
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from experiments.benchmarks.executor_cost import own_s
from experiments.common import machine_record, markdown_table, write_page
from runtime import attention, shard
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import zigzag
from tests.support import helper_kernels
from tests.support.rank_layers import dout_of, exact, layer_of
from tests.support.ranks import on_ranks, succeeded

RESULT = Path(__file__).parent / "results" / "beside_others.md"
LAYER = Workload(4096, heads=8, head_dim=64, dtype="bf16", mask="causal")
RANKS = 4
SAMPLES = 15
OURS = ("zigzag-ring-attention", "tasp", "kv-all-gather", "ulysses")
RING, TORCH, FLASH = OURS[0], ("torch, alltoall", "torch, allgather"), "ring-flash-attn, zigzag"

COUNTED = replace(helper_kernels.LAYER, kv_heads=helper_kernels.LAYER.heads)
"""The layer whose operations are counted, on `helper_kernels.RANKS` ranks."""

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[Tensors, torch.Tensor], Tensors]
"""Both passes: of the shards of q, k, v [batch, positions, heads, head_dim] and dout the result, dq, dk and dv."""

_aten: Any = torch.ops.aten
_FORWARD, _BACKWARD = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


# Others


def differentiate(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool, scale: float | None = None,
) -> Tensors:  # fmt: skip
    """Gradients of one call, heads first: computed in float32, as our kernel does on CPUs, and rounded as on GPUs."""
    with _disable_current_modes():
        wide = [x.float() for x in (dout, q, k, v, out)]
    found: Tensors = getattr(_aten, _BACKWARD)(*wide, lse, 0.0, causal, scale=scale)
    with _disable_current_modes():
        return tuple(x.to(q.dtype) for x in found)


def of_torch(method: str) -> Run:
    """The ring of torch; keys travel by `method`, ``alltoall`` step by step or ``allgather`` at once."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    def backward(query: Any, key: Any, value: Any, **others: Any) -> Tensors:
        dout, out, lse, causal = (others[name] for name in ("grad_out", "out", "logsumexp", "is_causal"))
        return differentiate(dout, query, key, value, out, lse, causal)

    def run(inputs: Tensors, dout: torch.Tensor) -> Tensors:
        ring.set_rotate_method(method)
        q, k, v, d = (x.transpose(1, 2).contiguous() for x in (*inputs, dout))
        group: Any = dist.group.WORLD
        forward: Any = getattr(_aten, _FORWARD)
        out, lse = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        grads = ring._templated_ring_attention_backward(group, 2, backward, d, "grad_out", q, k, v, out, lse, True)
        return tuple(x.transpose(1, 2) for x in (out, *grads[:3]))

    return run


def has_ring_flash_attn() -> bool:
    return importlib.util.find_spec("ring_flash_attn") is not None


def of_ring_flash_attn() -> Run:
    """Its zigzag ring, with torch's attention of CPUs for flash-attn."""

    def _flash_attn_forward(
        q: Any, k: Any, v: Any, dropout_p: Any, softmax_scale: Any, causal: Any, window_size_left: Any = -1,
        window_size_right: Any = -1, softcap: Any = 0.0, alibi_slopes: Any = None, return_softmax: Any = False,
    ) -> Any:  # fmt: skip
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = getattr(_aten, _FORWARD)(*heads_first, 0.0, causal, scale=softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def _flash_attn_backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: Any,
        softmax_scale: Any, causal: Any, window_size_left: Any = -1, window_size_right: Any = -1, softcap: Any = 0.0,
        alibi_slopes: Any = None, deterministic: Any = False, rng_state: Any = None,
    ) -> None:  # fmt: skip
        first = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        found = differentiate(first[0], first[1], first[2], first[3], first[4], softmax_lse, causal, softmax_scale)
        with _disable_current_modes():  # flash-attn writes there itself
            for where, what in zip((dq, dk, dv), found, strict=True):
                where.copy_(what.transpose(1, 2))

    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward,
                           _flash_attn_varlen_forward=None, _flash_attn_varlen_backward=None)  # fmt: skip
    adapters = ModuleType("ring_flash_attn.adapters")  # these need another version of transformers
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    for module in (ModuleType("flash_attn"), interface, adapters):
        sys.modules[module.__name__] = module
    zigzag_ring = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func

    def run(inputs: Tensors, dout: torch.Tensor) -> Tensors:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = zigzag_ring(*leaves, causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return run


def of_ours(name: str) -> Run:
    def run(inputs: Tensors, dout: torch.Tensor) -> Tensors:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = attention(*leaves, schedule=name, causal=True, kernel="sdpa")
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return run


def systems() -> Mapping[str, Run]:
    """All that run here."""
    found = {name: of_ours(name) for name in OURS} | {each: of_torch(each.split()[1]) for each in TORCH}
    return found | ({FLASH: of_ring_flash_attn()} if has_ring_flash_attn() else {})


# Counts


class Counts(NamedTuple):
    """What one rank does in both passes: attention calls, other kernels, those of them that copy or cast, messages to
    one peer at once, and bytes sent over the bytes of its keys and values."""

    calls: int
    kernels: int
    copies: int | None
    messages: int
    shards: float


COPIES = frozenset({"copy_", "clone", "cat", "_to_copy", "slice_backward", "zeros_like", "fill_"})
"""Operations that move or set values and compute nothing."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and the bytes of messages by the process group."""

    def __init__(self, world_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world_size = world_size
        self.calls = self.kernels = self.copies = self.messages = self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, space = func.overloadpacket.__name__, func.namespace
        if space in ("c10d", "_c10d_functional"):
            self._message(name, args)
        elif name in (_FORWARD, _BACKWARD):
            self.calls += 1
        elif not func.is_view and name not in helper_kernels.NO_KERNELS:
            self.kernels += 1
            self.copies += name in COPIES
        return func(*args, **(kwargs or {}))

    def _message(self, name: str, args: Any) -> None:
        if name == "send":
            self._sent(args[0][0])
        elif name == "all_to_all_single":
            self._sent(args[0])
        elif name == "all_gather_into_tensor":
            for _ in range(self.world_size - 1):
                self._sent(args[0])

    def _sent(self, data: torch.Tensor) -> None:
        self.messages += 1
        self.sent_bytes += data.nbytes


def kv_bytes(rank: int, world_size: int, layer: Workload) -> int:
    """The bytes of a rank's keys and values."""
    length = zigzag(layer.sequence, world_size).length(rank)
    return 2 * 2 * length * layer.kv_head_count * layer.head_dim


def counts_of_ours(name: str) -> Counts:
    """As on GPUs, of both passes."""
    rank, ranks = helper_kernels.RANK, helper_kernels.RANKS
    passes = attention_schedules(name, full_mesh(ranks), COUNTED, options=AttentionOptions("both"))
    counted = helper_kernels.count(name, COUNTED)
    copies = sum(each.helpers[kind] for each in counted for kind in COPIES)
    sent = sum(int(each.bytes_sent().sum(axis=(0, 2))[rank]) for each in passes)
    return Counts(
        sum(each.calls for each in counted), sum(each.helpers.total() for each in counted), copies,
        sum(each.messages for each in counted), sent / kv_bytes(rank, ranks, COUNTED),
    )  # fmt: skip


def transformer_engine(rank: int, ranks: int) -> Counts:
    """Counts of AttnFuncWithCPAndKVP2P of Transformer Engine by its source, causal, flash-attn, bshd, not fp8.

    NVIDIA/TransformerEngine 9c61cd7e, transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py.
    Forward: keys and values become one tensor; the log-sum-exp is cloned once and corrected at all other steps; the
    result is corrected once per step: 2 n + 1, each a function under jit_fuser. Backward: keys and the second half of
    the log-sum-exp are copied; dq is added to or written once per step, and in two halves at one step of the ranks
    between the first and the last; dk and dv, one tensor, once per step: 2 n + 3. Messages: n - 1 of keys and values;
    then n, of which the first has keys and values, the last gradients, and all others both, all in 16 bits.
    """
    assert 0 < rank < ranks - 1
    copies = 2 + 2 + 3  # cat, clone; keys, log-sum-exp; dq in its first step and its first half, dk and dv at first
    return Counts(2 * ranks, 4 * ranks + 4, copies, 2 * ranks - 1, 3 * (ranks - 1))


# On ranks


class Measured(NamedTuple):
    """Of a system on one rank: squares of errors and of what was expected, and processor times in seconds."""

    squares: Sequence[tuple[float, float]]
    times_s: list[float]


def measure(expected: Tensors) -> dict[str, Measured]:
    """On a rank: all systems, their samples by turns."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = *layer_of(LAYER), dout_of(LAYER)
    found: dict[str, Measured] = {}
    runs = systems()
    shards: dict[str, Tensors] = {}
    for name in runs:
        layout = attention_layout(name, LAYER, n) if name in OURS else zigzag(LAYER.sequence, n)
        shards[name] = tuple(shard(x, layout, rank) for x in whole)
        results = runs[name](shards[name][:3], shards[name][3])
        wanted = [shard(x, layout, rank) for x in expected]
        squares = [
            (float((x.double() - y).square().sum()), float(y.square().sum()))
            for x, y in zip(results, wanted, strict=True)
        ]
        found[name] = Measured(squares, [])
    for _ in range(SAMPLES):
        for name, run in runs.items():
            dist.barrier()
            began_s = own_s()
            run(shards[name][:3], shards[name][3])
            found[name].times_s.append(own_s() - began_s)
    return found


def count_others() -> dict[str, Counts]:
    """On a rank: the operations of code of others, on a short layer; their number does not depend on its length."""
    rank, n = dist.get_rank(), dist.get_world_size()
    layer = Workload(16 * n, heads=2, head_dim=16, dtype="bf16", mask="causal")
    q, k, v, dout = (shard(x, zigzag(layer.sequence, n), rank) for x in (*layer_of(layer), dout_of(layer)))
    found = {}
    for name, run in systems().items():
        if name not in OURS:
            run((q, k, v), dout)
            with Operations(n) as seen:
                run((q, k, v), dout)
            shards = seen.sent_bytes / kv_bytes(rank, n, layer)
            found[name] = Counts(seen.calls, seen.kernels, seen.copies, seen.messages, shards)
    return found if rank == helper_kernels.RANK else {}


# The page


def rows_of_results(of_ranks: Sequence[Mapping[str, Measured]]) -> Iterator[list[str]]:
    """Relative errors in norm, and processor times of all ranks with their ratio to our ring."""
    times = {
        name: [sum(samples) for samples in zip(*(each[name].times_s for each in of_ranks), strict=True)]
        for name in of_ranks[0]
    }
    for name in of_ranks[0]:
        squares = zip(*(each[name].squares for each in of_ranks), strict=True)
        errors = [(sum(x for x, _ in each) / sum(y for _, y in each)) ** 0.5 for each in squares]
        low, middle, high = statistics.quantiles(
            [one / ring for one, ring in zip(times[name], times[RING], strict=True)], n=4
        )
        yield [label(name), *(f"{1e3 * each:.2f}" for each in errors),
               f"{1e3 * statistics.median(times[name]):.0f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]  # fmt: skip


def label(name: str) -> str:
    return f"tasp-lab, {name}" if name in OURS else name


def count_rows() -> Iterator[list[str]]:
    """The counts of all systems."""
    rank, ranks = helper_kernels.RANK, helper_kernels.RANKS
    found = {label(name): counts_of_ours(name) for name in OURS}
    for each in succeeded(on_ranks(count_others, ranks)):
        found |= each
    found["Transformer Engine, p2p"] = transformer_engine(rank, ranks)
    for name, each in found.items():
        yield [name, *map(str, each[:4]), f"{each.kernels / ranks:.1f}", f"{each.shards:.1f}"]


def main() -> None:
    """Run and count everything, and write the page."""
    torch.set_num_threads(1)
    results = list(rows_of_results(succeeded(on_ranks(measure, RANKS, tuple(exact(LAYER))))))
    counts = list(count_rows())
    made = machine_record()
    versions = f"torch {torch.__version__.split('+')[0]}" + (", ring-flash-attn 0.1.8" if has_ring_flash_attn() else "")
    columns = ("system", "error of out, 1e-3", "dq", "dk", "dv", "processor time, ms", "over our ring")
    counted = (
        "system", "attention calls", "other kernels", "of these copies", "messages sent", "other kernels per step",
        "keys and values sent",
    )  # fmt: skip
    write_page(RESULT, f"""# Beside code of others

Made by `python -m experiments.benchmarks.beside_others` ({made["date"]}, {versions}, {made["cores"]} cores,
{made["processor"]}, which others used, too). Nothing here ran on GPUs.

## The same layer

Both passes of {LAYER.sequence} positions, {LAYER.heads} heads of {LAYER.head_dim}, bf16, causal, on {RANKS} processes
over gloo, all with torch's attention operator of CPUs, gradients in float32. Errors are relative to float64, in norm.
Processor time is that of the threads that run Python, of all ranks, the median of {SAMPLES} samples by turns; its ratio
to our zigzag ring has quartiles. torch's `context_parallel` has no rule for this operator, so its ring is called
without the context. In float32 ring-flash-attn 0.1.8 adds to the buffers of its calls and has wrong gradients, so the
layer is bf16. Gradients of each call are bf16 in the code of others, as flash-attn returns them, and float32 in ours on
CPUs, so the errors of dq, dk and dv are those of kernels: on GPUs ours are bf16, too.

{markdown_table(columns, results)}

## Kernels, copies and bytes

Rank {helper_kernels.RANK} of {helper_kernels.RANKS}, both passes, causal, as many KV heads as heads: what the Python
code would launch on a GPU beside attention. Ours as on GPUs, with its fused kernels; torch and ring-flash-attn by
operations, some of which torch.jit fuses in ring-flash-attn; Transformer Engine by its source, one kernel for each
function that it gives to its fuser. Bytes are over those of the rank's keys and values. Gradients travel in float32 but
in Transformer Engine, which sums them in 16 bits; in the backward pass our rings move queries where that is less.

{markdown_table(counted, counts)}
""")  # fmt: skip


if __name__ == "__main__":
    main()
