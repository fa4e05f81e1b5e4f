"""The operations of any schedule: one for every transfer, kernel call and buffer, with its dependencies.

The dependencies are those of `sim.event.dependencies`, computed with sorted tables instead of objects. A *part* is an
arrival of a block at a rank, or the contribution of a call to a gradient there. Without buffers a block is available
once all its parts of earlier steps are. With b buffers its parts are those of the most recent of the b - 1 previous
steps that has any; otherwise it is resident. A buffer holds the parts of one step at a rank. The next step that fills
the same buffer waits until all its parts have arrived and all transfers and calls that use them have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.array.operations import (
    ARRIVED,
    BLOCK,
    BUFFER,
    CALL,
    FREED,
    LANE,
    SENT,
    TRANSFER,
    Cost,
    CostTable,
    Edges,
    Incidence,
    Operations,
    hosts,
)
from sim.messages import Messages
from sim.unique_rows import numbered
from tasp_lab.arrays import IntArray
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.workload.attention_task import AttentionTask
from tasp_lab.workload.kernel_calls import Call


class Transfers(NamedTuple):
    """All transfers in the order of steps, int arrays (transfers,)."""

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray
    step: IntArray
    cost: IntArray


class Calls(NamedTuple):
    """All kernel calls in the order of steps; `reads` and `adds` are pairs of call and block, int arrays (2, pairs)."""

    calls: list[Call]
    rank: IntArray
    step: IntArray
    reads: IntArray
    adds: IntArray


class Uses(NamedTuple):
    """Operations that deliver or use a block at a rank at a step. Int arrays of equal length."""

    operation: IntArray
    rank: IntArray
    block: IntArray
    step: IntArray


def step_operations(schedule: Schedule, machine: Machine) -> Operations:
    """The operations of a schedule, as one repeat: transfers, then calls, then buffers."""
    table = CostTable(machine.topology, Messages(schedule, machine.comm_library))
    steps = list(schedule.steps)
    transfers, routes = _transfers(steps, table)
    calls = _calls(steps, schedule.task)
    rate = machine.rate_of(schedule.task)
    call_cost = [
        table.number(Cost(float(rate.time_s(schedule.call_flops(call))), 0.0, 0.0, None, "")) for call in calls.calls
    ]
    edges, buffers = _edges(schedule, transfers, calls)
    counts = [len(transfers.source), len(calls.calls), len(buffers)]
    cost = np.concatenate([transfers.cost, _ints(call_cost), np.full(len(buffers), _zero_cost(table))])
    step = np.concatenate([transfers.step, calls.step, buffers])
    kind = np.repeat([TRANSFER, CALL, FREED], counts)
    host, lane = np.full(len(kind), -1), np.zeros(len(kind), dtype=np.int64)
    host[: counts[0]] = hosts(machine, list(table.costs), transfers.cost, transfers.source)
    lane[: counts[0]] = np.where(host[: counts[0]] >= 0, transfers.lane, 0)
    return Operations(
        repeats=1,
        kind=kind,
        costs=list(table.costs),
        cost=cost[None],
        label=numbered(kind, step, cost, lane)[1],
        edges=edges,
        **Incidence.of(machine.topology, routes)._asdict(),
        host=host,
        lane=lane,
    )


def _zero_cost(table: CostTable) -> int:
    """The number of a cost of zero time."""
    return table.number(Cost(0.0, 0.0, 0.0, None, ""))


def _ints(values: list[int] | list[tuple[int, int]]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _transfers(steps: Sequence[Step], table: CostTable) -> tuple[Transfers, IntArray]:
    """All transfers, and their routes as an int array (transfers, constraints) padded with -1."""
    sources = np.concatenate([_ints([]), *(step.source for step in steps)])
    destinations = np.concatenate([_ints([]), *(step.destination for step in steps)])
    n = table.topology.world_size
    pairs, pair = np.unique(sources * n + destinations, return_inverse=True)
    constraints, latencies_s = table.topology.routes(pairs // n, pairs % n)
    ends = np.cumsum([len(step) for step in steps]).tolist()
    costs = [
        table.of_pairs(*table.messages.kinds(index, step), latencies_s[pair[end - len(step) : end]])
        for index, (step, end) in enumerate(zip(steps, ends, strict=True))
        if len(step)
    ]
    lanes = np.concatenate([_ints([]), *(step.lane for step in steps)])
    blocks = np.concatenate([_ints([]), *(step.block for step in steps)])
    index = np.repeat(np.arange(len(steps)), [len(step) for step in steps])
    found = Transfers(sources, destinations, lanes, blocks, index, np.concatenate([_ints([]), *costs]))
    return found, constraints[pair]


def _calls(steps: Sequence[Step], task: AttentionTask | None) -> Calls:
    """All kernel calls."""
    found = [(index, call) for index, step in enumerate(steps) for call in step.calls]
    reads: list[tuple[int, int]] = []
    adds: list[tuple[int, int]] = []
    for number, (_, call) in enumerate(found):
        assert task is not None, "a schedule with calls has a task"
        reads += ((number, block) for block in task.sides(call)[0].tolist())
        adds += ((number, block) for block in task.gradients_away(call))
    return Calls(
        [call for _, call in found],
        _ints([call.rank for _, call in found]),
        _ints([step for step, _ in found]),
        _ints(reads).reshape(-1, 2).T,
        _ints(adds).reshape(-1, 2).T,
    )


def _edges(schedule: Schedule, transfers: Transfers, calls: Calls) -> tuple[Edges, IntArray]:
    """All edges, and the step of each buffer; buffers are numbered after transfers and calls."""
    count = len(transfers.source)
    operations = np.arange(count)
    call_of_read, call_of_add = calls.reads[0], calls.adds[0]
    lanes = _sequential(operations, transfers.source * schedule.lanes + transfers.lane)
    in_order = _sequential(count + np.arange(len(calls.rank)), calls.rank)
    parts = Uses(
        np.concatenate([operations, count + call_of_add]),
        np.concatenate([transfers.destination, calls.rank[call_of_add]]),
        np.concatenate([transfers.block, calls.adds[1]]),
        np.concatenate([transfers.step, calls.step[call_of_add]]),
    )
    readers = Uses(
        np.concatenate([operations, count + call_of_read]),
        np.concatenate([transfers.source, calls.rank[call_of_read]]),
        np.concatenate([transfers.block, calls.reads[1]]),
        np.concatenate([transfers.step, calls.step[call_of_read]]),
    )
    arrivals, buffer_step = _arrivals(schedule, parts, readers)
    buffers, freed = _buffers(schedule, parts, readers, buffer_step, count + len(calls.rank))
    return Edges.joined([lanes, in_order, arrivals, *buffers]), freed


def _sequential(operations: IntArray, lane: IntArray) -> Edges:
    """Each operation waits until the previous one on its lane has been sent."""
    order = np.argsort(lane, kind="stable")
    follows = np.flatnonzero(np.diff(lane[order]) == 0)
    return Edges.of(operations[order[follows]], operations[order[follows + 1]], SENT, LANE)


def _arrivals(schedule: Schedule, parts: Uses, readers: Uses) -> tuple[Edges, IntArray]:
    """Edges from parts to the readers of their blocks, and the step that delivered each block; -1: resident."""
    blocks, steps = len(schedule.block_bytes), len(schedule.steps) + 1
    keys = (parts.rank * blocks + parts.block) * steps + parts.step
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    start = (readers.rank * blocks + readers.block) * steps
    end = np.searchsorted(keys, start + readers.step)
    earliest = start if schedule.buffers is None else start + np.maximum(readers.step - schedule.buffers + 1, 0)
    last = np.append(keys, -1)[end - 1]
    delivered = (end > 0) & (last >= earliest)
    first = np.searchsorted(keys, start if schedule.buffers is None else last)
    reader, position = _ranges(np.where(delivered, first, end), end)
    edges = Edges.of(parts.operation[order[position]], readers.operation[reader], ARRIVED, BLOCK)
    return edges, np.where(delivered, last - start, -1)


def _ranges(first: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """The concatenated ranges from each `first` to its `end`: for each position its range, and the position."""
    sizes = end - first
    which = np.repeat(np.arange(len(first)), sizes)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes - first, sizes)


def _buffers(
    schedule: Schedule, parts: Uses, readers: Uses, buffer_step: IntArray, first_buffer: int
) -> tuple[list[Edges], IntArray]:
    """The edges to and from buffers, and the step of each buffer; buffers are numbered from `first_buffer` on."""
    if schedule.buffers is None:
        return [], _ints([])
    n, b, steps = schedule.world_size, schedule.buffers, len(schedule.steps)

    def key(rank: IntArray, step: IntArray) -> IntArray:
        """Sorts the uses of each buffer of a rank by step."""
        return (rank * b + step % b) * steps + step

    keys = np.unique(key(parts.rank, parts.step))
    filling = np.searchsorted(keys, key(parts.rank, parts.step))
    taken = filling - 1
    takes = (filling > 0) & (keys[taken] // steps == keys[filling] // steps)
    away = np.flatnonzero(buffer_step >= 0)
    reading = np.searchsorted(keys, key(readers.rank[away], buffer_step[away]))
    rows = [
        Edges.of(parts.operation, first_buffer + filling, ARRIVED, BUFFER),
        Edges.of(readers.operation[away], first_buffer + reading, SENT, BUFFER),
        Edges.of(first_buffer + taken[takes], parts.operation[takes], ARRIVED, BUFFER),
    ]
    assert n > keys.max(initial=0) // (b * steps), "ranks are in range"
    return [Edges(*np.unique(np.stack(each), axis=1)) for each in rows], keys % steps
