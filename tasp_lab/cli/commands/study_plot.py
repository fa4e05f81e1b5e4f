"""``tasp-lab study plot``: pictures of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import print_json
from tasp_lab.cli.options import OUTPUT, Json
from tasp_lab.cli.options_study import SHOWN, Baseline, Folder, Where, names, split


def plot(
    folder: Folder,
    /,
    *,
    x: Annotated[
        str | None, Parameter(group=SHOWN, help="The axis to the right; the first with numbers if not given.")
    ] = None,
    y: Annotated[
        str,
        Parameter(
            group=SHOWN,
            help="A quantity, such as time_s, speedup or exposed_share; or another axis, such as machine, for a map of "
            "the fastest schedules.",
        ),
    ] = "time_s",
    lines: Annotated[str, Parameter(group=SHOWN, help="The column whose values are lines.")] = "schedule",
    panels: Annotated[
        list[str] | None, names("Columns whose values have a panel each; all others that vary if not given.")
    ] = None,
    where: Where = None,
    baseline: Baseline = None,
    output: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            help="The file (.png, .svg or .pdf). If not given, an SVG in the folder plots of the study.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Draw times over lengths, with intervals and bounds, or a map of the fastest schedules over two axes.

    Example: tasp-lab study plot longctx --x seq --y time_s --panels machine,model --output times.svg

    Example: tasp-lab study plot longctx --x seq --y machine --output winners.png
    """
    from tasp_lab.cli.outputs import check_outputs, write_picture
    from tasp_lab.study.folder import StudyFolder

    if output is not None:
        check_outputs(plot=output)
    found = StudyFolder(folder).plot(
        x, y, lines, None if panels is None else split(panels), where=where, baseline=baseline
    )
    path = found.default_path() if output is None else output
    write_picture(found.figure(), path)
    if json:
        print_json(found.to_dict() | {"output": str(path)})
