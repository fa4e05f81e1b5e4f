"""Accumulation of gradients in a rank's memory, from received and from computed contributions.

The executor (`runtime.executor.per_lane`, `runtime.executor.per_step`) joins the contributions to a place once all of
them are complete, so nothing is added to a block that is still arriving. Contributions to a rank's own blocks are added
immediately.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from tasp_lab.schedule.buffer_layout import INITIAL, Place, RankPart, Sum

View = Callable[[int, int], Sequence[torch.Tensor]]
"""The tensors of a gradient block at an offset of the memory; each contribution has the same number of tensors."""


class Sums:
    """The gradient sums of one run. Thread-safe."""

    def __init__(self, part: RankPart, view: View) -> None:
        self._part, self._view = part, view
        self._parts: dict[tuple[int, int], list[Sequence[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def add(self, place: Place, part: Sequence[torch.Tensor]) -> None:
        """Add a computed contribution, which must not be modified afterwards."""
        with self._lock:
            if place.since == INITIAL:  # rounded first, so that the order does not matter
                resident = self._view(place.block, place.offset)
                _add(resident, [values.to(total.dtype) for total, values in zip(resident, part, strict=True)])
            else:
                self._parts.setdefault(place.key, []).append(part)

    def join(self, each: Sum) -> None:
        """Sum the contributions to a place, all of which are complete, or add a returned gradient to the rank's own."""
        found = self._view(each.block, each.offset)
        if each.block in self._part.gradients:
            with self._lock:
                _add(self._view(each.block, self._part.gradients[each.block]), found)
            return
        with self._lock:
            parts = self._parts.pop((each.block, each.since), [])
        if not each.arrives:
            for into, values in zip(found, parts.pop(0), strict=True):
                into.copy_(_on_current_stream(values))
        for part in parts:
            _add(found, part)


def _add(into: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> None:
    for total, values in zip(into, part, strict=True):
        total.add_(_on_current_stream(values))


def _on_current_stream(values: torch.Tensor) -> torch.Tensor:
    """The values, whose memory is not reused before the current stream has read it."""
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream(values.device))
    return values
