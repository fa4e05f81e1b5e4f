"""Repeated simulation of measured tables with other constants of the same profile."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from operator import itemgetter

import numpy as np

from sim.array.repeated import RepeatedRuns
from tasp_lab.core.arrays import FloatArray
from tasp_lab.machines.parameters import Parameters
from tasp_lab.machines.profile import Profile
from tasp_lab.machines.system import System
from tasp_lab.measure.fit.cases import Case
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.library_calls import library_schedule
from tasp_lab.schedules.collectives.library_rings import AROUND_RINGS, library_rings


class Simulated:
    """Predict all rows of the cases; schedules and topologies are built once, only the library changes."""

    def __init__(self, profile: Profile, cases: Sequence[Case]) -> None:
        self._profile = profile
        self._schedules = [(case.size, schedule) for case in cases for schedule in _schedules(profile, case)]
        self._use(range(len(self._schedules)))

    def _use(self, rows: Sequence[int]) -> None:
        """Predict these rows, together those that follow each other on machines of one size."""
        self._systems: dict[str, System] = {}
        self._runs: list[tuple[str, RepeatedRuns]] = []
        for size, group in groupby((self._schedules[row] for row in rows), key=itemgetter(0)):
            system = self._systems.setdefault(size, self._profile.system(size))
            numbers = self._profile.parameters.numbers
            topology, library = system.topology(numbers), system.comm_library(numbers)
            self._runs.append((size, RepeatedRuns([schedule for _, schedule in group], topology, library)))

    def of_rows(self, rows: Sequence[int]) -> Simulated:
        """The prediction of some rows, by their places."""
        part = copy(self)
        part._use(rows)
        return part

    def __call__(self, parameters: Parameters) -> FloatArray:
        """The predicted seconds of all rows, in their order."""
        libraries = {size: system.comm_library(parameters.numbers) for size, system in self._systems.items()}
        return np.concatenate([runs.times_s(libraries[size]) for size, runs in self._runs])


def _schedules(profile: Profile, case: Case) -> list[Schedule]:
    """The schedule of each row of a case."""
    topology = profile.system(case.size).topology(profile.parameters.numbers)
    rings = library_rings(topology) if case.collective in AROUND_RINGS else None
    return [library_schedule(case.collective, topology, row.size_bytes, rings) for row in case.rows]
