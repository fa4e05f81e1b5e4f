"""TokenRing over many rings: its bytes, the loads of links at each step, its FLOPs, its time in closed form."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from sim.event.engine import simulate
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention import forward
from tasp_lab.schedules.attention.backward import Passes
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.systems import passes_of

RINGS = {3: 2, 4: 6, 5: 4, 8: 28, 9: 24}
"""Balanced rings by number of ranks; a shard of as many positions has a block per ring."""


def passes(n: int, layer: Workload, **options: str | int) -> Passes:
    return passes_of("token-multi-ring", full_mesh(n), layer, **options)


def link_bytes(schedule: Schedule, index: int) -> tuple[IntArray, IntArray]:
    """Bytes of queries and of results on each link at a step, two arrays (world_size, world_size)."""
    step, n = schedule.steps[index], schedule.world_size
    loads = np.zeros((2, n, n), dtype=np.int64)
    np.add.at(loads, (step.gives.astype(int), step.source, step.destination), schedule.blocks.bytes[step.block])
    return loads[0], loads[1]


@pytest.mark.parametrize("n", RINGS)
def test_queries_and_results_load_all_links_equally_at_each_step(n: int) -> None:
    layer = Workload(sequence=n * RINGS[n], heads=4, kv_heads=2, head_dim=8, mask="full")
    shard_rows = RINGS[n] * layer.heads
    record = {False: 2 * layer.head_dim, True: 2 * 2 * layer.head_dim + 2 * 4}  # forward q; backward q, dO, two numbers
    results = {False: 2 * layer.head_dim + 4, True: 2 * layer.head_dim}
    between = ~np.eye(n, dtype=bool)
    for backward, schedule in enumerate(passes(n, layer)):
        assert len(schedule.steps) == n + 1
        for index in range(n + 1):
            queries, returns = link_bytes(schedule, index)
            moving, home = index < n - 1, index >= 2
            assert set(queries[between].tolist()) == {moving * record[bool(backward)] * shard_rows // (n - 1)}
            assert set(returns[between].tolist()) == {home * results[bool(backward)] * shard_rows // (n - 1)}


@pytest.mark.parametrize("n", [3, 6, 8, 12])
def test_all_steps_load_links_equally_on_any_rings_that_use_each_link_equally(n: int) -> None:
    rings = decompose(full_mesh(n))
    layer = Workload(sequence=n * len(rings.rings), heads=1, head_dim=1, mask="full")
    # not a mesh of equal links, so these very rings are used
    topology = full_mesh(n).map_links(lambda index, link: link if index else full_mesh(n, 51e9).links[0])
    (schedule,) = attention_schedules("token-multi-ring", topology, layer, rings)
    queries, returns = np.sum([link_bytes(schedule, index) for index in range(len(schedule.steps))], axis=0)
    between = ~np.eye(n, dtype=bool)
    assert set(queries[between].tolist()) == {2 * len(rings.rings)}
    assert set(returns[between].tolist()) == {(2 + 4) * len(rings.rings)}


@pytest.mark.parametrize("buffers", [3, 4])
@pytest.mark.parametrize("n", [4, 5, 8])
def test_links_are_always_busy(n: int, buffers: int) -> None:
    """The time is that of the queries and results of one rank on a link; of one ring, n - 1 keys and values."""
    bandwidth, heads, dim = 10**6, 2, 8
    layer = Workload(sequence=n * RINGS[n], heads=heads, head_dim=dim, mask="full")
    machine = Machine(full_mesh(n, Fraction(bandwidth), Fraction(0)), compute=ComputeRate(1e30))
    options = AttentionOptions(buffers=buffers, result_dtype="input")
    (many,) = attention_schedules("token-multi-ring", machine.topology, layer, None, options)
    (one,) = attention_schedules("ring-attention", machine.topology, layer, None, AttentionOptions(buffers=buffers))
    tensor, row_sums = Fraction(2 * RINGS[n] * heads * dim, bandwidth), Fraction(4 * RINGS[n] * heads, bandwidth)
    assert simulate(many, machine).time_s == pytest.approx(float(2 * tensor + row_sums), rel=1e-9)
    assert simulate(one, machine).time_s == pytest.approx(float(2 * tensor * (n - 1)), rel=1e-9)


def test_the_results_of_a_lane_of_a_rank_have_one_destination() -> None:
    for schedule in passes(8, Workload(sequence=224, heads=1, head_dim=1, mask="causal")):
        assert schedule.lanes == 2 * 7
        for step in schedule.steps:
            assert ((step.destination - step.source) % 8 == step.lane % 7 + 1).all()
            assert ((step.lane >= 7) == step.gives).all()


def test_few_rings_are_used_as_they_are() -> None:
    topology, layer = full_mesh(8), Workload(sequence=64, heads=1, head_dim=1, mask="full")
    two = decompose(topology, lanes=2)
    (schedule,) = attention_schedules("token-multi-ring", topology, layer, two)
    step = schedule.steps[0]
    pairs = {(ring[i - 1], ring[i]) for ring in two.rings.tolist() for i in range(8)}
    assert set(zip(step.source.tolist(), step.destination.tolist(), strict=True)) == pairs


def test_too_many_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MAX_HOLDINGS", 8 * 8 * 29 - 1)
    with pytest.raises(ScheduleError, match="8 ranks and 232 blocks are too many to prove, expected at most 1855"):
        passes(8, Workload(sequence=8 * 28, heads=1, head_dim=1, mask="full"))
