"""The bytes that a schedule puts on each link and shared capacity of a topology."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tasp_lab.core.arrays import FloatArray, IntArray
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology


def link_bytes(schedules: Iterable[Schedule], topology: Topology) -> IntArray:
    """The bytes on each constraint of the topology, of all schedules together: int array (constraints,)."""
    load = np.zeros(len(topology.constraints), dtype=np.int64)
    n = topology.world_size
    for schedule in schedules:
        between = np.zeros(n * n, dtype=np.int64)
        for step in schedule.steps:
            np.add.at(between, step.source * n + step.destination, schedule.block_bytes[step.block])
        pairs = np.flatnonzero(between)
        routes, _ = topology.routes(pairs // n, pairs % n)
        hop, column = np.nonzero(routes >= 0)
        np.add.at(load, routes[hop, column], between[pairs[hop]])
    return load


def link_rates(topology: Topology) -> FloatArray:
    """The line rate of each constraint in bytes/s: float array (constraints,)."""
    return np.array([float(each.bandwidth_bytes_per_s) for each in topology.constraints])


def busiest_link_bytes(schedules: Iterable[Schedule], topology: Topology) -> int:
    """The bytes on the link that all transfers together occupy longest."""
    load = link_bytes(schedules, topology)
    return int(load[np.argmax(load / link_rates(topology))]) if len(load) else 0
