"""The ranking benchmark: laws of its scores, wrong submissions, and the committed entries."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.common import table
from experiments.ranking_benchmark.__main__ import main
from experiments.ranking_benchmark.benchmark import (
    COLUMNS,
    FOLDER,
    Row,
    Submission,
    leaderboard,
    load_questions,
    read_submission,
    score,
)
from experiments.ranking_benchmark.make import write
from tasp_lab.core.errors import TableError
from tasp_lab.machines.sampling import FEW_SAMPLES
from tasp_lab.measure.accuracy.decisions import decision_figures, questions_by_source
from tasp_lab.measure.accuracy.layer import LayerEvaluator
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.readers import LayerTable, find_all_tables
from tasp_lab.measure.scores import Way


def questions_of(times: list[list[float]]) -> list[list[Row]]:
    return [
        [Row(f"q{n}", f"q{n}:{line}", Way("ring", 1, 1, 1), time_s) for line, time_s in enumerate(each)]
        for n, each in enumerate(times)
    ]


drawn = st.lists(st.lists(st.floats(0.1, 10), min_size=2, max_size=3), min_size=1, max_size=3).map(questions_of)


@given(drawn)
def test_perfect_times_have_no_regret_and_every_order(questions: list[list[Row]]) -> None:
    times_s = {row.name: row.measured_s for rows in questions for row in rows}
    found = score(questions, Submission(times_s, {name: (time, time) for name, time in times_s.items()}))
    assert (found["mean_regret"], found["worst_regret"], found["within_2"]) == (0, 0, 1)
    assert (found["right"], found["inside"], found["interval_score"]) == (1, 1, 0)
    assert found["brier"] is None


@given(drawn)
def test_random_picks_have_the_mean_regret_of_all_rows(questions: list[list[Row]]) -> None:
    """Over all combinations of picks the mean regret is that of the mean row of each question."""
    found = []
    for picks in product(*questions):
        times_s = {row.name: 1.0 if row in picks else 2.0 for rows in questions for row in rows}
        found.append(score(questions, Submission(times_s))["mean_regret"])
    expected = mean(
        mean(row.measured_s for row in rows) / min(row.measured_s for row in rows) - 1 for rows in questions
    )
    assert mean(each for each in found if each is not None) == pytest.approx(expected, abs=1e-12)


@given(drawn, st.floats(0.01, 100))
def test_only_ratios_of_times_count(questions: list[list[Row]], factor: float) -> None:
    times_s = {row.name: row.measured_s * (1 + n) for rows in questions for n, row in enumerate(rows)}
    scaled = {name: time_s * factor for name, time_s in times_s.items()}
    assert score(questions, Submission(times_s))["right"] == score(questions, Submission(scaled))["right"]


def test_probabilities_of_a_pair_hold_in_both_orders(tmp_path: Path) -> None:
    questions = questions_of([[1.0, 2.0]])
    (tmp_path / "mine.csv").write_text("row,time_s\nq0:0,2\nq0:1,1\n")
    (tmp_path / "pairs.csv").write_text("first,second,probability_first_faster\nq0:1,q0:0,0.25\n")
    found = score(questions, read_submission(tmp_path / "mine.csv", questions, tmp_path / "pairs.csv"))
    assert (found["mean_regret"], found["right"], found["called"]) == (1, 1, 0)
    assert found["brier"] == 0.25**2


def test_rows_without_a_time_may_be_the_best_but_not_the_pick() -> None:
    found = score(questions_of([[1.0, 3.0], [1.0, 2.0]]), Submission({"q0:1": 1.0}))
    assert (found["questions"], found["mean_regret"], found["pairs"]) == (1, 2, 0)


WRONG = {
    "row,seconds\nq0:0,1\n": "line 1: no column 'time_s', expected row, time_s",
    "row,time_s\n": "no rows, expected a predicted time for rows of questions.csv",
    "row,time_s\nq0:11,1\n": "line 2: no row 'q0:11' in questions.csv, did you mean 'q0:1'?",
    "row,time_s\nq0:0,1\nq0:0,1\n": "line 3: row 'q0:0' occurs twice",
    "row,time_s\nq0:0,fast\n": "line 2: time_s 'fast', expected a number",
    "row,time_s\nq0:0\n": "line 2: 1 cells, expected 2, one per column",
    "row,time_s\nq0:0,nan\n": "line 2: time_s 'nan', expected a number",
    "row,time_s,expected_regret\nq0:0,1,-1\n": "line 2: expected_regret '-1', expected a number from 0",
    "row,time_s,time_low_s,time_high_s\nq0:0,1,2,1\n": "line 2: time_low_s 2 is above time_high_s 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_submissions_give_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(TableError) as caught:
        read_submission(path, questions_of([[1.0, 2.0]]))
    assert str(caught.value).removeprefix(str(path)).lstrip(":, ") == WRONG[text]


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("q0:0,q1:0,0.5", "'q0:0' and 'q1:0', expected two rows of one question"),
        ("q0:0,q0:1,1.5", "probability_first_faster '1.5', expected a number from 0 to 1"),
    ],
)
def test_wrong_pairs_give_one_line(line: str, end: str, tmp_path: Path) -> None:
    mine, pairs = tmp_path / "mine.csv", tmp_path / "pairs.csv"
    mine.write_text("row,time_s\nq0:0,1\n")
    pairs.write_text(f"first,second,probability_first_faster\n{line}\n")
    with pytest.raises(TableError, match="line 2") as caught:
        read_submission(mine, questions_of([[1.0, 2.0], [1.0, 2.0]]), pairs)
    assert str(caught.value).endswith(end)


def test_the_command_shows_a_submission_and_rejects_a_missing_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, rows = tmp_path / "mine.csv", [row for rows in load_questions() for row in rows]
    mine.write_text("row,time_s\n" + "".join(f"{row.name},{row.measured_s!r}\n" for row in rows))
    assert main([str(mine)]) == 0
    row = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    assert row[:4] == ["mine.csv", str(len(load_questions())), "0.0%", "0.0%"]
    assert main([str(tmp_path / "none.csv")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_questions_have_several_rows_and_names_are_unique() -> None:
    questions = load_questions()
    names = [row.name for rows in questions for row in rows]
    assert len(questions) > 100
    assert all(len(rows) > 1 for rows in questions)
    assert len(names) == len({*names})


def test_the_committed_leaderboard_is_that_of_the_entries() -> None:
    rows = [{"predictor": name, **figures} for name, figures in leaderboard(load_questions()).items()]
    assert table(rows, COLUMNS) in (FOLDER / "leaderboard.md").read_text()


def test_the_entry_of_tasp_lab_has_the_scores_of_accuracy(tmp_path: Path) -> None:
    evaluator = LayerEvaluator(FEW_SAMPLES)
    found = find_all_tables([own_tables() / "layers" / name for name in ("zhuzilin_varlen_a100.csv",)])
    tables = [evaluator.evaluate(table) for table in found if isinstance(table, LayerTable)]
    (tmp_path / "entries").mkdir()
    write(tables, tmp_path)
    entry = leaderboard(load_questions(tmp_path / "questions.csv"), tmp_path / "entries")["tasp-lab"]
    figures = decision_figures(questions_by_source(tables)["all"])
    assert entry["questions"]
    assert entry == pytest.approx({name: figures[name] for name in entry}, rel=1e-4)


def test_scoring_loads_no_simulator() -> None:
    use = "import experiments.ranking_benchmark.benchmark as it; it.leaderboard(it.load_questions())"
    code = f"import sys; {use}; print('sim' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
