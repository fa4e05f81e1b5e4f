"""The attention schedules, by name, and the sequence layout of each.

Layouts are imported on first call, so help and completion list the names without importing numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tasp_lab.choices import Mask
from tasp_lab.errors import ScheduleError, unknown
from tasp_lab.lazily import lazily

if TYPE_CHECKING:
    from tasp_lab.workload.layer import Workload
    from tasp_lab.workload.sequence_layout import LayoutFunction, SequenceLayout


def _layout(name: str) -> LayoutFunction:
    return lazily("tasp_lab.workload.sequence_layout", name)


ATTENTION: Mapping[str, Mapping[Mask, LayoutFunction]] = {
    "ring-attention": {"full": _layout("contiguous"), "causal": _layout("contiguous")},
    "zigzag-ring-attention": {"full": _layout("zigzag"), "causal": _layout("zigzag")},
    "striped-ring-attention": {"full": _layout("striped"), "causal": _layout("striped")},
    "tasp": {"full": _layout("contiguous"), "causal": _layout("zigzag")},
}
"""Attention schedules by name, as on the command line, each with its sequence layout per mask."""

USES_RINGS = ("tasp",)
"""The attention schedules that accept a decomposition."""


def attention_layout(name: str, workload: Workload, world_size: int) -> SequenceLayout:
    """The sequence layout of an attention schedule. Raises `ScheduleError` for an unknown name."""
    if name not in ATTENTION:
        raise ScheduleError(unknown("schedule", name, ATTENTION))
    return ATTENTION[name][workload.mask](workload.sequence, world_size, workload.documents)
