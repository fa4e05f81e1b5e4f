"""One simulation by one of our engines, as a process started by `experiments.benchmarks.peers`.

``python -m experiments.benchmarks.peer_run array full-mesh:64 ring`` prints JSON: the processor seconds for finding
rings, for building and proving the schedule, for the proof alone and for the simulation; and the predicted time. Every
block has `BLOCK_BYTES`. A warm-up with four ranks loads all modules before the timing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from sim.event.engine import simulate
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.rings.decompose import decompose
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import attention_schedules, collective
from tasp_lab.schedules.collectives.all_gather import RingSteps
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

BLOCK_BYTES = 2**20

CALL_S = 20e-6
"""The time of a kernel call of ring attention: a little less than that of a message, so that both matter."""

ATTENTION = "ring-attention"

T = TypeVar("T")

Simulate = Callable[[Schedule, Machine], Number]
"""Simulates a schedule on a machine; returns the predicted time in seconds."""


def main() -> None:
    """Measure and print."""
    system, topology, name = sys.argv[1:]
    simulate_it = SYSTEMS[system]
    warm_up = full_mesh(4)
    simulate_it(_schedule(warm_up, name, rings_of(warm_up, name)), _machine(warm_up, name))
    print(json.dumps(_measure(simulate_it, _machine(topology_of(topology), name), name)))


def _measure(simulate_it: Simulate, machine: Machine, name: str) -> dict[str, float]:
    decomposition, rings_s = timed(partial(rings_of, machine.topology, name))
    schedule, prepared_s = timed(partial(_schedule, machine.topology, name, decomposition))
    time_s, simulated_s = timed(partial(simulate_it, schedule, machine))
    return {
        "rings_s": rings_s if decomposition else 0.0,
        "prepared_s": prepared_s,
        "proof_s": timed(lambda: replace(schedule))[1],  # construction repeats the proof
        "simulated_s": simulated_s,
        "time_s": float(time_s),
        "transfers": schedule.transfers,
    }


def topology_of(text: str) -> Topology:
    """The topology of an expression like ``full-mesh:64`` or ``nodes:128x8``, of any size."""
    kind, sides = text.split(":")
    if kind == "nodes":
        node_count, ranks_per_node = map(int, sides.split("x"))
        return nodes(node_count, ranks_per_node)
    return full_mesh(int(sides))


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of a function, and its processor time in seconds."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def rings_of(topology: Topology, name: str) -> Decomposition | None:
    """The rings of a multi-ring AllGather; None for the others, which find their own ring."""
    return decompose(topology) if name == "multi-ring" else None


def call_s(name: str) -> float:
    """The time of a kernel call of a schedule, 0 for an AllGather."""
    return CALL_S if name == ATTENTION else 0.0


def _layer(ranks: int) -> Workload:
    """A layer whose keys and values of a rank are a block."""
    one = Workload(ranks, heads=1, mask="full")
    return replace(one, sequence=ranks * (BLOCK_BYTES // one.kv_bytes_per_position))


def _machine(topology: Topology, name: str) -> Machine:
    if name != ATTENTION:
        return Machine(topology)
    layer = _layer(topology.world_size)
    pairs = (layer.sequence // topology.world_size) ** 2
    return Machine(topology, compute=ComputeRate(pairs * layer.flops_per_pair / CALL_S))


def _schedule(topology: Topology, name: str, decomposition: Decomposition | None) -> Schedule:
    if name == ATTENTION:
        return attention_schedules(name, topology, _layer(topology.world_size))[0]
    rings = 1 if decomposition is None else len(decomposition.rings)
    return collective(name, topology, rings * BLOCK_BYTES, decomposition)


def _simulate_simpy(schedule: Schedule, machine: Machine) -> Number:
    return simulate(schedule, machine).time_s


def _simulate_array(schedule: Schedule, machine: Machine) -> Number:
    from sim.array.engine import run

    return run(schedule, machine).time_s


def _recurrence(schedule: Schedule, machine: Machine) -> Number:
    """A lower bound on the cost of stepping through a schedule: all hops at once, for link-disjoint rings.

    A hop sends as soon as the block has arrived and the previous one has been sent.
    """
    assert isinstance(schedule.steps, RingSteps), "the recurrence requires rings"
    route = machine.topology.route(*schedule.steps.rings[0, :2].tolist())
    stream_s = float(BLOCK_BYTES / machine.topology.links[route.links[0]].bandwidth_bytes_per_s)
    left_s = there_s = np.zeros(schedule.steps.rings.shape)
    for _ in range(len(schedule.steps)):
        left_s = np.maximum(left_s, there_s) + stream_s
        there_s = np.roll(left_s + float(route.latency_s), 1, axis=1)
    return float(there_s.max())


SYSTEMS: Mapping[str, Simulate] = {"simpy": _simulate_simpy, "array": _simulate_array, "numpy": _recurrence}
"""Our engines by their names on the command line."""

if __name__ == "__main__":
    main()
