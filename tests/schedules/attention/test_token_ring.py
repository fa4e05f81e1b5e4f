"""TokenRing: its bytes, its FLOPs, its steps. That every tile is computed once is proven on construction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import QUERIES, RESULTS, AttentionTask
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.strategies import attention_layers
from tests.support.systems import token_ring, token_ring_passes

QUERY_LANE = 0


def shard_bytes(layer: Workload, n: int, dtype_bytes: int) -> tuple[int, int, int]:
    """Bytes of a shard of one tensor of queries in the layer's dtype and in another one, and of a number per row."""
    rows = layer.batch * layer.heads * layer.sequence // n
    return 2 * rows * layer.head_dim, dtype_bytes * rows * layer.head_dim, 4 * rows


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_bytes_are_those_of_queries_and_results_whatever_the_kv_heads(mask: str, kv_heads: int, n: int) -> None:
    layer = Workload(sequence=12 * n, batch=2, heads=8, kv_heads=kv_heads, head_dim=4, mask=mask)
    in_float32 = token_ring_passes(full_mesh(n), layer, result_dtype="fp32", gradient_dtype="fp32")
    share = Fraction(3, 4) if mask == "causal" else Fraction(1)
    tensor, in_float, row_sums = shard_bytes(layer, n, 4)
    hops = share * n * (n - 1)
    for passes, result in ((token_ring_passes(full_mesh(n), layer), tensor), (in_float32, in_float)):
        assert lanes(passes.forward) == [hops * tensor, hops * (result + row_sums)]
        assert lanes(passes.backward) == [hops * (2 * tensor + 2 * row_sums), hops * result]


def lanes(schedule: Schedule) -> list[int]:
    """The bytes on the lane of queries, and on all others."""
    queries, *returns = schedule.bytes_sent().sum(axis=(0, 1)).tolist()
    return [queries, sum(returns)]


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_rank_computes_the_same_at_every_step_but_the_first(mask: str) -> None:
    n, layer = 6, Workload(sequence=72, heads=2, head_dim=8, mask=mask)
    for schedule, factor in zip(token_ring_passes(full_mesh(n), layer), (2, 5), strict=True):
        flops = schedule.flops()
        assert (flops == flops[:, :1]).all()
        pairs = 72 * 73 // 2 if mask == "causal" else 72**2
        assert flops.sum() == pairs * factor * 2 * layer.heads * layer.head_dim


def test_results_return_a_step_after_their_call_and_the_last_ones_alone() -> None:
    n = 5
    schedule = token_ring(full_mesh(n), Workload(sequence=20, heads=1, head_dim=1, mask="full"))
    sent = [np.bincount(step.lane > QUERY_LANE, minlength=2).tolist() for step in schedule.steps]
    assert sent == [[n, 0], [n, 0], [n, n], [n, n], [0, n], [0, n]]
    assert [bool(step.calls) for step in schedule.steps] == [True] * n + [False]
    for index, step in enumerate(schedule.steps):
        direct = step.lane > QUERY_LANE
        assert (step.gives == direct).all()
        assert set(step.lane[direct].tolist()) <= {index - 1}
        assert ((step.source - step.destination) % n == np.where(direct, 1 - index, 1) % n).all()


def test_a_rank_makes_one_call_per_step() -> None:
    layer = Workload(sequence=40, heads=1, head_dim=1, mask="causal")
    for schedule in token_ring_passes(full_mesh(5), layer):
        assert all(sorted(calls.rank.tolist()) == [0, 1, 2, 3, 4] for step in schedule.steps for calls in step.calls)


def test_an_unknown_dtype_on_the_wire_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unknown result dtype 'bf16', expected one of auto, fp32, input"):
        token_ring(full_mesh(4), Workload(sequence=8, mask="full"), result_dtype="bf16")


@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_in_chunks_the_last_results_share_no_link_with_queries(n: int, chunks: int) -> None:
    """The busiest link carries a block less: n - 1 queries and results of 1 instead of n, and takes as long."""
    layer, bandwidth = Workload(12 * n, heads=2, head_dim=8, mask="full"), 10**6
    tensor, _, row_sums = (Fraction(size, bandwidth) for size in shard_bytes(layer, n, 2))
    machine = Machine(full_mesh(n, Fraction(bandwidth), Fraction(0)), compute=ComputeRate(1e30))
    options = {"buffers": chunks + 1, "result_dtype": "input"}
    whole = token_ring(machine.topology, layer, **options)
    cut = token_ring(machine.topology, layer, tail_chunks=chunks, **options)
    assert busiest(whole) == [n - 1, 1]
    assert busiest(cut) == [n - 2, 1]
    assert simulate(whole, machine).time_s == pytest.approx(float(n * tensor + row_sums), rel=1e-9)
    assert simulate(cut, machine).time_s == pytest.approx(float((n - 1) * tensor + row_sums), rel=1e-9)
    assert cut.bytes_sent().sum() == whole.bytes_sent().sum()


def busiest(schedule: Schedule) -> list[int]:
    """The shards of queries and of results on the link from rank 1 to rank 0, on which queries circulate."""
    sent = np.zeros(2, dtype=np.int64)
    for step in schedule.steps:
        here = (step.source == 1) & (step.destination == 0)
        np.add.at(sent, step.gives[here].astype(int), schedule.blocks.bytes[step.block[here]])
    assert isinstance(schedule.task, AttentionTask)
    shards = [schedule.task.block_bytes[schedule.task.blocks_of(each)].sum() for each in (QUERIES, RESULTS)]
    found: list[int] = (sent * schedule.world_size / shards).astype(int).tolist()
    return found


@pytest.mark.parametrize("n", [3, 4, 6])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_if_calls_are_slow_only_the_last_chunk_is_exposed(n: int, chunks: int) -> None:
    layer, bandwidth, rate = Workload(8 * n, heads=1, head_dim=4, mask="full"), Fraction(10**6), Fraction(10**5)
    machine = Machine(full_mesh(n, bandwidth, Fraction(0)), compute=ComputeRate(rate))
    call_s = Fraction(8 * 8 * layer.flops_per_pair) / rate
    last_s = Fraction(8 * (4 * 2 + 4)) / bandwidth / chunks
    assert simulate(token_ring(machine.topology, layer, tail_chunks=chunks), machine).time_s == n * call_s + last_s


@settings(max_examples=40)
@given(attention_layers(), st.integers(1, 6), st.integers(2, 4))
def test_in_chunks_any_layer_is_computed_once_with_as_many_bytes(layer: Workload, n: int, chunks: int) -> None:
    cut = token_ring_passes(full_mesh(n), layer, tail_chunks=chunks, buffers=2)
    for found, whole in zip(cut, token_ring_passes(full_mesh(n), layer), strict=True):
        assert found.flops().sum() == whole.flops().sum()
        assert found.bytes_sent().sum() <= whole.bytes_sent().sum()
