"""Pictures of a study: a quantity over an axis, or a map of winners over two axes."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError
from tasp_lab.core.files import make_folder
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.study.columns import SPEEDUPS, check_columns, plain, text_of, title_of
from tasp_lab.study.folder import PLOTS, StudyFolder, questions, varying
from tasp_lab.study.pivot import WINNER, check_single, heading, pivot
from tasp_lab.study.show import Selection, selected
from tasp_lab.study.winners import least_times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from tasp_lab.plots.study import Curve, Map, Panel, Scale, Words

LOGARITHMIC = ("_s", "_bytes")
"""Quantities with these endings have logarithmic axes."""


@dataclass(frozen=True, repr=False)
class StudyPicture(Report):
    """A picture of a study: its data, and the figure of them."""

    selection: Selection
    x: str
    y: str
    lines: str
    panels: tuple[str, ...]

    def figure(self) -> Figure:
        """The picture, for matplotlib."""
        from tasp_lab.plots.study import draw_curves, draw_maps

        if self.is_map:
            return draw_maps(self.maps(), self.words())
        reference = 1.0 if self.y in SPEEDUPS else None
        return draw_curves(self.curves(), self.x_scale(), self.y_scale(), self.words(), reference)

    @property
    def is_map(self) -> bool:
        """Whether both axes are axes of the study."""
        return self.y in questions(self.selection.rows)

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns whose values the picture tells apart."""
        return (self.x, self.y, *self.panels) if self.is_map else (self.x, self.lines, *self.panels)

    def words(self) -> Words:
        """Title and caption."""
        from tasp_lab.plots.study import Words

        lines = self.selection.lines((*self.shown, "schedule"))
        return Words(
            f"{self.selection.folder.study.name}: {self._what()}", "\n".join(lines), title_of(self.x), title_of(self.y)
        )

    def _what(self) -> str:
        over = f" over {self.selection.baseline}" if self.selection.baseline else ""
        if self.is_map:
            speedup = f" and speed-up{over}" if over else ""
            return f"fastest schedule{speedup}, by {title_of(self.y)} and {title_of(self.x)}"
        return f"{title_of(self.y)}{over if self.y in SPEEDUPS else ''} by {title_of(self.x)}"

    def maps(self) -> list[Map]:
        """A map per panel."""
        from tasp_lab.plots.study import Map, MapCell

        found = pivot(self.selection.rows, (*self.panels, self.y), (self.x,), WINNER)
        columns = found.column_keys
        maps = []
        for panel in dict.fromkeys(key[:-1] for key in found.row_keys):
            rows = [key for key in found.row_keys if key[:-1] == panel]
            cells = {
                (row, column): MapCell(cell.value, str(cell).partition(" ")[2], not cell.mark)
                for row, key in enumerate(rows)
                for column, over in enumerate(columns)
                if (cell := found.cells.get((key, over))) is not None
            }
            names = [text_of(self.y, key[-1]) for key in rows]
            maps.append(Map(heading(self.panels, panel), names, [text_of(self.x, key[0]) for key in columns], cells))
        return maps

    def curves(self) -> list[Panel]:
        """A panel per value of `panels`, with a line per value of `lines`."""
        from tasp_lab.plots.study import Panel

        rows = self.selection.rows
        categories = list(self.x_scale().categories)
        places = [categories.index(text_of(self.x, each)) if categories else float(each) for each in rows[self.x]]
        rows = rows.assign(_x=places)
        keys = list(self.panels)
        grouped = rows.groupby(keys, dropna=False, sort=False) if keys else [((), rows)]
        return [
            Panel(heading(self.panels, tuple(map(plain, key))), [
                self._curve(text_of(self.lines, label), points, group["_x"])
                for label, points in group.groupby(self.lines, dropna=False, sort=False)
            ])
            for key, group in grouped
        ]  # fmt: skip

    def _curve(self, label: str, points: pd.DataFrame, places: pd.Series[float]) -> Curve:
        """A line of the panel whose rows are at `places`. Where the schedule does not apply, it has a gap."""
        from tasp_lab.plots.study import Curve

        points = points.set_index("_x").reindex(sorted(set(places))).reset_index()
        none = [math.nan] * len(points)
        low, high, bound = self._around()
        settled = (points["status"] == "settled").to_numpy()
        limits = least_times(points) if self.y == "time_s" else points[self.y].astype(float)
        has_limit = self.y == "time_s" or self.y in SPEEDUPS
        return Curve(
            label,
            points["_x"].tolist(),
            points[self.y].astype(float).where(~settled).tolist(),
            points[low].astype(float).where(~settled).tolist() if low else none,
            points[high].astype(float).where(~settled).tolist() if high else none,
            points[bound].astype(float).tolist() if bound else none,
            limits.where(settled).tolist() if has_limit else none,
        )

    def _around(self) -> tuple[str, str, str]:
        """The columns of the interval and of the bound of y; empty for none."""
        if self.y == "time_s":
            return "time_low_s", "time_high_s", "bound_s"
        return ("speedup_low", "speedup_high", "") if self.y == "speedup" else ("", "", "")

    def x_scale(self) -> Scale:
        """The horizontal axis: numbers, logarithmic if they span a factor of four; else categories."""
        from tasp_lab.plots.study import Scale

        values = [plain(each) for each in self.selection.rows[self.x].unique()]
        if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
            return Scale(title_of(self.x), str, False, [text_of(self.x, each) for each in values])
        spans = min(values) > 0 and max(values) >= 4 * min(values)
        return Scale(title_of(self.x), lambda value: text_of(self.x, value), spans)

    def y_scale(self) -> Scale:
        """The vertical axis."""
        from tasp_lab.plots.study import Scale

        found = self.selection.rows[self.y].astype(float)
        positive = bool((found.dropna() > 0).all())
        log = positive and self.y.endswith(LOGARITHMIC)
        return Scale(title_of(self.y), lambda value: text_of(self.y, value), log)

    def to_dict(self) -> dict[str, object]:
        asked = {"x": self.x, "y": self.y, "lines": self.lines, "panels": list(self.panels)}
        return self.selection.to_dict(self.shown) | asked | {"points": self.records()}

    def records(self) -> list[dict[str, Any]]:
        """What is drawn, point by point."""
        if self.is_map:
            return [
                {"panel": each.title, "row": each.rows[row], "column": each.columns[column], "value": cell.value,
                 "text": cell.text, "too_close": not cell.is_sure}
                for each in self.maps() for (row, column), cell in each.cells.items()
            ]  # fmt: skip
        names = ("x", "y", "low", "high", "bound", "limit")
        return [
            {"panel": panel.title, "line": curve.label, **dict(zip(names, map(plain, point), strict=True))}
            for panel in self.curves() for curve in panel.curves
            for point in zip(*curve[1:], strict=True)
        ]  # fmt: skip

    def parts(self) -> list[Part]:
        panels = self.maps() if self.is_map else self.curves()
        return [Table(self.words().title, ("panel",), [(each.title or "all",) for each in panels])]

    def default_path(self) -> Path:
        """Where the picture belongs in the folder of the study; the folder for it is made."""
        folder = self.selection.folder.path / PLOTS
        make_folder(folder)
        return folder / f"{self.y}-{self.x}.svg"

    def _repr_html_(self) -> str:
        """The picture, for notebooks."""
        from tasp_lab.plots.timelines import render

        data = base64.b64encode(render(self.figure(), "png")).decode()
        return f'<img alt="{html.escape(self.words().title)}" src="data:image/png;base64,{data}">'


def picture(
    folder: StudyFolder,
    x: str | None = None,
    y: str = "time_s",
    lines: str = "schedule",
    panels: Sequence[str] | None = None,
    *,
    where: str | None = None,
    baseline: str | None = None,
) -> StudyPicture:
    """A quantity over an axis of the study, in panels; or, if `y` is an axis too, a map of the winners.

    Parameters
    ----------
    x : an axis; by default the first with numbers, else the first.
    y : a column such as ``time_s`` or ``speedup``, or an axis.
    lines : the column whose values are lines.
    panels : columns whose values have a panel each; by default all others that vary.
    where, baseline : as in `tasp_lab.study.show.show`.

    Raises `StudyError` for a name that is no column, several rows per point, and more panels or lines than fit.
    """
    found = selected(folder, where, baseline)
    axes = varying(found.rows)
    free = [each for each in axes if each != lines]
    across = x or next((each for each in free if _is_number(found.rows, each)), (*free, "seq")[0])
    check_columns([across, y, lines, *(panels or ())], found.rows)
    is_map = y in questions(found.rows)
    own = (across, y, "schedule") if is_map else (across, lines)
    chosen = tuple(each for each in axes if each not in own) if panels is None else tuple(panels)
    made = StudyPicture(found, across, y, lines, chosen)
    _check(made)
    return made


def _is_number(rows: pd.DataFrame, column: str) -> bool:
    """Whether a column has numbers, perhaps not in all rows, and nothing else."""
    values = [value for value in map(plain, rows[column]) if value is not None]
    return bool(values) and all(isinstance(value, (int, float)) for value in values)


def _check(made: StudyPicture) -> None:
    """Raise `StudyError` for what cannot be drawn."""
    from tasp_lab.plots.study import MAX_LINES, MAX_PANELS

    rows, named = made.selection.rows, {made.x, made.y, made.lines}
    if made.y in SPEEDUPS and made.selection.baseline is None:
        raise StudyError(f"{made.y}: the study has no baseline, expected --baseline SCHEDULE")
    if made.x not in questions(rows):
        raise StudyError(f"x: {made.x!r} is a result, expected an axis: {', '.join(varying(rows))}")
    if len(named) < 3 or named & set(made.panels):
        raise StudyError(f"x, y, lines and panels: expected different columns, not {made.x}, {made.y}, {made.lines}")
    if not made.is_map and not _is_number(rows, made.y):
        raise StudyError(f"y: {made.y!r} has no numbers, expected a column such as time_s, or an axis")
    for column, most, what in ((list(made.panels), MAX_PANELS, "panels"), ([made.lines], MAX_LINES, "lines")):
        several = len(rows[column].drop_duplicates()) if column else 1
        if several > most:
            raise StudyError(f"{several} {what}, expected at most {most}: --where leaves fewer rows")
    if not made.is_map:
        for _, points in rows.groupby(list(made.shown), dropna=False, sort=False):
            check_single(points, made.shown, "--panels")
