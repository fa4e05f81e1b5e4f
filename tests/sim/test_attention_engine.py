"""Attention layers in the simulator: closed forms of overlap, what bounds them, and that buffers are obeyed. Exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.event.engine import simulate
from sim.simulate import Engine
from sim.simulate import simulate as simulate_by
from tasp_lab.machines.machine import INSTANT, ComputeRate, ComputeRates, Machine
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.composition import stacked
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.backward import attention_passes
from tasp_lab.schedules.attention.forward import CIRCULATIONS, attention
from tasp_lab.schedules.build import collective
from tasp_lab.timeline.events import ATTEND, COMPUTE_LANE, SEND
from tasp_lab.topology.builders import full_mesh, nodes, ring, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.schedules import task_of, time_s
from tests.support.simulations import attention_cases, rates, uneven_topologies
from tests.support.systems import token_ring

seconds = st.fractions(Fraction(1, 20), Fraction(20), max_denominator=20)
latencies = st.just(Fraction(0)) | st.fractions(Fraction(0), Fraction(5), max_denominator=5)


def layer(positions: int, mask: str = "full") -> Workload:
    """4 FLOPs per pair, and 4 bytes of keys and values per position."""
    return Workload(positions, head_dim=1, mask=mask, heads=1)


# ------------------------------------------------------------------------------------------------- closed forms


@given(st.sampled_from([1, 2, 3, 5, 7, 8]), st.integers(1, 3), seconds, seconds)
def test_tasp_sends_in_pieces_over_all_links(n: int, chunks: int, hop_s: Fraction, call_s: Fraction) -> None:
    """The same with hops of a chunk, the (n-1)-th part of a shard."""
    length = chunks * max(n - 1, 1)
    topology = full_mesh(n, 4 * chunks / hop_s, Fraction(0))
    compute = ComputeRate(4 * length**2 / call_s)
    schedule = attention("tasp", topology, layer(n * length))
    assert time_s(schedule, topology, compute) == call_s + max((n - 1) * call_s, (n - 1) * hop_s)


@given(st.integers(1, 7), st.booleans(), st.integers(1, 3), st.booleans(), st.fractions(Fraction(1, 9), 3))
def test_zigzag_balances_a_causal_mask(n: int, is_mesh: bool, half: int, trim: bool, ratio: Fraction) -> None:
    """Every rank computes L(L+1)/2 pairs at step 0 and L^2/2 at each later one, whatever the rest of the mask hides.

    Where hops are no longer than the later calls, the time is all compute; where they are at least as long as the
    first call, it is all hops and the last call.
    """
    length = 2 * half
    first_s, later_s = Fraction(length * (length + 1), 2), Fraction(length**2, 2)
    hop_s = later_s * ratio if ratio <= 1 else first_s * ratio
    topology = (full_mesh if is_mesh else ring)(n, 4 * length / hop_s, Fraction(0))
    schedule = attention("zigzag-ring-attention", topology, layer(n * length, "causal"), trim=trim)
    assert (schedule.flops() == [[4 * (first_s if step == 0 else later_s)] * n for step in range(n)]).all()
    found = time_s(schedule, topology, ComputeRate(Fraction(4)))
    if n == 1 or ratio <= 1:
        assert found == first_s + (n - 1) * later_s
    elif not trim:
        assert found == (n - 1) * hop_s + later_s


@settings(max_examples=60)
@given(st.integers(2, 7), st.booleans(), st.integers(1, 3), seconds, seconds)
def test_trimming_one_ring_saves_bytes_and_no_time(
    n: int, is_mesh: bool, half: int, hop_s: Fraction, call_s: Fraction
) -> None:
    """Rank n-1's shard stays whole on every one of its hops: nobody is done before it has come around."""
    length = 2 * half
    topology = (full_mesh if is_mesh else ring)(n, 4 * length / hop_s, Fraction(0))
    compute = ComputeRate(2 * length**2 / call_s)
    workload = layer(n * length, "causal")
    whole, trimmed = (attention("zigzag-ring-attention", topology, workload, trim=trim) for trim in (False, True))
    assert trimmed.bytes_sent().sum() < whole.bytes_sent().sum()
    assert time_s(trimmed, topology, compute) == time_s(whole, topology, compute)


@settings(max_examples=30)
@given(st.sampled_from([2, 3, 5, 7, 8]), st.sampled_from(["tasp", "zigzag-ring-attention"]), st.booleans(), seconds)
def test_trimming_saves_no_time_where_a_port_is_shared(n: int, name: str, trim: bool, port: Fraction) -> None:
    """Rank 0's last queries see every key, so all other shards must pass its port, however they come."""
    topology = switch(n, port, Fraction(0))
    length = 2 * (n - 1)
    schedule = attention(name, topology, layer(n * length, "causal"), trim=trim)
    assert time_s(schedule, topology) == (n - 1) * 4 * length / port


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), seconds)
def test_trimming_one_ring_saves_time_between_nodes(m: int, half: int, shard_s: Fraction) -> None:
    """Of all 2m-1 shards that a ring carries from one node to the other, m-1 have no back half any more."""
    nic = 8 * half / shard_s
    topology = nodes(
        2, m, link_bandwidth_bytes_per_s=10 * nic, link_latency_s=Fraction(0),
        nic_bandwidth_bytes_per_s=nic, nic_latency_s=Fraction(0),
    )  # fmt: skip
    workload = layer(2 * m * 2 * half, "causal")
    whole, trimmed = (attention("zigzag-ring-attention", topology, workload, trim=trim) for trim in (False, True))
    assert time_s(whole, topology) == (2 * m - 1) * shard_s
    assert time_s(trimmed, topology) == (m + Fraction(m - 1, 2)) * shard_s


@settings(max_examples=50)
@given(attention_cases())
def test_trimming_never_sends_more(case: tuple[Topology, Schedule]) -> None:
    topology, schedule = case
    workload = task_of(schedule).workload
    trimmed, whole = (attention(schedule.name, topology, workload, trim=trim) for trim in (True, False))
    assert trimmed.bytes_sent().sum() <= whole.bytes_sent().sum()


@given(st.integers(1, 8), st.sampled_from([full_mesh, switch, ring]), seconds, latencies, st.integers(2, 4))
def test_without_compute_a_ring_is_an_all_gather(
    n: int, build: Callable[[int, Fraction, Fraction], Topology], bandwidth: Fraction, latency: Fraction, buffers: int
) -> None:
    """Sent and computed with at once, what came never stands in the way of what comes."""
    topology = build(n, bandwidth, latency)
    schedule = attention("ring-attention", topology, layer(3 * n), trim=False, buffers=buffers)
    assert time_s(schedule, topology) == time_s(collective("ring", topology, 12), topology)


@given(st.integers(2, 8), seconds, latencies, st.integers(2, 4))
def test_without_compute_tasp_is_a_multi_ring_all_gather(
    n: int, bandwidth: Fraction, latency: Fraction, buffers: int
) -> None:
    mesh = full_mesh(n, bandwidth, latency)
    length = {4: 6, 6: 10}.get(n, n - 1)  # the number of rings
    schedule = attention("tasp", mesh, layer(length * n), trim=False, buffers=buffers)
    assert time_s(schedule, mesh) == time_s(collective("multi-ring", mesh, 4 * length), mesh)


# ------------------------------------------------------------------------------------------------------- bounds


@st.composite
def uncontended_cases(draw: st.DrawFn) -> tuple[Topology, str, Workload]:
    """A layer whose transfers share no link with others: all there is to wait for comes from the schedule.

    Then every start is the latest of some ends, and everything later can only make what depends on it later.
    """
    topology = draw(
        st.builds(full_mesh, st.sampled_from([1, 2, 3, 5]), seconds, latencies)
        | st.builds(ring, st.integers(1, 5), seconds, latencies)
    )
    mask: str = draw(st.sampled_from(["full", "causal"]))
    workload = Workload(draw(st.integers(1, 40)), head_dim=1, mask=mask, heads=1)
    return topology, draw(st.sampled_from(sorted({*CIRCULATIONS} - {"half-each-way"}))), workload


@given(uncontended_cases(), st.booleans(), st.integers(2, 4), seconds, st.fractions(1, 5, max_denominator=5))
def test_slower_compute_never_ends_earlier(
    case: tuple[Topology, str, Workload], trim: bool, buffers: int, rate: Fraction, factor: Fraction
) -> None:
    topology, name, workload = case
    schedule = attention(name, topology, workload, trim=trim, buffers=buffers)
    computes = INSTANT, ComputeRate(rate * factor), ComputeRate(rate)
    times = [time_s(schedule, topology, compute) for compute in computes]
    assert times == sorted(times)


@given(uncontended_cases(), seconds)
def test_more_buffers_never_end_later(case: tuple[Topology, str, Workload], rate: Fraction) -> None:
    """Untrimmed, every lane sends at every step: a transfer's predecessor has waited for the buffer before its own."""
    topology, name, workload = case
    times = [
        time_s(attention(name, topology, workload, trim=False, buffers=buffers), topology, ComputeRate(rate))
        for buffers in (4, 3, 2)
    ]
    assert times == sorted(times)


# ------------------------------------------------------------------------------------------------ what happened


@settings(max_examples=50)
@given(attention_cases(), rates)
def test_events_say_what_the_schedule_says(case: tuple[Topology, Schedule], compute: ComputeRate) -> None:
    topology, schedule = case
    events = [e for e in simulate(schedule, Machine(topology, compute=compute)).events if e.kind == ATTEND]
    for event in events:
        assert (event.lane, event.peer, event.bytes, event.bound_by) == (COMPUTE_LANE, event.rank, 0, "compute")
        assert event.end_s - event.start_s == compute.flops_time_s(event.flops)
    flops = schedule.flops() * 0
    for event in events:
        flops[event.step, event.rank] += event.flops
    assert (flops == schedule.flops()).all()


def test_waiting_for_buffer_is_explained() -> None:
    """Calls of 3 s and hops of 1 s: the third hop, at 2 s, needs the buffer that the call from 3 s to 6 s reads."""
    topology = ring(4, Fraction(4), Fraction(0))
    schedule = attention("ring-attention", topology, layer(4), buffers=2)
    events = simulate(schedule, Machine(topology, compute=ComputeRate(Fraction(4, 3)))).events
    found = {(e.kind, e.step, e.start_s, e.waited_for) for e in events}
    assert found == {
        ("send", 0, 0, ""), ("send", 1, 1, "block"), ("send", 2, 6, "buffer"),
        ("attend", 0, 0, ""), ("attend", 1, 3, "compute"), ("attend", 2, 6, "compute"), ("attend", 3, 9, "compute"),
    }  # fmt: skip


@settings(max_examples=50)
@given(uneven_topologies(("full-mesh", "switch"), max_ranks=4), st.integers(1, 20))
def test_calls_without_buffers_wait_for_their_blocks_only(topology: Topology, positions: int) -> None:
    """With as many buffers as steps nothing is overwritten, which is what kinds without a pool say.

    A call is named after what circulates, which is nothing then.
    """
    roomy = attention("zigzag-ring-attention", topology, layer(positions, "causal"), buffers=topology.world_size + 1)
    steps = list(roomy.steps)
    kinds = [replace(kind, pool=None) for kind in roomy.blocks.kinds]
    blocks = Blocks(kinds, roomy.blocks.kind, roomy.blocks.bytes, roomy.blocks.parts)
    kept = roomy.initial.copy()
    for step in steps:
        kept[step.destination, step.block] = True
    unlimited = replace(roomy, blocks=blocks, kept=kept)
    machine = Machine(topology, compute=ComputeRate(Fraction(3)))
    events = [
        [e if e.kind == SEND else e._replace(block=-1) for e in simulate(each, machine).events]
        for each in (unlimited, roomy)
    ]
    assert events[0] == events[1]


@pytest.mark.parametrize("engine", ["simpy", "array"])
def test_each_pass_of_a_training_step_has_its_rate(engine: Engine) -> None:
    """On one rank nothing is sent; the calls between layers are of the pass of the layer behind."""
    mesh, layer = full_mesh(1), Workload(16, heads=2, head_dim=4, mask="full")
    forward, backward = attention_passes("ring-attention", mesh, layer)
    stack = stacked([forward, forward, backward, backward], dense_flops=300, dense_backward_flops=500)
    rates = {(layer.dtype, passing): ComputeRate(rate) for passing, rate in (("forward", 64), ("backward", 32))}
    flops = int(forward.flops().sum()), int(backward.flops().sum())
    expected = (2 * flops[0] + 300) / 64 + (2 * flops[1] + 2 * 500) / 32
    assert simulate_by(stack, Machine(mesh, compute=ComputeRates(rates)), engine).time_s == pytest.approx(expected)


def test_token_ring_takes_its_calls_and_a_last_transfer_if_calls_are_slow() -> None:
    """Queries and results move beside slow calls; only the last results are exposed, a step of their own."""
    n, bandwidth, rate = 4, Fraction(10**6), Fraction(10**5)
    layer = Workload(8 * n, heads=1, head_dim=4, mask="full")
    schedule = token_ring(full_mesh(n, bandwidth, Fraction(0)), layer)
    machine = Machine(full_mesh(n, bandwidth, Fraction(0)), compute=ComputeRate(rate))
    call_s = Fraction(8 * 8 * layer.flops_per_pair) / rate
    last_s = Fraction(8 * (4 * 2 + 4)) / bandwidth
    assert simulate(schedule, machine).time_s == n * call_s + last_s
