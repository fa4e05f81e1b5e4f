"""Pages have the columns of answers, as `docs/generate_json.py` writes them."""

from __future__ import annotations

import runpy
from typing import get_args

import pytest

from tasp_lab.prediction.columns import View
from tests.conftest import ROOT

MODULE = runpy.run_path(str(ROOT / "docs" / "generate_json.py"))
PAGES = MODULE["PAGES"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_the_generated_one(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert MODULE["generated"](page, PAGES[name]) == page, "run python docs/generate_json.py"


def test_each_view_has_a_table() -> None:
    assert sorted(view for views in PAGES.values() for view in views) == sorted([*get_args(View), "step"])


def test_a_page_without_a_table_is_refused() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    with pytest.raises(ValueError, match="expected one of each of collective, layer, ranking, step"):
        MODULE["generated"](page.replace("columns: layer", "columns: ranking"), PAGES["json.md"])
