"""Rows that a filter leaves, in the language of the section ``[where]`` of a study."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.study.columns import plain
from tasp_lab.study.where import Expression

if TYPE_CHECKING:
    import pandas as pd


def select(rows: pd.DataFrame, where: str | None, *, or_none: bool = False) -> pd.DataFrame:
    """The rows that a filter such as ``seq >= 64Ki and machine == "h100-8"`` leaves; all of them without one.

    A row that lacks a cell which the filter uses is left out.
    Raises `StudyError` for a filter that cannot be read, an unknown column, and where no row is left unless `or_none`.
    """
    if where is None:
        return rows
    asked = Expression.parse(where)
    names = sorted(asked.names)
    for name in names:
        if name not in rows:
            raise StudyError(f"where {where!r}: {unknown('column', name, rows.columns)}; texts stand in quotes")
    cells = [dict(zip(names, map(plain, each), strict=True)) for each in rows[names].itertuples(index=False, name=None)]
    found = rows[[None not in each.values() and bool(asked.value(each)) for each in cells]]
    if found.empty and not or_none:
        raise StudyError(f"where {where!r}: none of {len(rows)} rows is left{_hint(asked, rows)}")
    return found


def _hint(asked: Expression, rows: pd.DataFrame) -> str:
    """The first text of a filter that no row has, with the values there are."""
    for name, text in _texts(asked.tree):
        values = [str(each) for each in rows[name].dropna().unique()]
        if text not in values:
            return f": {unknown(name, text, values)}"
    return ""


def _texts(tree: ast.expr) -> Iterator[tuple[str, str]]:
    """The texts that columns are compared with, each with its column."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=str(text))]):
                yield name, text
