"""Schedules of points on their machine, whose constants are varied: no text of a point says that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tasp_lab.core.errors import first_line
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.overrides import overridden_layer
from tasp_lab.prediction.answer import PassAnswer, answer
from tasp_lab.prediction.question import prepared
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
    passes: dict[str, tuple[PassAnswer, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(points: Sequence[Point]) -> OnMachine:
        """The schedules of points. Raises `TaspLabError` for a machine or a layer that does not exist."""
        first = points[0]
        layer = overridden_layer(first.layer, first.overrides)
        found = OnMachine(prepared(first).machine_for(layer), layer)
        for each in points:
            answered = answer(each)
            if answered.applies:
                found.passes[each.name] = answered.passes
            elif answered.error is not None:
                found.refused[each.name] = first_line(answered.error)
        return found

    def times_s(self, machine: Machine, schedules: Sequence[str] = ()) -> dict[str, float]:
        """The times of schedules on a machine like this one in seconds, by name; of all unless some are given.

        Rings stay those that schedules go around.
        """
        return {
            name: sum(float(each.on(machine).time_s) for each in self.passes[name]) for name in schedules or self.passes
        }
