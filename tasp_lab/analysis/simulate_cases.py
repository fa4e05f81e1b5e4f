"""Repeated simulation of measured tables with other constants of the same profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.messages import Messages
from sim.simulate import simulate
from tasp_lab.arrays import FloatArray
from tasp_lab.calibration.cases import Case
from tasp_lab.collectives.library_calls import library_schedule
from tasp_lab.collectives.library_rings import AROUND_RINGS, library_rings
from tasp_lab.libraries.library import Message
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.machines.profile import Profile
from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True)
class _Row:
    """The schedule of one measurement on its machine, and the known times by the messages of a library."""

    schedule: Schedule
    machine: Machine
    size: str
    known: dict[tuple[Message, ...], float] = field(default_factory=dict)

    def time_s(self, comm_library: CommLibrary) -> float:
        """The predicted time with this library, in seconds; simulated once per set of messages."""
        messages = self._messages(comm_library)
        if messages not in self.known:
            machine = replace(self.machine, comm_library=comm_library)
            self.known[messages] = float(simulate(self.schedule, machine, events=False).time_s)
        return self.known[messages]

    def _messages(self, comm_library: CommLibrary) -> tuple[Message, ...]:
        """The distinct messages of the first and the last step; the steps between have the same ones."""
        messages, steps = Messages(self.schedule, comm_library), self.schedule.steps
        return tuple(
            message for index in sorted({0, len(steps) - 1}) for message in messages.kinds(index, steps[index])[0]
        )


class Simulated:
    """Predict all rows of the cases; schedules and topologies are built once, only the library changes."""

    def __init__(self, profile: Profile, cases: Sequence[Case]) -> None:
        self._machines = {case.size: _member(profile, case.size) for case in cases}
        self._rows = [row for case in cases for row in self._rows_of(case)]

    def __call__(self, profile: Profile) -> FloatArray:
        """The predicted seconds of all rows, in their order."""
        libraries = {size: _member(profile, size).comm_library for size in self._machines}
        return np.array([row.time_s(libraries[row.size]) for row in self._rows])

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
