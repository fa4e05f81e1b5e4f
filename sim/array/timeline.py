"""What a simulated program recorded, and its timeline: one event for each message and each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.array.max_min import SAME
from sim.array.operations import TRANSFER, Cost
from sim.array.quotient import Plan, Program
from sim.max_min import OWN_LIMIT
from tasp_lab.core.arrays import FloatArray, Int32Array, IntArray, Table
from tasp_lab.core.compiled import table
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import BLOCK, BUFFER, HOST, LANE, CallTable
from tasp_lab.schedule.messages import MessageDependencies, Messages
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import COMPUTE_LANE, CONTENTION, SEND, Event, Timeline, lasting

Bound = tuple[tuple[int, ...], float]
"""Bottlenecks: classes of constraints, none for the flow's own limit; and the seconds during which they applied."""


def times_table(operations: int) -> Table:
    """The times of each operation in seconds, and its last cause of waiting, -1: none; before the first event.

    `free_s` is when the previous operation on its lane had left, `there_s` when its last block was available.
    """
    times: Table = table(
        operations, free_s="f8", there_s="f8", start_s="f8", launched_s="f8", end_s="f8", waited_for="i4"
    )
    times["waited_for"] = -1
    return times


@dataclass(frozen=True, eq=False)
class Bounds:
    """The successive bottlenecks of each operation, by its number.

    Attributes
    ----------
    first : int array (operations + 1,), the range of each operation in the other arrays.
    bits, seconds : arrays (bounds,), bit k for pass k of its class, and for how long.
    """

    plan: Plan
    first: IntArray
    bits: IntArray
    seconds: FloatArray

    @classmethod
    def of_log(cls, plan: Plan, log: Table) -> Bounds:
        """The bounds in a log, see `sim.array.flows`."""
        log = log[np.argsort(log["number"], kind="stable")]
        first = np.searchsorted(log["number"], np.arange(plan.size + 1))
        return cls(plan, first, log["bottlenecks"], log["seconds"])

    def __getitem__(self, number: int) -> list[Bound]:
        first, bits, seconds = self._lists
        index, bounds = number % self.plan.classes, range(first[number], first[number + 1])
        return [(self._names(index, bits[at]), seconds[at]) for at in bounds]

    def items(self) -> Iterator[tuple[int, list[Bound]]]:
        """The operations that have bottlenecks, with these."""
        return ((number, self[number]) for number in np.flatnonzero(np.diff(self.first)).tolist())

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[float]]:
        """The arrays as lists, which are faster for single entries."""
        return self.first.tolist(), self.bits.tolist(), self.seconds.tolist()

    def _names(self, index: int, bits: int) -> tuple[int, ...]:
        return tuple([constraint for at, constraint in enumerate(self.plan.path(index)) if bits >> at & 1])


class Record:
    """The record of a program: the columns of `times_table`, and the bounds."""

    def __init__(self, times: Table, bounds: Bounds) -> None:
        self.free_s: FloatArray = times["free_s"]
        self.there_s: FloatArray = times["there_s"]
        self.start_s: FloatArray = times["start_s"]
        self.launched_s: FloatArray = times["launched_s"]
        self.end_s: FloatArray = times["end_s"]
        self.waited_for: Int32Array = times["waited_for"]
        self.bounds = bounds

    def times(self) -> tuple[FloatArray, ...]:
        """All times, in order."""
        return self.free_s, self.there_s, self.start_s, self.launched_s, self.end_s


Spent = tuple[tuple[str, float], ...]

_WAITED_FOR = {-1: "", LANE: "lane", BLOCK: "block", BUFFER: "buffer", HOST: "host"}


def timeline_of(
    schedule: Schedule,
    machine: Machine,
    program: Program,
    record: Record,
    derived: MessageDependencies | None,
    explain: bool = False,
) -> Timeline:
    """The timeline of a schedule, given the record of its program; `derived` is None for ring schedules."""
    builder = EventBuilder(schedule, machine, program, record, explain)
    if derived is None:
        events = list(builder.sends_of_rings())
    else:
        events = [*builder.sends(derived.messages), *builder.calls(derived.calls)]
    keys = np.array([(event.lane, event.rank, event.start_s, event.end_s) for event in events]).reshape(-1, 4)
    in_order = tuple(events[each] for each in np.lexsort(keys.T).tolist())
    return Timeline("predicted", schedule.name, machine.topology.name, schedule.world_size, in_order)


class EventBuilder:
    """Builds the events, step by step."""

    def __init__(self, schedule: Schedule, machine: Machine, program: Program, record: Record, explain: bool) -> None:
        self._schedule, self._topology, self._explain = schedule, machine.topology, explain
        self._machine = machine
        self._program, self._all_bounds = program, record.bounds
        self._class_of: list[int] = program.classes.of_operation.tolist()
        self._class_of_constraint = dict(
            zip(program.operations.constraints.tolist(), program.classes.of_resource.tolist(), strict=False)
        )  # hosts come after the constraints
        times: list[list[float]] = [each.tolist() for each in record.times()]
        self._free_s, self._there_s, self._start_s, self._launched_s, self._end_s = times
        self._waited_for = [_WAITED_FOR[each] for each in record.waited_for.tolist()]

    def sends(self, messages: Messages) -> Iterator[Event]:
        """The events of messages; operations are numbered messages first."""
        for number, row in zip(self._class_of, messages.rows(), strict=False):
            step, source, destination, lane, size_bytes, blocks = row
            yield self.send(step, (source, destination, lane), blocks, size_bytes, number)

    def sends_of_rings(self) -> Iterator[Event]:
        """The events of a schedule with one repeat per step; each message is of one block."""
        sizes: list[int] = self._schedule.block_bytes.tolist()
        for index, step in enumerate(self._schedule.steps):
            first = index * self._program.plan.classes
            for number, (*ends, block) in zip(self._class_of, step.rows(), strict=True):
                yield self.send(index, ends, (block,), sizes[block], first + number)

    def calls(self, calls: CallTable) -> Iterator[Event]:
        """The events of kernel calls, step by step; operations are numbered after the messages."""
        columns = (calls.step, calls.rank, calls.kernel, calls.block, calls.flops, calls.shape)
        parts = [self._machine.compute.parts(shape) for shape in calls.shapes] if self._explain else []
        rows = zip(*(column.tolist() for column in columns), strict=True)
        first_call = int((self._program.operations.kind == TRANSFER).sum())
        for operation, (step, rank, kernel, block, flops, shape) in enumerate(rows, start=first_call):
            number = self._class_of[operation]
            start_s, end_s, waited_for = self._start_s[number], self._end_s[number], self._waited_for[number]
            yield Event(
                rank=rank,
                lane=COMPUTE_LANE,
                step=step,
                kind=calls.kernels[kernel],
                peer=rank,
                block=block,
                bytes=0,
                start_s=start_s,
                end_s=end_s,
                bound_by="compute",
                waited_for="compute" if waited_for == "lane" else waited_for,
                flops=flops,
                spent=self._spent_by_call(number, rank, parts[shape]) if self._explain else (),
            )

    def _spent_by_call(
        self, number: int, rank: int, parts: Sequence[tuple[str, Number]]
    ) -> tuple[tuple[str, Number], ...]:
        of_rank = [(what, float(self._machine.call_s(seconds, rank))) for what, seconds in parts]
        return lasting([*self._waiting(number), *of_rank, *self._lost(number)])

    def send(self, step: int, ends: Sequence[int], blocks: Sequence[int], size_bytes: int, number: int) -> Event:
        """The event of a message, represented by operation `number` of the program."""
        source, destination, lane = ends
        cost = self._program.cost(number)
        bounds = self._bounds(number, source, destination)
        launch_s = self._launched_s[number] - self._start_s[number]
        wires = [(self._name(constraint, cost), seconds) for constraint, seconds in bounds.items()]
        rest = [("launch", launch_s), *wires, ("latency", cost.latency_s)]
        return Event(
            rank=source,
            lane=lane,
            step=step,
            kind=SEND,
            peer=destination,
            block=blocks[0],
            others=tuple(blocks[1:]),
            bytes=size_bytes,
            start_s=self._start_s[number],
            end_s=self._end_s[number],
            bound_by=self._bound_by(number, bounds, cost, launch_s),
            waited_for=self._waited_for[number],
            spent=lasting([*self._waiting(number), *rest]) if self._explain else (),
        )

    def _bounds(self, number: int, source: int, destination: int) -> dict[int, float]:
        """The seconds during which each constraint of a route was the bottleneck; ties go to the first constraint."""
        route = self._topology.route(source, destination).constraints
        by_constraint: dict[int, float] = {}
        for classes, seconds in self._all_bounds[number]:
            among = (each for each in route if self._class_of_constraint.get(each) in classes)
            first = min(among, default=OWN_LIMIT)
            by_constraint[first] = by_constraint.get(first, 0.0) + seconds
        if not by_constraint:  # the message takes less time than rounding leaves of the time at which it begins
            by_constraint[min(route, key=lambda each: self._topology.constraints[each].bandwidth_bytes_per_s)] = 0.0
        return by_constraint

    def _bound_by(self, number: int, bounds: dict[int, float], cost: Cost, launch_s: float) -> str:
        """The dominant share of a message's time; ties up to rounding go to the first constraint."""
        rounding_s = SAME * self._end_s[number]
        max_s = max(bounds.values())
        longest = min(constraint for constraint, seconds in bounds.items() if seconds >= max_s - rounding_s)
        if launch_s > max(max_s, cost.latency_s) + rounding_s:
            return "launch"
        return "latency" if cost.latency_s > max_s + rounding_s else self._name(longest, cost)

    def _name(self, constraint: int, cost: Cost) -> str:
        return cost.rule if constraint == OWN_LIMIT else self._topology.constraints[constraint].name

    def _lost(self, number: int) -> Spent:
        """The seconds that a call loses to messages, if any."""
        end_s = self._end_s[number]
        lost_s = end_s - self._start_s[number] - self._program.cost(number).launch_s
        return ((CONTENTION, lost_s),) if self._program.gpus and lost_s > SAME * end_s else ()

    def _waiting(self, number: int) -> Spent:
        """The seconds an operation waited for its block, then for the buffer or its host, after its lane was free."""
        free_s = self._free_s[number]
        there_s = max(free_s, self._there_s[number])
        last = "host" if self._waited_for[number] == "host" else "buffer"
        return ("waiting for block", there_s - free_s), (f"waiting for {last}", self._start_s[number] - there_s)
