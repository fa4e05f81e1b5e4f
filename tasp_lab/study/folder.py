"""The folder of a study that was run, or is running: its rows, and where its numbers come from.

========================  =====================================================================================
file                      contents
========================  =====================================================================================
``study.toml``            the study as it was asked; of it ``[study]``, ``[schedule] baseline`` and ``[find]`` are read
``results.sqlite``        the rows while the study runs, `tasp_lab.study.store`; the files below are written at its end
``points.parquet``        every row; columns of `tasp_lab.study.rows` and one per further axis
``points.csv``            the same for other programs
``unanswered.csv``        the rows without a time or a bound, for people: `status` and `error` are why
``provenance.json``       `format`, `study`, `seed`, `version`, `command`, `constants`, `assumptions`
========================  =====================================================================================

A cell that has no value is missing (None in Python). Columns beyond `tasp_lab.study.rows.COLUMNS` are axes.
The baseline is simulated in every group, never settled by a bound, since speed-ups are over its time.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError, first_line
from tasp_lab.study.columns import DERIVED, OF_WINNERS
from tasp_lab.study.needed import needed
from tasp_lab.study.rows import COLUMNS, PREDICTED, WHAT, WHO
from tasp_lab.study.store import RESULTS

if TYPE_CHECKING:
    import pandas as pd

    from tasp_lab.study.diff import StudyDiff
    from tasp_lab.study.plot import StudyPicture
    from tasp_lab.study.report import StudyReport
    from tasp_lab.study.run import SoFar
    from tasp_lab.study.show import PivotTable, WinnerTable

STUDY, POINTS, POINTS_CSV, UNANSWERED = "study.toml", "points.parquet", "points.csv", "unanswered.csv"
PROVENANCE, REPORT, PLOTS = "provenance.json", "report.html", "plots"

FORMAT = 2
"""Of the files of a folder; a folder of another format is refused."""

Provenance = Mapping[str, Any]
"""``format``: `FORMAT`; ``study``: its name; ``seed``, ``version``; ``command``: what repeats it; ``constants``: a list
of ``machine``, ``name``, ``value``, ``low``, ``high``, ``source``, ``assumed``; ``assumptions``: a list of texts."""


@dataclass(frozen=True)
class Outline:
    """What a study asks.

    `baseline` is the schedule that speed-ups are over, None without one; `axes` are the columns with more than one
    value, in the order of the row; `find` is the section of that name.
    """

    name: str
    seed: int
    baseline: str | None
    axes: tuple[str, ...]
    find: Mapping[str, Any]


class StudyFolder:
    """A study that was run. Raises `StudyError` unless there is one at `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise StudyError(f"{path}: no such folder")
        if not self.path.is_dir():
            raise StudyError(f"{path}: expected the folder of a study, not a file")
        if not (self.path / STUDY).exists() and not (self.path / PROVENANCE).exists():
            raise StudyError(
                f"{path}: no study there, expected {STUDY}, as tasp-lab study run FILE --output {path} writes"
            )

    def rows(self) -> pd.DataFrame:
        """All rows with a time or a bound, by column; further axes of the study have columns of their own."""
        found = self._points
        return found[found["status"].isin(PREDICTED)].reset_index(drop=True)

    def unanswered(self) -> pd.DataFrame:
        """The rows without either: those that do not apply, and those that failed; `error` is the reason."""
        found = self._points
        return found[~found["status"].isin(PREDICTED)].reset_index(drop=True)

    @property
    def so_far(self) -> int:
        """How many points have a row."""
        return len(self._points)

    @cached_property
    def expected(self) -> int:
        """How many points the study has: more than there are rows while it runs, or where it was interrupted."""
        return len(self._points) if self._is_complete else len(self._so_far.points)

    def provenance(self) -> Provenance:
        """What the numbers follow from. Raises `StudyError` for a folder of another format."""
        return self._provenance

    @cached_property
    def study(self) -> Outline:
        """What the study asks."""
        asked, told = self._asked, self.provenance()
        baseline = asked.get("schedule", {}).get("baseline")
        name, seed = str(told.get("study") or self.path.resolve().name), int(told.get("seed") or 0)
        return Outline(name, seed, baseline, varying(self._points), asked.get("find", {}))

    def show(self, rows: Sequence[str] = (), columns: Sequence[str] = (), value: str | None = None,
             **asked: Any) -> WinnerTable | PivotTable:  # fmt: skip
        """The winner of each question, or a pivot table: `tasp_lab.study.show.show`."""
        from tasp_lab.study.show import show

        return show(self, rows, columns, value, **asked)

    def plot(self, x: str | None = None, y: str = "time_s", lines: str = "schedule",
             panels: Sequence[str] | None = None, **asked: Any) -> StudyPicture:  # fmt: skip
        """A quantity over an axis, or a map of the fastest schedules: `tasp_lab.study.plot.picture`."""
        from tasp_lab.study.plot import picture

        return picture(self, x, y, lines, panels, **asked)

    def diff(self, other: StudyFolder) -> StudyDiff:
        """What differs from this study to another one: `tasp_lab.study.diff.diff`."""
        from tasp_lab.study.diff import diff

        return diff(self, other)

    def report(self, *, where: str | None = None, baseline: str | None = None) -> StudyReport:
        """The study as one page of HTML: `tasp_lab.study.report.page.report`."""
        from tasp_lab.study.report import report

        return report(self, where=where, baseline=baseline)

    @cached_property
    def _points(self) -> pd.DataFrame:
        self.provenance()
        if not self._is_complete:
            return self._with_columns(needed("pandas", "a study").DataFrame(self._so_far.rows))
        try:
            found = needed("pandas", "a study").read_parquet(self._file(POINTS), engine="pyarrow")
        except ImportError:
            needed("pyarrow", "a study")
            raise
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.path / POINTS}: cannot be read: {first_line(error)}") from error
        missing = [each for each in ("machine", "schedule", "status", "time_s") if each not in found]
        if missing:
            raise StudyError(f"{self.path / POINTS}: no column {missing[0]!r}, expected the rows of a study")
        return self._with_columns(found)

    def _with_columns(self, found: pd.DataFrame) -> pd.DataFrame:
        if found.empty:
            raise self._nothing()
        return found.reindex(columns=[*found.columns, *(each for each in COLUMNS if each not in found)])

    @cached_property
    def _provenance(self) -> Provenance:
        if not self._is_complete:
            return self._so_far.provenance
        path = self._file(PROVENANCE)
        try:
            found: Provenance = json.loads(path.read_text())
            written = found.get("format")
        except (OSError, ValueError, AttributeError) as error:
            raise StudyError(f"{path}: cannot be read: {first_line(error)}") from error
        if written != FORMAT:
            raise StudyError(f"{self.path}: was written in format {written}, expected format {FORMAT} of this version")
        return found

    @cached_property
    def _asked(self) -> Mapping[str, Any]:
        path = self.path / STUDY
        try:
            return tomllib.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise StudyError(f"{path}: cannot be read: {first_line(error)}") from error

    @property
    def _is_complete(self) -> bool:
        """Whether a run ended: it removes these files when it begins."""
        return (self.path / PROVENANCE).exists() or (self.path / POINTS).exists()

    @cached_property
    def _so_far(self) -> SoFar:
        """What the store has of a study that is running, or was interrupted."""
        from tasp_lab.study.run import so_far

        if not (self.path / RESULTS).exists():
            raise self._nothing()
        return so_far(self.path)

    def _file(self, name: str) -> Path:
        """A file of the folder that a run writes."""
        path = self.path / name
        if not path.exists():
            raise self._nothing()
        return path

    def _nothing(self) -> StudyError:
        return StudyError(
            f"{self.path}: nothing was run yet, expected {POINTS} or {RESULTS}, as tasp-lab study run writes them"
        )


FOLLOWING = {
    "nodes": ("machine",), "ranks": ("machine",), "library": ("machine",),
    "heads": ("model",), "kv_heads": ("model",), "head_dim": ("model",), "overrides": ("variant",),
}  # fmt: skip
"""Columns that are determined by another one, if that one is there."""


def questions(rows: pd.DataFrame) -> list[str]:
    """The columns that say which point a row is: those of `WHO` and `WHAT` but the key, and further axes."""
    known = [each for each in (*WHO[1:], *WHAT) if each in rows]
    return known + [each for each in rows.columns if each not in (*COLUMNS, *DERIVED, *OF_WINNERS)]


def all_varying(rows: pd.DataFrame) -> list[str]:
    """The columns of `questions` with more than one value."""
    return [each for each in questions(rows) if rows[each].nunique(dropna=False) > 1]


def varying(rows: pd.DataFrame) -> tuple[str, ...]:
    """The columns of `questions` with more than one value, without those that follow from another one of them.

    What follows from what is seen in rows with an answer: a refused machine has no nodes.
    """
    found = all_varying(rows)
    known = rows[rows["status"].isin(PREDICTED)]
    return tuple(each for each in found if not any(_follows(known, each, of) for of in FOLLOWING.get(each, ())))


def _follows(rows: pd.DataFrame, column: str, of: str) -> bool:
    """Whether a column has one value for each value of another one that varies, or one value altogether."""
    if rows[of].nunique(dropna=False) < 2:
        return not rows.empty and rows[column].nunique(dropna=False) == 1
    return bool((rows.groupby(of, dropna=False)[column].nunique(dropna=False) <= 1).all())
