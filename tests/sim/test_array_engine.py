"""The array engine and the SimPy engine, which is exact here, agree on all that they say of every transfer and call."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sim.array import engine as array_engine
from sim.event import engine
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import Message
from tasp_lab.machines.machine import INSTANT, CommLibrary, Compute, ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.build import collective, linear_schedules
from tasp_lab.schedules.collectives.all_gather import multi_ring_all_gather, ring_all_gather
from tasp_lab.schedules.registry import COLLECTIVES
from tasp_lab.timeline.events import Event, Timeline
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.derived import with_links, without_links
from tasp_lab.topology.graph import Link, Topology
from tasp_lab.workload.layer import Workload
from tests.sim.test_backward_engine import backward_cases
from tests.sim.test_engine_against_reference import (
    attention_cases,
    computes,
    gossip_cases,
    launches,
    shards,
    uneven_topologies,
)
from tests.support.strategies import complete_topologies, topologies_and_schedules
from tests.support.tile_times import TileTimes

some = settings(max_examples=60)


@dataclass(frozen=True)
class Library(CommLibrary):
    """A library whose messages differ in every way they can: by place, by peers, and at the first step."""

    serial_launch: ClassVar[bool] = False

    max_bytes_per_s: Number | None = None
    overhead_bytes: Number = 0

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        return (source + destination) % 2

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        most = None if self.max_bytes_per_s is None else self.max_bytes_per_s * peers / (1 + place)
        launch_s = 2 * self.launch_s if first else self.launch_s
        return Message(launch_s, Fraction(place, 2), size_bytes + self.overhead_bytes, most, "channels")


class PatientLibrary(Library):
    """The same, posting messages one after the other."""

    serial_launch: ClassVar[bool] = True


plain = st.builds(lambda launch_s: CommLibrary("plain", launch_s), launches)
libraries = plain | st.builds(
    lambda kind, *numbers: kind("library", *numbers),
    st.sampled_from([Library, PatientLibrary]),
    launches,
    st.none() | st.fractions(Fraction(1, 4), Fraction(20), max_denominator=6),
    st.sampled_from([Fraction(0), Fraction(1, 3)]),
)
topologies = uneven_topologies(("full-mesh", "switch", "two switches"), max_ranks=5) | complete_topologies(6)


def assert_agree(schedule: Schedule, machine: Machine) -> None:
    """Every start, end, bound and waiting time is that of the reference."""
    found = array_engine.run(schedule, machine, explain=True)
    expected = engine.simulate(schedule, machine, explain=True)
    assert found.time_s == pytest.approx(float(expected.time_s), rel=1e-9)
    assert found.operations == len(expected.events)
    assert found.classes <= found.operations
    mine, theirs = _by_operation(found.timeline()), _by_operation(expected)
    assert mine.keys() == theirs.keys()
    for operation, events in theirs.items():
        for event, other in zip(events, mine[operation], strict=True):
            _assert_same(event, other)


def _by_operation(timeline: Timeline) -> dict[tuple[object, ...], list[Event]]:
    """The events of each transfer and of equal calls. Calls of a rank come in their order."""
    found: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    for e in timeline.events:
        found[e.kind, e.step, e.rank, e.peer, e.lane, e.blocks, e.bytes, e.flops].append(e)
    return found


def _assert_same(expected: Event, found: Event) -> None:
    rounding_s = 1e-9 * float(expected.end_s)
    assert found.start_s == pytest.approx(float(expected.start_s), abs=rounding_s)
    assert found.end_s == pytest.approx(float(expected.end_s), abs=rounding_s)
    assert found.bound_by == expected.bound_by
    lasting, exact = ([(what, seconds) for what, seconds in each.spent if seconds > rounding_s]
                      for each in (found, expected))  # fmt: skip
    assert [what for what, _ in lasting] == [what for what, _ in exact]
    for (_, seconds), (_, exact_s) in zip(lasting, exact, strict=True):
        assert seconds == pytest.approx(float(exact_s), abs=rounding_s)
    assert found.waited_for == expected.waited_for or _waited_not_at_all(found) or _waited_not_at_all(expected)


def _waited_not_at_all(event: Event) -> bool:
    """What it waited for came at the very moment at which it asked."""
    return f"waiting for {event.waited_for}" not in [what for what, _ in event.spent]


def small(schedule: Schedule) -> Schedule:
    assume(schedule.transfers <= 400)
    return schedule


# ------------------------------------------------------------------------------------------------ the two engines


@some
@given(topologies_and_schedules(max_ranks=7), shards, libraries)
def test_all_gathers(case: tuple[Topology, str], shard: int, library: CommLibrary) -> None:
    topology, name = case
    assert_agree(small(collective(name, topology, shard)), Machine(topology, library))


@some
@given(topologies, st.sampled_from(sorted(COLLECTIVES)), shards, libraries)
def test_collectives(topology: Topology, name: str, shard: int, library: CommLibrary) -> None:
    assert_agree(small(collective(name, topology, shard)), Machine(topology, library))


def uneven_switch(*quarters: tuple[int, int]) -> Topology:
    """Of each rank, a link to the switch and one back, in quarters of a byte per second."""
    links: list[Link] = []
    for rank, (up, down) in enumerate(quarters):
        links += [
            Link(rank, "switch", Fraction(up, 4), Fraction(0)),
            Link("switch", rank, Fraction(down, 4), Fraction(0)),
        ]
    return Topology("uneven switch", len(quarters), tuple(links))


@some
@example(uneven_switch((1, 1), (5, 2), (1, 7), (7, 2)), True, 3, 1, Library("library", Fraction(0), Fraction(3, 4)))
@given(topologies, st.booleans(), st.integers(1, 4), st.integers(1, 9), libraries)
def test_rings_in_pieces(topology: Topology, many: bool, chunks: int, units: int, library: CommLibrary) -> None:
    build = multi_ring_all_gather if many else ring_all_gather
    schedule = build(topology, 7200 * units, chunks=chunks)
    assert_agree(small(schedule), Machine(topology, library))


@some
@given(gossip_cases(), libraries)
def test_gossip(case: tuple[Topology, Schedule], library: CommLibrary) -> None:
    topology, schedule = case
    assert_agree(schedule, Machine(topology, library))


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


@some
@example(ALONE, CommLibrary("plain"), TileTimes(1, 1, Fraction(1, 9), Fraction(0)))
@given(attention_cases(), libraries, computes)
def test_attention(case: tuple[Topology, Schedule], library: CommLibrary, compute: Compute) -> None:
    topology, schedule = case
    assert_agree(schedule, Machine(topology, library, compute))


@some
@given(backward_cases(), libraries, computes)
def test_backward_passes(case: tuple[Topology, Schedule], library: CommLibrary, compute: Compute) -> None:
    topology, schedule = case
    assert_agree(schedule, Machine(topology, library, compute))


@pytest.mark.parametrize("buffers", [2, 3, 4, 5])
@pytest.mark.parametrize("name", sorted(CIRCULATIONS))
def test_attention_on_equal_links(name: str, buffers: int) -> None:
    """Much happens at the same time, and little of it differs from rank to rank."""
    topology = switch(6, Fraction(7), Fraction(1, 3))
    schedule = attention(name, topology, Workload(60, head_dim=1, mask="causal", heads=1), buffers=buffers)
    assert_agree(schedule, Machine(topology, CommLibrary("t", Fraction(1, 9)), ComputeRate(Fraction(40))))


@pytest.mark.parametrize("name", ["ring", "multi-ring"])
def test_changed_links(name: str) -> None:
    for changed in (with_links(full_mesh(5), ["0-3=7GB/s", "1>2=20GB/s"]), without_links(full_mesh(5), ["0-3", "1>2"])):
        assert_agree(collective(name, changed, 12345), Machine(changed, CommLibrary("t", 1.3e-6)))


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
    for topology in (full_mesh(5), without_links(full_mesh(4), ["3>0"])):
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


def test_one_rank_needs_no_time() -> None:
    for name in ("ring", "multi-ring", "direct", "trees"):
        found = array_engine.run(collective(name, full_mesh(1), 5), Machine(full_mesh(1)))
        assert (found.time_s, found.operations, found.timeline().events) == (0, 0, ())


def test_ten_runs_are_identical() -> None:
    topology = nodes(2, 4, "switch", "rails")
    schedule, machine = collective("multi-ring", topology, 12345), Machine(topology, CommLibrary("test", 1e-6))
    assert len({array_engine.run(schedule, machine).timeline().events for _ in range(10)}) == 1


@some
@given(topologies_and_schedules(max_ranks=6), shards, launches)
def test_events_come_in_their_order(case: tuple[Topology, str], shard: int, launch_s: Fraction) -> None:
    topology, name = case
    schedule = small(collective(name, topology, shard))
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


def test_slow_motion_takes_longer_by_the_scale() -> None:
    topology = replace(nodes(3, 4, "switch"), name="cluster")
    times_s = [
        array_engine.run(collective("multi-ring", each, 10**6), Machine(each)).time_s
        for each in (topology, topology.scaled(1 / 7))
    ]
    assert times_s[1] == pytest.approx(7 * times_s[0], rel=1e-9)


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
