"""``--layers`` and ``--kind all``: what is predicted, compared and run, and what is refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasp_lab.schedules.registry import LINEAR, attention_names_on
from tests.conftest import Command, Tell

FULL = ("--seq", "2048", "--heads", "8")
LAYER = (*FULL, "--mask", "causal")
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
    assert out.startswith("Causal hybrid LSLS (decay: scalar), forward and backward, 2048 positions")
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
    assert "hybrid LLS: 26 schedules of its layers are predicted alone, the fastest are stacked" in err
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


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (("--layers", ""), "a hybrid without layers, expected a pattern such as LLSLLS"),
        (("--layers", "LX"), "layers 'LX': unknown layer 'X', expected L (linear) or S (softmax attention)"),
        (("--layers", "0xL"), "layers '0xL': 0 times L, expected 1 or more"),
        (("--layers", "9999999999xL"), "layers '9999999999xL': too many layers, expected at most 1024"),
        (("--kind", "hybrid"), "kind: hybrid without --layers, expected a pattern such as LLSLLS"),
        (("--kind", "linear", "--layers", "LS"), "layers: 'LS' with --kind linear, expected --kind hybrid"),
        (("--kind", "softmax", "--layers", "LS"), "layers: 'LS' with --kind softmax, expected --kind hybrid"),
        (("--kind", "all", "--layers", "LS"), "kind: all, expected softmax, linear or hybrid"),
        (("--layers", "LS", "--cached-keys", "9"), "cached keys: 9, expected none for a hybrid"),
        (("--layers", "LS", "--pieces", "2"), f"schedule '{PUBLISHED}': pieces 2 does not apply to it, expected none"),
        (("--layers", "LS", "--compute", "real"), "compute 'real': a prediction has no kernels"),
    ],
)
def test_what_is_no_hybrid_is_refused(tell: Tell, arguments: tuple[str, ...], telling: str) -> None:
    code, out, err = tell("predict", "full-mesh:4", *LAYER, *arguments, "--schedule", PUBLISHED)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert telling in err


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (("--decay", "head"), "decay 'head' with a full mask has no agreed meaning"),
        (("--window", "9"), "window: 9 with the mask full, expected a causal mask"),
    ],
)
def test_decays_and_windows_need_a_causal_mask(tell: Tell, arguments: tuple[str, ...], telling: str) -> None:
    code, out, err = tell("predict", "full-mesh:4", *FULL, "--layers", "LS", *arguments, "--schedule", PUBLISHED)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert telling in err


@pytest.mark.parametrize(
    ("work", "schedule", "telling"),
    [
        (("--layers", "LS"), "tasp", "schedule 'tasp' is for softmax attention, expected one for a hybrid: LINEAR+S"),
        (("--layers", "LS"), "lasp-2", "schedule 'lasp-2' is for linear attention, expected one for a hybrid: LINEAR"),
        (("--layers", "LS"), "tasp+lasp-2", "schedule 'tasp+lasp-2': schedule 'tasp' is for softmax attention, expec"),
        (("--layers", "LS"), "lasp-2+lasp", "schedule 'lasp-2+lasp': schedule 'lasp' is for linear attention, expect"),
        (("--layers", "LS"), "lasp-2+", "schedule 'lasp-2+', expected one for a hybrid: LINEAR+SOFTMAX, such as"),
        (("--layers", "LS"), "ring", "schedule 'ring' is an AllGather, expected one for a hybrid: LINEAR+SOFTMAX"),
        (("--layers", "LS"), "lasp-2+usp:3x3", "schedule 'usp:3x3' is for 9 ranks, expected a split of 4"),
        (("--kind", "linear"), PUBLISHED, f"schedule '{PUBLISHED}' is for a hybrid, expected one for linear attention"),
        ((), PUBLISHED, f"schedule '{PUBLISHED}' is for a hybrid, expected one for softmax attention"),
    ],
)
def test_schedules_of_other_work_are_refused(tell: Tell, work: tuple[str, ...], schedule: str, telling: str) -> None:
    code, out, err = tell("predict", "full-mesh:4", *LAYER, *work, "--schedule", schedule)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert telling in err


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (("--kind", "all", "--cached-keys", "5"), "cached keys: expected none with --kind all"),
        (
            ("--kind", "all", "--schedule", "ring"),
            "'ring' is an AllGather, expected one for softmax attention or",
        ),
        (("--kind", "all", "--schedule", PUBLISHED), "is for a hybrid, expected one for softmax attention or linear"),
        (("--kind", "all", "--schedule", "lasp-3"), "unknown schedule 'lasp-3', did you mean 'lasp-2'?"),
        (("--layers", "LS", "--validate", "1", "--fabric", "local"), "compute: real kernels of a hybrid on the local"),
        (
            ("--kind", "all", "--layers", "LS", "--validate", "1", "--fabric", "local"),
            "compute: real kernels of a hybrid on the local fabric, expected timed:RATE",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(tell: Tell, arguments: tuple[str, ...], telling: str) -> None:
    code, out, err = tell("compare", "full-mesh:4", *LAYER, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert telling in err


@pytest.mark.parametrize("arguments", [("--compute", "real"), ("--fabric", "local")])
def test_real_kernels_of_a_stack_are_refused(tell: Tell, arguments: tuple[str, ...]) -> None:
    line = ("validate", "full-mesh:2", *LAYER, "--layers", "LS", "--schedule", PUBLISHED)
    code, out, err = tell(*line, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "real kernels of a hybrid" in err


@pytest.mark.distributed
def test_validate_runs_timed_kernels(command: Command) -> None:
    """Every byte that moves is checked, of re-layouts too."""
    done = command(
        "validate", "full-mesh:3", "--layers", "LSL", "--mask", "causal", "--documents", "40,27", "--heads", "3",
        "--head-dim", "8", "--decay", "channel", "--schedule", "lasp-2+zigzag-ring-attention", "--schedule",
        "all-scan+ulysses", "--pass", "both", "--fabric", "local", "--compute", "timed:1GFLOP/s", "--repeat", "1",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["runs"]
    assert [row["schedule"] for row in rows if row["pass"] == "both"] == [
        "lasp-2+zigzag-ring-attention", "all-scan+ulysses",
    ]  # fmt: skip
    assert all((row["computes"], row["layers"], row["compute"]) == ("hybrid", "LSL", "timed") for row in rows)
    assert all(row["measured_s"] > 0 for row in rows)
