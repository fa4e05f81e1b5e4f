"""Backward passes and both passes from the command line and from Python, and packed batches."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.answer import Answer, together
from tasp_lab.prediction.predict import predict
from tasp_lab.schedules.attention.backward import DATAFLOWS, Dataflow
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.timeline.events import ATTEND, DIFFERENTIATE, SEND, Timeline
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation.validate import Run, runs_together
from tasp_lab.workload.layer import Workload
from tests.cli.test_attention import FULL, KV_BYTES, LAYER, MEASURED, PREDICTED, STATUS, one, rows
from tests.conftest import Command, Tell
from tests.schedules.attention.test_bound import dataflows, layers, schedule_names

SUMMED = ("time_s", "bound_s", "compute_s", "bytes_sent", "flops")
FLOPS = 4 * 8 * 64 * 4096**2
"""Of that layer, forward, under the full mask."""


# Prediction


@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize(("dtype", "resolved"), [("fp32", "fp32"), ("input", "bf16")])
def test_a_row_of_a_backward_pass(tell: Tell, dataflow: Dataflow, dtype: str, resolved: str) -> None:
    backward = ("--pass", "backward", "--dataflow", dataflow, "--gradient-dtype", dtype)
    row = one(tell, "full-mesh:4", "tasp", *FULL, *backward)
    assert set(row) == PREDICTED | STATUS
    assert (row["schedule"], row["pass"], row["dataflow"], row["gradient_dtype"]) == (
        "tasp",
        "backward",
        dataflow,
        resolved,
    )
    assert row["flops"] == FLOPS // 2 * 5


@pytest.mark.parametrize(("dtype", "of_keys"), [("fp32", 2), ("input", 1)])
def test_two_ranks_send_keys_and_then_gradients(tell: Tell, dtype: str, of_keys: int) -> None:
    """Of elements as large as those of keys, or twice as large, after a call that takes no time.

    What must come to a rank in 16 bits: the other one's keys, and the gradients of its own.
    """
    onward = ("--pass", "backward", "--dataflow", "rotate-kv", "--gradient-dtype", dtype, "--compute", "timed:1e30")
    row = one(tell, "full-mesh:2", "ring-attention", *FULL, *onward)
    assert row["bytes_sent"] == KV_BYTES * (1 + of_keys)
    assert row["time_s"] == pytest.approx(2 * 1e-6 + row["bytes_sent"] / 2 / 50e9)
    assert row["bound_s"] == pytest.approx(1e-6 + (KV_BYTES / 2 + KV_BYTES / 2) / 50e9)


def test_both_passes_have_three_rows(tell: Tell) -> None:
    schedules = ("--schedule", "zigzag-ring-attention", "--schedule", "tasp")
    causal = (*LAYER, "--mask", "causal")
    found = rows(tell, "full-mesh:4", *schedules, *causal, "--pass", "both", "--dataflow", "rotate-kv")
    assert [row["pass"] for row in found] == ["forward", "backward", "both"] * 2
    assert [row["dataflow"] for row in found] == [None, "rotate-kv", "rotate-kv"] * 2
    assert [row["gradient_dtype"] for row in found] == [None, "fp32", "fp32"] * 2
    for forward, backward, both in (found[:3], found[3:]):
        assert set(forward) == set(backward) == set(both) == PREDICTED | STATUS
        assert backward["flops"] == forward["flops"] // 2 * 5
        assert {key: both[key] for key in SUMMED} == {key: forward[key] + backward[key] for key in SUMMED}
        assert both["buffer_bytes"] == max(forward["buffer_bytes"], backward["buffer_bytes"])
        assert both["compute_flops_per_s"] == forward["compute_flops_per_s"] == backward["compute_flops_per_s"]
    for which, passes in ((0, "forward"), (1, "backward")):
        dataflow = () if passes == "forward" else ("--dataflow", "rotate-kv")
        assert found[which::3] == rows(tell, "full-mesh:4", *schedules, *causal, "--pass", passes, *dataflow)


def test_the_forward_pass_before_a_reversed_one_is_not_trimmed(tell: Tell) -> None:
    causal = (*LAYER, "--mask", "causal")
    both = rows(
        tell, "full-mesh:8", "--schedule", "ring-attention", *causal, "--pass", "both", "--dataflow", "rotate-kv-back"
    )
    assert both[0]["bytes_sent"] == one(tell, "full-mesh:8", "ring-attention", *causal, "--no-trim")["bytes_sent"]


def test_the_table_names_passes_and_compares_like_with_like(tell: Tell) -> None:
    schedules = ("--schedule", "ring-attention", "--schedule", "tasp")
    asked = ("predict", "full-mesh:4", *schedules, *FULL, "--dataflow", "rotate-q", "--pass")
    code, out, err = tell(*asked, "both")
    assert code == 0, err
    assert "Full attention, forward and backward, 4096 positions" in out
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[:2] for row in table] == [
        [schedule, passing]
        for schedule in ("ring-attention", "tasp")
        for passing in ("forward", "backward, rotate-q", "both")
    ]
    assert [row[3] for row in table[:3]] == ["1.00x"] * 3
    found = rows(tell, *asked[1:], "both")
    expected = [f"{found[at]['time_s'] / found[at + 3]['time_s']:.2f}x" for at in range(3)]
    assert [row[3] for row in table[3:]] == expected
    assert "Full attention, backward, 4096" in tell(*asked, "backward")[1]
    assert "┃ pass" not in tell("predict", "full-mesh:4", *schedules, *FULL)[1]


def test_explain_lists_each_pass_once(tell: Tell) -> None:
    asked = ("full-mesh:4", "--schedule", "tasp", *FULL, "--pass", "both", "--explain")
    *passes, both = rows(tell, *asked)
    for row in passes:
        assert sum(transfer["bytes"] for transfer in row["transfers"]) == row["bytes_sent"]
        assert sum(call["flops"] for call in row["calls"]) == row["flops"]
    assert set(both) == PREDICTED | STATUS | {"communication_s", "contention_s", "ccr"}
    told = tell("predict", *asked)[1]
    assert [line.strip() for line in told.splitlines() if "where the time" in line] == [
        "where the time of tasp forward went",
        "where the time of tasp backward went",
    ]


def test_trace_and_picture_show_one_pass_after_the_other(tell: Tell, tmp_path: Path) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "p.svg"
    outputs = ("--trace", str(trace), "--plot", str(picture))
    code, _, err = tell("predict", "full-mesh:4", "--schedule", "tasp", *FULL, "--pass", "both", *outputs)
    assert code == 0, err
    events = json.loads(trace.read_text())["traceEvents"]
    (name,) = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert name == "predicted tasp forward and backward on full-mesh:4"
    ends = {kind: [e["ts"] + e["dur"] for e in events if e.get("cat") == kind] for kind in (ATTEND, DIFFERENTIATE)}
    assert max(ends[ATTEND]) < min(ends[DIFFERENTIATE])
    assert "step of a backward kernel call" in picture.read_text()


@given(st.integers(1, 4), layers(24), schedule_names, dataflows, st.booleans())
@settings(max_examples=30)
def test_both_passes_are_their_sum(world_size: int, layer: Workload, name: str, dataflow: Dataflow, trim: bool) -> None:
    machine = Machine(full_mesh(world_size, Fraction(50), Fraction(1)), compute=ComputeRate(Fraction(300)))
    options = AttentionOptions("both", trim, buffers=2, dataflow=dataflow)
    forward, backward, both = predict(machine, [name], layer, options=options)
    for key in SUMMED:
        assert getattr(both, key) == getattr(forward, key) + getattr(backward, key)
    # five products instead of two: three of the width of keys, two of that of values
    wide, narrow = layer.head_dim, layer.value_dim or layer.head_dim
    more = Fraction(3 * wide + 2 * narrow, wide + narrow)
    assert backward.flops == forward.flops * more
    assert dataflow == "rotate-q" or backward.compute_s == forward.compute_s * more
    assert both.timeline.time_s == both.time_s
    assert len(both.timeline.events) == len(forward.timeline.events) + len(backward.timeline.events)
    kinds = [[e for e in both.timeline.events if e.kind == kind] for kind in (ATTEND, DIFFERENTIATE)]
    assert max(e.end_s for e in kinds[0]) <= forward.time_s <= min(e.start_s for e in kinds[1])
    assert max(e.step for e in kinds[0]) < min(e.step for e in kinds[1])
    assert {e.kind for e in both.timeline.events} <= {SEND, ATTEND, DIFFERENTIATE}


@cache
def _passes() -> list[Answer]:
    """A small forward and a backward pass."""
    machine = Machine(full_mesh(2), compute=ComputeRate(100.0))
    found = predict(machine, ["tasp"], Workload(8, heads=1, mask="full"), options=AttentionOptions("both"))
    return [p for p in found if not p.is_sum]


def test_passes_at_different_rates_have_the_rate_at_which_both_take_as_long() -> None:
    forward, backward = _passes()
    (there,) = backward.passes
    slower = there.on(replace(there.machine, compute=ComputeRate(50.0)))
    both = together(forward, replace(backward, passes=(slower,)))
    assert both.compute_s == pytest.approx(forward.compute_s + 2 * backward.compute_s)
    assert both.compute_flops_per_s is not None
    assert both.flops / both.compute_flops_per_s == pytest.approx(2 * both.compute_s)


# Documents


def test_documents_are_the_sequence(tell: Tell) -> None:
    """Under the full mask every position sees its own document."""
    heads = ("--heads", "2", "--head-dim", "16", "--mask", "full")
    row = one(tell, "full-mesh:4", "ring-attention", "--documents", "1000,2x200,4Ki", *heads)
    assert (row["seq"], row["documents"]) == (5496, [1000, 200, 200, 4096])
    assert row["flops"] == 4 * 2 * 16 * (1000**2 + 2 * 200**2 + 4096**2)
    assert row == one(
        tell, "full-mesh:4", "ring-attention", "--documents", "1000,200,200,4096", "--seq", "5496", *heads
    )
    asked = ("predict", "full-mesh:4", "--schedule", "tasp", "--documents", "8x512", "--pass", "backward")
    assert "4096 positions in 8 documents" in tell(*asked)[1]


# What is refused


def test_what_python_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unknown pass 'sideways', expected one of forward, backward, both"):
        AttentionOptions("sideways")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="schedule 'ring' is an AllGather, expected no options of attention"):
        build_schedules("ring", full_mesh(4), 64, options=AttentionOptions("both"))
    with pytest.raises(ScheduleError, match="unknown dataflow 'home', expected one of auto, rotate-kv"):
        AttentionOptions("both", dataflow="home")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="unknown gradient dtype 'int8', expected one of auto, fp32, input"):
        AttentionOptions("backward", gradient_dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="schedule 'ulysses': buffers 4 does not apply to it, expected 3"):
        build_schedules(
            "ulysses", full_mesh(4), Workload(64, heads=4, mask="full"), options=AttentionOptions(buffers=4)
        )


@pytest.mark.parametrize("name", CIRCULATIONS)
def test_schedules_come_in_the_order_in_which_they_run(name: str) -> None:
    for passes, backward in (("forward", [False]), ("backward", [True]), ("both", [False, True])):
        built = build_schedules(
            name, full_mesh(3), Workload(30, heads=1, mask="full"), options=AttentionOptions(passes)
        )  # type: ignore[arg-type]
        assert [schedule.task is not None and schedule.task.passing == "backward" for schedule in built] == backward


# On real processes


def _run(prediction: Answer, *measured: float, busy: float = 0.0) -> Run:
    empty = Timeline("measured", "tasp", "pair", 2, ())
    return Run(prediction, prediction.time_s, measured or (1.0,), empty, busy)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6), st.floats(0, 1))
def test_medians_and_spreads_of_both_passes_add_up(times: list[tuple[float, float]], busy: float) -> None:
    forward, backward = (_run(p, *each, busy=busy) for p, each in zip(_passes(), zip(*times, strict=True), strict=True))
    both = runs_together(forward, backward)
    assert both.measured_s == pytest.approx(sum(statistics.median(run.measured) for run in (forward, backward)))
    assert both.measured_spread_s == pytest.approx(forward.measured_spread_s + backward.measured_spread_s)
    assert both.nominal_s == forward.nominal_s + backward.nominal_s
    assert both.cpu_busy_share == pytest.approx(busy)


@pytest.mark.alone
@pytest.mark.fabric
def test_validate_both_passes_with_timed_compute(command: Command) -> None:
    runs = command.json(
        "validate full-mesh:4 --schedule tasp --seq 1024 --heads 2 --mask causal --pass both "
        "--compute timed:300MFLOP/s --scale 2e-5 --repeat 2 --plot both.svg"
    )["runs"]
    assert [run["pass"] for run in runs] == ["forward", "backward", "both"]
    for run in runs:
        assert set(run) == PREDICTED | MEASURED
        assert (run["compute"], run["compute_flops_per_s"]) == ("timed", 3e8)
        assert run["predicted_s"] == run["time_s"]
        assert run["bound_s"] <= run["nominal_s"] * (1 + 1e-9)
        assert abs(run["relative_error"]) < 0.25
    forward, backward, both = runs
    for key in ("measured_s", "measured_spread_s", "nominal_s", "predicted_s"):
        assert both[key] == pytest.approx(forward[key] + backward[key])
    assert (command.folder / "both.svg").exists()


@pytest.mark.distributed
def test_validate_both_passes_with_real_kernels(command: Command) -> None:
    """Each pass has a rate of its own among what was calibrated."""
    done = command(
        "validate full-mesh:2 --schedule tasp --seq 256 --heads 2 --head-dim 32 --dtype fp32 --mask "
        "causal --fabric local --repeat 1 --pass both --json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["calibration"][1:] == [
        {key: run[key] for key in ("schedule", "pass", "compute_flops_per_s")} for run in document["runs"][:2]
    ]
    assert "kernels of tasp backward: " in done.stderr
    for run in document["runs"]:
        assert run["compute"] == "real"
        assert min(run["measured_s"], run["compute_flops_per_s"]) > 0
