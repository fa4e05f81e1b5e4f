"""Plots of measured tables and their predictions: times and relative errors over size.

Up to `MAX_PANELS` tables with more than `FEW_SIZES` sizes have a panel each, on shared axes. All other tables are lines
of one overview of errors. The functions accept any object with a table and rows, so this module imports no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, PercentFormatter

from tasp_lab.measurements import MeasuredTable
from tasp_lab.plots.timelines import INK, MEASURED, MUTED, PREDICTED, WIDTH_INCHES, lines_inches, wrapped
from tasp_lab.units import format_size, format_size_about, format_time

FEW_SIZES = 3
"""With at most this many sizes a table has no panel; its errors suffice."""

MAX_PANELS = 12
"""Maximum number of panels; with more long tables, all tables are lines of the overview."""

MAX_LINES = 60
"""Maximum number of lines of the overview, those with the largest errors."""

TARGET_ERROR = 0.05
"""The range of errors that is shaded."""

_COLUMNS = 4


class ComparedRow(Protocol):
    """One size; `relative_error` is predicted over measured time, minus one."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def measured_s(self) -> float: ...
    @property
    def predicted_s(self) -> float: ...
    @property
    def in_scope(self) -> bool: ...
    @property
    def relative_error(self) -> float: ...


class ComparedTable(Protocol):
    """A measured table, and a row for each predicted size."""

    @property
    def table(self) -> MeasuredTable: ...
    @property
    def rows(self) -> Sequence[ComparedRow]: ...


def draw_tables(tables: Sequence[ComparedTable], title: str = "Measured and predicted times") -> Figure:
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
    text = wrapped(title, 100)
    size = (WIDTH_INCHES, sum(heights) + 0.3 + lines_inches(text))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]) if heights else []
    if long:
        _draw_panels(parts.pop(0), long, panel_lines)
    if lines:
        plot_overview(lines, parts.pop(0).subplots())
    return figure


def mean_error(compared: ComparedTable) -> float:
    """Mean absolute error of the sizes in scope; of all sizes if none is in scope."""
    errors = [abs(row.relative_error) for row in compared.rows if row.in_scope]
    return float(np.mean(errors or [abs(row.relative_error) for row in compared.rows]))


def _draw_panels(part: SubFigure, tables: Sequence[ComparedTable], lines: int) -> None:
    """Times above errors, one column per table, `_COLUMNS` tables per row; all share both axes."""
    columns = min(_COLUMNS, len(tables))
    grid = part.subplots(2 * lines, columns, sharex=True, squeeze=False, height_ratios=[2, 1] * lines)
    times, errors = grid[::2].ravel(), grid[1::2].ravel()
    for axes in (times, errors):
        for other in axes[1:]:
            other.sharey(axes[0])
    sizes = [row.size_bytes for each in tables for row in each.rows]
    reach = 1.15 * max([2 * TARGET_ERROR, *(abs(row.relative_error) for each in tables for row in each.rows)])
    for index, each in enumerate(tables):
        first, last = index % columns == 0, index + columns >= len(tables)
        plot_table(each, times[index])
        plot_errors(each, errors[index])
        errors[index].set_ylim(-reach, reach)
        for axes, label in ((times[index], "time"), (errors[index], "error")):
            axes.set(ylabel=label if first else "", xlabel="size" if last and label == "error" else "")
            axes.tick_params(labelleft=first, labelbottom=last and label == "error")
    _label_sizes(times[0], sizes)
    _label_times(times[0])
    for axes in (*times[len(tables) :], *errors[len(tables) :]):
        axes.set_visible(False)
    shown = {str(line.get_label()): line for axes in times for line in axes.get_lines()}
    part.legend(list(shown.values()), list(shown), loc="outside upper right", ncols=3, frameon=False, fontsize=8)


def plot_table(compared: ComparedTable, axes: Axes) -> None:
    """Measured and predicted times in seconds over size in bytes, on logarithmic axes; sizes out of scope are hollow.

    >>> from tasp_lab.analysis.accuracy import judge
    >>> from tasp_lab.measurements import parse_table
    >>> table = parse_table('''# profile: h100-8
    ... # collective: sendrecv
    ... # ranks: 8
    ... size_B,time_us
    ... 33554432,421.45''', "h100.csv")
    >>> axes = Figure().subplots()
    >>> plot_table(judge(table), axes)
    >>> axes.get_title(loc="left").partition(":")[0]
    'sendrecv on h100-8'
    """
    axes.set(xscale="log", yscale="log", ylabel="time", xlabel="size")
    axes.plot(*_columns(compared.rows, "predicted_s"), "-", color=PREDICTED, label="predicted")
    _points(axes, compared.rows, "measured_s", MEASURED, "measured")
    times_s = [time_s for row in compared.rows for time_s in (row.predicted_s, row.measured_s)]
    if max(times_s) < 1.001 * min(times_s):  # next to a power of ten, a logarithmic axis would have no length
        axes.update_datalim([(compared.rows[0].size_bytes, time_s) for time_s in (times_s[0] / 2, times_s[0] * 2)])
    axes.set_title(f"{heading(compared)}:\n{_summary(compared)}", loc="left", fontsize=8, color=INK, parse_math=False)
    _style_axes(axes)


def plot_errors(compared: ComparedTable, axes: Axes) -> None:
    """Relative errors of the predicted times over size in bytes; the range `TARGET_ERROR` is shaded."""
    axes.axhspan(-TARGET_ERROR, TARGET_ERROR, color="#e8f0e4", linewidth=0)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.plot(*_columns(compared.rows, "relative_error"), "-", color=MUTED, linewidth=0.8)
    _points(axes, compared.rows, "relative_error", PREDICTED, "")
    axes.set(xscale="log", xlabel="size", ylabel="error")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _style_axes(axes)


def plot_overview(tables: Sequence[ComparedTable], axes: Axes) -> None:
    """Relative errors of all sizes, one line per table, with the mean error of the sizes in scope."""
    axes.axvspan(-TARGET_ERROR, TARGET_ERROR, color="#e8f0e4", linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for place, each in enumerate(tables):
        errors = [row.relative_error for row in each.rows]
        colors = [PREDICTED if row.in_scope else "none" for row in each.rows]
        axes.scatter(errors, [place] * len(errors), c=colors, edgecolors=PREDICTED, s=16, zorder=3)
        axes.annotate(f"{mean_error(each):.1%}", (1.01, place), xycoords=("axes fraction", "data"), va="center",
                      fontsize=8, color=INK)  # fmt: skip
    reach = 1.1 * max([2 * TARGET_ERROR, *(abs(row.relative_error) for each in tables for row in each.rows)])
    axes.set_yticks(range(len(tables)), [f"{_stem(each)}: {heading(each)}, {_ends(each)}" for each in tables])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set(xlim=(-reach, reach), ylim=(len(tables) - 0.5, -0.5))
    axes.set_xlabel("predicted over measured time, less one\n(a point per size; hollow: out of scope)")
    axes.set_title("Mean error", loc="right", fontsize=8, color=INK)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _style_axes(axes)


def heading(compared: ComparedTable) -> str:
    """Collective and machine of a table."""
    return f"{compared.table.collective} on {compared.table.profile}"


def _stem(compared: ComparedTable) -> str:
    return Path(compared.table.name).stem


def _summary(compared: ComparedTable) -> str:
    errors = [abs(row.relative_error) for row in compared.rows if row.in_scope]
    if len(errors) <= 1:
        return f"error {errors[0]:.1%}" if errors else "out of scope"
    return f"mean error {np.mean(errors):.1%}, worst {max(errors):.1%}"


def _ends(compared: ComparedTable) -> str:
    sizes = sorted({row.size_bytes for row in compared.rows})
    return " to ".join(format_size_about(size) for size in dict.fromkeys((sizes[0], sizes[-1])))


def _columns(rows: Sequence[ComparedRow], name: str) -> tuple[list[int], list[float]]:
    return [row.size_bytes for row in rows], [getattr(row, name) for row in rows]


def _points(axes: Axes, rows: Sequence[ComparedRow], name: str, color: str, label: str) -> None:
    """Filled points for sizes in scope, hollow points for others."""
    for in_scope, fill, more in ((True, color, ""), (False, "none", ", out of scope")):
        if chosen := [row for row in rows if row.in_scope == in_scope]:
            named = f"{label}{more}" if label else "_"
            axes.plot(*_columns(chosen, name), "o", color=color, mfc=fill, markersize=4, label=named)


def _label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Ticks at powers of two, few enough that their labels do not overlap."""
    first, last = math.floor(math.log2(min(sizes)) + 0.1), math.ceil(math.log2(max(sizes)))
    apart = max(1, math.ceil((last - first) / 4))
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(first, last + 1, apart)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
    axes.xaxis.set_minor_locator(NullLocator())


def _label_times(axes: Axes) -> None:
    low_s, high_s = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high_s < 50 * low_s else (1,), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))


def _style_axes(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
