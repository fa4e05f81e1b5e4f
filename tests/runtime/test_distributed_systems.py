"""TokenRing, Ulysses, LASP-2 and rings of rings on real processes: results against float64, bytes as in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from runtime.protocol.jobs import RunSchedule
from runtime.protocol.rank_setup import RankLocation
from runtime.protocol.records import RankRecord, merge_records
from runtime.ranks.launcher import LaunchedRanks, launch
from tasp_lab.schedule.channels import channels
from tasp_lab.schedule.composition import in_chunks, over_groups
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.timeline.events import SEND
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.home_dtype import with_home_dtype
from tests.support.schedules import assert_every_transfer_once
from tests.support.systems import lasp2, token_ring_passes, ulysses_passes

pytestmark = pytest.mark.distributed

WORLD_SIZE = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[LaunchedRanks]:
    """Ranks that live for all tests."""
    with launch([RankLocation()] * WORLD_SIZE) as launched:
        yield launched


def layer(mask: str, kv_heads: int) -> Workload:
    """A length that no number of ranks divides."""
    return Workload(43, batch=2, heads=8, kv_heads=kv_heads, head_dim=64, dtype="fp32", mask=mask)


def assert_runs(ranks: LaunchedRanks, schedule: Schedule, transport: str) -> None:
    """The ranks compare their results with float64; the events are the transfers and calls of the schedule."""
    results = ranks.perform(RunSchedule(schedule, transport, repeats=1, warm_ups=0), longest_silence_s=60)
    records = [of_rank[0] for of_rank in results if isinstance(of_rank, list)]
    assert len(records) == WORLD_SIZE
    assert all(isinstance(record, RankRecord) for record in records), records
    events = merge_records(records, schedule, "local").events
    ledger = np.zeros_like(schedule.bytes_sent())
    for event in events:
        if event.kind == SEND:
            ledger[event.step, event.rank, event.lane] += event.bytes
    assert np.array_equal(ledger, schedule.bytes_sent())
    calls = sum(len(each) for step in schedule.steps for each in step.calls)
    assert_every_transfer_once(events, schedule)
    assert sum(event.kind != SEND for event in events) == calls


@pytest.mark.parametrize("transport", ["p2p", "batched"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("passes", [token_ring_passes, ulysses_passes])
def test_both_passes_of_softmax_attention(
    ranks: LaunchedRanks,
    passes: Callable[[Topology, Workload], tuple[Schedule, Schedule]],
    kv_heads: int,
    mask: str,
    transport: str,
) -> None:
    """With 2 KV heads Ulysses has fewer of them than ranks."""
    for schedule in passes(full_mesh(WORLD_SIZE), layer(mask, kv_heads)):
        assert_runs(ranks, schedule, transport)


@pytest.mark.parametrize("transport", ["p2p", "batched"])
def test_sums_that_are_wider_at_home(ranks: LaunchedRanks, transport: str) -> None:
    """Results and gradients with 16 bit on the wire, and float32 at their owners."""
    mesh, narrow = full_mesh(WORLD_SIZE), replace(layer("causal", 2), dtype="bf16")
    for schedule in token_ring_passes(mesh, narrow, result_dtype="input", gradient_dtype="input"):
        assert_runs(ranks, with_home_dtype(schedule), transport)


@pytest.mark.parametrize("transport", ["p2p", "batched"])
@pytest.mark.parametrize("trim", [True, False])
def test_linear_attention(ranks: LaunchedRanks, trim: bool, transport: str) -> None:
    schedule = lasp2(full_mesh(WORLD_SIZE), layer("causal", 2), (0.99, 0.5), trim=trim)
    assert_runs(ranks, schedule, transport)


@pytest.mark.parametrize("transport", ["p2p", "batched"])
def test_layers_in_chunks(ranks: LaunchedRanks, transport: str) -> None:
    """Groups of heads, a step apart."""
    mesh = full_mesh(WORLD_SIZE)
    passes = *token_ring_passes(mesh, layer("causal", 2)), *ulysses_passes(mesh, layer("full", 8))
    for schedule in (*passes, lasp2(mesh, layer("causal", 2), (0.99, 0.5))):
        assert_runs(ranks, in_chunks(schedule, 2), transport)


@pytest.mark.parametrize("transport", ["p2p", "batched", "all-to-all"])
@pytest.mark.parametrize("name", ["ring", "ring-reduce-scatter"])
def test_rings_of_rings(ranks: LaunchedRanks, name: str, transport: str) -> None:
    """Two channels: batches of both have process groups of their own."""
    pair = full_mesh(2)
    schedule = over_groups(collective(name, pair, 2000), collective(name, pair, 2000))
    assert set(channels(schedule)) == {0, 1}
    for _ in range(2):  # the second time the group of the second channel is there
        assert_runs(ranks, schedule, transport)
