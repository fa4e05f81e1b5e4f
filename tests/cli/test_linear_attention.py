"""``--kind linear``: what is predicted and compared, and what is refused in one line."""

from __future__ import annotations

import json

import pytest

from tasp_lab.schedules.registry import LINEAR
from tests.conftest import Command, Tell

LAYER = ("--kind", "linear", "--seq", "4096", "--heads", "8", "--samples", "0")


def test_a_prediction_names_the_layer_and_its_assumption(tell: Tell) -> None:
    line = ("predict", "h100-8", *LAYER, "--mask", "causal", "--decay", "channel", "--schedule", "all-scan")
    code, out, _ = tell(*line, "--pieces", "2", "--pass", "both")
    assert code == 0
    assert out.startswith("Causal linear attention (decay: channel), forward and backward, 4096 positions")
    assert "assumed: as softmax attention (FlashAttention" in out
    code, out, _ = tell(*line, "--json", "--compute", "timed:1TFLOP/s")
    (row,) = json.loads(out)["predictions"]
    assert (row["computes"], row["decay"], row["dataflow"]) == ("linear", "channel", None)
    assert "as softmax attention" not in out


def test_all_schedules_are_compared(tell: Tell) -> None:
    code, out, _ = tell("compare", "full-mesh:4", *LAYER, "--mask", "full", "--all", "--json")
    assert code == 0
    rows = {row["schedule"]: row for row in json.loads(out)["results"]}
    assert list(rows) != sorted(LINEAR)
    assert set(rows) == set(LINEAR)
    assert all(row["computes"] == "linear" for row in rows.values())
    assert [name for name, row in rows.items() if not row["applies"]] == ["lasp", "all-scan"]
    assert rows["lasp"]["reason"] == "passes states from chunk to chunk, expected a causal mask"


def test_options_are_searched(tell: Tell) -> None:
    layer = (*LAYER, "--mask", "causal", "--compute", "timed:900TFLOP/s", "--schedule", "all-scan", "--json")
    code, out, _ = tell("compare", "h100-8", *layer, "--pieces", "8", "--tune")
    assert code == 0
    assert json.loads(out)["results"][0]["options"] == {"pieces": 8}, "an option that is given is kept"
    code, out, _ = tell("compare", "h100-8", *layer, "--tune")
    (row,) = json.loads(out)["results"]
    assert row["time_s"] <= row["untuned_time_s"]


@pytest.mark.distributed
def test_validate_runs_real_kernels(command: Command) -> None:
    """Timed alone at each rank, and both passes checked against one process."""
    rows = command.json(
        "validate full-mesh:3 --kind linear --decay channel --mask causal --documents 40,27 --heads 2 "
        "--head-dim 8 --dtype fp32 --schedule lasp-2 --schedule all-scan --pass both --fabric local "
        "--repeat 1"
    )["runs"]
    assert [row["schedule"] for row in rows if row["pass"] == "both"] == ["lasp-2", "all-scan"]
    assert all((row["computes"], row["decay"]) == ("linear", "channel") for row in rows)
    assert all(row["measured_s"] > 0 for row in rows)
