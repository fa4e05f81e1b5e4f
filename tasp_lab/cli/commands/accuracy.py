"""``tasp-lab accuracy``: measured tables beside their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import WORK, Json, plot
from tasp_lab.cli.outputs import check_outputs, write_picture


def accuracy(
    *paths: Annotated[Path, Parameter(group=WORK, help="Files and folders; the tables of tasp-lab if none is given.")],
    plot: Annotated[Path | None, plot("measured and predicted times")] = None,
    json: Json = False,
) -> None:
    """Compare measured tables with their predictions.

    A table is a log of nccl-tests, or a CSV with the columns size_B and time_us under header lines: # profile:
    h100-2x8, # collective: all_gather, # ranks: 16, # source: ... A table without them is listed with the reason.

    Example: tasp-lab accuracy my-cluster/
    """
    from tasp_lab.analysis import accuracy as report

    check_outputs(plot=plot)
    found = report.accuracy(*paths)
    if plot is not None:
        from tasp_lab.plots.accuracy import draw_tables

        write_picture(draw_tables([table for table in found if table.rows]), plot)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
