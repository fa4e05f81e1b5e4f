"""The network model and SimGrid's CM02, which shares nothing with it, agree on when every transfer arrives.

Both share bandwidth max-min fairly among flows that pass all links of their route at once. They differ in latency: in
SimGrid it comes before the bytes, and a transfer is not done before it has passed; here it comes after them, and the
next transfer of the lane may begin before. So latency is compared in two ways: outside of SimGrid's network, as a delay
of what arrived; and inside, at one latency for all routes, with every transfer on a lane of its own.

SimGrid comes with Debian and Ubuntu (python3-simgrid), for the system's Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sim.array.engine import run
from sim.event.engine import simulate
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import CommLibrary, Message
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.collectives.point_to_point import all_to_all
from tasp_lab.schedules.collectives.ring_reductions import multi_ring_all_reduce
from tasp_lab.topology.builders import full_mesh, nodes, switch, torus
from tasp_lab.topology.graph import Link, Topology
from tests.support.links import with_links
from tests.support.schedules import parts
from tests.support.simulations import gossip_cases

Case = tuple[Topology, Schedule, Number | None]
"""What runs on what, and how many bytes per second each message reaches at most."""

SCRIPT = Path(__file__).parents[1] / "support" / "simgrid" / "arrivals.py"
TOLERANCE = 1e-6
"""Relative; SimGrid computes with floats and calls what is closer than its precisions equal."""

SHARD_BYTES = 1_000_000_007
"""No multiple of a number of rings: chunks differ."""


@dataclass(frozen=True)
class Limited(CommLibrary):
    """A library whose messages reach only so many bytes/s each."""

    max_bytes_per_s: Number | None = None

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        return Message(0, 0, size_bytes, self.max_bytes_per_s, "limit")


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

    A route goes through switches only, so one of its links leads to a rank: the last one.
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


@cache
def simgrid_python() -> str:
    """The system's Python, which can import SimGrid. In CI it must; elsewhere, without it the test is skipped."""
    python = shutil.which("python3", path=os.defpath)
    probe = "import simgrid; simgrid.NetZone.create_full_zone"
    if python and subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0:
        return python
    missing = "no SimGrid 3.32 for the system's Python: apt-get install python3-simgrid"
    return pytest.fail(missing) if "CI" in os.environ else pytest.skip(missing)


Key = tuple[int, int, int, int, tuple[int, ...]]
"""Rank, lane, step, peer and blocks of a message."""


def messages_of(schedule: Schedule) -> list[Key]:
    """All messages that the executor sends, in the order in which each rank posts them."""
    sent = ((part.rank, rows) for part in parts(schedule) for rows in part.messages_out)
    return [(rank, rows[0].lane, rows[0].step, rows[0].peer, tuple(row.block for row in rows)) for rank, rows in sent]


def waits_of(messages: Sequence[Key]) -> list[list[int]]:
    """For each message those of its blocks to its rank at steps before: without buffers it waits for no others."""
    came: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (_, _, _, peer, blocks) in enumerate(messages):
        for block in blocks:
            came[peer, block].append(number)
    return [
        sorted({other for block in blocks for other in came[rank, block] if messages[other][2] < index})
        for rank, _, index, _, blocks in messages
    ]


def as_scenario(case: Case, latency_inside: bool) -> dict[str, object]:
    """What `tests.support.simgrid.arrivals` reads; latency is waited for inside SimGrid's network or outside of it."""
    topology, schedule, limit = case
    transfers = messages_of(schedule)
    lanes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (rank, lane, *_) in enumerate(transfers):
        lanes[rank, lane].append(number)
    routes = {pair: topology.route(*pair) for pair in sorted({(rank, peer) for rank, _, _, peer, _ in transfers})}
    after_s = {pair: 0.0 if latency_inside else float(route.latency_s) for pair, route in routes.items()}
    sizes = schedule.block_bytes.tolist()
    max_bytes_per_s = None if limit is None else float(limit)
    return {
        "ranks": topology.world_size,
        "bandwidths": [float(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints],
        "routes": [
            (*pair, route.constraints, float(route.latency_s) - after_s[pair]) for pair, route in routes.items()
        ],
        "transfers": [
            (rank, peer, sum(sizes[block] for block in blocks), max_bytes_per_s, after_s[rank, peer])
            for rank, _, _, peer, blocks in transfers
        ],
        "lanes": list(lanes.values()),
        "waits": waits_of(transfers),
    }


def assert_equal_arrivals(cases: Sequence[Case], latency_inside: bool = False) -> None:
    """One SimGrid process for all cases; then every message of each with both engines."""
    command = [simgrid_python(), str(SCRIPT)]
    asked = json.dumps([as_scenario(case, latency_inside) for case in cases])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, timeout=120)
    for (topology, schedule, limit), times_s in zip(cases, json.loads(done.stdout), strict=True):
        found = dict(zip(messages_of(schedule), times_s, strict=True))
        machine = Machine(topology, Limited("limited", max_bytes_per_s=limit))
        for events in (simulate(schedule, machine).events, run(schedule, machine).timeline().events):
            ours = {(e.rank, e.lane, e.step, e.peer, e.blocks): float(e.end_s) for e in events}
            assert found == pytest.approx(ours, rel=TOLERANCE, abs=0), (topology.name, schedule.name, limit)


def test_collectives() -> None:
    assert_equal_arrivals(collectives())


def test_gossip() -> None:
    assert_equal_arrivals(gossips())


def test_latency_inside_the_network() -> None:
    assert_equal_arrivals([at_one_latency(case) for case in [*collectives(), *gossips()][::2]], latency_inside=True)
