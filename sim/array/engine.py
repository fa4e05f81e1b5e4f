"""The array engine: the times of the SimPy engine (`sim.event.engine`) for large worlds, in floats.

It simulates equivalence classes of operations instead of single operations. Classes are computed and verified for each
schedule and machine (`sim.array.symmetry`); without any symmetry every operation is its own class.

1. `sim.array.from_schedule` turns a schedule into operations, as arrays.
2. `sim.array.symmetry` partitions them into classes, `sim.array.quotient` builds one program from these.
3. `sim.array.event_loop` runs the program; `sim.array.flows` and `sim.array.max_min` are the network, and
   `tasp_lab.core.compiled` turns large runs into machine code.
4. `sim.array.timeline` turns the result into events of single messages and calls.

Layers of more than `MANY` transfers of which only the time is asked for are simulated step by step
(`sim.array.stream`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sim.array.event_loop import Run
from sim.array.from_schedule import is_ring_schedule, ring_operations, step_operations
from sim.array.operations import FREED, Operations
from sim.array.quotient import Program, program_of
from sim.array.symmetry import classes_of
from sim.array.timeline import Record, timeline_of
from sim.host import messages_under
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.process import without_garbage_collection
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.messages import MessageDependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import MAX_TRANSFERS, Timeline

MANY = 50_000
"""Up to this number of transfers, all operations of a schedule fit into memory, and several machines share them."""


@dataclass(frozen=True, eq=False)
class ArrayRun:
    """The simulated execution of a schedule on a machine, by class; computed on first access."""

    schedule: Schedule
    machine: Machine
    explain: bool
    program: Program
    derived: MessageDependencies | None = None
    progress: ShareCallback = no_share

    @cached_property
    def time_s(self) -> float:
        """The end of the last message or call, in seconds; 0 for an empty schedule."""
        if "record" in vars(self):  # already simulated, with all times
            return float(self.record.end_s.max(initial=0.0))
        return Run(self.program, self.progress).end_s()

    @cached_property
    def record(self) -> Record:
        """The times of each operation of the program."""
        return Run(self.program, self.progress).run()

    @property
    def classes(self) -> int:
        """The number of simulated classes of messages and calls; all steps of a hop are one class."""
        return int((self.program.kinds != FREED).sum())

    @property
    def operations(self) -> int:
        """The number of messages and calls."""
        operations = self.program.operations
        return int((operations.kind != FREED).sum()) * operations.repeats

    def timeline(self, limit: int = MAX_TRANSFERS) -> Timeline:
        """All events, in the order of the SimPy engine. Raises `ScheduleError` for more than `limit` of them."""
        if self.operations > limit:
            raise ScheduleError(
                f"schedule {self.schedule.name!r} has {self.operations:,} messages and kernel calls; "
                f"a timeline has at most {limit:,}"
            )
        with without_garbage_collection():
            return timeline_of(self.schedule, self.machine, self.program, self.record, self.derived, self.explain)


def run(schedule: Schedule, machine: Machine, explain: bool = False, progress: ShareCallback = no_share) -> ArrayRun:
    """Predict the execution of a schedule on a machine; `explain`: events record what their time was spent on.

    `progress` is called with the share of the events that are done.

    Raises `ScheduleError` if the machine lacks ranks or links of the schedule, and for more than `MAX_TRANSFERS`
    transfers and kernel calls of a schedule that has little symmetry.

    >>> from tasp_lab.schedules.build import collective
    >>> from tasp_lab.topology.builders import full_mesh
    >>> mesh = full_mesh(8, 50e9, 1e-6)
    >>> simulated = run(collective("multi-ring", mesh, 7 * 2**20), Machine(mesh))
    >>> simulated.classes, simulated.operations, round(simulated.time_s * 1e6, 3)
    (1, 392, 153.801)
    """
    schedule.check_routes(machine.topology)
    with without_garbage_collection():
        operations, derived = operations_of(schedule, machine)
        program = program_of(operations, classes_of(operations))
    check_fits(schedule, program.plan.size)
    return ArrayRun(schedule, machine, explain, program, derived, progress)


def time_s(schedule: Schedule, machine: Machine, progress: ShareCallback = no_share) -> float:
    """The end of the last message or call, in seconds; arguments and errors as of `run`."""
    if schedule.transfers > MANY:
        from sim.array.stream import stream_time_s  # few questions need it

        schedule.check_routes(machine.topology)
        with without_garbage_collection():
            streamed_s = stream_time_s(schedule, machine, progress)
        if streamed_s is not None:
            return streamed_s
    return run(schedule, machine, progress=progress).time_s


def operations_of(schedule: Schedule, machine: Machine) -> tuple[Operations, MessageDependencies | None]:
    """The operations of a schedule, and its messages and calls unless it is ring-based."""
    if is_ring_schedule(schedule):
        return ring_operations(schedule, machine), None
    check_fits(schedule, schedule.transfers)
    derived = messages_under(schedule, machine)
    return step_operations(schedule, machine, derived), derived


def check_fits(schedule: Schedule, operations: int) -> None:
    """Raise `ScheduleError` for more than `MAX_TRANSFERS` operations."""
    if operations > MAX_TRANSFERS:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {operations:,} distinct transfers and kernel calls, "
            f"expected at most {MAX_TRANSFERS:,}"
        )
