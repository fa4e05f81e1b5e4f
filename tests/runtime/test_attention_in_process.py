"""Real attention by the executor on drawn layers, every rank a thread; the trial compares with a float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.trials.in_process import run_in_process
from tasp_lab.core.choices import Dtype
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.timeline.events import ATTEND
from tasp_lab.topology.builders import full_mesh, nodes, switch, torus
from tasp_lab.workload.layer import Workload
from tests.support.schedules import assert_every_transfer_once, task_of
from tests.support.strategies import attention_layers
from tests.support.systems import passes_of, token_ring_passes

TOPOLOGIES = [*(full_mesh(n) for n in range(1, 9)), switch(4), nodes(2, 3), torus((3, 3))]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    kv_heads = draw(st.integers(1, 3))
    mask = draw(st.sampled_from(["full", "causal"]))
    layer = Workload(
        sequence=draw(st.integers(1, 90)),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 64, 72])),
        dtype=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        mask=mask,  # type: ignore[arg-type]
        window=draw(st.none() | st.integers(1, 40)) if mask == "causal" else None,
    )
    topology, name = draw(st.sampled_from(TOPOLOGIES)), draw(st.sampled_from(sorted(CIRCULATIONS)))
    return attention(name, topology, layer, trim=draw(st.booleans()), buffers=draw(st.integers(2, 4)))


@settings(max_examples=150)
@given(schedules(), st.integers(0, 5), st.booleans())
def test_every_schedule_computes_exact_attention(schedule: Schedule, receives_ahead: int, whole_steps: bool) -> None:
    """Walked by lanes or by steps; the timeline has every transfer and every kernel call once."""
    timeline = run_in_process(schedule, receives_ahead, whole_steps)
    calls = [(e.step, e.rank, e.block, e.flops) for e in timeline.events if e.kind == ATTEND]
    steps = list(enumerate(schedule.steps))
    assert_every_transfer_once(timeline.events, schedule)
    expected = [
        (at, *row)
        for at, step in steps
        for each in step.calls
        for row in zip(
            each.rank.tolist(), each.operands[1].first.tolist(), task_of(schedule).flops(each).tolist(), strict=True
        )
    ]
    assert sorted(calls) == sorted(expected)


@pytest.mark.parametrize("whole_steps", [False, True])
def test_a_buffer_that_is_skipped_is_still_protected(whole_steps: bool) -> None:
    """With five positions on eight ranks nothing arrives at some steps; what arrived before them may still be read."""
    for name in CIRCULATIONS:
        schedule = attention(name, full_mesh(8), Workload(5, head_dim=64, dtype="fp32", heads=1), buffers=2)
        for _ in range(10):
            run_in_process(schedule, 4, whole_steps)


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(0, 5),
    st.sampled_from(["fp32", "bf16"]),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 3),
)
def test_results_that_travel_are_merged_where_they_arrive(
    world_size: int, more: int, dtype: str, head_dim: int, causal: bool, tail_chunks: int
) -> None:
    """TokenRing: parts of results, or of the gradients of queries, are sent to the owner and joined there."""
    layer = Workload(
        12 * world_size + more, heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype, mask="causal" if causal else "full"
    )
    for schedule in token_ring_passes(full_mesh(world_size), layer, tail_chunks=tail_chunks):
        for whole_steps in (False, True):
            run_in_process(schedule, 4, whole_steps)


@settings(max_examples=40)
@given(st.integers(1, 5), attention_layers(), st.integers(1, 5), st.integers(2, 4), st.sampled_from(["fp32", "bf16"]))
def test_keys_that_come_in_stages_are_those_of_the_layer(
    world_size: int, layer: Workload, stages: int, buffers: int, dtype: Dtype
) -> None:
    layer = replace(layer, dtype=dtype)
    for schedule in passes_of("direct-attention", full_mesh(world_size), layer, stages=stages, buffers=buffers):
        for whole_steps in (False, True):
            run_in_process(schedule, 4, whole_steps)
