"""Plots of layers and kernels beside their predictions: the error of each row over its measured time.

Up to `MAX_PANELS` tables have a panel each, on shared axes; more are lines of one overview.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from tasp_lab.core.units import format_time
from tasp_lab.plots.error_rows import (
    BAND,
    COLORS,
    INTERVAL_LABEL,
    REACH,
    TARGET,
    ErrorRow,
    ErrorTable,
    clipped,
    error_ends,
    plot_lines,
    shown,
    style_axes,
    summary,
)
from tasp_lab.plots.timelines import INK, MUTED, PREDICTED, WIDTH_INCHES, lines_inches, wrapped

MAX_PANELS = 12
"""Maximum number of panels."""

CLOSE_ERROR = 0.15
"""The range of errors that is shaded."""

_COLUMNS = 4


def draw_rows(tables: Sequence[ErrorTable], title: str = "Error of predictions over measured time") -> Figure:
    """All tables with a predicted row, as panels or as lines of an overview."""
    tables = [each for each in tables if shown(each)]
    panels = len(tables) <= MAX_PANELS
    lines = math.ceil(len(tables) / _COLUMNS)
    text = wrapped(title, 100)
    height = (2.3 * lines + 0.4 if panels else 1.2 + 0.19 * len(tables)) + lines_inches(text)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained", facecolor="white")
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    if panels and tables:
        _draw_panels(figure, tables, lines)
    elif tables:
        plot_lines(tables, figure.subplots(), CLOSE_ERROR)
    return figure


def _draw_panels(figure: Figure, tables: Sequence[ErrorTable], lines: int) -> None:
    columns = min(_COLUMNS, len(tables))
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for index, (each, axes) in enumerate(zip(tables, grid, strict=False)):
        plot_rows(each, axes)
        axes.set(
            ylabel="error" if index % columns == 0 else "", xlabel="time" if index + columns >= len(tables) else ""
        )
        axes.tick_params(labelbottom=index + columns >= len(tables))
    for axes in grid[len(tables) :]:
        axes.set_visible(False)
    labelled = {str(points.get_label()): points for axes in grid for points in axes.collections if points.get_label()}
    labelled = {label: points for label, points in labelled.items() if not label.startswith("_")}
    figure.legend(
        list(labelled.values()), list(labelled), loc="outside upper right", ncols=4, frameon=False, fontsize=8
    )


def plot_rows(table: ErrorTable, axes: Axes) -> None:
    """Errors over measured times in seconds, by regime, over their intervals; rows that do not count are hollow."""
    axes.axhspan(-CLOSE_ERROR, CLOSE_ERROR, color=TARGET, linewidth=0)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    rows = shown(table)
    _intervals(axes, rows)
    for regime in dict.fromkeys(row.regime for row in rows):
        chosen = [row for row in rows if row.regime == regime]
        times = [row.measured_s or math.nan for row in chosen]
        _points(axes, times, chosen, regime)
    axes.set(xscale="log", ylim=(-1.1 * REACH, 1.1 * REACH))
    axes.set_title(f"{wrapped(table.label, 36)}\n{summary(rows)}", loc="left", fontsize=8, color=INK, parse_math=False)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(LogLocator(10, numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))
    style_axes(axes)


def _intervals(axes: Axes, rows: Sequence[ErrorRow]) -> None:
    """A bar at the time of each row that has an interval."""
    ends = [(row.measured_s, *each) for row in rows if (each := error_ends(row)) is not None]
    if ends:
        times, low, high = zip(*ends, strict=True)
        axes.vlines(times, [*map(clipped, low)], [*map(clipped, high)], color=BAND, linewidth=3, label=INTERVAL_LABEL)


def _points(axes: Axes, times: Sequence[float], rows: Sequence[ErrorRow], regime: str | None) -> None:
    color, errors = COLORS.get(regime, PREDICTED), [clipped(row.relative_error) for row in rows]
    inside = np.array([abs(error) < REACH for error in errors])
    fills = np.array([color if row.in_scope else "none" for row in rows])
    for marker, chosen in (("o", inside), ("^", ~inside)):
        label = f"{regime or 'rows'}" if marker == "o" else "_"
        axes.scatter(np.array(times)[chosen], np.array(errors)[chosen], c=fills[chosen], edgecolors=color, s=14,
                     marker=marker, linewidths=0.6, zorder=3, label=label)  # fmt: skip
