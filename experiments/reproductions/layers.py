"""Published tables of layers: each row is run as its library runs it, beside the interval of its prediction.

Tables are compared as in the accuracy report of layers (`tasp_lab.measure.accuracy`). A `Reason` names rows and what is
changed to check it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from experiments.common import markdown_table
from experiments.reproductions.reproduction import NOT_EXPLAINED, Figure, Found, Trial, inside_of, median_error, scored
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.host import NO_PASSES
from tasp_lab.machines.machine import IDEAL
from tasp_lab.machines.sampling import FEW_SAMPLES
from tasp_lab.measure.accuracy import MeasuredRow, TableAccuracy, own_tables
from tasp_lab.measure.accuracy.layer import LayerEvaluator, RowRun, check_row, row_run
from tasp_lab.measure.accuracy.table_accuracy import ranking
from tasp_lab.measure.readers import LayerTable, find_all_tables
from tasp_lab.prediction.inputs import with_host

Change = Callable[[RowRun], RowRun]
"""What is changed in how a row is run: its machine, its layer."""

LEFT_OUT = "left_out"
"""The header of a table that tells why no model can meet its times."""


@dataclass(frozen=True)
class Row:
    """A row that counts, in its table."""

    table: LayerTable
    measured: MeasuredRow

    @property
    def what(self) -> str:
        """The layer and how it was run, in words."""
        shape = self.measured.shape
        packed = ", packed" if "varlen" in str(shape["mask"]) else ""
        mask = str(shape["mask"]).removeprefix("varlen ")
        batch = f", batch {shape['batch']}" if shape["batch"] not in (None, 1) else ""
        return (
            f"{shape['profile']}, {self.measured.schedule}{packed}, {shape['pass']}, {mask}, {shape['gpus']} GPUs, "
            f"{shape['seq_total']} positions, {shape['heads']} heads{batch}"
        )

    def has(self, **columns: object) -> bool:
        """Whether columns of the row have these values."""
        return all(self.measured.shape[name] == value for name, value in columns.items())

    def figure(self, reason: str, predicted_s: float | None = None) -> Figure:
        """The row as a figure; with another prediction the interval has the same width."""
        interval, measured_s = self.measured.interval, self.measured.measured_s
        assert interval is not None, "a row that counts has an interval"
        assert measured_s is not None, "a row that counts has a time"
        interval = interval if predicted_s is None else replace(interval, time_s=predicted_s)
        figure = Figure.of(self.what, 1e3 * measured_s, interval, reason)
        return replace(figure, left_out=self.table.headers.get(LEFT_OUT, ""))


@dataclass(frozen=True)
class Reason:
    """Why rows may be outside: the text, the rows and their name, and what is changed to check it, by name."""

    text: str
    rows: str
    where: Callable[[Row], bool]
    changes: dict[str, Change]

    @classmethod
    def of(cls, text: str, rows: str, changes: Sequence[str], schedule: Sequence[str] = (), passing: str = "") -> Self:
        """The reason of rows of these schedules and this pass, any where none is given, with changes of `CHANGES`."""

        def where(row: Row) -> bool:
            return (not schedule or row.measured.schedule in schedule) and (not passing or row.has(**{"pass": passing}))

        return cls(text, rows, where, {name: CHANGES[name] for name in changes})


def found_in(files: Iterable[Path], reasons: Sequence[Reason] = ()) -> Found:
    """The rows of all tables, each with the first reason that names it, and the trials of all reasons."""
    compared = []
    for path in files:
        progress(path.stem)
        compared.append(evaluate(path))
    rows = [Row(table.table, row) for table in compared for row in counted(table)]  # type: ignore[arg-type]
    texts = [next((each.text for each in reasons if each.where(row)), NOT_EXPLAINED) for row in rows]
    figures = tuple(row.figure(text) for row, text in zip(rows, texts, strict=True))
    trials = [trial for reason in reasons for trial in trials_of(reason, rows)]
    return Found(figures, tuple(trials), (tables_text(compared), left_out_text(compared)))


def evaluate(path: Path) -> TableAccuracy:
    """A table beside its predictions, also one that accuracy leaves out, whose figures tell why and do not count."""
    (table,) = find_all_tables([path])
    assert isinstance(table, LayerTable), "only layers"
    headers = {LEFT_OUT if name == "out_of_scope" else name: text for name, text in table.headers.items()}
    return LayerEvaluator(FEW_SAMPLES).evaluate(replace(table, headers=headers))


def counted(table: TableAccuracy) -> list[MeasuredRow]:
    """The rows that count."""
    return [row for row in table.rows if row.in_scope]


def trials_of(reason: Reason, rows: Sequence[Row]) -> list[Trial]:
    """The rows of a reason with each of its changes."""
    named = [row for row in rows if reason.where(row)]
    before = tuple(row.figure(reason.text) for row in named)
    return [
        Trial(f"{reason.rows}: {what}", before, after, explains(before, after))
        for what, change in reason.changes.items()
        for after in [tuple(row.figure(reason.text, time_s(row, change)) for row in named)]
    ]


def explains(before: Sequence[Figure], after: Sequence[Figure]) -> str:
    """How many of the figures outside come inside by a change."""
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if not one.inside]
    return f"{sum(other.inside for _, other in pairs)} of {len(pairs)} come inside" if pairs else ""


def time_s(row: Row, change: Change) -> float:
    """The predicted time of a row on a changed machine."""
    measured = next(each for each in row.table.rows if each.line == row.measured.shape["line"])
    run = row_run(row.table, measured, check_row(row.table, measured))
    return LayerEvaluator().time_s(change(run))


def tables_text(tables: Sequence[TableAccuracy]) -> str:
    """A line for each table: its rows, how many are inside, errors, and the fastest schedule."""
    columns = ("table", "rows", "inside", "median error", "within 15 %", "fastest right")
    return "## Tables\n\n" + markdown_table(columns, [_table_cells(each) for each in tables])


def _table_cells(table: TableAccuracy) -> list[str]:
    rows = counted(table)
    figures = scored(Row(table.table, row).figure("") for row in rows)  # type: ignore[arg-type]
    right, groups = ranking(rows)
    if not figures:
        return [f"`{Path(table.table.name).name}`", f"{len(rows)}", "left out of scores", "-", "-", "-"]
    return [
        f"`{Path(table.table.name).name}`", f"{len(rows)}", f"{inside_of(figures)}", f"{median_error(figures):.0%}",
        f"{sum(abs(each.error) <= 0.15 for each in figures) / len(figures):.0%}",
        "-" if right is None else f"{right * groups:.0f} of {groups}",
    ]  # fmt: skip


def left_out_text(tables: Sequence[TableAccuracy]) -> str:
    """The rows that do not count, with the reasons."""
    found: Counter[str] = Counter()
    for table in tables:
        for reason, count in table.left_out.items():
            found["host-bound by prediction" if reason.startswith("host-bound: predicted") else reason] += count
    rows = [(reason, f"{count}") for reason, count in found.most_common()]
    return "## Rows that do not count\n\n" + markdown_table(("because", "rows"), rows) if rows else ""


def layer_tables(*patterns: str) -> list[Path]:
    """The tables of layers of tasp-lab with these names, in alphabetical order."""
    folder = own_tables() / "layers"
    return [path for pattern in patterns for path in sorted(folder.glob(f"{pattern}.csv"))]


# What is changed in how a row of a table is run, to check a reason.


def without_contention(run: RowRun) -> RowRun:
    """Messages take no multiprocessors from kernel calls."""
    return replace(run, machine=replace(run.machine, contention=NONE))


def links_alone(run: RowRun) -> RowRun:
    """No communication library: messages take their full share of the links."""
    return replace(run, machine=replace(run.machine, comm_library=IDEAL, contention=NONE))


def with_overlap(run: RowRun) -> RowRun:
    """Messages run beside the kernel calls on their block."""
    return replace(run, machine=replace(run.machine, host=replace(run.machine.host, overlaps=True)))


def with_full_mask(run: RowRun) -> RowRun:
    """The layer with a full mask."""
    return replace(run, layers=tuple(replace(layer, mask="full") for layer in run.layers))


def without_merges(run: RowRun) -> RowRun:
    """Partial results are merged in no time."""
    machine = with_host(run.machine, replace(run.machine.host, passes=NO_PASSES))
    return replace(run, machine=machine)


CHANGES: Mapping[str, Change] = {
    "no contention": without_contention,
    "links alone": links_alone,
    "messages beside kernels": with_overlap,
    "a full mask": with_full_mask,
    "no merges": without_merges,
}
"""By the names that reasons give."""
