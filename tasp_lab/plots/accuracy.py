"""Plots of predictions beside measurements: the errors of rows of tables of every kind, with their intervals::

    draw_tables(accuracy("my-cluster/"), "My cluster")

The error of a row is predicted over measured time, less one. Its interval, 5 to 95 %, is drawn on the same axis: the
errors that the row would have if it had taken as long as either end. A point on its bar is inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from tasp_lab.core.units import format_time
from tasp_lab.plots.timelines import INK, MEASURED, MUTED, PREDICTED, new_figure, wrapped

if TYPE_CHECKING:
    from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy

REACH = 1.0
"""Errors and intervals beyond this are drawn at the edge."""

CLOSE_ERROR = 0.15
"""The range of errors that is shaded."""

MAX_PANELS, MAX_LINES = 12, 60
"""Maximum number of panels; with more tables, those with the largest errors are lines of an overview."""

BAND, TARGET = "#bcd3e8", "#e8f0e4"
"""Colors of intervals, and of the range of errors that is aimed at."""

INTERVAL_LABEL = "5 to 95 %"

COLORS = {"gpu-bound": PREDICTED, "host-bound": MEASURED, "whole-model": MUTED, None: PREDICTED}

_COLUMNS = 4


def draw_tables(tables: Sequence[TableAccuracy], title: str = "Error of predictions over measured time") -> Figure:
    """All tables with a predicted row: a panel each, or more than `MAX_PANELS` a line each of one overview."""
    tables = [each for each in tables if shown(each)]
    if len(tables) > MAX_PANELS:
        lines = sorted(tables, key=mean_error)[-MAX_LINES:]
        if len(lines) < len(tables):
            title += f"; the {len(lines)} of {len(tables)} tables with the largest errors"
        figure = new_figure(title, 1.2 + 0.19 * len(lines))
        plot_lines(lines, figure.subplots())
        return figure
    rows, columns = math.ceil(len(tables) / _COLUMNS), min(_COLUMNS, len(tables))
    figure = new_figure(title, 2.3 * rows + 0.4)
    if not tables:
        return figure
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for index, (table, axes) in enumerate(zip(tables, grid, strict=False)):
        is_last = index + columns >= len(tables)
        plot_rows(table, axes)
        axes.set(ylabel="error" if index % columns == 0 else "", xlabel="time" if is_last else "")
        axes.tick_params(labelbottom=is_last)
    for axes in grid[len(tables) :]:
        axes.set_visible(False)
    # each label once; those that matplotlib makes itself begin with an underscore
    drawn = {str(points.get_label()): points for axes in grid for points in axes.collections}
    labels = [label for label in drawn if not label.startswith("_")]
    figure.legend([drawn[label] for label in labels], labels, loc="outside upper right", ncols=4, frameon=False,
                  fontsize=8)  # fmt: skip
    return figure


def plot_rows(table: TableAccuracy, axes: Axes) -> None:
    """Errors over measured times in seconds, by regime, over their intervals; rows that do not count are hollow."""
    axes.axhspan(-CLOSE_ERROR, CLOSE_ERROR, color=TARGET, linewidth=0)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    style_axes(axes)
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


def plot_lines(tables: Sequence[TableAccuracy], axes: Axes) -> None:
    """Errors of all rows, one line per table, over the median interval."""
    axes.axvspan(-CLOSE_ERROR, CLOSE_ERROR, color=TARGET, linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for place, table in enumerate(tables):
        rows = shown(table)
        if ends := [each for row in rows if row.in_scope and (each := error_ends(row)) is not None]:
            low, high = (clipped(float(end)) for end in np.median(ends, axis=0))
            axes.barh(place, high - low, 0.55, low, color=BAND, alpha=0.6)
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
        f"(hollow: does not count; bar: {INTERVAL_LABEL}, the median of the table; green: {CLOSE_ERROR:.0%})"
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    style_axes(axes)


def style_axes(axes: Axes) -> None:
    """A grid below the data, no frame above and to the right, small labels."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)


def shown(table: TableAccuracy) -> list[MeasuredRow]:
    """The rows that have an error."""
    return [row for row in table.rows if row.relative_error is not None and row.measured_s]


def counted_errors(rows: Sequence[MeasuredRow]) -> list[float]:
    """The absolute errors of the rows that count."""
    return [abs(row.relative_error or 0.0) for row in rows if row.in_scope]


def mean_error(table: TableAccuracy) -> float:
    """Mean absolute error of the rows that count; 0 without one."""
    return float(np.mean(counted_errors(shown(table)) or [0.0]))


def summary(rows: Sequence[MeasuredRow]) -> str:
    """The median error of the rows that count, and how many are inside their intervals."""
    if not (errors := counted_errors(rows)):
        return "no row counts"
    ends = [(row.relative_error or 0.0, each) for row in rows if row.in_scope and (each := error_ends(row)) is not None]
    inside = f", {np.mean([low <= error <= high for error, (low, high) in ends]):.0%} inside" if ends else ""
    return f"median {np.median(errors):.1%} of {len(errors)}{inside}"


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


def clipped(error: float | None) -> float:
    """An error, at most `REACH` to either side."""
    return min(max(error or 0.0, -REACH), REACH)
