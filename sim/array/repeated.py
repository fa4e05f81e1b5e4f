"""Repeated simulation of one schedule with libraries that differ in constants.

What waits for what, which messages there are and which operations are alike depends on the schedule, not on constants.
So these are found once, with messages that only have numbers; a simulation then costs no more than its events.
Constraints that cannot saturate (`Incidence.that_can_saturate`) do depend on constants: there is a program for each set
of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from sim.array.engine import check_fits, operations_of
from sim.array.event_loop import Run
from sim.array.operations import Cost, Incidence
from sim.array.quotient import Program, program_of
from sim.array.recurrence import end_s, hop_before, is_contention_free, last_end_s, narrowest_bytes_per_s
from sim.array.symmetry import classes_of
from sim.messages import call_facts
from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.machines.libraries.channels import ChannelLibrary
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


class RepeatedRuns:
    """The times of schedules on one topology, for any number of libraries: `RepeatedRun` for a list.

    Rings of a library with channels that differ in sizes alone are computed together, with arrays of one element per
    schedule, if no two of their hops share a link.
    """

    def __init__(self, schedules: Sequence[Schedule], topology: Topology, comm_library: CommLibrary) -> None:
        self._runs = [RepeatedRun(schedule, topology, comm_library) for schedule in schedules]
        self._rings = _Rings.of(self._runs) if isinstance(comm_library, ChannelLibrary) else None

    def times_s(self, comm_library: CommLibrary) -> FloatArray:
        """The time of each schedule with this library, in seconds; a float array (schedules,)."""
        if self._rings is not None and isinstance(comm_library, ChannelLibrary):
            return self._rings.times_s(comm_library)
        return np.array([run.time_s(comm_library) for run in self._runs])


@dataclass(frozen=True, eq=False)
class _Rings:
    """Fused rings without contention, whatever the library: the operations of all have the same costs but for sizes.

    Attributes
    ----------
    calls : the rings.
    kinds : of each kind of message its place, the bytes that it has in each ring, and whether it belongs to step 0.
    kind, route_s : of each operation its kind of message and the latency of its route; arrays (variants, classes).
    narrowest_bytes_per_s : of each class, the capacity of its narrowest link.
    variants, before, lag : see `last_end_s`.
    """

    calls: Sequence[CallFacts]
    kinds: Sequence[tuple[int, FloatArray, bool]]
    kind: IntArray
    route_s: FloatArray
    narrowest_bytes_per_s: FloatArray
    variants: Sequence[int]
    before: IntArray
    lag: int

    @classmethod
    def of(cls, runs: Sequence[RepeatedRun]) -> _Rings | None:
        """The rings of these runs; None if they are no such rings."""
        if not all(run._call.fused and run._call.steps for run in runs):
            return None
        first, operations = runs[0], runs[0]._operations
        numbers = np.array([each.launch_s for each in operations.costs])
        costs = [(each.launch_s, each.latency_s) for each in operations.costs]
        for run in runs:
            alike = [(each.place, each.peers, each.first) for each in run._kinds]
            if (
                alike != [(each.place, each.peers, each.first) for each in first._kinds]
                or [(each.launch_s, each.latency_s) for each in run._operations.costs] != costs
                or not np.array_equal(run._operations.cost, operations.cost)
                or (run._call.world_size, run._call.steps) != (first._call.world_size, first._call.steps)
            ):
                return None
        # with all constraints, so that it holds whatever the rates are
        program = program_of(operations, classes_of(operations))
        if not is_contention_free(program) or not numbers.all():
            return None
        plan = program.plan
        shape = plan.variants, plan.classes
        sizes = [np.array([run._kinds[kind].size_bytes for run in runs], float) for kind in range(len(first._kinds))]
        return cls(
            [run._call for run in runs],
            [(each.place, size, each.first) for each, size in zip(first._kinds, sizes, strict=True)],
            numbers[plan.cost].reshape(shape).astype(np.int64) - 1,
            np.array([each.latency_s for each in operations.costs])[plan.cost].reshape(shape),
            narrowest_bytes_per_s(program),
            [operations.variant(step) for step in range(operations.repeats)],
            *hop_before(program),
        )

    def times_s(self, library: ChannelLibrary) -> FloatArray:
        """The time of each ring, in seconds."""
        numbers = np.zeros((4, len(self.kinds), len(self.calls)))
        for kind, message in enumerate(library.ring_messages(self.calls, self.kinds)):
            for column, number in enumerate(message):
                numbers[column, kind] = number
        launch_s, latency_s, wire_bytes, limit = numbers[:, self.kind]
        rates = np.minimum(self.narrowest_bytes_per_s[:, None], limit)
        durations_s = launch_s, wire_bytes / rates, self.route_s[..., None] + latency_s
        return last_end_s(durations_s, self.variants, self.before, self.lag)


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
