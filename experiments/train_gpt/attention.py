"""`runtime.attention` for a model, with timing of its forward and backward passes."""

from __future__ import annotations

import time

import torch
from torch.autograd.graph import register_multi_grad_hook

import runtime
from runtime.executor.transports import Group


class TimedAttention:
    """Causal attention over a group of ranks; `seconds` is the accumulated host time on this rank."""

    def __init__(self, schedule: str, group: Group) -> None:
        self._schedule, self._group = schedule, group
        self.seconds = 0.0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._start()
        out = runtime.attention(q, k, v, schedule=self._schedule, group=self._group, causal=True)
        self._stop()
        if out.requires_grad:
            # The backward pass starts with the gradient of `out` and ends with the first gradient of q, k or v.
            register_multi_grad_hook((out,), lambda _: self._start(), mode="any")
            register_multi_grad_hook((q, k, v), lambda _: self._stop(), mode="any")
        return out

    def _start(self) -> None:
        self.seconds -= time.perf_counter()

    def _stop(self) -> None:
        self.seconds += time.perf_counter()
