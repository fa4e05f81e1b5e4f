"""The time of a layer, a few steps at a time, in memory for some more.

    time_s = stream_time_s(schedule, machine)       # None if it does not apply

The event loop needs all operations of a schedule and all edges between them: tens of gigabytes for a thousand ranks. In
most layers on switched networks each message has the rate of its narrowest link from its first to its last byte, so its
times follow from those of what it waits for. Only the ends of kernel calls, which messages slow, and messages that may
share bandwidth depend on what else happens at that time. So these end in the order of time, and whatever waits for them
gets its times at once.

For each batch of steps

1. `find_messages` joins transfers, as `tasp_lab.schedule.messages` does for all steps. It looks one step ahead: what
   lies beside what in a buffer depends on where it goes next.
2. `issue` tracks the messages and calls and what they wait for, as `tasp_lab.schedule.dependencies` says.
3. `run_events` ends calls and shared messages up to the step from which on no message is tracked yet.

**Which messages share bandwidth.** A link, port or NIC that is at least as wide as the greatest rates of all lanes that
ever pass it is never full (`_Rates`). Messages that pass another one share it max-min fairly (`sim.array.flows`).

**Why this is exact.** What ends first among the calls that run and the messages that share, beside what is known, does
end then: what is not known yet waits for one of them, so it starts later. Messages of steps that are not tracked yet
could start earlier. Whether one does is checked when it is tracked: it must not be launched before the last call that
has ended at either of its ranks, nor, if it shares bandwidth, before the last time at which rates changed. Where this
fails, all begins again with more steps tracked ahead, in the end with all. Where a schedule has what this module
does not derive (pools with unequal numbers of buffers, sums that are read where they stay, copies that are read later
than one step after they came, hosts that issue, ...), the time is None and the event loop is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sim.array.event_loop import STAGES
from sim.array.flows import Flows
from sim.array.max_min import SAME, Sharing
from sim.array.operations import Cost, CostTable
from sim.array.stream_loop import (
    DONE,
    FULL,
    LANDINGS,
    LATE,
    NEXT,
    OPEN,
    STEP_LANDINGS,
    Batch,
    Issued,
    Landed,
    Moved,
    Used,
    Window,
    cost_table,
    find_messages,
    issue,
    landing_table,
    power_of_2,
    run_events,
)
from sim.messages import LibraryMessages
from tasp_lab.core.arrays import BoolArray, FloatArray, Int32Array, IntArray, Table, numbered
from tasp_lab.core.compiled import call, table
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.buffer_layout import outside, resident_offsets, wide_at_home
from tasp_lab.schedule.dependencies import CallTable, keep_shapes, operations_of
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import KernelShape

_STEPS_KEPT, _FEW_STEPS_KEPT = 32, 4
"""How many steps of operations there is room for at first, as machine code and as Python, which copies it for each
batch; ranks that are further apart take more."""

_BATCH, _SMALL_BATCH = 2**16, 2**6
"""Steps are taken together up to so many operations, as machine code and as Python: each call of NumPy costs as much
for a few as for thousands."""

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
    batch = max((_BATCH if fast else _SMALL_BATCH) // per_step, 1)
    # A buffer that comes free lets messages begin as many steps later as there are buffers.
    ahead = schedule.blocks.pools[0].buffers
    rates = _Rates(machine.topology, schedule.lanes)
    while ahead < 4 * len(schedule.steps) + 4:
        try:
            return _Stream(schedule, machine, rates, per_step, ahead, batch, fast).time_s(progress)
        except _SharedError:
            pass  # the rates now have what is shared
        except _LateError:
            ahead = max(4 * ahead, 1)
        except _NotSimpleError:
            return None
    return None


class _LateError(Exception):
    """More steps have to be tracked ahead."""


class _SharedError(Exception):
    """Messages share bandwidth where none were thought to."""


class _NotSimpleError(Exception):
    """The schedule is not of the kind that this module simulates."""


def _is_simple(schedule: Schedule, machine: Machine) -> bool:
    """Whether nothing at the first look forbids it."""
    host, task = machine.host, schedule.task
    operations = schedule.transfers + 2 * schedule.world_size * len(schedule.steps)
    return (
        task is not None
        and operations < _LAST  # their numbers have 32 bits
        # Blocks of two pools never lie side by side: one would be in the last buffer, the other one in the first, and
        # what arrives at a step is in buffers of equal numbers.
        and len({pool.buffers for pool in schedule.blocks.pools}) == 1
        and (len(schedule.blocks.pools) == 1 or schedule.blocks.pools[0].buffers > 1)
        and schedule.initial_part is None
        and host.is_instant
        and machine.overlaps
        and host.batches == "step"
        and not host.waits_for_sends
        and task.passing not in host.separate
    )


@dataclass(eq=False)
class _Rates:
    """The routes of messages, their rates, and which links, ports and NICs could be full.

    `number` is an int array (ranks**2,), the number of the route of a pair of ranks, or -1. A lane carries one message
    at a time, so the sum of the greatest rates of all lanes over a constraint is never exceeded: it `is_shared`, bool
    array (constraints,), if that sum exceeds its capacity. `is_counted`: the lanes of all steps are accounted for.
    """

    topology: Topology
    lanes: int
    number: Int32Array = field(init=False)
    is_shared: BoolArray = field(init=False)
    is_counted: bool = False

    def __post_init__(self) -> None:
        topology, ranks = self.topology, self.topology.world_size
        self.number = np.full(ranks * ranks, -1, dtype=np.int32)
        shared = [float(each.bandwidth_bytes_per_s) for each in topology.shared]
        self._capacity = np.concatenate([topology.link_bandwidths_bytes_per_s, shared])
        self._routes = np.zeros((0, 1), dtype=np.int64)
        self._latency_s = self._narrowest = np.zeros(0)
        self.is_shared = np.zeros(len(self._capacity), dtype=bool)
        self._users = np.zeros(len(self._capacity) + 1, dtype=np.int64)
        self.begin()

    def begin(self) -> None:
        """Forget the lanes that are accounted for."""
        ranks = self.topology.world_size
        self._load = np.zeros(len(self._capacity) + 1)
        self._lane_route = np.full(ranks * self.lanes, -1, dtype=np.int32)
        self._lane_rate = np.zeros(ranks * self.lanes)

    def flows(self) -> tuple[Flows, Table, IntArray]:
        """No flows yet, what each route passes that is shared, and where its passes begin, as `Window` has them."""
        place = np.cumsum(self.is_shared) - 1
        route, column = np.nonzero(np.append(self.is_shared, False)[self._routes])
        passes = table(len(route), constraint="i4", count="i4")
        passes["constraint"], passes["count"] = place[self._routes[route, column]], 1
        sizes = np.bincount(route, minlength=len(self._routes))
        slots = len(self._lane_rate) if len(route) else 0
        users = np.minimum(self._users[:-1][self.is_shared], slots)
        sharing = Sharing.of(slots, int(sizes.max(initial=1)), users, self._capacity[self.is_shared])
        return Flows.of(sharing, 0), passes, np.concatenate([[0], np.cumsum(sizes)])

    def shares(self, route: IntArray) -> BoolArray:
        """Which of these routes pass anything that is shared."""
        on_route: BoolArray = np.append(self.is_shared, False)[self._routes]
        return np.asarray(on_route.any(axis=1))[route]

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
        """Account for messages on lanes of ranks. Raises `_SharedError` if they could fill more than was thought."""
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
        if not self.is_counted:
            np.add.at(self._users, routes, moves[chosen, None])
        self._lane_route[lane[chosen]], self._lane_rate[lane[chosen]] = route[chosen], rate[chosen]
        is_over = self._load[:-1] > self._capacity * (1 + SAME)
        if (is_over & ~self.is_shared).any():
            was_known = self.is_counted or not self.is_shared.any()
            self.is_shared |= is_over
            if was_known:  # else all lanes are being counted
                raise _SharedError


class _Stream:
    """One simulation of a schedule with about so many operations `per_step`, `batch` steps at a time."""

    def __init__(
        self, schedule: Schedule, machine: Machine, rates: _Rates, per_step: int, ahead: int, batch: int, fast: bool
    ) -> None:
        self._schedule, self._machine, self._blocks, self._fast = schedule, machine, schedule.blocks, fast
        self._rates, self._per_step, self._ahead, self._batch, blocks = rates, per_step, ahead, batch, schedule.blocks
        self._is_sum = np.array([bool(kind.join) for kind in blocks.kinds], dtype=bool)[blocks.kind]
        self._size = np.asarray(blocks.bytes, dtype=np.int64)
        self._wide = wide_at_home(blocks)
        self._table = CostTable(machine.topology, LibraryMessages(schedule, machine.comm_library))
        self._costs: dict[tuple[float, ...], int] = {}
        self._call_costs: dict[tuple[KernelShape, int], int] = {}
        self._shapes: dict[KernelShape, int] = {}
        self._counted: list[tuple[IntArray, IntArray]] = []
        self._offsets: dict[int, int] | None = None
        self._ahead_step: Step | None = None

    def time_s(self, progress: ShareCallback) -> float:
        """The end of the last operation. Raises the errors of this module."""
        steps = len(self._schedule.steps)
        self._count_lanes()
        self._window = self._new_window()
        for first in range(0, steps, self._batch):
            self._take(*self._batch_from(first))
            end = min(first + self._batch, steps)
            until = _LAST if end == steps else end - 1 - self._ahead
            self._check(call(run_events, until, self._window, fast=self._fast))
            if end < steps and end * STAGES // steps > first * STAGES // steps:
                progress(end / steps)
        if self._window.sizes[OPEN]:
            raise _NotSimpleError
        keep_shapes(self._schedule, self._counted, tuple(self._shapes))
        return float(self._window.end_s[0])

    def _count_lanes(self) -> None:
        """Account for the lanes of the first and the last step, or of all if any messages share bandwidth."""
        rates, steps, ranks, lanes = self._rates, self._schedule.steps, self._schedule.world_size, self._schedule.lanes
        if not rates.is_counted:
            rates.begin()
            counts_all, last = bool(rates.is_shared.any()), len(steps) - 1
            for first in range(0, len(steps), self._batch) if counts_all else sorted({0, last}):
                some = steps[first : first + self._batch] if counts_all else [steps[first]]
                step = np.repeat(np.arange(len(some)), [len(each) for each in some])
                source, destination, lane, block = (
                    np.concatenate([getattr(each, column) for each in some])
                    for column in ("source", "destination", "lane", "block")
                )
                # As if all that a lane sends to a peer at a step were one message, which mostly it is.
                rows, message = numbered(((step * ranks + source) * lanes + lane) * ranks + destination)
                size_bytes = np.bincount(message, self._size[block], len(rows)).astype(np.int64)
                self._message_costs(first + step[rows], source[rows], destination[rows], lane[rows], size_bytes)
            rates.is_counted = counts_all
        rates.begin()

    def _new_window(self) -> Window:
        schedule, contention, pools = self._schedule, self._machine.contention, self._blocks.pools
        share = float(contention.share(1, 1)) if contention.slows else 0.0
        ranks, kept = schedule.world_size, _STEPS_KEPT if self._fast else _FEW_STEPS_KEPT
        return Window.of(
            ranks, schedule.lanes, self._blocks.pool, len(pools), pools[0].buffers, len(schedule.steps),
            int(kept * self._per_step) + 1, np.array([share, float(contention.max_channels)]), *self._rates.flows(),
        )  # fmt: skip

    def _check(self, status: int) -> None:
        if status == LATE:
            raise _LateError
        if status != DONE:
            raise _NotSimpleError

    def _batch_from(self, first: int) -> tuple[Batch, IntArray, CallTable]:
        """The steps from `first` on, the step of each transfer, counted from there, and the calls."""
        schedule, blocks, count = self._schedule, self._blocks, len(self._schedule.steps)
        end = min(first + self._batch, count)
        steps = [schedule.steps[first] if self._ahead_step is None else self._ahead_step]
        steps += schedule.steps[first + 1 : end]
        if any((blocks.pool[each.block] < 0).any() for each in steps):
            raise _NotSimpleError  # what comes into no buffer lies elsewhere; found before calls, which take longer
        self._ahead_step = ahead = schedule.steps[end] if end < count else Step.of([])
        transfers, calls = operations_of(schedule, steps)
        if calls.lane.any():
            raise _NotSimpleError
        stays = schedule.is_resident(transfers.destination, transfers.block)
        leaves = schedule.is_resident(transfers.source, transfers.block)
        added = np.flatnonzero(blocks.pool[calls.adds.block] >= 0)
        add_call, add_block = calls.adds.owner[added], calls.adds.block[added]
        read_call, read_block = calls.reads.owner, calls.reads.block
        if (stays & ~self._is_sum[transfers.block]).any():
            raise _NotSimpleError  # something is received into its place
        if (leaves & self._is_sum[transfers.block]).any() or self._is_sum[read_block].any():
            raise _NotSimpleError  # a sum is read where it stays, or by calls
        lies = np.full(len(stays), -1)
        if leaves.any():
            at = np.flatnonzero(leaves)
            lies[at] = self._places(transfers.source[at], transfers.block[at])
        if self._offsets is not None:
            sends_own = np.zeros(len(steps), dtype=bool)
            sends_own[transfers.step[leaves]] = True
            self._check_reads(first, ~sends_own[calls.step], calls)
        steps_and_next = np.arange(len(steps) + 1)

        def firsts(step: IntArray, count: int) -> IntArray:
            """Where each step begins, then the step ahead, then the end."""
            return np.append(np.searchsorted(step, steps_and_next), count)

        moved = Moved(
            firsts(transfers.step, len(stays) + len(ahead)),
            np.concatenate([transfers.source, ahead.source]),
            np.concatenate([transfers.destination, ahead.destination]),
            np.concatenate([transfers.lane, ahead.lane]),
            np.concatenate([transfers.block, ahead.block]),
            stays, lies, *(np.full(len(stays), -1) for _ in range(3)),
        )  # fmt: skip
        operands = [(group.rank[each.owner], each.block) for group in ahead.calls for each in group.operands]
        read_rank, block_ahead = map(np.concatenate, zip((calls.rank[read_call], read_block), *operands, strict=True))
        reads = Used(
            firsts(calls.step[read_call], len(read_rank)), read_call, read_rank, block_ahead,
            np.zeros(0, dtype=bool), np.full(len(read_call), -1),
        )  # fmt: skip
        add_rank = calls.rank[add_call]
        adds = Used(
            firsts(calls.step[add_call], len(add_rank)), add_call, add_rank, add_block,
            schedule.is_resident(add_rank, add_block), np.full(len(add_call), -1),
        )  # fmt: skip
        return Batch(first, len(steps), moved, reads, adds), transfers.step, calls

    def _places(self, rank: IntArray, block: IntArray) -> IntArray:
        """Where resident copies lie as they are sent, in bytes; -1 for those of the caller, which are gathered."""
        schedule, steps = self._schedule, self._schedule.steps
        if self._offsets is None:
            ends = sorted({0, len(steps) - 1})
            calls = operations_of(schedule, [steps[number] for number in ends])[1]
            self._offsets = resident_offsets(schedule, calls.rank[calls.reads.owner], calls.reads.block)
        keys = (rank * len(schedule.blocks) + block).tolist()
        gathered = outside(schedule, rank, block) | self._wide[block]
        return np.where(gathered, -1, [self._offsets.get(key, -1) for key in keys])

    def _check_reads(self, first: int, chosen: BoolArray, calls: CallTable) -> None:
        """Resident copies in the memory of a rank lie in the order in which chosen calls read them, at either end."""
        step = first + calls.step
        at = np.flatnonzero((chosen & (step > 0) & (step < len(self._schedule.steps) - 1))[calls.reads.owner])
        rank, block = calls.rank[calls.reads.owner[at]], calls.reads.block[at]
        stay = self._schedule.is_resident(rank, block)
        if (~outside(self._schedule, rank[stay], block[stay])).any():
            raise _NotSimpleError

    def _take(self, batch: Batch, step: IntArray, calls: CallTable) -> None:
        """Track the messages and calls of steps; `step` and `calls` as of `_batch_from`."""
        moved, reads = batch.moved, batch.reads
        room = self._room_for_landings(batch)
        self._check(call(find_messages, batch, self._size, room, self._window, fast=self._fast))
        end = len(moved.message)
        self._check_start(moved.source[:end], moved.block[:end], moved.read)
        end_reads = len(reads.landing)
        self._check_start(reads.rank[:end_reads], reads.block[:end_reads], reads.landing)
        is_first = moved.message == np.arange(end)
        firsts, message = np.flatnonzero(is_first), (np.cumsum(is_first) - 1)[moved.message]
        size_bytes = np.bincount(message, self._size[moved.block[:end]], len(firsts)).astype(np.int64)
        source, destination, lane = (column[firsts] for column in (moved.source, moved.destination, moved.lane))
        cost, route = self._message_costs(batch.first + step[firsts], source, destination, lane, size_bytes)
        of_steps = (np.searchsorted(column, np.arange(batch.steps + 1)) for column in (step[firsts], calls.step))
        first, first_call = of_steps
        issued = Issued(
            first, message, source, destination, lane, cost, route, first_call, calls.rank, self._costs_of_calls(calls)
        )
        if len(self._window.costs) < len(self._costs):
            self._window = self._window._replace(costs=cost_table(list(self._costs)))
        while (status := call(issue, batch, issued, self._window, fast=self._fast)) == FULL:
            self._window = self._window.with_room()
        self._check(status)

    def _room_for_landings(self, batch: Batch) -> Landed:
        """Keep the landings of the latest step alone, with room for those of a batch; returns the room to find them."""
        window, moved, adds = self._window, batch.moved.first, batch.adds.first
        latest = window.landings[window.sizes[STEP_LANDINGS] : window.sizes[LANDINGS]]
        most = max(len(latest), int((np.diff(moved) + np.diff(adds)).max()))
        rows = len(latest) + int(moved[-2] + adds[-2])
        if rows > len(window.landings):
            self._window = window = window._replace(landings=landing_table(2 * rows))
        window.landings[: len(latest)] = latest
        window.sizes[[STEP_LANDINGS, LANDINGS, NEXT]] = 0, len(latest), 0
        ranks, spread = self._schedule.world_size, power_of_2(2 * self._per_step // self._schedule.world_size)
        places = max(power_of_2(2 * most + 1), power_of_2(ranks) * spread)
        found, order = np.full(2 * places, -1, dtype=np.int32), np.zeros(most, dtype=np.int64)
        return Landed(found, spread, order, np.zeros(ranks + 2, dtype=np.int64))

    def _check_start(self, rank: IntArray, block: IntArray, landing: IntArray) -> None:
        """What has not landed at the step before it is read must be there since the start."""
        at = np.flatnonzero(landing < 0)
        if not self._schedule.initial[rank[at], block[at]].all():
            raise _NotSimpleError  # it is read later: copies may be grouped otherwise in its buffer

    def _message_costs(
        self, step: IntArray, source: IntArray, destination: IntArray, lane: IntArray, size_bytes: IntArray
    ) -> tuple[IntArray, IntArray]:
        """The cost of each message, whose lanes are accounted for, and its route if it may share bandwidth, else -1."""
        if not len(source):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
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
            key = (cost.launch_s, cost.wire_bytes, rates[-1], cost.latency_s, cost.channels)
            costs.append(self._costs.setdefault(key, len(self._costs)))
        self._rates.add(source * self._schedule.lanes + lane, route, np.array(rates)[number])
        shared = np.where(self._rates.shares(route), route, -1)
        return np.array(costs, dtype=np.int64)[number], shared

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
                key = (float(machine.call_s(machine.compute.time_s(shape), rank)), 0.0, 0.0, 0.0, 0.0)
                self._call_costs[shape, rank] = self._costs.setdefault(key, len(self._costs))
            costs.append(self._call_costs[shape, rank])
        return np.array(costs, dtype=np.int64)[number]
