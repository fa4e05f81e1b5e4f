"""Small things that several test modules ask of a schedule."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sim.event.engine import simulate
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import INSTANT, Compute, Machine
from tasp_lab.schedule.rank_part import RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.timeline.events import SEND, Event
from tasp_lab.topology.graph import Topology


def task_of(schedule: Schedule) -> AttentionTask:
    assert isinstance(schedule.task, AttentionTask)
    return schedule.task


def transfers_in(events: Iterable[Event]) -> list[tuple[int, int, int, int, int]]:
    """The step, source, destination, lane and block of each transfer in the messages among some events, ascending."""
    return sorted((e.step, e.rank, e.peer, e.lane, block) for e in events if e.kind == SEND for block in e.blocks)


def transfers_of(schedule: Schedule) -> list[tuple[int, int, int, int, int]]:
    """The same of all transfers of a schedule."""
    return sorted((index, *row) for index, step in enumerate(schedule.steps) for row in step.rows())


def assert_every_transfer_once(events: Iterable[Event], schedule: Schedule) -> None:
    """The messages among some events have all transfers of a schedule, with their bytes."""
    events, size = list(events), schedule.block_bytes.tolist()
    assert transfers_in(events) == transfers_of(schedule)
    for event in events:
        assert event.kind != SEND or event.bytes == sum(size[block] for block in event.blocks)


def bytes_between(schedule: Schedule) -> IntArray:
    """The bytes from rank to rank, an int array (world_size, world_size)."""
    found = np.zeros((schedule.world_size, schedule.world_size), dtype=np.int64)
    for step in schedule.steps:
        np.add.at(found, (step.source, step.destination), schedule.block_bytes[step.block])
    return found


def parts(schedule: Schedule) -> list[RankPart]:
    """The part of each rank."""
    return [rank_part(schedule, rank) for rank in range(schedule.world_size)]


def time_s(schedule: Schedule, topology: Topology, compute: Compute = INSTANT) -> Number:
    """How long it takes without a library."""
    return simulate(schedule, Machine(topology, compute=compute)).time_s
