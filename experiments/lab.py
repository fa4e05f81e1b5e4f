"""The main comparison: predicted and measured times of ring and multi-ring AllGather on a mesh and on a switch.

``make lab`` runs it. It takes about two minutes, prints tables, and writes pictures into the folder ``lab``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tasp_lab import validate
from tasp_lab.core.errors import TaspLabError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.core.units import format_size, format_time
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
from tasp_lab.validation.validate import Comparison, Run

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
    title = f"AllGather of {format_size(SHARD_BYTES)} per rank on the emulated fabric"
    bars = [Bar.of(run) for comparison in comparisons for run in comparison.runs]
    write_whole(path, render(draw_comparison(bars, title), "png"))
    return path


class Bar(NamedTuple):
    """A row of the picture, times in seconds; repeats lie within `spread_s` / 2 of the measured time or so."""

    label: str
    predicted_s: float
    measured_s: float
    spread_s: float
    bound_s: float

    @classmethod
    def of(cls, run: Run) -> Bar:
        """The row of a run."""
        found = run.prediction
        label = f"{found.topology} {found.schedule}"
        return cls(label, float(found.time_s), run.measured_s, run.measured_spread_s, float(found.bound_s))


def draw_comparison(rows: Sequence[Bar], title: str) -> Figure:
    """Draw predicted and measured times as a pair of bars per row, from top to bottom, and each bound as a line.

    The time axis is logarithmic if the longest time is more than 20 times the shortest.
    """
    labels = [wrapped(row.label, 40) for row in rows]
    row_inches = max(0.55, *(lines_inches(label) for label in labels))
    figure = new_figure(title, 1.3 + row_inches * len(rows))
    axes, place = figure.subplots(), np.arange(len(rows), dtype=np.float64)
    times_s = [time_s for row in rows for time_s in (row.predicted_s, row.measured_s, row.bound_s)]
    shortest_s, longest_s = min(times_s), max(*times_s, *(row.measured_s + row.spread_s / 2 for row in rows))
    first_s = 0.0
    if longest_s > 20 * shortest_s:
        first_s = 10.0 ** np.floor(np.log10(shortest_s / 1.5))
        axes.set(xscale="log", xlim=(first_s, longest_s * (longest_s / first_s) ** 0.12))
        axes.xaxis.set_major_locator(LogLocator(numticks=9))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_time(time_s)))
        axes.set_xlabel("time (logarithmic)", fontsize=9, color=INK)
    else:
        axes.set_xlim(0, longest_s * 1.12)
        label_time_axis(axes, longest_s)
    axes.barh(place - 0.19, [row.predicted_s for row in rows], 0.36, color=PREDICTED, label="predicted")
    axes.barh(place + 0.19, [row.measured_s for row in rows], 0.36, color=MEASURED, label="measured")
    for at, row in zip(place, rows, strict=True):
        half_s = row.spread_s / 2
        whiskers = [[min(half_s, row.measured_s - first_s)], [half_s]]
        axes.errorbar([row.measured_s], [at + 0.19], xerr=whiskers, color=INK, linewidth=1, capsize=3)
        ends = ((row.predicted_s, 0.0, at - 0.19), (row.measured_s, half_s, at + 0.19))
        for time_s, whisker_s, y in ends:
            axes.annotate(
                format_time(time_s), (time_s + whisker_s, y), (4, 0), textcoords="offset points", va="center",
                fontsize=8, color=INK,
            )  # fmt: skip
    bounds_s = [row.bound_s for row in rows]
    axes.vlines(bounds_s, place - 0.43, place + 0.43, colors=INK, linewidth=1.6, label="bound")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(place, labels, fontsize=9, color=INK, parse_math=False)
    hide_frame(axes)
    axes.tick_params(axis="y", labelsize=9, labelcolor=INK)
    axes.grid(axis="x", color=IDLE)
    axes.set_axisbelow(True)
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = ["predicted", "measured", "bound"]
    figure.legend([shown[each] for each in order], order, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
