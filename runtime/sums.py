"""Sums: gradients that are added up in a rank's buffer from what arrives and what the rank computes.

Parts are added when all of a place are there, which a walk knows (`runtime.walk_by_lanes`, `runtime.walk_by_steps`),
so nothing is added to what is still arriving. What a rank computes for blocks of its own is added at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from tasp_lab.rooms import HOME, Place, RankPart, Sum

View = Callable[[int, int], Sequence[torch.Tensor]]
"""The tensors of a gradient block that lies at an offset of the buffer; parts are given as as many tensors."""


class Sums:
    """The sums of one run. Its methods may be called by several threads."""

    def __init__(self, part: RankPart, view: View) -> None:
        self._part, self._view = part, view
        self._parts: dict[tuple[int, int], list[Sequence[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def add(self, place: Place, part: Sequence[torch.Tensor]) -> None:
        """A part has been computed; it must not be changed any more."""
        with self._lock:
            if place.since == HOME:  # rounded first, so that it is the same before and after what comes home
                home = self._view(place.block, place.offset)
                _add(home, [values.to(total.dtype) for total, values in zip(home, part, strict=True)])
            else:
                self._parts.setdefault(place.key, []).append(part)

    def join(self, each: Sum) -> None:
        """All parts of a place are there: add them up, or bring home what is complete."""
        found = self._view(each.block, each.offset)
        if each.block in self._part.gradients:
            with self._lock:
                _add(self._view(each.block, self._part.gradients[each.block]), found)
            return
        with self._lock:
            parts = self._parts.pop((each.block, each.since), [])
        if not each.arrives:
            for into, values in zip(found, parts.pop(0), strict=True):
                into.copy_(_here(values))
        for part in parts:
            _add(found, part)


def _add(into: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> None:
    for total, values in zip(into, part, strict=True):
        total.add_(_here(values))


def _here(values: torch.Tensor) -> torch.Tensor:
    """The values, whose memory must not be used anew before the current stream has read it."""
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream(values.device))
    return values
