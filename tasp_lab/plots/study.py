"""Plots of studies: curves with their intervals and bounds in panels, and maps of which schedule wins where.

The functions take data frames (`tasp_lab.study.chart` makes them), so this module imports no study. Every picture has
a caption with what is held constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from tasp_lab.plots.accuracy import style_axes
from tasp_lab.plots.timelines import INK, MUTED, WIDTH_INCHES, new_figure, wrapped

if TYPE_CHECKING:
    import pandas as pd

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""The scheme "bright" of Paul Tol's colour schemes (SRON technical note 09-002), which colour-blind readers can tell
apart."""

ALL_COLORS = (
    *COLORS[:-1],
    *("#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499"),
    COLORS[-1],
)
"""With those of the scheme "muted", for areas, which have no marker."""

MARKERS = "osD^vP*X"
"""With more lines than colours, the colours return with the next marker."""

MAX_LINES = len(COLORS) * len(MARKERS)
"""Maximum number of lines that can be told apart."""

MAX_PANELS = 24
"""Maximum number of panels."""

BAND_ALPHA = 0.16
DASHES = (0, (4, 2))
_COLUMNS = 3
_PANEL_INCHES = 2.6
_CELL_INCHES = 0.34
_CAPTION_WIDTH = 150


class Scale(NamedTuple):
    """An axis: its label, how its numbers are written, whether it is logarithmic; the names of categories, if any."""

    label: str
    text: Callable[[float], str]
    logarithmic: bool
    categories: Sequence[str] = ()


class Words(NamedTuple):
    """The texts around a picture: its title, its caption, and the labels of the axes of maps."""

    title: str
    caption: str
    x: str = ""
    y: str = ""


# ------------------------------------------------------------------------------------------------------- curves


def draw_curves(points: pd.DataFrame, x: Scale, y: Scale, words: Words, reference: float | None = None) -> Figure:
    """Panels on shared axes; a horizontal line at `reference`, if there is one.

    `points` has the columns ``panel``, ``line``, ``x``, ``y``, ``low`` and ``high`` (the interval), ``bound``, and
    ``limit`` (what y is at least or at most where it is not known); NaN for nothing.
    """
    panels = dict(list(points.groupby("panel", sort=False)))
    columns = min(_COLUMNS, max(len(panels), 1))
    lines = math.ceil(len(panels) / columns)
    # Colour and marker of each line, the same in all panels.
    styles = {
        label: (COLORS[place % len(COLORS)], MARKERS[place // len(COLORS) % len(MARKERS)])
        for place, label in enumerate(points["line"].unique())
    }
    figure = _figure(words, _PANEL_INCHES * lines if lines > 1 else 4.2, _curve_handles(points, styles))
    if not panels:
        return figure
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for index, ((title, panel), axes) in enumerate(zip(panels.items(), grid.ravel(), strict=False)):
        _plot_panel(panel, axes, styles, bool(x.categories))
        axes.set_title(title, loc="left", fontsize=9, color=INK, parse_math=False)
        if reference is not None:
            axes.axhline(reference, color=MUTED, linewidth=0.8, zorder=1)
        axes.set_xlabel(x.label if index + columns >= len(panels) else "", fontsize=9, color=INK)
        axes.set_ylabel(y.label if index % columns == 0 else "", fontsize=9, color=INK)
        axes.tick_params(labelbottom=index + columns >= len(panels))
    _scale_axes(grid[0, 0], points, x, y)
    for axes in grid.ravel()[len(panels) :]:
        axes.set_visible(False)
    return figure


def _figure(words: Words, height_inches: float, handles: Sequence[Artist]) -> Figure:
    """An empty figure with its title above, and below it the legend and the caption."""
    caption = wrapped(words.caption, _CAPTION_WIDTH)
    longest = max((len(str(each.get_label())) for each in handles), default=0)
    columns = max(1, min(len(handles), int(WIDTH_INCHES / (0.45 + 0.068 * longest))))
    caption_inches = 0.155 * (caption.count("\n") + 1) + 0.1
    below = caption_inches + 0.2 * math.ceil(len(handles) / columns) + 0.12
    figure = new_figure(words.title, height_inches + below)
    size = figure.get_size_inches()
    figure.get_layout_engine().set(rect=(0, below / size[1], 1, 1 - below / size[1]))  # type: ignore[union-attr, call-arg]
    figure.text(0.01, 0.07 / size[1], caption, fontsize=8, color=MUTED, parse_math=False)
    legend = figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, caption_inches / size[1]),
                           borderaxespad=0, ncols=columns, frameon=False, fontsize=8)  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _plot_panel(panel: pd.DataFrame, axes: Axes, styles: Mapping[str, tuple[str, str]], apart: bool) -> None:
    """The lines of a panel; over categories points beside each other, `apart`."""
    lines = list(panel.groupby("line", sort=False))
    # Where all lines have the same bound it is drawn once.
    bounds = [(line["x"].tolist(), line["bound"].to_numpy(float)) for _, line in lines]
    alike = all(
        x == bounds[0][0] and np.allclose(bound, bounds[0][1], rtol=1e-3, equal_nan=True) for x, bound in bounds
    )
    for place, (label, line) in enumerate(lines):
        color, marker = styles[label]
        shift = 0.7 * ((place + 0.5) / len(lines) - 0.5) if apart else 0.0
        x = line["x"].to_numpy(float) + shift
        if apart:
            axes.vlines(x, line["low"], line["high"], color=color, alpha=2 * BAND_ALPHA, linewidth=4)
        else:
            axes.fill_between(x, line["low"], line["high"], color=color, alpha=BAND_ALPHA, linewidth=0)
        axes.plot(x, line["y"], color=color, marker=marker, markersize=3.2, linewidth=0 if apart else 1.3, zorder=3)
        axes.plot(x, line["limit"], color=color, marker=marker, markersize=4.5, markerfacecolor="white",
                  linestyle="none", zorder=3)  # fmt: skip
        if not (alike and place) and not apart:
            axes.plot(x, line["bound"], color=INK if alike else color, linestyle=DASHES, linewidth=0.8)
    style_axes(axes)


def _scale_axes(axes: Axes, points: pd.DataFrame, x: Scale, y: Scale) -> None:
    """Ticks at the values of x; those of y are written in its unit. All panels share both axes."""
    values = sorted(points["x"].unique())
    thinned = values[:: -math.ceil(len(values) / 8)][::-1] if values else values  # with the last one
    if x.logarithmic:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(thinned))
    axes.xaxis.set_minor_locator(NullLocator())
    if not x.categories:  # numbers; categories are drawn at their places 0, 1, 2
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: x.text(value)))
    else:
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: dict(enumerate(x.categories)).get(round(value), ""))
        )
        axes.set_xlim(-0.5, len(x.categories) - 0.5)
        for panel_axes in axes.figure.axes:
            panel_axes.tick_params(axis="x", rotation=30)
    if y.logarithmic:
        axes.set_yscale("log")
        shown = points[["y", "limit"]].to_numpy(float)
        shown = shown[np.isfinite(shown)]
        if len(shown) and shown.max() < 10 * shown.min():  # less than a decade: make room for a labelled tick
            middle = math.sqrt(shown.max() * shown.min())
            axes.set_ylim(min(middle / 4, shown.min() / 1.5), max(middle * 4, shown.max() * 1.5))
        axes.yaxis.set_major_locator(LogLocator(10, numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: y.text(value)))


def _curve_handles(points: pd.DataFrame, styles: Mapping[str, tuple[str, str]]) -> list[Artist]:
    """The legend: the lines, and what is drawn besides them, if it is."""
    handles: list[Artist] = [
        Line2D([], [], color=color, marker=marker, markersize=4, label=label)
        for label, (color, marker) in styles.items()
    ]
    if points["low"].notna().any():
        handles.append(Patch(color=MUTED, alpha=2 * BAND_ALPHA, linewidth=0, label="interval"))
    if points["bound"].notna().any():
        handles.append(Line2D([], [], color=INK, linestyle=DASHES, linewidth=0.8, label="bound"))
    if points["limit"].notna().any():
        handles.append(Line2D([], [], color=MUTED, marker="o", markerfacecolor="white", linestyle="none",
                              markersize=4.5, label="pruned by its bound"))  # fmt: skip
    return handles


# --------------------------------------------------------------------------------------------------------- maps


def draw_maps(cells: pd.DataFrame, columns: Sequence[str], words: Words) -> Figure:
    """Maps one above the other, each with the same columns.

    `cells` has the columns ``panel``, ``row``, ``column``, ``value`` (a name, which has a colour of its own), ``text``,
    and ``open``. Pairs without a cell stay white.
    """
    panels = dict(list(cells.groupby("panel", sort=False)))
    heights = [_CELL_INCHES * panel["row"].nunique() + 0.75 for panel in panels.values()]
    colors = {name: ALL_COLORS[place % len(ALL_COLORS)] for place, name in enumerate(cells["value"].unique())}
    handles: list[Artist] = [Patch(color=color, alpha=0.75, linewidth=0, label=name) for name, color in colors.items()]
    if cells["open"].any():
        handles.append(Patch(color=MUTED, alpha=0.32, linewidth=0, label="pale, ~: open"))
    figure = _figure(words, sum(heights), handles)
    if not panels:
        return figure
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for index, ((title, panel), axes) in enumerate(zip(panels.items(), grid, strict=True)):
        _plot_map(panel, columns, axes, colors)
        axes.set_title(title, loc="left", fontsize=9, color=INK, parse_math=False)
        axes.set_ylabel(words.y, fontsize=9, color=INK)
        axes.set_xlabel(words.x if index == len(panels) - 1 else "", fontsize=9, color=INK)
    return figure


def _plot_map(panel: pd.DataFrame, columns: Sequence[str], axes: Axes, colors: Mapping[str, str]) -> None:
    """Cells in their colours, paler where the question is open."""
    rows = list(panel["row"].unique())
    image = np.ones((len(rows), len(columns), 3))
    for cell in panel.itertuples():
        row, column = rows.index(cell.row), columns.index(cell.column)
        image[row, column] = 1 + (0.32 if cell.open else 0.75) * (np.array(to_rgb(colors[cell.value])) - 1)
        axes.text(column, row, cell.text, ha="center", va="center", fontsize=8, color=INK, parse_math=False)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xticks(np.arange(len(columns) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0, colors=INK)
    axes.spines[:].set_visible(False)
