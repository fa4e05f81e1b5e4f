"""``--layers`` and ``--kind all``: what is predicted, compared and run, and what is refused in one line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tasp_lab.schedules.registry import LINEAR, attention_names_on
from tests.conftest import Command, Tell

LAYER = ("--seq", "2048", "--heads", "8", "--samples", "0", "--mask", "causal")
FULL = (*LAYER[:-1], "full")
PUBLISHED = "lasp-2+kv-all-gather"


def parsed(tell: Tell, *arguments: str) -> dict[str, Any]:
    code, out, err = tell(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_prediction_names_the_layers_and_shows_re_layouts(tell: Tell) -> None:
    line = ("predict", "h100-8", *LAYER, "--layers", "2xLS", "--decay", "scalar", "--pass", "both")
    code, out, _ = tell(*line, "--schedule", PUBLISHED, "--schedule", "lasp-2+ulysses")
    assert code == 0
    assert "Causal hybrid LSLS (decay: scalar), forward and backward, 2048 positions" in out
    assert "assumed of linear layers: as softmax attention (FlashAttention" in out
    assert "re-layout" in out
    rows = parsed(tell, *line, "--schedule", PUBLISHED, "--schedule", "lasp-2+ulysses")["predictions"]
    assert {(row["computes"], row["layers"], row["decay"], row["dataflow"]) for row in rows} == {
        ("hybrid", "LSLS", "scalar", None)
    }
    sent = [row["relayout_bytes"] for row in rows]
    moved = 2048 * 14 // 16  # of 16 chunks, 0 and 10 have the same rank in contiguous and zigzag shards
    one_way = 3 * moved * 8 * 128 * 2
    assert sent == [one_way, one_way, 2 * one_way, 0, 0, 0]
    assert all(row["relayout_bytes"] <= row["bytes_sent"] for row in rows)


def test_only_softmax_layers_assume_nothing_of_linear_ones(tell: Tell) -> None:
    line = ("predict", "h100-8", *LAYER, "--schedule", PUBLISHED)
    assert "linear layers" not in tell(*line, "--layers", "SS")[1]
    assert "linear layers" in tell(*line, "--layers", "SL")[1]
    assert "linear layers" not in tell(*line, "--layers", "SL", "--compute", "timed:1TFLOP/s")[1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_small_worlds(tell: Tell, ranks: int) -> None:
    line = ("predict", f"full-mesh:{ranks}", *LAYER, "--layers", "LSL", "--schedule", PUBLISHED, "--pass", "both")
    rows = parsed(tell, *line)["predictions"]
    assert [row["relayout_bytes"] > 0 for row in rows] == [ranks > 1] * 3
    assert all(row["bound_s"] <= row["time_s"] for row in rows)


def test_both_engines_predict_the_same(tell: Tell) -> None:
    line = ("predict", "full-mesh:4", *LAYER, "--layers", "LSS", "--schedule", "all-scan+tasp", "--pass", "both")
    times = [
        [row["time_s"] for row in parsed(tell, *line, "--engine", engine)["predictions"]]
        for engine in ("simpy", "array")
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_the_stacks_of_the_fastest_are_compared(tell: Tell) -> None:
    line = ("compare", "full-mesh:4", *LAYER, "--layers", "LLS")
    found = parsed(tell, *line)
    assert found["computes"] == "hybrid"
    alone, names = found["layer_schedules"], [row["schedule"] for row in found["results"]]
    assert {row["schedule"] for row in alone["linear"]} == set(LINEAR)
    assert {row["schedule"] for row in alone["softmax"]} == set(attention_names_on(4))
    for kind, rows in alone.items():
        times = [row["time_s"] for row in rows if row["time_s"] is not None]
        assert times == sorted(times)
        best = [row["schedule"] for row in rows][:3]
        assert all(any(each in name.split("+") for name in names) for each in best), kind
        in_stacks = {name.split("+")[kind == "softmax"] for name in names}
        assert {row["schedule"] for row in rows if row["stacked"]} == in_stacks
    assert PUBLISHED in names
    assert any(row["relayout_bytes"] == 0 for row in found["results"])
    assert len(names) == len(set(names)) <= 3 * 4 + 1
    times = [row["time_s"] for row in found["results"]]
    assert times == sorted(times)
    for row in found["results"][:2]:
        (predicted,) = parsed(tell, "predict", "full-mesh:4", *LAYER, "--layers", "LLS", "--schedule", row["schedule"])[
            "predictions"
        ]
        assert predicted["time_s"] == pytest.approx(row["time_s"], rel=1e-9)
        assert predicted["relayout_bytes"] == row["relayout_bytes"]
    code, out, err = tell(*line)
    assert code == 0
    assert re.search(r"hybrid LLS: \d+ schedules of its layers are predicted alone, the fastest are stacked", err)
    assert "stacks of the schedules that are fastest for a layer alone, 3 of each kind" in out


def test_kind_all_has_a_part_for_each_kind(tell: Tell) -> None:
    line = ("compare", "full-mesh:2", *LAYER, "--kind", "all", "--decay", "scalar", "--window", "600")
    parts = parsed(tell, *line, "--layers", "LS")["parts"]
    assert [part["computes"] for part in parts] == ["softmax attention", "linear attention", "hybrid"]
    works = [part["provenance"]["inputs"]["work"] for part in parts]
    assert [work.get("decay") for work in works] == [None, "scalar", "scalar"]
    assert [work["window"] for work in works] == [600, None, 600]
    for part, kind in zip(parts, ("softmax", "linear", "hybrid"), strict=True):
        assert {row["computes"] for row in part["results"]} == {kind}
    assert len(parsed(tell, *line)["parts"]) == 2
    code, out, _ = tell(*line, "--layers", "LS", "--schedule", "lasp-2", "--schedule", PUBLISHED)
    assert code == 0
    titles = [row for row in out.splitlines() if row.startswith("Causal")]
    assert [title.split(" (")[0] for title in titles] == ["Causal linear attention", "Causal hybrid LS"]


def test_kind_all_and_hybrids_can_be_tuned(tell: Tell) -> None:
    line = ("compare", "full-mesh:2", *LAYER, "--kind", "all", "--layers", "LS", "--tune")
    names = ("--schedule", "all-scan", "--schedule", "burst", "--schedule", "all-scan+burst")
    for part in parsed(tell, *line, *names)["parts"]:
        (row,) = part["results"]
        assert row["time_s"] <= row["untuned_time_s"]


@pytest.mark.distributed
def test_validate_runs_timed_kernels(command: Command) -> None:
    """Every byte that moves is checked, of re-layouts too."""
    rows = command.json(
        "validate full-mesh:3 --layers LSL --mask causal --documents 40,27 --heads 3 --head-dim 8 "
        "--decay channel --schedule lasp-2+zigzag-ring-attention --schedule all-scan+ulysses --pass "
        "both --fabric local --compute timed:1GFLOP/s --repeat 1"
    )["runs"]
    assert [row["schedule"] for row in rows if row["pass"] == "both"] == [
        "lasp-2+zigzag-ring-attention", "all-scan+ulysses",
    ]  # fmt: skip
    assert all((row["computes"], row["layers"], row["compute"]) == ("hybrid", "LSL", "timed") for row in rows)
    assert all(row["measured_s"] > 0 for row in rows)
