"""``tasp-lab doctor``: what is installed, and what works on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasp_lab.cli.console import print_json
from tasp_lab.cli.options import Json

if TYPE_CHECKING:
    from tasp_lab.validation.doctor import Examination


def doctor(*, json: Json = False) -> None:
    """Report installed libraries and what this machine can run.

    It also prints the folders of the imported packages.

    Example: tasp-lab doctor
    """
    from tasp_lab.validation.doctor import examine

    examination = examine()
    if json:
        print_json(examination)
    else:
        print_examination(examination)


def print_examination(examination: Examination) -> None:
    """Print the examination as lines of name and finding."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for name, finding in examination.items():
        if isinstance(finding, dict):
            console.print(Text(name, style="bold"))
            for key, value in finding.items():
                console.print(Text(f"  {key}: {value if value is not None else 'not installed'}"))
        else:
            console.print(Text.assemble((name, "bold"), f": {finding}"))
