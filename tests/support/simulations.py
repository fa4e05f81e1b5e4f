"""Everything that can be simulated, for Hypothesis: small schedules of every kind on machines of every kind, exact.

@given(simulations())
def test_law(case: Simulation) -> None: ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import permutations
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from sim.array import engine as array_engine
from sim.event import engine
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.units import Number
from tasp_lab.machines.contention import NONE
from tasp_lab.machines.host import INSTANT_HOST, HostModel
from tasp_lab.machines.libraries.library import Message
from tasp_lab.machines.machine import INSTANT, CommLibrary, ComputeRate, Machine
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.composition import in_chunks, in_sequence, over_groups, replicated, stacked
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import DATAFLOWS, attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.schedules.collectives.all_gather import multi_ring_all_gather, ring_all_gather
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce, ring_reduce_scatter
from tasp_lab.schedules.registry import COLLECTIVES, attention_names_on, options_of
from tasp_lab.timeline.events import Event, Timeline
from tasp_lab.topology.builders import full_mesh, ring, switch
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, Vertex
from tasp_lab.workload.kernel_shapes import KernelShape
from tasp_lab.workload.layer import Workload
from tests.support.contention import ChannelsByPair, contentions, on_compute_lanes
from tests.support.reductions import reductions
from tests.support.strategies import (
    attention_layers,
    complete_topologies,
    exact_bandwidths,
    exact_latencies,
    topologies_and_schedules,
)
from tests.support.systems import lasp2, passes_of, token_ring_passes, ulysses, ulysses_passes, usp
from tests.support.tile_times import tile_times

Case = tuple[Topology, Schedule]

# Either few values, so that much happens at the same time, or many, so that little does.
bandwidths = (
    st.sampled_from([Fraction(1), Fraction(2), Fraction(3)]),
    st.fractions(Fraction(1, 4), Fraction(50), max_denominator=6),
)
latencies = (
    st.sampled_from([Fraction(0), Fraction(1), Fraction(5)]),
    st.fractions(Fraction(0), Fraction(10), max_denominator=6),
)
launches = (
    st.just(Fraction(0))
    | st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(5)])
    | st.fractions(Fraction(1, 50), Fraction(20), max_denominator=50)
)
shards = st.sampled_from([1, 2, 6, 12]) | st.integers(1, 200)

SINGLE_RINGS = sorted({*CIRCULATIONS} - {"half-each-way"})


# -- topologies and schedules ------------------------------------------------------------------------------------------
@st.composite
def uneven_topologies(draw: st.DrawFn, kinds: tuple[str, ...], max_ranks: int = 6) -> Topology:
    """Every link has a bandwidth and a latency of its own; some links may share a capacity."""
    kind = draw(st.sampled_from(kinds))
    ranks = range(draw(st.integers(2, max_ranks)))
    bandwidth, latency = draw(st.sampled_from(bandwidths)), draw(st.sampled_from(latencies))
    pairs: list[tuple[Vertex, Vertex]] = []
    if kind == "full-mesh":
        pairs += permutations(ranks, 2)
    elif kind == "switch":
        pairs += both(("switch", rank) for rank in ranks)
    elif kind == "two switches":
        pairs += both((draw(st.sampled_from(["left", "right"])), rank) for rank in ranks)
        pairs += both([("left", "right")])
    else:
        around: list[tuple[Vertex, Vertex]] = [(rank, (rank + 1) % len(ranks)) for rank in ranks]
        chords = [pair for pair in permutations(ranks, 2) if pair not in around]
        pairs += around
        pairs += draw(st.lists(st.sampled_from(chords), unique=True, max_size=8)) if chords else []
    links = tuple(Link(a, b, draw(bandwidth), draw(latency)) for a, b in pairs)
    names = st.lists(st.sampled_from([link.name for link in links]), unique=True, min_size=1, max_size=8).map(tuple)
    shared = draw(st.lists(st.tuples(bandwidth, names), max_size=3))
    return Topology(
        f"uneven {kind}",
        len(ranks),
        links,
        tuple(SharedCapacity(f"shared {index}", *rest) for index, rest in enumerate(shared)),
    )


def both(pairs: Iterable[tuple[Vertex, Vertex]]) -> list[tuple[Vertex, Vertex]]:
    """Each pair in both directions."""
    return [way for a, b in pairs for way in ((a, b), (b, a))]


@st.composite
def gossips(draw: st.DrawFn, topology: Topology) -> Schedule:
    """Random blocks travel at random, several per lane and step; sometimes until every rank has all of them.

    Sometimes what arrives lies in buffers, and comes again after it was overwritten.
    """
    buffers = draw(st.none() | st.integers(2, 4))
    n, lanes = topology.world_size, draw(st.integers(1, 3))
    sizes = draw(st.lists(shards, min_size=2, max_size=6))
    held = np.zeros((n, len(sizes)), dtype=bool)
    for block in range(len(sizes)):
        held[draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=2)), block] = True
    initial = held.copy()
    steps: list[Step] = []
    random_steps = draw(st.integers(1, 4 if buffers is None else 8))
    finish = buffers is None and draw(st.booleans())
    while random_steps or (finish and not held.all()):
        if buffers is not None and len(steps) >= buffers:
            held[steps[-buffers].destination, steps[-buffers].block] = False
        possible = [
            (source, destination, block)
            for source, destination in topology.rank_pairs()
            for block in np.flatnonzero(held[source] & ~held[destination]).tolist()
        ]
        if random_steps:
            random_steps -= 1
            targets = len({row[1:] for row in possible})
            chosen = st.lists(
                st.sampled_from(possible), unique_by=lambda row: row[1:], min_size=min(targets, 2), max_size=8
            )
            moves = draw(chosen) if possible else []
        else:
            moves = list({row[1:]: row for row in draw(st.permutations(possible))}.values())
        steps.append(Step.of((*move[:2], draw(st.integers(0, lanes - 1)), move[2]) for move in moves))
        held[steps[-1].destination, steps[-1].block] = True
    final = held if buffers is None else initial.copy()
    kind = Kind("data", pool=None if buffers is None else Pool("data", buffers))
    zeros, ones = np.zeros(len(sizes), dtype=np.int64), np.ones(len(sizes), dtype=np.int64)
    blocks = Blocks((kind,), zeros, np.array(sizes, dtype=np.int64), ones)
    return Schedule("gossip", n, lanes, blocks, initial, final, steps)


@st.composite
def gossip_cases(draw: st.DrawFn) -> Case:
    uneven = uneven_topologies(("full-mesh", "switch", "two switches", "chords"))
    topology = draw(uneven | complete_topologies(6).filter(lambda even: even.world_size > 1))
    return topology, draw(gossips(topology))


@st.composite
def collective_cases(draw: st.DrawFn) -> Case:
    """Any collective on equal links or not, and rings in pieces."""
    if draw(st.booleans()):
        topology, name = draw(topologies_and_schedules(max_ranks=6))
        return topology, collective(name, topology, draw(shards))
    uneven = uneven_topologies(("full-mesh", "switch", "two switches"), max_ranks=5)
    topology = draw(uneven | complete_topologies(6))
    name = draw(st.sampled_from([*sorted(COLLECTIVES), "ring in pieces", "rings in pieces"]))
    if "pieces" in name:
        build = ring_all_gather if name.startswith("ring ") else multi_ring_all_gather
        shard, chunks = 7200 * draw(st.integers(1, 9)), draw(st.integers(1, 4))
        try:
            return topology, build(topology, shard, chunks=chunks)
        except ScheduleError:  # a ring of so small a share that it cannot be cut
            assume(False)
    return topology, collective(name, topology, draw(shards))


@st.composite
def reduction_cases(draw: st.DrawFn) -> Case:
    """Sums along trees that are drawn."""
    case = draw(reductions())
    build = draw(st.sampled_from([full_mesh, switch]))
    return build(len(case.part), draw(exact_bandwidths), draw(exact_latencies)), case.schedule()


@st.composite
def attention_cases(draw: st.DrawFn) -> Case:
    """A small layer on unequal links: any schedule, mask, trimming and number of buffers."""
    topology = draw(uneven_topologies(("full-mesh", "switch", "two switches", "chords"), max_ranks=4))
    mask: str = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.none() | st.integers(1, 12)) if mask == "causal" else None
    layer = Workload(draw(st.integers(1, 24)), head_dim=1, mask=mask, window=window, heads=1)
    name = draw(st.sampled_from(SINGLE_RINGS))
    return topology, attention(name, topology, layer, trim=draw(st.booleans()), buffers=draw(st.integers(2, 4)))


@st.composite
def registered_cases(draw: st.DrawFn) -> Case:
    """A pass of a small layer by any registered schedule, on four ranks with equal links."""
    layer = draw(attention_layers(packed=False))
    name = draw(st.sampled_from([each for each in attention_names_on(4) if not each.startswith(("double", "trees"))]))
    topology = draw(st.sampled_from([full_mesh, switch]))(4, Fraction(64), draw(st.sampled_from([0, Fraction(1, 4)])))
    tried = {"buffers": [2, 3, 4], "tail_chunks": [1, 2, 4], "trim": [False, True]}
    options = {each: draw(st.sampled_from(tried[each])) for each in tried if each in options_of(name)}
    try:
        return topology, draw(
            st.sampled_from(attention_schedules(name, topology, layer, None, AttentionOptions("both", **options)))
        )
    except ScheduleError:
        assume(False)
        raise


@st.composite
def backward_cases(draw: st.DrawFn) -> Case:
    """Small passes on few ranks whose links differ."""
    topology = draw(
        uneven_topologies(("full-mesh", "switch", "two switches"), max_ranks=4)
        | st.builds(ring, st.integers(1, 4), exact_bandwidths, st.sampled_from([Fraction(0), Fraction(1)]))
    )
    dataflow = draw(st.sampled_from(DATAFLOWS))
    assume(dataflow != "rotate-kv-back" or not topology.name.startswith("ring:") or topology.world_size < 3)
    name, layer = draw(st.sampled_from(SINGLE_RINGS)), draw(attention_layers(12))
    dtype, trim, buffers = draw(st.sampled_from(["fp32", "input"])), draw(st.booleans()), draw(st.integers(2, 4))
    passes = attention_passes(
        name, topology, layer, dataflow=dataflow, gradient_dtype=dtype, trim=trim, buffers=buffers
    )
    assume(passes.backward.transfers + sum(len(calls) for step in passes.backward.steps for calls in step.calls) <= 80)
    return topology, passes.backward


_meshes = uneven_topologies(("full-mesh", "switch", "two switches"), max_ranks=4)


@st.composite
def system_cases(draw: st.DrawFn) -> Case:
    """A pass of a small layer, whole or in chunks, or a stack of layers, on unequal links between all ranks."""
    topology = draw(_meshes)
    mask: str = draw(st.sampled_from(["full", "causal"]))
    heads = topology.world_size * draw(st.integers(1, 2))
    layer = Workload(
        draw(st.integers(1, 16)), heads=heads, kv_heads=draw(st.sampled_from([1, heads])), head_dim=1, mask=mask
    )
    if draw(st.booleans()):
        in_pieces = partial(token_ring_passes, tail_chunks=draw(st.integers(1, 4)))
        over_rings = [partial(passes_of, name) for name in ("token-multi-ring", "kv-and-q-rings")]
        over = draw(st.sampled_from([in_pieces, *over_rings]))
        return topology, draw(st.sampled_from(over(topology, layer, buffers=draw(st.integers(2, 4)))))
    if draw(st.booleans()):
        names = set(attention_names_on(topology.world_size, variants=True)) - set(CIRCULATIONS)
        name = draw(st.sampled_from(sorted(names)))
        built_on = full_mesh(topology.world_size) if name.count(":") == 2 else topology  # variants need equal groups
        return topology, draw(st.sampled_from(passes_of(name, built_on, layer)))
    if heads % 2 == 0 and draw(st.booleans()):
        layer = replace(layer, kv_heads=heads)
        passes = *token_ring_passes(topology, layer), attention("tasp", topology, layer)
        return topology, in_chunks(draw(st.sampled_from(passes)), 2)
    if topology.world_size == 4 and draw(st.booleans()):
        outer = attention_passes("zigzag-ring-attention", full_mesh(2), layer, dataflow="rotate-kv")
        return topology, usp(topology, draw(st.sampled_from(outer)), 2)
    linear = lasp2(topology, Workload(layer.sequence, heads=heads, head_dim=1, mask="causal"), trim=draw(st.booleans()))
    if mask == "full" or draw(st.booleans()):
        return topology, linear
    if draw(st.booleans()):
        forward, backward = attention_passes("ring-attention", topology, layer, dataflow="rotate-kv")
        heads_passes = ulysses_passes(topology, layer)
        layers = [forward, heads_passes.forward, heads_passes.backward, backward]
        return topology, stacked(layers, dense_flops=draw(st.integers(0, 100)), dense_backward_flops=7)
    return topology, stacked([linear, ulysses(topology, layer), linear], dense_flops=draw(st.integers(0, 100)))


@st.composite
def composed_collectives(draw: st.DrawFn) -> Case:
    """A collective in chunks, on two levels, in groups, or in sequence."""
    topology, shard = draw(_meshes), draw(st.integers(4, 40))
    n, pair = topology.world_size, full_mesh(2)
    gather, scatter = ring_all_gather(full_mesh(n), shard), ring_reduce_scatter(full_mesh(n), shard)
    schedules = [in_chunks(gather, draw(st.integers(1, 4))), in_sequence(scatter, gather)]
    if n == 4:
        schedules.append(over_groups(ring_all_gather(pair, shard), ring_all_gather(pair, 2 * shard)))
        reduce = ring_all_reduce(pair, shard)
        schedules.append(over_groups(reduce, reduce, inner_first=draw(st.booleans())))
        schedules.append(replicated(ring_all_gather(pair, shard), np.array([[0, 3], [2, 1]])))
    return topology, draw(st.sampled_from(schedules))


CASES = {
    "collectives": collective_cases(),
    "reductions": reduction_cases(),
    "gossip": gossip_cases(),
    "attention": attention_cases(),
    "backward passes": backward_cases(),
    "registered schedules": registered_cases(),
    "systems": system_cases(),
    "composed collectives": composed_collectives(),
}
"""Topologies and schedules, by kind."""


# -- machines ----------------------------------------------------------------------------------------------------------
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
    """A `Library` whose messages are launched one after the other."""

    serial_launch: ClassVar[bool] = True


plain = st.builds(lambda launch_s: CommLibrary("plain", launch_s), launches)
libraries = plain | st.builds(
    lambda kind, *numbers: kind("library", *numbers),
    st.sampled_from([Library, PatientLibrary]),
    launches,
    st.none() | st.fractions(Fraction(1, 4), Fraction(20), max_denominator=6),
    st.sampled_from([Fraction(0), Fraction(1, 3)]),
)


@dataclass(frozen=True)
class Waves(ComputeRate):
    """Calls at a rate that have been handed out after a share of their time."""

    share: Number = 0

    def handed_out_s(self, shape: KernelShape) -> Number:
        return self.share * self.time_s(shape)


shares = st.fractions(Fraction(0), Fraction(1), max_denominator=4)
factors = st.fractions(Fraction(1, 5), Fraction(5), max_denominator=5)
rates = st.just(INSTANT) | st.builds(ComputeRate, st.fractions(Fraction(1, 4), Fraction(200), max_denominator=4))
computes = rates | tile_times()
_times = st.fractions(Fraction(0), Fraction(3), max_denominator=8)
host_models = st.builds(HostModel, st.just("test"), _times, _times, _times, st.sampled_from(["step", "kind"]))
waiting_hosts = st.builds(
    lambda waits, separate: HostModel("test", overlaps=False, waits_for_sends=waits, separate=separate),
    st.booleans(),
    st.sampled_from([(), ("backward",), ("forward", "backward")]),
)
any_host = st.just(INSTANT_HOST) | host_models | waiting_hosts


class Simulation(NamedTuple):
    schedule: Schedule
    machine: Machine


@st.composite
def simulations(
    draw: st.DrawFn,
    cases: st.SearchStrategy[Case] | None = None,
    hosts: st.SearchStrategy[HostModel] = any_host,
    lanes: int = 3,
) -> Simulation:
    """A small schedule, of any kind unless `cases` are given, and a machine that may have all that a machine can."""
    topology, schedule = draw(st.one_of(*CASES.values()) if cases is None else cases)
    assume(schedule.transfers <= 300)
    schedule = on_compute_lanes(schedule, draw(st.integers(1, lanes)))
    channels = st.builds(ChannelsByPair, st.just("channels"), launches, exact_latencies)
    slowed = draw(st.just(NONE) | contentions())
    speeds = draw(st.just(()) | st.tuples(*[factors] * topology.world_size))
    return Simulation(
        schedule,
        Machine(
            topology,
            draw(libraries | channels),
            draw(computes | st.builds(lambda rate, share: Waves(rate, share=share), factors, shares)),
            contention=replace(slowed, waits=draw(st.just(0) | shares)),
            rank_speeds=speeds,
            host=draw(hosts),
        ),
    )


# -- both engines ------------------------------------------------------------------------------------------------------
def assert_agree(schedule: Schedule, machine: Machine) -> Timeline:
    """Check that the array engine says of every event what the event engine says, whose timeline is returned."""
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
    return expected


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
