"""Lines, tables and JSON objects on the streams of the process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

from tasp_lab.core.progress import count_lines, on_one_line, print_progress
from tasp_lab.core.tables import DEFAULT_WIDTH, Part, Table

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn

    from tasp_lab.core.report import Report

Document = dict[str, object]


UNLIMITED = 1000
"""Columns of text that no table needs."""

LINES = 10
"""Lines of a whole study where there is no terminal."""


class Progress:
    """Progress on standard error: a bar on a terminal, below the lines, else lines alone. A context manager.

    The bar is there until all has ended or the context is left.
    """

    def __init__(self, *, lines_only: bool = False) -> None:
        self.ended = self.total = 0
        self._is_bar = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not lines_only
        self._bar: RichProgress | None = None
        self._begin: tuple[int, float] | None = None
        self._next = 0

    def line(self, text: str) -> None:
        """Show a line, above the bar if there is one."""
        if self._bar is None:
            print_progress(text)
        else:
            self._bar.console.print(on_one_line(text), markup=False, highlight=False, soft_wrap=True)

    def count(self, done: int, total: int, what: str) -> None:
        """Show how many stages have ended and which one begins, see `tasp_lab.core.progress.CountCallback`.

        The bar has the time since the first stage began.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        if not self._is_bar:
            count_lines(print_progress)(done, total, what)
        elif done < total:
            text = TextColumn("{task.description}", markup=False)
            self._show(done, total, what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
        else:
            self.stop()

    def points(self, ended: int, total: int, by_status: Mapping[str, int]) -> None:
        """Show that `ended` of `total` points of a study have a row; those of the first call were there before.

        The bar has the time that is left. Without a terminal there is a line per tenth, which counts the points that do
        not apply or failed.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        from tasp_lab.study.check import text_of_seconds
        from tasp_lab.study.frames import statuses_text
        from tasp_lab.study.point import PREDICTED

        self.ended, self.total = ended, total
        first, begin_s = self._begin = self._begin or (ended, time.monotonic())
        if self._is_bar:
            percent, left = TextColumn("{task.percentage:>3.0f}%"), (TextColumn("ETA"), TimeRemainingColumn())
            self._show(ended, total, "", percent, BarColumn(), MofNCompleteColumn(), *left)
        elif ended >= self._next:
            self._next = ended + max(1, total // LINES)
            unanswered = statuses_text({name: count for name, count in by_status.items() if name not in PREDICTED})
            text = f"{ended:,} of {total:,} points" + (f" ({unanswered})" if unanswered else "")
            if ended not in (first, total):
                rest_s = (time.monotonic() - begin_s) / (ended - first) * (total - ended)
                text += f", about {text_of_seconds(rest_s)} left"
            print_progress(text)

    def _show(self, done: int, total: int, what: str, *columns: ProgressColumn) -> None:
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        if self._bar is None:
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(what, total=total, completed=done)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=what, refresh=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def print_json(document: Document) -> None:
    """Print one JSON object on standard output."""
    print(json.dumps(document, allow_nan=False))


def tell(result: Report, json: bool, *, wide: bool = False) -> None:
    """Print a result, as one JSON object if asked."""
    if json:
        print_json(result.to_dict())
    else:
        print_parts(result.parts(), wide=wide)


def print_parts(parts: Iterable[Part], *, wide: bool = False) -> None:
    """Print tables and lines on standard output, as wide as the terminal, or as COLUMNS says; `wide` has no limit.

    A line that is broken goes on below its first word.
    """
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    width = UNLIMITED if wide else None if known else DEFAULT_WIDTH
    console = Console(width=width, markup=False, emoji=False)
    for part in parts:
        if isinstance(part, Table):
            part.print_on(console)
        elif known and not wide:
            below = " " * (len(part) - len(part.lstrip()))
            print("\n".join(wrap(part, console.width, subsequent_indent=below,
                                 break_long_words=False, break_on_hyphens=False) or [""]))  # fmt: skip
        else:
            print(part)
