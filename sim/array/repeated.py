"""Repeated simulation of one schedule with libraries that differ in constants.

What waits for what, which messages there are and which operations are alike depends on the schedule, not on constants.
So these are found once, with messages that only have numbers; a simulation then costs no more than its events.
Constraints that cannot saturate (`Incidence.that_can_saturate`) do depend on constants: there is a program for each set
of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from sim.array.engine import check_fits, operations_of
from sim.array.event_loop import Run
from sim.array.operations import Cost, Incidence
from sim.array.quotient import Program, program_of
from sim.array.recurrence import end_s, is_contention_free
from sim.array.symmetry import classes_of
from sim.messages import call_facts
from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.libraries.library import CallFacts, CommLibrary, Message
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology


class RepeatedRun:
    """The time of a schedule without kernel calls, for any number of libraries.

    Parameters
    ----------
    schedule, topology : what is simulated, and where.
    comm_library : a library with the places and the way of launching of those that follow.

    Raises `ScheduleError` if the topology lacks ranks or links of the schedule, and for too many transfers.

    >>> from tasp_lab.schedules.build import collective
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
