"""How long a schedule takes on a machine, by either engine."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, get_args

from sim import array_engine, engine
from tasp_lab.errors import ScheduleError
from tasp_lab.machine import Machine
from tasp_lab.schedule import Schedule
from tasp_lab.timeline import Timeline

Engine = Literal["auto", "simpy", "array"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

FEW_TRANSFERS = 2_000
"""Up to so many, SimPy takes well below a second."""


def simulate(
    schedule: Schedule, machine: Machine, which: Engine = "auto", *, explain: bool = False, events: bool = True
) -> Timeline:
    """Predict what happens when the machine executes the schedule.

    Parameters
    ----------
    which : ``simpy``, the reference, exact where all numbers are fractions; ``array``, the same answers to 1e-9 for
        worlds of any size; ``auto`` takes SimPy for few transfers and for fractions.
    explain : events say what their time went to.
    events : whether events are wanted; without them the timeline has its time only, of any number of transfers.

    Raises `ScheduleError` for an unknown engine, where the machine lacks ranks or links of the schedule, and for more
    events than can be kept.
    """
    if which not in ENGINES:
        raise ScheduleError(f"engine {which!r} is unknown, expected one of {', '.join(ENGINES)}")
    few = schedule.transfers <= FEW_TRANSFERS or _is_exact(machine)
    if which == "simpy" or (which == "auto" and few):
        return engine.simulate(schedule, machine, explain)
    run = array_engine.run(schedule, machine, explain)
    if events:
        return run.timeline()
    return Timeline("predicted", schedule.name, machine.topology.name, schedule.world_size, (), run.time_s)


def _is_exact(machine: Machine) -> bool:
    return any(
        isinstance(constraint.bandwidth_bytes_per_s, Fraction) for constraint in machine.topology.constraints[:1]
    )
