"""Charts of a study show its rows: points, intervals, bounds, and which schedule wins where."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.plots.timelines import render
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.study.chart import chart
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.table import table
from tests.support.study_folders import SCHEDULES, SEQUENCES, row, study_rows, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return StudyFolder(write_study(tmp_path_factory.mktemp("studies") / "longctx"))


def test_every_row_is_a_point_with_its_interval_and_bound(study: StudyFolder) -> None:
    drawn = chart(study, "seq", "time_s", panels=["machine", "model"]).records()
    points = {(point["panel"], point["line"], point["x"]): point for point in drawn}
    rows = [each for each in study_rows() if each["status"] != "does not apply"]
    for each in rows:
        point = points.pop((f"{each['machine']}, {each['model']}", each["schedule"], each["seq"]))
        limit = each["bound_s"] if each["status"] == "settled" else None
        assert [point[name] for name in ("y", "low", "high", "bound", "limit")] == [
            each["time_s"], each["time_low_s"], each["time_high_s"], each["bound_s"], limit
        ]  # fmt: skip
    assert points == {}


def test_panels_are_what_else_varies(study: StudyFolder) -> None:
    assert chart(study).to_dict()["panels"] == ["machine", "model"]
    assert chart(study, where="model == 'llama-3-8b'").to_dict()["panels"] == ["machine"]
    assert chart(study, y="machine").to_dict()["panels"] == ["model"]


def test_a_map_has_the_winner_of_each_cell(study: StudyFolder) -> None:
    names = {seq: f"{seq // 1024}Ki" if seq < 2**20 else "1Mi" for seq in SEQUENCES}
    winners = {(w["model"], w["machine"], names[w["seq"]]): w for w in table(study).records()}
    for cell in chart(study, "seq", "machine").records():
        winner = winners.pop((cell["panel"], cell["row"], cell["column"]))
        assert (cell["value"], cell["open"]) == (winner["winner"], winner["expected_regret"] > DECIDED)
    assert winners == {}


def test_where_a_schedule_does_not_apply_its_line_has_a_gap(tmp_path: Path) -> None:
    rows = [row("h100-8", "llama-3-8b", seq, name) for seq in (8192, 16384, 32768) for name in SCHEDULES]
    rows = [each for each in rows if (each["seq"], each["schedule"]) != (16384, "tasp")]
    drawn = chart(StudyFolder(write_study(tmp_path, rows))).records()
    assert [point["y"] is None for point in drawn if point["line"] == "tasp"] == [False, True, False]


def test_a_caption_names_all_that_is_held_constant(study: StudyFolder) -> None:
    words = chart(study, "seq", "speedup", where="machine == 'h100-8'").words
    assert words.title == "long-context-training: speed-up over zigzag-ring-attention by length"
    for fact in ("machine h100-8", "KV heads 8", "mask causal", "pass both", "where machine == 'h100-8'", "72 rows"):
        assert fact in words.caption


@pytest.mark.parametrize("asked", [{}, {"y": "machine"}, {"x": "machine", "y": "exposed_share"}, {"y": "speedup"}])
def test_every_picture_can_be_written(study: StudyFolder, asked: dict[str, Any]) -> None:
    drawn = chart(study, **asked, where="model == 'llama-3-8b' and seq >= 512Ki")
    assert render(drawn.figure(), "svg").startswith(b"<?xml")
    if not asked:  # as a notebook shows it
        assert base64.b64decode(re.findall(r"base64,([^\"]+)", drawn._repr_html_())[0]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"y": "tim_s"}, "unknown column 'tim_s', did you mean 'time_s'?"),
        ({"x": "sequ"}, "unknown column 'sequ', did you mean 'seq'?"),
        ({"lines": "schedul"}, "unknown column 'schedul', did you mean 'schedule'?"),
        ({"x": "time_s", "y": "bound_s"}, "x: 'time_s' is a result, expected an axis"),
        ({"y": "status"}, "y: 'status' has no numbers"),
        ({"x": "seq", "lines": "seq"}, "expected different columns"),
        ({"panels": ["machine"]}, "'model' has 3 values there"),
        ({"where": "seq > 1Mi"}, "none of 208 rows is left"),
    ],
)
def test_what_cannot_be_drawn_is_refused(study: StudyFolder, asked: dict[str, Any], error: str) -> None:
    with pytest.raises(StudyError) as refused:
        chart(study, **asked)
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)


def test_more_panels_or_lines_than_fit_are_refused(tmp_path: Path) -> None:
    rows = [row("h100-8", "llama-3-8b", 8192, f"s-{number}", buffers=number) for number in range(60)]
    study = StudyFolder(write_study(tmp_path, rows, asked={}))
    with pytest.raises(StudyError, match="60 panels, expected at most 24: --where leaves fewer rows"):
        chart(study, "seq", panels=["buffers"])
    few = chart(study, "seq", panels=["buffers"], where="buffers < 24").records()
    assert len({point["panel"] for point in few}) == 24
    with pytest.raises(StudyError, match="60 lines, expected at most 56"):
        chart(study, "buffers", panels=[])
