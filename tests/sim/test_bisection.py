"""All-to-alls through other ranks against closed forms of the busiest link, and against every cut.

Let the busiest link carry L whole messages of s bytes at B bytes/s, all sent at once. Max-min sharing gives no flow
less than B/L, the equal share of the first link to fill, and the flows over that link exactly this: it stays full, and
its flows end together, after L s / B. All others end by then. So the all-to-all takes L s / B and the latency of the
longest route, where a busiest link is on one of the longest routes, as on all topologies here.

Around a ring of n, a link carries d messages to ranks at each distance d below n/2: (n^2 - 1)/8 in all for odd n, and
n (n - 2)/8 for even n. Messages half around, n/2 links long, go upward from even ranks: a link carries those of the
even ranks among the n/2 before it, n/4, or (n + 2)/4 of every other link where n/4 is not whole. Together n^2/8, or
(n^2 + 4)/8. On a torus, dimension by dimension, each ring of a dimension of side n carries every such message for each
rank of the N/n in the other dimensions. A hypercube has rings of 2, so N/2. Around a directed ring each link carries d
messages of each distance d < n.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds.collectives import collective_bound_s
from sim.bounds.layers import layer_bound_s
from sim.bounds.schedules import least_of_schedule_s
from sim.event import engine
from sim.simulate import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.registry import NOT_APPLICABLE, attention_names_on
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, hypercube, ring, torus
from tasp_lab.topology.graph import Topology, both_ways
from tasp_lab.workload.layer import Workload
from tests.support.links import without_links
from tests.support.simulations import uneven_topologies
from tests.support.strategies import complete_topologies
from tests.support.systems import passes_of

B, LATENCY_S = Fraction(3 * 10**9), Fraction(1, 7 * 10**5)


def ring_messages(n: int) -> int:
    """The most messages of an all-to-all on a link of a bidirectional ring of n."""
    return {0: n * n, 1: n * n - 1, 2: n * n + 4, 3: n * n - 1}[n % 4] // 8


def torus_messages(*shape: int) -> int:
    return max(ring_messages(side) * prod(shape) // side for side in shape)


def diameter(*shape: int) -> int:
    return sum(side // 2 for side in shape)


def both_times_s(schedule: Schedule, machine: Machine) -> Fraction:
    """The time by the exact engine, which that of the array engine agrees with."""
    exact = Fraction(engine.simulate(schedule, machine).time_s)
    assert float(simulate(schedule, machine, "array").time_s) == pytest.approx(float(exact), rel=1e-9)
    return exact


SHAPES = [(n,) for n in range(2, 13)] + [(2, 2), (2, 3), (3, 3), (4, 3), (4, 4), (6, 2), (5, 2), (2, 3, 2), (3, 1, 4)]
CLOSED: list[tuple[Topology, int, int]] = [
    *((torus(shape, B, LATENCY_S), torus_messages(*shape), diameter(*shape)) for shape in SHAPES),
    *((bidirectional_ring(n, B, LATENCY_S), ring_messages(n), n // 2) for n in (3, 4, 6, 7)),
    *((hypercube(d, B, LATENCY_S), 2**d // 2, d) for d in (1, 2, 3, 4)),
    *((ring(n, B, LATENCY_S), n * (n - 1) // 2, n - 1) for n in (2, 3, 4, 7)),
]
"""Topologies, with the messages of the busiest link and the links of the longest route."""


@pytest.mark.parametrize(("topology", "messages", "links"), CLOSED, ids=lambda each: getattr(each, "name", str(each)))
def test_an_all_to_all_takes_as_long_as_its_busiest_link(topology: Topology, messages: int, links: int) -> None:
    expected = messages * 840 / B + links * LATENCY_S
    assert both_times_s(collective("all-to-all", topology, 840), Machine(topology)) == expected
    assert collective_bound_s("AllToAll", topology, 840) <= expected


@pytest.mark.parametrize("shape", [(4,), (5,), (8,), (3, 3), (4, 4), (2, 2, 2), (4, 3)])
def test_ulysses_takes_as_long_as_its_all_to_alls_and_its_calls(shape: tuple[int, ...]) -> None:
    """Queries, keys and values there, results and their log-sum-exps back. All ranks have all they need at once."""
    n, topology = prod(shape), torus(shape, B, LATENCY_S)
    layer = Workload(16 * n, heads=2 * n, kv_heads=n, head_dim=8, dtype="bf16", mask="full")
    machine = Machine(topology, compute=ComputeRate(Fraction(10**12)))
    there, back = 16 * 8 * (2 + 2 * 1) * 2, 16 * 2 * (8 * 2 + 4)  # bytes, with a log-sum-exp of 4 per result
    calls_s = Fraction(4 * (16 * n) ** 2 * 8 * 2, 10**12)
    transfers_s = torus_messages(*shape) * (there + back) / B + 2 * diameter(*shape) * LATENCY_S
    assert both_times_s(passes_of("ulysses", topology, layer).forward, machine) == transfers_s + calls_s


CONNECTED = uneven_topologies(("chords", "two switches")) | complete_topologies(6)


@given(CONNECTED.filter(lambda each: each.world_size > 1), st.integers(1, 200), st.data())
@settings(deadline=None)
def test_no_all_to_all_is_faster_than_a_cut(topology: Topology, chunk: int, data: st.DataObject) -> None:
    """All chunks from ranks inside to ranks outside leave over the links from inside to outside."""
    inside = data.draw(st.sets(st.sampled_from(topology.vertices)).filter(lambda some: 0 in some))
    ranks = sum(vertex in inside for vertex in range(topology.world_size))
    leaving = [link for link in topology.listed_links() if link.source in inside and link.destination not in inside]
    chunks = ranks * (topology.world_size - ranks)
    time_s = both_times_s(collective("all-to-all", topology, chunk), Machine(topology))
    if chunks:
        assert time_s >= chunks * chunk / sum(Fraction(link.bandwidth_bytes_per_s) for link in leaving)
    assert time_s >= collective_bound_s("AllToAll", topology, chunk)


def star(n: int) -> Topology:
    return Topology(f"star of {n}", n, tuple(link for rank in range(1, n) for link in both_ways(0, rank, B, LATENCY_S)))


FEW: dict[str, tuple[Callable[[], Topology], str]] = {
    "torus:3x3": (lambda: torus((3, 3), B, LATENCY_S), ""),
    "ring:4": (lambda: ring(4, B, LATENCY_S), "double-ring:2x2:tasp grid:2x2:ring grid:2x2:multi-ring grid:2x2:trees"),
    "path": (lambda: without_links(bidirectional_ring(5, B, LATENCY_S), ["4-0"]), ""),
    "star": (lambda: star(5), ""),
    "hypercube:3": (lambda: hypercube(3, B, LATENCY_S), ""),
    "mesh": (
        lambda: without_links(full_mesh(4, B, LATENCY_S), ["0-1"]),
        "grid:2x2:ring grid:2x2:multi-ring grid:2x2:trees",
    ),
}
"""Connected topologies, and what does not apply there: what needs the same links inside all groups of ranks."""


@pytest.mark.parametrize("which", FEW)
def test_all_schedules_of_attention_apply_to_every_connected_topology(which: str) -> None:
    """They are proved as they are built, and take no less than their bounds."""
    build, refused = FEW[which]
    topology, refusals = build(), []
    machine, n = Machine(topology), topology.world_size
    for name in attention_names_on(n, variants=True):
        layer = Workload(8 * n, heads=n, kv_heads=n, head_dim=2, mask="full" if "token-ring" in name else "causal")
        try:
            passes = passes_of(name, topology, layer)
        except NOT_APPLICABLE as error:
            refusals.append(name if "expected the same in each group" in str(error) else str(error))
            continue
        for schedule in passes:
            time_s = float(simulate(schedule, machine, "array").time_s)
            assert float(layer_bound_s(machine, schedule)) <= time_s * (1 + 1e-9)
            assert 0 < least_of_schedule_s(schedule, machine) <= time_s * (1 + 1e-9)
    assert sorted(refusals) == sorted(refused.split())
