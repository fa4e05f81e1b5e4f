"""Plots of timelines, rendering as PNG, SVG or PDF, and helpers shared by all plots.

Only matplotlib's figure objects are used, not `pyplot`, so there is no global state, and drawing works in any thread
and without a display.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import OutputError
from tasp_lab.core.files import PICTURE_SUFFIXES
from tasp_lab.core.units import format_time
from tasp_lab.schedules.linear.task import BACKWARD as BACKWARD_KERNELS
from tasp_lab.timeline.events import ATTEND, DIFFERENTIATE, SEND, Event, Timeline

MAX_BARS = 200_000
"""Maximum number of bars; with more events, the lanes of a rank are one row of merged busy intervals."""

INK, MUTED, IDLE = "#222222", "#777777", "#eceef1"
PREDICTED, MEASURED = "#4477aa", "#ee8866"
DOTS_PER_INCH = 150
WIDTH_INCHES = 10.0

_MAX_VECTOR_BARS = 20_000
"""Maximum number of vector shapes in an SVG or PDF; more bars are rasterized, which viewers show faster."""

_MAX_ROWS_INCHES = 10.5
"""Maximum height of the rows of all panels, unless a panel would get less than `_MIN_ROWS_INCHES`."""

_MIN_ROWS_INCHES = 0.5
_ROW_SHARE = 0.84
"""Fraction of the row of a rank that bars fill; the rest separates it from the next rank."""
_MIN_COMPUTE_SHARE = 0.25
"""Minimum fraction of the bars of a rank for its kernel calls, for any number of lanes."""


BACKWARD = {DIFFERENTIATE, *BACKWARD_KERNELS}
"""Kernels drawn in the colours of a backward pass; all others, also unknown ones, have those of a forward pass."""

_SHADES = {
    SEND: ("transfer", "viridis", 0.08, 0.9, PREDICTED),
    ATTEND: ("kernel call", "YlOrRd_r", 0.05, 0.75, "#cc5522"),
    DIFFERENTIATE: ("backward kernel call", "RdPu_r", 0.2, 0.8, "#ae017e"),
}
"""Kinds of events: their name, a range of a matplotlib colormap, and the colour of merged bars."""


def render(figure: Figure, suffix: str) -> bytes:
    """Render a figure in the format of a suffix, one of `PICTURE_SUFFIXES`, with or without its dot.

    Redrawing the same figure gives the same bytes. Raises `OutputError` for any other suffix.
    """
    picture_format = suffix.removeprefix(".").lower()
    if f".{picture_format}" not in PICTURE_SUFFIXES:
        raise OutputError(f"cannot draw a picture as {suffix!r}: expected {', '.join(PICTURE_SUFFIXES)}")
    buffer = io.BytesIO()
    # the date of drawing and random ids would make files of equal figures differ
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "tasp-lab"}):
        figure.savefig(buffer, format=picture_format, dpi=DOTS_PER_INCH, metadata=undated.get(picture_format))
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------- timelines


def draw_timelines(
    timelines: Sequence[Timeline], title: str, intervals: Sequence[str] = (), one_axis: bool = False
) -> Figure:
    """Draw timelines one above the other.

    `intervals` are those of their times in words, if there are any, in the heading of each.

    Each rank is a row, divided into its lanes from top to bottom. Each transfer is a bar from its start to its end,
    coloured by its step; idle time is grey. Kernel calls have a separate lane on top of each rank, with one colour
    scale per pass. The time of the last event is above the end of each panel. With more than `MAX_BARS` events, the
    lanes of a rank are merged into one row of busy intervals.

    The panels share a time axis with `one_axis`, or if the shortest timeline takes at least half as long as the
    longest. Otherwise each panel has its own axis and unit, and the title states this.
    """
    merged = sum(len(timeline.events) for timeline in timelines) > MAX_BARS
    spans_s = [float(timeline.time_s) for timeline in timelines]
    shared = one_axis or len(spans_s) < 2 or 2 * min(spans_s) >= max(spans_s)
    if shared:
        spans_s = [max(spans_s)] * len(spans_s) if spans_s else []
    else:
        title += "\nTime axes differ: each panel has its own."
    scales = _step_scales(timelines)
    shown = [kind for kind, (norm, _) in scales.items() if not merged and norm.Ncmap > 1]
    known = intervals or [""] * len(timelines)
    headings = [_heading(timeline, merged, interval) for timeline, interval in zip(timelines, known, strict=True)]
    rows = _rows_inches(timelines)
    text = sum(0.4 + lines_inches(heading) for heading in headings) + 0.6 * bool(shown) + 0.1
    figure = new_figure(title, sum(rows) + text)
    if not timelines:
        return figure
    heights = [*rows, *[0.12] * bool(shown)]
    grid = figure.add_gridspec(len(heights), max(len(shown), 1), height_ratios=heights)
    for index, (timeline, heading, span_s) in enumerate(zip(timelines, headings, spans_s, strict=True)):
        panel = figure.add_subplot(grid[index, :])
        panel.set_title(heading, loc="left", fontsize=9, color=INK, parse_math=False)
        _decorate_panel(panel, timeline, span_s)
        _draw_bars(panel, timeline, span_s, rows[index], None if merged else scales)
        label_time_axis(panel, span_s)
    for index, kind in enumerate(shown):
        norm, colors = scales[kind]
        first, last = (int(norm.boundaries[at] + 0.5) for at in (0, -1))
        drawn = figure.colorbar(
            ScalarMappable(norm=norm, cmap=colors),
            cax=figure.add_subplot(grid[-1, index]),
            orientation="horizontal",
            ticks=list(range(first, last, -(-(last - first) // 8))),
        )
        drawn.set_label(f"step of a {_SHADES[kind][0]}" if len(scales) > 1 else "step", fontsize=9, color=INK)
        drawn.ax.tick_params(length=0, labelsize=8, colors=MUTED)
        drawn.ax.minorticks_off()
        drawn.outline.set_visible(False)
    return figure


def _heading(timeline: Timeline, merged: bool, interval: str) -> str:
    lanes, calls = _lane_count(timeline), sum(event.kind != SEND for event in timeline.events)
    parts = [f"{timeline.origin} {timeline.schedule} on {timeline.topology}"]
    parts += [f"interval: {interval}"] if interval else []
    if merged:
        work = f"{len(timeline.events) - calls} transfers" + (f" and {calls} kernel calls" if calls else "")
        parts.append(f"{work} merged")
    elif lanes > 1:
        parts.append(f"{lanes} lanes per rank")
    if calls:
        parts.append("kernel calls on top" if lanes else "kernel calls")
    return wrapped(", ".join(parts), 110)


def _rows_inches(timelines: Sequence[Timeline]) -> list[float]:
    """The height of the rows of each panel: proportional to its lanes, reduced if the total is too large."""
    lanes = [_lane_count(each) + any(event.kind != SEND for event in each.events) for each in timelines]
    wanted = [each.world_size * (0.09 + 0.027 * count) for each, count in zip(timelines, lanes, strict=True)]
    wanted = [float(np.clip(inches, _MIN_ROWS_INCHES, 4.5)) for inches in wanted]
    part = min(1.0, _MAX_ROWS_INCHES / max(sum(wanted), 1))
    return [max(_MIN_ROWS_INCHES, inches * part) for inches in wanted]


def _lane_count(timeline: Timeline) -> int:
    return 1 + max((event.lane for event in timeline.events), default=0)


def _by_kind(timelines: Iterable[Timeline]) -> dict[str, list[Event]]:
    """The events of each kind of `_SHADES` that occurs."""
    events: dict[str, list[Event]] = {kind: [] for kind in _SHADES}
    for event in (event for timeline in timelines for event in timeline.events):
        events[SEND if event.kind == SEND else DIFFERENTIATE if event.kind in BACKWARD else ATTEND].append(event)
    return {kind: of_kind for kind, of_kind in events.items() if of_kind}


def _step_scales(timelines: Iterable[Timeline]) -> dict[str, tuple[BoundaryNorm, ListedColormap]]:
    """The colours of the steps of each kind that occurs, from dark to light, shared by all panels."""
    scales = {}
    for kind, events in _by_kind(timelines).items():
        steps = {event.step for event in events}
        first, count = min(steps), max(steps) - min(steps) + 1
        _, colormap, dark, light, _ = _SHADES[kind]
        colors = ListedColormap(list(matplotlib.colormaps[colormap](np.linspace(dark, light, count))))
        scales[kind] = BoundaryNorm(np.arange(count + 1) + first - 0.5, count), colors
    return scales


def _draw_bars(
    panel: Axes,
    timeline: Timeline,
    span_s: float,
    rows_inches: float,
    scales: Mapping[str, tuple[BoundaryNorm, ListedColormap]] | None,
) -> None:
    """Draw kernel calls, if any, above transfers: each event in its lane, or without scales merged busy intervals.

    Calls are as high as a lane, but at least `_MIN_COMPUTE_SHARE`.
    """
    of_kind, lanes, top = _by_kind([timeline]), _lane_count(timeline), -_ROW_SHARE / 2
    calls = sorted(of_kind.keys() - {SEND})
    of_calls = _ROW_SHARE * max(_MIN_COMPUTE_SHARE, 1 / (lanes + 1)) if calls else 0.0
    for kind in [*calls, *[SEND] * bool(lanes)]:
        events, is_send = of_kind.get(kind, []), kind == SEND
        begins = top + of_calls * is_send
        height = (_ROW_SHARE - of_calls) / (1 if scales is None else lanes) if is_send else of_calls
        if scales is None:
            bars = _merged_bars(events, timeline.world_size, begins, height, span_s / 1000)
        else:
            lane = np.array([event.lane if is_send else 0 for event in events])
            rank = np.array([event.rank for event in events])
            ends = ([float(event.start_s) for event in events], [float(event.end_s) for event in events])
            bars = np.column_stack([rank + begins + height * lane, np.full(len(events), height), *ends])
        gap_points = _gap_points(bars, span_s, rows_inches / timeline.world_size)
        collection = rectangles(bars, edgecolors="white", linewidths=gap_points, antialiaseds=gap_points > 0)
        collection.set_rasterized(len(bars) > _MAX_VECTOR_BARS)
        if scales is None:
            collection.set_facecolor(_SHADES[kind][-1])
        elif events:
            norm, colors = scales[kind]
            collection.set(cmap=colors, norm=norm, array=[event.step for event in events])
        panel.add_collection(collection, autolim=False)


def _decorate_panel(panel: Axes, timeline: Timeline, span_s: float) -> None:
    """Draw everything but the bars: an idle row per rank, the end and its time, and the axes."""
    ranks, end_s = timeline.world_size, float(timeline.time_s)
    idle = np.array([(rank - _ROW_SHARE / 2, _ROW_SHARE, 0.0, end_s) for rank in range(ranks)])
    panel.add_collection(rectangles(idle, facecolors=IDLE, linewidths=0), autolim=False)
    panel.set_xlim(0, span_s * 1.002 or 1.0)
    panel.set_ylim(ranks - 0.5, -0.5)
    panel.vlines(end_s, -0.5, ranks - 0.5, colors=INK, linewidth=1)
    panel.set_title(format_time(end_s), loc="right", fontsize=9, fontweight="bold", color=INK)
    panel.set_ylabel("rank", fontsize=9, color=INK)
    few = FixedLocator(list(range(ranks)))
    panel.yaxis.set_major_locator(few if ranks <= 16 else MaxNLocator(8, integer=True, steps=[1, 2, 4, 8, 10]))
    hide_frame(panel)


def _merged_bars(events: Sequence[Event], ranks: int, top: float, height: float, closed_gap_s: float) -> FloatArray:
    """Rows (top, height, start_s, end_s): the busy intervals of each rank, with invisibly narrow gaps closed."""
    intervals: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
    for event in events:
        intervals[event.rank].append((float(event.start_s), float(event.end_s)))
    bars = [
        (rank + top, height, start_s, end_s)
        for rank, busy in enumerate(intervals)
        for start_s, end_s in union(np.array(busy, dtype=np.float64).reshape(-1, 2), closed_gap_s)
    ]
    return np.array(bars, dtype=np.float64).reshape(-1, 4)


def union(intervals: FloatArray, closed_gap: float = 0.0) -> FloatArray:
    """The union of (start, end) rows; gaps up to `closed_gap` are closed.

    >>> union(np.array([[5.0, 6.0], [0.0, 2.0], [1.0, 3.0], [3.1, 4.0]]), 0.2).tolist()
    [[0.0, 4.0], [5.0, 6.0]]
    """
    if not len(intervals):
        return intervals
    starts, ends = intervals[np.argsort(intervals[:, 0], kind="stable")].T
    reached = np.maximum.accumulate(ends)
    opens = np.flatnonzero(np.append(True, starts[1:] > reached[:-1] + closed_gap))
    closes = np.append(opens[1:], len(starts)) - 1
    return np.column_stack([starts[opens], reached[closes]])


def _gap_points(bars: FloatArray, span_s: float, rank_inches: float) -> float:
    """The width of the white line between bars, reduced or 0 where it would hide the bars.

    At 0, bars are also drawn without antialiasing, which would make many narrow bars look half idle.
    """
    if not len(bars) or not span_s:
        return 0.0
    width_inches = np.median(bars[:, 3] - bars[:, 2]) / span_s * 0.9 * WIDTH_INCHES
    gap_points = 72 * float(min(width_inches, bars[0, 1] * rank_inches)) / 6
    return min(gap_points, 0.8) if gap_points > 0.1 else 0.0


# ------------------------------------------------------------------------------------------------------- shared


def new_figure(title: str, height_inches: float) -> Figure:
    """An empty figure with its title and `height_inches` below it."""
    text = wrapped(title, 100)
    figure = Figure(figsize=(WIDTH_INCHES, height_inches + lines_inches(text)), layout="constrained", facecolor="white")
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    return figure


def rectangles(bars: FloatArray, **style: Any) -> PolyCollection:
    """Rows (top, height, left, right) as one collection of rectangles."""
    top, height, left, right = bars.reshape(-1, 4).T
    corners = [(left, top), (right, top), (right, top + height), (left, top + height)]
    return PolyCollection(list(np.stack([np.column_stack(corner) for corner in corners], axis=1)), **style)


def label_time_axis(panel: Axes, span_s: float) -> None:
    """Label ticks with plain numbers, and the axis with the unit that fits the longest time."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    unit, factor = next((each for each in units if span_s >= each[1]), units[-1]) if span_s else units[0]
    panel.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: f"{time_s / factor:.6g}"))
    panel.set_xlabel(f"time ({unit})", fontsize=9, color=INK)


def wrapped(text: str, width: int) -> str:
    """`text` with lines wrapped at `width` characters."""
    return "\n".join(textwrap.fill(line, width) for line in text.splitlines())


def lines_inches(text: str) -> float:
    """The height of a text."""
    return 0.2 * (text.count("\n") + 1)


def hide_frame(axes: Axes) -> None:
    """Remove the box and the tick marks."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=MUTED)
