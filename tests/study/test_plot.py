"""Pictures of a study show its rows: points, intervals, bounds, and who wins where."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.plots.timelines import render
from tasp_lab.study.folder import StudyFolder
from tests.support.study_folders import MACHINES, MODELS, SCHEDULES, SEQUENCES, row, study_rows, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return StudyFolder(write_study(tmp_path_factory.mktemp("studies") / "longctx"))


def test_every_row_is_a_point_with_its_interval_and_bound(study: StudyFolder) -> None:
    found = study.plot("seq", "time_s", panels=["machine", "model"])
    points = {(each["panel"], each["line"], each["x"]): each for each in found.records()}
    assert len(points) == sum(each["status"] != "does not apply" for each in study_rows())
    for each in study_rows():
        if each["status"] == "does not apply":
            continue
        point = points[f"{each['machine']}, {each['model']}", each["schedule"], each["seq"]]
        is_settled = each["status"] == "settled"
        expected = (None, None, None, each["bound_s"]) if is_settled else (
            each["time_s"], each["time_low_s"], each["time_high_s"], None
        )  # fmt: skip
        assert (point["y"], point["low"], point["high"], point["limit"]) == expected
        assert point["bound"] == each["bound_s"]


def test_panels_are_what_else_varies(study: StudyFolder) -> None:
    assert study.plot().panels == ("machine", "model")
    assert study.plot(where="model == 'llama-3-8b'").panels == ("machine",)
    assert study.plot(y="machine").panels == ("model",)


def test_a_map_has_the_winner_of_each_cell(study: StudyFolder) -> None:
    winners = {(each["model"], each["machine"], each["seq"]): each for each in study.show().records()}
    found = study.plot("seq", "machine")
    assert found.is_map
    assert len(found.records()) == len(winners) == len(MACHINES) * len(MODELS) * len(SEQUENCES)
    names = {f"{seq // 1024}Ki" if seq < 2**20 else "1Mi": seq for seq in SEQUENCES}
    for each in found.records():
        winner = winners[each["panel"], each["row"], names[each["column"]]]
        assert each["value"] == winner["winner"]
        assert each["too_close"] == bool(winner["too_close"])


def test_where_a_schedule_does_not_apply_its_line_has_a_gap(tmp_path: Path) -> None:
    rows = [row("h100-8", "llama-3-8b", seq, name) for seq in (8192, 16384, 32768) for name in SCHEDULES]
    rows = [each for each in rows if (each["seq"], each["schedule"]) != (16384, "tasp")]
    (panel,) = StudyFolder(write_study(tmp_path, rows)).plot().curves()
    (tasp,) = (curve for curve in panel.curves if curve.label == "tasp")
    assert [math.isnan(each) for each in tasp.y] == [False, True, False]


def test_a_caption_names_all_that_is_held_constant(study: StudyFolder) -> None:
    words = study.plot("seq", "speedup", where="machine == 'h100-8'").words()
    assert words.title == "long-context-training: speed-up over zigzag-ring-attention by length"
    for told in ("machine h100-8", "KV heads 8", "mask causal", "pass both", "where machine == 'h100-8'", "72 rows"):
        assert told in words.caption


def test_a_notebook_shows_the_picture(study: StudyFolder) -> None:
    found = study.plot(where="model == 'llama-3-8b' and seq >= 512Ki")
    assert base64.b64decode(re.findall(r"base64,([^\"]+)", found._repr_html_())[0]).startswith(b"\x89PNG")


@pytest.mark.parametrize("asked", [{}, {"y": "machine"}, {"x": "machine", "y": "exposed_share"}, {"y": "speedup"}])
def test_every_picture_can_be_written(study: StudyFolder, asked: dict[str, Any]) -> None:
    figure = study.plot(**asked, where="model == 'llama-3-8b' and seq >= 512Ki").figure()
    assert render(figure, "svg").startswith(b"<?xml")


@pytest.mark.parametrize(
    ("asked", "telling"),
    [
        ({"y": "tim_s"}, "unknown column 'tim_s', did you mean 'time_s'?"),
        ({"x": "sequ"}, "unknown column 'sequ', did you mean 'seq'?"),
        ({"lines": "schedul"}, "unknown column 'schedul', did you mean 'schedule'?"),
        ({"x": "time_s", "y": "bound_s"}, "x: 'time_s' is a result, expected an axis"),
        ({"y": "bottleneck"}, "y: 'bottleneck' has no numbers"),
        ({"x": "seq", "lines": "seq"}, "expected different columns"),
        ({"panels": ["machine"]}, "'model' has 3 values there"),
        ({"where": "seq > 1Mi"}, "none of 208 rows is left"),
        ({"x": "machine", "panels": ["seq", "model"], "where": "schedule == 'tasp' or schedule == 'ulysses'"}, None),
    ],
)
def test_what_cannot_be_drawn_is_refused(study: StudyFolder, asked: dict[str, Any], telling: str | None) -> None:
    if telling is None:
        assert len(study.plot(**asked).curves()) == len(SEQUENCES) * len(MODELS)
        return
    with pytest.raises(StudyError) as refused:
        study.plot(**asked)
    assert telling in str(refused.value)
    assert "\n" not in str(refused.value)


def test_more_panels_or_lines_than_fit_are_refused(tmp_path: Path) -> None:
    rows = [row("h100-8", "llama-3-8b", 8192, f"s-{number}", buffers=number) for number in range(60)]
    study = StudyFolder(write_study(tmp_path, rows, asked={}))
    with pytest.raises(StudyError, match="60 panels, expected at most 24: --where leaves fewer rows"):
        study.plot("seq", lines="schedule", panels=["buffers"])
    with pytest.raises(StudyError, match="60 lines, expected at most 56"):
        study.plot("buffers", panels=[])
