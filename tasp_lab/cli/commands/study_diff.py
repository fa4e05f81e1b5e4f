"""``tasp-lab study diff``: two studies beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import Json
from tasp_lab.cli.options_study import Folder


def diff(
    a: Folder,
    b: Annotated[Path, Parameter(help="Another one.")],
    /,
    *,
    json: Json = False,
) -> None:
    """List what differs between two studies: points, inputs, constants, versions, times and winners.

    Example: tasp-lab study diff longctx longctx-with-my-nic
    """
    from tasp_lab.study.folder import StudyFolder

    found = StudyFolder(a).diff(StudyFolder(b))
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
