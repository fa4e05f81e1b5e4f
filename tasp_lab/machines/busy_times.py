"""How long each rank computes in all."""

from __future__ import annotations

from collections.abc import Sequence

from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.call_shapes import shapes_by_rank
from tasp_lab.schedule.schedule import Schedule


def busy_s(schedule: Schedule, compute: Compute, rank_speeds: Sequence[Number] = ()) -> list[Number]:
    """The sum of the times of the kernel calls of each rank; `rank_speeds` are those of `Machine`."""
    ranks = shapes_by_rank(schedule)
    times_s = {shape: compute.time_s(shape) for shape in dict.fromkeys(shape for rank in ranks for shape in rank)}
    sums_s: list[Number] = [sum(count * times_s[shape] for shape, count in rank.items()) for rank in ranks]
    return [each / speed for each, speed in zip(sums_s, rank_speeds, strict=True)] if rank_speeds else sums_s
