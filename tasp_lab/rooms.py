"""Where blocks lie in a rank's memory, since when, and how often they are used there.

A rank has one buffer. Without rooms every block has its own place in it, in the order of block numbers. With rooms the
blocks that travel and that the rank starts with come first, in the order of their numbers (its *home*); then the rooms
follow, each as large as the most that arrives in one step, and what arrives lies in its room in the order of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.calls import Call
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule import Schedule, Step

HOME = -1
"""Instead of the step at which a block arrived: the rank holds it from the start."""


class Row(NamedTuple):
    """One message of a rank, in or out.

    `offset` is where in the rank's buffer the block lies, in bytes; `since` is the step at which it arrives or arrived
    there, or `HOME`.
    """

    step: int
    lane: int
    peer: int
    block: int
    offset: int
    since: int


class CallRow(NamedTuple):
    """One kernel call of a rank.

    Its `keys` are (block, since) pairs; they lie side by side in the rank's buffer, from `offset` on, `size_bytes` in
    all.
    """

    step: int
    call: Call
    keys: tuple[tuple[int, int], ...]
    offset: int
    size_bytes: int
    flops: int

    @property
    def since(self) -> set[int]:
        """The steps at which its keys arrived, or `HOME`."""
        return {since for _, since in self.keys}


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a schedule, in the order of steps, and of lanes within a step.

    `home` are the blocks that lie in its buffer of `buffer_bytes` from the start, `kept` those that lie there for good
    once all is done, with their offsets in bytes.
    """

    rank: int
    home: Mapping[int, int]
    kept: Mapping[int, int]
    sends: tuple[Row, ...]
    receives: tuple[Row, ...]
    calls: tuple[CallRow, ...]
    buffer_bytes: int

    @property
    def occupants(self) -> Counter[int]:
        """What must happen before the room of a step is free: its arrivals, and the sends and calls that use them."""
        arrivals = [row.since for row in self.receives]
        uses = [row.since for row in self.sends] + [since for row in self.calls for since in row.since]
        return Counter(since for since in arrivals + uses if since != HOME)


def rank_part(schedule: Schedule, rank: int) -> RankPart:
    """One rank's part of a schedule. Raises `ScheduleError` when the keys of a call do not lie side by side."""
    memory = _Memory(schedule, rank)
    home = {block: memory.place[block][0] for block in home_blocks(schedule, rank).tolist()}
    sends: list[Row] = []
    receives: list[Row] = []
    calls: list[CallRow] = []
    for index, step in enumerate(schedule.steps):
        sends += _by_lane(
            Row(index, lane, peer, block, *memory.place[block])
            for peer, lane, block in _columns(step, step.source == rank, step.destination)
        )
        calls += [memory.call_row(index, call) for call in step.calls if call.rank == rank]
        arrivals = _columns(step, step.destination == rank, step.source)
        memory.take_in(index, [block for _, _, block in arrivals])
        receives += _by_lane(Row(index, lane, peer, block, *memory.place[block]) for peer, lane, block in arrivals)
    kept = home if schedule.rooms is not None else home | {row.block: row.offset for row in receives}
    return RankPart(rank, home, kept, tuple(sends), tuple(receives), tuple(calls), memory.size_bytes)


def home_blocks(schedule: Schedule, rank: int) -> IntArray:
    """The blocks that lie in a rank's buffer from the start: all that it starts with, but for queries, which stay."""
    blocks = np.flatnonzero(schedule.initial[rank])
    return blocks if schedule.task is None else blocks[blocks < schedule.task.first_query]


def buffer_bytes(schedule: Schedule) -> IntArray:
    """The size of every rank's buffer, as an int array (world_size,)."""
    ranks = range(schedule.world_size)
    if schedule.rooms is None:
        return np.full(schedule.world_size, schedule.block_bytes.sum())
    home = np.array([schedule.block_bytes[home_blocks(schedule, rank)].sum() for rank in ranks], dtype=np.int64)
    return home + schedule.rooms * _room_bytes(schedule)


class _Memory:
    """One rank's buffer while its steps are walked: where each block lies now, and since when."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule = schedule
        self._sizes: list[int] = schedule.block_bytes.tolist()
        self._rooms = schedule.rooms
        if self._rooms is None:
            starts = np.cumsum(schedule.block_bytes) - schedule.block_bytes
            self.place = {block: (start, HOME) for block, start in enumerate(starts.tolist())}
            self.size_bytes = sum(self._sizes)
            return
        self.place = {}
        self._home_bytes = self._lay_out(home_blocks(schedule, rank).tolist(), 0, HOME)
        self._room_bytes = int(_room_bytes(schedule)[rank])
        self.size_bytes = self._home_bytes + self._rooms * self._room_bytes

    def take_in(self, step: int, blocks: list[int]) -> None:
        """Blocks arrive at a step, in this order."""
        if self._rooms is None:
            self.place |= {block: (self.place[block][0], step) for block in blocks}
        else:
            self._lay_out(blocks, self._home_bytes + step % self._rooms * self._room_bytes, step)

    def _lay_out(self, blocks: list[int], offset: int, since: int) -> int:
        """Put blocks side by side; returns where they end."""
        for block in blocks:
            self.place[block] = (offset, since)
            offset += self._sizes[block]
        return offset

    def call_row(self, step: int, call: Call) -> CallRow:
        keys = call.keys.tolist()
        first = end = self.place[keys[0]][0]
        for key in keys:
            if self.place[key][0] != end:
                raise ScheduleError(f"step {step}: rank {call.rank} computes with key block {key}, which does not lie "
                                    "beside the others of the call")  # fmt: skip
            end += self._sizes[key]
        held = tuple((key, self.place[key][1]) for key in keys)
        return CallRow(step, call, held, first, end - first, self._schedule.call_flops(call))


@lru_cache(maxsize=8)
def _room_bytes(schedule: Schedule) -> IntArray:
    """The most bytes that arrive in one step at each rank."""
    largest = np.zeros(schedule.world_size, dtype=np.int64)
    for step in schedule.steps:
        arriving = np.zeros_like(largest)
        np.add.at(arriving, step.destination, schedule.block_bytes[step.block])
        largest = np.maximum(largest, arriving)
    return largest


def _columns(step: Step, mine: BoolArray, peers: IntArray) -> list[tuple[int, int, int]]:
    """(peer, lane, block) of a step's transfers that concern one rank, in their order."""
    return list(zip(peers[mine].tolist(), step.lane[mine].tolist(), step.block[mine].tolist(), strict=True))


def _by_lane(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.lane)
