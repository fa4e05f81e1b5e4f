"""Pages of reproductions: a record and a page for each, and the index of all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.common import Record, markdown_table
from experiments.reproductions.reproduction import Figure, Found, Reproduction, Trial, inside_of, median_error, scored
from tasp_lab import __version__
from tasp_lab.core.files import write_whole

FOLDER = Path(__file__).parent
MAX_FIGURES = 40
"""A page lists so many figures; of more it has the reasons why some are outside, and the record has all."""

INDEX = """\
# Reproductions

Published results beside predictions, to which nothing was tuned. Each has a folder with its question, its figures and \
what was tried where they differ; `python -m experiments.reproductions NAME` makes one of them again, and `all` \
everything with this page.

A prediction has an interval, 5 to 95 % ([decision 23](../../docs/why/predictions.md#23-intervals)), made without \
errors of the source that it is held against. Where few machines were measured it is wide, so the median error \
stands beside the share inside.

A figure that no model can meet is left out of both, with the arithmetic that shows it beside the figure; the reason \
stands in the file that holds the figures (`left_out` of `published.toml`, `# out_of_scope:` of a table)."""


def write(reproduction: Reproduction, found: Found, folder: Path = FOLDER) -> None:
    """Write the record and the page of a reproduction."""
    place = folder / reproduction.name
    place.mkdir(parents=True, exist_ok=True)
    data = json.dumps(record(reproduction, found), indent=1)
    write_whole(place / "result.json", f"{data}\n".encode())
    write_whole(place / "result.md", f"{page(reproduction, found)}\n".encode())


def record(reproduction: Reproduction, found: Found) -> Record:
    """The record for JSON."""
    head, counted = headline(reproduction, found.figures), scored(found.figures)
    return {
        "name": reproduction.name, "title": reproduction.title, "question": reproduction.question,
        "source": reproduction.source, "command": command(reproduction), "version": __version__,
        "headline": head.record(), "inside": inside_of(counted),
        "median_error": median_error(counted) if counted else None,
        "verdict": reproduction.verdict, "figures": [each.record() for each in found.figures],
        "trials": [each.record() for each in found.trials], **found.record,
    }  # fmt: skip


def headline(reproduction: Reproduction, figures: Iterable[Figure]) -> Figure:
    """The figure that stands for the result."""
    return next(each for each in figures if each.what == reproduction.headline)


def command(reproduction: Reproduction) -> str:
    """What makes the result."""
    return f"python -m experiments.reproductions {reproduction.name}"


def page(reproduction: Reproduction, found: Found) -> str:
    """The page in Markdown."""
    figures = found.figures
    return "\n\n".join([
        f"# {reproduction.title}",
        f"**{reproduction.question}**",
        f"Made by `{command(reproduction)}`. Source: {reproduction.source}. {reproduction.setting}",
        f"**Verdict.** {counts(figures)} {reproduction.verdict}",
        *figures_text(figures), *trials_text(found.trials), *found.sections,
    ])  # fmt: skip


def counts(figures: Sequence[Figure]) -> str:
    """How many of those that count are inside, their median error, and how many do not count."""
    counted = scored(figures)
    head = (
        f"{inside_of(counted)} of {len(counted)} inside, median error {median_error(counted):.0%}." if counted else ""
    )
    without = len(figures) - len(counted)
    return f"{head} {without} of {len(figures)} left out of scores.".strip() if without else head


def figures_text(figures: Sequence[Figure]) -> list[str]:
    """The figures; of many the reasons why some are outside."""
    if len(figures) > MAX_FIGURES:
        return reasons_text(figures)
    rows = [
        (each.what, each.published_text, each.predicted_text, f"{each.error:+.0%}", each.verdict) for each in figures
    ]
    return ["## Figures", markdown_table(("what", "published", "predicted (5 to 95 %)", "error", "verdict"), rows)]


def reasons_text(figures: Sequence[Figure]) -> list[str]:
    """The reasons, how many figures that count are outside by each, and the worst of them."""
    found: dict[str, list[Figure]] = {}
    for each in scored(figures):
        if not each.inside:
            found.setdefault(each.reason, []).append(each)
    rows = [
        (reason, f"{len(outside)}", f"{median_error(outside):.0%}", worst.what, worst.published_text,
         worst.predicted_text)
        for reason, outside in found.items() for worst in [max(outside, key=lambda each: abs(each.error))]
    ]  # fmt: skip
    columns = ("because", "outside", "their median error", "the worst", "published", "predicted (5 to 95 %)")
    head = "The record has all figures."
    return (
        [f"## The {sum(map(len, found.values()))} figures outside", head, markdown_table(columns, rows)] if rows else []
    )


def trials_text(trials: Sequence[Trial]) -> list[str]:
    """What was tried."""
    if not trials:
        return []
    rows = [
        (each.change, f"{len(each.before)}", f"{inside_of(each.before)}, {median_error(each.before):.0%}",
         f"{inside_of(each.after)}, {median_error(each.after):.0%}", each.found)
        for each in trials
    ]  # fmt: skip
    columns = ("change", "figures", "inside and median error as predicted", "with the change", "so")
    head = "Each changes one thing, to check a reason; none is a prediction."
    return ["## What was tried", head, markdown_table(columns, rows)]


def index(records: Sequence[Record]) -> str:
    """The index, a row per result."""
    columns = ("result", "published", "predicted (5 to 95 %)", "inside", "median error", "verdict")
    return f"{INDEX}\n\n{markdown_table(columns, [_index_row(each) for each in records])}"


def _index_row(found: Record) -> list[str]:
    fields = {name: value for name, value in found["headline"].items() if name != "inside"}
    head = Figure(**fields | {"reason": fields["reason"] or ""})
    count = sum("left_out" not in each for each in found["figures"])
    without = f"; {len(found['figures']) - count} left out" * (count < len(found["figures"]))
    return [
        f"[{found['title']}]({found['name']}/result.md): {head.what}", head.published_text, head.predicted_text,
        f"{found['inside']} of {count}{without}", f"{found['median_error']:.0%}" if count else "-", found["verdict"],
    ]  # fmt: skip


def write_index(names: Sequence[str], folder: Path = FOLDER) -> None:
    """Write the index from the records of these reproductions."""
    records = [json.loads((folder / name / "result.json").read_text()) for name in names]
    write_whole(folder / "README.md", f"{index(records)}\n".encode())
