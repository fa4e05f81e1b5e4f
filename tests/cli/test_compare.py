"""``tasp-lab compare``: the table, the JSON object, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasp_lab.cli.app import app_of
from tasp_lab.prediction import compare as comparison
from tasp_lab.prediction.columns import names
from tasp_lab.prediction.evaluate import SEARCHED
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.registry import attention_names_on
from tasp_lab.workload.layer import Workload
from tests.conftest import Command, Tell

LAYER = ("--seq", "4096", "--heads", "8", "--samples", "0")
FIELDS = set(names("ranking"))


def test_json_has_every_field(tell: Tell) -> None:
    code, out, _ = tell("compare", "full-mesh:9", *LAYER, "--json")
    assert code == 0
    found = json.loads(out)
    always = {"computes", "library", "stack", "changes", "versus", "results", "not_simulated", "fabric", "provenance"}
    decision = {
        "recommended", "why", "prefer", "expected_regret", "margin", "is_decided", "near", "network_share",
        "below_network_share", "down_to_sequence", "shorter_sequence", "faster_at_shorter_sequence", "otherwise",
        "tuned_ring", "to_measure", "expected_regret_then", "switches", "verdict", "model_does_not_fit", "warning",
    }  # fmt: skip
    assert always | decision == set(found)
    assert all(set(row) == FIELDS for row in found["results"])
    refused = [row for row in found["results"] if not row["applies"]]
    assert [row["schedule"] for row in refused] == ["ulysses", "staged-ulysses"]
    assert all(row["time_s"] is None and row["reason"] for row in refused)
    assert all(row["computes"] == "softmax" for row in found["results"])


def test_the_table_has_all_schedules(tell: Tell) -> None:
    code, out, err = tell("compare", "full-mesh:4", *LAYER, "--mask", "causal", "--pass", "both")
    assert code == 0
    assert all(name in out for name in attention_names_on(4))
    assert all(f": {name}" in err for name in attention_names_on(4))


def results(tell: Tell, topology: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """The rows of `--json` by schedule."""
    code, out, err = tell("compare", topology, *arguments, "--all", "--json")
    assert code == 0, err
    return {row["schedule"]: row for row in json.loads(out)["results"]}


# Tuned options


@pytest.mark.parametrize("field", SEARCHED)
def test_options_are_spelled_as_the_command_line_reads_them(field: str) -> None:
    for value in SEARCHED[field]:
        options = AttentionOptions("both", **{field: value})  # type: ignore[arg-type]
        line = ["predict", "full-mesh:4", "--schedule", "tasp", *LAYER, "--pass", "both", *options.arguments.split()]
        _, bound, _ = app_of().parse_args(line, exit_on_error=False, print_error=False)
        assert bound.arguments["question"].layer.options() == options
        assert (options.arguments == "") == (value == getattr(DEFAULT_OPTIONS, field))


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_pasted_options_give_the_time_of_the_table(tell: Tell, passes: str) -> None:
    names = ["tasp", "token-ring", "kv-and-q-rings", "ulysses", "usp:2x2"]
    asked = ("--mask", "causal", "--kv-heads", "4", "--gradient-dtype", "input", "--pass", "both")
    if passes == "forward":
        asked = ("--mask", "causal", "--kv-heads", "4")
    layer = Workload(4096, heads=8, kv_heads=4, mask="causal")
    given = AttentionOptions("both", gradient_dtype="input") if passes == "both" else DEFAULT_OPTIONS
    for each in comparison.compare("full-mesh:4", layer, names, tune=True, options=given).records():
        line = ("predict", "full-mesh:4", "--schedule", str(each["schedule"]), *LAYER, *asked[:4])
        line += ("--pass", passes, *str(each["options"]).split(), "--json")
        code, out, err = tell(*line)
        assert code == 0, err
        assert json.loads(out)["predictions"][-1]["time_s"] == pytest.approx(each["time_s"], rel=1e-9)


def test_the_table_of_tuned_schedules_has_their_options(tell: Tell) -> None:
    names = ("--schedule", "token-ring", "--schedule", "ulysses")
    code, out, err = tell("compare", "full-mesh:4", *LAYER, *names, "--tune")
    assert code == 0
    assert err.splitlines()[0] == "tuning 2 schedules: combinations of options to simulate: at most 13"
    rows = [line.strip("│ ").split("│") for line in out.splitlines() if line.startswith("│")]
    shown = " ".join(cells[-1].strip() for cells in rows)  # a cell may take several lines
    tuned = results(tell, "full-mesh:4", *LAYER, *names, "--tune")["token-ring"]
    assert f"--tail-chunks {tuned['options']['tail_chunks']}" in shown
    assert (
        tuned["time_s"]
        < tuned["untuned_time_s"]
        == results(tell, "full-mesh:4", *LAYER, *names)["token-ring"]["time_s"]
    )
    assert "untuned" in out
    assert "untuned" not in tell("compare", "full-mesh:4", *LAYER, *names)[1]


# Layers and worlds at the edge


def test_fewer_heads_than_ranks_are_a_reason_here_and_an_error_of_predict(command: Command, tell: Tell) -> None:
    layer = ("--seq", "4096", "--heads", "4")
    reason = "4 heads for 8 ranks, expected as many heads or more, as for usp:4x2"
    found = results(tell, "full-mesh:8", *layer, "--schedule", "ulysses", "--schedule", "tasp")
    assert found["tasp"]["applies"]
    assert found["ulysses"]["reason"] == reason
    assert found["ulysses"]["options"] == {"gradient_dtype": "auto", "result_dtype": "auto", "padded_heads": False}
    assert reason in command.refused("predict", "full-mesh:8", *layer, "--schedule", "ulysses")


def test_heads_that_ranks_do_not_divide_are_compared(tell: Tell) -> None:
    """14 heads on 4 GPUs; padded, ranks have 4 each, as the slowest one has without it."""
    layer = ("h100-4", "--seq", "64Ki", "--heads", "14", "--mask", "full", "--schedule", "ulysses",
             "--schedule", "usp:2x2:direct-kv-all-gather")  # fmt: skip
    gathered = "usp:2x2:direct-kv-all-gather"
    plain, wider = results(tell, *layer), results(tell, *layer, "--padded-heads")
    compute, padded, of_gathered = (
        each["time_s"] - each["exposed_s"] for each in (plain["ulysses"], wider["ulysses"], plain[gathered])
    )
    assert compute == pytest.approx(padded)
    assert plain["ulysses"]["bytes_per_rank"] < wider["ulysses"]["bytes_per_rank"]
    assert plain[gathered]["time_s"] == wider[gathered]["time_s"]
    assert of_gathered == pytest.approx(7 / 8 * compute, rel=0.02)


def test_a_split_of_another_world(command: Command, tell: Tell) -> None:
    found = results(tell, "full-mesh:8", *LAYER, "--schedule", "usp:3x3", "--schedule", "tasp")
    assert (found["usp:3x3"]["reason"], found["tasp"]["reason"]) == ("is for 9 ranks, expected a split of 8", None)
    line = command.refused("predict", "full-mesh:8", *LAYER, "--schedule", "usp:3x3")
    assert line == "tasp-lab: schedule 'usp:3x3' is for 9 ranks, expected a split of 8"


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_one_group_is_ulysses_and_groups_of_one_are_a_ring(tell: Tell, mask: str) -> None:
    ring = {"full": "ring-attention", "causal": "zigzag-ring-attention"}[mask]
    names = ("usp:8x1", "usp:1x8", "ulysses", ring)
    asked = [f"--schedule={name}" for name in names]
    found = results(tell, "full-mesh:8", *LAYER, "--mask", mask, "--pass", "both", "--dataflow", "rotate-kv", *asked)
    for same in (("usp:8x1", "ulysses"), ("usp:1x8", ring)):
        rows = [found[name] for name in same]
        for field in ("time_s", "bytes_per_rank", "link_bytes", "exposed_s"):
            assert rows[0][field] == pytest.approx(rows[1][field], rel=1e-9), (same, field)


@pytest.mark.parametrize("more", [("--mask", "full"), ("--pass", "both"), ("--mask", "full", "--tune")])
def test_a_world_of_one_computes_and_sends_nothing(tell: Tell, more: tuple[str, ...]) -> None:
    found = results(tell, "full-mesh:1", *LAYER, "--compute", "timed:1TFLOP/s", *more)
    assert set(found) == set(attention_names_on(1, variants="--tune" in more))
    flops = 4 * 8 * 128 * 4096**2
    if "both" in more:
        flops = 4 * 8 * 128 * (4096 * 4097 // 2) * 7 // 2
    for name, row in found.items():
        assert (row["bytes_per_rank"], row["link_bytes"], row["exposed_s"], row["bottleneck"]) == (
            0,
            0,
            0,
            "compute",
        ), name
        assert row["time_s"] == pytest.approx(flops / 1e12), name


def test_where_one_schedule_applies_there_is_a_table_of_one_without_a_speed_up(tell: Tell) -> None:
    code, out, _ = tell("compare", "bidirectional-ring:4", "--without", "link.0-1", "--routes", "direct", *LAYER)
    assert code == 0
    rows = out.split("do not apply")[0].splitlines()
    (row,) = (line for line in rows if line.startswith("│"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert (cells[0], cells[3]) == ("trees-kv-all-gather", "-")


def test_where_none_applies_there_are_reasons_alone(tell: Tell) -> None:
    code, out, _ = tell("compare", "full-mesh:9", *LAYER, "--schedule", "ulysses", "--validate", "3")
    assert code == 0
    assert out.startswith("do not apply")


def test_groups_are_options_of_schedules_with_variants_too(tell: Tell) -> None:
    """On two nodes, groups of ranks of one node exchange heads without the network."""
    times = {}
    for groups in ("auto", "consecutive", "strided"):
        code, out, _ = tell(
            "predict", "nodes:2x4", "--seq", "4Ki", "--schedule", "usp:4x2:tasp", "--groups", groups, "--json"
        )
        found = json.loads(out)
        assert code == 0
        assert found["provenance"]["inputs"]["options"]["groups"] == groups
        times[groups] = found["predictions"][0]["time_s"]
    assert times["auto"] == times["consecutive"] < times["strided"]
