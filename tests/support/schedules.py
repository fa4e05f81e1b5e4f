"""Small things that several test modules ask of a schedule."""

from __future__ import annotations

from sim.event.engine import simulate
from tasp_lab.attention.task import AttentionTask
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.schedule.rank_part import RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.units import Number


def task_of(schedule: Schedule) -> AttentionTask:
    assert isinstance(schedule.task, AttentionTask)
    return schedule.task


def parts(schedule: Schedule) -> list[RankPart]:
    """The part of each rank."""
    return [rank_part(schedule, rank) for rank in range(schedule.world_size)]


def time_s(schedule: Schedule, topology: Topology, compute: ComputeRate = INSTANT) -> Number:
    """How long it takes without a library."""
    return simulate(schedule, Machine(topology, compute=compute)).time_s
