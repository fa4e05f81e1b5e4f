"""Plots of predictions beside measurements: the errors of rows, with their intervals.

The error of a row is predicted over measured time, less one. Its interval, 5 to 95 %, is drawn on the same axis: the
errors that the row would have if it had taken as long as either end. A point on its bar is inside.

`draw_tables` draws collectives: up to `MAX_PANELS` tables with more than `FEW_SIZES` sizes have a panel each, on shared
axes. All other tables are lines of one overview of errors.

`draw_rows` draws layers and kernels: up to `MAX_PANELS` tables have a panel each, on shared axes; more are lines of one
overview.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, PercentFormatter

from tasp_lab.core.units import format_size, format_size_about, format_time
from tasp_lab.plots.timelines import INK, MEASURED, MUTED, PREDICTED, new_figure, wrapped

if TYPE_CHECKING:
    from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy

REACH = 1.0
"""Errors and intervals beyond this are drawn at the edge."""

BAND, TARGET = "#bcd3e8", "#e8f0e4"
"""Colors of intervals, and of the range of errors that is aimed at."""

INTERVAL_LABEL = "5 to 95 %"

COLORS = {"gpu-bound": PREDICTED, "host-bound": MEASURED, "whole-model": MUTED, None: PREDICTED}


class Line(NamedTuple):
    """A line of an overview: a table named with its sizes."""

    label: str
    rows: Sequence[MeasuredRow]


def shown(table: TableAccuracy | Line) -> list[MeasuredRow]:
    """The rows that have an error."""
    return [row for row in table.rows if row.relative_error is not None and row.measured_s]


def clipped(error: float | None) -> float:
    """An error, at most `REACH` to either side."""
    return min(max(error or 0.0, -REACH), REACH)


def error_ends(row: MeasuredRow) -> tuple[float, float] | None:
    """The errors of a row if it had taken as long as its interval ends: the lower one first; None without an interval.

    >>> from types import SimpleNamespace as Row
    >>> error_ends(Row(measured_s=2.0, relative_error=1.0, interval=Row(low_s=2.0, high_s=8.0)))
    (-0.5, 1.0)
    """
    if row.interval is None or row.measured_s is None or row.relative_error is None:
        return None
    predicted_s = row.measured_s * (1 + row.relative_error)
    return predicted_s / row.interval.high_s - 1, predicted_s / row.interval.low_s - 1


def median_ends(rows: Sequence[MeasuredRow]) -> tuple[float, float] | None:
    """The median ends of the intervals of rows that count; None without intervals."""
    ends = [each for row in rows if row.in_scope and (each := error_ends(row)) is not None]
    if not ends:
        return None
    low, high = np.median(np.array(ends), axis=0)
    return clipped(float(low)), clipped(float(high))


def summary(rows: Sequence[MeasuredRow]) -> str:
    """The median error of the rows that count, and how many are inside their intervals."""
    counted = [row for row in rows if row.in_scope]
    if not counted:
        return "no row counts"
    ends = [(row.relative_error or 0.0, each) for row in counted if (each := error_ends(row)) is not None]
    inside = np.mean([low <= error <= high for error, (low, high) in ends]) if ends else None
    median = np.median([abs(row.relative_error or 0.0) for row in counted])
    return f"median {median:.1%} of {len(counted)}" + (f", {inside:.0%} inside" if inside is not None else "")


def plot_lines(tables: Sequence[TableAccuracy | Line], axes: Axes, target: float) -> None:
    """Errors of all rows, one line per table, over the median interval; errors within `target` are shaded."""
    axes.axvspan(-target, target, color=TARGET, linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for place, table in enumerate(tables):
        rows = shown(table)
        if (ends := median_ends(rows)) is not None:
            axes.barh(place, ends[1] - ends[0], 0.55, ends[0], color=BAND, alpha=0.6)
        colors = [COLORS.get(row.regime, PREDICTED) for row in rows]
        fills = [color if row.in_scope else "none" for row, color in zip(rows, colors, strict=True)]
        errors = [clipped(row.relative_error) for row in rows]
        axes.scatter(errors, [place] * len(rows), c=fills, edgecolors=colors, s=14, linewidths=0.6, zorder=3)
        axes.annotate(summary(rows), (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8,
                      color=INK)  # fmt: skip
    axes.set_yticks(range(len(tables)), [each.label for each in tables])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set(xlim=(-1.1 * REACH, 1.1 * REACH), ylim=(len(tables) - 0.5, -0.5))
    axes.set_xlabel(
        f"predicted over measured time, less one; beyond {REACH:.0%} at the edge\n"
        f"(hollow: does not count; bar: {INTERVAL_LABEL}, the median of the table; green: {target:.0%})"
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    style_axes(axes)


def frame_errors(axes: Axes, close: float) -> None:
    """An axis of errors in percent, with a line at 0; errors within `close` are shaded."""
    axes.axhspan(-close, close, color=TARGET, linewidth=0)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    style_axes(axes)


def style_axes(axes: Axes) -> None:
    """A grid below the data, no frame above and to the right, small labels."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


MAX_PANELS = 12
"""Maximum number of panels; with more tables, all tables are lines of an overview."""

CLOSE_ERROR = 0.15
"""The range of errors that is shaded."""

_COLUMNS = 4


def draw_rows(tables: Sequence[TableAccuracy | Line], title: str = "Error of predictions over measured time") -> Figure:
    """All tables with a predicted row, as panels or as lines of an overview."""
    tables = [each for each in tables if shown(each)]
    if len(tables) > MAX_PANELS:
        figure = new_figure(title, 1.2 + 0.19 * len(tables))
        plot_lines(tables, figure.subplots(), CLOSE_ERROR)
        return figure
    lines, columns = math.ceil(len(tables) / _COLUMNS), min(_COLUMNS, len(tables))
    figure = new_figure(title, 2.3 * lines + 0.4)
    if not tables:
        return figure
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for index, (table, axes) in enumerate(zip(tables, grid, strict=False)):
        is_last = index + columns >= len(tables)
        plot_rows(table, axes)
        axes.set(ylabel="error" if index % columns == 0 else "", xlabel="time" if is_last else "")
        axes.tick_params(labelbottom=is_last)
    for axes in grid[len(tables) :]:
        axes.set_visible(False)
    _add_legend(figure, [points for axes in grid for points in axes.collections])
    return figure


def _add_legend(figure: Figure | SubFigure, drawn: Sequence[Artist]) -> None:
    """A legend of what is drawn in the panels, each label once; matplotlib's own labels begin with ``_``."""
    labelled = {label: each for each in drawn if (label := str(each.get_label())) and not label.startswith("_")}
    figure.legend(
        list(labelled.values()), list(labelled), loc="outside upper right", ncols=4, frameon=False, fontsize=8
    )


def plot_rows(table: TableAccuracy | Line, axes: Axes) -> None:
    """Errors over measured times in seconds, by regime, over their intervals; rows that do not count are hollow."""
    frame_errors(axes, CLOSE_ERROR)
    rows = shown(table)
    ends = [(row.measured_s, *each) for row in rows if (each := error_ends(row)) is not None]
    if ends:
        times, low, high = zip(*ends, strict=True)
        axes.vlines(times, [*map(clipped, low)], [*map(clipped, high)], color=BAND, linewidth=3, label=INTERVAL_LABEL)
    for regime in dict.fromkeys(row.regime for row in rows):
        of_regime = [row for row in rows if row.regime == regime]
        color = COLORS.get(regime, PREDICTED)
        points = np.array([(row.measured_s or math.nan, clipped(row.relative_error)) for row in of_regime])
        fills = np.array([color if row.in_scope else "none" for row in of_regime])
        inside = np.abs(points[:, 1]) < REACH
        for marker, chosen, label in (("o", inside, regime or "rows"), ("^", ~inside, "_")):
            axes.scatter(points[chosen, 0], points[chosen, 1], c=fills[chosen], edgecolors=color, s=14, marker=marker,
                         linewidths=0.6, zorder=3, label=label)  # fmt: skip
    axes.set(xscale="log", ylim=(-1.1 * REACH, 1.1 * REACH))
    axes.set_title(f"{wrapped(table.label, 36)}\n{summary(rows)}", loc="left", fontsize=8, color=INK, parse_math=False)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))


FEW_SIZES = 3
"""With at most this many sizes a table has no panel; its errors suffice."""

MAX_LINES = 60
"""Maximum number of lines of the overview, those with the largest errors."""

TARGET_ERROR = 0.05
"""The range of errors that is shaded."""


def draw_tables(tables: Sequence[TableAccuracy], title: str = "Measured and predicted times") -> Figure:
    """All tables with rows, as panels or as lines of an overview of errors."""
    tables = [each for each in tables if each.rows]
    long = [each for each in tables if len(each.rows) > FEW_SIZES]
    long = long if len(long) <= MAX_PANELS else []
    others = sorted((each for each in tables if each not in long), key=mean_error)
    lines = others[-MAX_LINES:]
    if len(lines) < len(others):
        title += f"; the {len(lines)} of {len(others)} tables with the largest errors"
    panel_lines = math.ceil(len(long) / _COLUMNS)
    heights = [2.9 * panel_lines + 0.3] * bool(long) + [1.1 + 0.19 * len(lines)] * bool(lines)
    figure = new_figure(title, sum(heights) + 0.3)
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]) if heights else []
    if long:
        _draw_panels(parts.pop(0), long, panel_lines)
    if lines:
        plot_lines(
            [Line(f"{each.label}, {_ends(each)}", each.rows) for each in lines], parts.pop(0).subplots(), TARGET_ERROR
        )
    return figure


def counted_errors(compared: TableAccuracy) -> list[float]:
    """The absolute errors of the sizes in scope."""
    return [abs(row.relative_error or 0.0) for row in compared.rows if row.in_scope]


def mean_error(compared: TableAccuracy) -> float:
    """Mean absolute error of the sizes in scope; of all sizes if none is in scope."""
    return float(np.mean(counted_errors(compared) or [abs(row.relative_error or 0.0) for row in compared.rows]))


def _draw_panels(part: SubFigure, tables: Sequence[TableAccuracy], lines: int) -> None:
    """Times above errors, one column per table, `_COLUMNS` tables per row; all share both axes."""
    columns = min(_COLUMNS, len(tables))
    grid = part.subplots(2 * lines, columns, sharex=True, squeeze=False, height_ratios=[2, 1] * lines)
    times, errors = grid[::2].ravel(), grid[1::2].ravel()
    for axes in (times, errors):
        for other in axes[1:]:
            other.sharey(axes[0])
    sizes = [row.size_bytes for each in tables for row in each.rows]
    reach = 1.15 * max([2 * TARGET_ERROR, *(_reach(row) for each in tables for row in each.rows)])
    for index, table in enumerate(tables):
        is_first, is_last = index % columns == 0, index + columns >= len(tables)
        plot_table(table, times[index])
        plot_errors(table, errors[index])
        errors[index].set_ylim(-reach, reach)
        for axes, label in ((times[index], "time"), (errors[index], "error")):
            axes.set(ylabel=label if is_first else "", xlabel="size" if is_last and label == "error" else "")
            axes.tick_params(labelleft=is_first, labelbottom=is_last and label == "error")
    first, last = math.floor(math.log2(min(sizes)) + 0.1), math.ceil(math.log2(max(sizes)))
    apart = max(1, math.ceil((last - first) / 4))  # few enough powers of two that their labels do not overlap
    times[0].xaxis.set_major_locator(FixedLocator([2.0**power for power in range(first, last + 1, apart)]))
    times[0].xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
    times[0].xaxis.set_minor_locator(NullLocator())
    low_s, high_s = times[0].get_ylim()
    times[0].yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high_s < 50 * low_s else (1,), numticks=8))
    times[0].yaxis.set_minor_locator(NullLocator())
    times[0].yaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))
    for axes in (*times[len(tables) :], *errors[len(tables) :]):
        axes.set_visible(False)
    _add_legend(part, [artist for axes in times for artist in (*axes.get_lines(), *axes.collections)])


def plot_table(compared: TableAccuracy, axes: Axes) -> None:
    """Measured and predicted times in seconds over size in bytes, with intervals; sizes out of scope are hollow.

    >>> from tasp_lab.measure.accuracy import evaluate
    >>> from tasp_lab.measure.readers import parse_table
    >>> table = parse_table('''# profile: h100-8
    ... # collective: sendrecv
    ... # ranks: 8
    ... size_B,time_us
    ... 33554432,421.45''', "h100.csv")
    >>> axes = Figure().subplots()
    >>> plot_table(evaluate(table), axes)
    >>> axes.get_title(loc="left").partition(":")[0]
    'sendrecv on h100-8'
    """
    axes.set(xscale="log", yscale="log", ylabel="time", xlabel="size")
    if bounded := [(row.size_bytes, ends.low_s, ends.high_s) for row in compared.rows if (ends := row.interval)]:
        sizes, low_s, high_s = zip(*bounded, strict=True)
        axes.fill_between(sizes, low_s, high_s, color=BAND, linewidth=0, label=INTERVAL_LABEL)
    axes.plot(*_columns(compared.rows, "predicted_s"), "-", color=PREDICTED, label="predicted")
    _points(axes, compared.rows, "measured_s", MEASURED, "measured")
    times_s = [time_s for row in compared.rows for time_s in (row.predicted_s, row.measured_s) if time_s is not None]
    if max(times_s) < 1.001 * min(times_s):  # next to a power of ten, a logarithmic axis would have no length
        axes.update_datalim([(compared.rows[0].size_bytes, time_s) for time_s in (times_s[0] / 2, times_s[0] * 2)])
    errors = counted_errors(compared)
    found = (
        f"mean error {np.mean(errors):.1%}, worst {max(errors):.1%}"
        if len(errors) > 1
        else (f"error {errors[0]:.1%}" if errors else "out of scope")
    )
    title = f"{compared.what} on {compared.profile}:\n{found}"
    axes.set_title(title, loc="left", fontsize=8, color=INK, parse_math=False)
    style_axes(axes)


def plot_errors(compared: TableAccuracy, axes: Axes) -> None:
    """Relative errors of the predicted times over size in bytes, over their intervals; `TARGET_ERROR` is shaded."""
    frame_errors(axes, TARGET_ERROR)
    ends = [(row.size_bytes, *each) for row in compared.rows if (each := error_ends(row)) is not None]
    if ends:
        sizes, low, high = zip(*ends, strict=True)
        axes.fill_between(sizes, low, high, color=BAND, linewidth=0)
    axes.plot(*_columns(compared.rows, "relative_error"), "-", color=MUTED, linewidth=0.8)
    _points(axes, compared.rows, "relative_error", PREDICTED, "")
    axes.set(xscale="log", xlabel="size", ylabel="error")


def _reach(row: MeasuredRow) -> float:
    """How far the error axis goes for a row: its error, and its interval as far as `REACH`."""
    return max(abs(row.relative_error or 0.0), *(abs(clipped(end)) for end in error_ends(row) or (0.0, 0.0)))


def _ends(compared: TableAccuracy) -> str:
    sizes = sorted({row.size_bytes for row in compared.rows})
    return " to ".join(format_size_about(size) for size in dict.fromkeys((sizes[0], sizes[-1])))


def _columns(rows: Sequence[MeasuredRow], name: str) -> tuple[list[int], list[float]]:
    return [row.size_bytes for row in rows], [getattr(row, name) for row in rows]


def _points(axes: Axes, rows: Sequence[MeasuredRow], name: str, color: str, label: str) -> None:
    """Filled points for sizes in scope, hollow points for others."""
    for in_scope, fill, more in ((True, color, ""), (False, "none", ", out of scope")):
        if chosen := [row for row in rows if row.in_scope == in_scope]:
            named = f"{label}{more}" if label else "_"
            axes.plot(*_columns(chosen, name), "o", color=color, mfc=fill, markersize=4, label=named)
