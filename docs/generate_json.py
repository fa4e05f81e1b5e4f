"""Write the tables of `docs/json.md` and `docs/studies.md` that follow from the columns of answers.

    python docs/generate_json.py

A table stands between ``<!-- columns: VIEW -->`` and ``<!-- end -->``; the text around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tasp_lab.prediction.columns import View, columns
from tasp_lab.prediction.step_results import STEP_COLUMNS

PAGES = {"json.md": ("collective", "layer", "ranking", "step"), "studies.md": ("study",)}
"""The tables of a page: columns of a view of answers, or those of whole steps."""

_BLOCK = re.compile(r"<!-- columns: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def table(view: View | Literal["step"]) -> str:
    """The columns of a view, one line each."""
    listed = STEP_COLUMNS if view == "step" else columns(view)
    lines = [f"| {'column' if view == 'study' else 'field'} | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{column.name}` | {column.meaning} |" for column in listed)])


def generated(page: str, expected: Sequence[str]) -> str:
    """The page with its tables made anew. Raises `ValueError` unless there is one of each view."""
    views = _BLOCK.findall(page)
    if sorted(views) != sorted(expected):
        raise ValueError(f"tables of {', '.join(views)}, expected one of each of {', '.join(expected)}")
    return _BLOCK.sub(lambda found: f"<!-- columns: {found[1]} -->\n{table(found[1])}\n<!-- end -->", page)  # type: ignore[arg-type]


if __name__ == "__main__":
    for name, expected in PAGES.items():
        path = Path(__file__).with_name(name)
        path.write_text(generated(path.read_text(), expected))
