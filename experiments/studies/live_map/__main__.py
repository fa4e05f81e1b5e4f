"""Write the grid of the live map in the documents: ``python -m experiments.studies.live_map [FOLDER]``.

Runs both studies in the folder (by default live-map), 8 minutes of processor time if nothing is there yet, and writes
``grid.js`` here, which docs/live_map.md loads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tasp_lab.core.files import write_whole
from tasp_lab.core.version import MODEL_VERSION, VERSION
from tasp_lab.study.file import load_study
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.live_map import live_map, map_script
from tasp_lab.study.report import schedule_colors
from tasp_lab.study.run import run_study
from tasp_lab.study.table import selected, winners_of

HERE = Path(__file__).parent


def write_grid(folder: Path) -> None:
    """Run what is missing, and write ``grid.js``."""
    for name in ("study", "left_out"):
        run_study(load_study(HERE / f"{name}.toml"), folder / name, jobs=2)
    covered = selected(StudyFolder(folder / "study"))
    _, winners = winners_of(covered)
    colors = schedule_colors(winners, covered.rows)
    grid = live_map(covered.rows, colors, left_out=StudyFolder(folder / "left_out").rows())
    assert grid is not None, "the study has axes"
    written = f"// Written by python -m experiments.studies.live_map, tasp-lab {VERSION} with models {MODEL_VERSION}.\n"
    write_whole(HERE / "grid.js", (written + map_script(grid)).encode())


if __name__ == "__main__":
    write_grid(Path(sys.argv[1] if len(sys.argv) > 1 else "live-map"))
