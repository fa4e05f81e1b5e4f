"""Options that commands on the folder of a study share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

SHOWN = Group("Shown", sort_key=1)
FILTER = Group("Rows", sort_key=2)

Folder = Annotated[Path, Parameter(help="The folder of a study that was run.")]
Where = Annotated[
    str | None,
    Parameter(
        group=FILTER,
        help="Only these rows, like 'seq >= 64Ki and machine == \"h100-8\"': columns, numbers, texts in quotes, "
        "comparisons, in, and, or, not, + - * /.",
    ),
]
Baseline = Annotated[
    str | None,
    Parameter(group=FILTER, help="The schedule that speed-ups are over; that of the study if not given."),
]


def names(help: str, name: str | None = None) -> Parameter:
    """Names of columns, separated by commas or repeated."""
    return Parameter(name=name, group=SHOWN, negative=(), show_default=False, help=f"{help} Several with commas.")


def split(given: Iterable[str] | None) -> list[str]:
    """Names with commas between them, one by one.

    >>> split(["machine,model", "seq"]), split(None)
    (['machine', 'model', 'seq'], [])
    """
    return [name.strip() for text in given or () for name in text.split(",") if name.strip()]
