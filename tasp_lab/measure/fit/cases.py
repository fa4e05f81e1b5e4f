"""Cases of a calibration: measured tables matched to members of a profile's family, and their prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

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
    def library(self) -> str:
        """The library with its version where the table states it, else ``auto``."""
        return self.table.headers.get("library", "auto")


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
    if table.collective == "all_reduce" and algorithm.casefold() != "ring":
        if not algorithm and choice.profile.generation and _domains(table, choice) == 1:
            return ""
        return f"all-reduce by {algorithm or 'rings, trees, NVLS or SHARP'}; if it used rings, give --algorithm ring"
    return ""


def _domains(table: MeasuredTable, choice: Choice) -> int:
    return choice.profile.system(_size(table, choice)).domains


def _case(table: MeasuredTable, choice: Choice) -> Case:
    reasons = [reason for reason in table.reason.split(", ") if reason not in ("", "no header 'profile'")]
    if reasons:
        raise TableError(f"{table.name}: {', '.join(reasons)}")
    assert table.collective is not None
    size = _size(table, choice)
    if not choice.profile.has(size):
        raise TableError(f"{table.name}: {choice.profile.name} has no size {size!r}, expected one like 8 or 2x8")
    ranks = choice.profile.machine(size).topology.world_size
    if table.ranks != ranks:
        raise TableError(f"{table.name}: {table.ranks} ranks, but {choice.profile.name}-{size} has {ranks}")
    least = ranks if table.collective != "sendrecv" else 1
    first = max(least, parse_size_bytes(table.headers.get("from_size_b", "1")))
    rows = tuple(row for row in table.rows if row.size_bytes >= first)
    if not rows:
        raise TableError(f"{table.name}: no row of {first} bytes or more")
    return Case(table, table.collective, size, rows)


def _size(table: MeasuredTable, choice: Choice) -> str:
    """The member's size: of the table's header, of the choice, or of the nodes in the log."""
    if table.machine:
        named = choose(table.machine)
        if named.profile.name != choice.profile.name:
            raise TableError(
                f"{table.name}: profile {table.profile!r}, expected one of the family {choice.profile.name!r}"
            )
        return named.size or choice.size or str(choice.profile.ranks_per_node)
    if choice.size:
        return choice.size
    return table.size


def measured(cases: Iterable[Case]) -> FloatArray:
    """The measured seconds of all rows of all cases."""
    return np.array([row.time_s for case in cases for row in case.rows])


def file_of(name: str) -> str:
    """The file name of a table, without its folders."""
    return name.rpartition("/")[2]


class Simulated:
    """Predict all rows of the cases; schedules and topologies are built once, only the library changes."""

    def __init__(self, profile: Profile, cases: Sequence[Case]) -> None:
        self._profile = profile
        self._schedules = [
            (_Member(case.size, case.library), schedule) for case in cases for schedule in _schedules(profile, case)
        ]
        self._use(range(len(self._schedules)))

    def _use(self, rows: Sequence[int]) -> None:
        """Predict these rows, together those that follow each other on machines of one size and library."""
        self._systems: dict[_Member, System] = {}
        self._runs: list[tuple[_Member, Machine, RepeatedRuns]] = []
        for member, group in groupby((self._schedules[row] for row in rows), key=itemgetter(0)):
            system = self._systems.setdefault(member, self._profile.system(member.size, library=member.library))
            numbers = self._profile.parameters.numbers
            machine = Machine(system.topology(numbers), system.comm_library(numbers))
            self._runs.append((member, machine, RepeatedRuns([schedule for _, schedule in group], machine)))

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


class _Member(NamedTuple):
    """A member of the family with a library."""

    size: str
    library: str


def _schedules(profile: Profile, case: Case) -> list[Schedule]:
    """The schedule of each row of a case, by the algorithm that the library chooses whatever its constants are."""
    machine = profile.build(profile.system(case.size, library=case.library))
    rings = library_rings(machine.topology) if case.collective in AROUND_RINGS else None
    algorithm = "ring" if case.table.headers.get("algorithm", "").casefold() == "ring" else ""
    return [library_call(case.collective, machine, row.size_bytes, rings, algorithm) for row in case.rows]
