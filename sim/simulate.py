"""Entry point of the simulator: selects an engine and runs it.

>>> from tasp_lab.schedules.build import collective
>>> from tasp_lab.topology.builders import full_mesh
>>> pair = full_mesh(2, 1e9, 1e-6)
>>> time_s = simulate(collective("ring", pair, 4000), Machine(pair)).time_s
>>> f"{time_s * 1e6:.3f} us"  # 4000 bytes at 1 GB/s, and a latency of 1 us
'5.000 us'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from sim.array import engine as array_engine
from sim.array import repeated
from sim.bounds.least import check_time
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import ScheduleError, TopologyError, of_type
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline
from tasp_lab.topology.graph import Topology

Engine = Literal["auto", "simpy", "array"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


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
    schedule, machine : objects; a topology alone is ``Machine(topology)``, with ideal links and ranks that compute in
        no time.
    which : ``simpy``, the reference, exact if all numbers are fractions; ``array``, the same times to 1e-9 in much less
        time; ``auto`` selects SimPy for fractions.
    explain : whether events record what their time was spent on.
    events : whether to record events; without them the timeline has a total time only, for any number of transfers.
    progress : called by the array engine with the share that is done.

    Raises `ScheduleError` for an unknown engine, if the machine lacks ranks or links of the schedule, and for too many
    events; for an argument that is neither, and `TopologyError` for one that is no machine. No time is below the bound
    of `sim.bounds.least`: that would be an error of tasp-lab, and fails an assertion.
    """
    _check_types(schedule, machine)
    if engine_of(schedule, machine, which) == "simpy":
        from sim.event import engine  # few questions need it

        timeline = engine.simulate(schedule, machine, explain)
    elif events:
        timeline = array_engine.run(schedule, machine, explain, progress).timeline()
    else:
        time_s = repeated.time_s(schedule, machine, progress)
        timeline = Timeline("predicted", schedule.name, machine.topology.name, schedule.world_size, (), time_s)
    check_time(schedule, machine, timeline.time_s)
    return timeline


def times_on(machines: Sequence[Machine], schedules: Sequence[Schedule]) -> FloatArray:
    """The times of schedules on samples of one machine, in seconds; a float array (machines, schedules).

    What waits for what is found once for machines that differ from the first one in numbers alone.

    >>> from tasp_lab.schedules.build import collective
    >>> from tasp_lab.topology.builders import full_mesh
    >>> pair = full_mesh(2, 1e9, 1e-6)
    >>> times_on([Machine(pair)], [collective("ring", pair, size) for size in (4000, 8000)]).round(9).tolist()
    [[5e-06, 9e-06]]
    """
    first = machines[0]
    if first.topology.is_exact or first.rank_speeds:
        times_s = [[simulate(each, machine, events=False).time_s for each in schedules] for machine in machines]
        return np.array(times_s, dtype=float)
    runs = repeated.RepeatedRuns.of(schedules, first)
    return np.array([runs.times_s(machine) for machine in machines])


def _check_types(schedule: object, machine: object) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(of_type("simulate", schedule, "a Schedule; tasp_lab.predict takes schedules by name"))
    if not isinstance(machine, Machine):
        like = "Machine(topology)" if isinstance(machine, Topology) else "tasp_lab.load_machine(name)"
        raise TopologyError(of_type("simulate", machine, f"a Machine, such as {like}"))


def engine_of(schedule: Schedule, machine: Machine, which: Engine = "auto") -> Literal["simpy", "array"]:
    """The engine that `simulate` takes. Raises `ScheduleError` for an unknown engine."""
    if which not in ENGINES:
        raise ScheduleError(f"engine {which!r} is unknown, expected one of {', '.join(ENGINES)}")
    if which != "auto":
        return which
    return "simpy" if machine.topology.is_exact else "array"
