"""The table of inputs that were answered wrongly names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROWS = [line for line in (FOLDER / "cases.md").read_text().splitlines() if line.startswith("| ")][2:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:50])
def test_the_guard_of_a_case_exists(row: str) -> None:
    cells = re.split(r"(?<!\\)\|", row.strip("| "))
    assert len(cells) == 4
    path, _, name = cells[3].strip().partition("::")
    text = (FOLDER / path).read_text()
    assert not name or f"def {name}(" in text


def test_the_table_has_rows() -> None:
    assert len(ROWS) > 30
