"""The collectives that people measure: closed forms, bounds, what is sent, and the commands that name them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.array.engine import run
from sim.bounds.collectives import collective_bound_s
from sim.event.engine import simulate
from tasp_lab.cli.process import main
from tasp_lab.core.errors import NoDecompositionError, ScheduleError
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import CommLibrary, Machine
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.predict import predict
from tasp_lab.rings.rings import PAGE_BYTES
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import build_schedules, collective
from tasp_lab.schedules.collectives.kinds import CollectiveKind, busbw_bytes_per_s, describe
from tasp_lab.schedules.collectives.ring_reductions import (
    RingSumSteps,
    multi_ring_all_reduce,
    multi_ring_reduce_scatter,
    ring_all_reduce,
    ring_reduce_scatter,
)
from tasp_lab.schedules.registry import COLLECTIVES, check_names, kind_of
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.cuts import ranks_behind
from tasp_lab.topology.graph import Link, SharedCapacity, Topology
from tests.support.one_device import run_in_process
from tests.support.routes import direct
from tests.support.simulations import uneven_topologies
from tests.support.strategies import complete_topologies, exact_bandwidths, exact_latencies

world_sizes = st.integers(2, 9)
whole_shards = st.integers(1, 100).map(lambda units: units * 2520 * PAGE_BYTES)
"""Shards whose pages divide into all numbers of rings up to 10."""

small_topologies = complete_topologies(6).filter(lambda topology: topology.world_size <= 6)
OTHERS = [name for name, spec in COLLECTIVES.items() if spec.kind != "AllGather"]


def time_s(name: str, topology: Topology, shard_bytes: int) -> Number:
    return simulate(collective(name, topology, shard_bytes), Machine(topology)).time_s


# How long they take


@settings(max_examples=20)
@given(world_sizes, exact_bandwidths, exact_latencies, whole_shards)
def test_closed_forms_on_a_mesh(n: int, bandwidth: Fraction, latency: Fraction, shard: int) -> None:
    mesh = full_mesh(n, bandwidth, latency)
    around, spread = latency + shard / bandwidth, latency + shard / ((n - 1) * bandwidth)
    assert time_s("ring-reduce-scatter", mesh, shard) == (n - 1) * around
    assert time_s("ring-all-reduce", mesh, shard) == 2 * (n - 1) * around
    assert time_s("multi-ring-reduce-scatter", mesh, shard) == (n - 1) * spread
    assert time_s("multi-ring-all-reduce", mesh, shard) == 2 * (n - 1) * spread
    assert time_s("all-to-all", mesh, shard) == around
    assert time_s("send-recv", mesh, shard) == around


@settings(max_examples=20)
@given(world_sizes, exact_bandwidths, exact_latencies, whole_shards)
def test_closed_forms_on_a_switch(n: int, port: Fraction, latency: Fraction, shard: int) -> None:
    star = switch(n, port, latency)
    for way in ("ring", "multi-ring"):
        assert time_s(f"{way}-reduce-scatter", star, shard) == (n - 1) * (latency + shard / port)
        assert time_s(f"{way}-all-reduce", star, shard) == 2 * (n - 1) * (latency + shard / port)
    assert time_s("all-to-all", star, shard) == latency + (n - 1) * shard / port
    assert time_s("send-recv", star, shard) == latency + shard / port


@settings(max_examples=20)
@given(world_sizes, st.lists(exact_bandwidths, min_size=9, max_size=9), exact_latencies, whole_shards)
def test_all_reduce_does_not_pause_between_its_halves(
    n: int, bandwidths: list[Fraction], latency: Fraction, shard: int
) -> None:
    """Around links of any speed: the slowest of them carries 2 (n - 1) shards, and both halves together take longer."""
    links = tuple(Link(rank, (rank + 1) % n, bandwidths[rank], latency) for rank in range(n))
    around = Topology("uneven ring", n, links)
    halves = time_s("ring-reduce-scatter", around, shard) + time_s("ring", around, shard)
    slowest_s = shard / min(bandwidths[:n])
    assert 2 * (n - 1) * slowest_s + latency <= time_s("ring-all-reduce", around, shard) <= halves


@settings(max_examples=40)
@given(small_topologies, st.sampled_from(OTHERS), st.integers(1, 60))
def test_no_schedule_beats_the_bound(topology: Topology, name: str, shard: int) -> None:
    assert time_s(name, topology, shard) >= collective_bound_s(kind_of([name]), topology, shard)


@settings(max_examples=40)
@given(uneven_topologies(("full-mesh", "switch", "two switches", "ring")), st.sampled_from(OTHERS), st.integers(1, 50))
def test_no_schedule_beats_the_bound_of_unequal_links(topology: Topology, name: str, shard: int) -> None:
    """Also where capacities are shared, and where some pairs have no link."""
    try:
        schedule = collective(name, topology, shard)
    except (ScheduleError, NoDecompositionError):
        return
    bound_s = collective_bound_s(kind_of([name]), topology, shard)
    assert simulate(schedule, Machine(topology)).time_s >= bound_s > 0


@settings(max_examples=20)
@given(world_sizes, exact_bandwidths, whole_shards, st.sampled_from([full_mesh, switch]))
def test_without_latency_the_bound_is_reached(
    n: int, bandwidth: Fraction, shard: int, build: Callable[..., Topology]
) -> None:
    topology = build(n, bandwidth, Fraction(0))
    for name in ("multi-ring-reduce-scatter", "multi-ring-all-reduce", "all-to-all", "send-recv"):
        assert time_s(name, topology, shard) == collective_bound_s(kind_of([name]), topology, shard)


@given(st.integers(2, 3), st.integers(1, 3), exact_bandwidths, st.integers(1, 100))
def test_of_all_reduce_every_node_but_one_passes_the_message_twice(u: int, m: int, nic: Fraction, shard: int) -> None:
    """Links inside are much faster, so nodes are the parts of the bound: u NIC groups carry 2 (u - 1) messages."""
    cluster = nodes(
        u, m, link_bandwidth_bytes_per_s=10**6 * nic, link_latency_s=Fraction(0),
        nic_bandwidth_bytes_per_s=nic, nic_latency_s=Fraction(0),
    )  # fmt: skip
    assert collective_bound_s("AllReduce", cluster, shard) == Fraction(2 * (u - 1) * u * m * shard) / (u * m * nic)


def test_the_bound_of_reduce_scatter_is_that_of_all_gather_on_links_turned_around() -> None:
    """Rank 0 can be reached fast and left only slowly: that is no matter for its own shard, but for what it sends."""
    links = [Link(a, b, Fraction(1) if a == 0 else Fraction(100), Fraction(0)) for a in range(3) for b in range(3)]
    lame = Topology("lame", 3, tuple(link for link in links if link.source != link.destination))
    assert collective_bound_s("AllGather", lame, 10) == Fraction(10, 2), "its own shard leaves once"
    assert collective_bound_s("ReduceScatter", lame, 10) == Fraction(20, 2), "something of both other shards leaves it"


def test_a_shared_capacity_bounds_all_reduce() -> None:
    """All links are one bus: 2 (n - 1) messages of n shards pass it."""
    mesh = full_mesh(4, Fraction(5), Fraction(1))
    links = tuple(mesh.links)
    bus = Topology("bus", 4, links, (SharedCapacity("bus", Fraction(2), tuple(link.name for link in links)),))
    assert ranks_behind(bus, bus.shared[0]) == [0, 1, 2, 3]
    assert collective_bound_s("AllReduce", bus, 3) == Fraction(2 * 3 * 4 * 3, 2) + 1


@pytest.mark.parametrize("kind", get_args(CollectiveKind))
def test_one_rank_has_nothing_to_do(kind: CollectiveKind) -> None:
    alone = full_mesh(1)
    assert collective_bound_s(kind, alone, 5) == busbw_bytes_per_s(1, 5, 0, kind) == 0
    for name, spec in COLLECTIVES.items():
        if spec.kind == kind:
            assert (spec.builder(alone, 5).transfers, time_s(name, alone, 5)) == (0, 0)


@settings(max_examples=20)
@given(world_sizes, exact_bandwidths, whole_shards)
def test_busbw_is_the_ports_bandwidth_where_ports_are_always_busy(n: int, port: Fraction, shard: int) -> None:
    """That is what nccl-tests defines it for: whatever the collective, a number to hold against the hardware."""
    star = switch(n, port, Fraction(0))
    for name, spec in COLLECTIVES.items():
        if name != "trees":
            busbw = busbw_bytes_per_s(n, shard, time_s(name, star, shard), spec.kind)
            assert busbw == pytest.approx(float(port), rel=1e-12)


# What is sent


@settings(max_examples=30)
@given(small_topologies, st.sampled_from(OTHERS), st.integers(1, 300))
def test_every_rank_sends_what_its_collective_needs(topology: Topology, name: str, shard: int) -> None:
    n = topology.world_size
    sent = collective(name, topology, shard).bytes_sent().sum(axis=(0, 2))
    shards = {"ReduceScatter": n - 1, "AllReduce": 2 * (n - 1), "AllToAll": n - 1, "SendRecv": min(n - 1, 1)}
    assert sent.sum() == n * shards[kind_of([name])] * shard
    if "multi" not in name and "tree" not in name:
        assert (sent == shards[kind_of([name])] * shard).all()


@settings(max_examples=40)
@given(small_topologies, st.sampled_from(["ring", "multi-ring"]), st.integers(1, 300))
def test_reduce_scatter_backwards_is_an_all_gather(topology: Topology, way: str, shard: int) -> None:
    forward = collective(f"{way}-reduce-scatter", topology, shard)
    backwards = [Step(step.destination, step.source, step.lane, step.block) for step in reversed(forward.steps)]
    fields = (forward.world_size, forward.lanes, Blocks.of_data(forward.block_bytes))
    assert Schedule("backwards", *fields, forward.final, forward.initial, backwards).transfers == forward.transfers


@settings(max_examples=40)
@given(small_topologies, st.sampled_from(["ring", "multi-ring"]), st.integers(1, 300))
def test_all_reduce_is_reduce_scatter_and_then_all_gather(topology: Topology, way: str, shard: int) -> None:
    steps = [step.rows() for step in collective(f"{way}-all-reduce", topology, shard).steps]
    first = [step.rows() for step in collective(f"{way}-reduce-scatter", topology, shard).steps]
    then = [step.rows() for step in collective(way, topology, shard).steps]
    assert steps == first + then


BUILDERS = st.sampled_from(
    [ring_reduce_scatter, ring_all_reduce, multi_ring_reduce_scatter, multi_ring_all_reduce]
)  # fmt: skip


@settings(max_examples=40)
@given(small_topologies, BUILDERS, st.integers(1, 4), st.integers(0, 300))
def test_pieces_follow_each_other(topology: Topology, build: Callable[..., Schedule], chunks: int, more: int) -> None:
    """As many hops of each chunk as without; all bytes are sent; and the replay finds them right, too."""
    shard = 10**9 + more
    whole, cut = build(topology, shard), build(topology, shard, chunks=chunks)
    assert len(cut.steps) == chunks * len(whole.steps)
    assert (cut.bytes_sent().sum(axis=0) == whole.bytes_sent().sum(axis=0)).all()
    replayed = replace(cut, steps=list(cut.steps))
    assert replayed.transfers == cut.transfers


@pytest.mark.parametrize("chunks", [0, 9])
def test_a_piece_has_a_byte_or_more(chunks: int) -> None:
    with pytest.raises(ScheduleError, match=f"{chunks} chunks, expected 1 to 8"):
        ring_all_reduce(full_mesh(3), 8, chunks=chunks)


@settings(max_examples=30)
@given(world_sizes, exact_bandwidths, whole_shards, st.integers(1, 4))
def test_pieces_hide_latency(n: int, bandwidth: Fraction, shard: int, chunks: int) -> None:
    """A hop is busy with all chunks, or waits until the first of them has come: the longer of the two."""
    latency, mesh = Fraction(1, 7), full_mesh(n, bandwidth, Fraction(1, 7))
    found_s = simulate(ring_all_reduce(mesh, 12 * shard, chunks=chunks), Machine(mesh)).time_s
    busy_s = 12 * shard / bandwidth
    hop_s = max(busy_s, busy_s / chunks + latency)
    assert found_s == (2 * (n - 1) - 1) * hop_s + busy_s + latency


MACHINES = [full_mesh(4), switch(5), nodes(2, 2), nodes(2, 3, "switch"), ring(4)]


@settings(max_examples=30)
@given(st.sampled_from(MACHINES), BUILDERS, st.integers(1, 4), st.sampled_from([0.0, 3e-6]))
def test_both_engines_agree(topology: Topology, build: Callable[..., Schedule], chunks: int, launch_s: float) -> None:
    schedule, machine = build(topology, 10**6, chunks=chunks), Machine(topology, CommLibrary("test", launch_s))
    assert run(schedule, machine).time_s == pytest.approx(simulate(schedule, machine).time_s, rel=1e-9)


@st.composite
def spoilt(draw: st.DrawFn, schedule: Schedule) -> dict[str, object]:
    """What may make a schedule wrong: a holding or part more or less, other copies, a rank twice in a ring."""
    assert isinstance(schedule.steps, RingSumSteps)
    assert schedule.initial_part is not None
    sizes, parts = schedule.block_bytes, schedule.blocks.parts
    what = draw(st.sampled_from(["initial", "final", "initial_part", "parts", "copies", "steps", "lanes", "blocks"]))
    if what in ("initial", "final"):
        holds = np.array(getattr(schedule, what))
        holds.flat[draw(st.integers(0, holds.size - 1))] ^= True
        return {what: holds}
    if what == "initial_part":
        part = np.array(np.broadcast_to(schedule.initial_part, schedule.initial.shape))
        part.flat[draw(st.integers(0, part.size - 1))] += draw(st.sampled_from([-1, 1]))
        return {what: part}
    if what == "parts":
        wrong = np.arange(len(parts)) == draw(st.integers(0, len(parts) - 1))
        kind = schedule.blocks.kind
        return {"blocks": Blocks(schedule.blocks.kinds, kind, sizes, parts + wrong * draw(st.sampled_from([-1, 1])))}
    if what == "copies":
        return {"steps": replace(schedule.steps, copies=not schedule.steps.copies)}
    if what == "steps":
        rings = schedule.steps.rings.copy()
        rings.flat[draw(st.integers(0, rings.size - 1))] = draw(st.integers(0, schedule.world_size - 1))
        return {what: replace(schedule.steps, rings=rings)}
    return {what: schedule.lanes - 1} if what == "lanes" else {what: Blocks.of_sums(sizes[1:], schedule.world_size)}


def is_accepted(schedule: Schedule, **changes: object) -> bool:
    try:
        replace(schedule, **changes)  # type: ignore[arg-type]
    except (ScheduleError, IndexError):
        return False
    return True


@settings(max_examples=100)
@given(st.integers(2, 5), BUILDERS, st.integers(1, 3), st.data())
def test_the_theorem_accepts_what_the_replay_accepts(
    n: int, build: Callable[..., Schedule], chunks: int, data: st.DataObject
) -> None:
    schedule = build(full_mesh(n), 60, chunks=chunks)
    changes = data.draw(spoilt(schedule))
    steps = changes.get("steps", schedule.steps)
    assert isinstance(steps, RingSumSteps)
    assert is_accepted(schedule, **changes) == is_accepted(schedule, **changes | {"steps": list(steps)})


def test_large_worlds_are_proved_by_their_form() -> None:
    cluster = nodes(256, 8, "switch")
    assert ring_all_reduce(cluster, 2**20).transfers == 2 * 2047 * 2048


def test_rings_can_be_given() -> None:
    """In equal shares, as far as bytes can be shared equally."""
    rings = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    for build, steps in ((ring_reduce_scatter, 3), (ring_all_reduce, 6)):
        schedule = build(full_mesh(4), 7, rings, fused=True)
        assert (schedule.lanes, len(schedule.steps), schedule.fused) == (2, steps, True)
        assert schedule.block_bytes.tolist() == [4, 3] * 4
        assert schedule.steps[0].rows()[4] == (3, 2, 1, 1)
        with pytest.raises(ScheduleError, match="rank 3 sends to rank 2, but ring:4 has no such link"):
            build(direct(ring(4)), 7, rings)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_nothing_to_send_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"schedule '[a-z-]+': [a-z]+ size is 0 bytes, expected 1 or more"):
        collective(name, full_mesh(3), 0)


def test_more_than_can_be_proved_is_refused() -> None:
    with pytest.raises(ScheduleError, match="'all-to-all': 1025 ranks with 1050625 chunks are too many to prove"):
        collective("all-to-all", full_mesh(1025), 2**20)


@pytest.mark.parametrize("whole_steps", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_every_bit_is_where_it_belongs(name: str, whole_steps: bool) -> None:
    for n, shard in ((1, 5), (2, 1), (3, 100), (5, 37)):
        schedule = collective(name, full_mesh(n), shard)
        assert len(run_in_process(schedule, receives_ahead=2, whole_steps=whole_steps).events) == schedule.transfers


# By name


def test_names_say_which_collective() -> None:
    assert kind_of(["ring", "trees"]) == "AllGather"
    assert kind_of(["ring-all-reduce", "multi-ring-all-reduce"]) == "AllReduce"
    with pytest.raises(ScheduleError, match="unknown schedule 'bogus', expected one of ring, "):
        kind_of(["bogus"])
    with pytest.raises(ScheduleError, match="unknown schedule 'bogus', expected one of ring, "):
        collective("bogus", full_mesh(2), 1)
    with pytest.raises(ScheduleError, match="'all-to-all' is an AllToAll, 'send-recv' a SendRecv: expected schedules "):
        check_names(["send-recv", "all-to-all"], 1)


def test_every_name_is_that_of_its_schedule() -> None:
    for name in COLLECTIVES:
        (schedule,) = build_schedules(name, full_mesh(3), 8)
        assert schedule.name == name


def test_predictions_of_all_reduce() -> None:
    machine = Machine(full_mesh(4, Fraction(2), Fraction(1)))
    shard = lcm(3, 6) * 4
    ring_way, rings_way = predict(machine, ["ring-all-reduce", "multi-ring-all-reduce"], shard)
    assert isinstance(rings_way, Answer)
    assert (ring_way.time_s, rings_way.time_s) == (6 * (1 + Fraction(shard, 2)), 6 * (1 + Fraction(shard, 6)))
    assert rings_way.bound_s == 1 + Fraction(2 * shard, 2)
    assert rings_way.busbw_bytes_per_s == pytest.approx(6 * shard / float(rings_way.time_s))
    assert (rings_way.collective, rings_way.shard_bytes) == ("AllReduce", shard)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints, or the line with which it refuses."""
    with contextlib.suppress(SystemExit):
        main(["predict", *arguments])
    printed = capsys.readouterr()
    return printed.out or printed.err.strip()


def test_the_command_line_predicts_them(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--shard-bytes", "1MiB")
    (found,) = json.loads(told(capsys, "switch:4", "--schedule", "ring-all-reduce", *size, "--json"))["predictions"]
    assert (found["schedule"], found["collective"], found["shard_bytes"]) == ("ring-all-reduce", "AllReduce", 2**20)
    assert found["time_s"] >= found["bound_s"] > 0
    table = told(capsys, "switch:4", "--schedule", "all-to-all", *size, "--explain")
    assert table.startswith(f"{describe('AllToAll', 4, 2**20)} on switch:4")
    refused = told(capsys, "ring:4", "--schedule", "all-to-all", "--routes", "direct", *size)
    assert refused == (
        "tasp-lab: schedule 'all-to-all', step 0: rank 0 sends to rank 2, but ring:4 has no such link, and routes "
        "'direct' forwards through no other rank"
    )
    refused = told(capsys, "ring:4", "--schedule", "ring", "--schedule", "ring-all-reduce", *size)
    assert refused.endswith("is an AllReduce, 'ring' an AllGather: expected schedules of one collective")
