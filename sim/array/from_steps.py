"""The operations of any schedule with their costs; what waits for what is derived from the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.array.call_costs import call_costs
from sim.array.handed_out import HandedOut
from sim.array.operations import (
    CALL,
    COMPUTES,
    FREED,
    RECEIVES,
    SENDS,
    TRANSFER,
    Cost,
    CostTable,
    Edges,
    GpuUses,
    Incidence,
    Operations,
    hosts,
)
from sim.host import issue_times
from sim.messages import LibraryMessages
from tasp_lab.core.arrays import IntArray, numbered
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.dependencies import ARRIVED, HOST
from tasp_lab.schedule.messages import MessageDependencies, Messages
from tasp_lab.schedule.schedule import Schedule


def step_operations(schedule: Schedule, machine: Machine, derived: MessageDependencies) -> Operations:
    """The operations of a schedule, as one repeat: messages, calls, buffers, hosts, then calls until handed out."""
    table = CostTable(machine.topology, LibraryMessages(schedule, machine.comm_library))
    messages = derived.messages
    transfer_cost, routes = _transfer_costs(messages, table)
    calls, buffers = derived.calls, derived.buffers
    call_cost = call_costs(machine, machine.compute.time_s, calls, np.arange(len(calls.step)), table)
    free = table.number(Cost(0.0, 0.0, 0.0, None, ""))
    issued_cost, issued = _issues(schedule, machine, derived, table)
    first = derived.first_buffer + len(buffers.step) + len(issued_cost)
    handed = HandedOut.of(machine, derived, first, table)
    freed_cost = np.concatenate([np.full(len(buffers.step), free), issued_cost, handed.cost])
    cost = np.concatenate([transfer_cost, call_cost, freed_cost])
    late = np.zeros(len(issued_cost) + len(handed.cost), dtype=np.int64)
    step = np.concatenate([messages.step, calls.step, buffers.step, late])
    kind = np.repeat([TRANSFER, CALL, FREED], [len(transfer_cost), len(calls.step), len(freed_cost)])
    host, lane = np.full(len(kind), -1), np.zeros(len(kind), dtype=np.int64)
    moved = slice(len(transfer_cost))
    host[moved] = hosts(machine, list(table.costs), transfer_cost, messages.source)
    lane[moved] = np.where(host[moved] >= 0, messages.lane, 0)
    return Operations(
        repeats=1,
        kind=kind,
        costs=list(table.costs),
        cost=cost[None],
        label=numbered(kind, step, cost, lane)[1],
        edges=handed.edges(Edges.joined([_at_once(derived), issued])),
        **Incidence.of(machine.topology, routes)._asdict(),
        host=host,
        lane=lane,
        gpu_uses=_gpu_uses(machine, derived, list(table.costs), transfer_cost, call_cost, handed),
        contention=machine.contention,
    )


def _at_once(derived: MessageDependencies) -> Edges:
    """The edges of a schedule, in one repeat."""
    return Edges(*derived.edges, np.zeros(len(derived.edges.before), dtype=np.int64))


def _gpu_uses(
    machine: Machine,
    derived: MessageDependencies,
    costs: Sequence[Cost],
    transfer_cost: IntArray,
    call_cost: IntArray,
    handed: HandedOut,
) -> GpuUses:
    """The GPUs of messages with channels and of calls that take time; none if these never slow each other."""
    sent = np.flatnonzero(np.array([each.channels > 0 for each in costs])[transfer_cost])
    called = np.flatnonzero(np.array([each.launch_s > 0 for each in costs])[call_cost])
    if not (machine.contention.slows and len(sent) and len(called)):
        return GpuUses.none()
    messages = derived.messages
    begun = np.flatnonzero(np.array([each.launch_s > 0 for each in costs])[handed.cost])
    ranks = np.concatenate([derived.calls.rank[called], handed.rank[begun]])
    return GpuUses(
        np.concatenate([sent, sent, derived.first_call + called, handed.first + begun]),
        np.concatenate([messages.source[sent], messages.destination[sent], ranks]),
        np.repeat([SENDS, RECEIVES, COMPUTES], [len(sent), len(sent), len(ranks)]),
    )


def _issues(
    schedule: Schedule, machine: Machine, derived: MessageDependencies, table: CostTable
) -> tuple[IntArray, Edges]:
    """What waits for hosts: an operation that takes until then for each time at which one has issued something."""
    nothing = np.zeros(0, dtype=np.int64)
    found = issue_times(schedule, derived, machine.runtime)
    if found is None:
        return nothing, Edges.of(nothing, nothing, ARRIVED, HOST)
    costs = [table.number(Cost(float(each), 0.0, 0.0, None, "")) for each in found.times_s]
    first = derived.first_buffer + len(derived.buffers.step)
    after = np.arange(len(found.number))
    return np.array(costs), Edges.of(first + found.number, after, ARRIVED, HOST)


def _transfer_costs(messages: Messages, table: CostTable) -> tuple[IntArray, IntArray]:
    """The cost of each message, and its route as an int array (messages, constraints) padded with -1."""
    n = table.topology.world_size
    pairs, pair = np.unique(messages.source * n + messages.destination, return_inverse=True)
    constraints, latencies_s = table.topology.routes(pairs // n, pairs % n)
    costs = [np.zeros(0, dtype=np.int64)]
    costs += [
        table.of_pairs(kinds, number, latencies_s[pair[own]]) for own, kinds, number in table.messages.by_step(messages)
    ]
    return np.concatenate(costs), constraints[pair]
