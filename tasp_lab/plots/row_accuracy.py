"""Plots of layers and kernels beside their predictions: the error of each row over its measured time.

Up to `MAX_PANELS` tables have a panel each, on shared axes; more are lines of one overview. The functions accept any
object with these rows, so this module imports no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from tasp_lab.plots.timelines import INK, MEASURED, MUTED, PREDICTED, WIDTH_INCHES, lines_inches, wrapped
from tasp_lab.units import format_time

MAX_PANELS = 12
"""Maximum number of panels."""

REACH = 1.0
"""Errors beyond this are drawn at the edge, as triangles."""

CLOSE_ERROR = 0.15
"""The range of errors that is shaded."""

COLORS = {"gpu-bound": PREDICTED, "host-bound": MEASURED, "whole-model": MUTED, None: PREDICTED}
_COLUMNS = 4


class ErrorRow(Protocol):
    """One measurement; `relative_error` is predicted over measured time, minus one, None without either."""

    @property
    def measured_s(self) -> float | None: ...
    @property
    def relative_error(self) -> float | None: ...
    @property
    def in_scope(self) -> bool: ...
    @property
    def regime(self) -> str | None: ...


class ErrorTable(Protocol):
    """A table by name, and a row for each measurement."""

    @property
    def label(self) -> str: ...
    @property
    def rows(self) -> Sequence[ErrorRow]: ...


def draw_rows(tables: Sequence[ErrorTable], title: str = "Error of predictions over measured time") -> Figure:
    """All tables with a predicted row, as panels or as lines of an overview."""
    tables = [each for each in tables if _shown(each)]
    panels = len(tables) <= MAX_PANELS
    lines = math.ceil(len(tables) / _COLUMNS)
    text = wrapped(title, 100)
    height = (2.3 * lines + 0.4 if panels else 1.2 + 0.19 * len(tables)) + lines_inches(text)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained", facecolor="white")
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    if panels and tables:
        _draw_panels(figure, tables, lines)
    elif tables:
        plot_lines(tables, figure.subplots())
    return figure


def _shown(table: ErrorTable) -> list[ErrorRow]:
    return [row for row in table.rows if row.relative_error is not None and row.measured_s]


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
    shown = {str(points.get_label()): points for axes in grid for points in axes.collections if points.get_label()}
    shown = {label: points for label, points in shown.items() if not label.startswith("_")}
    figure.legend(list(shown.values()), list(shown), loc="outside upper right", ncols=3, frameon=False, fontsize=8)


def plot_rows(table: ErrorTable, axes: Axes) -> None:
    """Errors over measured times in seconds, by regime; rows that do not count are hollow."""
    axes.axhspan(-CLOSE_ERROR, CLOSE_ERROR, color="#e8f0e4", linewidth=0)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    rows = _shown(table)
    for regime in dict.fromkeys(row.regime for row in rows):
        chosen = [row for row in rows if row.regime == regime]
        times = [row.measured_s or math.nan for row in chosen]
        _points(axes, times, chosen, regime)
    axes.set(xscale="log", ylim=(-1.1 * REACH, 1.1 * REACH))
    axes.set_title(f"{table.label}\n{_median(rows)}", loc="left", fontsize=8, color=INK, parse_math=False)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(LogLocator(10, numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))
    _style(axes)


def plot_lines(tables: Sequence[ErrorTable], axes: Axes) -> None:
    """Errors of all rows, one line per table, with the median error of those that count."""
    axes.axvspan(-CLOSE_ERROR, CLOSE_ERROR, color="#e8f0e4", linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for place, each in enumerate(tables):
        rows = _shown(each)
        colors = [COLORS.get(row.regime, PREDICTED) for row in rows]
        fills = [color if row.in_scope else "none" for row, color in zip(rows, colors, strict=True)]
        axes.scatter(_clipped(rows), [place] * len(rows), c=fills, edgecolors=colors, s=14, linewidths=0.6, zorder=3)
        axes.annotate(_median(rows), (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8,
                      color=INK)  # fmt: skip
    axes.set_yticks(range(len(tables)), [each.label for each in tables])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set(xlim=(-1.1 * REACH, 1.1 * REACH), ylim=(len(tables) - 0.5, -0.5))
    axes.set_xlabel(f"predicted over measured time, less one; beyond {REACH:.0%} at the edge (hollow: does not count)")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _style(axes)


def _points(axes: Axes, times: Sequence[float], rows: Sequence[ErrorRow], regime: str | None) -> None:
    color, errors = COLORS.get(regime, PREDICTED), _clipped(rows)
    inside = np.array([abs(error) < REACH for error in errors])
    fills = np.array([color if row.in_scope else "none" for row in rows])
    for marker, chosen in (("o", inside), ("^", ~inside)):
        label = f"{regime or 'rows'}" if marker == "o" else "_"
        axes.scatter(np.array(times)[chosen], np.array(errors)[chosen], c=fills[chosen], edgecolors=color, s=14,
                     marker=marker, linewidths=0.6, zorder=3, label=label)  # fmt: skip


def _clipped(rows: Sequence[ErrorRow]) -> list[float]:
    return [min(max(row.relative_error or 0.0, -REACH), REACH) for row in rows]


def _median(rows: Sequence[ErrorRow]) -> str:
    errors = [abs(row.relative_error or 0.0) for row in rows if row.in_scope]
    return f"median {np.median(errors):.1%} of {len(errors)}" if errors else "no row counts"


def _style(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
