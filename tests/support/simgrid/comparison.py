"""The arrival times of messages by both engines and by SimGrid, see `tests.support.simgrid.arrivals`.

(difference,) = largest_differences(simgrid_python(), [(ring(4), collective("all-to-all", ring(4), 100), None)])
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sim.array.engine import run
from sim.event.engine import simulate
from tasp_lab.core.units import Number
from tasp_lab.machines.libraries.library import CommLibrary, Message
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.schedules.registry import options_for
from tasp_lab.timeline.events import SEND
from tasp_lab.topology.builders import (
    bidirectional_ring,
    circulant,
    dragonfly,
    fat_tree,
    full_mesh,
    hypercube,
    nodes,
    ring,
    torus,
)
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tests.support.links import with_links, without_links
from tests.support.schedules import parts

Case = tuple[Topology, Schedule, Number | None]
"""What runs on what, and how many bytes per second each message reaches at most."""

SCRIPT = Path(__file__).with_name("arrivals.py")

SHARD_BYTES = 1_000_000_007
"""No multiple of a number of rings: chunks differ."""


def routed_topologies() -> tuple[Topology, ...]:
    """Topologies on which some messages pass other ranks, or only switches: rings, grids, trees, and what is left."""
    return (
        ring(5),
        bidirectional_ring(6),
        torus((3, 4)),
        torus((2, 2, 3)),
        hypercube(3),
        circulant(9, (1, 3)),
        without_links(torus((2, 4)), ["0-1"]),
        with_links(torus((3, 3)), ["0-1=10GB/s", "4>5=33GB/s"]),
        without_links(full_mesh(6), ["0-1", "0-2", "3>4", "1-5"]),
        dragonfly(3, 2, 1),
        fat_tree((2, 3), oversubscription=2),
        nodes(2, 3, network="rails-only"),
    )


ROUTED_SCHEDULES = ("all-to-all", "ulysses", "ring-attention", "direct-kv-all-gather")


def routed_case(topology: Topology, name: str) -> Case:
    """A collective, or the forward pass of a layer with as many heads as ranks and buffers that nothing waits for."""
    ranks = topology.world_size
    if name == "all-to-all":
        return topology, collective(name, topology, SHARD_BYTES), None
    layer = Workload(7 * ranks**2, heads=ranks, head_dim=64, mask="full")
    options = options_for(name, AttentionOptions(buffers=ranks + 1))
    (schedule,) = attention_schedules(name, topology, layer, options=options)
    return topology, schedule, None


@dataclass(frozen=True)
class Limited(CommLibrary):
    """A library whose messages reach only so many bytes/s each."""

    max_bytes_per_s: Number | None = None

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        return Message(0, 0, size_bytes, self.max_bytes_per_s, "limit")


@cache
def simgrid_python() -> str | None:
    """The system's Python if it can import SimGrid, else None."""
    python = shutil.which("python3", path=os.defpath)
    probe = "import simgrid; simgrid.NetZone.create_full_zone"
    works = python and subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0
    return python if works else None


Key = tuple[int, int, int, int, tuple[int, ...]]
"""Rank, lane, step, peer and blocks of a message."""


def messages_of(schedule: Schedule) -> list[Key]:
    """All messages that the executor sends, in the order in which each rank posts them."""
    sent = ((part.rank, rows) for part in parts(schedule) for rows in part.messages_out)
    return [(rank, rows[0].lane, rows[0].step, rows[0].peer, tuple(row.block for row in rows)) for rank, rows in sent]


def waits_of(schedule: Schedule, messages: Sequence[Key]) -> list[list[int]]:
    """For each message those to its rank, at steps before, of its blocks, or of what calls read that add to them.

    Without buffers it waits for no others. Calls take no time, but each waits for those of its lane before it.
    """
    came: dict[tuple[int, int], list[tuple[int, set[int]]]] = defaultdict(list)
    for number, (_, _, step, peer, blocks) in enumerate(messages):
        for block in blocks:
            came[peer, block].append((step, {number}))

    def before(step: int, rank: int, blocks: Sequence[int]) -> set[int]:
        return set().union(*(part for block in blocks for at, part in came[rank, block] if at < step))

    for of_rank in parts(schedule):
        lanes: dict[int, set[int]] = defaultdict(set)
        for call in of_rank.calls:
            lanes[call.lane] |= before(call.step, of_rank.rank, [block for block, _ in call.reads])
            for place in call.adds:
                came[of_rank.rank, place.block].append((call.step, set(lanes[call.lane])))
    return [sorted(before(step, rank, blocks)) for rank, _, step, _, blocks in messages]


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
        "waits": waits_of(schedule, transfers),
    }


def largest_differences(python: str, cases: Sequence[Case], latency_inside: bool = False) -> list[float]:
    """How far any arrival of each case is from SimGrid's with either engine, relative; infinite if messages differ.

    `python` can import SimGrid; it runs in one process for all cases.
    """
    asked = json.dumps([as_scenario(case, latency_inside) for case in cases])
    done = subprocess.run([python, str(SCRIPT)], input=asked, capture_output=True, text=True, check=True, timeout=300)
    largest = []
    for (topology, schedule, limit), times_s in zip(cases, json.loads(done.stdout), strict=True):
        found = dict(zip(messages_of(schedule), times_s, strict=True))
        machine = Machine(topology, Limited("limited", max_bytes_per_s=limit))
        timelines = simulate(schedule, machine), run(schedule, machine).timeline()
        arrivals = (
            {(e.rank, e.lane, e.step, e.peer, e.blocks): float(e.end_s) for e in timeline.events if e.kind == SEND}
            for timeline in timelines
        )
        largest.append(max(_largest_difference(found, ours) for ours in arrivals))
    return largest


def _largest_difference(found: Mapping[Key, float], ours: Mapping[Key, float]) -> float:
    if found.keys() != ours.keys():
        return float("inf")
    return max((abs(found[key] - ours[key]) / abs(ours[key]) for key in ours), default=0.0)
