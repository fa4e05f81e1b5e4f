"""Moving hidden states between layouts: what is sent, where it ends, how long it takes, and what the proof refuses."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.simulate import simulate
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoLinkError, ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.composition.layers import LayerTask
from tasp_lab.schedule.rank_part import rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.hybrid.relayout import RelayoutTask, moved, relayout
from tasp_lab.topology.builders import full_mesh, ring, switch
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, contiguous, striped, zigzag
from tests.support.layouts import LAYOUTS
from tests.support.mutations import campaign
from tests.support.routes import direct
from tests.support.world import World

LAYER = Workload(40, batch=2, heads=3, kv_heads=1, head_dim=8, mask="causal", dtype="bf16")
POSITION_BYTES = 2 * 3 * 8 * 2


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[SequenceLayout, SequenceLayout]:
    """Two layouts of one sequence: any lengths, ranks and documents, and ranks in another order."""
    world_size, sequence = draw(st.integers(1, 9)), draw(st.integers(1, 60))
    cuts = sorted(draw(st.lists(st.integers(0, sequence), max_size=4)))
    lengths = tuple(np.diff([0, *cuts, sequence]).tolist())
    found = []
    for _ in range(2):
        documents = draw(st.sampled_from([None, lengths]))
        layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](sequence, world_size, documents)
        found.append(layout.on_ranks(np.array(draw(st.permutations(range(world_size))))))
    return found[0], found[1]


def owners(layout: SequenceLayout) -> IntArray:
    """The rank of each position."""
    found = np.full(layout.sequence, -1)
    for rank in range(layout.world_size):
        found[layout.positions(rank)] = rank
    return found


def both(before: SequenceLayout, after: SequenceLayout, **fields: Any) -> tuple[Schedule, ...]:
    layer = replace(LAYER, sequence=before.sequence, **fields)
    return relayout(full_mesh(before.world_size), layer, before, after, "both")


@given(layout_pairs())
def test_each_position_with_another_owner_is_sent_once(layouts: tuple[SequenceLayout, SequenceLayout]) -> None:
    """From its owner before straight to its owner after; nothing else is sent. Backward it is the opposite."""
    before, after = (owners(each) for each in layouts)
    n = layouts[0].world_size
    expected = np.zeros((n, n), dtype=np.int64)
    np.add.at(expected, (before, after), POSITION_BYTES)
    forward, backward = both(*layouts)
    for schedule, wanted in ((forward, expected), (backward, expected.T)):
        sent = np.zeros((n, n), dtype=np.int64)
        for step in schedule.steps:
            np.add.at(sent, (step.source, step.destination), schedule.block_bytes[step.block])
        assert (sent == wanted - np.diag(np.diag(wanted))).all()
        assert len(schedule.steps) == bool(sent.any())
        assert schedule.transfers == np.count_nonzero(sent)
    assert forward.bytes_sent().sum() == np.count_nonzero(before != after) * POSITION_BYTES


@given(layout_pairs())
def test_blocks_are_the_positions_of_a_pair_of_ranks(layouts: tuple[SequenceLayout, SequenceLayout]) -> None:
    before, after = (owners(each) for each in layouts)
    for schedule, first, last in zip(both(*layouts), (before, after), (after, before), strict=True):
        task = schedule.task
        assert isinstance(task, RelayoutTask)
        assert isinstance(task, LayerTask)
        seen = []
        for block in range(len(schedule.blocks)):
            positions = task.positions(block)
            assert (np.diff(positions) > 0).all()
            assert set(first[positions]) == {task.source[block]} == set(np.flatnonzero(schedule.initial[:, block]))
            assert set(last[positions]) == {task.destination[block]} == set(np.flatnonzero(schedule.final[:, block]))
            assert schedule.block_bytes[block] == len(positions) * POSITION_BYTES
            seen += positions.tolist()
        assert sorted(seen) == list(range(layouts[0].sequence))
        assert len(set(zip(task.source.tolist(), task.destination.tolist(), strict=True))) == len(schedule.blocks)
        assert (task.contract.inputs(schedule.world_size) == schedule.initial).all()
        assert not schedule.flops().any()


@pytest.mark.parametrize("build", LAYOUTS.values())
@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_layouts_send_nothing(build: Any, n: int) -> None:
    for schedule in both(build(17, n), build(17, n)):
        assert (len(schedule.steps), schedule.transfers) == (0, 0)
        assert simulate(schedule, Machine(full_mesh(n))).time_s == 0


def test_the_passes_are_those_asked_for() -> None:
    mesh, layouts = full_mesh(4), (contiguous(40, 4), zigzag(40, 4))
    forward, backward = both(*layouts)
    for passes, expected in (("forward", [forward]), ("backward", [backward]), ("both", [forward, backward])):
        found = relayout(mesh, LAYER, *layouts, passes)  # type: ignore[arg-type]
        assert [each.digest for each in found] == [each.digest for each in expected]
    tasks = [each.task for each in (forward, backward)]
    assert [each and each.passing for each in tasks] == ["forward", "backward"]
    for task, ends in zip(tasks, (layouts, layouts[::-1]), strict=True):
        assert isinstance(task, RelayoutTask)
        assert (task.layout, task.result_layout) == ends
    assert backward.digest != relayout(mesh, LAYER, *layouts[::-1])[0].digest


def test_the_bytes_are_those_of_the_hidden_states() -> None:
    """Batch, query heads and dtype count; KV heads, mask and kind do not."""
    layouts = contiguous(40, 4), striped(40, 4)
    one = both(*layouts)[0].bytes_sent().sum()
    for fields, factor in (
        ({"batch": 6}, 3),
        ({"heads": 6}, 2),
        ({"dtype": "fp32"}, 2),
        ({"kv_heads": 3}, 1),
        ({"kind": "linear", "decay": "channel"}, 1),
        ({"window": 3}, 1),
    ):
        assert both(*layouts, **fields)[0].bytes_sent().sum() == factor * one


@pytest.mark.parametrize("engine", ["simpy", "array"])
@pytest.mark.parametrize("n", [4, 6, 8])
def test_times_on_a_mesh_and_behind_a_switch(n: int, engine: Any) -> None:
    """From contiguous to zigzag each rank gets two chunks of 2n, from different ranks if they move.

    On a mesh every chunk has a link of its own; behind a switch two share the port of a rank.
    """
    chunk = 5 * POSITION_BYTES
    bandwidth, latency = Fraction(1000), Fraction(1, 7)
    for schedule in both(contiguous(10 * n, n), zigzag(10 * n, n)):
        for build, chunks in ((full_mesh, 1), (switch, 2)):
            found = simulate(schedule, Machine(build(n, bandwidth, latency)), engine).time_s
            assert found == pytest.approx(chunks * chunk / bandwidth + latency, rel=1e-12)


def test_a_rank_has_room_for_what_it_sends_and_receives() -> None:
    (schedule,) = relayout(full_mesh(4), LAYER, contiguous(40, 4), zigzag(40, 4))
    for rank in range(4):
        touched = schedule.initial[rank] | schedule.final[rank]
        assert rank_part(schedule, rank).memory_bytes == schedule.block_bytes[touched].sum()


@pytest.mark.parametrize("after", [zigzag, striped])
def test_wrong_changes_are_refused(after: Any) -> None:
    """Of all single changes, and some double ones, that end with wrong numbers none is accepted."""
    for schedule in both(contiguous(11, 3), after(11, 3)):
        found = campaign(World.of(schedule), double=50)
        assert not found.survivors
        assert found.of(right=False, accepted=False) > 100


def test_what_does_not_fit_is_refused() -> None:
    mesh, layout = full_mesh(4), contiguous(40, 4)
    for topology, layouts, expected in (
        (mesh, (layout, zigzag(41, 4)), "the zigzag layout has 41 positions, expected the 40 of the workload"),
        (mesh, (layout, zigzag(40, 3)), "from 4 ranks (contiguous) to 3 (zigzag), expected equally many"),
        (full_mesh(5), (layout, zigzag(40, 4)), "is for 4 ranks, full-mesh:5 has 5"),
    ):
        with pytest.raises(ScheduleError, match=expected.replace("(", r"\(").replace(")", r"\)")):
            relayout(topology, LAYER, *layouts)
    with pytest.raises(NoLinkError):
        relayout(direct(ring(4)), LAYER, layout, striped(40, 4))
    task = RelayoutTask(LAYER, layout, zigzag(40, 4))
    with pytest.raises(ScheduleError, match="attend of a RelayoutTask, which computes nothing"):
        task.effects(Calls.of("attend", [(0, [[0]], [])]))
    with pytest.raises(ScheduleError, match="blocks, expected"):
        task.check(Blocks.of_data(np.array([1])))


def test_large_worlds() -> None:
    """Counts need no list of positions, and too many blocks are refused before any memory is taken."""
    long = 2**31
    assert moved(contiguous(long, 64), striped(long, 64)).tolist() == [[long // 64**2] * 64] * 64
    with pytest.raises(ScheduleError, match="too many to replay"):
        relayout(full_mesh(2), replace(LAYER, sequence=2**20), contiguous(2**20, 1100), striped(2**20, 1100))
