"""What ranks have to do, handed out step by step: transfers by lane, kernel calls by rank, each with its rooms.

Every lane of every rank, and every rank that computes, takes its part of each step in the order of steps. A step is
opened when the first of them asks for it and forgotten when the last one has.

Whoever asks for step t finds all steps up to t opened. That is why the users of a room are counted while steps are
opened: those of what arrived at step t - b are complete, with b rooms, when a transfer of step t wants its place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

import simpy

from sim.room import Room
from tasp_lab.calls import Call
from tasp_lab.quantities import Number
from tasp_lab.schedule import Schedule, Step


class Transfer:
    """A block goes from a room of its rank to a room of a peer, where it may have to wait for one that it overwrites.

    When it began, when it was launched and what it waited for is known once it began.
    """

    start_s: Number
    launched_s: Number
    waited_for: str

    __slots__ = (
        "block", "lane", "launched_s", "overwritten", "peer", "rank", "source", "start_s", "step", "target",
        "waited_for",
    )  # fmt: skip

    def __init__(
        self, rank: int, lane: int, step: int, peer: int, block: int, source: Room, target: Room,
        overwritten: Room | None,
    ) -> None:  # fmt: skip
        self.rank, self.lane, self.step, self.peer, self.block = rank, lane, step, peer, block
        self.source, self.target, self.overwritten = source, target, overwritten


class Computation:
    """A kernel call and the room of each of its key blocks."""

    __slots__ = ("call", "keys", "step")

    def __init__(self, step: int, call: Call, keys: dict[int, Room]) -> None:
        self.step, self.call, self.keys = step, call, keys

    @property
    def rooms(self) -> list[Room]:
        """The rooms that the call reads from, each once."""
        return list(dict.fromkeys(self.keys.values()))


class _OpenStep:
    """What is to do at one step, by (rank, lane) and by rank, and how many have still to take their part."""

    def __init__(self, takers: int) -> None:
        self.transfers: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self.computations: defaultdict[int, list[Computation]] = defaultdict(list)
        self.takers = takers


class Work:
    """The work of all ranks."""

    def __init__(self, env: simpy.Environment, schedule: Schedule) -> None:
        self._env, self._schedule = env, schedule
        self._takers = schedule.world_size * (schedule.lanes + (schedule.task is not None))
        self._open: dict[int, _OpenStep] = {}
        self._homes = dict(enumerate(Room(env, row.nonzero()[0].tolist()) for row in schedule.initial))
        self._places: list[dict[int, Room]] = [{} for _ in self._homes]
        self._filled: deque[Step] = deque()
        self._lying: dict[tuple[int, int], Room] = {}

    def transfers(self, step: int, rank: int, lane: int) -> list[Transfer]:
        """What this lane of this rank sends at this step. Each asks once per step, in their order."""
        return self._take(step).transfers.get((rank, lane), [])

    def computations(self, step: int, rank: int) -> list[Computation]:
        """What this rank computes at this step. Each asks once per step, in their order."""
        return self._take(step).computations.get(rank, [])

    def _take(self, index: int) -> _OpenStep:
        if index not in self._open:
            self._open[index] = self._opened(index)
        opened = self._open[index]
        opened.takers -= 1
        if not opened.takers:
            del self._open[index]
        return opened

    def _opened(self, index: int) -> _OpenStep:
        """The step with its rooms. Sends and calls use what came before it, so what comes at it is placed last."""
        step, opened = self._schedule.steps[index], _OpenStep(self._takers)
        self._forget_oldest()
        targets = self._targets(step)
        for rank, peer, lane, block in step.rows():
            source, target = self._room_of(rank, block), targets[peer]
            source.users += 1
            target.users += 1
            overwritten = self._lying.get((peer, self._room(index)))
            transfer = Transfer(rank, lane, index, peer, block, source, target, overwritten)
            opened.transfers[rank, lane].append(transfer)
        for call in step.calls:
            computation = Computation(index, call, {key: self._room_of(call.rank, key) for key in call.keys.tolist()})
            for room in computation.rooms:
                room.users += 1
            opened.computations[call.rank].append(computation)
        if self._schedule.rooms is not None:
            self._place(index, step, targets)
        return opened

    def _room(self, index: int) -> int:
        """The number of the room that takes in what arrives at a step."""
        return index % self._schedule.rooms if self._schedule.rooms else -1

    def _room_of(self, rank: int, block: int) -> Room:
        """Where a block lies at a rank."""
        return self._places[rank].get(block) or self._homes[rank]

    def _targets(self, step: Step) -> Mapping[int, Room]:
        """Where a step's arrivals go, by rank: without rooms to what the rank has."""
        if self._schedule.rooms is None:
            return self._homes
        return {rank: Room(self._env) for rank in dict.fromkeys(step.destination.tolist())}

    def _place(self, index: int, step: Step, targets: Mapping[int, Room]) -> None:
        """From now on a step's arrivals lie in their rooms."""
        self._lying |= {(rank, self._room(index)): room for rank, room in targets.items()}
        for rank, block in _arrivals(step):
            self._places[rank][block] = targets[rank]
        self._filled.append(step)

    def _forget_oldest(self) -> None:
        """The next step's arrivals take the place of the oldest ones: these are nowhere any more."""
        if len(self._filled) == self._schedule.rooms:
            for rank, block in _arrivals(self._filled.popleft()):
                del self._places[rank][block]


def _arrivals(step: Step) -> Iterator[tuple[int, int]]:
    """Where each block of a step arrives, as (rank, block)."""
    return zip(step.destination.tolist(), step.block.tolist(), strict=True)
