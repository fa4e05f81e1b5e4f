"""The least time that any schedule of the same work takes on a machine, whatever the engines compute.

    bound_s = least_s(schedule, machine)
    check_time(schedule, machine, predicted_s)      # an assertion: no prediction may lie below the bound

Layers have the bounds of their kind (`sim.bounds.layers`), schedules without kernel calls that of what enters each
rank; collectives have stronger ones (`sim.bounds.collectives`).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from sim.bounds.schedules import rates_within
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.cuts import like

ROUNDING = 1e-9
"""By how much of itself a time in floating point may lie below its bound; where many messages share, by more."""


def least_s(schedule: Schedule, machine: Machine) -> Number:
    """Lower bound of the time in seconds, for every schedule with the same task, start and end.

    Exact for exact numbers. A schedule without a task brings every block that a rank promises, and does not have
    complete at the start, into that rank. 0 for tasks of which no bound is known.
    """
    if schedule.task is None:
        return _communication_s(schedule, machine)
    from sim.bounds.layers import layer_bound_s  # with the tasks of layers, which collectives do not need

    return layer_bound_s(machine, schedule)


def check_time(schedule: Schedule, machine: Machine, time_s: Number) -> None:
    """Assert that a predicted time is possible: that no schedule of this work could be faster on the machine."""
    bound_s = least_s(schedule, machine)
    rounds = isinstance(time_s, float) or isinstance(bound_s, float)
    less = ROUNDING if rounds else 0
    if time_s < bound_s * (1 - less):
        less = max(less, rates_within(schedule, machine))
    assert time_s >= bound_s * (1 - less), (
        f"schedule {schedule.name!r} on {machine.topology.name}: predicted {float(time_s)} s, "
        f"and nothing takes less than {float(bound_s)} s"
    )


def _communication_s(schedule: Schedule, machine: Machine) -> Number:
    topology, block_bytes = machine.topology, schedule.block_bytes
    if schedule.world_size == 1:
        return 0  # without a link
    into, latency = topology.bandwidths_into_ranks_bytes_per_s, topology.min_latencies_into_ranks_s
    complete = schedule.initial
    if schedule.initial_part is not None:  # the one part that a copy has at the start, or -1 for all
        part = np.broadcast_to(schedule.initial_part, schedule.initial.shape)
        complete = complete & ((part < 0) | (schedule.blocks.parts == 1))
    is_float = isinstance(like(topology, Fraction(0)), float)
    found: Number = 0
    for rank in range(schedule.world_size):
        if missing := int(block_bytes[np.flatnonzero(schedule.final[rank] > complete[rank])].sum()):
            transfer_s = missing / into[rank]
            found = max(found, (float(transfer_s) if is_float else transfer_s) + latency[rank])
    return found
