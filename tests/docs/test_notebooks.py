"""The notebooks as a course: numbers, questions, and stored outputs of a run from the top."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 2**20
"""A notebook with its outputs is no larger, so that hosts of code show it."""


def test_the_course_has_thirteen_parts_and_an_index() -> None:
    index = (ROOT / "notebooks" / "README.md").read_text()
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, 14)]
    assert re.findall(r"\]\((\w+\.ipynb)\)", index) == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_its_question(path: Path) -> None:
    first = nbformat.read(path, 4).cells[0]
    title = first.source.splitlines()[0]
    assert first.cell_type == "markdown"
    assert title.startswith(f"# {path.stem[:2]} ")
    assert title.endswith("?")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_a_run_from_the_top(path: Path) -> None:
    """Every code cell was executed, in order and without error; no output names a folder of the machine it ran on."""
    assert path.stat().st_size < MAX_BYTES
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not re.search(r"(?<!\w)/(home|root|work|tmp|Users)/", "".join(str(output) for output in outputs))
