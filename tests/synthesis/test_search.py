"""The search: never worse than what has a name, the same for any number of workers, and the best at an interrupt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tasp_lab
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.prediction import compare as comparison
from tasp_lab.prediction.evaluate import build
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.synthesis.search import frames
from tasp_lab.topology.builders import nodes
from tests.conftest import Tell
from tests.support.outputs import check_report

LAYER = tasp_lab.Workload(8192, heads=8, kv_heads=2, mask="causal")

UNEVEN = """
name = "three-and-two"
nodes = [0, 0, 0, 1, 1]
links = [
    { source = 0, destination = 1, bandwidth = "50GB/s", latency = "1us", both_ways = true },
    { source = 0, destination = 2, bandwidth = "50GB/s", latency = "1us", both_ways = true },
    { source = 1, destination = 2, bandwidth = "50GB/s", latency = "1us", both_ways = true },
    { source = 3, destination = 4, bandwidth = "50GB/s", latency = "1us", both_ways = true },
    { source = 2, destination = 3, bandwidth = "12GB/s", latency = "2us", both_ways = true },
]
"""
"""Nodes of unequal size, and one link between them."""

QUESTIONS: list[tuple[str, tasp_lab.Workload, dict[str, Any]]] = [
    ("full-mesh:4", LAYER, {"passes": "both"}),
    ("full-mesh:4", replace(LAYER, mask="full"), {}),
    ("h100-2x2", LAYER, {"passes": "both"}),
    ("torus:2x3", LAYER, {}),
    ("full-mesh:5", LAYER, {"without": ("link.0-1",)}),
    ("bidirectional-ring:8", LAYER, {"passes": "backward"}),
    ("h100-2", replace(LAYER, documents=(1000, 7192)), {}),
    ("h100-2", replace(LAYER, window=128), {}),
    ("ring:4", LAYER, {"passes": "both"}),
    ("uneven.toml", LAYER, {"passes": "both"}),
]


@pytest.mark.parametrize(("machine", "layer", "settings"), QUESTIONS)
def test_found_is_never_worse_than_named_and_never_below_the_bound(
    machine: str, layer: tasp_lab.Workload, settings: dict[str, Any], tmp_path: Path
) -> None:
    """And its file is a schedule of the same time in every command."""
    if machine == "uneven.toml":
        machine = str(tmp_path / machine)
        Path(machine).write_text(UNEVEN)
    found = tasp_lab.search(machine, layer, effort=24, **settings)
    best = tasp_lab.compare(machine, layer, samples=0, **settings).best
    assert found.spent <= 24
    assert found.bound_s * (1 - 1e-9) <= found.time_s <= float(best.time_s)
    file = tmp_path / "found.json"
    found.save(file)
    again = tasp_lab.predict(machine, str(file), layer, samples=0, **settings)[-1]
    assert float(again.time_s) == pytest.approx(found.time_s, rel=1e-12)


def test_the_result_does_not_depend_on_the_number_of_workers() -> None:
    one, two = (tasp_lab.search("h100-2x2", LAYER, effort=100, workers=each) for each in (1, 2))
    assert one.program == two.program
    assert one.time_s == two.time_s


def test_one_way_rings_are_searched_to_the_end() -> None:
    """Gradients go home onward, around the ring; a layout that has only a forward plan is not waited for."""
    found = tasp_lab.search("ring:4", LAYER, routes="direct", effort=40, passes="both")
    assert found.time_s < float(found.ranking.best.time_s)
    assert any("go home" in line for line in found.explained)


def test_what_is_found_fits_if_anything_does() -> None:
    """6Mi positions on 8 H100: gathered keys and float32 gradients are too much, rings are not."""
    layer = tasp_lab.Workload(6 * 2**20, heads=32, kv_heads=8, mask="causal")
    found = tasp_lab.search("h100-8", layer, effort=24, passes="both")
    assert not all(each.fits for each in found.ranking.candidates if each.applies)
    assert found.named is not None
    assert found.answer.fits
    assert found.named.fits


def test_an_interrupt_keeps_the_best() -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            raise KeyboardInterrupt

    found = tasp_lab.search("h100-2x2", LAYER, effort=50, progress=interrupt)
    assert found.interrupted
    assert found.spent <= 50
    assert found.time_s <= float(tasp_lab.compare("h100-2x2", LAYER, samples=0).best.time_s)


def test_at_the_bound_nothing_is_simulated() -> None:
    """With two ranks that only compute every schedule takes the time of its calls."""
    found = tasp_lab.search("full-mesh:2", tasp_lab.Workload(8192, heads=8, mask="causal"), compute="timed:1GFLOP/s")
    assert found.spent == 0
    assert found.answer is found.named
    assert str(found).startswith("found nothing better than ")


def test_what_is_found_has_no_more_regret_than_the_best_named_schedule() -> None:
    """Over common samples of the errors of all schedules."""
    found = tasp_lab.search("bidirectional-ring:8", LAYER, routes="direct", effort=40, passes="both")
    assert found.named is not None
    assert found.answer is not found.named
    answers = [found.answer, *(each for each in found.ranking.candidates if each.applies)]
    regret, *others = Recommendation(tuple(answers)).expected_regrets
    assert regret <= others[0]
    assert "expected regret" in str(found).splitlines()[0]


@pytest.mark.parametrize(
    ("work", "settings", "error", "words"),
    [
        (LAYER, {"effort": 0}, QuantityError, "effort: 0, expected 1 or more"),
        (LAYER, {"workers": 0}, QuantityError, "workers: 0, expected 1 or more"),
        (tasp_lab.Workload(8192, heads=8, kind="linear", mask="causal"), {}, ScheduleError, "not linear"),
        (LAYER, {"without": ("link.0-1", "link.0-2", "link.0-3")}, tasp_lab.core.errors.TaspLabError, "not connected"),
    ],
)
def test_bad_questions_are_refused_in_one_line(
    work: tasp_lab.Workload, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        tasp_lab.search("full-mesh:4", work, **settings)
    assert "\n" not in str(raised.value)


def test_heads_are_shared_out_by_divisors_alone() -> None:
    layer = tasp_lab.Workload(8192, heads=8, kv_heads=2, mask="full")
    assert [(each.members, each.shape) for each in frames(nodes(2, 4), layer, both=False)] == [
        (1, (2, 4)), (2, (2, 2)), (4, (2,)), (8, (1,))
    ]  # fmt: skip


def test_the_command_writes_a_schedule_that_others_take(tell: Tell, tmp_path: Path) -> None:
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    question = ("--seq", "8Ki", "--heads", "8", "--kv-heads", "2", "--mask", "causal")
    code, out, err = tell("search", "h100-2x2", *question, "--effort", "30", "--output", str(file), "--json",
                          "--plot", str(picture))  # fmt: skip
    assert code == 0
    document = json.loads(out)
    assert document["simulated_passes"] <= 30
    assert document["found"]["time_s"] <= document["best_named"]["time_s"]
    assert "simulated: " in err
    assert picture.stat().st_size > 0
    code, out, _ = tell("predict", "h100-2x2", *question, "--schedule", str(file), "--json")
    assert code == 0
    (again,) = json.loads(out)["predictions"]
    assert again["time_s"] == pytest.approx(document["found"]["time_s"], rel=1e-12)


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_what_is_found_has_a_question_of_its_own(passes: str, tmp_path: Path) -> None:
    """Its schedules have no name that others know: asked again, the same question has the same answer."""
    found = tasp_lab.search("ring:4", LAYER, routes="direct", effort=10, passes=passes)
    assert found.program.known is None
    again = tasp_lab.answer(found.answer.question)
    assert again.status == "ok"
    assert again.time_s == found.time_s
    assert len(again.passes) == (2 if passes == "both" else 1)
    found.save(tmp_path / "found.json")
    compared = tasp_lab.compare("ring:4", LAYER, [str(tmp_path / "found.json")], routes="direct", passes=passes)
    other = tasp_lab.search("ring:4", LAYER, routes="direct", effort=24, passes=passes)
    assert other.program != found.program
    assert other.answer.question.key() != found.answer.question.key()
    (tmp_path / "found.json").unlink()  # what is there is shown without the file
    (row,), told = compared.to_dict()["results"], found.to_dict()["found"]  # type: ignore[misc]
    assert {name for name in row if row[name] != told[name]} <= {"schedule", "expected_regret"}  # type: ignore[index]
    check_report(compared)
    for result in (found, replace(found, named=None), replace(found, named=None, interrupted=True)):
        json.dumps(result.to_dict(), allow_nan=False)
        check_report(result)


def test_a_question_with_schedules_has_one_for_each_pass() -> None:
    found = tasp_lab.search("ring:4", LAYER, routes="direct", effort=10, passes="both").answer.question
    assert isinstance(found.schedule, tuple)
    for schedules, words in (
        (found.schedule[:1], "is a forward pass"),
        (found.schedule[::-1], "is a backward pass"),
        ((*found.schedule, found.schedule[0]), "3 schedules, expected one for each of the passes: forward, backward"),
    ):
        refused = tasp_lab.answer(replace(found, schedule=schedules))
        assert refused.status == "does not apply"
        assert words in refused.reason


def test_seeds_draw_other_changes() -> None:
    """Also without samples of the parameters, and the provenance has the seed and the effort."""
    found = [tasp_lab.search("ring:4", LAYER, routes="direct", effort=60, seed=seed) for seed in range(3)]
    assert len({each.time_s for each in found}) > 1
    (inputs,) = [each.to_dict()["provenance"]["inputs"] for each in found[1:2]]  # type: ignore[index]
    assert (inputs["sampling"]["seed"], inputs["effort"]) == (1, 60)


def test_what_is_known_is_not_predicted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison after a search predicts what was found alone, and ranks all as without the search."""
    names = ["tasp", "ulysses", "ring-attention", "burst"]
    known = tasp_lab.compare("full-mesh:4", LAYER, names[:2]).candidates
    without = tasp_lab.compare("full-mesh:4", LAYER, names)
    asked: list[str] = []
    monkeypatch.setattr(comparison, "build", lambda question, on: asked.append(question.name) or build(question, on))
    found = tasp_lab.compare("full-mesh:4", LAYER, names, known=known)
    assert asked == names[2:]
    assert found.records() == without.records()
