"""TokenRing, Ulysses, LASP-2 and composed schedules: both engines and the reference agree on every time."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from tasp_lab.attention.backward import attention_passes
from tasp_lab.attention.token_ring import token_ring, token_ring_passes
from tasp_lab.attention.ulysses import ulysses, ulysses_passes
from tasp_lab.attention.usp import usp
from tasp_lab.collectives.all_gather import ring_all_gather
from tasp_lab.collectives.ring_reductions import ring_reduce_scatter
from tasp_lab.linear_attention.lasp2 import lasp2
from tasp_lab.machines.machine import CommLibrary, ComputeRate, Machine
from tasp_lab.schedule.composition import in_chunks, in_sequence, over_groups, replicated, stacked
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import SEND
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Mask, Workload
from tests.sim.test_array_engine import assert_agree, libraries
from tests.sim.test_engine_against_reference import computes, launches, uneven_topologies
from tests.support.reference import reference_times

few = settings(max_examples=25)
meshes = uneven_topologies(("full-mesh", "switch", "two switches"), max_ranks=4)


@st.composite
def system_cases(draw: st.DrawFn) -> tuple[Topology, Schedule]:
    """A pass of a small layer, or a stack of two layers, on unequal links between all ranks."""
    topology = draw(meshes)
    mask: Mask = draw(st.sampled_from(["full", "causal"]))
    heads = topology.world_size * draw(st.integers(1, 2))
    layer = Workload(
        draw(st.integers(1, 16)), heads=heads, kv_heads=draw(st.sampled_from([1, heads])), head_dim=1, mask=mask
    )
    if draw(st.booleans()):
        return topology, draw(st.sampled_from(token_ring_passes(topology, layer, buffers=draw(st.integers(2, 4)))))
    if draw(st.booleans()):
        return topology, draw(st.sampled_from(ulysses_passes(topology, layer)))
    if topology.world_size == 4 and draw(st.booleans()):
        outer = attention_passes("zigzag-ring-attention", full_mesh(2), layer, dataflow="rotate-kv")
        return topology, usp(topology, draw(st.sampled_from(outer)), 2)
    linear = lasp2(topology, Workload(layer.sequence, heads=heads, head_dim=1, mask="causal"), trim=draw(st.booleans()))
    if mask == "full" or draw(st.booleans()):
        return topology, linear
    return topology, stacked([linear, ulysses(topology, layer), linear], dense_flops=draw(st.integers(0, 100)))


@st.composite
def composed_collectives(draw: st.DrawFn) -> tuple[Topology, Schedule]:
    """A collective in chunks, on two levels, in groups, or in sequence."""
    topology, shard = draw(meshes), draw(st.integers(4, 40))
    n, pair = topology.world_size, full_mesh(2)
    gather, scatter = ring_all_gather(full_mesh(n), shard), ring_reduce_scatter(full_mesh(n), shard)
    schedules = [in_chunks(gather, draw(st.integers(1, 4))), in_sequence(scatter, gather)]
    if n == 4:
        schedules.append(over_groups(ring_all_gather(pair, shard), ring_all_gather(pair, 2 * shard)))
        schedules.append(replicated(ring_all_gather(pair, shard), np.array([[0, 3], [2, 1]])))
    return topology, draw(st.sampled_from(schedules))


@few
@given(system_cases(), libraries, computes)
def test_the_engines_agree_on_systems(
    case: tuple[Topology, Schedule], library: CommLibrary, compute: ComputeRate
) -> None:
    topology, schedule = case
    assert_agree(schedule, Machine(topology, library, compute))


@few
@given(composed_collectives(), libraries)
def test_the_engines_agree_on_composed_collectives(case: tuple[Topology, Schedule], library: CommLibrary) -> None:
    topology, schedule = case
    assert_agree(schedule, Machine(topology, library))


@few
@given(system_cases() | composed_collectives(), launches, computes)
def test_the_reference_agrees(case: tuple[Topology, Schedule], launch_s: Fraction, compute: ComputeRate) -> None:
    topology, schedule = case
    events = simulate(schedule, Machine(topology, CommLibrary("t", launch_s), compute)).events
    sends = {(e.step, e.rank, e.peer, e.lane, e.block): (e.start_s, e.end_s) for e in events if e.kind == SEND}
    calls = defaultdict(list)
    for e in events:
        if e.kind != SEND:
            calls[e.rank].append((e.step, (e.start_s, e.end_s)))
    assert (sends, calls) == reference_times(schedule, topology, launch_s, compute)


def test_token_ring_takes_its_calls_and_a_last_transfer_if_calls_are_slow() -> None:
    """Queries and results move beside slow calls; only the last results are exposed, a step of their own."""
    n, bandwidth, rate = 4, Fraction(10**6), Fraction(10**5)
    layer = Workload(8 * n, heads=1, head_dim=4)
    schedule = token_ring(full_mesh(n, bandwidth, Fraction(0)), layer)
    machine = Machine(full_mesh(n, bandwidth, Fraction(0)), compute=ComputeRate(rate))
    call_s = Fraction(8 * 8 * layer.flops_per_pair) / rate
    last_s = Fraction(8 * (4 * 4 + 4)) / bandwidth
    assert simulate(schedule, machine).time_s == n * call_s + last_s
