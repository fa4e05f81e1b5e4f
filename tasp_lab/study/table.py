"""Tables of a study: the winner at each point, or a pivot table of any column::

table(study, ["schedule"], ["seq"], where="machine == 'h100-8'")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError
from tasp_lab.core.report import View
from tasp_lab.core.tables import Table
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.study.folder import UNANSWERED, StudyFolder
from tasp_lab.study.frames import (
    NO_VALUE,
    OF_WINNERS,
    SPEEDUPS,
    Cells,
    are_plans,
    check_columns,
    compared_columns,
    counts,
    counts_text,
    groups_of,
    held_constant,
    is_number,
    listed,
    plain,
    point_columns,
    records_of,
    select,
    statuses_text,
    text_of,
    title_of,
    winners,
    with_derived,
)
from tasp_lab.study.point import OF_PLANS

if TYPE_CHECKING:
    import pandas as pd

TIE_RULE = f"~: open: even the recommended schedule is expected to take more than {DECIDED:.0%} longer than the fastest"


# ------------------------------------------------------------------------------------------- the rows of a view


@dataclass(frozen=True)
class Selection:
    """The rows that a view covers, with the columns `tasp_lab.study.frames.DERIVED`."""

    folder: StudyFolder
    rows: pd.DataFrame
    baseline: str | None
    where: str | None

    @property
    def unanswered(self) -> pd.DataFrame:
        """The rows without an answer that the filter leaves; a filter of results leaves none, for they have none."""
        return select(self.folder.unanswered().reindex(columns=self.rows.columns), self.where, or_none=True)

    @property
    def counts(self) -> dict[str, int]:
        return counts(self.rows, self.unanswered)

    def document(self, shown: Sequence[str]) -> dict[str, object]:
        """What all views state in JSON; `shown` are columns whose values they tell apart."""
        return {
            "study": self.folder.name,
            "baseline": self.baseline,
            "where": self.where,
            "held": held_constant(self.rows, shown),
            "counts": self.counts,
            "points": self.folder.expected,
            "rows_so_far": self.folder.so_far,
        }

    def lines(self, shown: Sequence[str]) -> list[str]:
        """What all views state for people."""
        held = ", ".join(
            f"{title_of(name)} {text_of(name, value)}" for name, value in held_constant(self.rows, shown).items()
        )
        return [
            *([f"all with {held}"] if held else []),
            *([f"where {self.where}"] if self.where else []),
            counts_text(self.counts),
            *so_far_lines(self.folder),
        ]


def so_far_lines(folder: StudyFolder) -> list[str]:
    """How many points of a study have a row, if not all of them have."""
    if folder.expected == folder.so_far:
        return []
    return [f"{folder.so_far:,} of {folder.expected:,} points so far; the run goes on or was interrupted"]


def selected(folder: StudyFolder, where: str | None = None, baseline: str | None = None) -> Selection:
    """The rows of a study that a filter leaves, with speed-ups over a schedule, else over the study's baseline.

    Raises `StudyError` if none is left.
    """
    base = baseline or folder.baseline
    rows = folder.rows()
    if rows.empty:
        statuses = statuses_text(counts(folder.unanswered()))
        raise StudyError(f"{folder.path}: no row has a time: {statuses}; reasons are in {UNANSWERED}")
    # without a row of the study's baseline tables have no speed-ups; a baseline that was asked for is refused instead
    known = base if baseline or base in set(rows["schedule"]) else None
    # filtered after the speed-ups, so that a filter may leave out the baseline itself
    return Selection(folder, select(with_derived(rows, known), where), known, where)


# ------------------------------------------------------------------------------------------------------- tables


def table(
    folder: StudyFolder,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    value: str | None = None,
    *,
    where: str | None = None,
    baseline: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
) -> View:
    """The winner at each point; with `rows`, `columns` or `value` a pivot table.

    Parameters
    ----------
    rows, columns : names of columns whose values the rows and columns of the table have.
    value : what cells have: a column, a derived one such as ``speedup``, or ``winner``. By default ``time_s`` if
        schedules are among the rows or columns, else ``winner``.
    where : a filter such as ``seq >= 64Ki and machine == "h100-8"``.
    baseline : the schedule that speed-ups are over, by default that of the study; or ``COLUMN=VALUE``, such as
        ``variant=as is``: the row that differs in this column alone.
    sort : the column by which rows are sorted, with a minus sign before it descending.
    limit : maximum number of rows.

    Raises `StudyError` for a name that is no column, a filter that leaves nothing, and several values in a cell.
    """
    covered = selected(folder, where, baseline)
    check_columns([*rows, *columns], covered.rows)
    if limit is not None and limit < 1:
        raise StudyError(f"limit: {limit}, expected 1 or more")
    if rows or columns or value:
        return _pivot_table(covered, rows, columns, value, sort, limit)
    axes, frame = winners_of(covered)
    if sort is not None:
        name = sort.removeprefix("-")
        check_columns([name], frame)
        frame = frame.sort_values(name, ascending=name == sort, kind="stable")
    return winner_table(covered, axes, frame.head(limit or len(frame)))


def winners_of(covered: Selection) -> tuple[list[str], pd.DataFrame]:
    """The columns that tell winners apart, and the winners. Raises `StudyError` where there are none."""
    frame = winners(covered.rows)
    if frame.empty:
        raise StudyError(f"{covered.folder.path}: no row has a time and fits into memory")
    return compared_columns(covered.rows), frame


def winner_table(covered: Selection, axes: Sequence[str], frame: pd.DataFrame) -> View:
    """The table of the winners in `frame`; `axes` are the columns that tell them apart."""
    rows, plans = records_of(frame), are_plans(frame)
    columns = winner_columns(covered, axes)
    texts = [place for place, (_, of) in enumerate(columns) if any(isinstance(row.get(str(of)), str) for row in rows)]
    times = ("time_s", "time_low_s", "time_high_s", *SPEEDUPS, "bottleneck")
    more = dict.fromkeys([*OF_WINNERS, *((*OF_PLANS, "memory_bytes") if plans else ())])
    records = [{WINNER if name == "schedule" else name: row[name] for name in (*axes, "schedule", *times, *more)}
               for row in rows]  # fmt: skip
    return View(
        covered.document(axes) | {"rows": records},
        records,
        [
            Table(
                f"{covered.folder.name}: the fastest {'layout' if plans else 'schedule'} that fits into memory",
                [title for title, _ in columns],
                [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in cells_of(rows, columns)],
                texts,
            ),
            *([f"speed-up over {covered.baseline}"] if covered.baseline else []),
            *([TIE_RULE] if any(map(is_open, rows)) else []),
            *covered.lines((*axes, "schedule")),
        ],
    )


def is_open(row: Cells) -> bool:
    """Whether a question is open: its recommendation has an expected regret above `DECIDED`, or none is known, or a
    layout that a plan left may take less than it does by as much.
    """
    regret, least = row["expected_regret"], row.get("least_left_over_best")
    return regret is None or regret > DECIDED or (least is not None and least < 1 - DECIDED)


# ----------------------------------------------------------------- columns, on a terminal and on the page of a report

Cell = str | list[Any]
"""A text, or a text and the number it stands for."""

Column = tuple[str, str | Callable[[Cells], Cell]]
"""The title of a column, and its cells: those of a column of the study, or what a function makes of a row."""


def cells_of(rows: Iterable[Cells], columns: Sequence[Column]) -> list[list[Cell]]:
    """The cells of a table."""
    return [[cell(of, row[of]) if isinstance(of, str) else of(row) for _, of in columns] for row in rows]


def cell(column: str, value: Any) -> Cell:
    """The cell of a value.

    >>> cell("seq", 65536), cell("machine", "h100-8"), cell("seq", None)
    (['64Ki', 65536], 'h100-8', '-')
    """
    value = plain(value)
    return [text_of(column, value), value] if is_number(value) else text_of(column, value)


def titled(columns: Iterable[str]) -> list[Column]:
    """Columns of the study with their titles."""
    return [(title_of(column), column) for column in columns]


def interval(column: str, low: str, high: str) -> Column:
    """The interval of a column."""
    return "interval", lambda row: range_of(column, row[low], row[high])


TIME_INTERVAL = interval("time_s", "time_low_s", "time_high_s")


def winner_columns(covered: Selection, axes: Sequence[str]) -> list[Column]:
    """The columns of winners; the winner of plans is the recommended layout itself."""
    numbers = ("tokens_per_s_per_gpu", "mfu", "memory_bytes") if are_plans(covered.rows) else ("recommended",)
    speedups = [("speed-up", "speedup"), interval(*SPEEDUPS)] if covered.baseline else []
    times: list[Column] = [(WINNER, "schedule"), ("time", "time_s"), TIME_INTERVAL, *speedups]
    return [*titled(axes), *times, *titled(("bottleneck", *numbers, "expected_regret"))]


def range_of(column: str, low: Any, high: Any) -> str:
    """Both ends of an interval; nothing of one without a length.

    >>> range_of("time_s", 0.001, 0.002), range_of("time_s", None, None), range_of("speedup", 1.0, 1.0)
    ('1 ms to 2 ms', '-', '-')
    """
    ends = text_of(column, low), text_of(column, high)
    return NO_VALUE if low == high or NO_VALUE in ends else " to ".join(ends)


# ------------------------------------------------------------------------------------------------ pivot tables

WINNER = "winner"
"""The value of a cell that is the fastest schedule, with its speed-up if there is a baseline."""

CLOSE, AT_LEAST, AT_MOST, NO_FIT = "~", ">", "<", "!"
MARKS = {
    CLOSE: "open: the recommended schedule may take more than 2 % longer than the fastest",
    AT_LEAST: "at least that, by a bound: not simulated",
    AT_MOST: "at most that, by a bound: not simulated",
    NO_FIT: "does not fit into memory",
}
"""Marks of cells and what they mean."""


def pivot(rows: pd.DataFrame, by: Sequence[str], over: Sequence[str], value: str) -> list[dict[str, Any]]:
    """The cells of a pivot table: the columns `by` and `over`, the `value`, a column or `WINNER`, its text and mark.

    Raises `StudyError` where a cell would have several values, with the column that tells them apart.
    """
    frame, shown, cells = winners(rows) if value == WINNER else rows, [*by, *over], []
    for key, group in groups_of(frame, shown):
        check_single(group, (*shown, *(["schedule"] if value == WINNER else [])))
        (row,) = records_of(group)
        found, text, mark = row.get(value), text_of(value, row.get(value)), NO_FIT if row["fits"] is False else ""
        if value == WINNER:
            speedup = "" if row["speedup"] in (None, 1) else f" {text_of('speedup', row['speedup'])}"
            found, text, mark = row["schedule"], f"{row['schedule']}{speedup}", CLOSE if is_open(row) else mark
        elif row["status"] == "settled" and value == "time_s":  # it has none: the bound is what is known of it
            found, text, mark = None, text_of("bound_s", row["bound_s"]), AT_LEAST
        elif row["status"] == "settled" and value in SPEEDUPS:
            found, mark = None, "" if found is None else AT_MOST
        words = (mark, text) if mark in (AT_LEAST, AT_MOST) else (text, mark)
        texts = {"text": " ".join(filter(None, words)), "mark": mark}
        cells.append({**dict(zip(shown, key, strict=True)), value: found, **texts})
    return cells


def check_single(group: pd.DataFrame, shown: Sequence[str], options: str = "--rows and --columns") -> None:
    """Raise `StudyError` if the rows that agree in the columns `shown` are several; `options` can tell them apart."""
    if len(group) < 2:
        return
    left = [each for each in point_columns(group) if each not in shown and group[each].nunique(dropna=False) > 1]
    first = left[0] if left else "key"
    values = [text_of(first, each) for each in group[first].unique()]
    raise StudyError(
        f"several rows in one place: {first!r} has {len(values)} values there ({listed(values, 4)}), "
        f"expected it among {options}, or one of them by --where"
    )


def in_order(keys: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The values of columns, each once: numbers ascending, texts as they come."""
    found = list(dict.fromkeys(keys))
    return sorted(found) if all(is_number(value) for key in found for value in key) else found


def heading(columns: Sequence[str], key: Iterable[Any]) -> str:
    """The heading of a column of a pivot table.

    >>> heading(("seq", "model"), (65536, "llama-3-8b"))
    '64Ki, llama-3-8b'
    """
    return ", ".join(text_of(column, value) for column, value in zip(columns, key, strict=True))


def _pivot_table(
    covered: Selection,
    by: Sequence[str],
    over: Sequence[str],
    value: str | None,
    sort: str | None,
    limit: int | None,
) -> View:
    value = value or ("time_s" if "schedule" in (*by, *over) else WINNER)
    check_columns([value], covered.rows, [WINNER])
    if value in SPEEDUPS and covered.baseline is None:
        raise StudyError(f"{value}: the study has no baseline, expected --baseline SCHEDULE")
    cells, lines = pivot(covered.rows, by, over, value), dict[tuple[Any, ...], dict[tuple[Any, ...], Any]]()
    for cell in cells:
        row, column = (tuple(cell[name] for name in names) for names in (by, over))
        lines.setdefault(row, {})[column] = cell
    columns = in_order(column for line in lines.values() for column in line)
    if sort is not None:  # by a column of rows, or by a column of cells, which its heading names
        name, of_heading = sort.removeprefix("-"), {heading(over, column): column for column in columns}
        if name not in by and name not in of_heading:
            raise StudyError(f"cannot sort by {name!r}, expected one of {', '.join((*by, *of_heading))}")
        sorted_by = {
            row: row[by.index(name)] if name in by else line.get(of_heading[name], {}).get(value)
            for row, line in lines.items()
        }
        known = [row for row in lines if sorted_by[row] is not None]
        empty = [row for row in lines if sorted_by[row] is None]  # they are last in both directions
        lines = {row: lines[row] for row in (*sorted(known, key=sorted_by.__getitem__, reverse=name != sort), *empty)}
    lines = dict(list(lines.items())[:limit])
    records = [{name: cell for name, cell in line[column].items() if name != "mark"}
               for line in lines.values() for column in columns if column in line]  # fmt: skip
    texts = [place for place in range(len(by)) if any(isinstance(row[place], str) for row in lines)]
    texts += range(len(by), len(by) + len(columns)) if value == WINNER else []
    shown = [[*map(text_of, by, row), *(line[column]["text"] if column in line else NO_VALUE for column in columns)]
             for row, line in lines.items()]  # fmt: skip
    title = f"{covered.folder.name}: {title_of(value)}" + (f" over {', '.join(map(title_of, over))}" if over else "")
    headings = (*map(title_of, by), *(heading(over, column) or title_of(value) for column in columns))
    has_speedup, marks = value in (WINNER, *SPEEDUPS) and covered.baseline, {cell["mark"] for cell in cells}
    return View(
        covered.document((*by, *over)) | {"rows": list(by), "columns": list(over), "value": value, "cells": records},
        records,
        [
            Table(title, headings, shown, texts),
            *([f"speed-up over {covered.baseline}"] if has_speedup else []),
            *(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marks),
            *covered.lines((*by, *over)),
        ],
    )
