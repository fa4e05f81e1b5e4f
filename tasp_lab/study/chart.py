"""Charts of a study: a quantity over an axis, or a map of the fastest schedules over two axes::

chart(study, "seq", "speedup").figure()
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import StudyError
from tasp_lab.core.files import make_folder
from tasp_lab.core.report import View
from tasp_lab.core.tables import Table
from tasp_lab.plots.study import MAX_LINES, MAX_PANELS, Scale, Words, draw_curves, draw_maps
from tasp_lab.plots.timelines import render
from tasp_lab.study.folder import PLOTS, StudyFolder
from tasp_lab.study.frames import (
    SPEEDUPS,
    check_columns,
    groups_of,
    is_number,
    least_times,
    plain,
    point_columns,
    records_of,
    text_of,
    title_of,
    varying,
)
from tasp_lab.study.table import WINNER, check_single, heading, in_order, pivot, selected

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LOGARITHMIC = ("_s", "_bytes")
"""Quantities with these endings have logarithmic axes."""

AROUND = {"time_s": ("time_low_s", "time_high_s", "bound_s"), "speedup": ("speedup_low", "speedup_high", "")}
"""The columns of the interval and of the bound of a quantity."""


@dataclass(frozen=True, repr=False)
class Chart(View):
    """A picture of a study; its rows are what is drawn, point by point."""

    words: Words
    draw: Callable[[], Figure]
    folder: Path

    def figure(self) -> Figure:
        """The picture, for matplotlib."""
        return self.draw()

    def default_path(self) -> Path:
        """Where the picture belongs in the folder of the study; the folder for it is made."""
        make_folder(self.folder / PLOTS)
        return self.folder / PLOTS / f"{self.document['y']}-{self.document['x']}.svg"

    def _repr_html_(self) -> str:
        """The picture, for notebooks."""
        data = base64.b64encode(render(self.figure(), "png")).decode()
        return f'<img alt="{html.escape(self.words.title)}" src="data:image/png;base64,{data}">'


def chart(
    folder: StudyFolder,
    x: str | None = None,
    y: str = "time_s",
    lines: str = "schedule",
    panels: Sequence[str] | None = None,
    *,
    where: str | None = None,
    baseline: str | None = None,
) -> Chart:
    """A quantity over an axis of the study, in panels; or, if `y` is an axis too, a map of the winners.

    Parameters
    ----------
    x : an axis; by default the first with numbers, else the first.
    y : a column such as ``time_s`` or ``speedup``, or an axis.
    lines : the column whose values are lines.
    panels : columns whose values have a panel each; by default all others that vary.
    where, baseline : as in `tasp_lab.study.table.table`.

    Raises `StudyError` for a name that is no column, several rows per point, and more panels or lines than fit.
    """
    covered = selected(folder, where, baseline)
    rows, axes = covered.rows, varying(covered.rows)
    free = [axis for axis in axes if axis != lines]
    across = x or next((axis for axis in free if has_numbers(rows, axis)), (*free, "seq")[0])
    check_columns([across, y, lines, *(panels or ())], rows)
    is_map = y in point_columns(rows)
    own = (across, y, "schedule") if is_map else (across, lines)
    split = tuple(axis for axis in axes if axis not in own) if panels is None else tuple(panels)
    if y in SPEEDUPS and covered.baseline is None:
        raise StudyError(f"{y}: the study has no baseline, expected --baseline SCHEDULE")
    if across not in point_columns(rows):
        raise StudyError(f"x: {across!r} is a result, expected an axis: {', '.join(axes)}")
    if len({across, y, lines}) < 3 or {across, y, lines} & set(split):
        raise StudyError(f"x, y, lines and panels: expected different columns, not {across}, {y}, {lines}")
    if not is_map and not has_numbers(rows, y):
        raise StudyError(f"y: {y!r} has no numbers, expected a column such as time_s, or an axis")
    for columns, most, what in ((split, MAX_PANELS, "panels"), ((lines,), MAX_LINES, "lines")):
        several = len(rows[list(columns)].drop_duplicates()) if columns else 1
        if several > most:
            raise StudyError(f"{several} {what}, expected at most {most}: --where leaves fewer rows")

    over = f" over {covered.baseline}" if covered.baseline else ""
    told_apart = (across, y if is_map else lines, *split)
    draw: Callable[[Words], Figure]
    if is_map:
        what = f"fastest schedule{f' and speed-up{over}' if over else ''}, by {title_of(y)} and {title_of(across)}"
        frame, names = winner_map(rows, across, y, split)
        draw = lambda words: draw_maps(frame, names, words)  # noqa: E731
    else:
        what = f"{title_of(y)}{over if y in SPEEDUPS else ''} by {title_of(across)}"
        for _, points in groups_of(rows, told_apart):
            check_single(points, told_apart, "--panels")
        frame, reference = curves(rows, across, y, lines, split), 1.0 if y in SPEEDUPS else None
        scales = x_scale(rows, across), y_scale(rows, y)
        draw = lambda words: draw_curves(frame, *scales, words, reference)  # noqa: E731
    caption = "\n".join(covered.lines((*told_apart, "schedule")))
    words, drawn = Words(f"{folder.name}: {what}", caption, title_of(across), title_of(y)), records_of(frame)
    asked = {"x": across, "y": y, "lines": lines, "panels": list(split), "points": drawn}
    shown = [(panel or "all",) for panel in frame["panel"].unique()]
    tables = [Table(words.title, ("panel",), shown)]
    return Chart(covered.document(told_apart) | asked, drawn, tables, words, partial(draw, words), folder.path)


def has_numbers(rows: pd.DataFrame, column: str) -> bool:
    """Whether a column has numbers, perhaps not in all rows, and nothing else."""
    values = [value for value in map(plain, rows[column]) if value is not None]
    return bool(values) and all(map(is_number, values))


def curves(rows: pd.DataFrame, x: str, y: str, lines: str, panels: Sequence[str]) -> pd.DataFrame:
    """The points of all lines: ``panel``, ``line``, ``x``, ``y``, the interval, the bound, and the ``limit`` that a
    bound sets where nothing was simulated. Where a schedule does not apply, its line has a gap."""
    import numpy as np
    import pandas as pd

    names = x_scale(rows, x).categories
    settled = rows["status"] == "settled"
    points = pd.DataFrame(
        {"x": [names.index(text_of(x, value)) if names else float(value) for value in rows[x]]}, rows.index
    )
    points["y"] = rows[y].astype(float).where(~settled)
    low, high, bound = AROUND.get(y, ("", "", ""))
    for name, column in (("low", low), ("high", high)):
        points[name] = rows[column].astype(float).where(~settled) if column else np.nan
    points["bound"] = rows[bound].astype(float) if bound else np.nan
    limits = least_times(rows) if y == "time_s" else rows[y].astype(float) if y in SPEEDUPS else None
    points["limit"] = np.nan if limits is None else limits.where(settled)
    found = []
    for key, panel in groups_of(rows, panels):
        # every line has all places of its panel, so that a missing one is a gap and no straight line across
        places = pd.Index(sorted(set(points.loc[panel.index, "x"])), name="x")
        for (label,), line in groups_of(panel, [lines]):
            drawn = points.loc[line.index].set_index("x").reindex(places).reset_index()
            drawn.insert(0, "line", text_of(lines, label))
            drawn.insert(0, "panel", heading(panels, key))
            found.append(drawn)
    return pd.concat(found, ignore_index=True)


def winner_map(rows: pd.DataFrame, x: str, y: str, panels: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The cells of all maps, and the names of their columns: ``panel``, ``row``, ``column``, the fastest schedule as
    ``value``, the ``text`` beside it, and whether the question is ``open``."""
    import pandas as pd

    cells = pivot(rows, (*panels, y), (x,), WINNER)
    frame = pd.DataFrame([
        {"panel": heading(panels, [cell[name] for name in panels]), "row": text_of(y, cell[y]),
         "column": text_of(x, cell[x]), "value": cell[WINNER], "text": cell["text"].partition(" ")[2],
         "open": bool(cell["mark"])}
        for cell in cells
    ])  # fmt: skip
    return frame, [text_of(x, value) for (value,) in in_order((cell[x],) for cell in cells)]


def x_scale(rows: pd.DataFrame, x: str) -> Scale:
    """The horizontal axis: numbers, logarithmic if they span a factor of four; else categories."""
    values: list[Any] = [plain(value) for value in rows[x].unique()]
    if not all(map(is_number, values)):
        return Scale(title_of(x), str, False, [text_of(x, value) for value in values])
    return Scale(title_of(x), lambda value: text_of(x, value), min(values) > 0 and max(values) >= 4 * min(values))


def y_scale(rows: pd.DataFrame, y: str) -> Scale:
    """The vertical axis: logarithmic for times and sizes."""
    positive = bool((rows[y].astype(float).dropna() > 0).all())
    return Scale(title_of(y), lambda value: text_of(y, value), positive and y.endswith(LOGARITHMIC))
