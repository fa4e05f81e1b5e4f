"""How long each rank computes in all."""

from __future__ import annotations

from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.call_shapes import shapes_by_rank
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.units import Number


def busy_s(schedule: Schedule, compute: Compute) -> list[Number]:
    """The sum of the times of the kernel calls of each rank."""
    ranks = shapes_by_rank(schedule)
    times_s = {shape: compute.time_s(shape) for shape in dict.fromkeys(shape for rank in ranks for shape in rank)}
    return [sum(count * times_s[shape] for shape, count in rank.items()) for rank in ranks]
