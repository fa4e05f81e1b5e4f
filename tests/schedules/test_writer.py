"""Schedules written step by step: the systems of `experiments/schedules` are proved, and compute what float64 does."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import tasp_lab
from sim.simulate import simulate
from tasp_lab.core.errors import NoLinkError, ScheduleError
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.for_work import build_schedules
from tasp_lab.schedules.writer import CollectiveWriter
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.workload.layer import Workload
from tests.conftest import ROOT, Tell

FOLDER = ROOT / "experiments/schedules"
COLLECTIVES, ATTENTION = FOLDER / "collectives.py", FOLDER / "attention.py"
S, B, L, a = 60, Fraction(5), Fraction(7), Fraction(1)


def test_the_same_steps_as_arrays() -> None:
    n = 5
    writer = CollectiveWriter("ring", "AllGather", full_mesh(n), 64)
    for hop in range(n - 1):
        with writer.step():
            for rank in range(n):
                writer.send((rank - hop) % n, rank, to=(rank + 1) % n)
    mine, arrays = writer.schedule(), ring_all_gather(full_mesh(n), 64)
    assert [sorted(step.rows()) for step in mine.steps] == [sorted(step.rows()) for step in arrays.steps]


@pytest.mark.parametrize(
    ("name", "time_s"),
    [
        # One lane and a link per pair; a sum waits for what it adds (how_it_works.md), copies overlap their latencies.
        ("halving", 4 * S / B + 2 * S / B + S / B + 3 * (a + L)),
        ("bruck", None),
        ("doubling", None),
    ],
)
def test_collectives_take_what_their_papers_state(name: str, time_s: Fraction | None) -> None:
    """n - 1 shards are sent by each rank in the fewest steps; sums wait for each other, so their time is a sum."""
    (built,) = build_schedules(f"{COLLECTIVES}:{name}", full_mesh(8, B, L), S)
    assert len(built.steps) == 3
    assert (built.bytes_sent().sum(axis=(0, 2)) == 7 * S).all()
    if time_s is not None:
        assert simulate(built, Machine(full_mesh(8, B, L), CommLibrary("mine", a))).time_s == time_s


LAYERS = [
    Workload(67, heads=4, kv_heads=2, head_dim=8, dtype="fp32", mask="causal"),
    Workload(48, heads=2, head_dim=8, dtype="fp32"),
    Workload(60, heads=2, head_dim=8, dtype="fp32", mask="causal", documents=(13, 30, 17)),
]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("half-each-way", "both"),
        ("startrail:2x2", "forward"),
        ("tree-decode", "forward"),
        ("chunked-ulysses", "forward"),
    ],
)
def test_attention_is_that_of_float64(name: str, passes: str, layer: Workload) -> None:
    from runtime.trials.in_process import run_in_process

    options = AttentionOptions(passes)  # type: ignore[arg-type]
    if name == "chunked-ulysses":
        options, layer = replace(options, stages=2), replace(layer, heads=16, kv_heads=8)
    for built in build_schedules(f"{ATTENTION}:{name}", full_mesh(4), layer, options=options):
        run_in_process(built)  # compares results and gradients with the reference


def test_half_each_way_sends_half_as_much_on_a_lane_as_a_ring() -> None:
    (ours,) = build_schedules(f"{ATTENTION}:half-each-way", full_mesh(4), LAYERS[1])
    (ring_of_keys,) = build_schedules("zigzag-ring-attention", full_mesh(4), LAYERS[1])
    own, theirs = (each.bytes_sent().sum(axis=0) for each in (ours, ring_of_keys))
    assert (own.sum(axis=1) == theirs.sum(axis=1)).all()
    assert (own[:, 0] == own[:, 1]).all()


def test_an_error_of_the_proof_names_the_line_that_wrote_it(tmp_path: Path, tell: Tell) -> None:
    text = COLLECTIVES.read_text().replace("to=(rank - distance) % n", "to=(rank + distance) % n")
    (tmp_path / "mine.py").write_text(text)
    line = 1 + text[: text.index("to=(rank + distance)")].count("\n")
    code, out, err = tell("predict", "full-mesh:4", "--schedule", f"{tmp_path}/mine.py:bruck", "--shard-bytes", "64")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(rf"mine.py:bruck', line {line}: step 1: rank \d sends block \d", err), err
    with pytest.raises(
        ScheduleError, match=r", line \d+: step 0: rank \d sends to rank \d, but bidirectional-ring:4 has no such link"
    ):
        tasp_lab.predict("bidirectional-ring:4", f"{COLLECTIVES}:halving", 64)


def test_what_is_written_outside_of_a_step_is_refused() -> None:
    writer = CollectiveWriter("mine", "AllGather", ring(4), 64)
    with pytest.raises(ScheduleError, match=r"'mine': a transfer or call outside of a step, expected with \.step\(\):"):
        writer.send(0, 0, to=1)
    with writer.step():
        writer.send(np.int64(0), 0, to=2)
        with pytest.raises(ScheduleError, match="'mine': a step within step 0"), writer.step():
            pass
    with pytest.raises(ScheduleError, match="is AllToAll, expected one of AllGather, ReduceScatter, AllReduce"):
        CollectiveWriter("mine", "AllToAll", ring(4), 64)
    with pytest.raises((ScheduleError, NoLinkError)):
        writer.schedule()
