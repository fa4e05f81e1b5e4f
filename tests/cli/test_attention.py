"""Attention layers from the command line and from Python: what is predicted, what is printed, what is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError, TaspLabError
from tasp_lab.machines.compute import ASSUMED_COMPUTE
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.columns import names
from tasp_lab.prediction.predict import predict
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, attention_names, attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.conftest import Command, Tell
from tests.schedules.attention.test_bound import layers, schedule_names

ASKED = (
    "seq", "batch", "heads", "kv_heads", "head_dim", "dtype", "mask", "window", "documents", "pass", "dataflow",
    "gradient_dtype", "trim", "buffers",
)  # fmt: skip
STATUS = {"status", "reason"}
"""The fields that tell a prediction from a schedule that does not apply."""
PREDICTED = set(names("layer"))
"""The fields of every prediction of a layer."""
MEASURED = {
    "compute", "predicted_s", "nominal_s", "measured_s", "measured_spread_s", "measured_repeats_s", "relative_error",
    "cpu_busy_share", "comparable", "not_comparable",
}  # fmt: skip
LAYER = ("--seq", "4Ki", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--samples", "0")
FULL = (*LAYER, "--mask", "full")
KV_BYTES = 2 * 2 * 64 * 2 * 4096
"""Of all keys and values of that layer."""


def rows(tell: Tell, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = tell("predict", *arguments, "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)["predictions"]
    return found


def one(tell: Tell, topology: str, schedule: str, *arguments: str) -> dict[str, Any]:
    (row,) = rows(tell, topology, "--schedule", schedule, *arguments)
    return row


# Prediction


def test_a_row_says_what_was_asked_and_what_comes_of_it(tell: Tell) -> None:
    options = ("--batch", "3", "--dtype", "fp32", "--mask", "causal", "--window", "100", "--no-trim", "--buffers", "3")
    row = one(tell, "full-mesh:4", "tasp", *LAYER, *options, "--compute", "timed:5GFLOP/s")
    assert set(row) == PREDICTED | STATUS
    layer = [4096, 3, 8, 2, 64, "fp32", "causal", 100, None]
    assert [row[key] for key in ASKED] == [*layer, "forward", None, None, False, 3]
    assert (row["schedule"], row["topology"], row["world_size"]) == ("tasp", "full-mesh:4", 4)
    assert row["compute_flops_per_s"] == 5e9
    assert row["exposed_s"] == row["time_s"] - row["compute_s"]


def test_a_window_on_both_sides_is_a_text_and_has_its_pairs(tell: Tell) -> None:
    """Of 4096 queries all but the first 100 have 100 keys before their own, and all but the last 7 have 7 after it."""
    row = one(tell, "full-mesh:4", "ring-attention", *LAYER, "--mask", "full", "--window", "100,7")
    assert row["window"] == "100,7"
    assert row["flops"] == 4 * 8 * 64 * (4096 * 108 - 100 * 101 // 2 - 7 * 8 // 2)
    flash = one(tell, "full-mesh:4", "tasp", *LAYER, "--window", "100,0")
    assert flash == one(tell, "full-mesh:4", "tasp", *LAYER, "--window", "101")
    assert one(tell, "full-mesh:4", "tasp", *LAYER, "--window=-1,-1")["window"] is None


def test_cached_keys_are_told_where_there_are_some(tell: Tell) -> None:
    """3/4 of 4096 positions: 1024 queries see 3072 keys, and those of each other up to their own."""
    causal = ("full-mesh:4", "token-ring", *LAYER, "--mask", "causal")
    row = one(tell, *causal, "--cached-keys", "3Ki")
    assert set(row) == PREDICTED | STATUS | {"cached_keys"}
    assert row["cached_keys"] == 3072
    assert row["flops"] == 4 * 8 * 64 * (1024 * 3072 + 1024 * 1025 // 2)
    assert row["bytes_sent"] == 3 * 1024 * 8 * (2 * 64 * 2 + 4)
    assert one(tell, *causal, "--cached-keys", "0") == one(tell, *causal)
    shown = tell("predict", "full-mesh:4", "--schedule", "tasp", *LAYER, "--cached-keys", "3Ki")[1]
    assert "4096 positions, 3072 of them cached, 8 heads" in " ".join(shown.split())


@pytest.mark.parametrize("rate", ["timed:1TFLOP/s", "timed:1e18"])
def test_equal_steps_take_the_first_compute_and_then_whatever_is_longer(tell: Tell, rate: str) -> None:
    """At the least a rank would receive results of its own queries: 8 heads, where K and V together have 4."""
    row = one(tell, "full-mesh:8", "ring-attention", *FULL, "--compute", rate, "--explain")
    flops = 4 * 8 * 64 * 4096**2
    hop_s, call_s = 1e-6 + KV_BYTES / 8 / 50e9, flops / 64 / row["compute_flops_per_s"]
    assert row["flops"] == flops
    assert row["compute_s"] == pytest.approx(8 * call_s)
    assert row["communication_s"] == pytest.approx(7 * hop_s)
    assert row["time_s"] == pytest.approx(call_s + 7 * max(call_s, hop_s))
    assert row["bound_s"] == pytest.approx(max(8 * call_s, 1e-6 + 1 / 8 * 2 * KV_BYTES / (7 * 50e9)))


@pytest.mark.parametrize(("schedule", "share"), [("ring-attention", 1 / 2), ("zigzag-ring-attention", 3 / 4)])
def test_trimming_leaves_out_what_nobody_sees(tell: Tell, schedule: str, share: float) -> None:
    causal = (*LAYER, "--mask", "causal")
    assert one(tell, "full-mesh:8", schedule, *causal, "--no-trim")["bytes_sent"] == 7 * KV_BYTES
    assert one(tell, "full-mesh:8", schedule, *causal)["bytes_sent"] == 7 * KV_BYTES * share


@pytest.mark.parametrize("buffers", [2, 5])
def test_a_buffer_holds_the_shard_and_the_buffers(tell: Tell, buffers: int) -> None:
    row = one(tell, "full-mesh:8", "ring-attention", *LAYER, "--buffers", str(buffers))
    assert row["buffer_bytes"] == (1 + buffers) * KV_BYTES / 8


def test_where_the_compute_rate_comes_from(tell: Tell) -> None:
    assert one(tell, "switch:2", "tasp", *LAYER)["compute_flops_per_s"] == ASSUMED_COMPUTE.flops_per_s == 300e12
    row = one(tell, "mi300x-8", "tasp", *LAYER)
    assert row["compute_flops_per_s"] < row["flops"] / row["bound_s"] / 8, "calls by shape stay below the highest rate"
    assert one(tell, "a100-8", "tasp", *LAYER, "--dtype", "fp32")["compute_flops_per_s"] == 19.5e12
    assert one(tell, "mi300x-8", "tasp", *LAYER, "--compute", "timed:2e9")["compute_flops_per_s"] == 2e9


def test_a_single_rank_has_no_ratio(tell: Tell) -> None:
    row = one(tell, "full-mesh:1", "tasp", *LAYER, "--explain")
    assert (row["ccr"], row["communication_s"], row["bytes_sent"]) == (None, 0, 0)
    assert row["time_s"] == row["bound_s"] == row["compute_s"]


def test_explain_lists_transfers_and_calls(tell: Tell) -> None:
    arguments = ("full-mesh:4", "--schedule", "zigzag-ring-attention", *LAYER, "--mask", "causal")
    (row,) = rows(tell, *arguments, "--explain")
    assert row["ccr"] == row["compute_s"] / row["communication_s"]
    assert sum(transfer["bytes"] for transfer in row["transfers"]) == row["bytes_sent"]
    assert sum(call["flops"] for call in row["calls"]) == row["flops"]
    assert {frozenset(call) for call in row["calls"]} == {
        frozenset({"step", "rank", "start_s", "end_s", "contention_s", "flops", "waited_for"})
    }
    assert max(call["end_s"] for call in row["calls"]) == row["time_s"]
    assert "compute" in tell("predict", *arguments, "--explain")[1]


def test_the_table_names_the_layer(tell: Tell) -> None:
    names = attention_names_on(8)
    schedules = [part for name in names for part in ("--schedule", name)]
    code, out, _ = tell("predict", "mi300x-8", *schedules, *LAYER, "--mask", "causal", "--window", "64")
    assert code == 0
    for word in (
        "Causal",
        "4096 positions",
        "8 heads (2 KV) of 64",
        "bf16",
        "mi300x-8",
        "flash-attention-2-ck",
        "TFLOP/s",
        "exposed",
    ):
        assert word in " ".join(out.split())
    assert all(name in out for name in names)


def test_rows_of_all_gather_stay_as_they_are(tell: Tell) -> None:
    row = one(tell, "full-mesh:4", "ring", "--shard-bytes", "1MiB", "--explain")
    assert set(row) == {
        "schedule", "topology", "world_size", "collective", "shard_bytes", "time_s", "bound_s", "busbw_bytes_per_s",
        "status", "reason",
        "explanation", "transfers", "time_low_s", "time_high_s", "rates_within",
        "interval",
    }  # fmt: skip


# From Python


@given(st.integers(1, 5), layers(), schedule_names, st.integers(2, 4))
@settings(max_examples=50)
def test_what_a_prediction_adds_up_to(world_size: int, layer: Workload, name: str, buffers: int) -> None:
    mesh = full_mesh(world_size, Fraction(50), Fraction(1))
    options = AttentionOptions(buffers=buffers)
    (p,) = predict(Machine(mesh, compute=ComputeRate(Fraction(300))), [name], layer, options=options)
    assert isinstance(p, Answer)
    (schedule,) = build_schedules(name, mesh, layer, options=options)
    assert p.bound_s <= p.time_s
    assert max(p.compute_s, p.communication_s) <= p.time_s <= p.compute_s * len(schedule.steps) + p.communication_s
    assert p.compute_s == Fraction(int(schedule.flops().sum(axis=0).max()), 300)
    assert (p.flops, p.bytes_sent) == (schedule.flops().sum(), schedule.bytes_sent().sum())
    assert p.buffer_bytes == max(rank_part(schedule, rank).memory_bytes for rank in range(world_size))


@pytest.mark.parametrize("name", [*COLLECTIVES, *attention_names_on(4), "bogus"])
@pytest.mark.parametrize("work", [64, Workload(64, heads=4, mask="full")], ids=["bytes", "layer"])
def test_each_kind_of_work_has_schedules_of_its_own(name: str, work: int | Workload) -> None:
    is_layer = isinstance(work, Workload)
    names = attention_names() if is_layer else list(COLLECTIVES)
    if name in (attention_names_on(4) if is_layer else COLLECTIVES):
        assert [schedule.name for schedule in build_schedules(name, full_mesh(4), work)] == [name]
    else:
        with pytest.raises(ScheduleError, match=f"'{name}'.*{', '.join(names)}$"):
            build_schedules(name, full_mesh(4), work)


def test_a_layer_has_a_limit() -> None:
    with pytest.raises(TaspLabError, match="layer too large: 2147483648 positions"):
        build_schedules("tasp", full_mesh(4), Workload(2**31, heads=2**20, kv_heads=1, mask="full"))


# What is refused

# On real processes


@pytest.mark.alone
@pytest.mark.fabric
def test_validate_with_cached_keys(command: Command) -> None:
    rows = command.json(
        "validate full-mesh:3 --schedule ring-attention --schedule token-ring --seq 512 --cached-keys "
        "384 --heads 2 --mask causal --scale 2e-5 --repeat 1"
    )["runs"]
    assert [(row["schedule"], row["cached_keys"]) for row in rows] == [("ring-attention", 384), ("token-ring", 384)]
    assert all(row["measured_s"] > 0 for row in rows)


@pytest.mark.fabric
def test_usual_compute_keeps_the_ratio_of_the_machine(command: Command) -> None:
    layer = ("--schedule", "tasp", "--seq", "1024", "--heads", "1", "--head-dim", "64", "--link-latency", "0s")
    (run,) = command.json("validate", "full-mesh:2", *layer, "--scale", "2e-5", "--repeat", "1")["runs"]
    assert run["compute_flops_per_s"] == pytest.approx(300e12 * 2e-5)
    (predicted,) = command.json("predict", "full-mesh:2", *layer)["predictions"]
    assert run["nominal_s"] == pytest.approx(predicted["time_s"] / 2e-5)
