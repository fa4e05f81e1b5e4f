"""Lines, tables and JSON objects on the streams of the process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from tasp_lab.tables import DEFAULT_WIDTH, Part, Table

Document = dict[str, object]


def print_json(document: Document) -> None:
    """Print one JSON object on standard output."""
    print(json.dumps(document, allow_nan=False))


def print_parts(parts: Iterable[Part]) -> None:
    """Print tables and lines on standard output, as wide as the terminal if it is one."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else DEFAULT_WIDTH
    console = Console(width=width, markup=False, emoji=False)
    for part in parts:
        if isinstance(part, Table):
            part.print_on(console)
        else:
            print(part)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = (0,)) -> None:
    """Print a table on standard output; the columns at the positions `texts` are text, the others numbers."""
    print_parts([Table(title, columns, rows, texts)])
