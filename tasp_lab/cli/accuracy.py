"""The account of the error: measured tables beside what the simulator says of them.

A table is never used to fit what predicts it: constants of profiles are from documents or from other measurements.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from sim.messages import Messages
from sim.simulation import simulate
from tasp_lab.errors import ProfileError
from tasp_lab.explanation import critical_path, kind_of
from tasp_lab.library_rings import AROUND_RINGS, library_rings
from tasp_lab.library_schedules import library_schedule
from tasp_lab.machine import Machine
from tasp_lab.measurements import MeasuredTable, find_tables
from tasp_lab.profile import member
from tasp_lab.schedule import Schedule

MOST_EXPLAINED = 20_000
"""With more transfers the longest of the first messages stands for all, as if its sender were alone."""


@dataclass(frozen=True)
class RowAccuracy:
    """One size: what was measured and what is predicted, in seconds, and whether it counts."""

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
    """One table. `reason` says why it is out of scope; `dominant_rule` what took most of the predicted time."""

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

    def document(self) -> dict[str, object]:
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
    """The folder of the tables that tasp-lab brings along."""
    return Path(str(files("tasp_lab") / "measurements" / "tables"))


def account(paths: Sequence[Path] = ()) -> list[TableAccuracy]:
    """Every table in these files and folders beside its prediction; without any those that tasp-lab brings along.

    Raises `TableError` for a table that is broken.
    """
    return [judge(table) for table in find_tables(paths or [own_tables()])]


def judge(table: MeasuredTable) -> TableAccuracy:
    """One table beside its prediction, as far as there is one."""
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
        few = schedule.transfers <= MOST_EXPLAINED
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
    """What the longest of the first messages would take, in seconds, if it met only those of its sender."""
    step, topology = schedule.steps[0], machine.topology
    capacity = [float(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints]
    longest: list[tuple[str, float]] = []
    messages, kinds = Messages(schedule, machine.transport).kinds(0, step)
    for kind, message in enumerate(messages):
        at = int((kinds == kind).argmax())
        source = int(step.source[at])
        route = topology.route(source, int(step.destination[at]))
        sent = step.destination[step.source == source].tolist()
        users = Counter(each for peer in sent for each in topology.route(source, peer).constraints)
        share = {each: capacity[each] / users[each] for each in route.constraints}
        narrowest = min(share, key=lambda constraint: (share[constraint], constraint))
        most = message.most_bytes_per_s
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
    """The machine of a table, or why there is none: a table of a machine that cannot be does not stop the others."""
    try:
        return (member(table.profile) if table.profile else None), ""
    except ProfileError as error:
        return None, str(error)


def _mismatch(table: MeasuredTable, machine: Machine | None) -> str:
    """Why there is no prediction for a table that is complete."""
    if machine is None:
        return f"there is no profile {table.profile!r}"
    if table.ranks != machine.topology.world_size:
        return f"{table.profile} has {machine.topology.world_size} ranks, the table {table.ranks}"
    if table.ranks == 1:
        return "one rank sends nothing"
    return ""


def _out_of_scope(table: MeasuredTable) -> str:
    """Why the prediction is not for what was measured: what the table says, or an AllReduce that may be no ring."""
    if given := table.headers.get("out_of_scope"):
        return given
    if table.collective == "all_reduce" and table.headers.get("algorithm", "").casefold() != "ring":
        made = table.headers.get("algorithm", "rings, trees, NVLS or SHARP: the table does not say")
        return f"all-reduce by {made}; only `# algorithm: ring` is predicted"
    return ""
