"""Progress of a study with the time that is left: a bar on a terminal, else a line per tenth."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from tasp_lab.core.progress import print_progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

LINES = 10
"""Lines of a whole study where there is no terminal."""


def _unanswered(by_status: Mapping[str, int]) -> str:
    """How many points have no answer, in brackets; nothing without any.

    >>> _unanswered({"ok": 3, "does not apply": 2, "failed": 0})
    ' (2 do not apply)'
    """
    from tasp_lab.study.captions import statuses_text
    from tasp_lab.study.rows import PREDICTED

    found = statuses_text({status: count for status, count in by_status.items() if status not in PREDICTED})
    return f" ({found})" if found else ""


class StudyProgress:
    """Shows how many points have a row, on standard error. A context manager."""

    def __init__(self, *, lines_only: bool = False) -> None:
        self.ended = self.total = 0
        self._is_bar = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not lines_only
        self._bar: RichProgress | None = None
        self._begin: tuple[int, float] | None = None
        self._next = 0

    def done(self, ended: int, total: int, by_status: Mapping[str, int]) -> None:
        """Show that `ended` of `total` points have a row; those of the first call were there before.

        Points that do not apply or failed are named on the lines.
        """
        self.ended, self.total = ended, total
        if self._begin is None:
            self._begin = ended, time.monotonic()
        if self._is_bar:
            self._show()
        elif ended >= self._next:
            self._next = ended + max(1, total // LINES)
            print_progress(f"{ended:,} of {total:,} points{_unanswered(by_status)}{self._left()}")

    def _left(self) -> str:
        """How long the rest takes, if that is known."""
        from tasp_lab.study.check import text_of_seconds

        assert self._begin is not None, "the first call sets it"
        first, begin_s = self._begin
        if self.ended in (first, self.total):
            return ""
        rest_s = (time.monotonic() - begin_s) / (self.ended - first) * (self.total - self.ended)
        return f", about {text_of_seconds(rest_s)} left"

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        if self._bar is None:
            columns = TextColumn("{task.percentage:>3.0f}%"), BarColumn(), MofNCompleteColumn(), TextColumn("ETA")
            self._bar = RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.add_task("", total=self.total, completed=self.ended)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self.ended)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> StudyProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
