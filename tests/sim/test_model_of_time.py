"""The closed forms of docs/how_it_works.md: exact on the SimPy engine, and the same times from the array engine.

S bytes, bandwidth B, latency L of a route, launch cost a of a message, n ranks. None of these schedules sends two
blocks to one peer in one step on one lane, except the doubling AllGather; so nothing depends on which blocks are one
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.array import engine as array_engine
from sim.event.engine import simulate
from tasp_lab.machines.machine import INSTANT, CommLibrary, Compute, ComputeRate, Machine
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.schedules.collectives.all_gather import ring_all_gather
from tasp_lab.topology.builders import full_mesh, ring, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

bandwidths = st.fractions(Fraction(1, 7), 50, max_denominator=7)
latencies = st.just(Fraction(0)) | st.fractions(0, 9, max_denominator=5)
launches = st.just(Fraction(0)) | st.fractions(0, 5, max_denominator=3)
sizes = st.integers(1, 60)


def time_s(schedule: Schedule, topology: Topology, launch_s: Fraction, compute: Compute = INSTANT) -> Fraction:
    """The exact time, which the array engine confirms in floating point."""
    machine = Machine(topology, CommLibrary("test", launch_s), compute)
    found = simulate(schedule, machine).time_s
    assert isinstance(found, Fraction | int)
    assert float(array_engine.run(schedule, machine).time_s) == pytest.approx(float(found), rel=1e-9)
    return Fraction(found)


def of_data(lanes: int, blocks: int, block_bytes: int, copies: int, steps: Sequence[Step]) -> Schedule:
    """Blocks that rank 0 has and that the first `copies` ranks have at the end."""
    initial = np.zeros((copies, blocks), dtype=bool)
    initial[0] = True
    sizes_bytes = np.full(blocks, block_bytes)
    return Schedule("blocks", copies, lanes, Blocks.of_data(sizes_bytes), initial, np.ones_like(initial), list(steps))


@given(st.integers(2, 9), sizes, bandwidths, latencies, launches)
def test_a_ring_all_gather_pays_every_latency(
    n: int, size: int, bandwidth: Fraction, latency: Fraction, launch: Fraction
) -> None:
    """(n - 1) (a + S/B + L): what a step sends has just arrived."""
    topology = ring(n, bandwidth, latency)
    assert time_s(ring_all_gather(topology, size), topology, launch) == (n - 1) * (launch + size / bandwidth + latency)


@given(st.integers(2, 6), st.integers(1, 6), sizes, bandwidths, latencies, launches)
def test_a_chain_pays_every_latency_once(
    n: int, k: int, piece: int, bandwidth: Fraction, latency: Fraction, launch: Fraction
) -> None:
    """(n - 1) (a + S/kB + L) + (k - 1) (a + S/kB): the first piece pays all latencies, the others follow close behind.

    The message of S = k x `piece` bytes is passed on in k pieces, piece q by rank r at step r + q.
    """
    topology = ring(n, bandwidth, latency)
    steps = [Step.of([(r, r + 1, 0, s - r) for r in range(n - 1) if 0 <= s - r < k]) for s in range(n - 1 + k - 1)]
    found = time_s(of_data(1, k, piece, n, steps), topology, launch)
    assert found == (n - 1) * (launch + piece / bandwidth + latency) + (k - 1) * (launch + piece / bandwidth)


@given(st.integers(1, 7), sizes, bandwidths, latencies, launches)
def test_a_star_pays_its_latency_once(
    peers: int, size: int, bandwidth: Fraction, latency: Fraction, launch: Fraction
) -> None:
    """One lane: m (a + S/B) + L. A lane per peer: m a + S/B + L on links of their own, m S/B + L at one port."""
    own_links, one_port = full_mesh(peers + 1, bandwidth, latency), switch(peers + 1, bandwidth, latency)
    one_lane = of_data(1, 1, size, peers + 1, [Step.of([(0, 1 + p, 0, 0) for p in range(peers)])])
    a_lane_each = of_data(peers, 1, size, peers + 1, [Step.of([(0, 1 + p, p, 0) for p in range(peers)])])
    latency_s = Fraction(one_port.route(0, 1).latency_s)
    assert time_s(one_lane, own_links, launch) == peers * (launch + size / bandwidth) + latency
    assert time_s(a_lane_each, own_links, launch) == peers * launch + size / bandwidth + latency
    assert time_s(a_lane_each, one_port, Fraction(0)) == peers * size / bandwidth + latency_s
    assert time_s(one_lane, one_port, Fraction(0)) == peers * size / bandwidth + latency_s


@given(st.integers(1, 4), sizes, bandwidths, latencies, launches)
def test_doubling_of_a_sum_pays_every_latency(
    d: int, size: int, bandwidth: Fraction, latency: Fraction, launch: Fraction
) -> None:
    """AllReduce of n = 2^d ranks: d (a + S/B + L), since the sum of a step waits for all that came before."""
    n, ranks = 2**d, np.arange(2**d)
    steps = [Step(ranks, ranks ^ 1 << s, np.zeros_like(ranks), np.zeros_like(ranks)) for s in range(d)]
    everywhere = np.ones((n, 1), dtype=bool)
    schedule = Schedule(
        "doubling", n, 1, Blocks.of_sums(np.array([size]), n), everywhere, everywhere.copy(), steps,
        initial_part=ranks[:, None],
    )  # fmt: skip
    assert time_s(schedule, full_mesh(n, bandwidth, latency), launch) == d * (launch + size / bandwidth + latency)


@given(st.integers(1, 4), sizes, bandwidths, st.fractions(0, 1, max_denominator=9))
def test_doubling_of_copies_pays_one_latency(d: int, size: int, bandwidth: Fraction, share: Fraction) -> None:
    """AllGather of n = 2^d ranks without launches: (n - 1) S/B + L if L is at most S/B.

    A step sends the oldest blocks first, so what has just arrived is sent when its latency has passed long ago.
    """
    n, ranks, latency = 2**d, np.arange(2**d), share * size / bandwidth
    held, steps = ranks[:, None], []
    for s in range(d):
        lane = np.zeros(held.size, dtype=np.int64)
        source = np.repeat(ranks, held.shape[1])
        steps.append(Step(source, source ^ 1 << s, lane, held.ravel()))
        held = np.concatenate([held, held[ranks ^ 1 << s]], axis=1)
    own, everything = np.eye(n, dtype=bool), np.ones((n, n), dtype=bool)
    schedule = Schedule("doubling", n, 1, Blocks.of_data(np.full(n, size)), own, everything, steps)
    assert time_s(schedule, full_mesh(n, bandwidth, latency), Fraction(0)) == (n - 1) * size / bandwidth + latency


@given(st.integers(1, 6), st.integers(1, 3), st.integers(2, 4), bandwidths, latencies, launches, bandwidths)
def test_ring_attention_hides_the_shorter_of_both(
    n: int, length: int, buffers: int, bandwidth: Fraction, latency: Fraction, launch: Fraction, rate: Fraction
) -> None:
    """K/n + max(K (n-1)/n, C), C = (n - 1) (a + S/B + L), with any number of receive buffers from two on."""
    layer = Workload(n * length, head_dim=1, heads=1, mask="full")  # 4 bytes of keys and values, and 4 FLOPs per pair
    topology = ring(n, bandwidth, latency)
    schedule = attention("ring-attention", topology, layer, buffers=buffers)
    compute_s, hops_s = n * 4 * length**2 / rate, (n - 1) * (launch + 4 * length / bandwidth + latency)
    assert time_s(schedule, topology, launch, ComputeRate(rate)) == compute_s / n + max(compute_s * (n - 1) / n, hops_s)
