"""Explanations: the chain that ends last adds up to the whole time, and both engines tell the same."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from sim.simulate import ENGINES
from sim.simulate import simulate as by_engine
from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.libraries.library import CommLibrary
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.profile import member
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.timeline.critical_path import critical_path, kind_of
from tasp_lab.timeline.events import SEND, Event, Timeline
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.graph import SharedCapacity, Topology
from tasp_lab.workload.layer import Workload
from tests.support.strategies import topologies_and_schedules


@settings(max_examples=60)
@given(topologies_and_schedules(6), st.integers(1, 100), st.fractions(Fraction(0), Fraction(5), max_denominator=10))
def test_the_chain_adds_up_to_the_whole(drawn: tuple[Topology, str], size: int, launch_s: Fraction) -> None:
    topology, name = drawn
    machine = Machine(topology, CommLibrary("t", launch_s))
    timeline = simulate(collective(name, topology, size), machine, explain=True)
    assert sum(seconds for _, seconds in critical_path(timeline)) == timeline.time_s


@pytest.mark.parametrize("name", ["ring-attention", "zigzag-ring-attention", "tasp"])
@pytest.mark.parametrize("rate", [Fraction(1, 1000), Fraction(1000)])
def test_the_chain_of_a_layer_adds_up(name: str, rate: Fraction) -> None:
    mesh = full_mesh(5, Fraction(1), Fraction(1, 10))
    schedule = attention(name, mesh, Workload(sequence=40, head_dim=2, mask="causal", heads=1))
    timeline = simulate(schedule, Machine(mesh, compute=ComputeRate(rate)), explain=True)
    path = critical_path(timeline)
    assert sum(seconds for _, seconds in path) == timeline.time_s
    computing_s = sum(seconds for what, seconds in path if what == "compute")
    assert (computing_s > timeline.time_s / 2) == (rate < 1)


def test_nothing_takes_no_time() -> None:
    assert critical_path(Timeline("predicted", "none", "none", 1, ())) == []


def test_messages_that_take_no_time_do_not_wait_for_each_other() -> None:
    waited = (("waiting for block", 1.0),)
    events = [Event(rank, 0, 1, SEND, 1 - rank, rank, 0, 1.0, 1.0, "", "block", spent=waited) for rank in (0, 1)]
    first = Event(1, 1, 0, SEND, 0, 2, 8, 0.0, 1.0, "1->0", "", spent=(("1->0", 1.0),))
    assert critical_path(Timeline("predicted", "two", "pair", 2, (first, *events))) == [("1->0", 1.0)]


def test_kinds() -> None:
    two = nodes(2, 2, "switch", "rails")
    names = ("0->node0", "node1->2", "1->rail1", "rail0->spine", "launch", "2 channels, LL", "ring, Simple")
    kinds = ["port", "port", "NIC", "NIC", "launch", "channel rule", "ring rate"]
    assert [kind_of(name, two) for name in names] == kinds
    assert kind_of("0->1", full_mesh(2)) == "link"
    mesh = full_mesh(2)
    links = tuple(mesh.links)
    shared = Topology("s", 2, links, (SharedCapacity("medium", 1e9, ("0->1",)),))
    assert kind_of("medium", shared) == "shared capacity"


def test_a_ring_step_on_nvswitch_is_explained_by_the_channel_rule() -> None:
    hopper = member("h100-8")
    assert hopper is not None
    timeline = simulate(ring_all_gather(hopper.topology, 2**25), hopper, explain=True)
    by_kind: dict[str, float] = {}
    for what, seconds in critical_path(timeline):
        kind = kind_of(what, hopper.topology)
        by_kind[kind] = by_kind.get(kind, 0.0) + float(seconds)
    assert max(by_kind, key=lambda kind: by_kind[kind]) == "channel rule"
    assert sum(by_kind.values()) == pytest.approx(float(timeline.time_s))


def test_engines_by_name() -> None:
    topology = switch(8)
    schedule = ring_all_gather(topology, 2**20)
    times = [float(by_engine(schedule, Machine(topology), engine).time_s) for engine in ENGINES]
    assert times == pytest.approx([times[0]] * 3, rel=1e-9)
    with pytest.raises(ScheduleError, match="'simgrid' is unknown, expected one of auto, simpy, array"):
        by_engine(schedule, Machine(topology), "simgrid")  # type: ignore[arg-type]


def test_a_timeline_without_events_has_its_time() -> None:
    topology = switch(8)
    schedule = ring_all_gather(topology, 2**20)
    bare = by_engine(schedule, Machine(topology), "array", events=False)
    assert not bare.events
    assert bare.time_s == pytest.approx(by_engine(schedule, Machine(topology), "simpy").time_s)


def test_fractions_stay_exact_whatever_their_number() -> None:
    mesh = full_mesh(50, Fraction(3), Fraction(1, 7))
    assert by_engine(ring_all_gather(mesh, 6), Machine(mesh)).time_s == 49 * (2 + Fraction(1, 7))
