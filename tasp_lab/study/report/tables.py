"""Tables of the page: cells as people read them, each with what it is sorted by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tasp_lab.study.columns import NO_VALUE, plain, records_of, text_of, title_of
from tasp_lab.study.folder import StudyFolder, varying
from tasp_lab.study.pivot import AT_LEAST, AT_MOST
from tasp_lab.study.report.choice import groups
from tasp_lab.study.rows import PREDICTED
from tasp_lab.study.show import Selection, WinnerTable, close_text, range_of

if TYPE_CHECKING:
    import pandas as pd

Cell = str | list[Any]
"""A text, or a text and the number it stands for."""


@dataclass(frozen=True)
class PageTable:
    """A table that sorts and filters. `name` is its element on the page; `numeric` are the positions of numbers."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def numeric(self) -> list[int]:
        return [place for place in range(len(self.columns)) if any(isinstance(row[place], list) for row in self.rows)]

    def to_dict(self) -> dict[str, object]:
        return {"columns": list(self.columns), "rows": self.rows, "numeric": self.numeric}


def cell(column: str, value: Any) -> Cell:
    """The cell of a value.

    >>> cell("seq", 65536), cell("machine", "h100-8"), cell("seq", None)
    (['64Ki', 65536], 'h100-8', '-')
    """
    value = plain(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [text_of(column, value), value] if is_number else text_of(column, value)


def score_table(found: WinnerTable) -> PageTable:
    """How often each schedule is the fastest, and where it is so by most."""
    rows = []
    table = found.table
    for name in table["schedule"].value_counts().index:
        own = table[table["schedule"] == name]
        clear = own[~own["too_close"].map(bool)]
        best = own.sort_values("speedup", ascending=False, kind="stable").iloc[0]
        where = ", ".join(text_of(each, best[each]) for each in found.axes)
        over = int((own["speedup_low"] > 1).sum())
        known = plain(best["speedup"]) is not None
        of_baseline = (cell("", over), cell("speedup", best["speedup"]), where) if known else (NO_VALUE,) * 3
        rows.append([name, cell("", len(own)), cell("", len(clear)), *of_baseline])
    columns = ("schedule", "fastest", "clearly before all", "clearly before the baseline", "largest speed-up", "there")
    return PageTable("scores", columns, rows)


def winner_table(found: WinnerTable) -> PageTable:
    """The winner of each question."""
    columns = [*map(title_of, found.axes), "winner", "time", "5 to 95 %", "speed-up", "5 to 95 %",
               "too close to call", "bound by", "share of bound", "exposed share"]  # fmt: skip
    rows = [
        [
            *(cell(each, row[each]) for each in found.axes),
            row["schedule"],
            cell("time_s", row["time_s"]),
            range_of("time_s", row["time_low_s"], row["time_high_s"]),
            cell("speedup", row["speedup"]),
            range_of("speedup", row["speedup_low"], row["speedup_high"]),
            close_text(row, 4) or NO_VALUE,
            cell("bottleneck", row["bottleneck"]),
            cell("bound_share", row["bound_share"]),
            cell("exposed_share", row["exposed_share"]),
        ]
        for row in records_of(found.table)
    ]
    return PageTable("winners", columns, rows)


def change_table(found: WinnerTable, along: str) -> PageTable:
    """Where another schedule becomes the fastest along an axis, between two neighbouring values of the study."""
    others = [each for each in found.axes if each != along]
    lines = groups(records_of(found.table.sort_values(along, kind="stable")), others)
    rows = [
        [
            *(cell(each, before[each]) for each in others),
            *_end(before, along),
            *_end(after, along),
            _clear(before, after),
        ]
        for line in lines.values()
        for before, after in pairwise(line)
        if before["schedule"] != after["schedule"]
    ]
    ends = [f"{word} {title_of(along)}" for word in ("from", "to")]
    columns = [*map(title_of, others), ends[0], "fastest", "bound by", ends[1], "fastest then", "bound by", "clear"]
    return PageTable("changes", columns, rows)


def _end(row: Mapping[Any, Any], along: str) -> tuple[Cell, Cell, Cell]:
    return cell(along, row[along]), row["schedule"], cell("bottleneck", row["bottleneck"])


def _clear(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> str:
    """At which ends the order of both schedules is not too close to call."""
    clear = after["schedule"] not in before["too_close"], before["schedule"] not in after["too_close"]
    return {(True, True): "at both ends", (True, False): "before", (False, True): "after"}.get(clear, "no")


POINT_CELLS = ("speedup", "compute_s", "communication_s", "exposed_s", "bound_s", "bottleneck", "memory_bytes", "fits",
               "settled_by", "engine", "key")  # fmt: skip


def point_table(found: Selection) -> PageTable:
    """Every row with a time or a bound."""
    axes = varying(found.rows)
    columns = [*map(title_of, axes), "time", "5 to 95 %", *map(title_of, POINT_CELLS)]
    rows = [
        [
            *(cell(each, row[each]) for each in axes),
            _time(row),
            range_of("time_s", row["time_low_s"], row["time_high_s"]),
            *(_speedup(row) if each == "speedup" else cell(each, row[each]) for each in POINT_CELLS),
        ]
        for row in records_of(found.rows)
    ]
    return PageTable("points", columns, rows)


def _time(row: Mapping[Any, Any]) -> Cell:
    """The time; of a row that a bound settled at least that bound."""
    if row["status"] != "settled":
        return cell("time_s", row["time_s"])
    return [f"{AT_LEAST} {text_of('bound_s', row['bound_s'])}", plain(row["bound_s"])]


def _speedup(row: Mapping[Any, Any]) -> Cell:
    found = cell("speedup", row["speedup"])
    return [f"{AT_MOST} {found[0]}", found[1]] if row["status"] == "settled" and isinstance(found, list) else found


def reason_table(unanswered: pd.DataFrame) -> PageTable:
    """Why points have no answer, and how many."""
    counts = unanswered[["status", "error"]].value_counts(sort=True)
    rows: list[list[Cell]] = [[str(status), str(error), cell("", int(points))]
                              for (status, error), points in counts.items()]  # fmt: skip
    return PageTable("reasons", ("status", "reason", "points"), rows)


def _short(reason: str, most: int = 90) -> str:
    """The beginning of a reason; the table of reasons has all of it."""
    return reason if len(reason) <= most else f"{reason[:most].rstrip()} ..."


def unanswered_table(unanswered: pd.DataFrame, axes: Iterable[str]) -> PageTable:
    """The points without an answer."""
    axes = list(axes)
    rows = [[*(cell(each, row[each]) for each in axes), row["status"], _short(str(row["error"]))]
            for row in records_of(unanswered)]  # fmt: skip
    return PageTable("unanswered", [*map(title_of, axes), "status", "reason"], rows)


def constant_table(folder: StudyFolder) -> PageTable:
    """The constants of all machines, with interval and source."""
    rows: list[list[Cell]] = [
        [
            str(each["machine"]),
            str(each["name"]),
            _constant(each.get("value")),
            "-" if each.get("low") == each.get("high") else f"{_text(each.get('low'))} to {_text(each.get('high'))}",
            "assumed" if each.get("assumed") else "no",
            str(each.get("source") or "-"),
        ]
        for each in folder.provenance().get("constants", ())
    ]
    return PageTable("constants", ("machine", "constant", "value", "interval", "assumed", "source"), rows)


def _constant(value: Any) -> Cell:
    return [_text(value), value] if isinstance(value, (int, float)) else _text(value)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)


def settled_table(found: Selection) -> PageTable:
    """How rows were settled: simulated by which engine, or by a bound."""
    table = found.rows.astype(object)
    table = table.where(table.notna(), "-")
    counts = table.groupby(["settled_by", "engine"], sort=False).size()
    rows: list[list[Cell]] = [[str(by), str(engine), cell("", int(points))] for (by, engine), points in counts.items()]
    rows += [[status, "-", cell("", count)] for status, count in found.counts.items()
             if count and status not in PREDICTED]  # fmt: skip
    return PageTable("settled", ("settled by", "engine", "points"), rows)
