"""Make the ranking benchmark anew from the tables of layers that come with tasp-lab.

``python -m experiments.ranking_benchmark.make`` writes ``questions.csv``, the entry of tasp-lab and ``leaderboard.md``.
A question is what `tasp_lab.measure.accuracy.decisions` takes for one. The errors that tasp-lab states for a row are
those fitted without the source of the row. Takes some minutes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments import common
from experiments.ranking_benchmark.benchmark import (
    COLUMNS,
    ENTRIES,
    FOLDER,
    PAIRS,
    QUESTIONS,
    leaderboard,
    load_questions,
)
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.sampling import FEW_SAMPLES
from tasp_lab.measure.accuracy.decisions import Question, line_of, questions_of
from tasp_lab.measure.accuracy.layer import LayerEvaluator
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy
from tasp_lab.measure.readers import LayerTable, find_all_tables

Cells = dict[str, object]

SHAPE = (
    "system", "variant", "pass", "mask", "gpus", "nodes", "batch", "seq_total", "heads", "kv_heads", "head_dim",
    "dtype", "kernel",
)  # fmt: skip
"""Columns of the measured tables that are copied."""


def main() -> None:
    """Predict all tables of layers, and write the files of the benchmark."""
    evaluator, tables = LayerEvaluator(FEW_SAMPLES), []
    for table in find_all_tables([own_tables() / "layers"]):
        assert isinstance(table, LayerTable), "the folder has tables of layers"
        progress(Path(table.name).name)
        tables.append(evaluator.evaluate(table))
    write(tables)


def write(tables: Sequence[TableAccuracy], folder: Path = FOLDER) -> None:
    """The files of the benchmark of these tables."""
    questions = [(Path(table.table.name).stem, table, each) for table in tables for each in questions_of(table)]
    asked: list[Cells] = []
    entry: list[Cells] = []
    pairs: list[Cells] = []
    for number, (stem, table, question) in enumerate(questions, 1):
        asked += [question_cells(f"q{number}", stem, table, question, row) for row in question.rows]
        entry += entry_cells(stem, question)
        pairs += pair_cells(stem, question)
    _write_csv(folder / QUESTIONS.name, asked)
    _write_csv(folder / ENTRIES.name / "tasp-lab.csv", entry)
    _write_csv(folder / ENTRIES.name / f"tasp-lab{PAIRS}", pairs)
    found = leaderboard(load_questions(folder / QUESTIONS.name), folder / ENTRIES.name)
    rows = [{"predictor": name, **figures} for name, figures in found.items()]
    head = "Made by `python -m experiments.ranking_benchmark.make`; [what the columns mean](README.md#scores).\n\n"
    write_whole(folder / "leaderboard.md", (head + common.table(rows, COLUMNS) + "\n").encode())


def row_name(stem: str, row: MeasuredRow) -> str:
    """The name of a row: its table and line."""
    return f"{stem}:{line_of(row)}"


def question_cells(name: str, stem: str, table: TableAccuracy, question: Question, row: MeasuredRow) -> Cells:
    """A line of ``questions.csv``."""
    measured_s, _, costs = row.known()
    shape = {column: "" if row.shape[column] is None else row.shape[column] for column in SHAPE}
    documents = " | ".join(" ".join(map(str, lengths)) for lengths in getattr(table.table, "documents", ()))
    return {
        "question": name, "row": row_name(stem, row), "machine": question.machine, "source": question.source,
        "schedule": row.schedule, **shape, "documents": documents if "varlen" in str(row.shape["mask"]) else "",
        "bytes_per_rank": f"{costs.bytes_per_rank:.9g}", "steps": f"{costs.steps:g}",
        "link_bytes_per_s": f"{costs.link_bytes_per_s:.9g}", "measured_s": f"{measured_s:.9g}",
    }  # fmt: skip


def entry_cells(stem: str, question: Question) -> Iterable[Cells]:
    """The lines of tasp-lab's entry for a question."""
    for row, regret in zip(question.rows, question.expected_regrets, strict=True):
        low, high = ("", "") if row.interval is None else (f"{row.interval.low_s:.6g}", f"{row.interval.high_s:.6g}")
        yield {"row": row_name(stem, row), "time_s": f"{row.predicted_s:.9g}", "time_low_s": low, "time_high_s": high,
               "expected_regret": f"{regret:.9g}"}  # fmt: skip


def pair_cells(stem: str, question: Question) -> Iterable[Cells]:
    """The lines of tasp-lab's probabilities for a question."""
    for pair in question.pairs:
        names = {"first": f"{stem}:{pair.first}", "second": f"{stem}:{pair.second}"}
        yield {**names, "probability_first_faster": f"{pair.probability_first_faster:.6g}"}


def _write_csv(path: Path, rows: Sequence[Cells]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


if __name__ == "__main__":
    main()
