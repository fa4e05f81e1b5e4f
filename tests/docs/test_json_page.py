"""`docs/json.md` has the columns of answers, as `docs/generate_json.py` writes them."""

from __future__ import annotations

import runpy

import pytest

from tests.conftest import ROOT

MODULE = runpy.run_path(str(ROOT / "docs" / "generate_json.py"))
PAGE = (ROOT / "docs" / "json.md").read_text()


def test_the_page_is_the_generated_one() -> None:
    assert MODULE["generated"](PAGE) == PAGE, "run python docs/generate_json.py"


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of each of collective, layer, ranking"):
        MODULE["generated"](PAGE.replace("columns: layer", "columns: ranking"))
