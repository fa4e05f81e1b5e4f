"""Commands with all of their output options, and checks of what they print and write."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import pkgutil
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from cyclopts import App
from matplotlib.image import imread
from rich.console import Console

import tasp_lab
from docs.generate import with_site_parts
from tasp_lab.cli.app import app_of
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Table
from tests.docs.documents import ROOT

Document = dict[str, Any]

WIDTH = 80
"""Columns of the terminal."""

ROWS = ("predictions", "runs", "steps", "smallest", "cells", "rows", "points", "topologies", "profiles", "tables")
"""Fields of documents that hold rows, the first of which is there."""

OWN_AXES = ("n",)
"""Axes of the studies of tests."""


def commands(of: App | None = None, name: str = "") -> Iterator[tuple[str, App]]:
    """The commands of an application and of its groups of commands, by what is typed."""
    of = of or app_of()
    if name and of.default_command is not None:
        yield name, of
    for word in of:
        if not word.startswith("-"):
            yield from commands(of[word], f"{name} {word}".strip())


def output_options(command: App) -> list[str]:
    """The options of a command that are shown in the group Output."""
    found = command.assemble_argument_collection()
    return sorted(
        each.name for each in found if each.parse and "Output" in {group.name for group in each.parameter.group or ()}
    )


def object_of(text: str) -> Document:
    """The one JSON object of a text, on one line and without NaN and infinities."""
    (line,) = text.splitlines()

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} in {line[:200]}")

    document = json.loads(line, parse_constant=refuse)
    assert isinstance(document, dict)
    return document


def rows_of(document: Document) -> list[Document]:
    """The rows of an object, those of its parts one after the other."""
    if "parts" in document:
        return [row for part in document["parts"] for row in rows_of(part)]
    if "results" in document:
        return [*document["results"], *document["not_simulated"]]
    rows = next((document[field] for field in ROWS if isinstance(document.get(field), list)), [])
    return [row for row in rows if isinstance(row, dict)]


@cache
def guides() -> str:
    """All guides, as the site has them."""
    return with_site_parts("".join(each.read_text() for each in (ROOT / "docs").glob("*.md")))


def undocumented(document: Document) -> list[str]:
    """The fields of an object and of its rows that the guides do not have."""
    text = guides()
    fields = dict.fromkeys(name for each in (document, *rows_of(document)) for name in each)
    return [name for name in fields if f"`{name}`" not in text and name not in OWN_AXES]


def too_long(text: str, width: int = WIDTH) -> list[str]:
    """The lines that are longer than a terminal although they could be broken."""
    return [line for line in text.splitlines() if len(line) > width and " " in line.strip()[:width]]


def words_of_tables(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A set that gets every word of the columns and cells of tables that are printed; paths are broken at slashes."""
    words = set[str]()

    def record(table: Table, console: Console) -> None:
        for text in (*table.columns, *(cell for row in table.rows for cell in row)):
            for word in text.split():
                parts = re.findall("[^/]*/+|[^/]+", word)
                ends = range(len(parts) + 1)
                words.update("".join(parts[first:last]) for last in ends for first in range(last))
        print_on(table, console)

    print_on = Table.print_on
    monkeypatch.setattr(Table, "print_on", record)
    return words


def broken(text: str, words: set[str]) -> list[str]:
    """The pieces of words in the lines of tables."""
    lines = [line for line in text.splitlines() if line[:1] in ("│", "┃")]
    return [word for line in lines for word in re.sub("[│┃]", " ", line).split() if word not in words]


# -- results ----------------------------------------------------------------------------------------------------------
def reports() -> list[type[Report]]:
    """The classes of all results, of every module of tasp-lab."""
    for found in pkgutil.walk_packages(tasp_lab.__path__, "tasp_lab."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    pending, classes = [Report], list[type[Report]]()
    while pending:
        below = pending.pop().__subclasses__()  # type: ignore[type-abstract]
        pending += below
        classes += below
    return [each for each in classes if each.__module__.startswith("tasp_lab.")]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """A list that gets every result whose object is made."""
    found = list[Report]()

    def recording(to_dict: Callable[[Report], Document]) -> Callable[[Report], Document]:
        def record(report: Report) -> Document:
            found.append(report)
            return to_dict(report)

        return record

    for each in reports():
        monkeypatch.setattr(each, "to_dict", recording(each.to_dict))  # type: ignore[arg-type]
    return found


def check_report(report: Report) -> None:
    """A result is shown in a notebook and on one line, and is a data frame with its rows."""
    page = report._repr_html_()
    assert page.count("<table>") == page.count("</table>")
    assert any(element in page for element in ("<table>", "<div>", "<img "))
    assert len(repr(report)) < 200
    assert len(repr(report).splitlines()) == 1
    assert len(report.to_pandas()) == len(report.records())
    assert str(report) or not report.parts()


# -- files ------------------------------------------------------------------------------------------------------------
def check_picture(path: Path) -> None:
    """A picture can be opened, and is not of one colour."""
    content = path.read_bytes()
    if path.suffix == ".png":
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        pixels = imread(path)
        assert pixels.ndim == 3
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 2
    elif path.suffix == ".svg":
        root = ElementTree.fromstring(content)
        assert root.tag.endswith("svg")
        assert sum(each.tag.endswith(("path", "image", "use")) for each in root.iter()) > 10
    else:
        assert content.startswith(b"%PDF-")
        assert content.rstrip().endswith(b"%%EOF")
        streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.DOTALL)
        assert any(len(zlib.decompress(each)) > 1000 for each in streams if each[:1] == b"x")


def check_trace(path: Path) -> None:
    """A Chrome trace has events, also of one rank, which sends nothing; those with a length have times."""
    events = json.loads(path.read_bytes())["traceEvents"]
    assert events
    bars = [each for each in events if each["ph"] == "X"]
    assert all(math.isfinite(each["ts"]) and each["dur"] >= 0 for each in bars)


def check_csv(path: Path, document: Document) -> None:
    """A table has the rows of the JSON object, with the same numbers."""
    rows, expected = list(csv.DictReader(io.StringIO(path.read_text()))), rows_of(document)
    assert len(rows) == len(expected)
    assert csv.DictReader(io.StringIO(path.read_text())).fieldnames
    for row, told in zip(rows, expected, strict=True):
        assert None not in row
        assert None not in row.values()
        for name, text in row.items():
            if not isinstance(value := told.get(name, ""), (list, dict)) and name in told:
                assert _same(text, value), (name, text, value)


def _same(text: str, value: object) -> bool:
    if value is None:
        return text == ""
    if isinstance(value, (bool, str)):
        return text == str(value)
    return float(text) == value
