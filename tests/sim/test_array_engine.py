"""The array engine beyond what the event engine can run: closed forms of large worlds, limits, the order of events."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings

from sim.array import engine as array_engine
from sim.event import engine
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import INSTANT, CommLibrary, Compute, ComputeRate, Machine
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.build import collective, linear_schedules
from tasp_lab.schedules.collectives.all_gather import multi_ring_all_gather, ring_all_gather
from tasp_lab.timeline.events import Timeline
from tasp_lab.topology.builders import full_mesh, ring, switch
from tasp_lab.topology.graph import Link, Topology
from tasp_lab.workload.layer import Workload
from tests.support.links import with_links, without_links
from tests.support.routes import direct
from tests.support.simulations import (
    Library,
    assert_agree,
    launches,
    shards,
)
from tests.support.strategies import topologies_and_schedules
from tests.support.tile_times import TileTimes

some = settings(max_examples=60)


# ------------------------------------------------------------------------------------------------ the two engines


def uneven_switch(*quarters: tuple[int, int]) -> Topology:
    """Of each rank, a link to the switch and one back, in quarters of a byte per second."""
    links: list[Link] = []
    for rank, (up, down) in enumerate(quarters):
        links += [
            Link(rank, "switch", Fraction(up, 4), Fraction(0)),
            Link("switch", rank, Fraction(down, 4), Fraction(0)),
        ]
    return Topology("uneven switch", len(quarters), tuple(links))


ALONE = full_mesh(1), attention("ring-attention", full_mesh(1), Workload(1, head_dim=1, heads=1, mask="full"))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (TileTimes(1, 1, Fraction(2), Fraction(3)), [("call", 3), ("tiles", 2)]),
        (TileTimes(1, 1, Fraction(2), Fraction(0)), [("tiles", 2)]),
        (INSTANT, []),
    ],
)
def test_what_takes_no_time_is_not_listed(compute: Compute, expected: list[tuple[str, int]]) -> None:
    topology, schedule = ALONE
    machine = Machine(topology, compute=compute)
    for timeline in (
        array_engine.run(schedule, machine, explain=True).timeline(),
        engine.simulate(schedule, machine, explain=True),
    ):
        assert [list(event.spent) for event in timeline.events] == [expected]


def test_launches_of_different_lengths_on_uneven_ports() -> None:
    topology = uneven_switch((1, 1), (5, 2), (1, 7), (7, 2))
    library = Library("library", Fraction(0), Fraction(3, 4))
    assert_agree(multi_ring_all_gather(topology, 7200, chunks=3), Machine(topology, library))


@pytest.mark.parametrize("name", sorted(CIRCULATIONS))
def test_attention_on_equal_links(name: str) -> None:
    """Much happens at the same time, and little of it differs from rank to rank."""
    topology = switch(6, Fraction(7), Fraction(1, 3))
    schedule = attention(name, topology, Workload(60, head_dim=1, mask="causal", heads=1), buffers=3)
    assert_agree(schedule, Machine(topology, CommLibrary("t", Fraction(1, 9)), ComputeRate(Fraction(40))))


# --------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("n", [8, 64, 512])
def test_closed_forms(n: int) -> None:
    bandwidth, latency_s, shard = 50e9, 1e-6, (n - 1) * 2**20
    step_s = shard / bandwidth
    mesh, star = full_mesh(n, bandwidth, latency_s), switch(n, bandwidth, latency_s)
    expected_s = {
        (mesh, "ring"): (n - 1) * (latency_s + step_s),
        (mesh, "multi-ring"): (n - 1) * (latency_s + step_s / (n - 1)),
        (mesh, "direct"): latency_s + step_s,
        (star, "ring"): (n - 1) * (latency_s + step_s),
        (star, "multi-ring"): (n - 1) * (latency_s + step_s),
        (star, "direct"): latency_s + (n - 1) * step_s,
    }
    for (topology, name), time_s in expected_s.items():
        found = array_engine.run(collective(name, topology, shard), Machine(topology))
        assert found.time_s == pytest.approx(time_s, rel=1e-9), (topology.name, name)


@pytest.mark.parametrize("chunks", [1, 3, 64])
def test_pieces_wait_for_nothing_but_the_first(chunks: int) -> None:
    """A lane is always busy when the first chunk is around before the last has left: (n-1) shards and one latency."""
    n, bandwidth, latency_s, shard = 64, 50e9, 1e-6, 64 * 2**20
    mesh = full_mesh(n, bandwidth, latency_s)
    found = array_engine.run(ring_all_gather(mesh, shard, chunks=chunks), Machine(mesh))
    stalls = n - 1 if chunks == 1 else 1
    assert found.time_s == pytest.approx((n - 1) * shard / bandwidth + stalls * latency_s, rel=1e-9)


# ----------------------------------------------------------------------------------------------------- the edges


def test_machines_without_a_route_are_refused_as_by_the_reference() -> None:
    schedule = collective("ring", full_mesh(4), 8)
    for topology in (full_mesh(5), direct(without_links(full_mesh(4), ["3>0"]))):
        refusals = []
        for simulate in (array_engine.run, engine.simulate):
            with pytest.raises(ScheduleError) as refusal:
                simulate(schedule, Machine(topology))
            refusals.append(str(refusal.value))
        assert len(set(refusals)) == 1


def test_a_timeline_that_does_not_fit_is_refused() -> None:
    mesh = full_mesh(8)
    found = array_engine.run(collective("ring", mesh, 8), Machine(mesh))
    assert len(found.timeline(56).events) == 56
    with pytest.raises(ScheduleError, match=r"'ring' has 56 messages and kernel calls; a timeline has at most 55"):
        found.timeline(55)


def test_more_that_differ_than_there_is_memory_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks around rings are not enumerated; where they share links and nothing is alike, they are."""
    monkeypatch.setattr("sim.array.engine.MAX_TRANSFERS", 55)
    mesh, uneven = full_mesh(8), with_links(switch(8), [f"{rank}>switch={9 + rank}GB/s" for rank in range(8)])
    assert array_engine.run(collective("multi-ring", mesh, 70), Machine(mesh)).operations == 392
    for name, topology in (("direct", mesh), ("multi-ring", uneven)):
        with pytest.raises(ScheduleError, match=r"distinct transfers and kernel calls, expected at most 55"):
            array_engine.run(collective(name, topology, 70), Machine(topology))


@some
@given(topologies_and_schedules(max_ranks=6), shards, launches)
def test_events_come_in_their_order(case: tuple[Topology, str], shard: int, launch_s: Fraction) -> None:
    topology, name = case
    schedule = collective(name, topology, shard)
    assume(schedule.transfers <= 400)
    events = array_engine.run(schedule, Machine(topology, CommLibrary("t", launch_s))).timeline().events
    assert list(events) == sorted(events, key=lambda event: (event.end_s, event.start_s, event.rank, event.lane))
    assert not any(event.spent for event in events)


def test_what_time_went_to_adds_up() -> None:
    """From when the lane was free until the last byte arrived."""
    topology = ring(5)
    machine = Machine(topology, CommLibrary("t", 1e-6), ComputeRate(1e9))
    schedule = attention("ring-attention", topology, Workload(640, head_dim=8, heads=1, mask="full"), buffers=2)
    timeline = array_engine.run(schedule, machine, explain=True).timeline()
    last_sent_s: dict[tuple[int, int], float] = defaultdict(float)
    for event in sorted(timeline.events, key=lambda event: (event.rank, event.lane, event.step)):
        lane = event.rank, event.lane
        assert sum(seconds for _, seconds in event.spent) == pytest.approx(float(event.end_s) - last_sent_s[lane])
        last_sent_s[lane] = float(event.end_s) - dict(event.spent).get("latency", 0.0)


def test_a_message_shorter_than_rounding_is_bound_by_its_narrowest_link() -> None:
    """Calls take seconds, messages 1e-12 s, of which nothing is left in a time of millions of seconds."""
    mesh = full_mesh(4, 1e15, 0.0)
    layer = Workload(4 * 512, batch=2, heads=8, kv_heads=4, head_dim=8, mask="causal", kind="linear")
    (schedule,) = linear_schedules("lasp", mesh, layer)
    machine = Machine(mesh, compute=ComputeRate(1.0))

    def bound_by(timeline: Timeline) -> dict[tuple[str, int, int], str]:
        return {(event.kind, event.rank, event.step): event.bound_by for event in timeline.events}

    found = bound_by(array_engine.run(schedule, machine, explain=True).timeline())
    assert found == bound_by(engine.simulate(schedule, machine))
