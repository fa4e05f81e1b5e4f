"""Plan the ten questions of ``questions.toml``: ``python -m experiments.studies.plans``.

Writes a row per simulated layout, ``plans.csv``, and the answers, ``README.md``.
"""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import tasp_lab
from tasp_lab.core.progress import print_progress
from tasp_lab.core.units import format_four_digits, format_size_about, parse_count
from tasp_lab.core.version import MODEL_VERSION
from tasp_lab.planning.plan import Plan
from tasp_lab.planning.search import describe

FOLDER = Path(__file__).parent
SIMULATIONS = 4

COLUMNS = ("machine", "model", "seq", "batch_tokens", "recommended", "layout", "time_s", "tokens_per_s_per_gpu", "mfu",
           "memory_bytes", "expected_regret")  # fmt: skip

HEAD = """# Ten plans

Which layout trains a model fastest on 8 to 1,024 GPUs? Planned with models {version} by
`python -m experiments.studies.plans`, up to {simulations} simulated layouts each (questions in
`questions.toml`, [rows](plans.csv), [how plans are searched](../../../docs/plan.md)).
Whole steps are less checked than layers.

| question | recommended | tokens/s per GPU | MFU | memory | expected regret | left, at most faster |
|---|---|---|---|---|---|---|
"""


def questions() -> list[dict[str, str]]:
    """The questions of the file."""
    found: list[dict[str, str]] = tomllib.loads((FOLDER / "questions.toml").read_text())["question"]
    return found


def row_of(question: dict[str, str], found: Plan) -> str:
    """The row of the table of answers."""
    what = f"{question['model']}, {question['seq']} positions, {question['batch_tokens']} tokens, {question['machine']}"
    if not found.fits:
        return f"| {what} | nothing fits | | | {format_size_about(found.found.too_large[0].memory.total)} | | |"
    best = found.best
    left = f"{len(found.found.left)}, {max(0.0, 1 - found.least_left):.1%}" if found.found.left else "0"
    mfu = "" if best.mfu is None else f"{best.mfu:.1%}"
    return (
        f"| {what} | {describe(best.plan)} | {format_four_digits(best.tokens_per_s / best.ranks)} | {mfu} | "
        f"{format_size_about(best.memory.total)} | {found.expected_regret:.1%} | {left} |"
    )


def write(lines: list[str], rows: list[dict[str, object]]) -> None:
    """Write the answers and rows so far: an interrupted run keeps them."""
    with (FOLDER / "plans.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    head = HEAD.format(version=MODEL_VERSION, simulations=SIMULATIONS)
    (FOLDER / "README.md").write_text(head + "\n".join(lines) + "\n")


def main() -> None:
    """Plan all questions, and write rows and answers after each."""
    lines, rows = list[str](), list[dict[str, object]]()
    for question in questions():
        seq, tokens = (parse_count(question[name], name) for name in ("seq", "batch_tokens"))
        print_progress(f"{question['machine']}, {question['model']}, {question['seq']}")
        found = tasp_lab.plan(question["machine"], question["model"], seq, tokens, simulations=SIMULATIONS,
                              changes=False, workers=2)  # fmt: skip
        lines.append(row_of(question, found))
        for step in found.steps if found.fits else ():
            values: dict[str, object] = {**question, "recommended": step is found.best, "layout": describe(step.plan)}
            values |= {name: value for name, value in step.to_dict().items() if name in COLUMNS[6:]}
            values["expected_regret"] = found.expected_regret if step is found.best else None
            rows.append(values)
        write(lines, rows)


if __name__ == "__main__":
    main()
