"""The accuracy report of tables of every kind, with the share of measured times inside their intervals by error class.

The interval of a row uses the errors of all sources but its own, and of a cloud without all of its provider.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, get_args, overload

from tasp_lab.core.errors import TableError
from tasp_lab.core.progress import CountCallback, ProgressCallback, no_progress, on_one_line
from tasp_lab.core.report import View, flat
from tasp_lab.core.tables import Formats, Part, Table
from tasp_lab.core.workers import in_order, processes
from tasp_lab.machines.libraries.nccl_tuning import Generation
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import FEW_SAMPLES, NO_SAMPLES, Sampling
from tasp_lab.measure.accuracy.collective import evaluate_collective
from tasp_lab.measure.accuracy.decisions import decision_figures, decision_parts, questions_by_source, questions_of
from tasp_lab.measure.accuracy.kernel import evaluate_kernel
from tasp_lab.measure.accuracy.layer import LayerEvaluator
from tasp_lab.measure.accuracy.table_accuracy import CLOSE, Kind, MeasuredRow, TableAccuracy, errors_of, summary
from tasp_lab.measure.inputs import left_out_with, table_inputs
from tasp_lab.measure.profiles import choose, machine_of, machine_with, on_profile
from tasp_lab.measure.readers import COLLECTIVES, AnyTable, KernelTable, LayerTable, MeasuredTable, find_all_tables
from tasp_lab.measure.scores import mean
from tasp_lab.prediction.provenance import Provenance, machine_constants, machine_inputs
from tasp_lab.prediction.residuals import residual_of

KINDS: tuple[Kind, ...] = get_args(Kind)


def coverage_of(tables: Iterable[TableAccuracy]) -> list[dict[str, Any]]:
    """By regime, and of all together where there are several: ``rows`` that count, the share of them ``inside`` their
    intervals of 90 %, the median ``position`` of a measured time in its interval, from 0 at its low end to 1 at its
    high one on a logarithmic scale, and the mean ratio of high to low ends, ``shipped`` with all sources.
    """
    by_regime: defaultdict[str, list[tuple[bool, float, float, float]]] = defaultdict(list)
    for row in (row for table in tables for row in table.rows if row.in_scope):
        if (ends := row.interval) is not None and (span := row.span) is not None:
            shipped = replace(ends, residual=residual_of(ends.residual.asked))
            width, position = math.log(span.high_s / span.low_s), math.log(span.measured_s / span.low_s)
            numbers = (span.is_inside, position / width if width else 0.5, span.high_s / span.low_s)
            by_regime[str(ends.residual.asked)].append((*numbers, shipped.high_s / shipped.low_s))
    groups = sorted(by_regime.items())
    if len(groups) > 1:
        groups.append(("all", [each for rows in by_regime.values() for each in rows]))
    found = []
    for regime, rows in groups:
        inside, positions, widths, shipped_widths = zip(*rows, strict=True)
        found.append({
            "regime": regime, "rows": len(rows), "inside": sum(inside) / len(rows), "position": median(positions),
            "high_over_low": sum(widths) / len(rows), "shipped": sum(shipped_widths) / len(rows),
        })  # fmt: skip
    return found


SIZE_CLASSES = ("up to 64 KiB", "64 KiB to 16 MiB", "16 MiB and more")
"""The classes of a size as nccl-tests states it."""


def left_out_of(tables: Iterable[TableAccuracy]) -> list[dict[str, Any]]:
    """Collectives predicted without constants from tables of the same system: of all, inside one domain, and there by
    collective, size and generation; by system or source.

    Each row has how many ``tables`` or parts of them and ``rows``, over tables the ``median_of_mean_relative_errors``,
    the same ``at_median`` of the intervals and ``in_sample``, with the constants of the same system, too, the share of
    rows ``inside`` their intervals and the mean ``interval_score`` of these (`tasp_lab.measure.scores.Span`), None
    without intervals.
    """
    groups: defaultdict[str, list[list[MeasuredRow]]] = defaultdict(list)
    for table in tables:
        measured, rows = table.table, [row for row in table.rows if row.in_scope]
        if not isinstance(measured, MeasuredTable) or not table.in_scope:
            continue
        groups["all"].append(rows)
        system = machine_of(measured).system
        if system is not None and system.domains == 1:
            for name in ("inside one domain", table.what, *filter(None, [system.family.generation])):
                groups[name].append(rows)
            for number, name in enumerate(SIZE_CLASSES):
                of_class = [row for row in rows if (row.size_bytes > 2**16) + (row.size_bytes >= 2**24) == number]
                groups[name] += [of_class] if of_class else []
        groups[measured.headers.get("system") or left_out_with(measured)].append(rows)
    order = ("all", "inside one domain", *COLLECTIVES, *SIZE_CLASSES, *get_args(Generation))
    ranked = [name for name in order if groups.get(name)]
    others = sorted(name for name in groups if groups[name] and name not in order)
    return [_left_out(name, groups[name]) for name in [*ranked, *others]]


def _left_out(what: str, parts: Sequence[Sequence[MeasuredRow]]) -> dict[str, Any]:
    """A row of `left_out_of`; `parts` are the rows of each table."""

    def mean_error(predicted_s: Callable[[MeasuredRow], float | None]) -> float:
        errors = [errors_of(replace(row, predicted_s=predicted_s(row)) for row in part) for part in parts]
        return median(float(abs(each).mean()) for each in errors)

    spans = [span for part in parts for row in part if (span := row.span) is not None]
    errors = {
        "median_of_mean_relative_errors": mean_error(lambda row: row.predicted_s),
        "at_median": mean_error(lambda row: row.interval.median_s if row.interval else row.predicted_s),
        "in_sample": mean_error(lambda row: row.in_sample_s or row.predicted_s),
    }
    return {
        "what": what, "tables": len(parts), "rows": sum(map(len, parts)), **errors,
        "inside": mean([each.is_inside for each in spans]), "interval_score": mean([each.score for each in spans]),
    }  # fmt: skip


COVERAGE_COLUMNS: Formats = {
    "regime": "{regime}", "rows": "{rows}", "inside": "{inside:.0%}", "position": "{position:.2f}",
    "high over low": "{high_over_low:.2f}", "shipped": "{shipped:.2f}",
}  # fmt: skip
COLLECTIVE_COLUMNS: Formats = {
    "table": "{name}", "mean error": "{mean_relative_error:.1%}", "worst": "{worst_relative_error:.1%}",
    "bias": "{bias:+.1%}", "inside": "{inside:.0%}", "profile": "{profile}", "collective": "{collective}",
    "ranks": "{ranks}", "sizes": "{count}", "mostly": "{dominant_rule}",
}  # fmt: skip
WORK_COLUMNS: Formats = {
    "table": "{name}", "median error": "{median_relative_error:.1%}", "90 %": "{p90_relative_error:.1%}",
    "worst": "{worst_relative_error:.1%}", "bias": "{bias:+.1%}", "in 5 %": "{within_5:.0%}",
    "in 15 %": "{within_15:.0%}", "inside": "{inside:.0%}", "profile": lambda row: row["profile"] or "",
    "rows": "{count}", "of": "{of}",
    "ranking": lambda row: "{ranking_right:.0%} of {ranking_groups}".format(**row) if row["ranking_groups"] else "",
}  # fmt: skip
REGIME_COLUMNS: Formats = {
    "table": "{table}", "class": "{class}", "rows": "{rows}", "median error": "{median_relative_error:.1%}",
    "in 15 %": "{within_15:.0%}",
}  # fmt: skip
LEFT_OUT_COLUMNS: Formats = {
    "collectives": "{what}", "tables": "{tables}", "rows": "{rows}",
    "mean error": "{median_of_mean_relative_errors:.1%}", "at median": "{at_median:.1%}", "inside": "{inside:.0%}",
    "interval score": "{interval_score:.2f}", "in sample": "{in_sample:.1%}",
}  # fmt: skip


def parts_of(tables: Sequence[TableAccuracy]) -> list[Part]:
    """The report: tables in scope by kind, those that are not, rows that are not, and a line of summary per kind."""
    parts: list[Part] = []
    lines = []
    for kind in KINDS:
        compared = [each for each in tables if each.kind == kind and each.in_scope]
        columns, texts = (COLLECTIVE_COLUMNS, (0, 5, 6, 9)) if kind == "collective" else (WORK_COLUMNS, (0, 8, 11))
        rows = [
            {**each.figures(), "name": each.file, "count": len(each.errors), "of": len(each.rows)} for each in compared
        ]
        begin = "" if kind == "collective" else f"{kind}s: "
        parts += Table.of(f"{begin}predicted over measured", rows, columns, texts)
        if compared:
            means = [float(abs(each.errors).mean()) for each in compared]
            within = ", ".join(f"{sum(mean <= limit for mean in means)} within {limit:.0%}" for limit in CLOSE)
            lines.append(
                f"median of the mean errors of {len(means)} tables{f' of {kind}s' if begin else ''}: "
                f"{median(means):.1%}; {within}; worst: {compared[means.index(max(means))].file}, {max(means):.1%}"
            )
    regimes = [
        {"table": each.file, "class": regime, "rows": len(errors), **summary(errors)}
        for each in tables
        for by_regime in [each.by_regime()]
        for regime, errors in by_regime.items()
        if len(by_regime) > 1
    ]
    parts += Table.of("layers by class", regimes, REGIME_COLUMNS, (0, 1))
    if others := [(each.file, each.reason) for each in tables if not each.in_scope]:
        parts.append(Table("not compared", ("table", "reason"), others, (0, 1)))
    if left_out := [(each.file, str(n), why) for each in tables if each.in_scope for why, n in each.left_out.items()]:
        parts.append(Table("rows not compared", ("table", "rows", "reason"), left_out, (0, 2)))
    return [*parts, *(lines or ["no table to compare"])]


def own_tables() -> Path:
    """The folder of the tables that come with tasp-lab."""
    return Path(str(files("tasp_lab.measure") / "tables"))


@dataclass(frozen=True, repr=False)
class AccuracyReport(View, Sequence[TableAccuracy]):
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

    @property
    def coverage(self) -> list[dict[str, Any]]:
        """How many measured times intervals hold, regime by regime."""
        return coverage_of(self.tables)


def _report(tables: Sequence[TableAccuracy], notes: Sequence[str], with_pairs: bool) -> AccuracyReport:
    """`notes` are about guessed machines; `with_pairs` adds the pairs of rows of tables of layers to the dictionary."""
    questions = questions_by_source(tables)
    decisions = {name: decision_figures(each) for name, each in questions.items()}
    documents = [table.to_dict() for table in tables]
    for document, table in zip(documents, tables, strict=True):
        if with_pairs and table.kind == "layer":
            pairs = [pair for question in questions_of(table) for pair in question.pairs]
            document["pairs"] = [asdict(pair) for pair in pairs]
    left_out, coverage = left_out_of(tables), coverage_of(tables)
    parts: list[Part] = [
        *Table.of("collectives, each system predicted without its own tables", left_out, LEFT_OUT_COLUMNS),
        *parts_of(tables),
        *decision_parts(questions),
        *Table.of("measured times inside intervals of 90 %", coverage, COVERAGE_COLUMNS),
        *notes,
    ]
    report = AccuracyReport({}, list(map(flat, documents)), parts, tuple(tables), _provenance(tables))
    whole = {
        "left_out": left_out,
        "median_relative_error": report.median_relative_error,
        "coverage": coverage,
        "decisions": decisions.pop("all"),
        "decisions_by_source": decisions,
        "tables": documents,
        "notes": list(notes),
        "provenance": report.provenance.to_dict(),
    }
    return replace(report, document=whole)


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
    _layers.cache_clear()  # a file of a profile may have changed since the last report
    with processes(jobs if total > jobs else 1) as executor:
        found = in_order(partial(_in_process, sampling=sampling), measured, executor, jobs)
        for number, table in enumerate(measured):
            if total > 1 and is_whole[number]:
                count(sum(is_whole[:number]), total, Path(table.name).name)
            tables.append(next(found))
    count(total, total, "")
    if not any(table.rows for table in tables):
        if not tables:
            expected = "expected CSV tables (.csv) or logs of nccl-tests (.log, .out, .txt)"
            raise TableError(f"{', '.join(map(str, files))}: no table in it, {expected}")
        others = f" (and {len(tables) - 1} other tables)" * (len(tables) > 1)
        raise TableError(on_one_line(f"{tables[0].table.name}: nothing to compare: {tables[0].reason}{others}"))
    return _report(tables, [note for _, note in named if note], pairs)


def evaluate(table: AnyTable, sampling: Sampling = NO_SAMPLES, layers: LayerEvaluator | None = None) -> TableAccuracy:
    """A table beside its prediction, if there is one; `layers` has what was simulated before."""
    if isinstance(table, LayerTable):
        return (layers or LayerEvaluator(sampling)).evaluate(table)
    return evaluate_kernel(table, sampling) if isinstance(table, KernelTable) else evaluate_collective(table, sampling)


@lru_cache(maxsize=1)
def _layers(sampling: Sampling) -> LayerEvaluator:
    return LayerEvaluator(sampling)


def _in_process(table: AnyTable, sampling: Sampling) -> TableAccuracy:
    """As `evaluate`, with what the same process simulated before: tables of layers repeat each other's rows."""
    return evaluate(table, sampling, _layers(sampling))


def _provenance(tables: Sequence[TableAccuracy]) -> Provenance:
    """The tables and their machines are the inputs; constants have the names of their machines before them."""
    machines: dict[str, Machine] = {}
    for name, machine in (pair for table in tables for pair in machines_of(table)):
        # profiles in several folders may have the same name
        is_other = machines.get(name, machine) != machine
        machines[f"{name} ({len(machines) + 1})" if is_other else name] = machine
    inputs = {
        "tables": [table_inputs(each.table) for each in tables],
        "machines": {name: machine_inputs(machine, compute=False) for name, machine in machines.items()},
    }
    families = {machine.parameters: name.partition("-")[0] for name, machine in machines.items()}
    constants = [each for stated, name in families.items() for each in machine_constants(stated.values(), f"{name}: ")]
    return Provenance(inputs, tuple(constants), ("array", "simpy"))


def machines_of(found: TableAccuracy) -> list[tuple[str, Machine]]:
    """The machines that predicted a table, with their names."""
    table = found.table
    if isinstance(table, MeasuredTable):
        return [(str(found.profile), machine_of(table))] if found.rows else []
    rows = [row.shape for row in found.rows if row.predicted_s is not None and isinstance(table, LayerTable)]
    places = dict.fromkeys((str(row["profile"]), int(str(row["gpus"])), int(str(row["nodes"]))) for row in rows)
    machines = [machine_with(*place, Path(table.name).parent) for place in places]
    return list({machine.topology.name: machine for machine in machines}.items())
