"""Differences between two studies: points, inputs, constants, versions, times, winners::

    diff(StudyFolder("before"), StudyFolder("after"))

Rows of both studies are the same point if they agree in every column that varies in either of them. A column that has
one value in each study, but not the same one, is a difference of all rows and listed once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasp_lab.core.report import View
from tasp_lab.core.tables import Part, Table
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.frames import (
    NO_VALUE,
    all_varying,
    held_constant,
    listed,
    plain,
    point_columns,
    records_of,
    text_of,
    title_of,
    winners,
)
from tasp_lab.study.table import selected

if TYPE_CHECKING:
    import pandas as pd

SAME = 1e-9
"""Times that differ by at most this share are the same."""

MAX_ROWS = 20
"""As many rows are shown of each table; ``--json`` has all."""

CHANGES = ("only_a", "only_b", "held", "changed_times", "changed_statuses", "changed_winners")
"""Entries of the object of a difference; studies are the same if all of them are empty."""


def diff(a: StudyFolder, b: StudyFolder) -> View:
    """What differs from study `a` to study `b`. Raises `StudyError` for a folder that cannot be read."""
    import pandas as pd

    rows_a, rows_b = (pd.concat([each.rows(), each.unanswered()], ignore_index=True) for each in (a, b))
    known = dict.fromkeys((*point_columns(rows_a), *point_columns(rows_b)))
    axes = [column for column in known if column in (*a.study.axes, *b.study.axes)] or ["machine"]
    matched = match(rows_a, rows_b, axes)
    where, both = matched["where"], matched[matched["where"] == "both"]
    versions = [sorted({str(version) for version in rows["version"].dropna()}) for rows in (rows_a, rows_b)]
    constants = [_constants(each) for each in (a, b)]
    document: dict[str, Any] = {
        "a": str(a.path),
        "b": str(b.path),
        "axes": axes,
        "points": {"both": len(both), "a": len(rows_a), "b": len(rows_b)},
        "only_a": records_of(matched.loc[where == "left_only", axes]),
        "only_b": records_of(matched.loc[where == "right_only", axes]),
        "held": _held(rows_a, rows_b, axes),
        "versions": dict(zip("ab", versions, strict=True)),
        "changed_inputs": _changed_inputs(both),
        "changed_constants": [
            {
                "machine": machine,
                "name": name,
                "a": constants[0].get((machine, name)),
                "b": constants[1].get((machine, name)),
            }
            for machine, name in dict.fromkeys((*constants[0], *constants[1]))
            if constants[0].get((machine, name)) != constants[1].get((machine, name))
        ],
        "points_with_other_constants": int((both["constants_a"] != both["constants_b"]).sum()),
        "changed_times": _changed_times(both, axes),
        "changed_statuses": records_of(
            both.loc[both["status_a"] != both["status_b"], [*axes, "status_a", "status_b", "error_a", "error_b"]]
        ),
        "changed_winners": _changed_winners(a, b, axes),
    }
    return View(document, document["changed_times"], [*_lines(document), *_tables(document)])


def match(a: pd.DataFrame, b: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    """All points of two studies: their axes, `where` they are (``both``, ``left_only``, ``right_only``), and the cells
    of both, with the endings ``_a`` and ``_b``."""
    cells = [*axes, "time_s", "status", "error", "constants", "version", "inputs"]
    a, b = (each.reindex(columns=cells).astype(object) for each in (a, b))
    a, b = (each.where(each.notna(), None) for each in (a, b))
    return a.merge(b, how="outer", on=list(axes), suffixes=("_a", "_b"), indicator="where", sort=False)


def _held(a: pd.DataFrame, b: pd.DataFrame, axes: Sequence[str]) -> dict[str, dict[str, object]]:
    """Columns that have one value in each study, but not the same one."""
    one, two = held_constant(a, axes), held_constant(b, axes)
    vary = {*all_varying(a), *all_varying(b)}
    names = [name for name in dict.fromkeys((*one, *two)) if name not in vary and one.get(name) != two.get(name)]
    return {name: {"a": one.get(name), "b": two.get(name)} for name in names}


def _changed_times(both: pd.DataFrame, axes: Sequence[str]) -> list[dict[str, Any]]:
    """Points whose time changed: both times and `change`, the second over the first less one; largest first."""
    import pandas as pd

    a, b = (pd.to_numeric(both[name]) for name in ("time_s_a", "time_s_b"))
    changed = both.assign(change=b / a - 1)[[*axes, "time_s_a", "time_s_b", "change"]]
    changed = changed[changed["change"].abs() > SAME]
    return records_of(changed.sort_values("change", key=lambda column: -column.abs(), kind="stable"))


def _changed_winners(a: StudyFolder, b: StudyFolder, axes: Sequence[str]) -> list[dict[str, Any]]:
    """Points of both studies with another winner, and whether either study finds a tie of the two."""
    on = [column for column in axes if column != "schedule"] or ["machine"]
    sides = (winners(selected(each).rows).reindex(columns=[*on, "schedule", "margin", "too_close"]) for each in (a, b))
    one, two = (each.astype(dict.fromkeys(on, object)) for each in sides)
    both = one.merge(two, on=on, suffixes=("_a", "_b"), sort=False)
    changed = both[both["schedule_a"] != both["schedule_b"]]
    close = [
        row["schedule_b"] in row["too_close_a"] or row["schedule_a"] in row["too_close_b"]
        for _, row in changed.iterrows()
    ]
    return records_of(
        changed.assign(too_close=close)[[*on, "schedule_a", "schedule_b", "margin_a", "margin_b", "too_close"]]
    )


def _changed_inputs(both: pd.DataFrame) -> dict[str, int]:
    """The inputs that differ at the same point, by their path, and at how many points."""
    pairs = ((_inputs(a), _inputs(b)) for a, b in zip(both["inputs_a"], both["inputs_b"], strict=True) if a != b)
    return dict(Counter(name for a, b in pairs for name in _differences(a, b)).most_common())


def _inputs(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) else None


def _differences(one: Any, two: Any, path: str = "") -> Iterator[str]:
    """The paths at which two JSON values differ.

    >>> list(_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}))
    ['a.c', 'd']
    """
    if isinstance(one, dict) and isinstance(two, dict):
        for name in dict.fromkeys((*one, *two)):
            yield from _differences(one.get(name), two.get(name), f"{path}.{name}" if path else name)
    elif one != two:
        yield path or "inputs"


def _constants(study: StudyFolder) -> dict[tuple[str, str], dict[str, Any]]:
    """The constants of a study by machine and name, with what can differ."""
    return {
        (constant["machine"], constant["name"]): {
            name: constant.get(name) for name in ("value", "low", "high", "source")
        }
        for constant in study.provenance().get("constants", ())
    }


# --------------------------------------------------------------------------------------------------- for people


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What differs as a whole, a line each."""
    for side in "ab":
        yield f"{side}: {found[side]}, {found['points'][side]:,} points"
    alone = [len(found[name]) for name in ("only_a", "only_b")]
    yield f"in both {found['points']['both']:,}, only in a {alone[0]:,}, only in b {alone[1]:,}"
    if found["versions"]["a"] != found["versions"]["b"]:
        yield f"version: {listed(found['versions']['a'])} in a, {listed(found['versions']['b'])} in b"
    for name, values in found["held"].items():
        yield f"{title_of(name)}: {text_of(name, values['a'])} in a, {text_of(name, values['b'])} in b"
    for name, points in found["changed_inputs"].items():
        yield f"input {name} differs at {points:,} points"
    if other := found["points_with_other_constants"]:
        yield f"constants of the machine differ at {other:,} points"
    if not any(found[name] for name in CHANGES):
        yield "the same points with the same times and winners"


def _tables(found: Mapping[str, Any]) -> Iterator[Part]:
    axes = found["axes"]
    on = [column for column in axes if column != "schedule"]
    yield from _table("only in a", found["only_a"], axes)
    yield from _table("only in b", found["only_b"], axes)
    constants = [
        {"machine": each["machine"], "name": each["name"]}
        | {side: NO_VALUE if each[side] is None else str(plain(each[side]["value"])) for side in ("a", "b")}
        for each in found["changed_constants"]
    ]
    yield from _table("constants that differ", constants, ["machine", "name", "a", "b"])
    statuses = [*axes, "status_a", "status_b", "error_a", "error_b"]
    yield from _table("other ends", found["changed_statuses"], statuses)
    times = [row | {"change": f"{row['change']:+.2%}"} for row in found["changed_times"]]
    yield from _table("times that changed", times, [*axes, "time_s_a", "time_s_b", "change"])
    yield from _table("winners that changed", found["changed_winners"], [*on, "schedule_a", "schedule_b", "too_close"])


def _table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[Table]:
    """A table of the first rows; none without any."""
    if not rows:
        return
    more = f", the first {MAX_ROWS} of {len(rows):,}" if len(rows) > MAX_ROWS else f", {len(rows):,}"
    names = [_side_of(column) for column in columns]
    headings = [f"{title_of(name)} in {side}" if side else title_of(name) for name, side in names]
    cells = [
        [text_of(name, row.get(column)) for column, (name, _) in zip(columns, names, strict=True)]
        for row in rows[:MAX_ROWS]
    ]
    texts = [n for n, column in enumerate(columns) if isinstance(rows[0].get(column), str) and column != "change"]
    yield Table(f"{title}{more}", headings, cells, texts)


def _side_of(column: str) -> tuple[str, str]:
    """The name of a column of both studies, and the study of it; of any other column no study."""
    name, _, side = column.rpartition("_")
    return (name, side) if side in ("a", "b") and name else (column, "")
