"""The operations of blocks that travel around rings: one per hop, and a repeat per step.

A hop leads from a position of a ring to the next. At each step it passes on what the hop before it brought `lag` steps
earlier (`RingSteps`, of copies or of sums), after what it passed on a step earlier has left. Its route is the same at
every step, and its messages take turns: that of step 0, then those of steps 1 to `lag` over and over.
"""

from __future__ import annotations

import numpy as np

from sim.array_operations import (
    ARRIVED,
    BLOCK,
    LANE,
    SENT,
    TRANSFER,
    CostTable,
    Edges,
    Operations,
    Passes,
    hosts,
)
from sim.messages import Messages
from sim.numbering import numbered
from tasp_lab.all_gather import RingSteps
from tasp_lab.machine import Machine
from tasp_lab.schedule import Schedule


def travels_around_rings(schedule: Schedule) -> bool:
    """Whether the schedule is blocks around rings, those of a ring equally large whoever they come from."""
    steps = schedule.steps
    if not isinstance(steps, RingSteps) or not len(steps) or schedule.rooms is not None or schedule.task is not None:
        return False
    if len(schedule.block_bytes) != steps.rings.size * steps.pieces:
        return False
    sizes = schedule.block_bytes.reshape(schedule.world_size, -1)
    return bool((sizes == sizes[0]).all())


def ring_operations(schedule: Schedule, machine: Machine) -> Operations:
    """The operations of a schedule for which `travels_around_rings`."""
    steps, topology = schedule.steps, machine.topology
    assert isinstance(steps, RingSteps)
    rings, lag = steps.rings, steps.lag
    source, destination = rings.ravel(), np.roll(rings, -1, axis=1).ravel()
    constraints, latencies_s = topology.routes(source, destination)
    table = CostTable(topology, Messages(schedule, machine.transport))
    variants = range(min(lag + 1, len(steps)))
    cost = np.stack([table.of_pairs(*table.messages.kinds(each, steps[each]), latencies_s) for each in variants])
    costs = list(table.costs)
    hop = np.arange(rings.size)
    before = np.roll(hop.reshape(rings.shape), 1, axis=1).ravel()
    host = hosts(machine, costs, cost, source)
    lane = hop // rings.shape[1] if (host >= 0).any() else np.zeros_like(hop)
    limits = [np.inf if each.most_bytes_per_s is None else each.most_bytes_per_s for each in costs]
    passes = Passes.of(topology, constraints).that_may_bind(np.array(limits)[cost].max(axis=0))
    return Operations(
        repeats=len(steps),
        kind=np.full(rings.size, TRANSFER),
        costs=costs,
        cost=cost,
        label=numbered(lane, *cost)[1],
        edges=Edges.joined([Edges.of(hop, hop, SENT, LANE, 1), Edges.of(before, hop, ARRIVED, BLOCK, lag)]),
        **passes._asdict(),
        host=host,
        lane=lane,
    )
