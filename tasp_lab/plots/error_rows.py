"""What pictures of predictions beside measurements have in common: errors of rows, their intervals, and the overview.

The error of a row is predicted over measured time, less one. Its interval, 5 to 95 %, is drawn on the same axis: the
errors that the row would have if it had taken as long as either end. A point on its bar is inside.

The functions accept any object with these rows, so this package imports no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from tasp_lab.plots.timelines import INK, MEASURED, MUTED, PREDICTED

REACH = 1.0
"""Errors and intervals beyond this are drawn at the edge."""

BAND, TARGET = "#bcd3e8", "#e8f0e4"
"""Colors of intervals, and of the range of errors that is aimed at."""

INTERVAL_LABEL = "5 to 95 %"

COLORS = {"gpu-bound": PREDICTED, "host-bound": MEASURED, "whole-model": MUTED, None: PREDICTED}


class Ends(Protocol):
    """The interval of a predicted time."""

    @property
    def low_s(self) -> float: ...
    @property
    def high_s(self) -> float: ...


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
    @property
    def interval(self) -> Ends | None: ...


class ErrorTable(Protocol):
    """A table by name, and a row for each measurement."""

    @property
    def label(self) -> str: ...
    @property
    def rows(self) -> Sequence[ErrorRow]: ...


def shown(table: ErrorTable) -> list[ErrorRow]:
    """The rows that have an error."""
    return [row for row in table.rows if row.relative_error is not None and row.measured_s]


def clipped(error: float | None) -> float:
    """An error, at most `REACH` to either side."""
    return min(max(error or 0.0, -REACH), REACH)


def error_ends(row: ErrorRow) -> tuple[float, float] | None:
    """The errors of a row if it had taken as long as its interval ends: the lower one first; None without an interval.

    >>> from types import SimpleNamespace as Row
    >>> error_ends(Row(measured_s=2.0, relative_error=1.0, interval=Row(low_s=2.0, high_s=8.0)))
    (-0.5, 1.0)
    """
    if row.interval is None or row.measured_s is None or row.relative_error is None:
        return None
    predicted_s = row.measured_s * (1 + row.relative_error)
    return predicted_s / row.interval.high_s - 1, predicted_s / row.interval.low_s - 1


def median_ends(rows: Sequence[ErrorRow]) -> tuple[float, float] | None:
    """The median ends of the intervals of rows that count; None without intervals."""
    ends = [each for row in rows if row.in_scope and (each := error_ends(row)) is not None]
    if not ends:
        return None
    low, high = np.median(np.array(ends), axis=0)
    return clipped(float(low)), clipped(float(high))


def summary(rows: Sequence[ErrorRow]) -> str:
    """The median error of the rows that count, and how many are inside their intervals."""
    counted = [row for row in rows if row.in_scope]
    if not counted:
        return "no row counts"
    ends = [(row.relative_error or 0.0, each) for row in counted if (each := error_ends(row)) is not None]
    inside = np.mean([low <= error <= high for error, (low, high) in ends]) if ends else None
    median = np.median([abs(row.relative_error or 0.0) for row in counted])
    return f"median {median:.1%} of {len(counted)}" + (f", {inside:.0%} inside" if inside is not None else "")


def plot_lines(tables: Sequence[ErrorTable], axes: Axes, target: float) -> None:
    """Errors of all rows, one line per table, over the median interval; errors within `target` are shaded."""
    axes.axvspan(-target, target, color=TARGET, linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for place, each in enumerate(tables):
        rows = shown(each)
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


def style_axes(axes: Axes) -> None:
    """A grid below the data, no frame above and to the right, small labels."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
