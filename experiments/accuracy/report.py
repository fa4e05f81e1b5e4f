"""The accuracy report: predictions for every published measured table.

``python -m experiments.accuracy.report`` writes ``experiments/accuracy/accuracy.json``, its tables ``accuracy.md``,
the picture ``accuracy.png`` of all errors, and one picture per machine family, such as ``accuracy_h100.png``. All
measurements are third-party.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from experiments.common import markdown_table
from tasp_lab import accuracy
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.core.tables import Table
from tasp_lab.core.units import format_size_about
from tasp_lab.measure.accuracy import AccuracyReport, CollectiveAccuracy, own_tables
from tasp_lab.measure.accuracy.report import left_out_of, left_out_parts
from tasp_lab.plots.accuracy import TARGET_ERROR, draw_tables
from tasp_lab.plots.timelines import render

FOLDER = Path(__file__).parent


def main() -> None:
    """Judge the repository's own tables and write what was found."""
    found = accuracy(*sorted(own_tables().glob("*.csv")), progress=progress)
    tables = [each for each in found if isinstance(each, CollectiveAccuracy)]
    write_whole(FOLDER / "accuracy.json", (json.dumps(_document(found), indent=1) + "\n").encode())
    write_whole(FOLDER / "accuracy.md", (report_text(tables) + "\n").encode())
    overview = draw_tables([each for each in tables if each.rows], "Predicted over measured time of every table")
    write_whole(FOLDER / "accuracy.png", render(overview, "png"))
    for family, members in families(tables).items():
        figure = draw_tables(members, f"{family.upper()}: measured times beside predictions")
        write_whole(FOLDER / f"accuracy_{family}.png", render(figure, "png"))
    print(summary(tables))


def title(name: str) -> str:
    """The name of a table without folders and the ending of its file."""
    return Path(name).name.replace(".csv", "")


def families(tables: Sequence[CollectiveAccuracy]) -> dict[str, list[CollectiveAccuracy]]:
    """The tables that have a prediction, by the machine family of their profile."""
    found: dict[str, list[CollectiveAccuracy]] = defaultdict(list)
    for each in tables:
        if each.rows:
            found[str(each.table.profile).partition("-")[0]].append(each)
    return dict(found)


def report_text(tables: Sequence[CollectiveAccuracy]) -> str:
    """Summary, tables in scope with their errors, and the others with their reasons, in Markdown."""
    in_scope = markdown_table(
        ("table", "profile", "collective", "ranks", "sizes", "mean", "worst", "bias", "dominant rule"),
        [_row(each) for each in tables if each.in_scope],
    )
    others = markdown_table(
        ("table", "profile", "collective", "ranks", "not compared, because"),
        [(*_name(each), each.reason or "no size is in scope") for each in tables if not each.in_scope],
    )
    left_out = markdown_table(
        ("collectives", "tables", "rows", "mean error", "inside", "interval score", "in sample"),
        [row for part in left_out_parts(left_out_of(tables)) if isinstance(part, Table) for row in part.rows],
    )
    return (
        "Each system predicted without its own tables: the median over tables of mean errors, rows inside intervals of "
        "90 %, and the score of these intervals; in sample with the constants from tables of the same system, too.\n\n"
        f"{left_out}\n\n{summary(tables)}\n\n"
        "Made by `python -m experiments.accuracy.report`. Error of a size: predicted over measured time, less one. "
        "Mean and worst are of absolute errors, the bias is of signed ones. The dominant rule took most of the "
        f"predicted time.\n\n{in_scope}\n\n{others}"
    )


def summary(tables: Sequence[CollectiveAccuracy]) -> str:
    """The mean error of the median table, the number of tables within the target, and the worst table."""
    means = {title(each.table.name): float(abs(each.errors).mean()) for each in tables if each.in_scope}
    if not means:
        return "No table is in scope."
    worst = max(means, key=lambda name: means[name])
    within, near = (sum(mean <= limit for mean in means.values()) for limit in (TARGET_ERROR, 2 * TARGET_ERROR))
    return (
        f"{len(means)} of {len(tables)} tables are in scope. The mean error of the median table is "
        f"{statistics.median(means.values()):.1%}. "
        f"Within {TARGET_ERROR:.0%}: {within} tables; within {2 * TARGET_ERROR:.0%}: {near}. "
        f"The worst is {worst}: {means[worst]:.1%}."
    )


def _name(each: CollectiveAccuracy) -> tuple[str, str, str, str]:
    table = each.table
    return title(table.name), str(table.profile), str(table.collective), str(table.ranks)


def _row(each: CollectiveAccuracy) -> tuple[str, ...]:
    errors, sizes = each.errors, [row.size_bytes for row in each.rows if row.in_scope]
    ends = " to ".join(format_size_about(size) for size in dict.fromkeys((min(sizes), max(sizes))))
    of_errors = (f"{abs(errors).mean():.1%}", f"{abs(errors).max():.1%}", f"{errors.mean():+.1%}")
    return (*_name(each), f"{len(sizes)}: {ends}", *of_errors, each.dominant_rule)


def _document(found: AccuracyReport) -> dict[str, object]:
    """The document of `tasp-lab accuracy --json`, files by their names only."""
    named = [each.to_dict() | {"file": Path(each.table.name).name} for each in found]
    return found.to_dict() | {"tables": named}


if __name__ == "__main__":
    main()
