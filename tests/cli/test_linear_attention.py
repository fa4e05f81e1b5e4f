"""``--kind linear``: what is predicted and compared, and what is refused in one line."""

from __future__ import annotations

import json

import pytest

from tasp_lab.schedules.registry import LINEAR
from tests.conftest import Command, Tell

LAYER = ("--kind", "linear", "--seq", "4096", "--heads", "8")


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
    code, out, _ = tell("compare", "full-mesh:4", *LAYER, "--json")
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


@pytest.mark.parametrize(
    ("work", "schedule", "telling"),
    [
        (LAYER, "tasp", "schedule 'tasp' is for softmax attention, expected one for linear attention: lasp, all-scan"),
        (LAYER, "usp:2x2", "schedule 'usp:2x2' is for softmax attention, expected one for linear attention"),
        (LAYER, "ring", "schedule 'ring' is an AllGather, expected one for linear attention"),
        (LAYER, "lasp-3", "unknown schedule 'lasp-3', did you mean 'lasp-2'?"),
        ((*LAYER, "--decay", "head"), "lasp-2", "decay 'head' with a full mask has no agreed meaning"),
        (
            (*LAYER, "--mask", "causal", "--decay", "2"),
            "lasp-2",
            'Invalid value "2" for --decay. Choose from: "none", "head"',
        ),
        ((*LAYER, "--mask", "causal", "--pieces", "3"), "all-scan", "8 KV heads in 3 groups, expected groups of equal"),
        ((*LAYER, "--buffers", "5"), "lasp-2", "schedule 'lasp-2': buffers 5 does not apply to it, expected 3"),
        ((*LAYER, "--head-dim", "0"), "lasp-2", "head dim: 0, expected 1 or more"),
        ((*LAYER, "--head-dim", "1000000000"), "lasp-2", "layer too large: 4096 positions, 8 heads of 1000000000 elem"),
        ((*LAYER, "--cached-keys", "9"), "lasp-2", "cached keys: 9, expected none for linear attention"),
        (
            ("--seq", "64"),
            "lasp",
            "'lasp' is for linear attention, expected one for softmax attention: ring-attention, ",
        ),
        (("--shard-bytes", "64"), "lasp", "'lasp' is for linear attention, expected a collective: ring, "),
    ],
)
def test_what_does_not_fit_is_refused(tell: Tell, work: tuple[str, ...], schedule: str, telling: str) -> None:
    code, out, err = tell("predict", "full-mesh:4", *work, "--schedule", schedule)
    assert (code, out) == (2, "")
    assert telling in err.splitlines()[-1]


@pytest.mark.distributed
def test_validate_runs_real_kernels(command: Command) -> None:
    """Timed alone at each rank, and both passes checked against one process."""
    done = command(
        "validate", "full-mesh:3", "--kind", "linear", "--decay", "channel", "--mask", "causal", "--documents", "40,27",
        "--heads", "2", "--head-dim", "8", "--dtype", "fp32", "--schedule", "lasp-2", "--schedule", "all-scan",
        "--pass", "both", "--fabric", "local", "--repeat", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["runs"]
    assert [row["schedule"] for row in rows if row["pass"] == "both"] == ["lasp-2", "all-scan"]
    assert all((row["computes"], row["decay"]) == ("linear", "channel") for row in rows)
    assert all(row["measured_s"] > 0 for row in rows)
