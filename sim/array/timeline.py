"""The timeline of a simulated program: one event for each transfer and each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from sim.array.event_loop import Record
from sim.array.max_min import SAME
from sim.array.operations import BLOCK, BUFFER, LANE, Cost
from sim.array.quotient import Program
from sim.max_min import OWN_LIMIT
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import COMPUTE_LANE, SEND, Event, Timeline
from tasp_lab.workload.kernel_calls import Call

Spent = tuple[tuple[str, float], ...]

_WAITED_FOR = {-1: "", LANE: "lane", BLOCK: "block", BUFFER: "buffer"}


def timeline_of(
    schedule: Schedule, machine: Machine, program: Program, record: Record, explain: bool = False
) -> Timeline:
    """The timeline of a schedule, given the record of its program."""
    events = [*_EventBuilder(schedule, machine, program, record, explain).events()]
    keys = np.array([(event.lane, event.rank, event.start_s, event.end_s) for event in events]).reshape(-1, 4)
    in_order = tuple(events[each] for each in np.lexsort(keys.T).tolist())
    return Timeline("predicted", schedule.name, machine.topology.name, schedule.world_size, in_order)


class _EventBuilder:
    """Builds the events, step by step."""

    def __init__(self, schedule: Schedule, machine: Machine, program: Program, record: Record, explain: bool) -> None:
        self._schedule, self._topology, self._explain = schedule, machine.topology, explain
        self._program, self._record = program, record
        self._class_of: list[int] = program.classes.of_operation.tolist()
        self._class_of_constraint = dict(
            zip(program.operations.constraints.tolist(), program.classes.of_resource.tolist(), strict=False)
        )  # hosts come after the constraints
        self._sizes: list[int] = schedule.block_bytes.tolist()

    def events(self) -> Iterator[Event]:
        """All events, step by step. Operations are numbered transfers first, then calls."""
        classes, repeated = len(self._program.kinds), self._program.operations.repeats > 1
        sent, called = 0, self._schedule.transfers
        for index, step in enumerate(self._schedule.steps):
            first, offset = (0, index * classes) if repeated else (sent, 0)
            for operation, row in enumerate(step.rows(), start=first):
                yield self._send(index, row, offset + self._class_of[operation])
            for operation, call in enumerate(step.calls, start=called):
                yield self._call(index, call, self._class_of[operation])
            sent, called = sent + len(step), called + len(step.calls)

    def _send(self, index: int, row: tuple[int, int, int, int], number: int) -> Event:
        """The event of a transfer, represented by operation `number` of the program."""
        (source, destination, lane, block), record = row, self._record
        cost = self._program.cost(number)
        bounds = self._bounds(number, source, destination)
        launch_s = record.launched_s[number] - record.start_s[number]
        wires = [(self._name(constraint, cost), seconds) for constraint, seconds in bounds.items()]
        rest = [("launch", launch_s), *wires, ("latency", cost.latency_s)]
        return Event(
            rank=source,
            lane=lane,
            step=index,
            kind=SEND,
            peer=destination,
            block=block,
            bytes=self._sizes[block],
            start_s=record.start_s[number],
            end_s=record.end_s[number],
            bound_by=self._bound_by(number, bounds, cost, launch_s),
            waited_for=_WAITED_FOR[record.waited_for[number]],
            spent=(*self._waiting(number), *_lasting(rest)) if self._explain else (),
        )

    def _call(self, index: int, call: Call, number: int) -> Event:
        """The event of a kernel call."""
        assert self._schedule.task is not None, "a schedule with calls has a task"
        start_s, end_s = self._record.start_s[number], self._record.end_s[number]
        cause = self._record.waited_for[number]
        return Event(
            rank=call.rank,
            lane=COMPUTE_LANE,
            step=index,
            kind=self._schedule.call_kind,
            peer=call.rank,
            block=int(self._schedule.task.sides(call)[0][0]),
            bytes=0,
            start_s=start_s,
            end_s=end_s,
            bound_by="compute",
            waited_for="compute" if cause == LANE else _WAITED_FOR[cause],
            flops=self._schedule.call_flops(call),
            spent=(*self._waiting(number), ("compute", end_s - start_s)) if self._explain else (),
        )

    def _bounds(self, number: int, source: int, destination: int) -> dict[int, float]:
        """The seconds during which each constraint of a route was the bottleneck; ties go to the first constraint."""
        route = self._topology.route(source, destination).constraints
        found: dict[int, float] = {}
        for classes, seconds in self._record.bounds[number]:
            among = (each for each in route if self._class_of_constraint.get(each) in classes)
            first = min(among, default=OWN_LIMIT)
            found[first] = found.get(first, 0.0) + seconds
        return found

    def _bound_by(self, number: int, bounds: dict[int, float], cost: Cost, launch_s: float) -> str:
        """The dominant share of a transfer's time; ties up to rounding go to the first constraint."""
        rounding_s = SAME * self._record.end_s[number]
        max_s = max(bounds.values())
        longest = min(constraint for constraint, seconds in bounds.items() if seconds >= max_s - rounding_s)
        if launch_s > max(max_s, cost.latency_s) + rounding_s:
            return "launch"
        return "latency" if cost.latency_s > max_s + rounding_s else self._name(longest, cost)

    def _name(self, constraint: int, cost: Cost) -> str:
        return cost.rule if constraint == OWN_LIMIT else self._topology.constraints[constraint].name

    def _waiting(self, number: int) -> Spent:
        """The seconds an operation waited for its block, then for the buffer, after its lane was free."""
        record = self._record
        free_s = record.free_s[number]
        there_s = max(free_s, record.there_s[number])
        waited_s = ("waiting for block", there_s - free_s), ("waiting for buffer", record.start_s[number] - there_s)
        return tuple(_lasting(waited_s))


def _lasting(spent: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    return ((what, seconds) for what, seconds in spent if seconds)
