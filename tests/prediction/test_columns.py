"""A column is one entry of `tasp_lab.prediction.columns.COLUMNS`: everything that is reported follows from it."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import get_args

import pytest

import tasp_lab
from docs.generate import VIEWS, fields_table, step_fields_table
from tasp_lab.cli.process import main
from tasp_lab.prediction import columns as module
from tasp_lab.prediction import step_results
from tasp_lab.prediction.columns import ALL, COLUMNS, STUDY, Column, View, columns, names
from tasp_lab.prediction.step_results import StepPrediction
from tasp_lab.study.evaluate import evaluate
from tasp_lab.study.point import COLUMNS as ROW_COLUMNS
from tasp_lab.study.point import Point

LAYER = tasp_lab.Workload(1024, heads=4, mask="causal")
TOY: Column[tasp_lab.Answer] = Column(
    "slack_s", "twice the time", lambda answer: 2 * float(answer.time_s), ALL + STUDY, "slack", ALL
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLUMNS", (*COLUMNS, TOY))


@pytest.mark.usefixtures("toy")
def test_a_new_column_of_predictions_is_one_entry(capsys: pytest.CaptureFixture[str]) -> None:
    for work, arguments in (
        (64, ["--shard-bytes", "64"]),
        (LAYER, ["--seq", "1024", "--heads", "4", "--mask", "causal"]),
    ):
        found = tasp_lab.predict("full-mesh:4", "multi-ring" if work == 64 else "tasp", work)
        slack_s = 2 * float(found[0].time_s)
        assert found.to_dict()["predictions"][0]["slack_s"] == slack_s  # type: ignore[index]
        assert found.to_pandas()["slack_s"].tolist() == [slack_s]
        assert "slack" in str(found)
        main(["predict", "full-mesh:4", "--schedule", found[0].schedule, *arguments, "--json"])
        assert json.loads(capsys.readouterr().out)["predictions"][0]["slack_s"] == slack_s


@pytest.mark.usefixtures("toy")
def test_a_new_column_of_rankings_is_one_entry() -> None:
    found = tasp_lab.compare("full-mesh:4", LAYER, ["tasp", "ulysses"], samples=0)
    times = [float(answer.time_s) for answer in found.candidates]
    assert found.to_pandas()["slack_s"].tolist() == [2 * time_s for time_s in times]
    assert "slack" in str(found)


@pytest.mark.usefixtures("toy")
def test_a_new_column_of_studies_is_one_entry() -> None:
    row = evaluate(Point("full-mesh:4", "tasp", LAYER))
    assert row["slack_s"] == 2 * float(row["time_s"] or 0)


@pytest.mark.usefixtures("toy")
def test_a_new_column_is_in_the_documents() -> None:
    assert "| `slack_s` | CLRS | twice the time |" in fields_table()


def test_each_view_has_its_columns_in_the_documents() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([A-Z]+) \|", fields_table(), re.MULTILINE)
    listed = {view: {name for name, letters in rows if VIEWS[view] in letters} for view in get_args(View)}
    assert listed == {view: {column.name for column in columns(view)} for view in get_args(View)}


@pytest.mark.parametrize("view", get_args(View))
def test_a_view_has_no_column_twice(view: View) -> None:
    assert max(Counter(column.name for column in columns(view)).values()) == 1


def test_a_row_has_the_columns_of_studies_in_their_order() -> None:
    for schedule in ("tasp", "ulysses", "no-such-schedule"):
        assert tuple(evaluate(Point("full-mesh:8", schedule, LAYER))) == names("study") == ROW_COLUMNS


def test_a_new_column_of_steps_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    toy: Column[StepPrediction] = Column("slack_s", "twice the time", lambda step: 2 * step.time_s)
    monkeypatch.setattr(step_results, "STEP_COLUMNS", (*step_results.STEP_COLUMNS, toy))
    found = tasp_lab.predict_step("h100-8", "llama-3-8b", 8192, "ulysses")
    assert found.to_dict()["slack_s"] == 2 * found.time_s
    assert found.to_pandas()["slack_s"].tolist() == [2 * found.time_s]
    assert step_fields_table().endswith("| twice the time |")
