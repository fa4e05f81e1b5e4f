"""Schedules of points on their machine, whose constants are varied: no text of a point says that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tasp_lab.core.errors import TaspLabError, first_line
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.prediction.predict import with_assumptions
from tasp_lab.prediction.varied_times import fastest_passes, passes_s
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.study.evaluate import prepared
from tasp_lab.study.point import Point
from tasp_lab.workload.layer import Workload


@dataclass(frozen=True)
class OnMachine:
    """Schedules that apply at points which differ in their schedule only, with the rings that are fastest there.

    Parameters
    ----------
    machine : of the points, with its kernel, runtime, contention and overrides.
    layer : of the points, with their overrides.
    passes : of each schedule that applies, by its name.
    refused : why others do not.
    """

    machine: Machine
    layer: Workload
    passes: dict[str, tuple[Schedule, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(points: Sequence[Point]) -> OnMachine:
        """The schedules of points. Raises `TaspLabError` for a machine or a layer that does not exist."""
        first = points[0]
        machine, layer = prepared(first), overridden_layer(first.layer, first.overrides)
        found = OnMachine(with_assumptions(machine.machine, layer), layer)
        for each in points:
            try:
                found.passes[each.schedule] = fastest_passes(machine, each.schedule, layer, each.options)
            except TaspLabError as error:
                found.refused[each.schedule] = first_line(error)
        return found

    def times_s(self, machine: Machine, schedules: Sequence[str] = ()) -> dict[str, float]:
        """The times of schedules on a machine like this one in seconds, by name; of all unless some are given."""
        return {name: passes_s(self.passes[name], machine) for name in schedules or self.passes}
