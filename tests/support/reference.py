"""A second implementation of what the simulator computes: naive, global, exact.

At every instant everything is looked at anew: who has sent, arrived, computed, been launched, may begin; then all rates
are computed from scratch and time moves on to whatever comes first. Nothing is shared with `sim`; messages are those
that the executor posts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tasp_lab.core.units import Number
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.machine import INSTANT, Compute
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.dependencies import call_shapes
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tests.support.schedules import parts

Key = tuple[int, int, int, int, tuple[int, ...]]
"""Step, rank, peer, lane and blocks of a message."""

Place = tuple[int, int]
"""Rank and block."""

Span = tuple[Fraction, Fraction]
"""Start and end of something, in seconds."""


@dataclass(eq=False)
class Transfer:
    """One message from its rank, and how far it is: each time is None until it is known."""

    key: Key
    under: tuple[int, ...]
    latency_s: Fraction
    bytes_left: Fraction
    start_s: Fraction | None = None
    launched_s: Fraction | None = None
    end_s: Fraction | None = None

    @property
    def step(self) -> int:
        return self.key[0]

    @property
    def lane_of_rank(self) -> tuple[int, int]:
        return self.key[1], self.key[3]

    @property
    def reads(self) -> set[Place]:
        return {(self.key[1], block) for block in self.key[4]}

    @property
    def adds(self) -> set[Place]:
        return {(self.key[2], block) for block in self.key[4]}

    def streams(self, now: Fraction) -> bool:
        return self.launched_s is not None and self.launched_s <= now and self.bytes_left > 0

    def is_in_flight(self, now: Fraction) -> bool:
        return self.launched_s is not None and self.launched_s <= now and (self.end_s is None or self.end_s > now)


@dataclass(eq=False)
class Computation:
    """One kernel call and how far it is: what is left of its time alone."""

    step: int
    rank: int
    lane: int
    reads: set[Place]
    adds: set[Place]
    left_s: Fraction
    start_s: Fraction | None = None
    end_s: Fraction | None = None


Work = Transfer | Computation


class Memory:
    """Where what comes to a rank lies, and who brings and reads it."""

    def __init__(self, schedule: Schedule, work: Sequence[Work]) -> None:
        self.blocks = schedule.blocks
        self.stays = schedule.initial | schedule.final
        if schedule.kept is not None:
            self.stays = self.stays | schedule.kept
        self.brought: dict[Place, list[Work]] = defaultdict(list)
        self.read: dict[Place, list[Work]] = defaultdict(list)
        for each in work:
            for place in each.adds:
                self.brought[place].append(each)
            for place in each.reads:
                self.read[place].append(each)
        self.places: dict[tuple[int, Pool], set[Place]] = defaultdict(set)
        for rank, block in self.brought:
            if (pool := self.blocks.kind_of(block).pool) is not None:
                self.places[rank, pool].add((rank, block))

    def is_resident(self, place: Place) -> bool:
        return bool(self.stays[place]) or self.blocks.kind_of(place[1]).pool is None

    def is_sum(self, place: Place) -> bool:
        return bool(self.blocks.kind_of(place[1]).join)

    def parts(self, place: Place, step: int) -> list[Work]:
        """What brings the copy that is there when a step begins: of the last step that brought something, or of all."""
        before = [each for each in self.brought[place] if each.step < step]
        if self.is_resident(place):
            return before
        last = max((each.step for each in before), default=-1)
        return [each for each in before if each.step == last]

    def changes(self, place: Place, step: int) -> list[Work]:
        """Who read a resident sum at a step or before it: what comes at this step joins it after they have done so."""
        if not self.is_resident(place) or not self.is_sum(place):
            return []
        return [each for each in self.read[place] if each.step <= step]

    def into_buffer(self, each: Work, place: Place) -> bool:
        """Whether what this brings comes into a buffer: if it is not resident, or is a sum that arrives."""
        return not self.is_resident(place) or (isinstance(each, Transfer) and self.is_sum(place))

    def users_before(self, rank: int, block: int, step: int) -> list[Work]:
        """Who used the buffer of a step at a rank before: what came to it, and who read it or kept it from joining."""
        pool = self.blocks.kind_of(block).pool
        if pool is None:
            return []
        steps = set(range(step - pool.buffers, -1, -pool.buffers))
        found: list[Work] = []
        for place in self.places[rank, pool] if steps else ():
            landed = [each for each in self.brought[place] if each.step in steps and self.into_buffer(each, place)]
            found += landed + [reader for each in landed for reader in self.changes(place, each.step)]
            for reader in self.read[place] if not self.is_resident(place) else ():
                if {each.step for each in self.parts(place, reader.step)} & steps:
                    found.append(reader)
        return found


@dataclass
class State:
    """All there is to do, in order, and the time."""

    transfers: list[Transfer]
    computations: list[Computation]
    memory: Memory
    now: Fraction = Fraction(0)
    waits: dict[int, tuple[list[Work], list[Work]]] = field(default_factory=dict)

    def has_ended(self, what: Work) -> bool:
        return what.end_s is not None and what.end_s <= self.now

    def have_ended(self, several: Sequence[Work]) -> bool:
        return all(map(self.has_ended, several))

    def has_left(self, what: Work) -> bool:
        return what.bytes_left == 0 if isinstance(what, Transfer) else self.has_ended(what)

    def may_begin(self, what: Work) -> bool:
        """Whether what it reads is there, and the memory that it writes to is free."""
        if id(what) not in self.waits:
            self.waits[id(what)] = self._waits(what)
        arrive, leave = self.waits[id(what)]
        return self.have_ended(arrive) and all(map(self.has_left, leave))

    def _waits(self, what: Work) -> tuple[list[Work], list[Work]]:
        """What must have arrived, and what must have left, before this begins."""
        arrive: list[Work] = []
        leave: list[Work] = []
        for place in what.reads:
            parts = self.memory.parts(place, what.step)
            arrive += parts
            leave += self.memory.changes(place, max((each.step for each in parts), default=-1))
        for place in what.adds:
            if self.memory.into_buffer(what, place):
                users = self.memory.users_before(*place, what.step)
                arrive += [each for each in users if place[0] in {rank for rank, _ in each.adds}]
                leave += users
            elif isinstance(what, Computation):
                leave += self.memory.changes(place, what.step - 1)
        return arrive, leave


def reference_times(
    schedule: Schedule,
    topology: Topology,
    launch_s: Number,
    compute: Compute = INSTANT,
    contention: Contention = NONE,
    channels: Callable[[int, int], int] = lambda rank, peer: 0,
) -> tuple[dict[Key, Span], dict[int, list[tuple[int, Span]]]]:
    """When every message starts and ends; and for each rank that computes its calls' steps, starts and ends.

    A message from a rank to a peer takes `channels` at both.
    """
    capacity = [Fraction(constraint.bandwidth_bytes_per_s) for constraint in topology.constraints]
    transfers, computations = list(_transfers(schedule, topology)), list(_computations(schedule, compute))
    state = State(transfers, computations, Memory(schedule, [*transfers, *computations]))
    while not (state.have_ended(state.transfers) and state.have_ended(state.computations)):
        _note_last_bytes(state)
        while _compute(state):
            pass
        _begin(state)
        _launch(state.transfers, Fraction(launch_s), state.now)
        streaming = [transfer for transfer in state.transfers if transfer.streams(state.now)]
        rates = max_min([transfer.under for transfer in streaming], capacity)
        ends = [state.now + transfer.bytes_left / rate for transfer, rate in zip(streaming, rates, strict=True)]
        running = [c for c in state.computations if c.start_s is not None and c.end_s is None]
        speeds = [_speed(state, c.rank, contention, channels) for c in running]
        ends += [state.now + c.left_s / speed for c, speed in zip(running, speeds, strict=True)]
        known = [time for t in state.transfers for time in (t.launched_s, t.end_s)]
        ahead = ends + [time for time in known if time is not None and time > state.now]
        if not ahead:
            break
        later = min(ahead)
        for transfer, rate in zip(streaming, rates, strict=True):
            transfer.bytes_left -= rate * (later - state.now)
        for c, speed in zip(running, speeds, strict=True):
            c.left_s -= speed * (later - state.now)
            c.end_s = later if not c.left_s else None
        state.now = later
    spans = {t.key: (t.start_s, t.end_s) for t in state.transfers if t.start_s is not None and t.end_s is not None}
    calls: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    for c in state.computations:
        if c.start_s is not None and c.end_s is not None:
            calls[c.rank].append((c.step, (c.start_s, c.end_s)))
    return spans, dict(calls)


def _transfers(schedule: Schedule, topology: Topology) -> Iterator[Transfer]:
    """The messages of each rank in the order in which it posts them on each lane."""
    for part in parts(schedule):
        for rows in part.messages_out:
            step, lane, peer = rows[0].step, rows[0].lane, rows[0].peer
            route, blocks = topology.route(part.rank, peer), tuple(row.block for row in rows)
            size = Fraction(sum(int(schedule.block_bytes[block]) for block in blocks))
            key = (step, part.rank, peer, lane, blocks)
            yield Transfer(key, route.constraints, Fraction(route.latency_s), size)


def _computations(schedule: Schedule, compute: Compute) -> Iterator[Computation]:
    """The calls of a step, kernel by kernel, each with what the task says that it yields."""
    for index, step in enumerate(schedule.steps):
        for calls in step.calls:
            assert schedule.task is not None
            added: dict[int, set[int]] = defaultdict(set)
            effects = schedule.task.effects(calls)
            for call, block in zip(effects.call.tolist(), effects.block.tolist(), strict=True):
                added[call].add(block)
            shapes = call_shapes(schedule.task, [calls])
            for number, (rank, operands, _) in enumerate(calls.rows()):
                reads = {(rank, block) for operand in operands for block in operand}
                adds = {(rank, block) for block in added[number]}
                time_s = Fraction(compute.time_s(shapes.distinct[shapes.number[number]]))
                yield Computation(index, rank, calls.lane, reads, adds, time_s)


def _note_last_bytes(state: State) -> None:
    for transfer in state.transfers:
        if transfer.bytes_left == 0 and transfer.end_s is None:
            transfer.end_s = state.now + transfer.latency_s


def _compute(state: State) -> bool:
    """The first call of each compute lane that has not ended begins, if it may. Says whether any did."""
    heads: dict[tuple[int, int], Computation] = {}
    for computation in state.computations:
        if not state.has_ended(computation):
            heads.setdefault((computation.rank, computation.lane), computation)
    ready = [head for head in heads.values() if head.start_s is None and state.may_begin(head)]
    for head in ready:
        head.start_s, head.end_s = state.now, None if head.left_s else state.now
    return bool(ready)


def _speed(state: State, rank: int, contention: Contention, channels: Callable[[int, int], int]) -> Fraction:
    """How fast the calls of a rank run beside its messages in flight."""
    pairs = [t.key[1:3] for t in state.transfers if t.is_in_flight(state.now)]
    sends, receives = (sum(channels(*pair) for pair in pairs if pair[end] == rank) for end in (0, 1))
    taken = min(max(sends, receives), contention.max_channels) * contention.sms_per_channel
    return 1 - Fraction(taken) / Fraction(contention.sms)


def _begin(state: State) -> None:
    """The first pending transfer of each lane begins, if it may."""
    heads: dict[tuple[int, int], Transfer] = {}
    for transfer in state.transfers:
        if transfer.bytes_left > 0:
            heads.setdefault(transfer.lane_of_rank, transfer)
    for transfer in heads.values():
        if transfer.start_s is None and state.may_begin(transfer):
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
