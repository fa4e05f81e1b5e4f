"""Lines, tables and JSON objects on the streams of the process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tasp_lab.core.progress import count_lines, on_one_line, print_progress
from tasp_lab.core.tables import DEFAULT_WIDTH, Part, Table

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Document = dict[str, object]


class Progress:
    """Progress on standard error: a bar on a terminal, below the lines, else lines alone.

    The bar shows how many stages of how many have ended, what runs, and the time since the first one began. It is there
    until all have ended or the context is left.
    """

    def __init__(self, *, lines_only: bool = False) -> None:
        self._is_bar = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not lines_only
        self._bar: RichProgress | None = None

    def line(self, text: str) -> None:
        """Show a line, above the bar if there is one."""
        if self._bar is None:
            print_progress(text)
        else:
            self._bar.console.print(on_one_line(text), markup=False, highlight=False, soft_wrap=True)

    def count(self, done: int, total: int, what: str) -> None:
        """Show how many stages have ended and which one begins, see `tasp_lab.core.progress.CountCallback`."""
        if not self._is_bar:
            count_lines(print_progress)(done, total, what)
        elif done < total:
            if self._bar is None:
                self._bar = _bar(total, what)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=what, refresh=True)
        else:
            self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()


def _bar(total: int, what: str) -> RichProgress:
    """A bar of rich, which is not shown before it is started."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total)
    return bar


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
