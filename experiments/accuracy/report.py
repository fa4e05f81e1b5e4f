"""The accuracy report: every published measured table beside its prediction.

``python -m experiments.accuracy.report`` writes, beside this module, what `tasp-lab accuracy` prints and its JSON:

- ``accuracy.md`` and ``accuracy.json`` of collectives, with the picture ``accuracy.png`` of all errors and one picture
  per machine family, such as ``accuracy_h100.png``;
- ``layers.md``, ``layers.json`` and ``layers.png`` of attention layers, with what kernels and messages alone would take
  of the rows with the largest errors, and with what is known of the causes (``layer_findings.csv``).

All measurements are third-party. No constant was fitted to a row that counts.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from experiments.common import Record, markdown, markdown_table, table, write_page
from sim.host import busy_s
from sim.simulate import simulate
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.machine import INSTANT
from tasp_lab.measure.accuracy import AccuracyReport, TableAccuracy, accuracy, own_tables
from tasp_lab.measure.accuracy.layer import check_row, row_run
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, summary
from tasp_lab.measure.readers import LayerTable
from tasp_lab.plots.accuracy import draw_tables
from tasp_lab.plots.timelines import render

FOLDER = Path(__file__).parent
WORST = 3
"""So many rows of each source are shown with their terms."""

ABOUT = (
    "Made by `python -m experiments.accuracy.report`. Error: predicted over measured time, less one; mean, worst, "
    "median and 90 % are of absolute errors, the bias is of signed ones."
)


def main() -> None:
    """Compare all tables, and write what was found."""
    write_collectives(accuracy(*sorted(own_tables().glob("*.csv")), progress=progress))
    write_layers(accuracy(own_tables() / "layers", progress=progress))


def write_collectives(found: AccuracyReport) -> None:
    """The report of tables of collectives."""
    tables = [each for each in found if each.kind == "collective"]
    named = [each.to_dict() | {"file": Path(each.table.name).name} for each in found]
    _write_json("accuracy.json", found.to_dict() | {"tables": named})
    write_page(FOLDER / "accuracy.md", f"{ABOUT}\n\n{markdown(found.parts())}")
    overview = draw_tables([each for each in tables if each.rows], "Predicted over measured time of every table")
    write_whole(FOLDER / "accuracy.png", render(overview, "png"))
    for family, members in families(tables).items():
        figure = draw_tables(members, f"{family.upper()}: measured times beside predictions")
        write_whole(FOLDER / f"accuracy_{family}.png", render(figure, "png"))


def families(tables: Sequence[TableAccuracy]) -> dict[str, list[TableAccuracy]]:
    """The tables that have a prediction, by the machine family of their profile."""
    found: dict[str, list[TableAccuracy]] = defaultdict(list)
    for each in tables:
        if each.rows:
            found[str(each.profile).partition("-")[0]].append(each)
    return dict(found)


def write_layers(found: AccuracyReport) -> None:
    """The report of tables of layers."""
    sources = by_source(found)
    documents = {
        source: {
            Path(each.table.name).stem: {
                **summary(each.errors),
                "ranking_right": each.ranking[0],
                "ranking_groups": each.ranking[1],
                "rows": [row.record() for row in each.rows if row.relative_error is not None],
            }
            for each in tables
        }
        for source, tables in sources.items()
    }
    _write_json("layers.json", documents)
    figure = draw_tables(
        [each for tables in sources.values() for each in tables], "Measured layers: error of predictions"
    )
    write_whole(FOLDER / "layers.png", render(figure, "png"))
    with (FOLDER / "layer_findings.csv").open(newline="", encoding="utf-8") as file:
        columns, *findings = csv.reader(file)
    times = ("measured", "predicted", "kernels", "messages")
    worst = {
        "source": "{source}",
        "row": "{row}",
        **{name: f"{{{name}_ms:.4g}}" for name in times},
        "error": "{error:+.0%}",
    }
    parts = [
        ABOUT,
        markdown(found.parts()),
        f"The {WORST} rows of each source with the largest errors, in ms: measured, predicted, and what kernels on the "
        "busiest rank and messages without kernels would take alone.",
        table((row for source, tables in sources.items() for row in worst_rows(source, tables)), worst),
        "What misses, why, and what would settle it. Causes are from code, from tables of components, and from rows in "
        "which one thing differs; percentages of modelled ones are those of before.",
        markdown_table(columns, findings),
    ]
    write_page(FOLDER / "layers.md", "\n\n".join(parts))


def by_source(tables: Iterable[TableAccuracy]) -> dict[str, list[TableAccuracy]]:
    """The tables with a prediction, by repository and machine."""
    found: dict[str, list[TableAccuracy]] = defaultdict(list)
    for each in tables:
        if any(row.relative_error is not None for row in each.rows):
            found[f"{source_name(each)} on {each.profile}"].append(each)
    return dict(found)


def source_name(of: TableAccuracy) -> str:
    """The repository of a table.

    >>> from tasp_lab.measure.accuracy import evaluate
    >>> from tasp_lab.measure.readers import parse_any_table
    >>> source_name(evaluate(parse_any_table("# source: github.com/a/b 1234 README.md\\nsystem,seq_total\\n", "t.csv")))
    'a/b'
    """
    source = of.table.headers.get("source", "")
    found = re.search(r"github\.com/([\w.-]+/[\w.-]+)", source)
    return found[1] if found else source.split(",")[0]


def worst_rows(source: str, tables: Sequence[TableAccuracy]) -> Iterator[Record]:
    """The rows of a source with the largest errors, each with its terms."""
    counted = [(each, row) for each in tables for row in each.rows if row.in_scope]
    counted.sort(key=lambda pair: -abs(pair[1].relative_error or 0.0))
    for each, row in counted[:WORST]:
        shape, terms = row.shape, terms_of(each, row)
        what = f"{row.schedule}, {shape['pass']}, {shape['mask']}, {shape['gpus']} GPUs, {shape['seq_total']} positions"
        times = (row.measured_s or 0.0, row.predicted_s or 0.0, terms.kernels_s, terms.messages_s)
        names = ("measured_ms", "predicted_ms", "kernels_ms", "messages_ms")
        yield {"source": source, "row": f"{what}, {shape['heads']} heads", "error": row.relative_error} | {
            name: 1e3 * time_s for name, time_s in zip(names, times, strict=True)
        }


class Terms(NamedTuple):
    """What a layer would take in seconds: its kernels on the busiest rank, and its messages without any kernel."""

    kernels_s: float
    messages_s: float


def terms_of(of: TableAccuracy, row: MeasuredRow) -> Terms:
    """The terms of a row that has a prediction; of several packings their mean."""
    assert isinstance(of.table, LayerTable), "the tables are of layers"
    measured = next(each for each in of.table.rows if each.line == row.shape["line"])
    layers = check_row(of.table, measured)
    run = row_run(of.table, measured, layers)
    alone = replace(run.machine, compute=INSTANT)
    kernels_s = messages_s = 0.0
    for layer in layers:
        for schedule in run.passes(layer):
            kernels_s += float(max(busy_s(schedule, run.machine.compute))) / len(layers)
            messages_s += float(simulate(schedule, alone, "array", events=False).time_s) / len(layers)
    return Terms(kernels_s, messages_s)


def _write_json(name: str, document: object) -> None:
    write_whole(FOLDER / name, (json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
