"""Schedules of attention whose sums are wider at home than on the wire."""

from __future__ import annotations

from dataclasses import replace

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import TENSORS, AttentionTask


def with_home_dtype(schedule: Schedule, dtype: str | None = "fp32") -> Schedule:
    """The same schedule with resident results and gradients in this dtype, as on the wire if None.

    Parts that are sent with 16 bit are then rounded once, when they are sent, and not again with each part that joins
    them. Resident copies take the memory of the wider dtype; the bytes that are sent are the same.

    Raises `ScheduleError` for what is no schedule of attention, and for a dtype that is narrower than on the wire.
    """
    if not isinstance(schedule.task, AttentionTask):
        raise ScheduleError(f"schedule {schedule.name!r} has no results or gradients of attention")
    task, blocks = replace(schedule.task, home_dtype=dtype), schedule.blocks
    kinds = [
        replace(kind, fields=task.fields_of(TENSORS.index(kind.name), kind.fields[0].shape[1])) for kind in blocks.kinds
    ]
    return replace(schedule, task=task, blocks=Blocks(kinds, blocks.kind, blocks.bytes, blocks.parts))
