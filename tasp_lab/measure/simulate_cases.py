"""Repeated simulation of measured tables with other constants of the same profile."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from sim.array.repeated import RepeatedRun
from tasp_lab.core.arrays import FloatArray
from tasp_lab.machines.profile import Profile
from tasp_lab.measure.fit.cases import Case
from tasp_lab.schedules.collectives.library_rings import AROUND_RINGS, library_rings, library_schedule


class Simulated:
    """Predict all rows of the cases; schedules and topologies are built once, only the library changes."""

    def __init__(self, profile: Profile, cases: Sequence[Case]) -> None:
        self._rows = [(case.size, run) for case in cases for run in _runs(profile, case)]

    def of_rows(self, rows: Sequence[int]) -> Simulated:
        """The prediction of some rows, by their places."""
        part = copy(self)
        part._rows = [self._rows[row] for row in rows]
        return part

    def __call__(self, profile: Profile) -> FloatArray:
        """The predicted seconds of all rows, in their order."""
        libraries = {size: profile.comm_library(size) for size in dict.fromkeys(size for size, _ in self._rows)}
        return np.array([run.time_s(libraries[size]) for size, run in self._rows])


def _runs(profile: Profile, case: Case) -> list[RepeatedRun]:
    """A run per row of a case."""
    machine = profile.member(case.size, f"{profile.name}-{case.size}")
    assert machine is not None, "the sizes of cases are those of members"
    topology, library = machine.topology, machine.comm_library
    rings = library_rings(topology) if case.collective in AROUND_RINGS else None
    return [
        RepeatedRun(library_schedule(case.collective, topology, row.size_bytes, rings), topology, library)
        for row in case.rows
    ]
