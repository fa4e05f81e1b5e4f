"""The main job: on a mesh and on a switch, how long should ring and multi-ring take, and how long did they take?

``make lab`` runs it. It takes about two minutes and leaves tables on the screen and pictures in the folder ``lab``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tasp_lab.catalogue import load_machine
from tasp_lab.cli.comparison import Comparison, validate
from tasp_lab.cli.report import comparison_document, print_comparison, say
from tasp_lab.errors import TaspLabError
from tasp_lab.output import write_whole
from tasp_lab.pictures import ComparisonBar, draw_comparison, draw_timelines, render
from tasp_lab.quantities import format_size
from tasp_lab.trace import chrome_trace

TOPOLOGIES = ("full-mesh:8", "switch:8")
SCHEDULES = ("ring", "multi-ring")
SHARD_BYTES = 2 * 2**20
FOLDER = Path("lab")


def main() -> None:
    """Run the comparison and write what it found; exits with 2 and one line where it cannot run."""
    try:
        FOLDER.mkdir(exist_ok=True)
        comparisons = [validate(load_machine(text), SCHEDULES, SHARD_BYTES, say=say) for text in TOPOLOGIES]
        files = [file for comparison in comparisons for file in _write(comparison)] + [_write_overview(comparisons)]
    except TaspLabError as error:
        print(f"tasp-lab: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tasp-lab: interrupted", file=sys.stderr)
        sys.exit(130)
    for comparison in comparisons:
        print_comparison(comparison)
    print("Pictures, traces (open them at ui.perfetto.dev) and numbers:")
    for file in files:
        print(f"  {file}")


def _write(comparison: Comparison) -> list[Path]:
    """Timelines of one fabric as picture and trace, and its numbers."""
    topology = comparison.runs[0].prediction.topology
    stem = topology.replace(":", "-")
    timelines = [line for run in comparison.runs for line in (run.prediction.timeline, run.measured_timeline)]
    contents = {
        f"{stem}.png": render(draw_timelines(timelines, f"AllGather on {topology}: predicted and measured"), "png"),
        f"{stem}-trace.json": chrome_trace(timelines),
        f"{stem}.json": json.dumps(comparison_document(comparison), indent=1).encode(),
    }
    for name, content in contents.items():
        write_whole(FOLDER / name, content)
    return [FOLDER / name for name in contents]


def _write_overview(comparisons: list[Comparison]) -> Path:
    """All times in one picture."""
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


if __name__ == "__main__":
    main()
