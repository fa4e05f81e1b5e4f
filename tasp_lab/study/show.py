"""Tables of a study: the winner of each question, or a pivot table of any column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.study.captions import counts, counts_text, held_constant, held_text, listed, statuses_text
from tasp_lab.study.columns import DERIVED, NO_VALUE, check_columns, is_text, records_of, text_of, title_of
from tasp_lab.study.folder import UNANSWERED, StudyFolder, varying
from tasp_lab.study.pivot import WINNER, Key, Pivot, heading, pivot, sorted_keys
from tasp_lab.study.selection import select
from tasp_lab.study.winners import winners, with_derived

if TYPE_CHECKING:
    import pandas as pd

TIE_RULE = "too close to call: the winner is faster with a probability below 95 %"


@dataclass(frozen=True)
class Selection:
    """The rows that a table or picture is of.

    `rows` have the derived columns.
    """

    folder: StudyFolder
    rows: pd.DataFrame
    baseline: str | None
    where: str | None

    @property
    def unanswered(self) -> pd.DataFrame:
        """The rows without an answer that the filter leaves; they lack what it uses if that is a result."""
        return select(self.folder.unanswered().reindex(columns=self.rows.columns), self.where, or_none=True)

    @property
    def counts(self) -> dict[str, int]:
        return counts(self.rows, self.unanswered)

    def to_dict(self, shown: Sequence[str]) -> dict[str, object]:
        """What all tables state in JSON."""
        return {
            "study": self.folder.study.name,
            "baseline": self.baseline,
            "where": self.where,
            "held": held_constant(self.rows, shown),
            "counts": self.counts,
            "points": self.folder.expected,
            "rows_so_far": self.folder.so_far,
        }

    def lines(self, shown: Sequence[str]) -> list[str]:
        """What all tables state for people."""
        held = held_text(held_constant(self.rows, shown))
        filtered = [f"where {self.where}"] if self.where else []
        return [
            *([f"all with {held}"] if held else []),
            *filtered,
            counts_text(self.counts),
            *so_far_lines(self.folder),
        ]


def so_far_lines(folder: StudyFolder) -> list[str]:
    """How many points of a study have a row, if not all of them have."""
    missing = folder.expected - folder.so_far
    return (
        [f"{folder.so_far:,} of {folder.expected:,} points so far; the run goes on or was interrupted"]
        if missing
        else []
    )


def selected(folder: StudyFolder, where: str | None = None, baseline: str | None = None) -> Selection:
    """The rows of a study that a filter leaves, with speed-ups over a schedule, else over the study's baseline.

    Raises `StudyError` if none is left.
    """
    base = baseline or folder.study.baseline
    rows = folder.rows()
    if rows.empty:
        found = statuses_text(counts(folder.unanswered()))
        raise StudyError(f"{folder.path}: no row has a time: {found}; reasons are in {UNANSWERED}")
    known = base if baseline or base in set(rows["schedule"]) else None
    return Selection(folder, select(with_derived(rows, known), where), known, where)


class StudyTable(Report):
    """A table of a study, which can also be written as CSV."""

    def to_csv(self) -> str:
        """The table as CSV, with values in SI units; names in one cell are separated by spaces."""
        table = self.to_pandas().map(lambda cell: " ".join(cell) if isinstance(cell, list) else cell)
        return table.to_csv(index=False)  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class WinnerTable(StudyTable):
    """The winner of each question: a row per question, with the columns that vary."""

    selection: Selection
    axes: tuple[str, ...]
    table: pd.DataFrame

    @property
    def columns(self) -> list[str]:
        """Of the records."""
        cells = ("time_s", "time_low_s", "time_high_s", "speedup", "speedup_low", "speedup_high")
        return [*self.axes, WINNER, *cells, "bottleneck", "second", "margin", "schedules", "too_close"]

    def to_dict(self) -> dict[str, object]:
        return self.selection.to_dict(self.axes) | {"rows": self.records()}

    def records(self) -> list[dict[str, Any]]:
        return records_of(self.table.rename(columns={"schedule": WINNER})[self.columns])

    def parts(self) -> list[Part]:
        texts = [place for place, each in enumerate(self.axes) if is_text(self.table, each)]
        shown = len(self.axes)
        columns = [*map(title_of, self.axes), "winner", "time", "5 to 95 %", *self._speedups("speed-up", "5 to 95 %")]
        table = Table(
            f"{self.selection.folder.study.name}: the fastest schedule that fits into memory",
            (*columns, "bound by", "too close to call"),
            [self._row(each) for each in self.records()],
            (*texts, shown, len(columns), len(columns) + 1),
        )
        close = [TIE_RULE] if self.table["too_close"].map(bool).any() else []
        return [table, *self._over(), *close, *self.selection.lines((*self.axes, "schedule"))]

    def _row(self, row: Mapping[str, Any]) -> list[str]:
        times = text_of("time_s", row["time_s"]), range_of("time_s", row["time_low_s"], row["time_high_s"])
        speedup = range_of("speedup", row["speedup_low"], row["speedup_high"])
        return [
            *(text_of(each, row[each]) for each in self.axes),
            *(row[WINNER], *times),
            *self._speedups(text_of("speedup", row["speedup"]), speedup),
            *(text_of("bottleneck", row["bottleneck"]), close_text(row)),
        ]

    def _speedups(self, *cells: str) -> tuple[str, ...]:
        return cells if self.selection.baseline else ()

    def _over(self) -> list[str]:
        return [f"speed-up over {self.selection.baseline}"] if self.selection.baseline else []


def close_text(row: Mapping[str, Any], most: int = 3) -> str:
    """The schedules whose order with the winner is too close to call.

    >>> close_text({"too_close": ["tasp"], "schedules": 3}), close_text({"too_close": ["a", "b"], "schedules": 3}, 1)
    ('tasp', 'all 2 others')
    """
    close = row["too_close"]
    return f"all {len(close)} others" if len(close) == row["schedules"] - 1 > most else listed(close, most)


def range_of(column: str, low: Any, high: Any) -> str:
    """Both ends of an interval; nothing of one without a length.

    >>> range_of("time_s", 0.001, 0.002), range_of("time_s", None, None), range_of("speedup", 1.0, 1.0)
    ('1 ms to 2 ms', '-', '-')
    """
    ends = text_of(column, low), text_of(column, high)
    return NO_VALUE if low == high or NO_VALUE in ends else " to ".join(ends)


@dataclass(frozen=True, repr=False)
class PivotTable(StudyTable):
    """A pivot table of a column, or of the winners. `keys` are its rows, sorted and cut."""

    selection: Selection
    pivot: Pivot
    keys: tuple[Key, ...]

    def to_dict(self) -> dict[str, object]:
        found = self.pivot
        asked = {"rows": list(found.rows), "columns": list(found.columns), "value": found.value}
        return self.selection.to_dict((*found.rows, *found.columns)) | asked | {"cells": self.records()}

    def records(self) -> list[dict[str, Any]]:
        found = self.pivot
        return [
            {
                **dict(zip(found.rows, row, strict=True)),
                **dict(zip(found.columns, column, strict=True)),
                found.value: cell.value,
                "text": str(cell),
            }
            for row in self.keys
            for column in found.column_keys
            if (cell := found.cells.get((row, column))) is not None
        ]

    def parts(self) -> list[Part]:
        found = self.pivot
        columns = [heading(found.columns, key) or title_of(found.value) for key in found.column_keys]
        rows = [self._row(key) for key in self.keys]
        texts = [place for place in range(len(found.rows)) if any(isinstance(key[place], str) for key in self.keys)]
        if found.value == WINNER:
            texts += range(len(found.rows), len(found.rows) + len(columns))
        over = f" over {', '.join(map(title_of, found.columns))}" if found.columns else ""
        title = f"{self.selection.folder.study.name}: {title_of(found.value)}{over}"
        table = Table(title, (*map(title_of, found.rows), *columns), rows, texts)
        based = found.value == WINNER or found.value in DERIVED[:3]
        speedup = [f"speed-up over {self.selection.baseline}"] if based and self.selection.baseline else []
        return [table, *speedup, *found.marks, *self.selection.lines((*found.rows, *found.columns))]

    def _row(self, key: Key) -> list[str]:
        found = self.pivot
        cells = [found.cells.get((key, column)) for column in found.column_keys]
        names = [text_of(column, value) for column, value in zip(found.rows, key, strict=True)]
        return names + [NO_VALUE if cell is None else str(cell) for cell in cells]


def show(
    folder: StudyFolder,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    value: str | None = None,
    *,
    where: str | None = None,
    baseline: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
) -> WinnerTable | PivotTable:
    """The winner of each question; with `rows`, `columns` or `value` a pivot table.

    Parameters
    ----------
    rows, columns : names of columns whose values the rows and columns of the table have.
    value : what cells have: a column, a derived one such as ``speedup``, or ``winner``. By default ``time_s`` if
        schedules are among the rows or columns, else ``winner``.
    where : a filter such as ``seq >= 64Ki and machine == "h100-8"``.
    baseline : the schedule that speed-ups are over; by default that of the study.
    sort : the column by which rows are sorted, with a minus sign before it descending.
    limit : maximum number of rows.

    Raises `StudyError` for a name that is no column, a filter that leaves nothing, and several values in a cell.
    """
    found = selected(folder, where, baseline)
    check_columns([*rows, *columns], found.rows)
    if limit is not None and limit < 1:
        raise StudyError(f"limit: {limit}, expected 1 or more")
    if rows or columns or value:
        return _pivot_table(found, rows, columns, value, sort, limit)
    return _winner_table(found, sort, limit)


def _winner_table(found: Selection, sort: str | None, limit: int | None) -> WinnerTable:
    axes = tuple(each for each in varying(found.rows) if each != "schedule")
    table = winners(found.rows)
    if table.empty:
        raise StudyError(f"{found.folder.path}: no row has a time and fits into memory")
    axes = axes or ("machine",)
    if sort is not None:
        name, ascending = sort.removeprefix("-"), not sort.startswith("-")
        check_columns([name], table)
        table = table.sort_values(name, ascending=ascending, kind="stable")
    return WinnerTable(found, axes, table.head(limit) if limit else table)


def _pivot_table(
    found: Selection,
    rows: Sequence[str],
    columns: Sequence[str],
    value: str | None,
    sort: str | None,
    limit: int | None,
) -> PivotTable:
    shown = value or ("time_s" if "schedule" in (*rows, *columns) else WINNER)
    check_columns([shown], found.rows, [WINNER])
    if shown in DERIVED[:3] and found.baseline is None:
        raise StudyError(f"{shown}: the study has no baseline, expected --baseline SCHEDULE")
    made = pivot(found.rows, rows, columns, shown)
    keys = made.row_keys
    if sort is not None:
        keys = sorted_keys(made, sort.removeprefix("-"), sort.startswith("-"))
    return PivotTable(found, made, tuple(keys[:limit]))
