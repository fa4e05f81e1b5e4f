"""Files that commands write: traces and pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasp_lab.core.errors import OutputError
from tasp_lab.core.files import check_picture_name, check_writable, write_whole
from tasp_lab.core.progress import on_one_line
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.core.tables import csv_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tasp_lab.timeline.events import Timeline


def check_outputs(*, trace: Path | None = None, plot: Path | None = None, topology: str = "") -> None:
    """Raise `OutputError` for files that cannot be written, before any long work."""
    if plot is not None:
        check_picture_name(plot)
    outputs = {option: path for option, path in (("--trace", trace), ("--plot", plot)) if path is not None}
    targets = {option: os.path.realpath(path) for option, path in outputs.items()}
    if len(set(targets.values())) < len(targets):
        raise OutputError(f"cannot write {plot}: --trace and --plot name the same file")
    for option, path in outputs.items():
        if os.path.isfile(topology) and targets[option] == os.path.realpath(topology):
            raise OutputError(f"cannot write {path}: {option} would replace the topology")
        check_writable(path)


def check_schedule_file(option: str, path: Path) -> None:
    """Raise `OutputError` for a file that a found schedule cannot be written to, or not be read from as one."""
    if path.suffix != ".json":
        raise OutputError(f"{option}: {str(path)!r}, expected a name that ends in .json")
    check_writable(path)


def write_timelines(
    timelines: Sequence[Timeline], trace: Path | None, plot: Path | None, title: str, intervals: Sequence[str] = ()
) -> None:
    """Write the requested files of these timelines; `intervals` are those of their times in words."""
    if trace is not None:
        from tasp_lab.timeline.chrome_trace import chrome_trace

        write_whole(trace, chrome_trace(timelines))
        progress(f"trace: {trace}")
    if plot is not None:
        from tasp_lab.plots.timelines import draw_timelines

        write_picture(draw_timelines(timelines, on_one_line(title), intervals), plot)


def write_rows(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows as CSV, with a column for each field that one of them has."""
    write_whole(path, csv_text(rows).encode())
    progress(f"rows: {path}")


def write_picture(figure: Figure, path: Path) -> None:
    """Write a picture in the format of the file name."""
    from tasp_lab.plots.timelines import render

    write_whole(path, render(figure, path.suffix.lower().removeprefix(".")))
    progress(f"picture: {path}")
