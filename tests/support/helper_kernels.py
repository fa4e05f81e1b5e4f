"""Kernels that a pass launches on a GPU beside attention and messages, counted on meta tensors.

One rank of eight runs both passes of a layer on tensors without data; flash-attn, Triton and the library of messages
are stand-ins. Every operation of torch that is neither a view nor an allocation is a kernel, and so is every launch of
`runtime.kernels.fused`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.executor import executor as executors
from runtime.executor.kept import release_memory
from runtime.executor.messages import Message, Transport, Wait
from runtime.executor.streams import Mark, Streams
from runtime.kernels import fused
from runtime.kernels.flash import FLASH_ATTENTION
from runtime.sequence_parallel.layer import SoftmaxPasses
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

RANKS, RANK = 8, 1
LAYER = Workload(sequence=64 * 1024, heads=32, kv_heads=8, head_dim=128, dtype="bf16", mask="causal")


class Counts(NamedTuple):
    """What one rank does in a pass: kernels beside attention by name, attention calls, batches and messages sent."""

    helpers: Counter[str]
    calls: int
    batches: int
    messages: int
    views: int


def count(name: str, layer: Workload = LAYER) -> tuple[Counts, Counts]:
    """The counts of both passes of a schedule by name."""
    forward, backward = attention_schedules(name, full_mesh(RANKS), layer, options=AttentionOptions("both"))
    length = attention_layout(name, layer, RANKS).length(RANK)
    heads = (layer.heads, layer.kv_head_count, layer.kv_head_count, layer.heads)
    q, k, v, dout = (
        torch.empty(1, length, each, layer.head_dim, dtype=torch.bfloat16, device="meta") for each in heads
    )
    library, inputs = _Library(), (q, k, v, None)
    with _stand_ins() as (calls, launches):
        passes = SoftmaxPasses(forward, backward, RANK, library, FLASH_ATTENTION, 1.0)
        saved = passes.saved(inputs, *passes.forward(*inputs))
        passes.backward(saved, dout)  # what is prepared once per schedule is not counted
        calls.clear()
        launches.clear()
        library.batches = library.messages = 0
        with Kernels() as of_forward:
            saved = passes.saved(inputs, *passes.forward(*inputs))
        counted = Counts(
            of_forward.found + launches, calls.total(), library.batches, library.messages, of_forward.views
        )
        calls.clear()
        launches.clear()
        library.batches = library.messages = 0
        with Kernels() as of_backward:
            passes.backward(saved, dout)
        release_memory()
        return counted, Counts(
            of_backward.found + launches, calls.total(), library.batches, library.messages, of_backward.views
        )


NO_KERNELS = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "detach", "_unsafe_view"})
"""Operations of torch that launch nothing, beside views."""


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch that launch a kernel on a GPU, by name, and the others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.views = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.is_view or name in NO_KERNELS:
            self.views += 1
        else:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class _Library(Transport):
    """Batches per step and channel, as with NCCL; nothing is sent."""

    receives_ahead = 0
    whole_steps = True
    channels = True
    short_bytes = 0

    def __init__(self) -> None:
        self.batches = self.messages = 0

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        """No-op."""

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return [_at_once] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        self.batches += 1
        self.messages += len(messages)
        return [_at_once] * len(messages)


def _at_once() -> None:
    """A wait that is over."""


class _Streams:
    """Streams of a GPU, on which nothing is queued."""

    queues = True

    def begin(self) -> None:
        """No-op."""

    def communicating(self, channel: int = 0) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def computing(self, lane: int = 0) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        return lambda: 0.0

    def wait(self, mark: Mark) -> None:
        """No-op."""

    def finish(self) -> None:
        """No-op."""


class _Launches:
    """In place of `runtime.kernels.fused_triton`."""

    def __init__(self) -> None:
        self.found = Counter[str]()

    def launch_merge(self, *_: object) -> None:
        self.found["merge"] += 1

    def launch_add(self, *_: object) -> None:
        self.found["add"] += 1

    def launch_inner_products(self, dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.found["inner_products"] += 1
        found: torch.Tensor = dout.new_empty(dout.shape[:-1], dtype=torch.float32)
        return found

    def launch_stand_in(self, dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        self.found["stand_in"] += 1
        return torch.empty_like(dout)


@contextlib.contextmanager
def _stand_ins() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """A process in which flash-attn 2.8, Triton and the streams of a GPU seem to be there.

    Yields the calls of flash-attn, and the launches of Triton.
    """
    calls, launches, interface = Counter[str](), _Launches(), ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_forward(
        q: Any, k: Any, v: Any, dropout_p: Any, softmax_scale: Any, causal: Any, window_size_left: Any,
        window_size_right: Any, softcap: Any, alibi_slopes: Any, return_softmax: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        calls["forward"] += 1
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: Any,
        softmax_scale: Any, causal: Any, window_size_left: Any, window_size_right: Any, softcap: Any,
        alibi_slopes: Any, deterministic: Any, rng_state: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        calls["backward"] += 1
        return torch.empty(0, device="meta")

    vars(interface).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)
    modules = {"flash_attn": ModuleType("flash_attn"), interface.__name__: interface}
    with (
        patch.dict(sys.modules, modules),
        patch.object(executors, "streams_for", lambda _: _Streams()),
        patch.object(fused, "_triton", lambda: launches),
        patch.object(torch, "is_autocast_enabled", lambda _: False),
    ):
        yield calls, launches.found
