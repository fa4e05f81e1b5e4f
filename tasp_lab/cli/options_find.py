"""Options of commands that search a study: what is asked in place of its ``[find]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from tasp_lab.cli.options import WORK, quantity

FIND = Group("Question", help="In place of what the study's [find] asks.", sort_key=2)

StudyPath = Annotated[Path, Parameter(group=WORK, help="The file of a study, or the folder that it was run in.")]
StudyFolderPath = Annotated[Path, Parameter(group=WORK, help="The folder that a study was run in.")]
Between = Annotated[
    list[str] | None,
    Parameter(
        name="--between",
        negative=(),
        group=FIND,
        help="One of the two schedules; give it twice. Braces as in the study.",
    ),
]
Along = Annotated[
    str | None,
    Parameter(
        group=FIND, help="A numeric axis: seq, batch, heads, kv_heads, head_dim, nodes, buffers, nic.bandwidth, ..."
    ),
]
At = Annotated[
    str | None,
    Parameter(
        group=FIND,
        help="Values of axes that choose points, like machine=h100-8,seq=128Ki; names may be left out.",
    ),
]
Margin = Annotated[str | None, quantity("Times that differ by less count as equal, like 5%; 0 if not given.", FIND)]
From = Annotated[
    str | None,
    Parameter(
        name="--from",
        allow_leading_hyphen=True,
        group=FIND,
        help="Lower end of the axis, like 8Ki, or x0.5 for an override.",
    ),
]
To = Annotated[str | None, quantity("Upper end of the axis.", FIND)]
