"""Pictures of measured tables beside their predictions: times and relative errors over size.

A table of many sizes has a panel of its own; tables of few sizes share one that shows their errors only. What is drawn
is anything that has a table and rows, so this module needs no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from tasp_lab.measurements import MeasuredTable
from tasp_lab.quantities import format_size, format_time

FEW_SIZES = 3
"""Up to so many, a curve says nothing that its errors do not."""

AIM = 0.05
"""Errors up to this are shaded."""

MEASURED, PREDICTED = "#ee8866", "#4477aa"
_MOST_TABLES = 60
_COLUMNS = 3
_PANEL_INCHES = (3.9, 3.4)
_QUIET = "#777777"


class ComparedRow(Protocol):
    """One size; `relative_error` is predicted over measured time, less one."""

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
    """A measured table and a row for each size that is predicted."""

    @property
    def table(self) -> MeasuredTable: ...
    @property
    def rows(self) -> Sequence[ComparedRow]: ...


def draw_tables(tables: Sequence[ComparedTable], title: str = "Measured and predicted times") -> Figure:
    """All tables in one figure: those of many sizes with times above errors, then those of few sizes together.

    Tables without rows are left out.
    """
    long = [each for each in tables if len(each.rows) > FEW_SIZES][:_MOST_TABLES]
    short = [each for each in tables if 0 < len(each.rows) <= FEW_SIZES][:_MOST_TABLES]
    columns = max(1, min(_COLUMNS, len(long)))
    lines = math.ceil(len(long) / columns)
    width = max(columns * _PANEL_INCHES[0], 7.0)
    heights = [lines * _PANEL_INCHES[1]] * bool(long) + [1.0 + 0.26 * len(short)] * bool(short)
    figure = Figure(figsize=(width, sum(heights) + 0.7), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0] if heights else [])
    if long:
        _draw_grid(next(parts), long, lines, columns)
    if short:
        plot_few(short, next(parts).subplots())
    return figure


def _draw_grid(part: SubFigure, tables: Sequence[ComparedTable], lines: int, columns: int) -> None:
    cells = part.subfigures(lines, columns, squeeze=False).ravel()
    for index, (cell, each) in enumerate(zip(cells, tables, strict=False)):
        time, error = cell.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        plot_table(each, time)
        plot_errors(each, error)
        time.set_xlabel("")
        if index == 0:
            time.legend(fontsize=8, frameon=False)


def plot_table(compared: ComparedTable, axes: Axes) -> None:
    """Measured and predicted times over size, on logarithmic axes; sizes that do not count are pale.

    >>> from tasp_lab.cli.accuracy import judge
    >>> from tasp_lab.measurements import parse_table
    >>> table = parse_table('''# profile: h100-8
    ... # collective: sendrecv
    ... # ranks: 8
    ... size_B,time_us
    ... 33554432,421.45''', "h100.csv")
    >>> axes = Figure().subplots()
    >>> plot_table(judge(table), axes)
    >>> axes.get_xlabel(), axes.get_title(loc="left").partition(":")[0].splitlines()
    ('size', ['h100', 'sendrecv on h100-8'])
    """
    sizes = [row.size_bytes for row in compared.rows]
    counts = [row.in_scope for row in compared.rows]
    axes.plot(sizes, [row.predicted_s for row in compared.rows], "-", color=PREDICTED, label="predicted")
    _points(axes, sizes, [row.measured_s for row in compared.rows], counts, "measured")
    axes.set(xscale="log", yscale="log", ylabel="time", xlabel="size")
    axes.set_title(
        f"{_stem(compared)}\n{heading(compared)}: {_summary(compared)}", loc="left", fontsize=8, parse_math=False
    )
    _label_sizes(axes, sizes)
    _label_times(axes)
    _quieten(axes)


def plot_errors(compared: ComparedTable, axes: Axes) -> None:
    """Relative errors of the predicted times over size; within `AIM` is shaded."""
    sizes, errors = [row.size_bytes for row in compared.rows], [row.relative_error for row in compared.rows]
    _shade_aim(axes.axhspan, axes.axhline)
    axes.plot(sizes, errors, "-", color=_QUIET, linewidth=0.8)
    _points(axes, sizes, errors, [row.in_scope for row in compared.rows], "", PREDICTED)
    reach = 1.15 * max([2 * AIM, *(abs(error) for error in errors)])
    axes.set(xscale="log", xlabel="size", ylabel="error", ylim=(-reach, reach))
    _label_percent(axes.yaxis, 4)
    _label_sizes(axes, sizes)
    _quieten(axes)


def plot_few(tables: Sequence[ComparedTable], axes: Axes) -> None:
    """The errors of tables of few sizes, one line each."""
    _shade_aim(axes.axvspan, axes.axvline)
    for place, each in enumerate(tables):
        errors = [row.relative_error for row in each.rows]
        colors = [PREDICTED if row.in_scope else "none" for row in each.rows]
        axes.scatter(errors, [place] * len(errors), c=colors, edgecolors=PREDICTED, s=26, zorder=3)
    labels = [f"{_stem(each)}, {' and '.join(_ends(each))}" for each in tables]
    reach = 1.1 * max([2 * AIM, *(abs(row.relative_error) for each in tables for row in each.rows)])
    axes.set_yticks(range(len(tables)), labels, parse_math=False)
    axes.set(xlim=(-reach, reach), ylim=(len(tables) - 0.5, -0.5), xlabel="predicted time over measured, less one")
    axes.set_title("Tables of few sizes", loc="left", fontsize=9)
    _label_percent(axes.xaxis, 8)
    _quieten(axes)


def heading(compared: ComparedTable) -> str:
    """What was measured, in a few words."""
    return f"{compared.table.collective} on {compared.table.profile}"


def _stem(compared: ComparedTable) -> str:
    return Path(compared.table.name).stem


def _summary(compared: ComparedTable) -> str:
    errors = [abs(row.relative_error) for row in compared.rows if row.in_scope]
    if len(errors) <= 1:
        return f"error {errors[0]:.1%}" if errors else "out of scope"
    return f"mean {np.mean(errors):.1%}, worst {max(errors):.1%}"


def _ends(compared: ComparedTable) -> list[str]:
    sizes = sorted({row.size_bytes for row in compared.rows})
    return [format_size(size) for size in dict.fromkeys((sizes[0], sizes[-1]))]


def _points(
    axes: Axes, x: Sequence[float], y: Sequence[float], counts: Sequence[bool], label: str, color: str = MEASURED
) -> None:
    """Full points where a size counts, hollow ones where it does not."""
    full = np.array(counts, dtype=bool)
    across, up = np.array(x, dtype=float), np.array(y, dtype=float)
    axes.plot(across[full], up[full], "o", color=color, markersize=4.5, label=label)
    if not full.all():
        out_of_scope = f"{label}, out of scope" if label else ""
        axes.plot(across[~full], up[~full], "o", color=color, markersize=4.5, mfc="none", label=out_of_scope)


def _shade_aim(span: object, line: object) -> None:
    assert callable(span), "a method of axes"
    assert callable(line), "a method of axes"
    span(-AIM, AIM, color="#e8f0e4", linewidth=0)
    line(0, color=_QUIET, linewidth=0.8)


def _label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Ticks at powers of two, so many that their labels stand apart."""
    first, last = math.floor(math.log2(min(sizes)) + 0.1), math.ceil(math.log2(max(sizes)))
    apart = max(1, math.ceil((last - first) / 5))
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(first, last + 1, apart)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
    axes.xaxis.set_minor_locator(NullLocator())


def _label_times(axes: Axes) -> None:
    low_s, high_s = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high_s < 50 * low_s else (1,), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))


def _label_percent(axis: Axis, most: int) -> None:
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(PercentFormatter(1, decimals=0))


def _quieten(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7.5)
    axes.xaxis.label.set_fontsize(8.5)
    axes.yaxis.label.set_fontsize(8.5)
