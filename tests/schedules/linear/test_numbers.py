"""The kernels of the tests of linear attention, wrong changes of its schedules, and its passes in chunks and stacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

from tasp_lab.schedule.composition import in_chunks, stacked
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import linear_schedules
from tasp_lab.schedules.registry import LINEAR
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.mutations import campaign, is_right_in_orders
from tests.support.numeric_linear import differentiate, outputs, run
from tests.support.numeric_tasks import numbers_of
from tests.support.strategies import linear_layers
from tests.support.world import World


def schedules_of(name: str, n: int, layer: Workload, **options: Any) -> list[World]:
    """Both passes."""
    decays = (0.5, 1.0, 0.8, 0.25)[: layer.kv_head_count] if layer.decay == "head" else ()
    found = linear_schedules(name, full_mesh(n), layer, None, AttentionOptions("both", **options), decays)
    return [World.of(each) for each in found]


@settings(max_examples=10, deadline=None)
@given(linear_layers(6))
def test_the_gradients_of_the_recurrence_are_its_differences(layer: Workload) -> None:
    """What all kernels of the tests are made of, against central differences of a random functional of the outputs."""
    assume(layer.mask == "causal")
    random, size = np.random.default_rng(0), layer.head_dim
    shapes = [(layer.sequence, heads, size) for heads in (4, layer.kv_head_count, layer.kv_head_count)]
    q, k, v = (random.normal(size=shape) for shape in shapes)
    a, dout = random.uniform(0.3, 1.0, size=k.shape), random.normal(size=q.shape)
    state, behind = random.normal(size=(2, layer.kv_head_count, size, size))

    def value(a: Any, q: Any, k: Any, v: Any, state: Any) -> float:
        states = run(a, k, v, state)
        return float((outputs(q, states) * dout).sum() + (states[-1] * behind).sum())

    found = differentiate(a, q, k, v, state, dout, behind)
    for at, gradient in enumerate((found.a, found.q, found.k, found.v, found.state)):
        for index in list(np.ndindex(gradient.shape))[:6]:
            changed = [[each.copy() for each in (a, q, k, v, state)] for _ in range(2)]
            for sign, each in zip((1, -1), changed, strict=True):
                each[at][index] += sign * 1e-6
            difference = (value(*changed[0]) - value(*changed[1])) / 2e-6
            assert gradient[index] == pytest.approx(difference, abs=1e-6)


SMALL = Workload(6, heads=2, kv_heads=1, head_dim=1, mask="causal", kind="linear", decay="head")


@pytest.mark.parametrize("name", ["lasp", "lasp-2", "all-scan", "ring-linear-attention"])
@pytest.mark.parametrize("backward", [False, True])
def test_no_wrong_change_of_a_schedule_is_accepted(name: str, backward: bool) -> None:
    layer = Workload(6, heads=2, kv_heads=2, head_dim=1, mask="causal", kind="linear", decay="channel")
    if name.startswith("ring"):
        layer = SMALL
    options = {"pieces": 2} if name == "all-scan" else {}
    world = schedules_of(name, 3, layer, **options)[backward]
    found = campaign(world, max_per_kind=4, double=20)
    assert found.survivors == []
    assert found.of(right=False) > 50


def test_layers_in_chunks_and_stacks_of_both_passes_are_right() -> None:
    layer = Workload(7, heads=2, head_dim=2, mask="causal", kind="linear", decay="scalar", documents=(3, 4))
    for name in ("lasp", "lasp-2"):
        for schedule in linear_schedules(name, full_mesh(3), layer, None, AttentionOptions("both")):
            world = World.of(in_chunks(schedule, 2))
            assert is_right_in_orders(world, numbers_of(world), 2)


@pytest.mark.parametrize("name", LINEAR)
def test_a_backward_pass_starts_with_what_its_forward_pass_left(name: str) -> None:
    decay = "none" if name.startswith("ring") else "channel"
    layer = Workload(16, heads=4, head_dim=2, mask="causal", kind="linear", decay=decay)
    forward, backward = linear_schedules(name, full_mesh(4), layer, None, AttentionOptions("both"))
    assert forward.task is not None
    assert backward.task is not None
    own, same = backward.task.saved(forward.task)  # type: ignore[attr-defined]
    left = forward.final | forward.initial
    if forward.kept is not None:
        left = left | forward.kept
    known = backward.task.contract.inputs(4)
    known[:, own] |= left[:, same]
    assert not (backward.initial & ~known).any()
    assert stacked([forward, forward, backward, backward]).transfers == 2 * (forward.transfers + backward.transfers)
