"""``tasp-lab study report``: a study as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import print_json
from tasp_lab.cli.options import OUTPUT, Json
from tasp_lab.cli.options_study import Baseline, Folder, Where


def report(
    folder: Folder,
    /,
    *,
    where: Where = None,
    baseline: Baseline = None,
    output: Annotated[
        Path | None, Parameter(group=OUTPUT, help="The file; report.html in the folder of the study if not given.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a study as one page of HTML that opens without a network: tables that sort and filter, pictures, sources.

    Example: tasp-lab study report longctx --output longctx.html
    """
    from tasp_lab.core.errors import OutputError
    from tasp_lab.core.files import check_writable
    from tasp_lab.core.progress import print_progress
    from tasp_lab.study.folder import REPORT, StudyFolder

    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"cannot write {output}: expected a name that ends in .html")
    study = StudyFolder(folder)
    check_writable(study.path / REPORT if output is None else output)
    found = study.report(where=where, baseline=baseline)
    path = found.write(output)
    print_progress(f"report: {path}")
    if json:
        print_json(found.to_dict() | {"output": str(path)})
