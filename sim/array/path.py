"""The critical path of a simulated program: what `tasp_lab.timeline.critical_path` finds, without a timeline.

    parts = critical_parts(run(schedule, machine))      # of communication alone

All members of a class act at the same times, so the path is one of classes: it is followed backwards through the edges
of the program, and only the operations on it become events.
"""

from __future__ import annotations

import numpy as np

from sim.array.engine import ArrayRun
from sim.array.quotient import Program
from sim.array.symmetry import firsts_of
from sim.array.timeline import EventBuilder
from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.dependencies import BLOCK, LANE
from tasp_lab.schedules.collectives.all_gather import RingSteps
from tasp_lab.timeline.critical_path import follow
from tasp_lab.timeline.events import Event


def critical_parts(run: ArrayRun) -> list[tuple[str, float]]:
    """The seconds of the critical path of a schedule without kernel calls, by what they were spent on."""
    assert run.schedule.task is None, "of communication alone"
    path = _Path(run)
    return [(what, float(seconds)) for what, seconds in follow(path.last(), path.previous, path.delivering)]


class _Path:
    """Finds the events on the path; each is known by the number of its operation."""

    def __init__(self, run: ArrayRun) -> None:
        self._run, self._record = run, run.record
        self._builder = EventBuilder(run.schedule, run.machine, run.program, run.record, explain=True)
        self._member = firsts_of(run.program.classes.of_operation)
        self._before, self._offset, self._cause = _edges(run.program)
        self._number: dict[Event, int] = {}

    def last(self) -> Event | None:
        """The event that ends last, of those the one that begins last."""
        record, kinds = self._record, self._run.program.kinds
        size = len(record.end_s)
        sent = np.flatnonzero((kinds == 0)[np.arange(size) % len(kinds)])
        if not len(sent):
            return None
        return self._event(int(sent[np.lexsort((sent, record.start_s[sent], record.end_s[sent]))[-1]]))

    def previous(self, event: Event) -> Event | None:
        """The previous event on its lane."""
        return self._latest(event, LANE)

    def delivering(self, event: Event) -> Event | None:
        """The last event that delivered a block of it."""
        return self._latest(event, BLOCK)

    def _latest(self, event: Event, cause: int) -> Event | None:
        number, count = self._number[event], self._run.program.plan.classes
        before = number - self._offset
        chosen = before[(self._cause == cause) & (before >= 0) & (before % count == self._before)]
        return self._event(int(chosen[np.argmax(self._record.end_s[chosen])])) if len(chosen) else None

    def _event(self, number: int) -> Event:
        schedule, derived = self._run.schedule, self._run.derived
        step, index = divmod(number, self._run.program.plan.classes)
        member = int(self._member[index])
        if derived is None:
            steps = schedule.steps
            assert isinstance(steps, RingSteps)
            lane, position = divmod(member, steps.rings.shape[1])
            source, destination = steps.rings[lane, [position, (position + 1) % steps.rings.shape[1]]].tolist()
        else:
            columns = derived.messages[:4]
            step, source, destination, lane = (int(column[member]) for column in columns)
        event = self._builder.send(step, (source, destination, lane), (number,), 0, number)
        self._number[event] = number
        return event


def _edges(program: Program) -> tuple[IntArray, IntArray, IntArray]:
    """The class before each edge of a program, how much higher the number after it is, and its cause."""
    plan = program.plan
    ends = np.diff(plan.rows["if_sent"])
    before = np.repeat(np.arange(plan.classes), ends)
    return before, plan.after["offset"].astype(np.int64), plan.after["cause"]
