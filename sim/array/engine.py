"""The array engine: the times of the SimPy engine (`sim.event.engine`) for large worlds, in floats.

It simulates equivalence classes of operations instead of single operations. Classes are computed and verified for each
schedule and machine (`sim.array.symmetry`); without any symmetry every operation is its own class.

1. `sim.array.from_schedule` turns a schedule into operations, as arrays.
2. `sim.array.symmetry` partitions them into classes, `sim.array.quotient` builds one program from these.
3. `sim.array.event_loop` runs the program; `sim.array.flows` and `sim.array.max_min` are the network, and
   `sim.array.compiled` turns large runs into machine code.
   `sim.array.recurrence` replaces the event loop for rings that share no constraint.
4. `sim.array.timeline` turns the result into events of single messages and calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from sim.array.event_loop import Run
from sim.array.from_schedule import is_ring_schedule, ring_operations, step_operations
from sim.array.operations import FREED, Cost, Incidence, Operations
from sim.array.quotient import Program, program_of
from sim.array.recurrence import end_s, is_contention_free, record_of
from sim.array.symmetry import classes_of
from sim.array.timeline import Record, timeline_of
from sim.event.engine import MAX_TRANSFERS, without_garbage_collection
from sim.host import messages_under
from sim.messages import call_facts
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.machines.libraries.library import CallFacts, CommLibrary, Message
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.messages import MessageDependencies
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline
from tasp_lab.topology.graph import Topology


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
        if is_contention_free(self.program):
            return end_s(self.program)
        return float(self.record.end_s.max(initial=0.0)) if "record" in vars(self) else self._run.end_s()

    @cached_property
    def record(self) -> Record:
        """The times of each operation of the program."""
        if is_contention_free(self.program):
            return record_of(self.program)
        return self._run.run()

    @property
    def _run(self) -> Run:
        return Run(self.program, self.progress)

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

    `progress` is called with the share of the events that are done, unless these are so regular that none are
    simulated.

    Raises `ScheduleError` if the machine lacks ranks or links of the schedule, and for more than `MAX_TRANSFERS`
    transfers and kernel calls of a schedule that is not ring-based or has little symmetry.

    >>> from tasp_lab.schedules.collectives.registry import collective
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
    if not is_contention_free(program):
        check_fits(schedule, program.plan.size)
    return ArrayRun(schedule, machine, explain, program, derived, progress)


def operations_of(schedule: Schedule, machine: Machine) -> tuple[Operations, MessageDependencies | None]:
    """The operations of a schedule, and its messages and calls unless it is ring-based."""
    if is_ring_schedule(schedule):
        return ring_operations(schedule, machine), None
    check_fits(schedule, schedule.transfers)
    derived = messages_under(schedule, machine.runtime)
    return step_operations(schedule, machine, derived), derived


def check_fits(schedule: Schedule, operations: int) -> None:
    """Raise `ScheduleError` for more than `MAX_TRANSFERS` operations."""
    if operations > MAX_TRANSFERS:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {operations:,} distinct transfers and kernel calls, "
            f"expected at most {MAX_TRANSFERS:,}"
        )


class RepeatedRun:
    """The time of a schedule without kernel calls, for any number of libraries that differ in constants.

    What waits for what, which messages there are and which operations are alike depends on the schedule, not on
    constants. So these are found once, with messages that only have numbers; a simulation then costs no more than its
    events. Constraints that cannot saturate (`Incidence.that_can_saturate`) do depend on constants: there is a program
    for each set of the others.

    Parameters
    ----------
    schedule, topology : what is simulated, and where.
    comm_library : a library with the places and the way of launching of those that follow.

    Raises `ScheduleError` if the topology lacks ranks or links of the schedule, and for too many transfers.

    >>> from tasp_lab.schedules.collectives.registry import collective
    >>> from tasp_lab.topology.builders import full_mesh
    >>> mesh = full_mesh(8, 50e9, 1e-6)
    >>> run = RepeatedRun(collective("multi-ring", mesh, 7 * 2**20), mesh, CommLibrary("fast"))
    >>> [round(run.time_s(CommLibrary("slow", launch_s)) * 1e6, 3) for launch_s in (0, 1e-6)]
    [153.801, 166.801]
    """

    def __init__(self, schedule: Schedule, topology: Topology, comm_library: CommLibrary) -> None:
        assert schedule.task is None, "of communication alone"
        schedule.check_routes(topology)
        numbered = _Numbered if comm_library.serial_launch else _NumberedApart
        self._kinds: list[_Kind] = []
        machine = Machine(topology, numbered("numbered", of=comm_library, kinds=self._kinds))
        self._operations, _ = operations_of(schedule, machine)
        self._schedule, self._call = schedule, call_facts(schedule)
        self._programs: dict[bytes, Program] = {}
        self._known: dict[tuple[Message, ...], float] = {}

    def time_s(self, comm_library: CommLibrary) -> float:
        """The time with this library, in seconds; simulated once per set of messages."""
        bound = comm_library.bind(self._call)
        messages = tuple(bound.message(*kind[:3], first=kind.first) for kind in self._kinds)
        if messages not in self._known:
            program = self._program([self._cost(messages, cost) for cost in self._operations.costs])
            self._known[messages] = end_s(program) if is_contention_free(program) else Run(program).end_s()
        return self._known[messages]

    def _cost(self, messages: tuple[Message, ...], numbered: Cost) -> Cost:
        """The cost of a numbered message; that of a buffer has no number."""
        number = int(numbered.launch_s)
        return Cost.of(messages[number - 1], numbered.latency_s) if number else numbered

    def _program(self, costs: list[Cost]) -> Program:
        operations = self._operations
        limits = np.array([np.inf if each.max_bytes_per_s is None else each.max_bytes_per_s for each in costs])
        passes = Incidence(
            operations.constraints, operations.capacity_bytes_per_s, operations.passing, operations.passed
        ).that_can_saturate(limits[operations.cost].max(axis=0))
        key = passes.constraints.tobytes()
        if key not in self._programs:
            used = replace(operations, **passes._asdict())
            self._programs[key] = program_of(used, classes_of(used))
            if not is_contention_free(self._programs[key]):
                check_fits(self._schedule, self._programs[key].plan.size)
        return self._programs[key].with_costs(costs)


class _Kind(NamedTuple):
    """What a message depends on; see `CommLibrary.message`."""

    place: int
    size_bytes: int
    peers: int
    first: bool


@dataclass(frozen=True)
class _Numbered(CommLibrary):
    """A library whose messages have a number instead of a launch time, one per kind."""

    of: CommLibrary = field(kw_only=True)
    kinds: list[_Kind] = field(kw_only=True)

    def bind(self, call: CallFacts) -> Self:
        return self

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        return self.of.places(source, destination)

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        self.kinds.append(_Kind(place, size_bytes, peers, first))
        return Message(len(self.kinds), 0, 1)


class _NumberedApart(_Numbered):
    """A `_Numbered` library whose launches are independent."""

    serial_launch = False
