"""The operations of a schedule with their costs: of any schedule (`step_operations`), or of rings (`ring_operations`).

What waits for what is derived from the schedule (`tasp_lab.schedule.dependencies`), except for rings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sim.array.operations import (
    CALL,
    COMPUTES,
    FREED,
    RECEIVES,
    SENDS,
    TRANSFER,
    Cost,
    CostTable,
    GpuUses,
    Incidence,
    Operations,
    hosts,
)
from sim.host import issue_times
from sim.messages import LibraryMessages
from tasp_lab.core.arrays import IntArray, distinct, numbered
from tasp_lab.core.units import Number
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import ARRIVED, BLOCK, HANDED_OUT, HOST, LANE, SENT, CallTable, Edges
from tasp_lab.schedule.messages import MessageDependencies, Messages
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import RingSteps
from tasp_lab.workload.kernel_shapes import KernelShape


def call_costs(
    machine: Machine, time_s: Callable[[KernelShape], Number], calls: CallTable, chosen: IntArray, table: CostTable
) -> IntArray:
    """The costs of some calls, by their numbers in `calls`; `time_s` is that of a shape at the speed of `compute`."""
    n = machine.topology.world_size if machine.rank_speeds else 1
    pairs, pair = np.unique(calls.shape[chosen] * n + calls.rank[chosen] % n, return_inverse=True)
    seconds = [float(machine.call_s(time_s(calls.shapes[number // n]), number % n)) for number in pairs.tolist()]
    costs: IntArray = np.array([table.number(Cost(time_s, 0.0, 0.0, None, "")) for time_s in seconds], dtype=np.int64)
    return costs[pair]


class HandedOut(NamedTuple):
    """Calls whose thread blocks others wait for: an operation each, from the begin of the call until no block waits.

    Int arrays: the `call` of each operation, its `rank`, and its `cost`; the operations are numbered from `first` on.
    """

    first: int
    call: IntArray
    rank: IntArray
    cost: IntArray

    @classmethod
    def of(cls, machine: Machine, derived: MessageDependencies, first: int, table: CostTable) -> HandedOut:
        """The operations of the calls that an edge waits for."""
        operation = distinct(derived.edges.before[derived.edges.event == HANDED_OUT])
        call, calls = operation - derived.first_call, derived.calls
        cost = call_costs(machine, machine.handed_out_s, calls, call, table)
        return cls(first, operation, calls.rank[call], cost)

    def edges(self, edges: Edges) -> Edges:
        """The edges of a schedule: each operation waits for what its call waits for, and is waited for in its place."""
        if not len(self.call):
            return edges
        number = np.full(self.first, -1)
        number[self.call] = self.first + np.arange(len(self.call))
        waits = edges.event == HANDED_OUT
        before, event = np.where(waits, number[edges.before], edges.before), np.where(waits, ARRIVED, edges.event)
        begins = Edges(*(column[number[edges.after] >= 0] for column in edges))
        return Edges.joined([edges._replace(before=before, event=event), begins._replace(after=number[begins.after])])


def step_operations(schedule: Schedule, machine: Machine, derived: MessageDependencies) -> Operations:
    """The operations of a schedule, as one repeat: messages, calls, buffers, hosts, then calls until handed out."""
    table = CostTable(machine.topology, LibraryMessages(schedule, machine.comm_library))
    messages = derived.messages
    transfer_cost, routes = _transfer_costs(messages, table)
    calls, buffers = derived.calls, derived.buffers
    call_cost = call_costs(machine, machine.compute.time_s, calls, np.arange(len(calls.step)), table)
    free = table.number(Cost(0.0, 0.0, 0.0, None, ""))
    issued_cost, edges = _issues(schedule, machine, derived, table)
    first = derived.first_buffer + len(buffers.step) + len(issued_cost)
    handed = HandedOut.of(machine, derived, first, table)
    freed_cost = np.concatenate([np.full(len(buffers.step), free), issued_cost, handed.cost])
    cost = np.concatenate([transfer_cost, call_cost, freed_cost])
    late = np.zeros(len(issued_cost) + len(handed.cost), dtype=np.int64)
    step = np.concatenate([messages.step, calls.step, buffers.step, late])
    kind = np.repeat([TRANSFER, CALL, FREED], [len(transfer_cost), len(calls.step), len(freed_cost)])
    host, lane = np.full(len(kind), -1), np.zeros(len(kind), dtype=np.int64)
    moved, edges = slice(len(transfer_cost)), handed.edges(edges)
    host[moved] = hosts(machine, list(table.costs), transfer_cost, messages.source)
    lane[moved] = np.where(host[moved] >= 0, messages.lane, 0)
    return Operations(
        repeats=1,
        kind=kind,
        costs=list(table.costs),
        cost=cost[None],
        label=numbered(kind, step, cost, lane)[1],
        edges=edges,
        delay=np.broadcast_to(np.int64(0), len(edges.before)),
        **Incidence.of(machine.topology, routes)._asdict(),
        host=host,
        lane=lane,
        gpu_uses=_gpu_uses(machine, derived, list(table.costs), transfer_cost, call_cost, handed),
        contention=machine.contention,
    )


def _gpu_uses(
    machine: Machine,
    derived: MessageDependencies,
    costs: Sequence[Cost],
    transfer_cost: IntArray,
    call_cost: IntArray,
    handed: HandedOut,
) -> GpuUses:
    """The GPUs of messages with channels and of calls that take time; none if these never slow each other."""
    sent = np.flatnonzero(np.array([cost.channels > 0 for cost in costs])[transfer_cost])
    called = np.flatnonzero(np.array([cost.launch_s > 0 for cost in costs])[call_cost])
    if not (machine.contention.slows and len(sent) and len(called)):
        return GpuUses.none()
    messages = derived.messages
    begun = np.flatnonzero(np.array([cost.launch_s > 0 for cost in costs])[handed.cost])
    ranks = np.concatenate([derived.calls.rank[called], handed.rank[begun]])
    return GpuUses(
        np.concatenate([sent, sent, derived.first_call + called, handed.first + begun]),
        np.concatenate([messages.source[sent], messages.destination[sent], ranks]),
        np.repeat([SENDS, RECEIVES, COMPUTES], [len(sent), len(sent), len(ranks)]),
    )


def _issues(
    schedule: Schedule, machine: Machine, derived: MessageDependencies, table: CostTable
) -> tuple[IntArray, Edges]:
    """What waits for hosts: an operation that takes until then for each time at which one has issued something.

    Returns their costs, and the edges of the schedule and of hosts.
    """
    issued = issue_times(schedule, derived, machine.host)
    if issued is None:
        return np.zeros(0, dtype=np.int64), derived.edges
    costs = [table.number(Cost(float(time_s), 0.0, 0.0, None, "")) for time_s in issued.times_s]
    first = derived.first_buffer + len(derived.buffers.step)
    waits = Edges.of(first + issued.number, np.arange(len(issued.number)), ARRIVED, HOST)
    return np.array(costs), Edges.joined([derived.edges, waits])


def _transfer_costs(messages: Messages, table: CostTable) -> tuple[IntArray, IntArray]:
    """The cost of each message, and its route as an int array (messages, constraints) padded with -1."""
    n = table.topology.world_size
    pairs, pair = np.unique(messages.source * n + messages.destination, return_inverse=True)
    constraints, latencies_s = table.topology.routes(pairs // n, pairs % n)
    kinds = table.messages.kinds(messages.step, messages.source, messages.destination, messages.bytes)
    return table.of_pairs(*kinds, latencies_s[pair]), constraints[pair]


def is_ring_schedule(schedule: Schedule) -> bool:
    """Whether the steps are `RingSteps` with block sizes that depend on the ring and chunk only."""
    steps = schedule.steps
    if not isinstance(steps, RingSteps) or not len(steps) or schedule.blocks.pools or schedule.task is not None:
        return False
    if len(schedule.block_bytes) != steps.rings.size * steps.chunks:
        return False
    sizes = schedule.block_bytes.reshape(schedule.world_size, -1)
    return bool((sizes == sizes[0]).all())


def hops_of(schedule: Schedule) -> tuple[IntArray, IntArray]:
    """The source and the destination of each hop of the rings of a schedule."""
    assert isinstance(schedule.steps, RingSteps)
    rings = schedule.steps.rings
    return rings.ravel(), np.roll(rings, -1, axis=1).ravel()


def ring_operations(schedule: Schedule, machine: Machine) -> Operations:
    """The operations of a schedule for which `is_ring_schedule` holds: one per hop, and one repeat per step.

    A hop connects a position of a ring to the next one. At each step it forwards the block that the previous hop
    delivered `lag` steps earlier (`RingSteps`, of copies or of sums), after its own block of the previous step has
    left. Its route is the same at every step. Its messages are that of step 0, then those of steps 1 to `lag`
    repeatedly. Each ring is a lane and each hop brings one block, so all messages are of one block
    (`tasp_lab.schedule.messages`).
    """
    steps, topology = schedule.steps, machine.topology
    assert isinstance(steps, RingSteps)
    rings, lag = steps.rings, steps.lag
    source, destination = hops_of(schedule)
    constraints, latencies_s = topology.routes(source, destination)
    table = CostTable(topology, LibraryMessages(schedule, machine.comm_library))
    size_bytes = [schedule.block_bytes[steps[step].block] for step in range(min(lag + 1, len(steps)))]
    kinds = [table.messages.kinds(index, source, destination, size) for index, size in enumerate(size_bytes)]
    cost = np.stack([table.of_pairs(*step_kinds, latencies_s) for step_kinds in kinds])
    costs = list(table.costs)
    hop = np.arange(rings.size)
    before = np.roll(hop.reshape(rings.shape), 1, axis=1).ravel()
    host = hosts(machine, costs, cost, source)
    lane = hop // rings.shape[1] if (host >= 0).any() else np.zeros_like(hop)
    limits = [np.inf if cost.max_bytes_per_s is None else cost.max_bytes_per_s for cost in costs]
    passes = Incidence.of(topology, constraints).that_can_saturate(np.array(limits)[cost].max(axis=0))
    return Operations(
        repeats=len(steps),
        kind=np.full(rings.size, TRANSFER),
        costs=costs,
        cost=cost,
        label=numbered(lane, *cost)[1],
        edges=Edges.joined([Edges.of(hop, hop, SENT, LANE), Edges.of(before, hop, ARRIVED, BLOCK)]),
        delay=np.repeat([1, lag], rings.size),
        **passes._asdict(),
        host=host,
        lane=lane,
    )
