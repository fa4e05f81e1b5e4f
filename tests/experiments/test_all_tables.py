"""One command makes the committed tables anew and prints which figures moved."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from experiments.__main__ import TABLES, figures, main, report

PAGE = """\
Made by hand.

| schedule | time | error |
| :-- | --: | --: |
| ring | 1,234 ms | +2.0% |
| tasp | 100 ms | -1.0% |

| schedule | time |
| :-- | --: |
| ring | 5e-3 s, 7 s |
"""


def test_all_tables_are_modules() -> None:
    assert [name for name in TABLES if find_spec(f"experiments.{name}") is None] == []


def test_figures_are_numbers_by_row_and_column() -> None:
    assert figures(PAGE) == {
        ("ring", "time", 0): 1234, ("ring", "error", 0): 2, ("tasp", "time", 0): 100, ("tasp", "error", 0): -1,
        ("ring", "time", 1): 0.005, ("ring", "time", 2): 7,
    }  # fmt: skip


def test_figures_that_moved_are_named() -> None:
    changed = PAGE.replace("100 ms", "110 ms").replace("1,234", "1,235").replace("-1.0%", "+1.0%")
    assert list(report({"a.md": PAGE, "b.md": PAGE}, {"a.md": changed, "b.md": PAGE}, over=0.02)) == [
        "a.md: 2 of 6 figures moved by more than 2%, 0 are new",
        "  tasp | error: -1 -> 1",
        "  tasp | time: 100 -> 110",
    ]
    assert list(report({}, {"a.md": PAGE}, 0.02)) == ["a.md: 0 of 0 figures moved by more than 2%, 6 are new"]
    assert list(report({"a.md": PAGE}, {"a.md": PAGE}, 0.02)) == ["no page changed"]


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables.contentoin"]) == 2
    assert "unknown table 'tables.contentoin', did you mean 'tables.contention'?" in capsys.readouterr().err
