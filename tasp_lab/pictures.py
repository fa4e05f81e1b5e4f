"""Pictures of timelines and of predictions beside measurements, as PNG or SVG.

Only matplotlib's figure objects are used, never its `pyplot`: nothing global is set, no window is opened, and
drawing works in any thread and on machines without a display.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tasp_lab.arrays import FloatArray
from tasp_lab.errors import OutputError
from tasp_lab.quantities import Number, format_time
from tasp_lab.timeline import ATTEND, COMPUTE_LANE, DIFFERENTIATE, SEND, Event, Timeline

MOST_BARS = 200_000
"""With more transfers and calls than this in one picture, the lanes of a rank are one row of merged busy intervals."""

_MOST_VECTORS = 20_000
"""With more bars than this, an SVG holds them as an image, which viewers show faster than that many shapes."""

_FORMATS = ("png", "svg")
_DOTS_PER_INCH = 150
_WIDTH_INCHES = 10.0
_INK, _QUIET, _IDLE = "#222222", "#777777", "#eceef1"
_PREDICTED, _MEASURED = "#4477aa", "#ee8866"


class _Shades(NamedTuple):
    """How events of a kind are coloured: their name, a colormap of matplotlib's and a part of it, and one colour."""

    name: str
    colormap: str
    first: float
    last: float
    merged: str


_SHADES = {
    SEND: _Shades("transfer", "viridis", 0.08, 0.9, _PREDICTED),
    ATTEND: _Shades("kernel call", "YlOrRd_r", 0.05, 0.75, "#cc5522"),
    DIFFERENTIATE: _Shades("backward kernel call", "RdPu_r", 0.2, 0.8, "#ae017e"),
}
_ROW_SHARE = 0.84
"""The part of a rank's row that bars fill; the rest separates it from the next rank."""
_LEAST_COMPUTE_SHARE = 0.25
"""The part of a rank's bars that its kernel calls fill at least, however many lanes there are."""


def render(figure: Figure, suffix: str) -> bytes:
    """The picture as the content of a file with this suffix, ``png`` or ``svg``, with or without a dot.

    The same figure drawn anew gives the same bytes. Raises `OutputError` for any other suffix.
    """
    picture_format = suffix.removeprefix(".").lower()
    if picture_format not in _FORMATS:
        raise OutputError(f"cannot draw a picture as {suffix!r}: expected {' or '.join(_FORMATS)}")
    buffer = io.BytesIO()
    metadata = {"Date": None} if picture_format == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "tasp-lab"}):
        figure.savefig(buffer, format=picture_format, dpi=_DOTS_PER_INCH, metadata=metadata)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------------- timelines


def draw_timelines(timelines: Sequence[Timeline], title: str) -> Figure:
    """Draw timelines one above the other over one time axis.

    Each rank is a row, divided into its lanes from top to bottom; each transfer is a bar from its start to its end,
    coloured by its step; grey is idle. Kernel calls have a lane on top of their rank's, and colours of their own, those
    of backward passes others than those of forward passes.
    The time of the last event stands at the end of each panel. Above `MOST_BARS` transfers and calls the lanes of a
    rank are one row that shows when any of them was busy.
    """
    merged = sum(len(timeline.events) for timeline in timelines) > MOST_BARS
    headings = [_heading(timeline, merged) for timeline in timelines]
    heights = [
        _rows_height_inches(timeline) + _lines_height_inches(heading)
        for timeline, heading in zip(timelines, headings, strict=True)
    ]
    figure = _new_figure(title, sum(heights) + 0.6)
    if not timelines:
        return figure
    axes: list[Axes] = list(
        figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    )
    span_s = max(float(timeline.time_s) for timeline in timelines)
    scales = _step_scales(timelines)
    for panel, timeline, heading in zip(axes, timelines, headings, strict=True):
        panel.set_title(heading, loc="left", fontsize=9, color=_INK, parse_math=False)
        _draw_panel(panel, timeline, span_s, None if merged else scales)
    _label_time_axis(axes[-1], span_s)
    if not merged and any(len(scale.steps) > 1 for scale in scales.values()):
        for kind, scale in scales.items():
            label = f"step of a {_SHADES[kind].name}" if len(scales) > 1 else "step"
            _draw_step_scale(figure, axes, scale, label)
    return figure


def _heading(timeline: Timeline, merged: bool) -> str:
    lanes, calls = _lane_count(timeline), sum(event.kind != SEND for event in timeline.events)
    parts = [f"{timeline.origin} {timeline.schedule} on {timeline.topology}"]
    if merged:
        work = f"{len(timeline.events) - calls} transfers" + (f" and {calls} kernel calls" if calls else "")
        parts.append(f"{work} merged")
    elif lanes > 1:
        parts.append(f"{lanes} lanes per rank")
    if calls:
        parts.append("kernel calls on top" if lanes else "kernel calls")
    return _wrapped(", ".join(parts), 110)


def _rows_height_inches(timeline: Timeline) -> float:
    has_calls = any(event.kind != SEND for event in timeline.events)
    rows = timeline.world_size * (_lane_count(timeline) + has_calls) ** 0.5
    return float(np.clip(0.3 + 0.19 * rows, 1.0, 7.0))


def _lane_count(timeline: Timeline) -> int:
    return 1 + max((event.lane for event in timeline.events), default=0)


@dataclass(frozen=True)
class _Band:
    """A part of each rank's row, from `top` on and so high, that shows events of one kind in its lanes."""

    kind: str
    events: Sequence[Event]
    first_lane: int
    lanes: int
    top: float
    height: float


def _bands(timeline: Timeline) -> list[_Band]:
    """Kernel calls, where there are any, above transfers: as high as a lane, and never too low to be seen."""
    events: dict[str, list[Event]] = {}
    for event in timeline.events:
        events.setdefault(event.kind, []).append(event)
    transfers = events.pop(SEND, [])
    lanes, top, height = _lane_count(timeline), -_ROW_SHARE / 2, 0.0
    if events:
        height = _ROW_SHARE * max(_LEAST_COMPUTE_SHARE, 1 / (lanes + 1))
    bands = [_Band(kind, calls, COMPUTE_LANE, 1, top, height) for kind, calls in sorted(events.items())]
    if lanes:
        bands.append(_Band(SEND, transfers, 0, lanes, top + height, _ROW_SHARE - height))
    return bands


@dataclass(frozen=True)
class _StepScale:
    """The colours of one kind of events by their steps: dark for the first, light for the last."""

    steps: range
    colors: ListedColormap
    norm: BoundaryNorm

    @classmethod
    def of(cls, kind: str, steps: range) -> _StepScale:
        shades = _SHADES[kind]
        norm = BoundaryNorm(np.arange(steps.start, steps.stop + 1) - 0.5, len(steps))
        return cls(steps, _shades(shades.colormap, shades.first, shades.last, len(steps)), norm)


def _step_scales(timelines: Iterable[Timeline]) -> dict[str, _StepScale]:
    """The scale of each kind that occurs, the same in every panel."""
    steps: dict[str, set[int]] = {}
    for timeline in timelines:
        for event in timeline.events:
            steps.setdefault(event.kind, set()).add(event.step)
    return {
        kind: _StepScale.of(kind, range(min(steps[kind]), max(steps[kind]) + 1)) for kind in _SHADES if kind in steps
    }


def _shades(name: str, first: float, last: float, count: int) -> ListedColormap:
    """So many shades of a colormap of matplotlib's, between two places in it."""
    return ListedColormap([tuple(shade) for shade in matplotlib.colormaps[name](np.linspace(first, last, count))])


def _draw_panel(panel: Axes, timeline: Timeline, span_s: float, scales: Mapping[str, _StepScale] | None) -> None:
    """One timeline. Without scales its busy intervals are merged."""
    _decorate_panel(panel, timeline, span_s)
    for band in _bands(timeline):
        bars = _merged_bars(band, timeline.world_size, span_s) if scales is None else _lane_bars(band)
        gap_points = _gap_points(bars, timeline, span_s)
        collection = _rectangles(bars, edgecolors="white", linewidths=gap_points, antialiaseds=gap_points > 0)
        collection.set_rasterized(len(bars) > _MOST_VECTORS)
        if scales is None:
            collection.set_facecolor(_SHADES[band.kind].merged)
        elif band.events:
            steps, scale = [event.step for event in band.events], scales[band.kind]
            collection.set(cmap=scale.colors, norm=scale.norm, array=steps)
        panel.add_collection(collection, autolim=False)


def _decorate_panel(panel: Axes, timeline: Timeline, span_s: float) -> None:
    """Everything but the bars: an idle row per rank, the end and its time, and quiet axes."""
    ranks, end_s = timeline.world_size, float(timeline.time_s)
    idle = np.array([(rank - _ROW_SHARE / 2, _ROW_SHARE, 0.0, end_s) for rank in range(ranks)])
    panel.add_collection(_rectangles(idle, facecolors=_IDLE, linewidths=0), autolim=False)
    panel.set_xlim(0, span_s * 1.1 or 1.0)
    panel.set_ylim(ranks - 0.5, -0.5)
    panel.vlines(end_s, -0.5, ranks - 0.5, colors=_INK, linewidth=1)
    panel.annotate(
        format_time(end_s),
        (end_s, (ranks - 1) / 2),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        fontweight="bold",
        color=_INK,
    )
    panel.set_ylabel("rank", fontsize=9, color=_INK)
    if ranks <= 16:
        panel.yaxis.set_major_locator(FixedLocator(list(range(ranks))))
    else:
        panel.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 8, 10]))
    _quieten(panel)


def _lane_bars(band: _Band) -> FloatArray:
    """Rows (top, height, start_s, end_s), one per event: the first lane is the uppermost bar of its rank."""
    rows = np.array(
        [(event.rank, event.lane, float(event.start_s), float(event.end_s)) for event in band.events], dtype=np.float64
    ).reshape(-1, 4)
    slot = band.height / band.lanes
    rows[:, 0] += band.top + slot * (rows[:, 1] - band.first_lane)
    rows[:, 1] = slot
    return rows


def _merged_bars(band: _Band, ranks: int, span_s: float) -> FloatArray:
    """Rows (top, height, start_s, end_s): when any lane of a rank was busy, gaps too narrow to be seen closed."""
    intervals: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
    for event in band.events:
        intervals[event.rank].append((float(event.start_s), float(event.end_s)))
    bars = [
        (rank + band.top, band.height, start_s, end_s)
        for rank, busy in enumerate(intervals)
        for start_s, end_s in _union(np.array(busy, dtype=np.float64).reshape(-1, 2), span_s / 1000)
    ]
    return np.array(bars, dtype=np.float64).reshape(-1, 4)


def _union(intervals: FloatArray, closed_gap: float) -> FloatArray:
    """The union of (start, end) rows, where gaps up to `closed_gap` count as covered.

    >>> _union(np.array([[5.0, 6.0], [0.0, 2.0], [1.0, 3.0], [3.1, 4.0]]), 0.2).tolist()
    [[0.0, 4.0], [5.0, 6.0]]
    """
    if not len(intervals):
        return intervals
    starts, ends = intervals[np.argsort(intervals[:, 0], kind="stable")].T
    reached = np.maximum.accumulate(ends)
    opens = np.flatnonzero(np.append(True, starts[1:] > reached[:-1] + closed_gap))
    closes = np.append(opens[1:], len(starts)) - 1
    return np.column_stack([starts[opens], reached[closes]])


def _rectangles(bars: FloatArray, **style: Any) -> PolyCollection:
    """Rows (top, height, start_s, end_s) as rectangles that are drawn all at once."""
    top, height, start, end = bars.reshape(-1, 4).T
    corners = [(start, top), (end, top), (end, top + height), (start, top + height)]
    return PolyCollection(list(np.stack([np.column_stack(corner) for corner in corners], axis=1)), **style)


def _gap_points(bars: FloatArray, timeline: Timeline, span_s: float) -> float:
    """The width of the white line between bars: thinner, or none, where it would hide the bars themselves.

    Without it, bars are also drawn without antialiasing, which would let many narrow bars look half idle.
    """
    if not len(bars) or not span_s:
        return 0.0
    width_inches = np.median(bars[:, 3] - bars[:, 2]) / span_s * 0.8 * _WIDTH_INCHES
    height_inches = bars[0, 1] / timeline.world_size * _rows_height_inches(timeline)
    gap_points = 72 * float(min(width_inches, height_inches)) / 6
    return min(gap_points, 0.8) if gap_points > 0.1 else 0.0


def _label_time_axis(panel: Axes, span_s: float) -> None:
    """Ticks as plain numbers, and the unit that fits the longest time in the axis' name."""
    unit, factor = _time_unit(span_s)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: f"{time_s / factor:.6g}"))
    panel.set_xlabel(f"time ({unit})", fontsize=9, color=_INK)


def _time_unit(span_s: float) -> tuple[str, float]:
    """
    >>> _time_unit(0.25), _time_unit(0)
    (('ms', 0.001), ('s', 1.0))
    """
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    return next((unit for unit in units if span_s >= unit[1]), units[-1]) if span_s else units[0]


def _draw_step_scale(figure: Figure, axes: list[Axes], scale: _StepScale, label: str) -> None:
    mappable = ScalarMappable(norm=scale.norm, cmap=scale.colors)
    every = -(-len(scale.steps) // 8)
    drawn = figure.colorbar(mappable, ax=axes, ticks=list(scale.steps[::every]), fraction=0.015, pad=0.01)
    drawn.set_label(label, fontsize=9, color=_INK)
    drawn.ax.tick_params(length=0, labelsize=8, colors=_QUIET)
    drawn.ax.minorticks_off()
    drawn.ax.invert_yaxis()
    drawn.outline.set_visible(False)


# --------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class ComparisonBar:
    """One row of a comparison, times in seconds. What is not known is None.

    `measured_s` is drawn with whiskers that reach `spread_s` to either side; `bound_s` is what no schedule can beat.
    """

    label: str
    predicted_s: Number | None
    measured_s: Number | None = None
    spread_s: Number | None = None
    bound_s: Number | None = None


def draw_comparison(rows: Sequence[ComparisonBar], title: str) -> Figure:
    """Draw predicted and measured times as bars, a pair per row, from top to bottom, and each bound as a line.

    The time axis is logarithmic if the longest time is more than 20 times the shortest.
    """
    labels = [_wrapped(row.label, 40) for row in rows]
    row_inches = max([0.55, *(_lines_height_inches(label) for label in labels)])
    figure = _new_figure(title, 1.3 + row_inches * len(rows))
    if not rows:
        return figure
    axes = figure.subplots()
    place = np.arange(len(rows), dtype=np.float64)
    _scale_comparison(axes, rows)
    _draw_bars(axes, place - 0.19, [row.predicted_s for row in rows], [None] * len(rows), _PREDICTED, "predicted")
    _draw_bars(
        axes, place + 0.19, [row.measured_s for row in rows], [row.spread_s for row in rows], _MEASURED, "measured"
    )
    _draw_bounds(axes, [row.bound_s for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(place, labels, fontsize=9, color=_INK, parse_math=False)
    _quieten(axes)
    axes.tick_params(axis="y", labelsize=9, labelcolor=_INK)
    axes.grid(axis="x", color=_IDLE)
    axes.set_axisbelow(True)
    _draw_legend(figure, axes)
    return figure


def _draw_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    order = [label for label in ("predicted", "measured", "bound") if label in shown]
    handles = [shown[label] for label in order]
    figure.legend(handles, order, loc="outside lower right", ncols=3, frameon=False, fontsize=9)


def _scale_comparison(axes: Axes, rows: Sequence[ComparisonBar]) -> None:
    """The time axis, with room for the number behind the longest bar."""
    times = [time for row in rows for time in (row.predicted_s, row.measured_s, row.bound_s)]
    known_s = [float(time) for time in times if time]
    reach_s = [*known_s, *(float(row.measured_s or 0) + float(row.spread_s or 0) for row in rows)]
    shortest_s, longest_s = min(known_s, default=1.0), max(reach_s, default=1.0)
    if max(known_s, default=1.0) > 20 * shortest_s:
        first_s = 10.0 ** np.floor(np.log10(shortest_s / 1.5))
        axes.set_xscale("log")
        axes.set_xlim(first_s, longest_s * (longest_s / first_s) ** 0.12)
        axes.xaxis.set_major_locator(LogLocator(numticks=9))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))
        axes.set_xlabel("time (logarithmic)", fontsize=9, color=_INK)
    else:
        axes.set_xlim(0, longest_s * 1.12 or 1.0)
        _label_time_axis(axes, longest_s)


def _draw_bars(
    axes: Axes,
    place: FloatArray,
    times: Sequence[Number | None],
    spreads: Sequence[Number | None],
    color: str,
    label: str,
) -> None:
    """The known times as bars, each with its whiskers, if it has any, and its number."""
    known = [index for index, time in enumerate(times) if time is not None]
    if not known:
        return
    widths = [float(times[index] or 0) for index in known]
    axes.barh(place[known], widths, height=0.36, color=color, label=label)
    for index, time_s in zip(known, widths, strict=True):
        spread_s = float(spreads[index] or 0)
        if spread_s:
            shorter_s = min(spread_s, time_s - axes.get_xlim()[0])
            whisker = [[max(shorter_s, 0.0)], [spread_s]]
            axes.errorbar([time_s], [place[index]], xerr=whisker, color=_INK, linewidth=1, capsize=3)
        end_s = max(time_s + spread_s, axes.get_xlim()[0])
        axes.annotate(
            format_time(time_s),
            (end_s, float(place[index])),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_INK,
        )


def _draw_bounds(axes: Axes, bounds: Sequence[Number | None]) -> None:
    known = [(index, float(bound)) for index, bound in enumerate(bounds) if bound is not None]
    if not known:
        return
    place = np.array([index for index, _ in known])
    times_s = [bound_s for _, bound_s in known]
    axes.vlines(times_s, place - 0.43, place + 0.43, colors=_INK, linewidth=1.6, label="bound")


# ------------------------------------------------------------------------------------------------------- shared


def _new_figure(title: str, height_inches: float) -> Figure:
    """An empty figure with room for its title and so many inches below it."""
    text = _wrapped(title, 90)
    size = (_WIDTH_INCHES, height_inches + _lines_height_inches(text))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=_INK, parse_math=False)
    return figure


def _wrapped(text: str, width: int) -> str:
    """The lines of `text`, those longer than `width` characters broken."""
    return "\n".join(textwrap.fill(line, width) for line in text.splitlines())


def _lines_height_inches(text: str) -> float:
    return 0.2 * (text.count("\n") + 1)


def _quieten(axes: Axes) -> None:
    """Take away what is no data: box and tick marks."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, colors=_QUIET)
