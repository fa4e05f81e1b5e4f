from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.bounds.collectives import all_gather_bound_s
from sim.event.engine import simulate
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.rings.rings import PAGE_BYTES
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, both_ways
from tests.support.routes import direct
from tests.support.strategies import exact_bandwidths, exact_latencies, topologies_and_schedules

world_sizes = st.integers(2, 9)


def time_s(name: str, topology: Topology, shard_bytes: int, launch_s: Number = 0) -> Number:
    schedule = collective(name, topology, shard_bytes)
    return simulate(schedule, Machine(topology, CommLibrary("test", launch_s))).time_s


@given(world_sizes, exact_bandwidths, exact_latencies, st.integers(1, 100))
def test_closed_forms_on_a_mesh(n: int, bandwidth: Fraction, latency: Fraction, units: int) -> None:
    """Exact, with a shard whose pages divide into all numbers of rings (4 and 6 ranks have 6 and 10)."""
    shard = units * 2520 * PAGE_BYTES
    mesh = full_mesh(n, bandwidth, latency)
    assert time_s("ring", mesh, shard) == (n - 1) * (latency + shard / bandwidth)
    assert time_s("direct", mesh, shard) == latency + shard / bandwidth
    assert time_s("multi-ring", mesh, shard) == (n - 1) * (latency + shard / ((n - 1) * bandwidth))


@given(world_sizes, exact_bandwidths, exact_latencies, st.integers(1, 100))
def test_closed_forms_on_a_switch(n: int, port: Fraction, latency: Fraction, units: int) -> None:
    shard = units * 2520 * PAGE_BYTES
    star = switch(n, port, latency)
    assert time_s("ring", star, shard) == (n - 1) * (latency + shard / port)
    assert time_s("multi-ring", star, shard) == (n - 1) * (latency + shard / port)
    assert time_s("direct", star, shard) == latency + (n - 1) * shard / port


@given(st.integers(2, 4), st.sampled_from([2, 4, 5]), exact_bandwidths, st.integers(1, 5))
def test_a_ring_through_nodes_is_as_slow_as_its_slowest_hop(u: int, m: int, link: Fraction, units: int) -> None:
    """With NICs slower than links, the steps of one ring keep the pace of the NIC from the first round on."""
    nic = link / 3
    cluster = nodes(
        u, m, link_bandwidth_bytes_per_s=link, link_latency_s=Fraction(0),
        nic_bandwidth_bytes_per_s=nic, nic_latency_s=Fraction(0),
    )  # fmt: skip
    assert time_s("ring", cluster, units) == (u * m - 1) * (units / nic)


@given(topologies_and_schedules(), st.integers(1, 500))
def test_no_schedule_beats_the_bound(case: tuple[Topology, str], shard: int) -> None:
    topology, name = case
    assert time_s(name, topology, shard) >= all_gather_bound_s(topology, shard)


@given(world_sizes, exact_bandwidths, exact_latencies, st.integers(1, 500))
def test_direct_reaches_the_bound(n: int, bandwidth: Fraction, latency: Fraction, shard: int) -> None:
    for topology in (full_mesh(n, bandwidth, latency), switch(n, bandwidth, latency)):
        assert time_s("direct", topology, shard) == all_gather_bound_s(topology, shard)


@given(topologies_and_schedules(), st.integers(1, 200))
def test_no_constraint_is_ever_exceeded(case: tuple[Topology, str], shard: int) -> None:
    """Between the first byte and the last, no link has carried more than its bandwidth times that span."""
    topology, name = case
    events = simulate(collective(name, topology, shard), Machine(topology)).events
    carried: dict[int, int] = defaultdict(int)
    first: dict[int, Number] = {}
    last: dict[int, Number] = {}
    for event in events:
        route = topology.route(event.rank, event.peer)
        for constraint in route.constraints:
            carried[constraint] += event.bytes
            first[constraint] = min(first.get(constraint, event.start_s), event.start_s)
            sent_s = event.end_s - route.latency_s
            last[constraint] = max(last.get(constraint, sent_s), sent_s)
    for constraint, size in carried.items():
        limit = topology.constraints[constraint].bandwidth_bytes_per_s * (last[constraint] - first[constraint])
        assert size <= limit


@given(topologies_and_schedules(), st.fractions(Fraction(1, 100), Fraction(1), max_denominator=100))
def test_slow_motion_takes_longer_by_the_scale(case: tuple[Topology, str], scale: Fraction) -> None:
    topology, name = case
    assert time_s(name, topology.scaled(scale), 60) * scale == time_s(name, topology, 60)


@given(topologies_and_schedules(), st.integers(1, 2**30))
def test_floats_agree_with_fractions(case: tuple[Topology, str], shard: int) -> None:
    """The same schedule: rounded bandwidths may not divide each other, so that other rings are chosen for them."""
    topology, name = case
    rounded = topology.map_links(
        lambda _, link: replace(
            link,
            bandwidth_bytes_per_s=float(link.bandwidth_bytes_per_s),
            latency_s=float(link.latency_s),
        )
    )
    schedule = collective(name, topology, shard)
    exact_s, rounded_s = (simulate(schedule, Machine(each)).time_s for each in (topology, rounded))
    assert float(rounded_s) == pytest.approx(float(exact_s), rel=1e-9)


@given(world_sizes, exact_bandwidths, exact_bandwidths, exact_latencies, st.integers(1, 200))
def test_the_bound_of_a_shared_medium_is_reached(
    n: int, link: Fraction, medium: Fraction, latency: Fraction, shard: int
) -> None:
    """All n(n-1) shards go through one capacity, or through the links where those are tighter."""
    mesh = full_mesh(n, link, latency)
    shared = replace(mesh, shared=(SharedCapacity("medium", medium, tuple(each.name for each in mesh.links)),))
    expected = latency + max(shard / link, n * (n - 1) * shard / medium)
    assert all_gather_bound_s(shared, shard) == time_s("direct", shared, shard) == expected


def test_what_bound_a_transfer() -> None:
    def bounds(topology: Topology, launch_s: Number = 0) -> set[str]:
        schedule = collective("ring", topology, 6)
        return {event.bound_by for event in simulate(schedule, Machine(topology, CommLibrary("t", launch_s))).events}

    assert bounds(full_mesh(2, Fraction(1), Fraction(2))) == {"0->1", "1->0"}
    assert bounds(full_mesh(2, Fraction(1), Fraction(7))) == {"latency"}
    assert bounds(full_mesh(2, Fraction(1), Fraction(2)), Fraction(9)) == {"launch"}
    # Both links of a route tie; the links are listed 0->switch, switch->0, 1->switch, switch->1.
    assert bounds(switch(2, Fraction(1), Fraction(0))) == {"0->switch", "switch->0"}
    links = (*both_ways(0, "hub", Fraction(5), 0), Link(1, "hub", Fraction(5), 0), Link("hub", 1, Fraction(1), 0))
    assert bounds(Topology("funnel", 2, links)) == {"hub->1", "hub->0"}


def test_a_shared_capacity_binds() -> None:
    mesh = full_mesh(3, Fraction(10), Fraction(0))
    bus = SharedCapacity("bus", Fraction(3), tuple(link.name for link in mesh.links))
    shared = replace(mesh, shared=(bus,))
    # Six transfers of 6 bytes over 3 bytes/s together.
    assert time_s("direct", shared, 6) == 12
    events = simulate(collective("direct", shared, 6), Machine(shared)).events
    assert {event.bound_by for event in events} == {"bus"}


def test_a_flow_speeds_up_when_another_leaves() -> None:
    # Rank 0 sends over a port of 2 bytes/s to ranks 1 and 2, whose ports take 2 and 1/2 bytes/s. Both blocks have
    # 6 bytes. To 2: 1/2 bytes/s, 12 s. To 1: 3/2 bytes/s, 4 s. Nothing else of the exchange shares those ports
    # longer than that.
    links = (
        Link(0, "hub", Fraction(2), 0), Link("hub", 0, Fraction(100), 0),
        Link(1, "hub", Fraction(100), 0), Link("hub", 1, Fraction(2), 0),
        Link(2, "hub", Fraction(100), 0), Link("hub", 2, Fraction(1, 2), 0),
    )  # fmt: skip
    topology = Topology("uneven", 3, links)
    events = simulate(collective("direct", topology, 6), Machine(topology)).events
    end = {(event.rank, event.peer): event.end_s for event in events}
    # Into 2 come two blocks at 1/4 bytes/s each: 24 s. So 0->1 has 7/4 of port 0, and shares port 1 (2 bytes/s)
    # with 2->1: 1 byte/s each, 6 s.
    assert end[0, 2] == end[1, 2] == 24
    assert end[0, 1] == end[2, 1] == 6


def test_waiting_is_explained() -> None:
    topology = full_mesh(3, Fraction(1), Fraction(1))
    events = simulate(collective("ring", topology, 5), Machine(topology)).events
    assert {(event.step, event.waited_for) for event in events} == {(0, ""), (1, "block")}


def test_a_schedule_for_other_ranks_is_refused() -> None:
    schedule = collective("ring", full_mesh(4), 8)
    with pytest.raises(ScheduleError, match="is for 4 ranks"):
        simulate(schedule, Machine(full_mesh(5)))
    with pytest.raises(ScheduleError, match="rank 3 sends to rank 0"):
        simulate(schedule, Machine(direct(replace(nothing_back_to_zero(), name="broken"))))


def nothing_back_to_zero() -> Topology:
    hops = [(0, 1), (1, 2), (2, 3), (3, 1), (1, 0)]
    return Topology("broken", 4, tuple(Link(a, b, 1.0, 0.0) for a, b in hops))


def test_launches_that_tie_go_in_lane_order() -> None:
    """Blocks 0 and 1 reach rank 2 together at 2 s. It launches block 1 on lane 0 first, then block 0 on lane 1."""
    one = Fraction(1)
    topology = full_mesh(3, one, Fraction(0))
    initial = np.array([[True, False], [False, True], [False, False]])
    steps = [Step.of([(0, 2, 0, 0), (1, 2, 0, 1)]), Step.of([(2, 1, 1, 0), (2, 0, 0, 1)])]
    schedule = Schedule("exchange", 3, 2, Blocks.of_data(np.array([1, 1])), initial, np.ones((3, 2), dtype=bool), steps)
    events = simulate(schedule, Machine(topology, CommLibrary("t", one))).events
    assert {(e.lane, e.start_s, e.end_s) for e in events if e.rank == 2} == {(0, 2, 4), (1, 2, 5)}


def test_a_launch_waits_for_all_that_happens_at_its_instant() -> None:
    """At 2 s rank 0's lane 1 has sent block 0 and wants to send block 2; block 1 arrives for lane 0, which is first."""
    one = Fraction(1)
    topology = full_mesh(3, one, Fraction(0))
    initial = np.array([[True, False, True], [False, True, False], [False, False, False]])
    final = np.array([[True, True, True], [True, True, True], [False, True, False]])
    steps = [Step.of([(0, 1, 1, 0), (0, 1, 1, 2), (1, 0, 0, 1)]), Step.of([(0, 2, 0, 1)])]
    schedule = Schedule("forward", 3, 2, Blocks.of_data(np.array([1, 1, 1])), initial, final, steps)
    events = simulate(schedule, Machine(topology, CommLibrary("t", one))).events
    assert {(e.block, e.start_s, e.end_s) for e in events if e.rank == 0} == {(0, 0, 2), (1, 2, 4), (2, 2, 5)}
