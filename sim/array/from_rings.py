"""The operations of ring schedules: one per hop, and one repeat per step.

A hop connects a position of a ring to the next one. At each step it forwards the block that the previous hop delivered
`lag` steps earlier (`RingSteps`, of copies or of sums), after its own block of the previous step has left. Its route is
the same at every step. Its messages are that of step 0, then those of steps 1 to `lag` repeatedly. Each ring is a lane
and each hop brings one block, so all messages are of one block (`tasp_lab.schedule.messages`).
"""

from __future__ import annotations

import numpy as np

from sim.array.operations import TRANSFER, CostTable, Edges, Incidence, Operations, hosts
from sim.messages import LibraryMessages
from tasp_lab.core.arrays import numbered
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import ARRIVED, BLOCK, LANE, SENT
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import RingSteps


def is_ring_schedule(schedule: Schedule) -> bool:
    """Whether the steps are `RingSteps` with block sizes that depend on the ring and chunk only."""
    steps = schedule.steps
    if not isinstance(steps, RingSteps) or not len(steps) or schedule.blocks.pools or schedule.task is not None:
        return False
    if len(schedule.block_bytes) != steps.rings.size * steps.chunks:
        return False
    sizes = schedule.block_bytes.reshape(schedule.world_size, -1)
    return bool((sizes == sizes[0]).all())


def ring_operations(schedule: Schedule, machine: Machine) -> Operations:
    """The operations of a schedule for which `is_ring_schedule` holds."""
    steps, topology = schedule.steps, machine.topology
    assert isinstance(steps, RingSteps)
    rings, lag = steps.rings, steps.lag
    source, destination = rings.ravel(), np.roll(rings, -1, axis=1).ravel()
    constraints, latencies_s = topology.routes(source, destination)
    table = CostTable(topology, LibraryMessages(schedule, machine.comm_library))
    size_bytes = [schedule.block_bytes[steps[each].block] for each in range(min(lag + 1, len(steps)))]
    kinds = [table.messages.kinds(index, source, destination, size) for index, size in enumerate(size_bytes)]
    cost = np.stack([table.of_pairs(*each, latencies_s) for each in kinds])
    costs = list(table.costs)
    hop = np.arange(rings.size)
    before = np.roll(hop.reshape(rings.shape), 1, axis=1).ravel()
    host = hosts(machine, costs, cost, source)
    lane = hop // rings.shape[1] if (host >= 0).any() else np.zeros_like(hop)
    limits = [np.inf if each.max_bytes_per_s is None else each.max_bytes_per_s for each in costs]
    passes = Incidence.of(topology, constraints).that_can_saturate(np.array(limits)[cost].max(axis=0))
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
