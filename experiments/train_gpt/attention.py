"""`runtime.attention`, `runtime.linear_attention` and `runtime.relayout` for a model, with timing of both passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.graph import register_multi_grad_hook

import runtime
from runtime.executor.messages import Group
from tasp_lab.workload.sequence_layout import SequenceLayout

Tensor = torch.Tensor


class TimedAttention:
    """Causal attention over a group of ranks, and the way of hidden states between layers of both kinds.

    Parameters
    ----------
    schedules : of softmax (``S``) and of linear (``L``) attention, by letter.
    layouts : where positions lie in layers of each kind that the model has.
    group : the ranks.

    Attributes
    ----------
    seconds : accumulated host time on this rank, of all three.
    relayout_seconds : of `relayout` alone.
    """

    def __init__(self, schedules: Mapping[str, str], layouts: Mapping[str, SequenceLayout], group: Group) -> None:
        self._schedules, self._layouts, self._group = schedules, layouts, group
        self.seconds = self.relayout_seconds = 0.0

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of [batch, positions, heads or KV heads, head_dim] each; in the shape of `q`."""
        return self._timed(
            lambda: runtime.attention(q, k, v, schedule=self._schedules["S"], group=self._group, causal=True), (q, k, v)
        )

    def linear(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Sequence[float] | None = None, gates: Tensor | None = None
    ) -> Tensor:
        """As `softmax`, with constant decays, gates, or neither."""
        schedule, inputs = self._schedules["L"], [each for each in (q, k, v, gates) if each is not None]
        return self._timed(
            lambda: runtime.linear_attention(
                q, k, v, decay=decay, gates=gates, schedule=schedule, group=self._group, causal=True
            ),
            inputs,
        )

    def relayout(self, x: Tensor, before: str, after: str) -> Tensor:
        """Hidden states [batch, positions, width] between layers of these kinds; `x` if both have one layout."""
        layouts = self._layouts[before], self._layouts[after]
        if layouts[0] == layouts[1]:
            return x
        return self._timed(lambda: runtime.relayout(x, *layouts, self._group), (x,), is_relayout=True)

    def _timed(self, call: Callable[[], Tensor], inputs: Sequence[Tensor], is_relayout: bool = False) -> Tensor:
        def count(sign: int) -> None:
            now_s = sign * time.perf_counter()
            self.seconds += now_s
            self.relayout_seconds += now_s * is_relayout

        count(-1)
        out = call()
        count(1)
        if out.requires_grad:
            # The backward pass starts with the gradient of `out` and ends with the first gradient of an input.
            register_multi_grad_hook((out,), lambda _: count(-1), mode="any")
            register_multi_grad_hook(inputs, lambda _: count(1), mode="any")
        return out
