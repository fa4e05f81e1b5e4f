"""Write the tables of `docs/json.md` that follow from the columns of answers.

    python docs/generate_json.py

A table stands between ``<!-- columns: VIEW -->`` and ``<!-- end -->``; the text around it is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from tasp_lab.prediction.columns import View, columns

PAGE = Path(__file__).with_name("json.md")

_BLOCK = re.compile(r"<!-- columns: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def table(view: View) -> str:
    """The fields of the objects of a view, one line each."""
    lines = ["| field | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{column.name}` | {column.meaning} |" for column in columns(view))])


def generated(page: str) -> str:
    """The page with its tables made anew. Raises `ValueError` unless there is one of each view."""
    views = _BLOCK.findall(page)
    if sorted(views) != sorted(get_args(View)):
        raise ValueError(f"tables of {', '.join(views)}, expected one of each of {', '.join(get_args(View))}")
    return _BLOCK.sub(lambda found: f"<!-- columns: {found[1]} -->\n{table(found[1])}\n<!-- end -->", page)  # type: ignore[arg-type]


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))
