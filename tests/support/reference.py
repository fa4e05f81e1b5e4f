"""A second implementation of what the simulator computes: naive, global, exact.

At every instant everything is looked at anew: who has sent, arrived, computed, been launched, may begin; then all rates
are computed from scratch and time moves on to whatever comes first. Nothing is shared with `sim`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tasp_lab.machines.machine import INSTANT, ComputeRate
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.units import Number
from tasp_lab.workload.kernel_calls import Call

Key = tuple[int, int, int, int, int]
"""Step, rank, peer, lane and block of a transfer."""

Span = tuple[Fraction, Fraction]
"""Start and end of something, in seconds."""

Stay = tuple[int, int, int]
"""Rank, block, and the step at which the block comes to the rank; `INITIAL` if it is there from the start.

A gradient comes when all of it has that comes at one step: what arrives, and what the rank computes.
"""

INITIAL = -1
"""Instead of a step: from the start."""


@dataclass(eq=False)
class Transfer:
    """One transfer of a block that lies at its rank, and how far it is: each time is None until it is known."""

    key: Key
    stay: Stay
    under: tuple[int, ...]
    latency_s: Fraction
    bytes_left: Fraction
    start_s: Fraction | None = None
    launched_s: Fraction | None = None
    end_s: Fraction | None = None

    @property
    def lane_of_rank(self) -> tuple[int, int]:
        return self.key[1], self.key[3]

    def streams(self, now: Fraction) -> bool:
        return self.launched_s is not None and self.launched_s <= now and self.bytes_left > 0


@dataclass(eq=False)
class Computation:
    """One kernel call and how far it is."""

    step: int
    rank: int
    reads: set[Stay]
    adds: set[Stay]
    time_s: Fraction
    start_s: Fraction | None = None
    end_s: Fraction | None = None


@dataclass
class State:
    """All there is to do, in order, and the time."""

    transfers: list[Transfer]
    computations: list[Computation]
    at_home: set[Stay]
    buffers: int | None
    now: Fraction = Fraction(0)

    def has_ended(self, what: Transfer | Computation) -> bool:
        return what.end_s is not None and what.end_s <= self.now

    def have_ended(self, several: Sequence[Transfer | Computation]) -> bool:
        return all(map(self.has_ended, several))

    def arrived(self) -> set[Stay]:
        """What lies where."""
        ended, missing = set(self.at_home), set[Stay]()
        for t in self.transfers:
            (ended if self.has_ended(t) else missing).add((t.key[2], t.key[4], t.key[0]))
        for c in self.computations:
            (ended if self.has_ended(c) else missing).update(c.adds)
        return ended - missing

    def has_buffer(self, rank: int, comes: int) -> bool:
        """Whether what came to a rank before, into the buffer of what comes at a step, is no longer used there."""
        if self.buffers is None:
            return True
        before = {(rank, step) for step in range(comes - self.buffers, -1, -self.buffers)}
        if not before:
            return True
        arrivals = [t for t in self.transfers if (t.key[2], t.key[0]) in before]
        sends = [t for t in self.transfers if (t.stay[0], t.stay[2]) in before]
        calls = [c for c in self.computations if any((rank, step) in before for rank, _, step in c.reads | c.adds)]
        return self.have_ended(arrivals) and self.have_ended(calls) and all(t.bytes_left == 0 for t in sends)


def reference_times(
    schedule: Schedule, topology: Topology, launch_s: Number, compute: ComputeRate = INSTANT
) -> tuple[dict[Key, Span], dict[int, list[tuple[int, Span]]]]:
    """When every transfer starts and ends; and for each rank that computes its calls' steps, starts and ends."""
    capacity = [Fraction(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints]
    at_home = {(rank, block, INITIAL) for rank, block in np.argwhere(schedule.initial).tolist()}
    work = list(_transfers(schedule, topology)), list(_computations(schedule, compute))
    state = State(*work, at_home, schedule.buffers)
    while not (state.have_ended(state.transfers) and state.have_ended(state.computations)):
        _note_last_bytes(state)
        while _compute(state):
            pass
        _begin(state)
        _launch(state.transfers, Fraction(launch_s), state.now)
        streaming = [transfer for transfer in state.transfers if transfer.streams(state.now)]
        rates = max_min([transfer.under for transfer in streaming], capacity)
        ends = [state.now + transfer.bytes_left / rate for transfer, rate in zip(streaming, rates, strict=True)]
        known = [time for t in state.transfers for time in (t.launched_s, t.end_s)]
        known += [c.end_s for c in state.computations]
        ahead = ends + [time for time in known if time is not None and time > state.now]
        if not ahead:
            break
        later = min(ahead)
        for transfer, rate in zip(streaming, rates, strict=True):
            transfer.bytes_left -= rate * (later - state.now)
        state.now = later
    spans = {t.key: (t.start_s, t.end_s) for t in state.transfers if t.start_s is not None and t.end_s is not None}
    calls: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    for c in state.computations:
        if c.start_s is not None and c.end_s is not None:
            calls[c.rank].append((c.step, (c.start_s, c.end_s)))
    return spans, dict(calls)


def _transfers(schedule: Schedule, topology: Topology) -> Iterator[Transfer]:
    came = _steps_of_arrival(schedule)
    for index, step in enumerate(schedule.steps):
        for rank, peer, lane, block in step.rows():
            route = topology.route(rank, peer)
            size = Fraction(int(schedule.block_bytes[block]))
            stay = rank, block, _last_before(index, came[rank, block])
            yield Transfer((index, rank, peer, lane, block), stay, route.constraints, Fraction(route.latency_s), size)


def _computations(schedule: Schedule, compute: ComputeRate) -> Iterator[Computation]:
    came = _steps_of_arrival(schedule)
    for index, step in enumerate(schedule.steps):
        for call in step.calls:
            assert schedule.task is not None
            circulating = call.keys if schedule.task.circulating_side == "keys" else call.queries
            reads = {(call.rank, block, _last_before(index, came[call.rank, block])) for block in circulating.tolist()}
            adds = {(call.rank, block, index) for block in _gradients_away(schedule, call)}
            yield Computation(index, call.rank, reads, adds, Fraction(compute.time_s(schedule.call_flops(call))))


def _gradients_away(schedule: Schedule, call: Call) -> list[int]:
    """The gradients of others' blocks that travel in a call; they have the last numbers, in the order of the blocks."""
    task = schedule.task
    assert task is not None
    if not task.is_backward:
        return []
    blocks = len(task.owner)
    circulating = call.keys if task.circulating_side == "keys" else call.queries
    first = blocks if task.circulating_side == "keys" else blocks - task.first_query
    return [first + block for block in circulating.tolist() if task.owner[block] != call.rank]


def _steps_of_arrival(schedule: Schedule) -> dict[tuple[int, int], list[int]]:
    """The steps at which a block comes to a rank, by (rank, block)."""
    came: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, step in enumerate(schedule.steps):
        for _, peer, _, block in step.rows():
            came[peer, block].append(index)
        for call in step.calls:
            for block in _gradients_away(schedule, call):
                came[call.rank, block].append(index)
    return came


def _last_before(step: int, steps: list[int]) -> int:
    return max((each for each in steps if each < step), default=INITIAL)


def _note_last_bytes(state: State) -> None:
    for transfer in state.transfers:
        if transfer.bytes_left == 0 and transfer.end_s is None:
            transfer.end_s = state.now + transfer.latency_s


def _compute(state: State) -> bool:
    """The first call of each rank that has not ended begins, if what it reads is there and what it adds to has buffer.

    Says whether any did.
    """
    heads: dict[int, Computation] = {}
    for computation in state.computations:
        if not state.has_ended(computation):
            heads.setdefault(computation.rank, computation)
    arrived = state.arrived()
    ready = [
        head
        for head in heads.values()
        if head.start_s is None
        and arrived.issuperset(head.reads)
        and (not head.adds or state.has_buffer(head.rank, head.step))
    ]
    for head in ready:
        head.start_s, head.end_s = state.now, state.now + head.time_s
    return bool(ready)


def _begin(state: State) -> None:
    """The first pending transfer of each lane begins, if its block is there and its buffer free."""
    arrived = state.arrived()
    heads: dict[tuple[int, int], Transfer] = {}
    for transfer in state.transfers:
        if transfer.bytes_left > 0:
            heads.setdefault(transfer.lane_of_rank, transfer)
    for transfer in heads.values():
        if transfer.start_s is None and transfer.stay in arrived and state.has_buffer(transfer.key[2], transfer.key[0]):
            transfer.start_s = state.now


def _launch(transfers: list[Transfer], launch_s: Fraction, now: Fraction) -> None:
    """Every host that is free takes what began first, of those that began together the one on the lowest lane."""
    queues: dict[int, list[tuple[Fraction, int, Transfer]]] = defaultdict(list)
    for t in transfers:
        if t.start_s is not None and t.launched_s is None:
            queues[t.key[1]].append((t.start_s, t.key[3], t))
    for rank, queue in queues.items():
        for _, _, transfer in sorted(queue, key=lambda entry: entry[:2]):
            if all(t.launched_s is None or t.launched_s <= now for t in transfers if t.key[1] == rank):
                transfer.launched_s = now + launch_s


def max_min(flows: list[tuple[int, ...]], capacity: list[Fraction]) -> list[Fraction]:
    """Max-min fair rates: again and again the constraint that has the least left per flow fixes its flows."""
    rates = [Fraction(0)] * len(flows)
    left = list(capacity)
    loose = set(range(len(flows)))
    while loose:
        count = [sum(constraint in flows[flow] for flow in loose) for constraint in range(len(capacity))]
        share, tightest = min((left[c] / n, c) for c, n in enumerate(count) if n)
        for flow in [flow for flow in loose if tightest in flows[flow]]:
            rates[flow] = share
            loose.remove(flow)
            for constraint in flows[flow]:
                left[constraint] -= share
    return rates
