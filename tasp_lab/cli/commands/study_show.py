"""``tasp-lab study show``: winners and pivot tables of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import OUTPUT, Json, whole
from tasp_lab.cli.options_study import FILTER, SHOWN, Baseline, Folder, Where, names, split


def show(
    folder: Folder,
    /,
    *,
    rows: Annotated[list[str] | None, names("Columns whose values are the rows of a pivot table.")] = None,
    columns: Annotated[list[str] | None, names("Columns whose values are its columns.")] = None,
    value: Annotated[
        str | None,
        Parameter(
            group=SHOWN,
            help="What its cells are: a column such as time_s, speedup, exposed_share, bound_share or memory_bytes, or "
            "winner. If not given, time_s where schedules are among rows or columns, else winner.",
        ),
    ] = None,
    where: Where = None,
    baseline: Baseline = None,
    sort: Annotated[
        str | None,
        Parameter(group=FILTER, allow_leading_hyphen=True, help="Sort by this column; descending with - before it."),
    ] = None,
    limit: Annotated[int | None, whole("Maximum number of rows of the table.", FILTER)] = None,
    csv: Annotated[Path | None, Parameter(group=OUTPUT, help="Also write the table into this file, as CSV.")] = None,
    json: Json = False,
) -> None:
    """Show the fastest schedule for each question of a study, or a pivot table.

    Example: tasp-lab study show longctx

    Example: tasp-lab study show longctx --rows machine,model --columns seq --value winner --where "seq >= 64Ki"

    Example: tasp-lab study show longctx --rows schedule --columns seq --where "machine == 'h100-8'" --sort 64Ki
    """
    from tasp_lab.core.files import check_writable, write_whole
    from tasp_lab.study.folder import StudyFolder

    if csv is not None:
        check_writable(csv)
    found = StudyFolder(folder).show(
        split(rows), split(columns), value, where=where, baseline=baseline, sort=sort, limit=limit
    )
    if csv is not None:
        write_whole(csv, found.to_csv().encode())
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
