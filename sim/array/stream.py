"""The time of a layer, step by step, in memory for a few steps: for schedules whose messages share no bandwidth.

    time_s = stream_time_s(schedule, machine)       # None if it does not apply

The event loop needs all operations of a schedule and all edges between them: tens of gigabytes for a thousand ranks. In
most layers on switched networks each message has the rate of its narrowest link from its first to its last byte, so its
times follow from those of what it waits for. Only the ends of kernel calls, which messages slow, depend on what else
happens at that time. So calls end in the order of time, and whatever waits for them gets its times at once.

1. `find_messages` joins the transfers of a step, as `tasp_lab.schedule.messages` does for all steps. It looks one step
   ahead: what lies beside what in a buffer depends on where it goes next.
2. `issue` tracks the messages and calls of a step and what they wait for, as `tasp_lab.schedule.dependencies` says.
3. `run_calls` ends calls up to the step from which on no message is tracked yet.

**Why this is exact.** The call that ends first among those that run, beside the messages that are known, does end then:
a message that is not known yet waits for a call that ends later, so it starts later. Messages of steps that are not
tracked yet could start earlier. Whether one does is checked when it is tracked: it must not be launched before the last
call that has ended at either of its ranks. And no two messages share bandwidth, since for each link, port and NIC the
greatest rates of all lanes that ever pass it do not exceed its capacity (`_Rates`). Where one of the two fails, or a
schedule has what this module does not derive (more than one pool, sums that are read where they stay, copies that are
read later than one step after they came, hosts that issue, ...), the time is None and the event loop is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sim.array.event_loop import STAGES
from sim.array.operations import Cost, CostTable
from sim.array.stream_loop import (
    DONE,
    FULL,
    OPEN,
    Issued,
    Moved,
    Shape,
    Used,
    Window,
    find_messages,
    issue,
    run_calls,
)
from sim.messages import LibraryMessages
from tasp_lab.core.arrays import FloatArray, Int32Array, IntArray, Table, numbered
from tasp_lab.core.compiled import call, table
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.buffer_layout import outside, resident_offsets, wide_at_home
from tasp_lab.schedule.dependencies import CallTable, Transfers, keep_shapes, operations_of
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import KernelShape

_STEPS_KEPT = 6
"""How many steps of operations a window has room for at first; it grows fourfold where ranks are further apart."""

_LEAST_ROWS = 2**18
"""Windows of less memory are not worth starting again for."""

_MAX_GROWTH = 3
_LAST = 2**31 - 1


def stream_time_s(
    schedule: Schedule, machine: Machine, progress: ShareCallback = no_share, *, fast: bool = True
) -> float | None:
    """When the last message or call ends, in seconds; None if the schedule and the machine are not of this kind.

    `fast`: as machine code, else as Python, see `tasp_lab.core.compiled`.
    """
    if not _is_simple(schedule, machine):
        return None
    per_step = schedule.transfers // max(len(schedule.steps), 1) + 2 * schedule.world_size
    least = max(_STEPS_KEPT * per_step, _LEAST_ROWS if fast else 1)
    for growth in range(_MAX_GROWTH):
        try:
            rows = 1 << (least * 4**growth - 1).bit_length()
            return _Stream(schedule, machine, rows, fast).time_s(progress)
        except _FullError:
            continue
        except _NotSimpleError:
            return None
    return None


class _FullError(Exception):
    """A table was too small."""


class _NotSimpleError(Exception):
    """The schedule is not of the kind that this module simulates."""


def _is_simple(schedule: Schedule, machine: Machine) -> bool:
    """Whether nothing at the first look forbids it."""
    runtime, task = machine.runtime, schedule.task
    return (
        task is not None
        and len(schedule.blocks.pools) == 1
        and schedule.initial_part is None
        and runtime.is_instant
        and runtime.overlaps
        and runtime.batches == "step"
        and not runtime.waits_for_sends
        and task.passing not in runtime.separate
    )


@dataclass(eq=False)
class _Rates:
    """The routes of messages, their rates, and whether any link, port or NIC could be full.

    `number` is an int array (ranks**2,), the number of the route of a pair of ranks, or -1; `constraints`,
    `latency_s` and `narrowest_bytes_per_s` are by this number. A lane carries one message at a time, so `load`, the sum
    of the greatest rates of all lanes over each constraint, is never exceeded.
    """

    topology: Topology
    lanes: int
    number: Int32Array = field(init=False)
    constraints: list[IntArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        topology, ranks = self.topology, self.topology.world_size
        self.number = np.full(ranks * ranks, -1, dtype=np.int32)
        shared = [float(each.bandwidth_bytes_per_s) for each in topology.shared]
        self._capacity = np.concatenate([topology.link_bandwidths_bytes_per_s, shared])
        self._routes = np.zeros((0, 1), dtype=np.int64)
        self._latency_s = self._narrowest = np.zeros(0)
        self._load = np.zeros(len(self._capacity) + 1)
        self._lane_route = np.full(ranks * self.lanes, -1, dtype=np.int32)
        self._lane_rate = np.zeros(ranks * self.lanes)

    def of(self, source: IntArray, destination: IntArray) -> tuple[IntArray, FloatArray, FloatArray]:
        """The number of each route, its latency in seconds, and its narrowest capacity in bytes/s."""
        pair = source * self.topology.world_size + destination
        if (self.number[pair] < 0).any():
            new = np.unique(pair[self.number[pair] < 0])
            self.number[new] = len(self._routes) + np.arange(len(new))
            routes, latency_s = self.topology.routes(*np.divmod(new, self.topology.world_size))
            width = max(routes.shape[1], self._routes.shape[1])
            widened = (np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1)
                       for each in (self._routes, routes))  # fmt: skip
            self._routes = np.concatenate(list(widened))
            self._latency_s = np.concatenate([self._latency_s, latency_s])
            capacity = np.where(routes >= 0, self._capacity[routes], np.inf).min(axis=1)
            self._narrowest = np.concatenate([self._narrowest, capacity])
        number = self.number[pair].astype(np.int64)
        return number, self._latency_s[number], self._narrowest[number]

    def add(self, lane: IntArray, route: IntArray, rate: FloatArray) -> None:
        """Account for messages on lanes of ranks. Raises `_NotSimpleError` if they could fill a constraint."""
        moves = self._lane_route[lane] != route
        changed = np.flatnonzero(moves | (rate > self._lane_rate[lane]))
        if not len(changed):
            return
        # Of several messages on one lane the fastest counts, and other routes of a lane as if they were other lanes.
        order = changed[np.lexsort([-rate[changed], route[changed], lane[changed]])]
        ends = lane[order], route[order]
        first = np.concatenate([[True], (np.diff(ends[0]) != 0) | (np.diff(ends[1]) != 0)])
        chosen = order[first]
        more = rate[chosen] - np.where(moves[chosen], 0.0, self._lane_rate[lane[chosen]])
        routes = self._routes[route[chosen]]
        np.add.at(self._load, routes, more[:, None])
        self._lane_route[lane[chosen]], self._lane_rate[lane[chosen]] = route[chosen], rate[chosen]
        if (self._load[:-1] > self._capacity * (1 + 1e-12)).any():
            raise _NotSimpleError


class _StepTables(NamedTuple):
    """The transfers and calls of a step as `find_messages` takes them."""

    moved: Moved
    reads: Used
    adds: Used
    calls: CallTable


class _Stream:
    """One simulation with a window of so many operations."""

    def __init__(self, schedule: Schedule, machine: Machine, rows: int, fast: bool) -> None:
        self._schedule, self._machine, self._blocks, self._fast = schedule, machine, schedule.blocks, fast
        ranks, blocks, steps = schedule.world_size, schedule.blocks, len(schedule.steps)
        buffers = blocks.pools[0].buffers
        contention = machine.contention
        share = float(contention.share(1, 1)) if contention.slows else 0.0
        room = max(64, rows // ranks)
        self._shape = Shape(len(blocks), schedule.lanes, buffers, room)
        self._window = Window.of(
            ranks, schedule.lanes, len(blocks), buffers, ranks * steps + 1, rows, room,
            np.array([share, float(contention.max_channels)]),
        )  # fmt: skip
        self._is_sum = np.array([bool(kind.join) for kind in blocks.kinds], dtype=bool)[blocks.kind]
        self._size = np.asarray(blocks.bytes, dtype=np.int64)
        self._wide = wide_at_home(blocks)
        self._table = CostTable(machine.topology, LibraryMessages(schedule, machine.comm_library))
        self._rates = _Rates(machine.topology, schedule.lanes)
        self._costs: dict[tuple[float, ...], int] = {}
        self._call_costs: dict[tuple[KernelShape, int], int] = {}
        self._shapes: dict[KernelShape, int] = {}
        self._counted: list[tuple[IntArray, IntArray]] = []
        self._offsets: dict[int, int] | None = None

    def time_s(self, progress: ShareCallback) -> float:
        """The end of the last operation. Raises `_FullError` and `_NotSimpleError`."""
        steps = len(self._schedule.steps)
        tables = self._tables()
        following = next(tables)
        for step in range(steps):
            this, following = following, next(tables)
            self._step(step, this, following)
            # A buffer that comes free at a step lets messages begin as many steps later as there are buffers.
            last = step == steps - 1
            self._check(
                call(
                    run_calls, _LAST if last else step - self._shape.buffers, self._window, self._shape, fast=self._fast
                )
            )
            if not last and (step + 1) * STAGES // steps > step * STAGES // steps:
                progress((step + 1) / steps)
        if self._window.sizes[OPEN]:
            raise _NotSimpleError
        keep_shapes(self._schedule, self._counted, tuple(self._shapes))
        return float(self._window.end_s[0])

    def _check(self, status: int) -> None:
        if status == FULL:
            raise _FullError
        if status != DONE:
            raise _NotSimpleError

    def _tables(self) -> Iterator[_StepTables]:
        """The tables of each step, and of an empty one after the last."""
        for number in range(len(self._schedule.steps)):
            yield self._tables_of(number, *operations_of(self._schedule, [self._schedule.steps[number]]))
        yield self._tables_of(len(self._schedule.steps), *operations_of(self._schedule, []))

    def _tables_of(self, number: int, transfers: Transfers, calls: CallTable) -> _StepTables:
        schedule, blocks = self._schedule, self._blocks
        if calls.lane.any():
            raise _NotSimpleError
        stays = schedule.is_resident(transfers.destination, transfers.block)
        leaves = schedule.is_resident(transfers.source, transfers.block)
        added = np.flatnonzero(blocks.pool[calls.adds.block] >= 0)
        add_call, add_block = calls.adds.owner[added], calls.adds.block[added]
        read_call, read_block = calls.reads.owner, calls.reads.block
        if (stays & ~self._is_sum[transfers.block]).any() or (blocks.pool[transfers.block] < 0).any():
            raise _NotSimpleError  # something is received into its place
        if (leaves & self._is_sum[transfers.block]).any() or self._is_sum[read_block].any():
            raise _NotSimpleError  # a sum is read where it stays, or by calls
        lies = np.full(len(stays), -1)
        if leaves.any():
            at = np.flatnonzero(leaves)
            lies[at] = self._places(number, transfers.source[at], transfers.block[at])
        elif self._offsets is not None:
            self._check_reads(number, calls)
        empty = (np.full(count, -1) for count in (len(stays), len(stays), len(stays)))
        columns = (transfers.source, transfers.destination, transfers.lane, transfers.block)
        moved = Moved(*columns, stays, lies, *empty)
        reads = Used(read_call, calls.rank[read_call], read_block, np.zeros(0, dtype=bool), np.full(len(read_call), -1))
        add_rank = calls.rank[add_call]
        adds = Used(
            add_call, add_rank, add_block, schedule.is_resident(add_rank, add_block), np.full(len(add_call), -1)
        )
        return _StepTables(moved, reads, adds, calls)

    def _places(self, step: int, rank: IntArray, block: IntArray) -> IntArray:
        """Where resident copies lie as they are sent, in bytes; -1 for those of the caller, which are gathered."""
        schedule, steps = self._schedule, self._schedule.steps
        if self._offsets is None:
            ends = sorted({0, len(steps) - 1})
            calls = operations_of(schedule, [steps[number] for number in ends])[1]
            self._offsets = resident_offsets(schedule, calls.rank[calls.reads.owner], calls.reads.block)
        keys = (rank * len(schedule.blocks) + block).tolist()
        gathered = outside(schedule, rank, block) | self._wide[block]
        return np.where(gathered, -1, [self._offsets.get(key, -1) for key in keys])

    def _check_reads(self, step: int, calls: CallTable) -> None:
        """Resident copies in the memory of a rank lie in the order in which calls read them, at either end."""
        rank, block = calls.rank[calls.reads.owner], calls.reads.block
        if 0 < step < len(self._schedule.steps) - 1:
            stay = np.flatnonzero(self._schedule.is_resident(rank, block))
            if (~outside(self._schedule, rank[stay], block[stay])).any():
                raise _NotSimpleError

    def _step(self, step: int, this: _StepTables, following: _StepTables) -> None:
        moved, reads, adds, calls = this
        order = np.zeros(len(moved.block) + len(adds.block), dtype=np.int64)
        starts = np.zeros(self._schedule.world_size + 2, dtype=np.int64)
        status = call(
            find_messages, step, moved, reads, adds, following.moved, following.reads, self._size, order, starts,
            self._window, self._shape, fast=self._fast,
        )  # fmt: skip
        self._check(status)
        is_first = moved.message == np.arange(len(moved.message))
        message = (np.cumsum(is_first) - 1)[moved.message]
        firsts = np.flatnonzero(is_first)
        size_bytes = np.bincount(message, self._size[moved.block], len(firsts)).astype(np.int64)
        source, destination, lane = (column[firsts] for column in moved[:3])
        cost = self._message_costs(step, source, destination, lane, size_bytes)
        issued = Issued(message, source, destination, lane, cost, calls.rank, self._costs_of_calls(calls))
        window = self._window._replace(costs=self._cost_table())
        self._check(call(issue, step, moved, reads, adds, issued, window, self._shape, fast=self._fast))
        self._window = window

    def _cost_table(self) -> Table:
        """The costs so far."""
        if len(self._window.costs) == len(self._costs):
            return self._window.costs
        rows: Table = table(len(self._costs), launch_s="f8", flow_s="f8", latency_s="f8", channels="f8")
        rows[:] = list(self._costs)
        return rows

    def _message_costs(
        self, step: int, source: IntArray, destination: IntArray, lane: IntArray, size_bytes: IntArray
    ) -> IntArray:
        """The number of the cost of each message, whose lanes are accounted for."""
        if not len(source):
            return np.zeros(0, dtype=np.int64)
        route, latency_s, narrowest = self._rates.of(source, destination)
        kinds, kind = self._table.messages.kinds(step, source, destination, size_bytes)
        firsts, number = numbered(kind, latency_s, narrowest)
        costs, rates = [], []
        for at in firsts.tolist():
            cost = Cost.of(kinds[kind[at]], float(latency_s[at]))
            if cost.launch_s and self._machine.comm_library.serial_launch:
                raise _NotSimpleError  # hosts launch one after another
            limit = np.inf if cost.max_bytes_per_s is None else cost.max_bytes_per_s
            rates.append(min(limit, float(narrowest[at])) if cost.wire_bytes else 0.0)
            flow_s = cost.wire_bytes / rates[-1] if cost.wire_bytes else 0.0
            key = (cost.launch_s, flow_s, cost.latency_s, cost.channels)
            costs.append(self._costs.setdefault(key, len(self._costs)))
        self._rates.add(source * self._schedule.lanes + lane, route, np.array(rates)[number])
        return np.array(costs, dtype=np.int64)[number]

    def _costs_of_calls(self, calls: CallTable) -> IntArray:
        """The number of the cost of each call."""
        machine, speeds = self._machine, bool(self._machine.rank_speeds)
        if not len(calls.rank):
            return np.zeros(0, dtype=np.int64)
        shapes = np.array([self._shapes.setdefault(shape, len(self._shapes)) for shape in calls.shapes])
        self._counted.append((calls.rank.astype(np.int32), shapes[calls.shape].astype(np.int32)))
        firsts, number = numbered(calls.shape, calls.rank) if speeds else numbered(calls.shape)
        costs = []
        for at in firsts.tolist():
            shape, rank = calls.shapes[calls.shape[at]], int(calls.rank[at]) if speeds else 0
            if (shape, rank) not in self._call_costs:
                key = (float(machine.call_s(machine.compute.time_s(shape), rank)), 0.0, 0.0, 0.0)
                self._call_costs[shape, rank] = self._costs.setdefault(key, len(self._costs))
            costs.append(self._call_costs[shape, rank])
        return np.array(costs, dtype=np.int64)[number]
