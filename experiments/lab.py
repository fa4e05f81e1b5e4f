"""The main comparison: predicted and measured times of ring and multi-ring AllGather on a mesh and on a switch.

``make lab`` runs it. It takes about two minutes, prints tables, and writes pictures into the folder ``lab``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tasp_lab import validate
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import TaspLabError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.core.units import Number, format_size, format_time
from tasp_lab.plots.timelines import (
    IDLE,
    INK,
    MEASURED,
    PREDICTED,
    draw_timelines,
    hide_frame,
    label_time_axis,
    lines_inches,
    new_figure,
    render,
    wrapped,
)
from tasp_lab.timeline.chrome_trace import chrome_trace
from tasp_lab.validation.validate import Comparison

TOPOLOGIES = ("full-mesh:8", "switch:8")
SCHEDULES = ("ring", "multi-ring")
SHARD_BYTES = 2 * 2**20
FOLDER = Path("lab")


def main() -> None:
    """Run the comparison and write the results; exits with 2 and one line on an error."""
    try:
        FOLDER.mkdir(exist_ok=True)
        comparisons = [validate(text, SCHEDULES, SHARD_BYTES, progress=progress) for text in TOPOLOGIES]
        files = [file for comparison in comparisons for file in _write(comparison)] + [_write_overview(comparisons)]
    except TaspLabError as error:
        print(f"tasp-lab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tasp-lab: interrupted", file=sys.stderr)
        sys.exit(130)
    for comparison in comparisons:
        print(comparison)
    print("Pictures, traces (open them at ui.perfetto.dev) and numbers:")
    for file in files:
        print(f"  {file}")


def _write(comparison: Comparison) -> list[Path]:
    """Write the timelines of one fabric as picture and trace, and its numbers."""
    topology = comparison.runs[0].prediction.topology
    stem = topology.replace(":", "-")
    timelines = [line for run in comparison.runs for line in (run.prediction.timeline, run.measured_timeline)]
    title = f"AllGather of {format_size(SHARD_BYTES)} per rank on {topology}, library: gloo; predicted and measured"
    contents = {
        f"{stem}.png": render(draw_timelines(timelines, title), "png"),
        f"{stem}-trace.json": chrome_trace(timelines),
        f"{stem}.json": json.dumps(comparison.to_dict(), indent=1).encode(),
    }
    for name, content in contents.items():
        write_whole(FOLDER / name, content)
    return [FOLDER / name for name in contents]


def _write_overview(comparisons: list[Comparison]) -> Path:
    """Write one picture of all times."""
    path = FOLDER / "overview.png"
    bars = [
        ComparisonBar(
            label=f"{run.prediction.topology} {run.prediction.schedule}",
            predicted_s=run.prediction.time_s,
            measured_s=run.measured_s,
            spread_s=run.measured_spread_s / 2,
            bound_s=run.prediction.bound_s,
        )
        for comparison in comparisons
        for run in comparison.runs
    ]
    title = f"AllGather of {format_size(SHARD_BYTES)} per rank on the emulated fabric"
    write_whole(path, render(draw_comparison(bars, title), "png"))
    return path


@dataclass(frozen=True)
class ComparisonBar:
    """One row of a comparison, times in seconds; unknown times are None.

    `measured_s` is drawn with whiskers of length `spread_s` to either side; `bound_s` is the lower bound.
    """

    label: str
    predicted_s: Number | None
    measured_s: Number | None = None
    spread_s: Number | None = None
    bound_s: Number | None = None


def draw_comparison(rows: Sequence[ComparisonBar], title: str) -> Figure:
    """Draw predicted and measured times as a pair of bars per row, from top to bottom, and each bound as a line.

    The time axis is logarithmic if the longest time is more than 20 times the shortest.
    """
    labels = [wrapped(row.label, 40) for row in rows]
    row_inches = max([0.55, *(lines_inches(label) for label in labels)])
    figure = new_figure(title, 1.3 + row_inches * len(rows))
    if not rows:
        return figure
    axes = figure.subplots()
    place = np.arange(len(rows), dtype=np.float64)
    _scale_comparison(axes, rows)
    _draw_bars(axes, place - 0.19, [row.predicted_s for row in rows], [None] * len(rows), PREDICTED, "predicted")
    _draw_bars(
        axes, place + 0.19, [row.measured_s for row in rows], [row.spread_s for row in rows], MEASURED, "measured"
    )
    _draw_bounds(axes, [row.bound_s for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(place, labels, fontsize=9, color=INK, parse_math=False)
    hide_frame(axes)
    axes.tick_params(axis="y", labelsize=9, labelcolor=INK)
    axes.grid(axis="x", color=IDLE)
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
    """Set the time axis, with space for the label of the longest bar."""
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
        axes.set_xlabel("time (logarithmic)", fontsize=9, color=INK)
    else:
        axes.set_xlim(0, longest_s * 1.12 or 1.0)
        label_time_axis(axes, longest_s)


def _draw_bars(
    axes: Axes,
    place: FloatArray,
    times: Sequence[Number | None],
    spreads: Sequence[Number | None],
    color: str,
    label: str,
) -> None:
    """Draw the known times as labelled bars, with whiskers for their spread."""
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
            axes.errorbar([time_s], [place[index]], xerr=whisker, color=INK, linewidth=1, capsize=3)
        end_s = max(time_s + spread_s, axes.get_xlim()[0])
        axes.annotate(
            format_time(time_s),
            (end_s, float(place[index])),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )


def _draw_bounds(axes: Axes, bounds: Sequence[Number | None]) -> None:
    known = [(index, float(bound)) for index, bound in enumerate(bounds) if bound is not None]
    if not known:
        return
    place = np.array([index for index, _ in known])
    times_s = [bound_s for _, bound_s in known]
    axes.vlines(times_s, place - 0.43, place + 0.43, colors=INK, linewidth=1.6, label="bound")


if __name__ == "__main__":
    main()
