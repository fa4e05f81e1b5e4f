"""Messages slow the kernel calls beside them: closed forms, a second implementation, and what must not change."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.array import engine as array_engine
from sim.event.engine import simulate
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.libraries.library import TcpLibrary
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.timeline.events import SEND, Event
from tasp_lab.topology.builders import full_mesh, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.contention import ChannelsByPair, EqualChannels, contentions, on_compute_lanes
from tests.support.simulations import Simulation, attention_cases, backward_cases, launches, simulations

some = settings(max_examples=40)
rates = st.builds(ComputeRate, st.fractions(Fraction(1, 4), Fraction(200), max_denominator=4))
seconds = st.fractions(Fraction(1, 20), Fraction(20), max_denominator=20)
shares = st.fractions(Fraction(0), Fraction(9, 10), max_denominator=10)


# ------------------------------------------------------------------------------------------------- closed forms


def two_ranks(hop_s: Fraction, call_s: Fraction, share: Fraction, launch_s: Fraction = Fraction(0)) -> list[Event]:
    """Two calls of each of two ranks, of 4 FLOPs each; their keys are swapped in the meantime, 4 bytes each way."""
    topology = full_mesh(2, 4 / hop_s, Fraction(0))
    schedule = attention("ring-attention", topology, Workload(2, head_dim=1, heads=1, mask="full"))
    contention = Contention(1 / share, 1, 1) if share else NONE
    library = EqualChannels("channels", launch_s)
    return list(
        simulate(schedule, Machine(topology, library, ComputeRate(4 / call_s), contention=contention), True).events
    )


def calls_of(events: list[Event], rank: int = 0) -> list[Event]:
    return sorted((e for e in events if e.kind != SEND and e.rank == rank), key=lambda event: event.start_s)


def test_a_call_of_ten_seconds_beside_a_transfer_of_four() -> None:
    """With a quarter of the GPU taken, 4 s give 3 s of the call: it takes 11 s, the next one 10 s."""
    events = two_ranks(Fraction(4), Fraction(10), Fraction(1, 4))
    assert [(e.start_s, e.end_s) for e in calls_of(events)] == [(0, 11), (11, 21)]
    assert [e.spent for e in calls_of(events)] == [
        (("compute", 10), ("contention", 1)),
        (("compute", 10),),
    ]
    assert {(e.start_s, e.end_s) for e in events if e.kind == SEND} == {(0, 4)}


def test_a_message_takes_channels_from_its_launch_on() -> None:
    """Launched at 3 s, in flight until 7 s: the call of 4 s has 1 s left at 3 s, and then half the GPU."""
    events = two_ranks(Fraction(4), Fraction(4), Fraction(1, 2), Fraction(3))
    assert [(e.start_s, e.end_s) for e in calls_of(events)] == [(0, 5), (7, 11)]


@given(seconds, seconds, shares)
def test_two_ranks(hop_s: Fraction, call_s: Fraction, share: Fraction) -> None:
    """A transfer that ends within the call costs its share; else the whole call runs at the lower speed."""
    first_s = min(call_s / (1 - share), call_s + share * hop_s)
    calls = calls_of(two_ranks(hop_s, call_s, share))
    assert [e.end_s for e in calls] == [first_s, max(first_s, hop_s) + call_s]


@given(st.integers(2, 6), st.booleans(), st.integers(1, 4), st.integers(1, 5), seconds, seconds)
def test_sends_share_blocks_with_receives(
    n: int, is_mesh: bool, have: int, most: int, hop_s: Fraction, call_s: Fraction
) -> None:
    """Around a ring each rank sends and receives one message at a time. All n - 1 hops slow the first n - 1 calls."""
    topology = (full_mesh if is_mesh else switch)(n, 4 / hop_s, Fraction(0))
    schedule = attention("ring-attention", topology, Workload(n, head_dim=1, heads=1, mask="full"))
    machine = Machine(
        topology, EqualChannels("c", 0, have), ComputeRate(4 / call_s), contention=Contention(Fraction(6), 1, most)
    )
    share = Fraction(min(have, most), 6)
    assume(call_s >= hop_s)
    expected_s = call_s * n + share * hop_s * (n - 1)
    assert simulate(schedule, machine).time_s == expected_s


def test_messages_to_several_peers_add_up_to_the_cap() -> None:
    """TASP on 4 ranks sends to all 3 others at once, 2 channels each: 6 of 12, or 5 with a cap of 5."""
    topology = full_mesh(4, Fraction(1), Fraction(0))
    schedule = attention("tasp", topology, Workload(4 * 3, head_dim=1, heads=1, mask="full"))
    for cap, share in ((8, Fraction(6, 12)), (5, Fraction(5, 12))):
        machine = Machine(
            topology,
            EqualChannels("c", 0, 2),
            ComputeRate(Fraction(1, 10)),
            contention=Contention(Fraction(12), 1, cap),
        )
        first = calls_of(list(simulate(schedule, machine, explain=True).events))[0]
        hop_s = max(e.end_s for e in simulate(schedule, machine).events if e.kind == SEND and e.step == 0)
        assert dict(first.spent)["contention"] >= share * hop_s


# -------------------------------------------------------------------------------------- a second implementation


# ------------------------------------------------------------------------------------------------ the two engines


# -------------------------------------------------------------------------------------------------------- symmetry


@pytest.mark.parametrize("topology", [full_mesh(6, 7.0, 0.5), switch(6, 7.0, 0.5)], ids=lambda each: each.name)
def test_what_is_alike_stays_alike(topology: Topology) -> None:
    """Equal ranks with equal messages are as few classes as without contention."""
    schedule = attention(
        "ring-attention", topology, Workload(60 * topology.world_size, head_dim=1, heads=1, mask="full")
    )
    machine = Machine(topology, EqualChannels("c", 0.1), ComputeRate(4000.0))
    slowed = replace(machine, contention=Contention(12, 1, 4))
    assert array_engine.run(schedule, slowed).classes == array_engine.run(schedule, machine).classes
    assert array_engine.run(schedule, slowed).program.gpus == 1


def test_ranks_with_other_messages_are_other_classes() -> None:
    """Equal calls beside messages of different channels end at different times."""
    topology = full_mesh(4, 7.0, 0.5)
    schedule = attention("ring-attention", topology, Workload(240, head_dim=1, heads=1, mask="full"))
    machine = Machine(topology, ChannelsByPair("c"), ComputeRate(4000.0), contention=Contention(12, 1, 4))
    ends = {
        e.rank: e.end_s for e in array_engine.run(schedule, machine).timeline().events if e.kind != SEND and not e.step
    }
    assert len(set(ends.values())) > 1


# --------------------------------------------------------------------------------------------- what must not change


@some
@given(simulations(), contentions(), st.booleans())
def test_communication_alone_and_messages_without_channels_are_not_slowed(
    case: Simulation, contention: Contention, computes: bool
) -> None:
    """Copy engines, TCP and ideal links: every event is the same, to the last bit in the array engine."""
    schedule, machine = case
    library = TcpLibrary("gloo", Fraction(1, 3), Fraction(9, 10)) if computes else machine.comm_library
    compute = machine.compute if computes else INSTANT
    plain = replace(machine, comm_library=library, compute=compute, contention=NONE)
    assert_unchanged(schedule, plain, replace(plain, contention=contention))


def assert_unchanged(schedule: Schedule, plain: Machine, changed: Machine) -> None:
    assert simulate(schedule, changed, explain=True) == simulate(schedule, plain, explain=True)
    before, after = (array_engine.run(schedule, each, explain=True) for each in (plain, changed))
    assert after.time_s == before.time_s
    assert after.timeline() == before.timeline()


# ------------------------------------------------------------------------------------------------------ what holds


@some
@given(attention_cases() | backward_cases(), launches, rates, contentions(), st.integers(1, 2))
def test_no_call_is_faster_than_alone_or_slower_than_beside_all_channels(
    case: tuple[Topology, Schedule], launch_s: Fraction, compute: ComputeRate, contention: Contention, lanes: int
) -> None:
    machine = Machine(case[0], ChannelsByPair("channels", launch_s), compute, contention=contention)
    for event in simulate(on_compute_lanes(case[1], lanes), machine, explain=True).events:
        if event.kind != SEND:
            spent = dict(event.spent)
            assert compute.flops_per_s is not None
            alone_s, took_s = event.flops / compute.flops_per_s, event.end_s - event.start_s
            assert spent.get("compute", 0) == alone_s  # packed documents: a call may have no pair
            assert took_s == alone_s + spent.get("contention", 0)
            assert alone_s <= took_s <= alone_s / (1 - contention.share(10**6, 0))
