"""The account of layers: measured attention layers beside their predictions, by source, machine, regime and pass.

``python -m experiments.accuracy.layers`` compares the tables in ``tasp_lab/measure/tables/layers`` and writes
``experiments/accuracy/layers.md``, ``layers.json`` and ``layers.png``, in some minutes. All measurements are
third-party. No constant was fitted to a row that counts. Of the rows with the largest errors it also shows what kernels
and messages alone would take.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from experiments.common import markdown_table
from sim.host import busy_s
from sim.simulate import simulate
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.machine import INSTANT
from tasp_lab.measure.accuracy import TableAccuracy, accuracy, own_tables
from tasp_lab.measure.accuracy.layer import TIE, check_row, groups_of, is_right, row_run
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, errors_of, row_dict, summary
from tasp_lab.measure.readers import LayerTable
from tasp_lab.plots.accuracy import draw_rows
from tasp_lab.plots.timelines import render

FOLDER = Path(__file__).parent
WORST = 3
"""So many rows of each source are shown with their terms."""


class Source(NamedTuple):
    """The tables of one source on one machine."""

    name: str
    profile: str
    tables: list[TableAccuracy]

    @property
    def rows(self) -> list[MeasuredRow]:
        """The rows that have a prediction."""
        every = (row for table in self.tables for row in table.rows)
        return [row for row in every if row.relative_error is not None]


class Terms(NamedTuple):
    """What a layer would take in seconds: its kernels on the busiest rank, and its messages without any kernel."""

    kernels_s: float
    messages_s: float


def main() -> None:
    """Judge the repository's own tables of layers and write what was found."""
    found = accuracy(own_tables() / "layers", progress=progress)
    sources = by_source(found)
    write_whole(FOLDER / "layers.md", (report_text(sources, found) + "\n").encode())
    write_whole(FOLDER / "layers.json", (json.dumps(_document(sources), indent=1) + "\n").encode())
    shown = [table for source in sources for table in source.tables]
    figure = draw_rows(shown, "Measured layers: error of predictions")
    write_whole(FOLDER / "layers.png", render(figure, "png"))
    print(markdown_table(COLUMNS, [cells for source in sources for cells in source_cells(source)]))


def by_source(tables: Iterable[TableAccuracy]) -> list[Source]:
    """The tables with a prediction, by repository and machine."""
    found: dict[tuple[str, str], list[TableAccuracy]] = defaultdict(list)
    for table in tables:
        if any(row.relative_error is not None for row in table.rows):
            found[source_name(table), str(table.profile)].append(table)
    return [Source(*key, members) for key, members in found.items()]


def source_name(table: TableAccuracy) -> str:
    """The repository of a table.

    >>> from tasp_lab.measure.accuracy import evaluate
    >>> from tasp_lab.measure.readers import parse_any_table
    >>> table = parse_any_table("# source: github.com/a/b 1234 README.md\\nsystem,seq_total\\n", "t.csv")
    >>> source_name(evaluate(table))
    'a/b'
    """
    source = table.table.headers.get("source", "")
    found = re.search(r"github\.com/([\w.-]+/[\w.-]+)", source)
    return found[1] if found else source.split(",")[0]


COLUMNS = ("source", "machine", "regime", "pass", "rows", "median", "90 %", "bias", "within 5 %", "within 15 %")


def source_cells(source: Source) -> list[tuple[str, ...]]:
    """A line for each regime and pass of a source, of the rows that count or are bound by their hosts."""
    groups: dict[tuple[str, str], list[MeasuredRow]] = defaultdict(list)
    for row in source.rows:
        if row.in_scope or row.regime == "host-bound":
            groups[str(row.regime), str(row.shape["pass"])].append(row)
    return [(source.name, source.profile, *key, *_errors(rows)) for key, rows in sorted(groups.items())]


def _errors(rows: Sequence[MeasuredRow]) -> tuple[str, ...]:
    every = [replace(row, reason="") for row in rows]
    found = summary(errors_of(every))
    numbers = [found[name] or 0.0 for name in ("median_relative_error", "p90_relative_error", "bias")]
    shares = [found[name] or 0.0 for name in ("within_5", "within_15")]
    median, most, bias = numbers
    return (str(len(rows)), f"{median:.1%}", f"{most:.1%}", f"{bias:+.1%}", *(f"{share:.0%}" for share in shares))


def ranking_cells(source: Source) -> tuple[str, ...] | None:
    """How often the fastest schedule of a source is predicted; None without groups."""
    groups = [group for table in source.tables for group in groups_of(table.rows)]
    if not groups:
        return None
    right = sum(map(is_right, groups))
    lost = [
        group[min(group, key=lambda name: group[name].predicted_s)].measured_s
        / min(times.measured_s for times in group.values())
        - 1
        for group in groups
    ]
    return source.name, source.profile, str(len(groups)), f"{right / len(groups):.0%}", f"{max(lost):.0%}"


def worst_cells(source: Source) -> list[tuple[str, ...]]:
    """The rows of a source with the largest errors, each with its terms."""
    counted = [(table, row) for table in source.tables for row in table.rows if row.in_scope]
    counted.sort(key=lambda each: -abs(each[1].relative_error or 0.0))
    return [_worst(source, table, row) for table, row in counted[:WORST]]


def _worst(source: Source, table: TableAccuracy, row: MeasuredRow) -> tuple[str, ...]:
    shape, terms = row.shape, terms_of(table, row)
    what = f"{row.schedule}, {shape['pass']}, {shape['mask']}, {shape['gpus']} GPUs, {shape['seq_total']} positions"
    times = (row.measured_s, row.predicted_s, terms.kernels_s, terms.messages_s)
    return (
        f"{source.name}, {source.profile}",
        f"{what}, {shape['heads']} heads",
        *(f"{1e3 * (time_s or 0.0):.4g}" for time_s in times),
        f"{row.relative_error or 0.0:+.0%}",
    )


def terms_of(table: TableAccuracy, row: MeasuredRow) -> Terms:
    """The terms of a row that has a prediction; of several packings their mean."""
    assert isinstance(table.table, LayerTable), "the tables are of layers"
    measured = next(each for each in table.table.rows if each.line == row.shape["line"])
    layers = check_row(table.table, measured)
    run = row_run(table.table, measured, layers)
    alone = replace(run.machine, compute=INSTANT)
    kernels_s = messages_s = 0.0
    for layer in layers:
        for schedule in run.passes(layer):
            kernels_s += float(max(busy_s(schedule, run.machine.compute))) / len(layers)
            timeline = simulate(schedule, alone, "array", events=False)
            messages_s += float(timeline.time_s) / len(layers)
    return Terms(kernels_s, messages_s)


def report_text(sources: Sequence[Source], tables: Iterable[TableAccuracy]) -> str:
    """The account in Markdown."""
    rankings = [cells for source in sources if (cells := ranking_cells(source)) is not None]
    left_out = [(Path(each.table.name).stem, each.reason) for each in tables if not each.in_scope]
    return "\n\n".join([
        "Measured layers beside predictions, made by `python -m experiments.accuracy.layers`. Error of a row: "
        "predicted over measured time, less one; median and 90 % are of absolute errors. No constant was fitted to a "
        "row that counts. Host-bound rows are shown, but do not count.",
        markdown_table(COLUMNS, [cells for source in sources for cells in source_cells(source)]),
        f"Groups of the same work: how often the schedule that is predicted to be the fastest was, ties of {TIE:.0%} "
        "apart, and how much longer it took at worst.",
        markdown_table(("source", "machine", "groups", "right", "at worst"), rankings),
        f"The {WORST} rows of each source with the largest errors, in ms: measured, predicted, and what kernels on the "
        "busiest rank and messages without kernels would take alone.",
        markdown_table(
            ("source", "row", "measured", "predicted", "kernels", "messages", "error"),
            [cells for source in sources for cells in worst_cells(source)],
        ),
        "What misses, why, and what would settle it. Causes are from code, from tables of components, and from rows in "
        "which one thing differs; percentages of modelled ones are those of before.",
        markdown_table(*findings()),
        "Not compared:",
        markdown_table(("table", "because"), left_out),
    ])  # fmt: skip


def findings() -> tuple[list[str], list[list[str]]]:
    """Columns and rows of what was found about rows that miss."""
    with (FOLDER / "layer_findings.csv").open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    return columns, rows


def _document(sources: Sequence[Source]) -> dict[str, object]:
    """All rows with a prediction, by source and table."""
    return {
        f"{source.name} on {source.profile}": {
            Path(table.table.name).stem: {
                **summary(table.errors),
                "ranking_right": table.ranking_right,
                "ranking_groups": table.ranking_groups,
                "rows": [row_dict(row) for row in table.rows if row.relative_error is not None],
            }
            for table in source.tables
        }
        for source in sources
    }


if __name__ == "__main__":
    main()
