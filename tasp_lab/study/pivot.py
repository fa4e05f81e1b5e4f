"""Pivot tables of rows: one cell per pair of values of two sets of columns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError
from tasp_lab.study.captions import listed
from tasp_lab.study.columns import SPEEDUPS, plain, text_of
from tasp_lab.study.folder import questions
from tasp_lab.study.winners import winners

if TYPE_CHECKING:
    import pandas as pd

WINNER = "winner"
"""The value of a cell that is the fastest schedule, with its speed-up if there is a baseline."""

CLOSE, AT_LEAST, AT_MOST, NO_FIT = "~", ">", "<", "!"
"""Marks of cells: too close to call, a bound of a time, a bound of a speed-up, more memory than there is."""

MARKS = {
    CLOSE: "too close to call",
    AT_LEAST: "at least that, by a bound: not simulated",
    AT_MOST: "at most that, by a bound: not simulated",
    NO_FIT: "does not fit into memory",
}

Key = tuple[Any, ...]
"""The values of some columns."""


@dataclass(frozen=True)
class Cell:
    """A cell: its value, the mark that belongs to it, and its text without the mark."""

    value: Any
    text: str
    mark: str = ""

    def __str__(self) -> str:
        if self.mark in (AT_LEAST, AT_MOST):
            return f"{self.mark} {self.text}"
        return f"{self.text} {self.mark}".rstrip()


@dataclass(frozen=True)
class Pivot:
    """Cells by the values of `rows` and of `columns`, in the order of the study. A pair without a row has no cell."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    value: str
    cells: Mapping[tuple[Key, Key], Cell]

    @property
    def row_keys(self) -> list[Key]:
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def column_keys(self) -> list[Key]:
        return _in_order({column: None for _, column in self.cells})

    @property
    def marks(self) -> list[str]:
        """What the marks that occur mean."""
        used = {cell.mark for cell in self.cells.values()}
        return [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in used]


def pivot(rows: pd.DataFrame, by: Sequence[str], over: Sequence[str], value: str) -> Pivot:
    """The pivot table of a column, or of `WINNER`.

    Raises `StudyError` where a cell would have several values, with the column that tells them apart.
    """
    table = winners(rows) if value == WINNER else rows
    shown = [*by, *over]
    groups = table.groupby(shown, dropna=False, sort=False) if shown else [((), table)]
    cells = {}
    for key, group in groups:
        check_single(group, (*shown, *(["schedule"] if value == WINNER else [])))
        values = tuple(plain(each) for each in key)
        cells[values[: len(by)], values[len(by) :]] = _cell(group.iloc[0], value)
    return Pivot(tuple(by), tuple(over), value, cells)


def check_single(group: pd.DataFrame, shown: Sequence[str], options: str = "--rows and --columns") -> None:
    """Raise `StudyError` if the rows that agree in the columns `shown` are several; `options` can tell them apart."""
    if len(group) < 2:
        return
    left = [each for each in questions(group) if each not in shown and group[each].nunique(dropna=False) > 1]
    first = left[0] if left else "key"
    values = [text_of(first, each) for each in group[first].unique()]
    raise StudyError(
        f"several rows in one place: {first!r} has {len(values)} values there ({listed(values, 4)}), "
        f"expected it among {options}, or one of them by --where"
    )


def _cell(row: pd.Series[Any], value: str) -> Cell:
    """The cell of one row."""
    mark = NO_FIT if plain(row["fits"]) is False else ""
    if value == WINNER:
        speedup = "" if plain(row["speedup"]) in (None, 1) else f" {text_of('speedup', row['speedup'])}"
        return Cell(row["schedule"], f"{row['schedule']}{speedup}", CLOSE if row["too_close"] else mark)
    found = plain(row[value])
    if row["status"] == "settled" and value == "time_s":
        return Cell(None, text_of("bound_s", row["bound_s"]), AT_LEAST)
    if row["status"] == "settled" and value in SPEEDUPS:
        return Cell(None, text_of(value, found), AT_MOST if found is not None else "")
    return Cell(found, text_of(value, found), mark)


def _in_order(keys: Mapping[Key, None]) -> list[Key]:
    """Numbers ascending, texts as they come."""
    places: dict[Hashable, int] = {key: place for place, key in enumerate(keys)}
    numeric = all(isinstance(each, (int, float)) for key in keys for each in key)
    return sorted(keys) if numeric else sorted(keys, key=places.__getitem__)


def sorted_keys(found: Pivot, sort: str, descending: bool) -> list[Key]:
    """The row keys by one of the columns of `Pivot.rows`, or by the text of a value of `Pivot.columns`.

    Raises `StudyError` for any other name.
    """
    keys = found.row_keys
    if sort in found.rows:
        place = found.rows.index(sort)
        return _by(keys, {key: key[place] for key in keys}, descending)
    named = {heading(found.columns, key): key for key in found.column_keys}
    if sort not in named:
        raise StudyError(f"cannot sort by {sort!r}, expected one of {', '.join((*found.rows, *named))}")
    cells = {key: found.cells.get((key, named[sort])) for key in keys}
    return _by(keys, {key: None if cell is None else cell.value for key, cell in cells.items()}, descending)


def _by(keys: Sequence[Key], values: Mapping[Key, Any], descending: bool) -> list[Key]:
    """The keys by their values; those without one last."""
    known = [key for key in keys if values[key] is not None]
    return sorted(known, key=values.__getitem__, reverse=descending) + [key for key in keys if values[key] is None]


def heading(columns: Sequence[str], key: Key) -> str:
    """The heading of a column of a pivot table.

    >>> heading(("seq", "model"), (65536, "llama-3-8b"))
    '64Ki, llama-3-8b'
    """
    return ", ".join(text_of(column, value) for column, value in zip(columns, key, strict=True))
