"""Cases of a calibration: measured tables matched to members of a profile's family, and their prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from sim.array.repeated import RepeatedRuns
from sim.library_calls import library_call
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import TableError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.units import parse_size_bytes
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.parameters import Parameters
from tasp_lab.machines.profile import Profile
from tasp_lab.machines.system import System
from tasp_lab.measure.profiles import Choice, choose
from tasp_lab.measure.readers import MeasuredTable, Row
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.kinds import NcclTestsName
from tasp_lab.schedules.collectives.library_rings import AROUND_RINGS, library_rings


@dataclass(frozen=True)
class Case:
    """A measured table with its rows in use; `size` is that of the family's member, like ``2x8``."""

    table: MeasuredTable
    collective: NcclTestsName
    size: str
    rows: tuple[Row, ...]

    @property
    def member(self) -> tuple[str, str]:
        """The size, and the library with its version where the table states it, else ``auto``."""
        return self.size, self.table.headers.get("library", "auto")

    def schedules(self, profile: Profile) -> list[Schedule]:
        """The schedule of each row, by the algorithm that the library chooses whatever its constants are."""
        size, library = self.member
        machine = profile.build(profile.system(size, library=library))
        rings = library_rings(machine.topology) if self.collective in AROUND_RINGS else None
        algorithm = "ring" if self.table.headers.get("algorithm", "").casefold() == "ring" else ""
        return [library_call(self.collective, machine, row.size_bytes, rings, algorithm) for row in self.rows]


def cases_of(
    tables: Iterable[MeasuredTable], choice: Choice, *, by_rings: bool = False, progress: ProgressCallback = no_progress
) -> tuple[Case, ...]:
    """The tables as cases of a family.

    Parameters
    ----------
    tables : the size of each is that of its header, else of the choice, else of the nodes in the log.
    by_rings : whether AllReduce used rings; else only tables whose header states so are used, and those of one domain
        of a family whose library chooses as NCCL does.
    progress : called with each table that is left out.

    Raises `TableError` for a table that is incomplete, of another family or of another number of ranks, and
    `ProfileError` for a header with an unknown profile.
    """
    found = []
    for table in tables:
        for warning in table.warnings:
            progress(warning)
        if reason := _left_out(table, by_rings, choice):
            progress(f"{table.name}: left out, {reason}")
            continue
        if by_rings and table.collective == "all_reduce":
            table = replace(table, headers={**table.headers, "algorithm": "ring"})
        found.append(_case(table, choice))
    return tuple(found)


def _left_out(table: MeasuredTable, by_rings: bool, choice: Choice) -> str:
    if reason := table.headers.get("out_of_scope"):
        return reason
    algorithm = table.headers.get("algorithm", "ring" if by_rings else "")
    if table.collective != "all_reduce" or algorithm.casefold() == "ring":
        return ""
    if not algorithm and choice.profile.generation and choice.profile.system(_size(table, choice)).domains == 1:
        return ""
    return f"all-reduce by {algorithm or 'rings, trees, NVLS or SHARP'}; if it used rings, give --algorithm ring"


def _case(table: MeasuredTable, choice: Choice) -> Case:
    if reasons := table.reasons:
        raise TableError(f"{table.name}: {', '.join(reasons)}")
    assert table.collective is not None, "a table without a reason has a collective"
    profile, size = choice.profile, _size(table, choice)
    if not profile.has(size):
        raise TableError(f"{table.name}: {profile.name} has no size {size!r}, expected one like 8 or 2x8")
    ranks = profile.machine(size).topology.world_size
    if table.ranks != ranks:
        raise TableError(f"{table.name}: {table.ranks} ranks, but {profile.name}-{size} has {ranks}")
    # of fewer bytes than ranks, blocks would be empty
    least = ranks if table.collective != "sendrecv" else 1
    first = max(least, parse_size_bytes(table.headers.get("from_size_b", "1")))
    rows = tuple(row for row in table.rows if row.size_bytes >= first)
    if not rows:
        raise TableError(f"{table.name}: no row of {first} bytes or more")
    return Case(table, table.collective, size, rows)


def _size(table: MeasuredTable, choice: Choice) -> str:
    """The member's size: of the table's header, of the choice, or of the nodes in the log."""
    if not table.machine:
        return choice.size or table.size
    named = choose(table.machine)
    if named.profile.name != choice.profile.name:
        family = choice.profile.name
        raise TableError(f"{table.name}: profile {table.profile!r}, expected one of the family {family!r}")
    return named.size or choice.size or str(choice.profile.ranks_per_node)


def measured(cases: Iterable[Case]) -> FloatArray:
    """The measured seconds of all rows of all cases."""
    return np.array([row.time_s for case in cases for row in case.rows])


class Simulated:
    """Predict all rows of the cases; schedules and topologies are built once, only the library changes."""

    def __init__(self, profile: Profile, cases: Sequence[Case]) -> None:
        self._profile = profile
        self._schedules = [(case.member, schedule) for case in cases for schedule in case.schedules(profile)]
        self._use(range(len(self._schedules)))

    def _use(self, rows: Sequence[int]) -> None:
        """Predict these rows, together those that follow each other on machines of one size and library."""
        self._systems: dict[tuple[str, str], System] = {}
        self._runs: list[tuple[tuple[str, str], Machine, RepeatedRuns]] = []
        numbers = self._profile.parameters.numbers
        for member, group in groupby((self._schedules[row] for row in rows), key=lambda each: each[0]):
            size, library = member
            system = self._systems.setdefault(member, self._profile.system(size, library=library))
            machine = Machine(system.topology(numbers), system.comm_library(numbers))
            self._runs.append((member, machine, RepeatedRuns.of([schedule for _, schedule in group], machine)))

    def of_rows(self, rows: Sequence[int]) -> Simulated:
        """The prediction of some rows, by their places."""
        part = copy(self)
        part._use(rows)
        return part

    def __call__(self, parameters: Parameters) -> FloatArray:
        """The predicted seconds of all rows, in their order."""
        libraries = {member: system.comm_library(parameters.numbers) for member, system in self._systems.items()}
        changed = ((runs, replace(machine, comm_library=libraries[member])) for member, machine, runs in self._runs)
        return np.concatenate([runs.times_s(machine) for runs, machine in changed])
