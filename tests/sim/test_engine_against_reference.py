"""The simulator and a naive second implementation agree on every transfer's start and end, exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from itertools import permutations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import INSTANT, CommLibrary, Compute, ComputeRate, Machine
from tasp_lab.schedule.blocks import Blocks, Kind, Pool
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.build import collective
from tasp_lab.timeline.events import ATTEND, SEND
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Link, SharedCapacity, Topology, Vertex
from tasp_lab.workload.layer import Workload
from tests.support.reference import max_min, reference_times
from tests.support.strategies import complete_topologies, topologies_and_schedules
from tests.support.tile_times import tile_times

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
def gossip_cases(draw: st.DrawFn) -> tuple[Topology, Schedule]:
    uneven = uneven_topologies(("full-mesh", "switch", "two switches", "chords"))
    topology = draw(uneven | complete_topologies(6).filter(lambda even: even.world_size > 1))
    return topology, draw(gossips(topology))


def assert_equal_times(schedule: Schedule, topology: Topology, launch_s: Fraction) -> None:
    timeline = simulate(schedule, Machine(topology, CommLibrary("t", launch_s)))
    found = {(e.step, e.rank, e.peer, e.lane, e.blocks): (e.start_s, e.end_s) for e in timeline.events}
    assert (found, {}) == reference_times(schedule, topology, launch_s)
    assert sum(len(event.blocks) for event in timeline.events) == schedule.transfers
    for event in timeline.events:
        under = (topology.constraints[index].name for index in topology.route(event.rank, event.peer).constraints)
        assert event.bound_by in {*under, "latency", "launch"}


def few_lanes(schedule: Schedule) -> Schedule:
    """The schedule, unless it has the hundred lanes of unequal shares: the reference would take minutes."""
    assume(schedule.transfers <= 300)
    return schedule


@given(topologies_and_schedules(max_ranks=6), shards, launches)
def test_all_gathers_on_even_topologies(case: tuple[Topology, str], shard: int, launch_s: Fraction) -> None:
    topology, name = case
    assert_equal_times(few_lanes(collective(name, topology, shard)), topology, launch_s)


@given(
    uneven_topologies(("full-mesh", "switch", "two switches"), max_ranks=5),
    st.sampled_from(["ring", "multi-ring", "direct"]),
    shards,
    launches,
)
def test_all_gathers_on_uneven_topologies(topology: Topology, name: str, shard: int, launch_s: Fraction) -> None:
    assert_equal_times(few_lanes(collective(name, topology, shard)), topology, launch_s)


@given(gossip_cases(), launches)
def test_gossip(case: tuple[Topology, Schedule], launch_s: Fraction) -> None:
    topology, schedule = case
    assert_equal_times(schedule, topology, launch_s)


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[Topology, Schedule]:
    """A small layer on unequal links: any schedule, mask, trimming and number of buffers."""
    topology = draw(uneven_topologies(("full-mesh", "switch", "two switches", "chords"), max_ranks=4))
    mask: str = draw(st.sampled_from(["full", "causal"]))
    window = draw(st.none() | st.integers(1, 12)) if mask == "causal" else None
    layer = Workload(draw(st.integers(1, 24)), head_dim=1, mask=mask, window=window, heads=1)
    name = draw(st.sampled_from(sorted({*CIRCULATIONS} - {"half-each-way"})))
    return topology, attention(name, topology, layer, trim=draw(st.booleans()), buffers=draw(st.integers(2, 4)))


rates = st.just(INSTANT) | st.builds(ComputeRate, st.fractions(Fraction(1, 4), Fraction(200), max_denominator=4))
computes = rates | tile_times()


@given(attention_cases(), launches, computes)
def test_attention(case: tuple[Topology, Schedule], launch_s: Fraction, compute: Compute) -> None:
    topology, schedule = case
    events = simulate(schedule, Machine(topology, CommLibrary("t", launch_s), compute)).events
    sends = {(e.step, e.rank, e.peer, e.lane, e.blocks): (e.start_s, e.end_s) for e in events if e.kind == SEND}
    calls: dict[int, list[tuple[int, tuple[Number, Number]]]] = defaultdict(list)
    for e in events:
        if e.kind == ATTEND:
            calls[e.rank].append((e.step, (e.start_s, e.end_s)))
    assert (sends, calls) == reference_times(schedule, topology, launch_s, compute)


def test_the_reference_shares_fairly() -> None:
    """Capacities 10 and 4: two flows under both get 2 each, the one under the first alone the remaining 6."""
    assert max_min([(0,), (0, 1), (1, 0)], [Fraction(10), Fraction(4)]) == [6, 2, 2]


def test_launches_that_tie_go_in_lane_order() -> None:
    """Blocks 0 and 1 reach rank 2 together at 2 s. It launches block 1 on lane 0 first, then block 0 on lane 1."""
    one = Fraction(1)
    topology = full_mesh(3, one, Fraction(0))
    initial = np.array([[True, False], [False, True], [False, False]])
    steps = [Step.of([(0, 2, 0, 0), (1, 2, 0, 1)]), Step.of([(2, 1, 1, 0), (2, 0, 0, 1)])]
    schedule = Schedule("exchange", 3, 2, Blocks.of_data(np.array([1, 1])), initial, np.ones((3, 2), dtype=bool), steps)
    events = simulate(schedule, Machine(topology, CommLibrary("t", one))).events
    assert {(e.lane, e.start_s, e.end_s) for e in events if e.rank == 2} == {(0, 2, 4), (1, 2, 5)}
    assert_equal_times(schedule, topology, one)


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
    assert_equal_times(schedule, topology, one)
