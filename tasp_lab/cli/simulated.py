"""What the simulator says of measured tables, again and again for other constants of the same profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.messages import Messages
from sim.simulation import simulate
from tasp_lab.arrays import FloatArray
from tasp_lab.calibrate import Case
from tasp_lab.library_rings import AROUND_RINGS, library_rings
from tasp_lab.library_schedules import library_schedule
from tasp_lab.machine import Machine, Transport
from tasp_lab.profile import Profile
from tasp_lab.schedule import Schedule
from tasp_lab.transport import Message


@dataclass(frozen=True)
class _Row:
    """One measurement's schedule on its machine, and the times known for the messages that a library made of it."""

    schedule: Schedule
    machine: Machine
    size: str
    known: dict[tuple[Message, ...], float] = field(default_factory=dict)

    def time_s(self, transport: Transport) -> float:
        """Predicted with this transport; not simulated again while it makes the same messages."""
        messages = self._messages(transport)
        if messages not in self.known:
            machine = replace(self.machine, transport=transport)
            self.known[messages] = float(simulate(self.schedule, machine, events=False).time_s)
        return self.known[messages]

    def _messages(self, transport: Transport) -> tuple[Message, ...]:
        """The different messages of the first step and of the last, which those between are like."""
        messages, steps = Messages(self.schedule, transport), self.schedule.steps
        return tuple(
            message for index in sorted({0, len(steps) - 1}) for message in messages.kinds(index, steps[index])[0]
        )


class Simulated:
    """Predicts all rows of the cases: schedules and topologies are built once, only the transport changes."""

    def __init__(self, profile: Profile, cases: Sequence[Case]) -> None:
        self._machines = {case.size: _member(profile, case.size) for case in cases}
        self._rows = [row for case in cases for row in self._rows_of(case)]

    def __call__(self, profile: Profile) -> FloatArray:
        """The predicted seconds of all rows, in their order."""
        transports = {size: _member(profile, size).transport for size in self._machines}
        return np.array([row.time_s(transports[row.size]) for row in self._rows])

    def _rows_of(self, case: Case) -> list[_Row]:
        machine = self._machines[case.size]
        rings = library_rings(machine.topology) if case.collective in AROUND_RINGS else None
        return [
            _Row(library_schedule(case.collective, machine.topology, row.size_bytes, rings), machine, case.size)
            for row in case.rows
        ]


def _member(profile: Profile, size: str) -> Machine:
    machine = profile.member(size, f"{profile.name}-{size}")
    assert machine is not None, "the sizes of cases are those of members"
    return machine
