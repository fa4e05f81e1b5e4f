"""The accuracy report: measured tables beside their predictions.

A table is never used to fit the constants that predict it: these are from documents or from other measurements.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import overload

import numpy as np

from sim.messages import Messages
from sim.simulate import simulate
from tasp_lab.analysis.provenance import Provenance, machine_constants, machine_inputs, table_inputs
from tasp_lab.analysis.report import Report, flat
from tasp_lab.collectives.library_calls import library_schedule
from tasp_lab.collectives.library_rings import AROUND_RINGS, library_rings
from tasp_lab.errors import ProfileError, TableError
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.profile_files import member
from tasp_lab.measurements import MeasuredTable, find_tables
from tasp_lab.progress import ProgressCallback, no_progress
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.tables import Part, Table
from tasp_lab.timeline.critical_path import critical_path, kind_of

MAX_EXPLAINED = 20_000
"""With more transfers the longest of the first messages stands for all, as if its sender were alone."""


@dataclass(frozen=True)
class RowAccuracy:
    """The measured and the predicted time of one size, in seconds, and whether the row counts."""

    size_bytes: int
    measured_s: float
    predicted_s: float
    in_scope: bool

    @property
    def relative_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class TableAccuracy:
    """One table; `reason` it is out of scope, if it is, and the `dominant_rule`: the largest part of the time."""

    table: MeasuredTable
    reason: str
    rows: tuple[RowAccuracy, ...]
    dominant_rule: str = ""

    @property
    def in_scope(self) -> bool:
        """Whether its errors count."""
        return not self.reason and len(self.errors) > 0

    @property
    def errors(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Relative errors of the rows that count, an array (rows,)."""
        return np.array([row.relative_error for row in self.rows if row.in_scope])

    def to_dict(self) -> dict[str, object]:
        """The table for a script; errors are null where there is nothing to compare."""
        errors = self.errors
        known = len(errors) > 0
        return {
            "file": self.table.name,
            "profile": self.table.profile,
            "collective": self.table.collective,
            "ranks": self.table.ranks,
            "source": self.table.source,
            "in_scope": self.in_scope,
            "reason": self.reason,
            "mean_relative_error": float(abs(errors).mean()) if known else None,
            "worst_relative_error": float(abs(errors).max()) if known else None,
            "bias": float(errors.mean()) if known else None,
            "dominant_rule": self.dominant_rule or None,
            "rows": [
                {
                    "size_bytes": row.size_bytes,
                    "measured_s": row.measured_s,
                    "predicted_s": row.predicted_s,
                    "relative_error": row.relative_error,
                    "in_scope": row.in_scope,
                }
                for row in self.rows
            ],
        }


def own_tables() -> Path:
    """The folder of the tables that come with tasp-lab."""
    return Path(str(files("tasp_lab") / "measurements" / "tables"))


@dataclass(frozen=True, repr=False)
class AccuracyReport(Report, Sequence[TableAccuracy]):
    """Measured tables beside their predictions, a sequence of `TableAccuracy`."""

    tables: tuple[TableAccuracy, ...]
    provenance: Provenance

    @overload
    def __getitem__(self, index: int) -> TableAccuracy: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TableAccuracy, ...]: ...
    def __getitem__(self, index: int | slice) -> TableAccuracy | tuple[TableAccuracy, ...]:
        return self.tables[index]

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def median_relative_error(self) -> float | None:
        """The median of the mean errors of the tables in scope; None without any."""
        means = [float(abs(table.errors).mean()) for table in self.tables if table.in_scope]
        return median(means) if means else None

    def to_dict(self) -> dict[str, object]:
        return {
            "median_relative_error": self.median_relative_error,
            "tables": [table.to_dict() for table in self.tables],
            "provenance": self.provenance.to_dict(),
        }

    def records(self) -> list[dict[str, object]]:
        """A row per table."""
        return [flat(table.to_dict()) for table in self.tables]

    def parts(self) -> list[Part]:
        compared, others = [t for t in self.tables if t.in_scope], [t for t in self.tables if not t.in_scope]
        parts: list[Part] = []
        if compared:
            parts.append(Table("predicted over measured", _COLUMNS, [_cells(table) for table in compared], _TEXTS))
        if others:
            left_out = [(Path(table.table.name).name, table.reason) for table in others]
            parts.append(Table("not compared", ("table", "reason"), left_out, (0, 1)))
        if compared:
            parts.append(f"median of the mean errors of {len(compared)} tables: {self.median_relative_error:.1%}")
        return [*parts] if compared else [*parts, "no table to compare"]


_COLUMNS = ("table", "profile", "collective", "ranks", "sizes", "mean error", "worst", "bias", "mostly")
_TEXTS = (0, 1, 2, 8)


def _cells(table: TableAccuracy) -> tuple[str, ...]:
    return (
        Path(table.table.name).name,
        str(table.table.profile),
        str(table.table.collective),
        str(table.table.ranks),
        str(len(table.errors)),
        f"{abs(table.errors).mean():.1%}",
        f"{abs(table.errors).max():.1%}",
        f"{table.errors.mean():+.1%}",
        table.dominant_rule,
    )


def accuracy(*paths: Path | str, progress: ProgressCallback = no_progress) -> AccuracyReport:
    """Compare measured tables with their predictions.

    Parameters
    ----------
    paths : CSV tables, logs of nccl-tests, and folders of them; the tables of tasp-lab if none is given.
    progress : called with the name of each table.

    Raises `TableError` for a table that cannot be read, and if no table can be compared.
    """
    files = [Path(path) for path in paths]
    tables = []
    for table in find_tables(files or [own_tables()]):
        progress(Path(table.name).name)
        tables.append(judge(table))
    if not any(table.rows for table in tables):
        raise TableError(_nothing_to_compare(files, tables))
    return AccuracyReport(tuple(tables), _provenance(tables))


def _provenance(tables: Sequence[TableAccuracy]) -> Provenance:
    """The tables and their machines are the inputs; constants have the names of their machines before them."""
    machines = {}
    for each in tables:
        machine = _machine(each.table)[0] if each.rows else None
        if machine is not None:
            machines[str(each.table.profile)] = machine
    inputs = {
        "tables": [table_inputs(each.table) for each in tables],
        "machines": {name: machine_inputs(machine, compute=False) for name, machine in machines.items()},
    }
    families = {machine.constants: name.partition("-")[0] for name, machine in machines.items()}
    constants = [each for stated, name in families.items() for each in machine_constants(stated, f"{name}: ")]
    return Provenance(inputs, tuple(constants), ("array", "simpy"))


def _nothing_to_compare(paths: Sequence[Path], tables: Sequence[TableAccuracy]) -> str:
    if not tables:
        names = ", ".join(map(str, paths))
        return f"{names}: no table in it, expected CSV tables (.csv) or logs of nccl-tests (.log, .out, .txt)"
    others = f" (and {len(tables) - 1} other tables)" * (len(tables) > 1)
    return f"{tables[0].table.name}: nothing to compare: {tables[0].reason}{others}"


def judge(table: MeasuredTable) -> TableAccuracy:
    """A table beside its prediction, if there is one."""
    machine, unknown = _machine(table)
    reason = table.reason or unknown or _mismatch(table, machine) or _out_of_scope(table)
    if reason:
        return TableAccuracy(table, reason, ())
    assert machine is not None, "a table in scope has a machine"
    assert table.collective is not None, "a table in scope has a collective"
    rings = library_rings(machine.topology) if table.collective in AROUND_RINGS else None
    rows: list[RowAccuracy] = []
    rules: defaultdict[str, float] = defaultdict(float)
    for size_bytes, measured_s in table.rows:
        if size_bytes < machine.topology.world_size and table.collective != "sendrecv":
            continue
        schedule = library_schedule(table.collective, machine.topology, size_bytes, rings)
        few = schedule.transfers <= MAX_EXPLAINED
        timeline = simulate(schedule, machine, explain=few, events=few)
        counts = size_bytes >= table.from_size_bytes
        rows.append(RowAccuracy(size_bytes, measured_s, float(timeline.time_s), counts))
        if not counts:
            continue
        parts = critical_path(timeline) if few else message_parts(schedule, machine)
        whole_s = sum(float(seconds) for _, seconds in parts)
        for what, seconds in parts:
            rules[kind_of(what, machine.topology)] += float(seconds) / whole_s
    if not rules:
        return TableAccuracy(table, "no size that counts", tuple(rows))
    return TableAccuracy(table, "", tuple(rows), max(rules, key=lambda rule: rules[rule]))


def message_parts(schedule: Schedule, machine: Machine) -> list[tuple[str, float]]:
    """The parts of the time of the longest of the first messages, in seconds, beside those of its sender alone."""
    step, topology = schedule.steps[0], machine.topology
    capacity = [float(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints]
    longest: list[tuple[str, float]] = []
    messages, kinds = Messages(schedule, machine.comm_library).kinds(0, step)
    for kind, message in enumerate(messages):
        at = int((kinds == kind).argmax())
        source = int(step.source[at])
        route = topology.route(source, int(step.destination[at]))
        sent = step.destination[step.source == source].tolist()
        users = Counter(each for peer in sent for each in topology.route(source, peer).constraints)
        share = {each: capacity[each] / users[each] for each in route.constraints}
        narrowest = min(share, key=lambda constraint: (share[constraint], constraint))
        most = message.max_bytes_per_s
        limited = most is not None and most < share[narrowest]
        rate = float(most) if most is not None and limited else share[narrowest]
        what = message.rule if limited else topology.constraints[narrowest].name
        parts = [
            ("launch", float(message.launch_s)),
            (what, float(message.wire_bytes) / rate),
            ("latency", float(message.latency_s + route.latency_s)),
        ]
        longest = max(longest, parts, key=lambda each: sum(seconds for _, seconds in each))
    return longest


def _machine(table: MeasuredTable) -> tuple[Machine | None, str]:
    """The machine of a table, or the reason why there is none; an impossible machine does not stop other tables."""
    try:
        return (member(table.profile) if table.profile else None), ""
    except ProfileError as error:
        return None, str(error)


def _mismatch(table: MeasuredTable, machine: Machine | None) -> str:
    """The reason why a complete table has no prediction; empty if it has one."""
    if machine is None:
        return f"there is no profile {table.profile!r}"
    if table.ranks != machine.topology.world_size:
        return f"{table.profile} has {machine.topology.world_size} ranks, the table {table.ranks}"
    if table.ranks == 1:
        return "one rank sends nothing"
    return ""


def _out_of_scope(table: MeasuredTable) -> str:
    """The reason why a table is out of scope: its own header, or an AllReduce that may not be a ring."""
    if given := table.headers.get("out_of_scope"):
        return given
    if table.collective == "all_reduce" and table.headers.get("algorithm", "").casefold() != "ring":
        made = table.headers.get("algorithm", "rings, trees, NVLS or SHARP: the table does not say")
        return f"all-reduce by {made}; only `# algorithm: ring` is predicted"
    return ""
