"""Where blocks lie in a rank's memory, since when, and how often they are used there.

A rank has one buffer. Without rooms every block has its own place in it, in the order of block numbers. With rooms the
blocks that travel and that the rank starts with come first (its *home*): its own in the order of their numbers, then
copies of others' in the order in which the first step computes with them. Going backward the gradients of its own
blocks follow. Then come the rooms, each as large as the most that it takes in at one step: what arrives, in the order
of the step, and then the gradients that the rank begins by computing their first part.

Where blocks are sums (`tasp_lab.reduction`), each has its place, and what comes to be added to one *lands* behind all
of them, every arrival at a place of its own. It is added when the last of it has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.calls import Call
from tasp_lab.errors import ScheduleError
from tasp_lab.reduction import Reduction
from tasp_lab.schedule import Schedule, Step

HOME = -1
"""Instead of the step at which a block arrived: the rank holds it from the start."""


class Place(NamedTuple):
    """Where a block lies in a rank's buffer, in bytes, and the step since when, or `HOME`."""

    block: int
    offset: int
    since: int

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from the same block there at another time."""
        return self.block, self.since


class Row(NamedTuple):
    """One message of a rank, in or out.

    `offset` is where in the rank's buffer the block lies, in bytes; `since` is the step at which it arrives or arrived
    there (what was computed of a gradient: the step at which it was), or `HOME`.
    """

    step: int
    lane: int
    peer: int
    block: int
    offset: int
    since: int


class CallRow(NamedTuple):
    """One kernel call of a rank.

    `reads` are its travelling blocks as (block, since) pairs; they lie side by side in the rank's buffer, from `offset`
    on, `size_bytes` in all. `adds` are the places of their gradients, to which it adds a part, in the same order.
    """

    step: int
    call: Call
    reads: tuple[tuple[int, int], ...]
    offset: int
    size_bytes: int
    flops: int
    adds: tuple[Place, ...] = ()

    @property
    def away(self) -> tuple[Place, ...]:
        """The gradients that do not stay."""
        return tuple(place for place in self.adds if place.since != HOME)

    @property
    def since(self) -> set[int]:
        """The steps whose rooms it uses."""
        return {since for _, since in self.reads if since != HOME} | {self.step for _ in self.away}


class Sum(NamedTuple):
    """A block at a place that is a sum: what `arrives` there, if anything does, and what is added to it.

    That is so many parts that are computed, of a gradient, or what arrives at the offsets of its `landings`.
    """

    block: int
    since: int
    offset: int
    arrives: bool
    computed: int
    landings: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        return self.arrives + self.computed + len(self.landings)


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a schedule, in the order of steps, and of lanes within a step.

    `home` are the blocks that lie in its buffer of `buffer_bytes` from the start, `kept` those that lie there for good
    once all is done, `gradients` its own gradients, with their offsets in bytes. `landings` are the offsets of what is
    added to the blocks that are sums, by (block, since).
    """

    rank: int
    home: Mapping[int, int]
    kept: Mapping[int, int]
    gradients: Mapping[int, int]
    sends: tuple[Row, ...]
    receives: tuple[Row, ...]
    calls: tuple[CallRow, ...]
    buffer_bytes: int
    first_gradient: int
    landings: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def occupants(self) -> Counter[int]:
        """What must happen before the room of a step is free: its arrivals, and the sends and calls that use them."""
        arrivals = [row.since for row in self.receives]
        uses = [row.since for row in self.sends] + [since for row in self.calls for since in row.since]
        return Counter(since for since in arrivals + uses if since != HOME)

    @cached_property
    def sums(self) -> Mapping[tuple[int, int], Sum]:
        """What is added up at each place of a gradient, by (block, since)."""
        arriving = {(row.block, row.since): row.offset for row in self.receives if row.block >= self.first_gradient}
        computed = [place for row in self.calls for place in row.away]
        offsets = arriving | {place.key: place.offset for place in computed}
        parts = Counter(place.key for place in computed)
        gradients = {key: Sum(*key, offset, key in arriving, parts[key]) for key, offset in offsets.items()}
        blocks = {key: Sum(*key, self.kept[key[0]], False, 0, landings) for key, landings in self.landings.items()}
        return gradients | blocks


def rank_part(schedule: Schedule, rank: int) -> RankPart:
    """One rank's part of a schedule. Raises `ScheduleError` when the keys of a call do not lie side by side."""
    memory = _Memory(schedule, rank)
    home = {block: memory.place[block].offset for block in home_blocks(schedule, rank)}
    sends: list[Row] = []
    receives: list[Row] = []
    calls: list[CallRow] = []
    for index, step in enumerate(schedule.steps):
        sends += _by_lane(
            Row(index, lane, peer, *memory.place[block])
            for peer, lane, block in _columns(step, step.source == rank, step.destination)
        )
        own_calls = [call for call in step.calls if call.rank == rank]
        rows = [memory.call_row(index, call) for call in own_calls]
        arrivals = _columns(step, step.destination == rank, step.source)
        begun = _gradients_begun(schedule, own_calls, [block for _, _, block in arrivals])
        places = memory.take_in(index, [*(block for _, _, block in arrivals), *begun])
        calls += [row._replace(adds=memory.gradients_of(row.call)) for row in rows]
        receives += _by_lane(Row(index, lane, peer, *places[block]) for peer, lane, block in arrivals)
    kept = home if schedule.rooms is not None else home | {row.block: row.offset for row in receives}
    own = {place.block: place.offset for place in memory.own_gradients}
    first_gradient = len(schedule.block_bytes) if schedule.task is None else schedule.task.first_gradient
    size = memory.size_bytes
    part = RankPart(rank, home, kept, own, tuple(sends), tuple(receives), tuple(calls), size, first_gradient)
    return part if schedule.reduction is None else _with_landings(part, schedule.reduction, schedule.block_bytes)


def _with_landings(part: RankPart, reduction: Reduction, block_bytes: IntArray) -> RankPart:
    """What comes to be added lands behind all blocks. All of it counts as there since the step of the last of it."""
    last = {row.block: row.step for row in part.receives if reduction.adds(row.step, row.block)}
    landings: dict[tuple[int, int], tuple[int, ...]] = {}
    receives: list[Row] = []
    end = part.buffer_bytes
    for row in part.receives:
        if reduction.adds(row.step, row.block):
            row = row._replace(offset=end, since=last[row.block])
            key = row.block, row.since
            landings[key] = (*landings.get(key, ()), end)
            end += int(block_bytes[row.block])
        receives.append(row)
    return replace(part, receives=tuple(receives), buffer_bytes=end, landings=landings)


def home_blocks(schedule: Schedule, rank: int) -> list[int]:
    """The blocks that lie in a rank's buffer from the start, in their order: all but those of the side that stays."""
    task, held = schedule.task, schedule.initial[rank]
    if task is None:
        found: list[int] = np.flatnonzero(held).tolist()
        return found
    travelling = task.travelling[held[task.travelling]].tolist()
    own = [block for block in travelling if task.owner[block] == rank]
    copies = [block for block in travelling if task.owner[block] != rank]
    if copies:
        calls = (call for call in schedule.steps[0].calls if call.rank == rank)
        used = [block for call in calls for block in task.sides(call)[0].tolist() if task.owner[block] != rank]
        copies = list(dict.fromkeys(used + copies))
    return own + copies


def _own_gradients(schedule: Schedule, rank: int) -> list[int]:
    """The gradient blocks that end at a rank."""
    task = schedule.task
    if task is None or not task.is_backward:
        return []
    found: list[int] = task.gradient_blocks(task.travelling[task.owner[task.travelling] == rank]).tolist()
    return found


def _gradients_begun(schedule: Schedule, calls: Iterable[Call], arriving: Sequence[int]) -> list[int]:
    """The gradients of others that a rank's calls at a step add to without any of them arriving at that step."""
    task = schedule.task
    if task is None or not task.is_backward:
        return []
    added = dict.fromkeys(block for call in calls for block in task.gradients_away(call))
    coming = set(arriving)
    return [block for block in added if block not in coming]


def buffer_bytes(schedule: Schedule) -> IntArray:
    """The size of every rank's buffer, as an int array (world_size,)."""
    ranks = range(schedule.world_size)
    if schedule.rooms is None:
        return np.full(schedule.world_size, schedule.block_bytes.sum()) + _landing_bytes(schedule)
    at_home = [home_blocks(schedule, rank) + _own_gradients(schedule, rank) for rank in ranks]
    home = np.array([schedule.block_bytes[blocks].sum() for blocks in at_home], dtype=np.int64)
    return home + schedule.rooms * _room_bytes(schedule)


def _landing_bytes(schedule: Schedule) -> IntArray:
    """The size of all that comes to each rank to be added, as an int array (world_size,)."""
    found = np.zeros(schedule.world_size, dtype=np.int64)
    for index, step in enumerate(schedule.steps if schedule.reduction is not None else ()):
        assert schedule.reduction is not None
        adds = schedule.reduction.adds(index, step.block)
        np.add.at(found, step.destination[adds], schedule.block_bytes[step.block[adds]])
    return found


class _Memory:
    """One rank's buffer while its steps are walked: where each block lies now, and since when."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule = schedule
        self._sizes: list[int] = schedule.block_bytes.tolist()
        self._rooms = schedule.rooms
        if self._rooms is None:
            starts = np.cumsum(schedule.block_bytes) - schedule.block_bytes
            self.place = {block: Place(block, start, HOME) for block, start in enumerate(starts.tolist())}
            self.own_gradients: list[Place] = []
            self.size_bytes = sum(self._sizes)
            return
        blocks = home_blocks(schedule, rank) + _own_gradients(schedule, rank)
        self.place = self._lay_out(blocks, 0, HOME)
        self.own_gradients = [self.place[block] for block in _own_gradients(schedule, rank)]
        self._home_bytes = sum(self._sizes[block] for block in blocks)
        self._room_bytes = int(_room_bytes(schedule)[rank])
        self.size_bytes = self._home_bytes + self._rooms * self._room_bytes

    def take_in(self, step: int, blocks: list[int]) -> dict[int, Place]:
        """Blocks come into the room of a step, in this order; returns where. What is added up at home stays there."""
        if self._rooms is None:
            places = {block: Place(block, self.place[block].offset, step) for block in blocks}
        else:
            places = self._lay_out(blocks, self._home_bytes + step % self._rooms * self._room_bytes, step)
        self.place |= places | {place.block: place for place in self.own_gradients}
        return places

    def _lay_out(self, blocks: list[int], offset: int, since: int) -> dict[int, Place]:
        """Blocks side by side."""
        places = {}
        for block in blocks:
            places[block] = Place(block, offset, since)
            offset += self._sizes[block]
        return places

    def call_row(self, step: int, call: Call) -> CallRow:
        """A call by what it reads."""
        assert self._schedule.task is not None, "a schedule with calls has a task"
        blocks = self._schedule.task.sides(call)[0].tolist()
        first = end = self.place[blocks[0]].offset
        for block in blocks:
            if self.place[block].offset != end:
                raise ScheduleError(f"step {step}: rank {call.rank} computes with block {block}, which does not lie "
                                    "beside the others of the call")  # fmt: skip
            end += self._sizes[block]
        held = tuple(self.place[block].key for block in blocks)
        return CallRow(step, call, held, first, end - first, self._schedule.call_flops(call))

    def gradients_of(self, call: Call) -> tuple[Place, ...]:
        """Where the gradients are to which a call adds."""
        task = self._schedule.task
        if task is None or not task.is_backward:
            return ()
        return tuple(self.place[block] for block in task.gradient_blocks(task.sides(call)[0]).tolist())


@lru_cache(maxsize=8)
def _room_bytes(schedule: Schedule) -> IntArray:
    """The most bytes that arrive in one step at each rank."""
    largest = np.zeros(schedule.world_size, dtype=np.int64)
    for step in schedule.steps:
        arriving = np.zeros_like(largest)
        np.add.at(arriving, step.destination, schedule.block_bytes[step.block])
        for rank, calls in _calls_by_rank(schedule, step).items():
            begun = _gradients_begun(schedule, calls, step.block[step.destination == rank].tolist())
            arriving[rank] += schedule.block_bytes[begun].sum()
        largest = np.maximum(largest, arriving)
    return largest


def _calls_by_rank(schedule: Schedule, step: Step) -> Mapping[int, list[Call]]:
    """The calls of a step in a backward pass, which may begin gradients."""
    found: dict[int, list[Call]] = {}
    if schedule.task is not None and schedule.task.is_backward:
        for call in step.calls:
            found.setdefault(call.rank, []).append(call)
    return found


def _columns(step: Step, mine: BoolArray, peers: IntArray) -> list[tuple[int, int, int]]:
    """(peer, lane, block) of a step's transfers that concern one rank, in their order."""
    return list(zip(peers[mine].tolist(), step.lane[mine].tolist(), step.block[mine].tolist(), strict=True))


def _by_lane(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.lane)
