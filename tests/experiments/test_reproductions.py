"""Published results beside predictions: what is inside, reasons and trials, pages, and the committed results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.reproductions import report
from experiments.reproductions.__main__ import main
from experiments.reproductions.layers import (
    Change,
    Reason,
    Row,
    counted,
    evaluate,
    explains,
    found_in,
    layer_tables,
    links_alone,
    trials_of,
    with_full_mask,
    without_merges,
)
from experiments.reproductions.registry import NAMES, reproduction
from experiments.reproductions.reproduction import (
    NOT_EXPLAINED,
    Figure,
    Found,
    Trial,
    inside_of,
    median_error,
    rows_of,
)
from experiments.reproductions.token_ring import result as token_ring
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.measure.readers import LayerTable

NUMBERS = st.floats(0.001, 1000)
FIGURES = st.builds(
    lambda published, ends, reason: Figure("a time", "ms", published, sorted(ends)[1], *sorted(ends)[::2], reason),
    NUMBERS, st.tuples(NUMBERS, NUMBERS, NUMBERS), st.sampled_from(["slow links", NOT_EXPLAINED]),
)  # fmt: skip


@given(FIGURES)
def test_a_figure_is_outside_with_its_reason_or_inside_without(figure: Figure) -> None:
    assert figure.inside == (figure.low <= figure.published <= figure.high)
    assert figure.record()["reason"] == (None if figure.inside else figure.reason)
    assert figure.verdict == ("inside" if figure.inside else f"outside: {figure.reason}")
    assert replace(figure, published=figure.predicted).inside


@given(st.lists(st.tuples(FIGURES, FIGURES), max_size=8))
def test_a_change_explains_those_outside_that_come_inside(pairs: list[tuple[Figure, Figure]]) -> None:
    before, after = [one for one, _ in pairs], [other for _, other in pairs]
    outside = sum(not one.inside for one in before)
    come = sum(other.inside and not one.inside for one, other in pairs)
    assert explains(before, after) == (f"{come} of {outside} come inside" if outside else "")


@given(st.lists(FIGURES, min_size=1, max_size=60))
def test_a_page_has_every_figure_or_every_reason(figures: list[Figure]) -> None:
    each = replace(reproduction("usp"), headline="a time")
    text = report.page(each, Found(tuple(figures)))
    assert f"{inside_of(figures)} of {len(figures)} inside, median error {median_error(figures):.0%}" in text
    if len(figures) <= report.MAX_FIGURES:
        assert text.count("| a time |") == len(figures)
    else:
        assert all(figure.reason in text for figure in figures if not figure.inside)
        assert sum(not figure.inside for figure in figures) == 0 or "The record has all figures." in text


def test_results_are_written_and_found_again(tmp_path: Path) -> None:
    figure = Figure("a time", "ms", 2.0, 1.0, 0.5, 1.5, "slow links")
    found = Found((figure, replace(figure, published=1.0)), (Trial("faster links", (figure,), (figure,), "no"),))
    names = NAMES[:2]
    for name in names:
        report.write(replace(reproduction(name), headline="a time"), found, tmp_path)
    report.write_index(names, tmp_path)
    record = json.loads((tmp_path / names[0] / "result.json").read_text())
    assert (record["inside"], record["median_error"], len(record["figures"])) == (1, 0.25, 2)
    assert "| faster links | 1 | 0, 50% | 0, 50% | no |" in (tmp_path / names[0] / "result.md").read_text()
    assert (tmp_path / "README.md").read_text().count("| 2 ms | 1 (0.5 to 1.5) | 1 of 2 | 25% |") == 2


@given(st.lists(FIGURES, min_size=1, max_size=30), st.lists(FIGURES, min_size=1, max_size=30))
def test_figures_that_no_model_can_meet_are_shown_and_count_in_no_score(some: list[Figure], none: list[Figure]) -> None:
    each = replace(reproduction("usp"), headline="a time", left_out={"none": "twice the peak"})
    mixed = [*some, *(replace(figure, what="none of these") for figure in none)]
    found = replace(each, find=lambda: Found(tuple(mixed))).found()
    record, alone = report.record(each, found), report.record(each, Found(tuple(some)))
    assert (record["inside"], record["median_error"]) == (alone["inside"], alone["median_error"])
    assert len(record["figures"]) == len(mixed)
    page = report.page(each, found)
    assert f"{len(none)} of {len(mixed)} left out of scores." in page
    if len(mixed) <= report.MAX_FIGURES:
        assert page.count("left out of scores: twice the peak") == len(none)


def test_a_figure_to_leave_out_that_is_none_is_refused() -> None:
    figure = Figure("a time", "ms", 2.0, 1.0, 0.5, 1.5)
    each = replace(reproduction("usp"), find=lambda: Found((figure,)), left_out={"a speed": "twice the peak"})
    with pytest.raises(ValueError, match="usp: left_out names no figure: 'a speed'"):
        each.found()


@pytest.mark.parametrize(("name", "count"), [("lasp2", 3), ("zeco", 6), ("burst_attention", 24), ("usp", 0)])
def test_what_the_committed_results_leave_out(name: str, count: int) -> None:
    record = json.loads((report.FOLDER / name / "result.json").read_text())
    without = [figure for figure in record["figures"] if figure.get("left_out")]
    assert len(without) == count
    page = (report.FOLDER / name / "result.md").read_text()
    assert all(figure["left_out"] in page for figure in without)


def test_the_single_gpu_of_burst_has_the_rate_of_a_full_mask() -> None:
    """4 x 128 FLOPs per pair and head: 201 to 217 TFLOP/s of all pairs, so 101 to 109 of a causal mask, on one A100."""
    (path,) = layer_tables("burst_8xa100")
    alone = [row for row in rows_of(path) if row["gpus"] == "1" and row["pass"] == "forward"]
    assert len(alone) == 4
    for row in alone:
        flops_per_s = 4 * 128 * 32 * int(row["seq_total"]) ** 2 / (1e-6 * float(row["time_us"]))
        assert 200e12 < flops_per_s < 218e12


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tsap"])
    assert "invalid choice: 'tsap'" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_every_folder_has_its_result(name: str) -> None:
    """Every result is committed, its page and the index show it, and its records have a source."""
    each, folder = reproduction(name), report.FOLDER / name
    record = json.loads((folder / "result.json").read_text())
    assert record["command"] == f"python -m experiments.reproductions {name}"
    assert record["inside"] == sum(
        figure["low"] <= figure["published"] <= figure["high"]
        for figure in record["figures"] if not figure.get("left_out")
    )  # fmt: skip
    assert (record["question"], record["verdict"]) == (each.question, each.verdict)
    assert each.headline in {figure["what"] for figure in record["figures"]}
    index = (report.FOLDER / "README.md").read_text()
    assert f"]({name}/result.md): {each.headline}" in index
    for path in folder.glob("*.csv"):
        assert "# source: " in path.read_text()


def test_the_committed_index_is_made_of_the_records() -> None:
    records = [json.loads((report.FOLDER / name / "result.json").read_text()) for name in NAMES]
    assert f"{report.index(records)}\n" == (report.FOLDER / "README.md").read_text()


def test_connections_that_do_not_fill_the_lanes_take_the_published_step() -> None:
    """98.3 MB at the rate of a step of the ring take that step, whatever the lanes carry."""
    slow = replace(load_machine("a10-4-pcie"), comm_library=token_ring.Connections("connections"))
    *_, step = token_ring.figures(slow)
    assert step.predicted == pytest.approx(token_ring.STEP_MS, rel=1e-3)
    ring, token = token_ring.figures(slow)[1:3]
    assert ring.predicted > token.predicted


ROW = "ring-flash-attention(zhuzilin),ring,forward,full,8,1,1,16384,32,32,128,bf16,3000"
COLUMNS = "system,variant,pass,mask,gpus,nodes,batch,seq_total,heads,kv_heads,head_dim,dtype,time_us"


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """Two rows of a table: a ring on eight H800, and one of twice the positions, each measured to take 3 ms."""
    path = tmp_path / "rings.csv"
    path.write_text(f"# profile: h800\n# source: github.com/a/b\n{COLUMNS}\n{ROW}\n{ROW.replace('16384', '32768')}\n")
    compared = evaluate(path)
    assert isinstance(compared.table, LayerTable)
    return [Row(compared.table, row) for row in counted(compared)]


def test_rows_outside_have_the_first_reason_that_names_them(rows: list[Row]) -> None:
    long = Reason("long", "long ones", lambda row: row.has(seq_total=32768), {})
    other = Reason("other", "all", lambda row: True, {"links alone": links_alone})
    found = found_in([Path(rows[0].table.name)], (long, other))
    assert [each.reason for each in found.figures] == ["other", "long"]
    (trial,) = found.trials
    assert (trial.change, len(trial.before)) == ("all: links alone", 2)
    for before, after in zip(trial.before, trial.after, strict=True):
        assert after.published == before.published == 3
        assert after.high / after.predicted == pytest.approx(before.high / before.predicted)
    assert found_in([Path(rows[0].table.name)]).figures[0].reason == NOT_EXPLAINED


CHANGES: dict[str, tuple[Change, int]] = {
    "no library is no slower": (links_alone, -1),
    "no merges are no slower": (without_merges, -1),
    "a full mask is as it was": (with_full_mask, 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_move_a_time_the_way_they_say(name: str, rows: list[Row]) -> None:
    change, way = CHANGES[name]
    for row in rows:
        (trial,) = trials_of(Reason("", "", row.__eq__, {name: change}), [row])
        ratio = trial.after[0].predicted / trial.before[0].predicted
        assert ratio == pytest.approx(1) if way == 0 else (ratio - 1) * way >= 0
