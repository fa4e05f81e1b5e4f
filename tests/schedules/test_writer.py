"""Schedules written step by step: the systems of `experiments/schedules` are proved, and compute what float64 does."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_lab
from sim.simulate import simulate
from tasp_lab.core.choices import Decay
from tasp_lab.core.errors import NoLinkError, ScheduleError
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.schedule.composition import in_chunks
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEYS, QUERIES, RESULTS
from tasp_lab.schedules.build import attention_layout, build_schedules
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.writer import CollectiveWriter, LayerWriter
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.workload.layer import Workload
from tests.conftest import ROOT, Tell
from tests.support.mutations import campaign, is_right_in_orders
from tests.support.numeric_tasks import numbers_of
from tests.support.strategies import linear_layers
from tests.support.world import World

FOLDER = ROOT / "experiments/schedules"
COLLECTIVES, ATTENTION = FOLDER / "collectives.py", FOLDER / "attention.py"
TREE_SCAN = f"{FOLDER}/linear.py:tree-scan"
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
    Workload(48, heads=2, head_dim=8, dtype="fp32", mask="full"),
    Workload(60, heads=2, head_dim=8, dtype="fp32", mask="causal", documents=(13, 30, 17)),
]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("both-ways", "both"),
        ("once-per-node", "both"),
        ("rows-then-columns", "forward"),
        ("tree-decode", "forward"),
        ("chunked-ulysses", "forward"),
    ],
)
def test_attention_is_that_of_float64(name: str, passes: str, layer: Workload) -> None:
    from tests.support.one_device import run_in_process

    options = AttentionOptions(passes)  # type: ignore[arg-type]
    if name == "chunked-ulysses":
        options, layer = replace(options, stages=2), replace(layer, heads=16, kv_heads=8)
    for built in build_schedules(f"{ATTENTION}:{name}", full_mesh(4), layer, options=options):
        run_in_process(built)  # compares results and gradients with the reference


@pytest.mark.parametrize("name", ["half-each-way", f"{ATTENTION}:both-ways"])
def test_half_each_way_sends_half_as_much_on_a_lane_as_a_ring(name: str) -> None:
    (ours,) = build_schedules(name, full_mesh(4), LAYERS[1])
    (ring_of_keys,) = build_schedules("zigzag-ring-attention", full_mesh(4), LAYERS[1])
    own, theirs = (each.bytes_sent().sum(axis=0) for each in (ours, ring_of_keys))
    assert (own.sum(axis=1) == theirs.sum(axis=1)).all()
    assert (own[:, 0] == own[:, 1]).all()


BOTH = AttentionOptions("both")
SCANNED = Workload(67, batch=2, heads=4, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", kind="linear")


@pytest.mark.parametrize("decay", get_args(Decay))
@pytest.mark.parametrize("documents", [None, (13, 30, 24), (1, 1, 62, 3)])
@pytest.mark.parametrize("n", [1, 3, 4, 7, 8])
def test_a_tree_scan_is_that_of_float64(decay: Decay, documents: tuple[int, ...] | None, n: int) -> None:
    from tests.support.one_device import run_in_process

    for built in build_schedules(
        TREE_SCAN, full_mesh(n), replace(SCANNED, decay=decay, documents=documents), options=BOTH
    ):
        run_in_process(built)


@settings(max_examples=20, deadline=None)
@given(linear_layers(), st.integers(1, 9))
def test_a_tree_scan_is_right_in_any_order(layer: Workload, n: int) -> None:
    """By kernels of the tests, in random orders that wait as the dependencies demand; also in groups of heads."""
    if layer.mask == "full":
        with pytest.raises(ScheduleError, match="combines states in their order, expected a causal mask"):
            build_schedules(TREE_SCAN, full_mesh(n), layer)
        return
    for built in build_schedules(TREE_SCAN, full_mesh(n), layer, options=BOTH):
        for schedule in [built, *([in_chunks(built, 2)] if layer.kv_head_count % 2 == 0 else [])]:
            world = World.of(schedule)
            assert is_right_in_orders(world, numbers_of(world), 2)


def test_no_wrong_change_of_a_tree_scan_is_accepted() -> None:
    layer = Workload(6, heads=2, kv_heads=2, head_dim=1, mask="causal", kind="linear", decay="channel")
    for built in build_schedules(TREE_SCAN, full_mesh(4), layer, options=BOTH):
        found = campaign(World.of(built), max_per_kind=4, double=20)
        assert found.survivors == []
        assert found.of(right=False) > 50


@pytest.mark.parametrize("n", [2, 5, 8, 16])
def test_a_tree_scan_takes_a_logarithm_of_rounds(n: int) -> None:
    """In round r all but 2**r ranks send one state and its decays; a chain takes n - 1 rounds, each without decays.

    Unless n is a power of two, what is sent in the last round was there before, and latencies overlap.
    """
    state, total, rounds = 4 * 2 * 2 * 8 * 8, 4 * 2 * 2 * 8, (n - 1).bit_length()
    machine, most_s = Machine(full_mesh(n, B, L), CommLibrary("mine", a)), rounds * (a + (state + total) / B + L)
    layer = replace(SCANNED, decay="channel")
    for built in build_schedules(TREE_SCAN, full_mesh(n, B, L), layer, options=BOTH):
        assert built.bytes_sent().sum() == sum(n - 2**r for r in range(rounds)) * (state + total)
        time_s = simulate(built, machine, "simpy").time_s
        assert time_s == most_s if n.bit_count() == 1 else time_s < most_s
        assert simulate(built, machine, "array").time_s == pytest.approx(float(time_s), rel=1e-9)
    for chain in build_schedules("lasp", full_mesh(n, B, L), layer, options=BOTH):
        assert simulate(chain, machine).time_s == (n - 1) * (a + state / B + L)


def test_a_combination_costs_what_two_steps_of_a_chain_do() -> None:
    """Two states are read and one is written, as by ``advance``: one product each of a state for both operands."""
    flops = {}
    for name, kernel in (("lasp", "advance"), (TREE_SCAN, "combine")):
        (built,) = build_schedules(name, full_mesh(4), SCANNED)
        assert built.task is not None
        calls = [each for step in built.steps for each in step.calls if each.kernel == kernel]
        flops[kernel] = {int(each) for call in calls for each in built.task.flops(call)}
    assert max(flops["advance"]) == 2 * 2 * 2 * 2 * 8 * 8  # two states of two heads and a batch of two
    assert flops["combine"] == {max(flops["advance"])}


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
        tasp_lab.predict("bidirectional-ring:4", f"{COLLECTIVES}:halving", 64, routes="direct")


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


def test_calls_stay_in_the_order_in_which_they_are_written() -> None:
    """Tiles of a step are looked up together, but a rank computes in the order of its lines."""
    layer = Workload(64, heads=2, mask="full")
    task = span_task(layer, attention_layout("ring-attention", layer, 2), "bf16")
    writer = LayerWriter("mixed", full_mesh(2), task, dict.fromkeys((KEYS, QUERIES, RESULTS)))
    with writer.step():
        for rank, mate in ((0, 1), (1, 0)):
            writer.send(writer.keys(rank), rank, to=mate, keep=True)
    (query,), (own,), (other,) = writer.queries(0), writer.keys(0), writer.keys(1)
    with writer.step():
        writer.attend(1, writer.queries(1), [other])
        writer.attend(0, [query], [own])
        writer.call(task.kernel, 0, [query], [other], params=[int(each[0]) for each in task.tile_bands(
            np.array([query]), np.array([other]))])  # fmt: skip
        writer.attend(1, writer.queries(1), [own])
    schedule = writer.schedule()
    (calls,) = schedule.steps[1].calls
    assert [(rank, operands[1]) for rank, operands, _ in calls.rows()] == [
        (1, [other]), (0, [own]), (0, [other]), (1, [own]),
    ]  # fmt: skip
