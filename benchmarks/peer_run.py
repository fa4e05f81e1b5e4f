"""One AllGather simulated once by one of our ways, in a process of its own: what `benchmarks.peers` starts.

``python -m benchmarks.peer_run array full-mesh:64 ring`` prints JSON: the seconds for finding rings, for building and
proving the schedule, for the proof alone and for the simulation; the predicted time; the most memory that the process
had. Every block has `BLOCK_BYTES`. Four ranks are simulated first, so that nothing is loaded while time is taken.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from sim.engine import simulate
from tasp_lab.all_gather import RingSteps, all_gather
from tasp_lab.builders import full_mesh, nodes
from tasp_lab.decomposition import Decomposition, decompose
from tasp_lab.machine import Machine
from tasp_lab.quantities import Number
from tasp_lab.schedule import Schedule
from tasp_lab.topology import Topology

BLOCK_BYTES = 2**20

T = TypeVar("T")

Simulate = Callable[[Schedule, Machine], Number]
"""From a schedule and a machine to the time that it takes, in seconds."""


def main() -> None:
    """Measure and print."""
    system, topology, name = sys.argv[1:]
    simulate_it = SYSTEMS[system]
    warm_up = full_mesh(4)
    simulate_it(all_gather("ring", warm_up, BLOCK_BYTES), Machine(warm_up))
    print(json.dumps(_measure(simulate_it, Machine(topology_of(topology)), name)))


def _measure(simulate_it: Simulate, machine: Machine, name: str) -> dict[str, float]:
    decomposition, rings_s = timed(partial(rings_of, machine.topology, name))
    schedule, prepared_s = timed(partial(_schedule, machine.topology, name, decomposition))
    time_s, simulated_s = timed(partial(simulate_it, schedule, machine))
    peak_bytes = _peak_bytes()
    return {
        "rings_s": rings_s if decomposition else 0.0,
        "prepared_s": prepared_s,
        "proof_s": timed(lambda: replace(schedule))[1],  # which proves it again
        "simulated_s": simulated_s,
        "time_s": float(time_s),
        "transfers": schedule.transfers,
        "peak_bytes": peak_bytes,
    }


def topology_of(text: str) -> Topology:
    """The topology of a text like ``full-mesh:64`` or ``nodes:128x8``, of whatever size."""
    kind, sides = text.split(":")
    if kind == "nodes":
        node_count, ranks_per_node = map(int, sides.split("x"))
        return nodes(node_count, ranks_per_node)
    return full_mesh(int(sides))


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What some work returns, and the seconds it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def rings_of(topology: Topology, name: str) -> Decomposition | None:
    """The rings of a multi-ring AllGather; the ring AllGather finds its own."""
    return decompose(topology) if name == "multi-ring" else None


def _schedule(topology: Topology, name: str, decomposition: Decomposition | None) -> Schedule:
    rings = 1 if decomposition is None else len(decomposition.rings)
    return all_gather(name, topology, rings * BLOCK_BYTES, decomposition)


def _simulate_simpy(schedule: Schedule, machine: Machine) -> Number:
    return simulate(schedule, machine).time_s


def _simulate_array(schedule: Schedule, machine: Machine) -> Number:
    from sim.array_engine import run

    return run(schedule, machine).time_s


def _recurrence(schedule: Schedule, machine: Machine) -> Number:
    """The least that stepping through a schedule can cost: all hops at once, of rings that share no link.

    A hop sends as soon as the block is there and the one before has left.
    """
    assert isinstance(schedule.steps, RingSteps), "the recurrence is that of rings"
    route = machine.topology.route(*schedule.steps.rings[0, :2].tolist())
    stream_s = float(BLOCK_BYTES / machine.topology.links[route.links[0]].bandwidth_bytes_per_s)
    left_s = there_s = np.zeros(schedule.steps.rings.shape)
    for _ in range(len(schedule.steps)):
        left_s = np.maximum(left_s, there_s) + stream_s
        there_s = np.roll(left_s + float(route.latency_s), 1, axis=1)
    return float(there_s.max())


def _peak_bytes() -> int:
    """The most memory that this process had; what `resource` says may be its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


SYSTEMS: Mapping[str, Simulate] = {"simpy": _simulate_simpy, "array": _simulate_array, "numpy": _recurrence}
"""Each of our ways to simulate by its name on the command line."""

if __name__ == "__main__":
    main()
