"""The model of NCCL and RCCL: channel rules, protocols, and what messages of both kinds cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.event.engine import simulate
from sim.messages import call_facts
from tasp_lab.machines.libraries.channels import (
    INTER_DOMAIN,
    INTRA_DOMAIN,
    ChannelLibrary,
    ChannelRule,
    channel_rule,
    halved,
    power_of_two,
)
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.profile import load_profile, member
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.collectives.point_to_point import all_to_all, send_recv

MIB = 2**20


def machine(text: str) -> Machine:
    found = member(text)
    assert found is not None
    return found


def library(text: str) -> ChannelLibrary:
    found = machine(text).comm_library
    assert isinstance(found, ChannelLibrary)
    return found


counts = st.integers(1, 512)


@given(counts, st.integers(0, 6), counts)
def test_the_rule_gives_powers_of_two_that_fit(ranks: int, exponent: int, per_peer: int) -> None:
    channels = 2**exponent
    rule = channel_rule(ranks, channels, power_of_two(per_peer))
    assert 1 <= rule.least <= rule.most <= channels
    assert rule.least == 1 or rule.least * ranks <= channels
    assert rule.least == rule.most or 2 * rule.least * ranks > channels


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 2**36), st.integers(1, 2**36))
def test_longer_messages_get_no_fewer_channels(low: int, more: int, size: int, longer: int) -> None:
    rule = ChannelRule(2**low, 2 ** (low + more))
    few, many = (rule.channels(bytes_, 2**16, 2**24) for bytes_ in sorted((size, longer)))
    assert 1 <= few <= many <= rule.most
    assert many == rule.most or max(size, longer) <= many * 2**24 or 2 * many > rule.most


def test_eight_ranks_with_32_channels_place_every_step_of_a_ring() -> None:
    """Read from NCCL's code: 4 channels up to 64 MiB, and twice as many for each doubling up to 32 above 256 MiB."""
    rule = library("h100-8").rule
    got = [rule.channels(mib * MIB, 2**16, 2**24) for mib in (16, 32, 64, 65, 128, 129, 256, 257, 512, 16384)]
    assert got == [4, 4, 4, 8, 8, 16, 16, 32, 32, 32]


@pytest.mark.parametrize(
    ("name", "most"),
    [("h100-10x1", 2), ("h100-10x8", 1), ("h100-2x8", 4), ("h100-2x1", 4), ("h100-8", 32), ("gb200-36x4", 2),
     ("a100-10x1", 1), ("gh200-10x1", 1), ("mi300x-2x8", 2), ("mi300x-4x8", 1)],
)  # fmt: skip
def test_the_network_decides_for_all_peers(name: str, most: int) -> None:
    """By hand: 4 channels fill a NIC of 400 Gbit/s; 16 channels (4 with one GPU per node) serve groups of 8 peers each.

    Two racks have 64 channels, not 144, for 18 groups. A100 and GH200 have 2 with one GPU per node, for 2 groups. RCCL
    has 64 for single peers, 16 or 32, and leaves one free.
    """
    assert library(name).rule.most == most


@given(st.integers(1, 4096), st.integers(0, 6), st.integers(1, 16), st.integers(1, 8))
def test_all_groups_of_peers_fit_or_there_is_one_channel(ranks: int, exponent: int, fill: int, group: int) -> None:
    groups = -(-ranks // group)
    most = halved(power_of_two(fill), groups, 2**exponent)
    assert most == 1 or most * groups <= 2**exponent


def test_places() -> None:
    found = library("h100-2x8").places(np.array([0, 7, 8, 15]), np.array([7, 8, 9, 0]))
    assert found.tolist() == [INTRA_DOMAIN, INTER_DOMAIN, INTRA_DOMAIN, INTER_DOMAIN]


@given(st.integers(1, 2**34))
def test_a_message_takes_launch_hop_last_chunk_and_bytes_over_the_narrowest(size: int) -> None:
    """The sum by hand of what the profile says, for one message inside a node."""
    found, of = library("h100-8"), load_profile("h100").parameters.numbers.__getitem__
    message = found.message(INTRA_DOMAIN, size, 1, first=True)
    channels = found.rule.channels(size, int(of("min_bytes_per_channel")), int(of("bytes_per_channel")))
    short = size <= of("short_message") * channels
    half = 0.5 if short else 1.0
    rate = min(channels * of("link_channel_rate") * half, of("link_payload") * half)
    hop = of("message_hop_ll" if short else "message_hop_simple")
    chunk = 0 if short else min(of("chunk"), size / channels) / of("link_channel_rate")
    got = message.launch_s + message.latency_s + of("link_latency")
    assert message.max_bytes_per_s is not None
    got += message.wire_bytes / min(message.max_bytes_per_s, of("link_bandwidth"))
    assert got == pytest.approx(of("message_launch") + hop + chunk + size / rate, rel=1e-9)


def test_several_peers_leave_less_of_a_port() -> None:
    found = library("h100-8")
    one, many = (found.message(INTRA_DOMAIN, 64 * MIB, peers, first=True) for peers in (1, 7))
    assert many.wire_bytes / one.wire_bytes == pytest.approx(370.8 / 345)


def test_a_ring_step_below_64_mib_waits_for_channels_not_for_links() -> None:
    """The reason why TASP wins on NVSwitch at all: the port is four fifths idle."""
    hopper = machine("h100-8")
    ring_s = float(simulate(send_recv(hopper.topology, 32 * MIB), hopper).time_s)
    # 32 MiB to one peer, or the same bytes to seven
    spread_s = float(simulate(all_to_all(hopper.topology, 32 * MIB // 7), hopper).time_s)
    wires = replace(hopper, comm_library=replace(hopper.comm_library, rule=ChannelRule(32, 32)))  # type: ignore[call-arg]
    assert ring_s / spread_s > 2.5
    assert simulate(send_recv(hopper.topology, 32 * MIB), wires).time_s < ring_s / 2.5


def test_a_fused_ring_takes_the_protocol_that_nccl_itself_estimates_least_for() -> None:
    """NCCL's estimate: base + (n-1) hops + bytes / ring rate, with the numbers of its code for Hopper.

    Sizes lie close together, as protocols change where two estimates cross.
    """
    hopper = machine("h100-8")
    for size in np.geomspace(2**10, 2**28, 100).astype(int).tolist():
        schedule = replace(ring_all_gather(hopper.topology, size), fused=True)
        estimates = {
            name: base + 7 * hop + 7 * size / rate
            for name, base, hop, rate in (
                ("LL", 6.6e-6, 0.6e-6, 141e9),
                ("LL128", 14e-6, 1.9e-6, 0.92 * 360e9),
                ("Simple", 8.4e-6, 3.4e-6, 360e9),
            )
        }
        found = hopper.comm_library.bind(call_facts(schedule))
        assert isinstance(found, ChannelLibrary)
        assert found.ring is not None
        assert found.ring.name == f"ring, {min(estimates, key=lambda name: estimates[name])}"


@pytest.mark.parametrize(("name", "rate"), [("h100-2x1", 24e9), ("h100-10x1", 20.4e9)])
@given(size=st.integers(1, 2**12))
def test_a_ring_of_lone_gpus_counts_on_the_hops_of_trees(name: str, rate: float, size: int) -> None:
    """Short shards go by LL: half of the ring rate of a NIC, no more than LL reaches over so many nodes."""
    hopper, of = machine(name), load_profile("h100").parameters.numbers.__getitem__
    hops = hopper.topology.world_size - 1
    time_s = simulate(replace(ring_all_gather(hopper.topology, size), fused=True), hopper).time_s
    assert float(time_s) == pytest.approx(of("base_ll") + hops * (of("lone_hop_ll") + size / rate), rel=1e-9)


def test_schedules_that_are_not_fused_are_not_bound() -> None:
    hopper = machine("h100-8")
    assert hopper.comm_library.bind(call_facts(ring_all_gather(hopper.topology, 64))) == hopper.comm_library
