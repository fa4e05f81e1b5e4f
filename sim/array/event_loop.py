"""The event loop: runs a program and records the times of each class.

An instant comprises all events at one time up to rounding: those due within a relative tolerance of `SAME` of the
first, including those that they cause. At its end, hosts launch and the rates of the network are updated.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from sim.array.flows import Bound, Flow, Flows
from sim.array.max_min import SAME, FlowDemand
from sim.array.operations import BLOCK, LANE
from sim.array.quotient import Program

_ARRIVED, _LAUNCHED, _SENT = range(3)
"""Kinds of events, in processing order within an instant."""


@dataclass
class Record:
    """The times of each operation of a program, in seconds, by its number; and its last cause of waiting, -1: none.

    `free_s` is when the previous operation on its lane had left, `there_s` when its last block was available. `bounds`
    are the successive bottlenecks of its flow.
    """

    free_s: list[float]
    there_s: list[float]
    start_s: list[float]
    launched_s: list[float]
    end_s: list[float]
    waited_for: list[int]
    bounds: dict[int, list[Bound]] = field(default_factory=dict)

    @classmethod
    def of(cls, size: int) -> Record:
        free_s, there_s, start_s, launched_s, end_s = ([0.0] * size for _ in range(5))
        return cls(free_s, there_s, start_s, launched_s, end_s, [-1] * size)

    def note(self, number: int, cause: int, now_s: float) -> None:
        """Record the end of a wait. A buffer that is freed no later than it is needed does not count as a wait."""
        if cause == LANE:
            self.free_s[number] = now_s
        elif cause == BLOCK:
            self.there_s[number] = now_s
        elif now_s <= max(self.free_s[number], self.there_s[number]):
            return
        self.waited_for[number] = cause

    def times(self) -> tuple[list[float], ...]:
        """All times, in order."""
        return self.free_s, self.there_s, self.start_s, self.launched_s, self.end_s


class Run:
    """One simulation of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._classes = len(program.kinds)
        self._size = self._classes * program.operations.repeats
        rows = program.waits[np.minimum(np.arange(program.operations.repeats), len(program.waits) - 1)]
        self._waits: list[int] = rows.ravel().tolist()
        self._flows = Flows(program.capacity_bytes_per_s)
        self._flow: dict[int, Flow] = {}
        self._due: list[tuple[float, int, int]] = []
        self._asking: dict[int, list[tuple[float, int, int]]] = {}
        self._busy: set[int] = set()
        self._ready: list[int] = []
        self.record = Record.of(self._size)

    def run(self) -> Record:
        """Run the program to its end."""
        self._ready = [number for number, waits in enumerate(self._waits) if not waits]
        self._begin_ready(0.0)
        self._settle(0.0)
        while (now_s := self._next_s()) is not None:
            while self._due and self._due[0][0] <= now_s * (1 + SAME):
                self._take_due(now_s)
            self._settle(now_s)
        assert not any(self._waits), "every operation began"
        return self.record

    def _next_s(self) -> float | None:
        """The time of the next event; None if there is none."""
        while self._due and self._is_outdated(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def _is_outdated(self, due_s: float, what: int, number: int) -> bool:
        """Whether the event is the end of a flow whose rate has changed since, or which has ended."""
        return what == _SENT and ((flow := self._flow.get(number)) is None or flow.finish_s != due_s)

    def _take_due(self, now_s: float) -> None:
        """Process the events that are due now, and start the operations that they release."""
        due = []
        while self._due and self._due[0][0] <= now_s * (1 + SAME):
            due.append(heapq.heappop(self._due))
        due.sort(key=lambda each: each[1:])
        for due_s, what, number in due:
            if what == _ARRIVED:
                self._arrive(number, now_s)
            elif what == _LAUNCHED:
                self._launched(number, now_s)
            elif not self._is_outdated(due_s, what, number):
                self._sent(self._flow[number], now_s)
        self._begin_ready(now_s)

    def _settle(self, now_s: float) -> None:
        for host in [host for host, asking in self._asking.items() if asking and host not in self._busy]:
            self._busy.add(host)
            number = heapq.heappop(self._asking[host])[2]
            heapq.heappush(self._due, (now_s + self._program.cost(number).launch_s, _LAUNCHED, number))
        for flow in self._flows.settle(now_s):
            heapq.heappush(self._due, (flow.finish_s, _SENT, flow.number))

    def _begin_ready(self, now_s: float) -> None:
        """Start operations that wait for nothing; those that take no time complete at once."""
        while self._ready:
            ready, self._ready = self._ready, []
            for number in ready:
                self._begin(number, now_s)

    def _begin(self, number: int, now_s: float) -> None:
        self.record.start_s[number] = now_s
        launch_s = self._program.cost(number).launch_s
        host = self._program.hosts[number % self._classes]
        if not launch_s:
            self._launched(number, now_s)
        elif host < 0:
            heapq.heappush(self._due, (now_s + launch_s, _LAUNCHED, number))
        else:
            asks = (now_s, self._program.lanes[number % self._classes], number)
            heapq.heappush(self._asking.setdefault(host, []), asks)

    def _launched(self, number: int, now_s: float) -> None:
        self.record.launched_s[number] = now_s
        cost = self._program.cost(number)
        if cost.launch_s:
            self._busy.discard(self._program.hosts[number % self._classes])
        if not cost.wire_bytes:
            self._follow(self._program.after_sent, number, now_s)
            self._arrive(number, now_s)
            return
        traffic = FlowDemand(self._program.paths[number % self._classes], cost.max_bytes_per_s)
        self._flow[number] = flow = Flow(number, traffic, cost.wire_bytes)
        self._flows.begin(flow)

    def _sent(self, flow: Flow, now_s: float) -> None:
        number = flow.number
        del self._flow[number]
        flow.end(now_s)
        self._flows.end(flow)
        self.record.bounds[number] = flow.bounds
        self._follow(self._program.after_sent, number, now_s)
        heapq.heappush(self._due, (now_s + self._program.cost(number).latency_s, _ARRIVED, number))

    def _arrive(self, number: int, now_s: float) -> None:
        self.record.end_s[number] = now_s
        self._follow(self._program.after_arrived, number, now_s)

    def _follow(self, after: list[list[tuple[int, int]]], number: int, now_s: float) -> None:
        """Release one dependency of each follower."""
        for offset, cause in after[number % self._classes]:
            follower = number + offset
            if follower >= self._size:
                continue
            self.record.note(follower, cause, now_s)
            self._waits[follower] -= 1
            if not self._waits[follower]:
                self._ready.append(follower)
