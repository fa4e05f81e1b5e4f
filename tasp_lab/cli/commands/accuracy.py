"""``tasp-lab accuracy``: measured tables beside their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import Progress, print_json, print_parts
from tasp_lab.cli.options import DEFAULT_SAMPLES, MACHINE, WORK, Json, SamplingChoice, plot
from tasp_lab.cli.outputs import check_outputs, write_picture


def accuracy(
    *paths: Annotated[Path, Parameter(group=WORK, help="Files and folders. Default: the tables of tasp-lab.")],
    profile: Annotated[
        str | None,
        Parameter(
            group=MACHINE,
            help="The machine of tables and logs that do not name one: h100-8, h100 or my.toml:2x8.",
        ),
    ] = None,
    plot: Annotated[Path | None, plot("measured and predicted times")] = None,
    sampling: SamplingChoice = DEFAULT_SAMPLES,
    json: Json = False,
) -> None:
    """Compare measured tables with their predictions.

    A table of a collective is a log of nccl-tests, or a CSV with the columns size_B and time_us under header lines: #
    profile: h100-2x8, # collective: all_gather, # ranks: 16, # source: ... Tables of attention layers and of kernels
    are recognised by their columns. Tables that cannot be compared are listed with the reason.

    Example: tasp-lab accuracy my-cluster/

    Example: tasp-lab accuracy all_gather.log --profile h100-8
    """
    from tasp_lab.machines.sampling import FEW_SAMPLES, Sampling
    from tasp_lab.measure import accuracy as report

    check_outputs(plot=plot)
    chosen = Sampling(FEW_SAMPLES.samples if sampling.samples is None else sampling.samples, sampling.seed)
    with Progress(lines_only=json) as shown:
        found = report.accuracy(*paths, profile=profile, sampling=chosen, count=shown.count)
    if plot is not None:
        from tasp_lab.plots.accuracy import draw_rows, draw_tables

        collectives = [table for table in found if table.rows and isinstance(table, report.CollectiveAccuracy)]
        only = len(collectives) == sum(bool(table.rows) for table in found)
        write_picture(draw_tables(collectives) if only else draw_rows(found), plot)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
