from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import (
    LOAD_BYTES,
    MAX_LANES_OF_SHARES,
    PAGE_BYTES,
    lanes_of,
    split_bytes,
    split_count,
    unit_bytes,
)
from tasp_lab.schedule.model import LazySteps, Step
from tasp_lab.schedule.schedule import OncePerSchedule, Schedule, remembered
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.all_gather import multi_ring_all_gather
from tasp_lab.topology.builders import full_mesh, ring
from tasp_lab.topology.graph import Topology
from tests.support.links import with_links
from tests.support.routes import direct
from tests.support.strategies import topologies_and_schedules

UNITS = (1, LOAD_BYTES, PAGE_BYTES)


shares_of = st.lists(st.integers(1, 10**6), min_size=1, max_size=60).map(
    lambda weights: [Fraction(weight, sum(weights)) for weight in weights]
)
sizes = st.integers(1, 10**9) | st.builds(
    lambda count, unit: count * unit, st.integers(1, 2**18), st.sampled_from(UNITS)
)


@given(st.integers(1, 10**9), shares_of)
def test_parts_are_their_shares_rounded_down_or_up(count: int, shares: list[Fraction]) -> None:
    parts = split_count(count, shares)
    assert sum(parts) == count
    assert all(abs(part - count * share) < 1 for part, share in zip(parts, shares, strict=True))


@given(st.integers(1, 10**9), st.integers(1, 600))
def test_equal_parts_differ_by_at_most_one(total: int, count: int) -> None:
    parts = split_count(total, [Fraction(1, count)] * count)
    assert max(parts) - min(parts) <= 1


@given(sizes, shares_of)
def test_chunks_are_their_shares_up_to_a_unit(size_bytes: int, shares: list[Fraction]) -> None:
    unit, chunks = unit_bytes(size_bytes, min(shares)), split_bytes(size_bytes, shares)
    assert sum(chunks) == size_bytes
    assert all(chunk % unit == 0 for chunk in chunks)
    assert all(abs(chunk - size_bytes * share) < unit for chunk, share in zip(chunks, shares, strict=True))


@given(sizes, st.integers(1, 600))
def test_equal_chunks_differ_by_at_most_a_unit_and_one_percent_where_it_is_a_page(size_bytes: int, count: int) -> None:
    unit, chunks = unit_bytes(size_bytes, Fraction(1, count)), split_bytes(size_bytes, [Fraction(1, count)] * count)
    assert max(chunks) - min(chunks) <= unit
    assert unit != PAGE_BYTES or max(chunks) <= min(chunks) * 1.01


@given(sizes, st.integers(1, 600))
def test_chunks_are_of_16_bytes_where_a_size_allows_it(size_bytes: int, count: int) -> None:
    """It does if it is a multiple of 16 bytes and has 16 for every chunk; else no chunk is empty for its sake."""
    chunks = split_bytes(size_bytes, [Fraction(1, count)] * count)
    if size_bytes % LOAD_BYTES == 0 and size_bytes >= LOAD_BYTES * count:
        assert all(chunk % LOAD_BYTES == 0 for chunk in chunks)
    assert min(chunks) > 0 or size_bytes < count


@given(topologies_and_schedules(), st.integers(1, 1000))
def test_an_all_gather_delivers_each_shard_to_each_other_rank_once(case: tuple[Topology, str], shard: int) -> None:
    """The ledger: every rank receives n - 1 shards, and all send what all receive; but for trees, all equally many."""
    topology, name = case
    schedule = collective(name, topology, shard)
    n = topology.world_size
    received = np.zeros(n, dtype=np.int64)
    for step in schedule.steps:
        np.add.at(received, step.destination, schedule.block_bytes[step.block])
    assert (received == (n - 1) * shard).all()
    sent = schedule.bytes_sent().sum(axis=(0, 2))
    assert sent.sum() == n * (n - 1) * shard
    assert name == "trees" or (sent == (n - 1) * shard).all()
    assert schedule.block_bytes.sum() == n * shard
    assert schedule.transfers == sum(len(step) for step in schedule.steps)


def test_multi_ring_loads_every_link_of_a_mesh_equally_at_every_step() -> None:
    for world_size in (2, 3, 4, 5, 6, 8):
        schedule = collective("multi-ring", full_mesh(world_size), 10 * 7 * 8 * 9 * LOAD_BYTES)
        for step in schedule.steps:
            load = np.zeros((world_size, world_size), dtype=np.int64)
            np.add.at(load, (step.source, step.destination), schedule.block_bytes[step.block])
            assert len(set(load[~np.eye(world_size, dtype=bool)].tolist())) == 1


def test_steps_are_made_when_asked_for() -> None:
    """A schedule of 512 ranks holds arrays of one step, not its 261,632 transfers."""
    schedule = collective("ring", ring(512), 512)
    assert schedule.transfers == 512 * 511
    assert len(schedule.steps) == 511
    assert len(schedule.steps[7]) == 512
    assert [len(step) for step in schedule.steps[3:5]] == [512, 512]
    with pytest.raises(IndexError):
        schedule.steps[511]


def multi_ring() -> Schedule:
    return collective("multi-ring", full_mesh(5), 100)


def test_a_schedule_needs_its_links() -> None:
    with pytest.raises(ScheduleError, match="step 0: rank 0 sends to rank 2, but ring:4 has no such link"):
        collective("direct", direct(ring(4)), 8)
    with pytest.raises(ScheduleError, match="is for 5 ranks, full-mesh:4 has 4"):
        multi_ring().check_routes(full_mesh(4))


@pytest.mark.parametrize("shard", [0, -1])
def test_a_shard_has_bytes(shard: int) -> None:
    with pytest.raises(ScheduleError, match=f"shard size is {shard} bytes"):
        collective("multi-ring", full_mesh(4), shard)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ScheduleError,
        match="unknown schedule 'tree', did you mean 'trees'",
    ):
        collective("tree", full_mesh(4), 1)


def test_what_was_proven_cannot_be_changed() -> None:
    for name in ("ring", "direct"):
        schedule = collective(name, full_mesh(4), 8)
        for values in (schedule.block_bytes, schedule.initial, schedule.final, schedule.steps[0].block):
            with pytest.raises(ValueError, match="read-only"):
                values[:] = 0
        assert not isinstance(schedule.steps, list)


def test_fewer_bytes_than_rings() -> None:
    assert collective("multi-ring", full_mesh(8), 3).lanes == 3
    assert collective("multi-ring", full_mesh(1), 3).transfers == 0


def test_a_schedule_too_large_to_replay_is_refused_at_once() -> None:
    """Around a ring it needs no replay; that its steps are known one by one does not help."""
    schedule = collective("ring", full_mesh(40_000), 1)
    with pytest.raises(ScheduleError, match="40000 ranks and 40000 blocks are too many to replay"):
        replace(schedule, steps=[])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_lanes_of_unequal_rings_carry_about_equal_shares(weights: list[int]) -> None:
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    lanes = lanes_of(shares)
    assert min(lanes) == 1
    assert sum(lanes) <= 2 * (MAX_LANES_OF_SHARES + len(shares))
    per_lane = [share / count for share, count in zip(shares, lanes, strict=True)]
    assert max(per_lane) <= 2 * max(min(per_lane), Fraction(1, MAX_LANES_OF_SHARES))


@pytest.mark.parametrize(("ranks", "slow"), [(4, 30), (5, 30), (3, 10), (8, 20)])
def test_rings_with_shares_carry_in_the_simulator_what_was_counted(ranks: int, slow: int) -> None:
    """(n-1) shards at the rate of the decomposition: the slow link is shared as the shares say."""
    topology = with_links(full_mesh(ranks, 50e9, 0.0), [f"0-1={slow}GB/s"])
    found = decompose(topology)
    time_s = simulate(multi_ring_all_gather(topology, 2**30, found), Machine(topology)).time_s
    assert float(time_s) == pytest.approx((ranks - 1) * 2**30 / float(found.rate_bytes_per_s), rel=1e-3)


def test_kept_steps_are_the_same_and_made_once() -> None:
    class Counted(LazySteps):
        made = 0

        def __len__(self) -> int:
            return 3

        def step(self, index: int) -> Step:
            self.made += 1
            return Step.of([(0, 1, index, 0)])

    steps = Counted()
    lanes = [step.lane.tolist() for step in steps]
    assert steps.made == 3
    steps.keep()
    for _ in range(2):
        assert [step.lane.tolist() for step in steps] == lanes
    assert steps[-1] is steps[2]
    assert steps.made == 6


def test_a_result_is_kept_as_long_as_its_schedule() -> None:
    made: list[str] = []

    @OncePerSchedule
    def size(schedule: Schedule) -> int:
        made.append(schedule.name)
        return schedule.transfers

    one, two = (collective("ring", full_mesh(4), each) for each in (64, 128))
    assert [size(each) for each in (one, two, one, two)] == [12] * 4
    three = one.renamed("three")
    size.keep(three, lambda: 5)
    size.keep(three, lambda: 6)
    assert size(three) == 5
    assert made == ["ring", "ring"]
    kept = ref(one)
    del one
    gc.collect()
    assert kept() is None, "a result keeps no schedule"


def test_the_last_results_are_remembered() -> None:
    made: list[int] = []

    @remembered(most=2)
    def total(schedule: Schedule, factor: int = 1) -> int:
        made.append(int(schedule.block_bytes.sum()) * factor)
        return made[-1]

    one, two, three = (collective("ring", full_mesh(4), each) for each in (64, 128, 256))
    for schedule in (one, two, one, three, one, two):  # the third one takes the place of the second, used before
        total(schedule)
    total(one, factor=2)
    assert made == [256, 512, 1024, 512, 512]


def test_threads_remember_together() -> None:
    """Both passes of a large layer are simulated at once."""
    schedules = [collective("ring", full_mesh(4), 64 * each) for each in range(1, 9)]

    @remembered(most=3)
    def transfers(schedule: Schedule) -> int:
        return schedule.transfers

    def recall_often(stride: int) -> bool:
        asked = [schedules[at * stride % 8] for at in range(5000)]
        return all(transfers(each) == each.transfers for each in asked)

    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(recall_often, (1, 3, 5, 7)))
    finally:
        sys.setswitchinterval(before)
