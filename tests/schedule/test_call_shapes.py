"""The shapes of calls: what a task says of each call, each distinct one once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.host import busy_s
from tasp_lab.core.choices import Pass
from tasp_lab.machines.machine import ComputeRate
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.dependencies import call_shapes, dependencies, shapes_by_rank
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, hybrid_schedules, linear_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.strategies import attention_layers
from tests.support.systems import attention_names_on, names_for

PASSES: Sequence[Pass] = ("forward", "backward")
MESH = full_mesh(4)
HYBRID = Workload(
    96, heads=4, head_dim=4, kv_heads=2, mask="causal", kind="hybrid", layers="LS", decay="scalar", value_dim=3
)


# Blocks that skip a document which others have: layers in which tiles turned out to have no pair.
SKIPPING = Workload(20, batch=1, heads=1, kv_heads=1, head_dim=1, mask="causal", documents=(6, 1, 13))
BETWEEN = Workload(9, batch=1, heads=1, kv_heads=1, head_dim=1, mask="full", documents=(1, 1, 7))


def calls_of(schedule: Schedule) -> Sequence[Calls]:
    return [each for step in schedule.steps for each in step.calls if len(each)]


@given(st.data(), attention_layers())
def test_softmax_calls_have_the_pairs_of_their_band(data: st.DataObject, layer: Workload) -> None:
    """FLOPs are two products forward and five backward, of all pairs in the band of the shape, over its heads."""
    check_pairs(data.draw(names_for(layer, 4)), data.draw(st.sampled_from(PASSES)), layer)


@pytest.mark.parametrize("name", attention_names_on(4))
@pytest.mark.parametrize("layer", [SKIPPING, BETWEEN])
def test_blocks_may_lack_documents_between_those_they_have(name: str, layer: Workload) -> None:
    """Then a tile of them has no pair, though one begins before the other ends."""
    for passing in PASSES:
        check_pairs(name, passing, replace(layer, heads=4, kv_heads=4))


def check_pairs(name: str, passing: Pass, layer: Workload) -> None:
    for schedule in attention_schedules(name, MESH, layer, options=AttentionOptions(passing)):
        for shape in call_shapes(schedule.task, calls_of(schedule)).distinct:
            of_keys, of_values = {"forward": (1, 1), "backward": (3, 2)}[shape.passing]
            lengths = of_keys * layer.head_dim + of_values * layer.value_size
            assert shape.flops == 2 * lengths * shape.pairs * shape.batch * shape.heads
            assert (shape.head_dim, shape.value_size) == (layer.head_dim, layer.value_size)
            assert shape.heads % shape.kv_heads == 0
            assert (shape.kind, shape.dtype) == ("softmax", layer.dtype)


@pytest.mark.parametrize("name", ["lasp-2+ring-attention", "all-scan+tasp", "lasp+ulysses"])
@pytest.mark.parametrize("passes", PASSES)
def test_each_shape_is_there_once_and_every_call_has_its_own(name: str, passes: Pass) -> None:
    (schedule,) = hybrid_schedules(name, MESH, HYBRID, options=AttentionOptions(passes))
    assert schedule.task is not None
    shapes, number, flops = call_shapes(schedule.task, calls_of(schedule))
    assert len(set(shapes)) == len(shapes) < len(number)
    assert {shape.kind for shape in shapes} == {"linear", "softmax", "dense"}
    expected = np.concatenate([schedule.task.flops(each) for each in calls_of(schedule)])
    assert flops.tolist() == expected.tolist() == [shapes[each].flops for each in number]
    kernels = [each.kernel for each in calls_of(schedule) for _ in range(len(each))]
    assert kernels == [shapes[each].kernel for each in number]
    assert all(shape.passing == schedule.task.kernels[shape.kernel] for shape in shapes)


def test_linear_calls_say_which_positions_they_read() -> None:
    """Four chunks of 24 positions: what makes a state reads keys only, what applies one queries only."""
    (schedule,) = linear_schedules("lasp-2", MESH, HYBRID.of("L"))
    shapes = {shape.kernel: shape for shape in call_shapes(schedule.task, calls_of(schedule)).distinct}
    positions = {kernel: (shape.queries, shape.keys) for kernel, shape in shapes.items()}
    assert positions == {"make_state": (0, 24), "attend": (24, 24), "apply_state": (24, 0), "fold": (0, 0)}
    assert (shapes["attend"].low, shapes["attend"].high) == (0, 23)


def test_calls_of_a_ring_under_a_causal_mask() -> None:
    """Contiguous shards of 6 positions: the diagonal is a band, all that comes before it is seen in full."""
    layer = Workload(24, heads=2, head_dim=3, kv_heads=1, mask="causal")
    (schedule,) = attention_schedules("ring-attention", MESH, layer)
    shapes = call_shapes(schedule.task, calls_of(schedule)).distinct
    assert {(s.queries, s.keys, s.low, s.high, s.heads, s.kv_heads) for s in shapes} == {
        (6, 6, 0, 5, 2, 1), (6, 6, -5, 5, 2, 1)
    }  # fmt: skip


@given(st.data(), attention_layers())
def test_ranks_are_busy_with_their_own_calls(data: st.DataObject, layer: Workload) -> None:
    name = data.draw(names_for(layer, 4))
    (schedule,) = attention_schedules(name, MESH, layer)
    flops = schedule.flops().sum(axis=0)
    assert [sum(shape.flops * n for shape, n in rank.items()) for rank in shapes_by_rank(schedule)] == flops.tolist()
    assert busy_s(schedule, ComputeRate(Fraction(7))) == [Fraction(each, 7) for each in flops.tolist()]


def test_many_calls_have_few_shapes() -> None:
    (schedule,) = attention_schedules(
        "ring-attention", full_mesh(64), Workload(64 * 64, heads=1, head_dim=1, mask="full")
    )
    calls = dependencies(schedule).calls
    assert (len(calls.shape), len(calls.shapes)) == (64 * 64, 1)
