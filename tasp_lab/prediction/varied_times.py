"""Times of the same schedules on a machine whose constants vary."""

from __future__ import annotations

from collections.abc import Sequence

from sim.simulate import simulate
from tasp_lab.machines.machine import Machine
from tasp_lab.prediction.layer_times import PreparedMachine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.workload.layer import Workload


def fastest_passes(
    machine: PreparedMachine, name: str, layer: Workload, options: AttentionOptions
) -> tuple[Schedule, ...]:
    """The passes of a schedule, around those rings that are fastest on a machine.

    Raises `TaspLabError` where it does not apply.
    """
    found = [passes for passes, _ in machine.schedules(name, layer, options)]
    return found[0] if len(found) == 1 else min(found, key=lambda each: passes_s(each, machine.machine))


def passes_s(passes: Sequence[Schedule], machine: Machine) -> float:
    """The time of passes on a machine, one after the other, in seconds; rings stay those that they go around."""
    return sum(float(simulate(each, machine, "array", events=False).time_s) for each in passes)
