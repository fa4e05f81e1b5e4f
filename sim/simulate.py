"""Entry point of the simulator: selects an engine and runs it."""

from __future__ import annotations

from typing import Literal, get_args

from sim.array import engine as array_engine
from sim.bound import check_time
from sim.event import engine
from tasp_lab.errors import ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.progress import ShareCallback, no_share
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline

Engine = Literal["auto", "simpy", "array"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

FEW_TRANSFERS = 2_000
"""Up to this number of transfers, the SimPy engine takes well below a second."""


def simulate(
    schedule: Schedule,
    machine: Machine,
    which: Engine = "auto",
    *,
    explain: bool = False,
    events: bool = True,
    progress: ShareCallback = no_share,
) -> Timeline:
    """Predict what happens when the machine executes the schedule.

    Parameters
    ----------
    which : ``simpy``, the reference, exact if all numbers are fractions; ``array``, the same times to 1e-9 for large
        worlds; ``auto`` selects SimPy for few transfers and for fractions.
    explain : whether events record what their time was spent on.
    events : whether to record events; without them the timeline has a total time only, for any number of transfers.
    progress : called by the array engine with the share that is done.

    Raises `ScheduleError` for an unknown engine, if the machine lacks ranks or links of the schedule, and for too many
    events. No time is below the bound of `sim.bound`: that would be an error of tasp-lab, and fails an assertion.
    """
    if engine_of(schedule, machine, which) == "simpy":
        found = engine.simulate(schedule, machine, explain)
    else:
        run = array_engine.run(schedule, machine, explain, progress)
        found = (
            run.timeline()
            if events
            else Timeline("predicted", schedule.name, machine.topology.name, schedule.world_size, (), run.time_s)
        )
    check_time(schedule, machine, found.time_s)
    return found


def engine_of(schedule: Schedule, machine: Machine, which: Engine = "auto") -> Literal["simpy", "array"]:
    """The engine that `simulate` takes. Raises `ScheduleError` for an unknown engine."""
    if which not in ENGINES:
        raise ScheduleError(f"engine {which!r} is unknown, expected one of {', '.join(ENGINES)}")
    if which != "auto":
        return which
    return "simpy" if schedule.transfers <= FEW_TRANSFERS or machine.topology.is_exact else "array"
