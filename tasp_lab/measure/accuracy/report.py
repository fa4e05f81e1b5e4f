"""The accuracy report of tables of every kind, with the share of measured times inside their intervals by error class.

The interval of a row uses the errors of all sources but its own, and of a cloud without all of its provider.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, get_args, overload

from tasp_lab.core.errors import TableError
from tasp_lab.core.progress import CountCallback, ProgressCallback, no_progress, on_one_line
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Formats, Part, Table
from tasp_lab.core.workers import in_order, processes
from tasp_lab.machines.libraries.nccl_tuning import Generation
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import FEW_SAMPLES, NO_SAMPLES, Sampling
from tasp_lab.measure.accuracy.collective import evaluate_collective
from tasp_lab.measure.accuracy.decisions import decision_parts, decisions_of, span_of, table_pairs
from tasp_lab.measure.accuracy.kernel import evaluate_kernel
from tasp_lab.measure.accuracy.layer import LayerEvaluator
from tasp_lab.measure.accuracy.table_accuracy import (
    CLOSE,
    Kind,
    MeasuredRow,
    TableAccuracy,
    is_inside,
    machine_of,
    machines_of,
    on_profile,
    summary,
)
from tasp_lab.measure.fit.cases import choose
from tasp_lab.measure.inputs import left_out_with, table_inputs
from tasp_lab.measure.readers import COLLECTIVES, AnyTable, KernelTable, LayerTable, MeasuredTable, find_all_tables
from tasp_lab.measure.scores import mean
from tasp_lab.prediction.provenance import Provenance, machine_constants, machine_inputs
from tasp_lab.prediction.residuals import residual_of


def coverage_of(tables: Iterable[TableAccuracy]) -> list[dict[str, Any]]:
    """By regime, and of all together where there are several: ``rows`` that count, the share of them ``inside`` their
    intervals of 90 %, the median ``position`` of a measured time in its interval, from 0 at its low end to 1 at its
    high one on a logarithmic scale, and the mean ratio of high to low ends, ``shipped`` with all sources.
    """
    by_regime: defaultdict[str, list[tuple[bool, float, float, float]]] = defaultdict(list)
    for row in (row for table in tables for row in table.rows if row.in_scope):
        if (ends := row.interval) is not None and row.measured_s:
            shipped = replace(ends, residual=residual_of(ends.residual.asked))
            width, position = math.log(ends.high_s / ends.low_s), math.log(row.measured_s / ends.low_s)
            numbers = (bool(is_inside(row)), position / width if width else 0.5, ends.high_s / ends.low_s)
            by_regime[str(ends.residual.asked)].append((*numbers, shipped.high_s / shipped.low_s))
    groups = sorted(by_regime.items())
    if len(groups) > 1:
        groups.append(("all", [each for rows in by_regime.values() for each in rows]))
    found = []
    for regime, rows in groups:
        inside_of, positions, widths, shipped_widths = zip(*rows, strict=True)
        shares = {
            "inside": sum(inside_of) / len(rows),
            "position": median(positions),
            "high_over_low": sum(widths) / len(rows),
            "shipped": sum(shipped_widths) / len(rows),
        }
        found.append({"regime": regime, "rows": len(rows), **shares})
    return found


COVERAGE_COLUMNS: Formats = {
    "regime": "{regime}", "rows": "{rows}", "inside": "{inside:.0%}", "position": "{position:.2f}",
    "high over low": "{high_over_low:.2f}", "shipped": "{shipped:.2f}",
}  # fmt: skip
COLLECTIVE_COLUMNS: Formats = {
    "table": "{name}", "mean error": "{mean_relative_error:.1%}", "worst": "{worst_relative_error:.1%}",
    "bias": "{bias:+.1%}", "inside": "{inside:.0%}", "profile": "{profile}", "collective": "{what}",
    "ranks": "{ranks}", "sizes": "{count}", "mostly": "{rule}",
}  # fmt: skip
WORK_COLUMNS: Formats = {
    "table": "{name}", "median error": "{median_relative_error:.1%}", "90 %": "{p90_relative_error:.1%}",
    "worst": "{worst_relative_error:.1%}", "bias": "{bias:+.1%}", "in 5 %": "{within_5:.0%}",
    "in 15 %": "{within_15:.0%}", "inside": "{inside:.0%}", "profile": "{profile}", "rows": "{count}", "of": "{of}",
    "ranking": lambda row: "" if row["right"] is None else f"{row['right']:.0%} of {row['groups']}",
}  # fmt: skip


def parts_of(tables: Sequence[TableAccuracy]) -> list[Part]:
    """The report: tables in scope by kind, those that are not, rows that are not, and a line of summary per kind."""
    parts: list[Part] = []
    kinds: tuple[Kind, ...] = ("collective", "layer", "kernel")
    for kind, title in zip(kinds, ("", "layers: ", "kernels: "), strict=True):
        columns, texts = (COLLECTIVE_COLUMNS, (0, 5, 6, 9)) if kind == "collective" else (WORK_COLUMNS, (0, 8, 11))
        rows = [_row(each) for each in tables if each.kind == kind and each.in_scope]
        parts += Table.of(f"{title}predicted over measured", rows, columns, texts)
    regimes = [
        {"table": _name(each), "class": regime, "rows": len(errors), **summary(errors)}
        for each in tables
        for regime, errors in (each.by_regime() if len(each.by_regime()) > 1 else {}).items()
    ]
    parts += Table.of("layers by class", regimes, {
        "table": "{table}", "class": "{class}", "rows": "{rows}", "median error": "{median_relative_error:.1%}",
        "in 15 %": "{within_15:.0%}",
    }, (0, 1))  # fmt: skip
    if others := [(_name(each), each.reason) for each in tables if not each.in_scope]:
        parts.append(Table("not compared", ("table", "reason"), others, (0, 1)))
    if left_out := [(_name(each), str(n), why) for each in tables if each.in_scope for why, n in each.left_out.items()]:
        parts.append(Table("rows not compared", ("table", "rows", "reason"), left_out, (0, 2)))
    lines = [line for kind in kinds if (line := _line(tables, kind))]
    return [*parts, *(lines or ["no table to compare"])]


def _name(table: TableAccuracy) -> str:
    return Path(table.table.name).name


def _row(table: TableAccuracy) -> dict[str, object]:
    return {
        "name": _name(table), "profile": table.profile or "", "what": table.what, "inside": table.inside,
        "ranks": getattr(table.table, "ranks", ""), "count": len(table.errors), "of": len(table.rows),
        **summary(table.errors), "rule": table.dominant_rule, "right": table.ranking_right,
        "groups": table.ranking_groups,
    }  # fmt: skip


def left_out_of(tables: Iterable[TableAccuracy]) -> list[dict[str, Any]]:
    """Collectives predicted without constants from tables of the same system: of all, inside one domain, and there by
    collective, size and generation; by system or source.

    Each row has how many ``tables`` or parts of them and ``rows``, over tables the ``median_of_mean_relative_errors``,
    the same ``at_median`` of the intervals and ``in_sample``, with the constants of the same system, too, the share of
    rows ``inside`` their intervals and the mean ``interval_score`` of these (`tasp_lab.measure.scores.Span`), None
    without intervals.
    """
    groups: dict[str, list[list[MeasuredRow]]] = {}
    for table in (each for each in tables if isinstance(each.table, MeasuredTable) and each.in_scope):
        rows = [row for row in table.rows if row.in_scope]
        machine, _ = machine_of(table.table)  # type: ignore[arg-type]
        system = None if machine is None else machine.system
        names = [("all", rows)]
        if system is not None and system.domains == 1:
            names += [("inside one domain", rows), (table.what, rows)]
            names += [(text, [row for row in rows if size_class(row) == text]) for text in SIZE_CLASSES]
            names += [(system.family.generation, rows)] if system.family.generation else []
        names.append((table.table.headers.get("system") or left_out_with(table.table), rows))
        for name, chosen in names:
            if chosen:
                groups.setdefault(name, []).append(chosen)
    order = ("all", "inside one domain", *COLLECTIVES, *SIZE_CLASSES, *get_args(Generation))
    ranked = [name for name in order if name in groups]
    return [_left_out(name, groups[name]) for name in [*ranked, *sorted(groups.keys() - {*ranked})]]


SIZE_CLASSES = ("up to 64 KiB", "64 KiB to 16 MiB", "16 MiB and more")


def size_class(row: MeasuredRow) -> str:
    """The class of a size as nccl-tests states it."""
    return SIZE_CLASSES[0 if row.size_bytes <= 2**16 else 1 if row.size_bytes < 2**24 else 2]


def _left_out(what: str, parts: Sequence[Sequence[MeasuredRow]]) -> dict[str, Any]:
    rows = [row for of_table in parts for row in of_table]
    spans = [span for row in rows if (span := span_of(row)) is not None]
    in_sample = [[replace(row, predicted_s=row.in_sample_s or row.predicted_s) for row in part] for part in parts]
    at_median = [[row.at_median for row in part] for part in parts]
    without, of_medians, with_own = (
        median(sum(abs(row.relative_error or 0.0) for row in part) / len(part) for part in each)
        for each in (parts, at_median, in_sample)
    )
    return {
        "what": what,
        "tables": len(parts),
        "rows": len(rows),
        "median_of_mean_relative_errors": without,
        "at_median": of_medians,
        "in_sample": with_own,
        "inside": mean([each.is_inside for each in spans]),
        "interval_score": mean([each.score for each in spans]),
    }


LEFT_OUT_COLUMNS: Formats = {
    "collectives": "{what}", "tables": "{tables}", "rows": "{rows}",
    "mean error": "{median_of_mean_relative_errors:.1%}", "at median": "{at_median:.1%}", "inside": "{inside:.0%}",
    "interval score": "{interval_score:.2f}", "in sample": "{in_sample:.1%}",
}  # fmt: skip


def _line(tables: Sequence[TableAccuracy], kind: Kind) -> str:
    compared = [each for each in tables if each.kind == kind and each.in_scope]
    if not compared:
        return ""
    means = [float(abs(each.errors).mean()) for each in compared]
    what = "" if kind == "collective" else f" of {kind}s"
    within = ", ".join(f"{sum(mean <= limit for mean in means)} within {limit:.0%}" for limit in CLOSE)
    worst = f"{_name(compared[means.index(max(means))])}, {max(means):.1%}"
    return f"median of the mean errors of {len(means)} tables{what}: {median(means):.1%}; {within}; worst: {worst}"


def own_tables() -> Path:
    """The folder of the tables that come with tasp-lab."""
    return Path(str(files("tasp_lab.measure") / "tables"))


@dataclass(frozen=True, repr=False)
class AccuracyReport(Report, Sequence[TableAccuracy]):
    """Measured tables beside their predictions, a sequence of `TableAccuracy`.

    `notes` are about guessed machines; `with_pairs` adds the pairs of rows of each table of layers to the dictionary.
    """

    tables: tuple[TableAccuracy, ...]
    provenance: Provenance
    notes: tuple[str, ...] = ()
    with_pairs: bool = False

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

    @property
    def coverage(self) -> list[dict[str, Any]]:
        """How many measured times intervals hold, regime by regime."""
        return coverage_of(self.tables)

    def to_dict(self) -> dict[str, object]:
        decisions = {name: found.figures for name, found in decisions_of(self.tables).items()}
        return {
            "left_out": left_out_of(self.tables),
            "median_relative_error": self.median_relative_error,
            "coverage": self.coverage,
            "decisions": decisions.pop("all"),
            "decisions_by_source": decisions,
            "tables": [self._table(table) for table in self.tables],
            "notes": list(self.notes),
            "provenance": self.provenance.to_dict(),
        }

    def _table(self, table: TableAccuracy) -> dict[str, object]:
        has_pairs = self.with_pairs and table.kind == "layer"
        return table.to_dict() | ({"pairs": [asdict(each) for each in table_pairs(table)]} if has_pairs else {})

    def records(self) -> list[dict[str, object]]:
        """A row per table."""
        return [flat(table.to_dict()) for table in self.tables]

    def parts(self) -> list[Part]:
        left_out = "collectives, each system predicted without its own tables"
        return [
            *Table.of(left_out, left_out_of(self.tables), LEFT_OUT_COLUMNS),
            *parts_of(self.tables),
            *decision_parts(self.tables),
            *Table.of("measured times inside intervals of 90 %", self.coverage, COVERAGE_COLUMNS),
            *self.notes,
        ]


def accuracy(
    *paths: Path | str,
    profile: str | None = None,
    sampling: Sampling = FEW_SAMPLES,
    pairs: bool = False,
    jobs: int = 1,
    progress: ProgressCallback = no_progress,
    count: CountCallback | None = None,
) -> AccuracyReport:
    """Compare measured tables with their predictions.

    Parameters
    ----------
    paths : CSV tables of collectives, layers or kernels, logs of nccl-tests, and folders of them; the tables of
        tasp-lab if none is given.
    profile : the machine of tables that do not name theirs, like ``h100-8``, ``h100`` (the size is then that of the
        table) or ``my.toml:2x8``; without it a log of one full node has the family of the GPUs that it lists.
    sampling : how many samples of constants intervals are made of, see `tasp_lab.prediction.uncertainty`.
    jobs : worker processes; 1 for this process. A script that starts more needs ``if __name__ == "__main__":``.
    pairs : whether the dictionary of the report has all pairs of rows that did the same work.
    progress : called with the name of each complete table, if there are several.
    count : called instead with the number of each of these tables and its name.

    Raises `TableError` for a table that cannot be read, and if no table can be compared, and `ProfileError` for an
    unknown profile.
    """
    if profile is not None and ".toml" not in profile:
        choose(profile)
    files = [Path(path) for path in paths]
    named = [on_profile(table, profile) for table in find_all_tables(files or [own_tables()])]
    measured, tables = [table for table, _ in named], list[TableAccuracy]()
    count = count or (lambda done, total, name: progress(name) if name else None)
    is_whole = [not getattr(table, "reason", "") for table in measured]
    total = sum(is_whole)
    one = partial(evaluate, layers=LayerEvaluator(sampling), sampling=sampling)
    with processes(jobs if total > jobs else 1) as executor:
        found = in_order(one if executor is None else partial(_in_worker, sampling=sampling), measured, executor, jobs)
        for number, table in enumerate(measured):
            if total > 1 and is_whole[number]:
                count(sum(is_whole[:number]), total, Path(table.name).name)
            tables.append(next(found))
    count(total, total, "")
    if not any(table.rows for table in tables):
        raise TableError(_nothing_to_compare(files, tables))
    return AccuracyReport(tuple(tables), _provenance(tables), tuple(note for _, note in named if note), pairs)


def evaluate(table: AnyTable, layers: LayerEvaluator | None = None, sampling: Sampling = NO_SAMPLES) -> TableAccuracy:
    """A table beside its prediction, if there is one; `layers` caches what was simulated before."""
    if isinstance(table, LayerTable):
        return (layers or LayerEvaluator(sampling)).evaluate(table)
    return evaluate_kernel(table, sampling) if isinstance(table, KernelTable) else evaluate_collective(table, sampling)


@lru_cache(maxsize=1)
def _layers(sampling: Sampling) -> LayerEvaluator:
    return LayerEvaluator(sampling)


def _in_worker(table: AnyTable, sampling: Sampling) -> TableAccuracy:
    """As `evaluate`, with what the same worker process simulated before."""
    return evaluate(table, _layers(sampling), sampling)


def _provenance(tables: Sequence[TableAccuracy]) -> Provenance:
    """The tables and their machines are the inputs; constants have the names of their machines before them."""
    machines: dict[str, Machine] = {}
    for table in tables:
        for name, machine in machines_of(table).items():
            machines[_unused(name, machine, machines)] = machine
    inputs = {
        "tables": [table_inputs(each.table) for each in tables],
        "machines": {name: machine_inputs(machine, compute=False) for name, machine in machines.items()},
    }
    families = {machine.parameters: name.partition("-")[0] for name, machine in machines.items()}
    constants = [each for stated, name in families.items() for each in machine_constants(stated.values(), f"{name}: ")]
    return Provenance(inputs, tuple(constants), ("array", "simpy"))


def _unused(name: str, machine: Machine, machines: Mapping[str, Machine]) -> str:
    """A name for one more machine: profiles in several folders may have the same one."""
    is_other = machines.get(name, machine) != machine
    return f"{name} ({len(machines) + 1})" if is_other else name


def _nothing_to_compare(paths: Sequence[Path], tables: Sequence[TableAccuracy]) -> str:
    if not tables:
        names = ", ".join(map(str, paths))
        return f"{names}: no table in it, expected CSV tables (.csv) or logs of nccl-tests (.log, .out, .txt)"
    others = f" (and {len(tables) - 1} other tables)" * (len(tables) > 1)
    return on_one_line(f"{tables[0].table.name}: nothing to compare: {tables[0].reason}{others}")
