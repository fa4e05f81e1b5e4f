"""What a transport makes of messages, and what the engine makes of those: limits, overhead, launches, explanations."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.event.engine import simulate
from sim.max_min import OWN_LIMIT, max_min_rates
from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import CommLibrary, Message
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.all_gather import direct_all_gather, ring_all_gather
from tasp_lab.topology.builders import full_mesh, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.strategies import topologies_and_schedules

sizes = st.integers(1, 100)
positive = st.fractions(Fraction(1, 10), Fraction(50), max_denominator=20)
not_negative = st.fractions(Fraction(0), Fraction(5), max_denominator=20)


@dataclass(frozen=True)
class Channels(CommLibrary):
    """Launches that do not wait for each other, overhead in bytes, a latency and a limit: all that a message can be."""

    serial_launch: ClassVar[bool] = False

    overhead: Number = 1
    latency_s: Number = 0
    limit: Number | None = None

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        return Message(self.launch_s, self.latency_s, size_bytes * self.overhead, self.limit, "channels")


@given(st.integers(2, 6), sizes, positive, not_negative, not_negative, not_negative, positive, positive)
def test_a_ring_of_limited_messages(
    n: int, size: int, bandwidth: Number, route_s: Number, launch_s: Number, added_s: Number, factor: Number,
    limit: Number,
) -> None:  # fmt: skip
    mesh = full_mesh(n, bandwidth, route_s)
    transport = Channels("channels", launch_s, 1 + factor, added_s, limit)
    hop_s = launch_s + size * (1 + factor) / min(bandwidth, limit) + route_s + added_s
    assert simulate(ring_all_gather(mesh, size), Machine(mesh, transport)).time_s == (n - 1) * hop_s


@given(st.integers(2, 6), sizes, positive, positive)
def test_limits_below_a_ports_share_leave_the_port_idle(n: int, size: int, port: Number, limit: Number) -> None:
    topology = switch(n, port, Fraction(0))
    time_s = simulate(direct_all_gather(topology, size), Machine(topology, Channels("c", limit=limit))).time_s
    assert time_s == size / min(limit, port / (n - 1))


@given(st.integers(3, 6), sizes, positive)
def test_launches_are_serial_or_not(n: int, size: int, launch_s: Number) -> None:
    mesh = full_mesh(n, Fraction(1), Fraction(0))
    schedule = direct_all_gather(mesh, size)
    assert simulate(schedule, Machine(mesh, Channels("c", launch_s))).time_s == launch_s + size
    assert simulate(schedule, Machine(mesh, CommLibrary("serial", launch_s))).time_s == (n - 1) * launch_s + size


@given(topologies_and_schedules(6), sizes, not_negative, not_negative, st.none() | positive)
def test_what_was_spent_is_all_of_the_time(
    drawn: tuple[Topology, str], size: int, launch_s: Number, latency_s: Number, limit: Number | None
) -> None:
    topology, name = drawn
    machine = Machine(topology, Channels("c", launch_s, Fraction(3, 2), latency_s, limit))
    events = simulate(collective(name, topology, size), machine, explain=True).events
    free_s: dict[tuple[int, int], Number] = {}
    for event in sorted(events, key=lambda event: (event.start_s, event.step)):
        after_s = event.end_s - topology.route(event.rank, event.peer).latency_s - latency_s
        begun_s = free_s.get((event.rank, event.lane), 0)
        assert sum(seconds for _, seconds in event.spent) == event.end_s - begun_s
        assert all(seconds > 0 for _, seconds in event.spent)
        free_s[event.rank, event.lane] = after_s


def test_the_time_of_calls_is_explained_too() -> None:
    mesh = full_mesh(4, Fraction(1), Fraction(0))
    schedule = attention("ring-attention", mesh, Workload(sequence=16, head_dim=2, heads=1, mask="full"), buffers=2)
    events = simulate(schedule, Machine(mesh, compute=ComputeRate(Fraction(1, 10))), explain=True).events
    ended_s: dict[int, Number] = {}
    for event in (event for event in events if event.flops):
        assert sum(seconds for _, seconds in event.spent) == event.end_s - ended_s.get(event.rank, 0)
        ended_s[event.rank] = event.end_s
    assert {what for event in events for what, _ in event.spent} >= {"compute", "0->1", "waiting for buffer"}


def test_nothing_is_explained_unasked() -> None:
    mesh = full_mesh(3)
    assert not any(event.spent for event in simulate(ring_all_gather(mesh, 8), Machine(mesh)).events)


def test_a_limit_names_itself_and_loses_ties() -> None:
    mesh = full_mesh(2, Fraction(4), Fraction(0))
    for limit, name in ((Fraction(3), "channels"), (Fraction(4), "0->1")):
        events = simulate(ring_all_gather(mesh, 12), Machine(mesh, Channels("c", limit=limit))).events
        assert events[0].bound_by == name


@given(st.lists(positive, min_size=1, max_size=6), positive)
def test_flows_with_limits_of_their_own_are_max_min_fair(limits: list[Number], capacity: Number) -> None:
    rates, bottlenecks = max_min_rates([(0,)] * len(limits), [capacity], limits)
    level = max(rates)
    for rate, limit, bottleneck in zip(rates, limits, bottlenecks, strict=True):
        assert rate == min(limit, level)
        assert bottleneck == (0 if rate < limit or (rate == level and sum(rates) == capacity) else OWN_LIMIT)
    assert sum(rates) == min(capacity, sum(limits))


def test_a_launch_that_is_no_time_is_refused() -> None:
    with pytest.raises(TopologyError, match="'t': launch_s is -1, expected 0 or more"):
        CommLibrary("t", -1)
