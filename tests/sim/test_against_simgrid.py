"""The network model and SimGrid's CM02, which shares nothing with it, agree on when every transfer arrives.

Both share bandwidth max-min fairly among flows that pass all links of their route at once. They differ in latency: in
SimGrid it comes before the bytes, and a transfer is not done before it has passed; here it comes after them, and the
next transfer of the lane may begin before. So latency is compared in two ways: outside of SimGrid's network, as a delay
of what arrived; and inside, at one latency for all routes, with every transfer on a lane of its own.

SimGrid comes with Debian and Ubuntu (python3-simgrid), for the system's Python.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.point_to_point import all_to_all
from tasp_lab.schedules.collectives.ring_reductions import multi_ring_all_reduce
from tasp_lab.topology.builders import full_mesh, nodes, switch, torus
from tasp_lab.topology.graph import Link, Topology
from tests.support.links import with_links
from tests.support.simgrid.comparison import (
    ROUTED_SCHEDULES,
    SHARD_BYTES,
    Case,
    largest_differences,
    routed_case,
    routed_topologies,
    simgrid_python,
)
from tests.support.simulations import gossip_cases

TOLERANCE = 1e-6
"""Relative; SimGrid computes with floats and calls what is closer than its precisions equal."""


def equal_nodes(inside: str, latency_s: float = 1e-3) -> Topology:
    """Two nodes of three ranks whose routes all have one latency."""
    return nodes(2, 3, inside, link_latency_s=latency_s, nic_latency_s=latency_s)  # type: ignore[arg-type]


TOPOLOGIES = (
    full_mesh(5),
    with_links(full_mesh(5), ["0-3=10GB/s", "2>1=33GB/s"]),
    switch(5),
    with_links(switch(5), ["0>switch=10GB/s", "switch>2=77GB/s"]),
    equal_nodes("full-mesh"),
    equal_nodes("switch"),
    with_links(equal_nodes("full-mesh"), ["0-1=10GB/s", "4>network=20GB/s"]),
)
TORI = torus((3, 3)), with_links(torus((3, 3)), ["0-1=25GB/s"])
ALL_GATHERS = [(topology, name) for topology in TOPOLOGIES for name in ("ring", "multi-ring", "direct")]
ALL_GATHERS += [(topology, name) for topology in TORI for name in ("ring", "multi-ring")]


def collectives() -> list[Case]:
    return [
        *((topology, collective(name, topology, SHARD_BYTES), None) for topology, name in ALL_GATHERS),
        *((topology, multi_ring_all_reduce(topology, SHARD_BYTES), None) for topology in TOPOLOGIES),
        *((topology, all_to_all(topology, SHARD_BYTES), None) for topology in TOPOLOGIES),
    ]


@cache
def gossips() -> list[Case]:
    """Random transfers on random topologies with unequal links, latencies, shared capacities; with limits or none."""
    drawn: list[Case] = []

    @given(
        gossip_cases().filter(lambda case: not case[1].blocks.pools and case[1].transfers > 5),
        st.sampled_from([0, 1, 2, 4]),
    )
    @settings(max_examples=60, derandomize=True, database=None, phases=[Phase.generate])
    def draw(case: tuple[Topology, Schedule], parts: int) -> None:
        fastest = max(Fraction(constraint.bandwidth_bytes_per_s) for constraint in case[0].constraints)
        drawn.append((*case, fastest / parts if parts else None))

    draw()
    return drawn


def at_one_latency(case: Case) -> Case:
    """The same with one latency on every route, and each transfer on a lane of its own.

    No other rank forwards here, so one link of a route leads to a rank: the last one.
    """
    topology, schedule, limit = case
    latency_s = Fraction(int(schedule.block_bytes.max()), 2) / Fraction(max(topology.link_bandwidths_bytes_per_s))

    def changed(_: int, link: Link) -> Link:
        return replace(link, latency_s=latency_s if isinstance(link.destination, int) else 0)

    ends = [0, *accumulate(len(step) for step in schedule.steps)]
    lanes = (np.arange(*each) for each in pairwise(ends))
    steps = [replace(step, lane=lane) for step, lane in zip(schedule.steps, lanes, strict=True)]
    apart = replace(schedule, lanes=max(schedule.transfers, 1), steps=steps)
    return topology.map_links(changed, topology.name), apart, limit


def assert_equal_arrivals(cases: Sequence[Case], latency_inside: bool = False) -> None:
    """Every message of each case, with both engines. In CI SimGrid must be there; elsewhere it may be missing."""
    if (python := simgrid_python()) is None:
        missing = "no SimGrid 3.32 for the system's Python: apt-get install python3-simgrid"
        pytest.fail(missing) if "CI" in os.environ else pytest.skip(missing)
    for (topology, schedule, limit), largest in zip(
        cases, largest_differences(python, cases, latency_inside), strict=True
    ):
        assert largest < TOLERANCE, (topology.name, schedule.name, limit)


def test_collectives() -> None:
    assert_equal_arrivals(collectives())


def test_gossip() -> None:
    assert_equal_arrivals(gossips())


def test_latency_inside_the_network() -> None:
    assert_equal_arrivals([at_one_latency(case) for case in [*collectives(), *gossips()][::2]], latency_inside=True)


@pytest.mark.parametrize("topology", routed_topologies(), ids=lambda topology: topology.name)
def test_routes_through_ranks(topology: Topology) -> None:
    """All that is sent over several links, by ranks that are not linked, too, and attention that waits for it."""
    cases = [routed_case(topology, name) for name in ROUTED_SCHEDULES]
    assert_equal_arrivals(cases)


def test_topologies_have_routes_through_ranks() -> None:
    """All do but those of switches."""
    complete = [topology.name for topology in routed_topologies() if topology.is_complete]
    assert complete == ["dragonfly:3x2x1", "fat-tree:2x3:2"]
