"""Every schedule by the executor, ranks are threads of one process: the trials compare with float64 on one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.executor import Executor
from runtime.trials.in_process import run_in_process as run_in_threads
from runtime.trials.layers import AttentionTrial
from tasp_lab.core.choices import Decay, Dtype
from tasp_lab.machines.machine import ComputeRate
from tasp_lab.schedule.composition import in_chunks
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.task import QUERY_GRADIENTS, RESULTS
from tasp_lab.schedules.build import attention_schedules, linear_schedules
from tasp_lab.schedules.registry import LINEAR
from tasp_lab.timeline.events import ATTEND, SEND
from tasp_lab.topology.builders import full_mesh, nodes, switch, torus
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.schedule.test_home_dtype import SYSTEMS as WITH_SUMS
from tests.schedule.test_messages import sums_at_home
from tests.support.home_dtype import with_home_dtype
from tests.support.loopback import Board, Loopback
from tests.support.one_device import run_in_process
from tests.support.schedules import assert_every_transfer_once, task_of
from tests.support.selection import fifth
from tests.support.strategies import attention_layers
from tests.support.systems import lasp2, passes_of, token_ring_passes, ulysses_passes

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


@pytest.mark.parametrize("name", ["ring-attention", "tasp", "ulysses"])
def test_ranks_that_are_threads(name: str) -> None:
    """As notebooks run schedules; all other tests do so over a strict board."""
    layer = Workload(60, heads=4, head_dim=8, dtype="fp32", mask="causal")
    for schedule in attention_schedules(name, full_mesh(4), layer, options=AttentionOptions("both")):
        assert_every_transfer_once(run_in_threads(schedule).events, schedule)


@settings(max_examples=80)
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
        schedule = attention(
            name, full_mesh(8), Workload(5, head_dim=64, dtype="fp32", heads=1, mask="full"), buffers=2
        )
        for _ in range(fifth(10)):
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


# Layers in chunks by the executor, every rank a thread; the trial compares with a single process.


CHUNKED: dict[str, Callable[[Topology, Workload], Sequence[Schedule]]] = {
    "token-ring": token_ring_passes,
    "ulysses": ulysses_passes,
    "lasp2": lambda mesh, layer: [lasp2(mesh, layer, 0.9)],
    **{
        f"tasp, {dataflow}": lambda mesh, layer, dataflow=dataflow: attention_passes(  # type: ignore[misc]
            "tasp", mesh, layer, dataflow=dataflow
        )
        for dataflow in DATAFLOWS
    },
}


@pytest.mark.parametrize("name", CHUNKED)
@settings(max_examples=8)
@given(st.integers(1, 4), st.integers(2, 3), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_layers_in_chunks_compute_exact_attention(
    name: str, n: int, chunks: int, users: int, more: int, whole_steps: bool
) -> None:
    """Each chunk is a group of heads; all of them are sent, and make the result of the layer."""
    kv_heads = n * chunks
    layer = Workload(
        n + more, heads=kv_heads * users, kv_heads=kv_heads, head_dim=8, dtype="fp32", mask="causal", batch=2
    )
    for schedule in CHUNKED[name](full_mesh(n), layer):
        chunked = in_chunks(schedule, chunks)
        timeline = run_in_process(chunked, 3, whole_steps)
        assert_every_transfer_once(timeline.events, chunked)
        assert chunked.transfers == chunks * schedule.transfers
        assert chunked.bytes_sent().sum() == schedule.bytes_sent().sum()


# Linear attention by the executor, every rank a thread: outputs and all gradients against float64 on one process.


@st.composite
def layers(draw: st.DrawFn, name: str) -> Workload:
    """Layers that a schedule takes: rings of keys no decay by the data, chains of states no full mask."""
    decay = draw(st.sampled_from(["none", "head"] if name.startswith("ring") else get_args(Decay)))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    may_be_full = decay == "none" and len(lengths) == 1 and name not in ("lasp", "all-scan")
    return Workload(
        sum(lengths),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4])),
        dtype="fp32",
        mask="full" if may_be_full and draw(st.booleans()) else "causal",
        documents=tuple(lengths) if len(lengths) > 1 else None,
        kind="linear",
        decay=decay,
    )


@pytest.mark.parametrize("name", LINEAR)
@settings(max_examples=10)
@given(st.data())
def test_outputs_and_gradients_are_those_of_one_process(name: str, data: st.DataObject) -> None:
    layer, n, whole_steps = data.draw(layers(name)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    chosen: dict[str, Any] = {}
    if "trim" in LINEAR[name].options:
        chosen["trim"] = data.draw(st.booleans())
    if "pieces" in LINEAR[name].options:
        chosen["pieces"] = data.draw(st.sampled_from([None, 1, layer.kv_heads]))
    decays = tuple(0.9 ** (1 + head) for head in range(layer.kv_head_count)) if layer.decay == "head" else ()
    for schedule in linear_schedules(name, full_mesh(n), layer, None, AttentionOptions("both", **chosen), decays):
        timeline = run_in_process(schedule, 3, whole_steps)
        assert sum(event.bytes for event in timeline.events if event.kind == SEND) == schedule.bytes_sent().sum()


# Sums that are float32 at home and have 16 bit on the wire, by the executor, every rank a thread.


@pytest.mark.parametrize("name", WITH_SUMS)
@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 20), st.booleans(), st.sampled_from(["bf16", "fp16"]))
def test_every_system_computes_attention_with_sums_that_are_wider_at_home(
    name: str, n: int, more: int, whole_steps: bool, dtype: str
) -> None:
    """With real kernels against float64, and with test patterns byte by byte."""
    layer = Workload(2 * n + more, heads=12, head_dim=9, mask="causal", dtype=dtype)
    schedule = with_home_dtype(WITH_SUMS[name](full_mesh(n), layer))
    run_in_process(schedule, 3, whole_steps)
    run_in_process(schedule, 3, whole_steps, compute=ComputeRate(1e15))


def test_a_sum_that_lies_behind_another_one_is_narrowed_by_itself() -> None:
    """What rank 1 sends of it is rounded to bfloat16; rank 0 adds it in float32."""
    schedule, board = sums_at_home(), Board()
    values = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0))  # rank, block, position, element

    def run(rank: int) -> torch.Tensor:
        executor = Executor(schedule, rank, Loopback(board, rank, whole_steps=False))
        for block in (0, 1):
            executor.copies.store([block], [values[rank, block]])
        executor.prepare()
        executor.run()
        return torch.stack([executor.copies.resident([block])[0] for block in (0, 1)])

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    assert torch.equal(found[0][0], values[0, 0] + values[1, 0])
    assert torch.equal(found[0][1], values[0, 1] + values[1, 1].bfloat16().float())


def outputs(schedule: Schedule, tensor: int) -> list[torch.Tensor]:
    """An output of each rank in float32, after a run with real kernels."""
    board = Board()

    def run(rank: int) -> torch.Tensor:
        trial = AttentionTrial(schedule, rank, Loopback(board, rank, whole_steps=False))
        trial.set_up(checked=False)
        trial.executor.prepare()
        trial.executor.run()
        return trial._layer.output(trial.executor.copies, tensor, torch.float32)[0].clone()

    with ThreadPoolExecutor(schedule.world_size) as threads:
        return list(threads.map(run, range(schedule.world_size)))


@pytest.mark.parametrize("tensor", [RESULTS, QUERY_GRADIENTS])
def test_float32_at_home_saves_the_rounding_of_every_sum(tensor: int) -> None:
    """Parts are rounded once, on the wire; narrow sums are rounded again with each part that joins them.

    So wide sums are closer to those that are float32 everywhere, and are no multiples of bfloat16 steps.
    """
    mesh, layer = full_mesh(6), Workload(96, heads=4, head_dim=16, dtype="bf16", mask="full")

    def found(wire: str, is_wide: bool) -> torch.Tensor:
        passes = token_ring_passes(mesh, layer, result_dtype=wire, gradient_dtype=wire)
        schedule = passes.forward if tensor == RESULTS else passes.backward
        return torch.cat(outputs(with_home_dtype(schedule, "fp32" if is_wide else None), tensor), 1)

    exact, narrow, wide = found("fp32", False), found("input", False), found("input", True)
    assert torch.equal(narrow, narrow.bfloat16().float())
    assert not torch.equal(wide, wide.bfloat16().float())
    assert (wide - exact).norm() < (narrow - exact).norm()


# Queries travel as records with float32 in them, wherever 16-bit gradients of odd sizes leave buffer for them.


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_records_may_begin_at_any_even_byte(dtype: str) -> None:
    """The gradients of a shard of 5 positions with one head of 3 elements: 30 bytes. The trial checks the result."""
    layer = Workload(15, heads=1, head_dim=3, dtype=dtype, mask="full")
    passes = attention_passes("ring-attention", full_mesh(3), layer, dataflow="rotate-q", gradient_dtype="input")
    run_in_process(passes.backward)
