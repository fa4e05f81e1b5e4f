"""Tables of a study: every cell is that of its row, and what cannot be shown is refused in one line."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.show import PivotTable, WinnerTable
from tests.support.study_folders import BASELINE, MACHINES, MODELS, SCHEDULES, SEQUENCES, row, study_rows, write_study

DONE = {(r["machine"], r["model"], r["seq"], r["schedule"]): r for r in study_rows() if r["status"] == "ok"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return StudyFolder(write_study(tmp_path_factory.mktemp("studies") / "longctx"))


def times_of(machine: str, model: str, seq: int) -> dict[str, float]:
    """The times of all schedules that have one."""
    return {name: DONE[key]["time_s"] for name in SCHEDULES if (key := (machine, model, seq, name)) in DONE}


def test_each_question_has_a_row_with_its_fastest_schedule(study: StudyFolder) -> None:
    found = study.show()
    assert isinstance(found, WinnerTable)
    records = found.records()
    assert len(records) == len(MACHINES) * len(MODELS) * len(SEQUENCES)
    for each in records:
        times = times_of(each["machine"], each["model"], each["seq"])
        assert each["winner"] == min(times, key=times.__getitem__)
        assert each["time_s"] == min(times.values())
        assert each["speedup"] == pytest.approx(times[BASELINE] / each["time_s"])
        assert each["speedup_low"] <= each["speedup"] <= each["speedup_high"]


def test_a_pivot_table_has_the_cell_of_each_row(study: StudyFolder) -> None:
    where = "machine == 'h100-4x8' and model == 'llama-3-8b'"
    found = study.show(["schedule"], ["seq"], where=where)
    assert isinstance(found, PivotTable)
    cells = {(each["schedule"], each["seq"]): each["time_s"] for each in found.records()}
    assert cells == {(s, seq): DONE["h100-4x8", "llama-3-8b", seq, s]["time_s"] for s in SCHEDULES for seq in SEQUENCES}


def test_a_cell_that_a_bound_settled_is_at_least_that_bound(study: StudyFolder) -> None:
    where = "machine == 'mi300x-8' and model == 'llama-3-8b' and seq == 1Mi"
    (ulysses,) = (each for each in study.show(["schedule"], where=where).records() if each["schedule"] == "ulysses")
    assert ulysses["time_s"] is None
    assert ulysses["text"].startswith("> ")
    shown = str(study.show(["schedule"], value="speedup", where=where))
    assert "< 0.9" in shown
    assert "at most that, by a bound: not simulated" in shown


def test_what_is_too_close_to_call_is_marked(study: StudyFolder) -> None:
    found = study.show(["machine", "model"], ["seq"])
    assert isinstance(found, PivotTable)
    winners = {(e["machine"], e["model"], e["seq"]): e for e in study.show().records()}
    for each in found.records():
        winner = winners[each["machine"], each["model"], each["seq"]]
        assert each["winner"] == winner["winner"]
        assert each["text"].endswith("~") == bool(winner["too_close"])
    assert "~ too close to call" in str(found)


def test_a_schedule_that_does_not_fit_wins_nothing_and_is_marked(tmp_path: Path) -> None:
    rows = [
        row("h100-8", "llama-3-8b", 8192, "tasp", time_s=1.0),
        row("h100-8", "llama-3-8b", 8192, BASELINE, time_s=2.0),
    ]
    rows[0]["fits"] = False
    study = StudyFolder(write_study(tmp_path, rows))
    assert [each["winner"] for each in study.show().records()] == [BASELINE]
    shown = str(study.show(["schedule"]))
    assert "1 s !" in shown
    assert "! does not fit into memory" in shown


def test_what_is_the_same_everywhere_is_told_once(study: StudyFolder) -> None:
    shown = str(study.show(["schedule"], ["machine"], where="seq == 64Ki and model == 'llama-3-70b'"))
    assert "all with library nccl, model llama-3-70b, length 64Ki" in shown
    assert "mask causal" in shown
    assert "where seq == 64Ki and model == 'llama-3-70b'" in shown
    assert "9 rows: 8 simulated, 1 does not apply" in shown
    found = study.show().to_dict()["counts"]
    assert isinstance(found, dict)
    assert sum(found.values()) == len(list(study_rows()))


@pytest.mark.parametrize(("sort", "descending"), [("-1Mi", True), ("8Ki", False)])
def test_rows_are_sorted_by_a_column_and_cut(study: StudyFolder, sort: str, descending: bool) -> None:
    found = study.show(["machine"], ["seq"], "time_s", where=f"model == 'llama-3-8b' and schedule == '{BASELINE}'",
                       sort=sort)  # fmt: skip
    seq = {"-1Mi": 2**20, "8Ki": 8192}[sort]
    column = [each["time_s"] for each in found.records() if each["seq"] == seq]
    assert column == sorted(column, reverse=descending)
    cut = study.show(sort="-speedup", limit=3).records()
    best = sorted((each["speedup"] for each in study.show().records()), reverse=True)
    assert [each["speedup"] for each in cut] == best[:3]


def test_a_table_is_csv_too(study: StudyFolder) -> None:
    found = study.show()
    assert isinstance(found, WinnerTable)
    read = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [float(each["time_s"]) for each in read] == [each["time_s"] for each in found.records()]
    assert [each["too_close"].split() for each in read] == [each["too_close"] for each in found.records()]


def test_a_baseline_can_be_chosen(study: StudyFolder) -> None:
    for each in study.show(baseline="tasp").records():
        times = times_of(each["machine"], each["model"], each["seq"])
        assert each["speedup"] == pytest.approx(times["tasp"] / each["time_s"])


@pytest.mark.parametrize(
    ("asked", "more", "telling"),
    [
        ((["machin"],), {}, "unknown column 'machin', did you mean 'machine'?"),
        ((["machine"], ["sequ"]), {}, "unknown column 'sequ', did you mean 'seq'?"),
        ((["schedule"], [], "tim_s"), {}, "unknown column 'tim_s', did you mean 'time_s'?"),
        ((["machine"], ["seq"], "time_s"), {}, "'model' has 3 values there (llama-3-8b, llama-3-70b, llama-3-405b)"),
        ((["machine"], ["seq"]), {}, "expected it among --rows and --columns, or one of them by --where"),
        ((["schedule"], ["model"]), {}, "'machine' has 3 values there"),
        ((), {"where": "seq > 1Mi"}, "where 'seq > 1Mi': none of 208 rows is left"),
        ((), {"where": "machine == 'h100-9'"}, "unknown machine 'h100-9', did you mean 'h100-8'?"),
        ((), {"where": "sequ > 1"}, "unknown column 'sequ', did you mean 'seq'?"),
        ((), {"where": "machine == h100-8"}, "texts stand in quotes"),
        ((), {"where": "seq >"}, "filter 'seq >'"),
        ((), {"where": ""}, "filter ''"),
        ((), {"where": "seq > 'a'"}, "filter"),
        ((), {"where": "__import__('os')"}, "expected names, numbers, texts, comparisons"),
        ((), {"where": "status == 'settled'"}, "no row has a time and fits into memory"),
        ((), {"limit": 0}, "limit: 0, expected 1 or more"),
        ((), {"sort": "tim"}, "unknown column 'tim', did you mean 'time_s'?"),
        ((["machine", "model"], ["seq"]), {"sort": "2Ki"}, "cannot sort by '2Ki', expected one of machine, model, 8Ki"),
        ((), {"baseline": "tas"}, "unknown baseline 'tas', did you mean 'tasp'?"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    study: StudyFolder, asked: Sequence[Any], more: dict[str, Any], telling: str
) -> None:
    with pytest.raises(StudyError) as refused:
        study.show(*asked, **more)
    assert telling in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_study_without_a_baseline_has_no_speed_ups(tmp_path: Path) -> None:
    study = StudyFolder(write_study(tmp_path, asked={"study": {"name": "one"}}))
    assert "speed-up" not in str(study.show())
    with pytest.raises(StudyError, match="speedup: the study has no baseline, expected --baseline SCHEDULE"):
        study.show(["machine", "model", "schedule"], ["seq"], "speedup")


def test_where_nothing_applies_the_reasons_are_in_a_file(tmp_path: Path) -> None:
    rows = [each for each in study_rows() if each["status"] == "does not apply"]
    with pytest.raises(StudyError, match=r"no row has a time: 8 do not apply; reasons are in unanswered\.csv"):
        StudyFolder(write_study(tmp_path, rows)).show()


def test_rows_of_one_point_have_a_table(tmp_path: Path) -> None:
    study = StudyFolder(write_study(tmp_path, [row("h100-8", "llama-3-8b", 8192, BASELINE)]))
    assert [each["winner"] for each in study.show().records()] == [BASELINE]
    assert BASELINE in str(study.show(["machine"]))
