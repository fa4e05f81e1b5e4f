"""Attention but circulations, LASP-2 and composed schedules: both engines and the reference agree on every time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from sim.simulate import Engine
from sim.simulate import simulate as simulate_with
from tasp_lab.machines.machine import CommLibrary, Compute, ComputeRate, ComputeRates, Machine
from tasp_lab.schedule.composition import in_chunks, in_sequence, over_groups, replicated, stacked
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.schedules.collectives.ring_reductions import ring_all_reduce, ring_reduce_scatter
from tasp_lab.schedules.registry import attention_names_on
from tasp_lab.timeline.events import SEND
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.sim.test_array_engine import assert_agree, libraries
from tests.sim.test_engine_against_reference import computes, launches, uneven_topologies
from tests.support.reference import reference_times
from tests.support.systems import lasp2, passes_of, token_ring, token_ring_passes, ulysses, ulysses_passes, usp

few = settings(max_examples=30)
meshes = uneven_topologies(("full-mesh", "switch", "two switches"), max_ranks=4)


@st.composite
def system_cases(draw: st.DrawFn) -> tuple[Topology, Schedule]:
    """A pass of a small layer, whole or in chunks, or a stack of layers, on unequal links between all ranks."""
    topology = draw(meshes)
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
def composed_collectives(draw: st.DrawFn) -> tuple[Topology, Schedule]:
    """A collective in chunks, on two levels, in groups, or in sequence."""
    topology, shard = draw(meshes), draw(st.integers(4, 40))
    n, pair = topology.world_size, full_mesh(2)
    gather, scatter = ring_all_gather(full_mesh(n), shard), ring_reduce_scatter(full_mesh(n), shard)
    schedules = [in_chunks(gather, draw(st.integers(1, 4))), in_sequence(scatter, gather)]
    if n == 4:
        schedules.append(over_groups(ring_all_gather(pair, shard), ring_all_gather(pair, 2 * shard)))
        reduce = ring_all_reduce(pair, shard)
        schedules.append(over_groups(reduce, reduce, inner_first=draw(st.booleans())))
        schedules.append(replicated(ring_all_gather(pair, shard), np.array([[0, 3], [2, 1]])))
    return topology, draw(st.sampled_from(schedules))


@few
@given(system_cases(), libraries, computes)
def test_the_engines_agree_on_systems(case: tuple[Topology, Schedule], library: CommLibrary, compute: Compute) -> None:
    topology, schedule = case
    assert_agree(schedule, Machine(topology, library, compute))


@few
@given(composed_collectives(), libraries)
def test_the_engines_agree_on_composed_collectives(case: tuple[Topology, Schedule], library: CommLibrary) -> None:
    topology, schedule = case
    assert_agree(schedule, Machine(topology, library))


@few
@given(system_cases() | composed_collectives(), launches, computes)
def test_the_reference_agrees(case: tuple[Topology, Schedule], launch_s: Fraction, compute: Compute) -> None:
    topology, schedule = case
    events = simulate(schedule, Machine(topology, CommLibrary("t", launch_s), compute)).events
    sends = {(e.step, e.rank, e.peer, e.lane, e.blocks): (e.start_s, e.end_s) for e in events if e.kind == SEND}
    calls = defaultdict(list)
    for e in events:
        if e.kind != SEND:
            calls[e.rank].append((e.step, (e.start_s, e.end_s)))
    assert (sends, calls) == reference_times(schedule, topology, launch_s, compute)


@pytest.mark.parametrize("engine", ["simpy", "array"])
def test_each_pass_of_a_training_step_has_its_rate(engine: Engine) -> None:
    """On one rank nothing is sent; the calls between layers are of the pass of the layer behind."""
    mesh, layer = full_mesh(1), Workload(16, heads=2, head_dim=4, mask="full")
    forward, backward = attention_passes("ring-attention", mesh, layer)
    stack = stacked([forward, forward, backward, backward], dense_flops=300, dense_backward_flops=500)
    rates = {(layer.dtype, passing): ComputeRate(rate) for passing, rate in (("forward", 64), ("backward", 32))}
    flops = int(forward.flops().sum()), int(backward.flops().sum())
    expected = (2 * flops[0] + 300) / 64 + (2 * flops[1] + 2 * 500) / 32
    assert simulate_with(stack, Machine(mesh, compute=ComputeRates(rates)), engine).time_s == pytest.approx(expected)


def test_token_ring_takes_its_calls_and_a_last_transfer_if_calls_are_slow() -> None:
    """Queries and results move beside slow calls; only the last results are exposed, a step of their own."""
    n, bandwidth, rate = 4, Fraction(10**6), Fraction(10**5)
    layer = Workload(8 * n, heads=1, head_dim=4, mask="full")
    schedule = token_ring(full_mesh(n, bandwidth, Fraction(0)), layer)
    machine = Machine(full_mesh(n, bandwidth, Fraction(0)), compute=ComputeRate(rate))
    call_s = Fraction(8 * 8 * layer.flops_per_pair) / rate
    last_s = Fraction(8 * (4 * 2 + 4)) / bandwidth
    assert simulate(schedule, machine).time_s == n * call_s + last_s
