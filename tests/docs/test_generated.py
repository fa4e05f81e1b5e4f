"""The generated parts of the documents are those that `python -m docs.generate` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import DOCUMENTS, PARTS, generated, with_output
from tasp_lab.cli.process import main
from tasp_lab.schedules.registry import ATTENTION, LINEAR

MARKED = [document for document in DOCUMENTS if "<!-- generated: " in document.read_text()]


@pytest.mark.parametrize("document", MARKED, ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(document: Path) -> None:
    assert document.read_text() == generated(document.read_text())


def test_every_part_is_in_a_document() -> None:
    marks = r"<!-- generated: (.*) -->|\*Made with the site \(`make site`\): (.*)\.\*"
    names = [own or site for document in DOCUMENTS for own, site in re.findall(marks, document.read_text())]
    assert sorted(names) == sorted(PARTS)


def test_every_schedule_says_what_moves() -> None:
    assert all(spec.moves for spec in (*ATTENTION.values(), *LINEAR.values()))


def test_output_is_replaced_by_as_many_lines_as_were_shown(capsys: pytest.CaptureFixture[str]) -> None:
    command = "decompose ring:4"
    main(command.split())
    first, *others = capsys.readouterr().out.splitlines()
    assert others
    assert with_output(f"```console\n$ tasp-lab {command}\nold\n```\n") == (
        f"```console\n$ tasp-lab {command}\n{first.rstrip()}\n```\n"
    )
