"""The array engine: the answers of the SimPy engine (`sim.engine`) for large worlds, in floats.

It simulates classes of operations that are alike instead of all of them: what is alike is found, and proved, for each
schedule and machine anew (`sim.array_classes`). Where nothing is, it simulates every operation by itself.

1. `sim.array_steps` and `sim.array_rings` turn a schedule into operations, as arrays.
2. `sim.array_classes` divides them into classes, `sim.array_program` makes them one program.
3. `sim.array_run` runs it, `sim.array_flows` and `sim.array_sharing` are the network; `sim.array_pace` is the short way
   for rings that share nothing.
4. `sim.array_timeline` says what that means for each transfer and each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sim.array_classes import classes_of
from sim.array_operations import FREED, Operations
from sim.array_pace import end_s, meets_nobody, paced
from sim.array_program import Program, program_of
from sim.array_rings import ring_operations, travels_around_rings
from sim.array_run import Record, Run
from sim.array_steps import step_operations
from sim.array_timeline import timeline_of
from sim.engine import MOST_TRANSFERS
from sim.garbage import without_garbage_collection
from tasp_lab.errors import ScheduleError
from tasp_lab.machine import Machine
from tasp_lab.schedule import Schedule
from tasp_lab.timeline import Timeline


@dataclass(frozen=True, eq=False)
class ArrayRun:
    """What happens when a machine executes a schedule, class by class; simulated when it is first asked for."""

    schedule: Schedule
    machine: Machine
    explain: bool
    program: Program

    @cached_property
    def time_s(self) -> float:
        """When the last transfer or call ends, in seconds; 0 for a schedule without any."""
        return end_s(self.program) if meets_nobody(self.program) else max(self.record.end_s, default=0.0)

    @cached_property
    def record(self) -> Record:
        """What each operation of the program did."""
        if meets_nobody(self.program):
            return paced(self.program)
        with without_garbage_collection():
            return Run(self.program).run()

    @property
    def classes(self) -> int:
        """How many classes of transfers and calls were simulated; those of one hop at all steps are one."""
        return sum(kind != FREED for kind in self.program.kinds)

    @property
    def operations(self) -> int:
        """How many transfers and calls there are."""
        operations = self.program.operations
        return int((operations.kind != FREED).sum()) * operations.repeats

    def timeline(self, limit: int = MOST_TRANSFERS) -> Timeline:
        """All events, in the order of the SimPy engine. Raises `ScheduleError` for more than `limit` of them."""
        if self.operations > limit:
            raise ScheduleError(
                f"schedule {self.schedule.name!r} has {self.operations:,} transfers and kernel calls; "
                f"a timeline has at most {limit:,}"
            )
        with without_garbage_collection():
            return timeline_of(self.schedule, self.machine, self.program, self.record, self.explain)


def run(schedule: Schedule, machine: Machine, explain: bool = False) -> ArrayRun:
    """Predict what happens when the machine executes the schedule; with `explain`, events say what took how long.

    Raises `ScheduleError` when the machine has not the schedule's ranks or lacks a link that it uses, and for more than
    `MOST_TRANSFERS` transfers and kernel calls of other schedules than blocks around rings, or of which few are alike.

    >>> from tasp_lab.all_gather import all_gather
    >>> from tasp_lab.builders import full_mesh
    >>> mesh = full_mesh(8, 50e9, 1e-6)
    >>> found = run(all_gather("multi-ring", mesh, 7 * 2**20), Machine(mesh))
    >>> found.classes, found.operations, round(found.time_s * 1e6, 3)
    (1, 392, 153.801)
    """
    schedule.check_routes(machine.topology)
    with without_garbage_collection():
        operations = _operations(schedule, machine)
        program = program_of(operations, classes_of(operations))
    if not meets_nobody(program):
        _check_fits(schedule, len(program.kinds) * operations.repeats)
    return ArrayRun(schedule, machine, explain, program)


def _operations(schedule: Schedule, machine: Machine) -> Operations:
    if travels_around_rings(schedule):
        return ring_operations(schedule, machine)
    _check_fits(schedule, schedule.transfers)
    return step_operations(schedule, machine)


def _check_fits(schedule: Schedule, operations: int) -> None:
    """Raise `ScheduleError` for more operations than there is memory for, one by one."""
    if operations > MOST_TRANSFERS:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {operations:,} transfers and kernel calls to be told apart, "
            f"expected at most {MOST_TRANSFERS:,}"
        )
