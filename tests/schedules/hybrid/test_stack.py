"""Stacks of linear and softmax layers: their bytes and FLOPs, their numbers, and what the proof refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.composition import stacked
from tasp_lab.schedule.composition.layers import LayerTask
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout, attention_schedules, hybrid_schedules, linear_schedules
from tasp_lab.schedules.hybrid.relayout import RelayoutTask, relayout
from tasp_lab.schedules.hybrid.stack import layers_of, relayout_bytes
from tasp_lab.schedules.linear.task import chunk_layout
from tasp_lab.schedules.registry import names_of, options_of
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, contiguous, zigzag
from tests.support.mutations import campaign
from tests.support.routes import direct
from tests.support.strategies import hybrid_layers
from tests.support.world import World

LINEAR = ("lasp", "lasp-2", "all-scan", "direct-lasp-2", "ring-linear-attention")
SOFTMAX = (
    *("ring-attention", "zigzag-ring-attention", "striped-ring-attention", "tasp", "ulysses"),
    *("kv-all-gather", "zigzag-token-ring", "direct-attention"),
)

EVERY_LINEAR = st.sampled_from(LINEAR)
EVERY_SOFTMAX = st.sampled_from(SOFTMAX)


def schedules_of(
    linear: str, softmax: str, n: int, layer: Workload, **options: Any
) -> dict[str, tuple[Schedule, ...]] | None:
    """Both passes of the stack, and of one layer of each kind; None if one of these does not apply by itself."""
    mesh, asked = full_mesh(n), AttentionOptions("both", **options)
    try:
        alone = {
            "L": linear_schedules(linear, mesh, layer.of("L"), None, asked),
            "S": attention_schedules(softmax, mesh, layer.of("S"), None, asked),
        }
    except ScheduleError as error:
        if not any(each in str(error) for each in ("expected a causal mask", "expected none or head")):
            raise
        return None
    return alone | {"stack": hybrid_schedules(f"{linear}+{softmax}", mesh, layer, None, asked)}


def owners(layout: SequenceLayout) -> list[int]:
    """The rank of each position."""
    found = np.full(layout.sequence, -1)
    for rank in range(layout.world_size):
        found[layout.positions(rank)] = rank
    return found.tolist()


def moving_positions(linear: str, softmax: str, n: int, layer: Workload) -> int:
    """The positions that change their rank between a linear and a softmax layer."""
    layouts = chunk_layout(layer.of("L"), n), attention_layout(softmax, layer.of("S"), full_mesh(n))
    return sum(a != b for a, b in zip(*map(owners, layouts), strict=True))


@given(EVERY_LINEAR, EVERY_SOFTMAX, st.sampled_from([1, 2, 3, 8]), hybrid_layers())
@settings(max_examples=60, deadline=None)
def test_a_stack_sends_and_computes_what_its_layers_and_re_layouts_do(
    linear: str, softmax: str, n: int, layer: Workload
) -> None:
    """A re-layout sends the hidden state of each position whose rank changes, and computes nothing."""
    found = schedules_of(linear, softmax, n, layer)
    if found is None:
        return
    changes = sum(a != b for a, b in pairwise(layer.layers))
    position_bytes = layer.batch * layer.heads * layer.head_dim * 2
    moved_bytes = changes * moving_positions(linear, softmax, n, layer) * position_bytes
    for backward, schedule in enumerate(found["stack"]):
        layers = [found[letter][backward] for letter in layer.layers]
        assert schedule.name == f"{linear}+{softmax}"
        assert relayout_bytes(schedule) == moved_bytes
        assert int(schedule.bytes_sent().sum()) == sum(int(each.bytes_sent().sum()) for each in layers) + moved_bytes
        assert (schedule.flops().sum(axis=0) == sum(each.flops().sum(axis=0) for each in layers)).all()
        order = layer.layers[:: -1 if backward else 1]
        tasks = [task for task, _ in layers_of(schedule)]
        assert [task.workload for task in tasks] == [layer.of(letter) for letter in order]
        assert [task.passing for task in tasks] == [("forward", "backward")[backward]] * len(order)


@given(EVERY_LINEAR, EVERY_SOFTMAX, st.sampled_from([2, 3]), hybrid_layers())
@settings(max_examples=20, deadline=None)
def test_each_layer_begins_where_the_one_before_ends(linear: str, softmax: str, n: int, layer: Workload) -> None:
    """The passes begin and end in the layouts of the first and the last layer."""
    found = schedules_of(linear, softmax, n, layer)
    if found is None:
        return
    layouts = {"L": chunk_layout(layer.of("L"), n), "S": attention_layout(softmax, layer.of("S"), full_mesh(n))}
    for schedule, order in zip(found["stack"], (layer.layers, layer.layers[::-1]), strict=True):
        task = schedule.task
        tasks = task.layers if isinstance(task, StackedTask) else (task,)
        for before, after in pairwise(tasks):
            assert isinstance(before, LayerTask)
            assert isinstance(after, LayerTask)
            assert owners(before.result_layout) == owners(after.layout)
            assert not (isinstance(before, RelayoutTask) and isinstance(after, RelayoutTask))
        for task, letter in ((tasks[0], order[0]), (tasks[-1], order[-1])):
            assert isinstance(task, LayerTask)
            assert owners(task.layout) == owners(layouts[letter])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["lasp-2+zigzag-ring-attention", "lasp+ulysses"])
def test_no_wrong_change_of_a_stack_is_accepted(name: str, backward: bool) -> None:
    layer = Workload(6, heads=2, head_dim=1, mask="causal", kind="hybrid", layers="LS", decay="scalar")
    schedule = hybrid_schedules(name, full_mesh(2), layer, None, AttentionOptions("both"))[backward]
    found = campaign(World.of(schedule), max_per_kind=3, double=20)
    assert found.survivors == []
    assert found.of(right=False) > 50


def test_calls_of_one_name_reach_the_right_layer() -> None:
    """``attend`` is a kernel of both kinds; each call adds to results of the layer whose queries it reads."""
    layer = Workload(8, heads=2, head_dim=1, mask="causal", kind="hybrid", layers="LS")
    (schedule,) = hybrid_schedules("lasp-2+ulysses", full_mesh(2), layer)
    task = schedule.task
    assert isinstance(task, StackedTask)
    seen = set()
    for calls in (each for step in schedule.steps for each in step.calls if each.kernel == "attend"):
        read = task.layer_of(calls.operands[0].first)
        effects = task.effects(calls)
        assert (task.layer_of(effects.block) == read[effects.call]).all()
        seen |= set(read.tolist())
    assert seen == {0, 1}


def test_forward_and_backward_passes_are_a_training_step() -> None:
    """Re-layouts and linear layers stand in it as softmax layers do, and what is saved of the forward pass is used."""
    layer = Workload(24, heads=4, head_dim=2, mask="causal", kind="hybrid", layers="LSL", decay="head")
    mesh, both = full_mesh(3), AttentionOptions("both", dataflow="rotate-kv")
    passes = hybrid_schedules("lasp-2+zigzag-ring-attention", mesh, layer, None, both)
    linear = linear_schedules("lasp-2", mesh, layer.of("L"), None, AttentionOptions("both"))
    softmax = attention_schedules("zigzag-ring-attention", mesh, layer.of("S"), None, both)
    to_zigzag = relayout(mesh, layer, contiguous(24, 3), zigzag(24, 3), "both")
    back = relayout(mesh, layer, zigzag(24, 3), contiguous(24, 3), "both")
    parts = [linear, to_zigzag, softmax, back, linear]
    step = stacked([each[0] for each in parts] + [each[1] for each in reversed(parts)], dense_flops=7)
    sent = sum(int(each.bytes_sent().sum()) for pair in parts for each in pair)
    assert int(step.bytes_sent().sum()) == sent
    assert sent == sum(int(each.bytes_sent().sum()) for each in passes)
    flops = sum(each.flops().sum(axis=0) for pair in parts for each in pair)
    assert (step.flops().sum(axis=0) == flops + 2 * 7).all(), "a call before each forward layer but the first"


def test_options_apply_to_the_layers_that_know_them() -> None:
    layer = Workload(64, heads=8, kv_heads=8, head_dim=2, mask="causal", kind="hybrid", layers="LS")
    mesh = full_mesh(4)
    found = hybrid_schedules("all-scan+zigzag-ring-attention", mesh, layer, None, AttentionOptions(pieces=4, buffers=5))
    tasks = [task for task, _ in layers_of(found[0])]
    assert tasks[0].pieces == 4  # type: ignore[attr-defined]
    assert {pool.buffers for pool in found[0].blocks.pools} == {5}
    assert options_of("all-scan+ulysses") == ("pieces", "gradient_dtype", "result_dtype", "padded_heads")
    with pytest.raises(ScheduleError, match=r"schedule 'lasp-2\+ulysses': buffers 5 does not apply to it, expected 3"):
        hybrid_schedules("lasp-2+ulysses", mesh, layer, None, AttentionOptions(buffers=5))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tasp", "schedule 'tasp', expected one for a hybrid: LINEAR.SOFTMAX, such as lasp-2.kv-all-gather"),
        ("", "schedule '', expected one for a hybrid"),
        ("lasp-2+", r"schedule 'lasp-2\+', expected one for a hybrid"),
        ("+tasp", r"schedule '\+tasp', expected one for a hybrid"),
        ("lasp+tasp+tasp", r"schedule 'lasp\+tasp\+tasp', expected one for a hybrid"),
        ("tasp+lasp", r"schedule 'tasp\+lasp': schedule 'tasp' is for softmax attention, expected one for linear"),
        ("lasp-2+lasp", r"schedule 'lasp-2\+lasp': schedule 'lasp' is for linear attention, expected one for softmax"),
        ("lasp-2+tsp", r"schedule 'lasp-2\+tsp': unknown schedule 'tsp', did you mean 'tasp'"),
        ("ring+tasp", r"schedule 'ring\+tasp': schedule 'ring' is an AllGather, expected one for linear"),
        ("lasp-2+usp", r"schedule 'lasp-2\+usp': schedule 'usp': expected usp:UxR"),
    ],
)
def test_names_of_another_form_are_refused(name: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        names_of(name)


def test_what_cannot_be_stacked_is_refused() -> None:
    layer = Workload(64, heads=8, head_dim=2, mask="causal", kind="hybrid", layers="LS")
    with pytest.raises(ScheduleError, match="a layer of softmax attention, expected a hybrid"):
        hybrid_schedules("lasp-2+tasp", full_mesh(4), layer.of("S"))
    with pytest.raises(ScheduleError, match=r"schedule 'usp:3x3' is for 9 ranks, expected a split of 4"):
        hybrid_schedules("lasp-2+usp:3x3", full_mesh(4), layer)
    with pytest.raises(ScheduleError, match=r"^schedule 'lasp-2\+tasp': schedule 'relayout', .* but ring:4 has no"):
        hybrid_schedules("lasp-2+tasp", direct(ring(4)), layer)
    with pytest.raises(ScheduleError, match="schedule 'lasp' passes states from chunk to chunk, expected a causal"):
        hybrid_schedules("lasp+tasp", full_mesh(4), replace(layer, mask="full"))
