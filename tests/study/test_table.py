"""Tables of a study: every cell is that of its row, and what cannot be shown is refused in one line."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.core.tables import csv_text
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.study.folder import StudyFolder
from tasp_lab.study.table import table
from tests.support.study_folders import BASELINE, MACHINES, MODELS, SCHEDULES, SEQUENCES, row, study_rows, write_study

DONE = {(r["machine"], r["model"], r["seq"], r["schedule"]): r for r in study_rows() if r["status"] == "ok"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return StudyFolder(write_study(tmp_path_factory.mktemp("studies") / "longctx"))


def times_at(cells: Any) -> dict[str, float]:
    """The times of all schedules that have one where a winner is."""
    place = cells["machine"], cells["model"], cells["seq"]
    return {name: DONE[key]["time_s"] for name in SCHEDULES if (key := (*place, name)) in DONE}


@pytest.mark.parametrize("baseline", [BASELINE, "tasp"])
def test_the_fastest_schedule_wins_at_each_point(study: StudyFolder, baseline: str) -> None:
    records = table(study, baseline=baseline).records()
    assert len(records) == len(MACHINES) * len(MODELS) * len(SEQUENCES)
    for winner in records:
        times = times_at(winner)
        assert winner["winner"] == min(times, key=times.__getitem__)
        assert winner["time_s"] == min(times.values())
        assert winner["speedup"] == pytest.approx(times[baseline] / winner["time_s"])
        assert winner["speedup_low"] <= winner["speedup"] <= winner["speedup_high"]


def test_a_pivot_table_has_the_cell_of_each_row(study: StudyFolder) -> None:
    shown = table(study, ["schedule"], ["seq"], where="machine == 'h100-4x8' and model == 'llama-3-8b'")
    cells = {(cell["schedule"], cell["seq"]): cell["time_s"] for cell in shown.records()}
    assert cells == {(s, seq): DONE["h100-4x8", "llama-3-8b", seq, s]["time_s"] for s in SCHEDULES for seq in SEQUENCES}


def test_cells_are_marked_where_their_value_is_not_all(study: StudyFolder, tmp_path: Path) -> None:
    """A bound is a limit of a time and of a speed-up; open questions are marked; what does not fit wins nothing."""
    where = "machine == 'mi300x-8' and model == 'llama-3-8b' and seq == 1Mi"
    cells = {cell["schedule"]: cell for cell in table(study, ["schedule"], where=where).records()}
    assert (cells["ulysses"]["time_s"], cells["ulysses"]["text"][:2]) == (None, "> ")
    text = str(table(study, ["schedule"], value="speedup", where=where))
    assert "< 0.9" in text
    assert "at most that, by a bound: not simulated" in text

    pivot = table(study, ["machine", "model"], ["seq"])
    winners = {(w["machine"], w["model"], w["seq"]): w for w in table(study).records()}
    assert len(winners) == len(pivot.records())
    for cell in pivot.records():
        winner = winners[cell["machine"], cell["model"], cell["seq"]]
        assert cell["winner"] == winner["winner"]
        assert cell["text"].endswith("~") == (winner["expected_regret"] > DECIDED)
    open_rows = [row("h100-4x8", "llama-3-8b", 8192, name, time_s=1.0, setting="links alone")
                for name in ("tasp", BASELINE)]  # fmt: skip
    (winner,) = table(StudyFolder(write_study(tmp_path / "open", open_rows))).records()
    assert winner["expected_regret"] > DECIDED
    assert "~ open" in str(table(StudyFolder(tmp_path / "open"), ["machine"], ["seq"]))

    rows = [row("h100-8", "llama-3-8b", 8192, name, time_s=time_s) for name, time_s in (("tasp", 1.0), (BASELINE, 2.0))]
    rows[0]["fits"] = False
    small = StudyFolder(write_study(tmp_path / "small", rows))
    assert [winner["winner"] for winner in table(small).records()] == [BASELINE]
    assert "1 s !" in str(table(small, ["schedule"]))
    assert "! does not fit into memory" in str(table(small, ["schedule"]))


def test_columns_of_one_value_are_named_below_the_table(study: StudyFolder) -> None:
    text = str(table(study, ["schedule"], ["machine"], where="seq == 64Ki and model == 'llama-3-70b'"))
    assert "all with library nccl, model llama-3-70b, length 64Ki" in text
    assert "where seq == 64Ki and model == 'llama-3-70b'" in text
    assert "9 rows: 8 simulated, 1 does not apply" in text
    counts: Any = table(study).to_dict()["counts"]
    assert sum(counts.values()) == len(list(study_rows()))


def test_rows_are_sorted_by_a_column_and_cut(study: StudyFolder) -> None:
    where = f"model == 'llama-3-8b' and schedule == '{BASELINE}'"
    for sort, seq in (("-1Mi", 2**20), ("8Ki", 8192)):
        shown = table(study, ["machine"], ["seq"], "time_s", where=where, sort=sort)
        column = [cell["time_s"] for cell in shown.records() if cell["seq"] == seq]
        assert column == sorted(column, reverse=sort.startswith("-"))
    cut = table(study, sort="-speedup", limit=3).records()
    best = sorted((winner["speedup"] for winner in table(study).records()), reverse=True)
    assert [winner["speedup"] for winner in cut] == best[:3]


def test_a_table_is_csv_too(study: StudyFolder) -> None:
    shown = table(study)
    read = list(csv.DictReader(io.StringIO(csv_text(shown.records()))))
    assert [float(line["time_s"]) for line in read] == [winner["time_s"] for winner in shown.records()]
    assert [line["too_close"].split() for line in read] == [winner["too_close"] for winner in shown.records()]


@pytest.mark.parametrize(
    ("arguments", "settings", "error"),
    [
        ((["machin"],), {}, "unknown column 'machin', did you mean 'machine'?"),
        ((["machine"], ["sequ"]), {}, "unknown column 'sequ', did you mean 'seq'?"),
        ((["schedule"], [], "tim_s"), {}, "unknown column 'tim_s', did you mean 'time_s'?"),
        ((["machine"], ["seq"], "time_s"), {}, "'model' has 3 values there (llama-3-8b, llama-3-70b, llama-3-405b)"),
        ((["machine"], ["seq"]), {}, "expected it among --rows and --columns, or one of them by --where"),
        ((), {"where": "seq > 1Mi"}, "where 'seq > 1Mi': none of 208 rows is left"),
        ((), {"where": "machine == 'h100-9'"}, "unknown machine 'h100-9', did you mean 'h100-8'?"),
        ((), {"where": "sequ > 1"}, "unknown column 'sequ', did you mean 'seq'?"),
        ((), {"where": "machine == h100-8"}, "texts stand in quotes"),
        ((), {"where": "seq > 'a'"}, "filter"),
        ((), {"where": "status == 'settled'"}, "no row has a time and fits into memory"),
        ((), {"limit": 0}, "limit: 0, expected 1 or more"),
        ((), {"sort": "tim"}, "unknown column 'tim', did you mean 'time_s'?"),
        ((["machine", "model"], ["seq"]), {"sort": "2Ki"}, "cannot sort by '2Ki', expected one of machine, model, 8Ki"),
        ((), {"baseline": "tas"}, "unknown baseline 'tas', did you mean 'tasp'?"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    study: StudyFolder, arguments: Sequence[Any], settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(StudyError) as refused:
        table(study, *arguments, **settings)
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_study_without_a_baseline_has_no_speed_ups(tmp_path: Path) -> None:
    study = StudyFolder(write_study(tmp_path, asked={"study": {"name": "one"}}))
    assert "speed-up" not in str(table(study))
    with pytest.raises(StudyError, match="speedup: the study has no baseline, expected --baseline SCHEDULE"):
        table(study, ["machine", "model", "schedule"], ["seq"], "speedup")


def test_the_smallest_studies(tmp_path: Path) -> None:
    """One row has a table; without any answer the error names the file with the reasons."""
    one = StudyFolder(write_study(tmp_path / "one", [row("h100-8", "llama-3-8b", 8192, BASELINE)]))
    assert [winner["winner"] for winner in table(one).records()] == [BASELINE]
    assert BASELINE in str(table(one, ["machine"]))
    assert "1 rows: 1 simulated" in str(table(one, where="seq == 8Ki"))  # though no row without an answer is left
    rows = [refused for refused in study_rows() if refused["status"] == "does not apply"]
    with pytest.raises(StudyError, match=r"no row has a time: 8 do not apply; reasons are in unanswered\.csv"):
        table(StudyFolder(write_study(tmp_path / "none", rows)))
