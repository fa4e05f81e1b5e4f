"""What ranks have to do, handed out step by step: transfers by lane, kernel calls by rank, each with its rooms.

Every lane of every rank, and every rank that computes, takes its part of each step in the order of steps. A step is
opened when the first of them asks for it and forgotten when the last one has.

Whoever asks for step t finds all steps up to t opened. That is why the users of a room are counted while steps are
opened: those of what arrived at step t - b are complete, with b rooms, when a transfer of step t wants its place.

Without rooms a transfer of step t waits for exactly the transfers of its block to its rank at the steps before t, if
there are any. This holds where blocks are sums as well, of which a rank has a part from the start
(`tasp_lab.reduction`). A rank gives its part away once, after all that was added to it has come, or has the complete
sum in the end; only one that gave it away gets a copy. So what is added at a rank comes to its home, a copy comes to
a room beside it, and what is sent from either waits for all that comes to it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import simpy

from sim.messages import Messages
from sim.room import Room
from tasp_lab.calls import Call
from tasp_lab.quantities import Number
from tasp_lab.schedule import Schedule, Step
from tasp_lab.transport import Message


class Transfer:
    """A block goes from a room of its rank to a room of a peer, where it may have to wait for one that it overwrites.

    When it began, when it was launched, what it waited for, and how long (for its block, then for the room) is known
    once it began.
    """

    start_s: Number
    launched_s: Number
    waited_for: str
    waited_s: tuple[Number, Number]

    __slots__ = (
        "block", "lane", "launched_s", "message", "overwritten", "peer", "rank", "source", "start_s", "step", "target",
        "waited_for", "waited_s",
    )  # fmt: skip

    def __init__(
        self, rank: int, lane: int, step: int, peer: int, block: int, message: Message, source: Room, target: Room,
        overwritten: Room | None,
    ) -> None:  # fmt: skip
        self.rank, self.lane, self.step, self.peer, self.block = rank, lane, step, peer, block
        self.message, self.source, self.target, self.overwritten = message, source, target, overwritten


class Computation:
    """A kernel call: the room of each block that it reads, and the gradients to which it adds in the room `target`.

    `target` is None where it adds to nothing that is to travel.
    """

    __slots__ = ("adds", "call", "overwritten", "reads", "step", "target")

    def __init__(
        self, step: int, call: Call, reads: dict[int, Room], adds: Sequence[int], target: Room | None,
        overwritten: Room | None,
    ) -> None:  # fmt: skip
        self.step, self.call, self.reads = step, call, reads
        self.adds, self.target, self.overwritten = adds, target, overwritten

    @property
    def rooms(self) -> list[Room]:
        """The rooms that the call reads from, each once."""
        return list(dict.fromkeys(self.reads.values()))


class _OpenStep:
    """What is to do at one step, by (rank, lane) and by rank, and how many have still to take their part."""

    def __init__(self, takers: int) -> None:
        self.transfers: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self.computations: defaultdict[int, list[Computation]] = defaultdict(list)
        self.takers = takers


class Work:
    """The work of all ranks."""

    def __init__(self, env: simpy.Environment, schedule: Schedule, messages: Messages) -> None:
        self._env, self._schedule, self._messages = env, schedule, messages
        self._takers = schedule.world_size * (schedule.lanes + (schedule.task is not None))
        self._open: dict[int, _OpenStep] = {}
        self._homes = {rank: Room(env) for rank in range(schedule.world_size)}
        self._copies = {rank: Room(env) for rank in self._homes}
        self._copied_from = [] if schedule.reduction is None else schedule.reduction.copied_from.tolist()
        self._places: list[dict[int, Room]] = [{} for _ in self._homes]
        self._filled: deque[tuple[Mapping[int, Room], list[tuple[int, int]]]] = deque()
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
        task = self._schedule.task
        adds = [] if task is None else [task.gradients_away(call) for call in step.calls]
        targets = self._targets(step, adds)
        messages = self._messages.of_step(index, step)
        for (rank, peer, lane, block), message in zip(step.rows(), messages, strict=True):
            source, target = self._room_of(rank, block), targets[peer]
            if self._copied_from and index >= self._copied_from[block]:
                target = self._places[peer][block] = self._copies[peer]
            source.users += 1
            target.expect(block)
            overwritten = self._lying.get((peer, self._room(index)))
            transfer = Transfer(rank, lane, index, peer, block, message, source, target, overwritten)
            opened.transfers[rank, lane].append(transfer)
        for call, added in zip(step.calls, adds, strict=True):
            opened.computations[call.rank].append(self._computation(index, call, added, targets))
        if self._schedule.rooms is not None:
            self._place(index, step, adds, targets)
        return opened

    def _computation(self, index: int, call: Call, added: Sequence[int], targets: Mapping[int, Room]) -> Computation:
        """A call with its rooms, of which it is a user from now on."""
        assert self._schedule.task is not None, "a schedule with calls has a task"
        reads = {block: self._room_of(call.rank, block) for block in self._schedule.task.sides(call)[0].tolist()}
        target = targets[call.rank] if added else None
        overwritten = self._lying.get((call.rank, self._room(index))) if added else None
        computation = Computation(index, call, reads, added, target, overwritten)
        for room in computation.rooms:
            room.users += 1
        for block in added:
            targets[call.rank].expect(block)
        return computation

    def _room(self, index: int) -> int:
        """The number of the room that takes in what arrives at a step."""
        return index % self._schedule.rooms if self._schedule.rooms else -1

    def _room_of(self, rank: int, block: int) -> Room:
        """Where a block lies at a rank."""
        return self._places[rank].get(block) or self._homes[rank]

    def _targets(self, step: Step, adds: Sequence[Sequence[int]]) -> Mapping[int, Room]:
        """Where it goes what a step brings, by rank: without rooms to what the rank has."""
        if self._schedule.rooms is None:
            return self._homes
        adding = [call.rank for call, added in zip(step.calls, adds, strict=True) if added]
        return {rank: Room(self._env) for rank in dict.fromkeys(step.destination.tolist() + adding)}

    def _place(self, index: int, step: Step, adds: Sequence[Sequence[int]], targets: Mapping[int, Room]) -> None:
        """From now on what a step brings lies in its rooms."""
        self._lying |= {(rank, self._room(index)): room for rank, room in targets.items()}
        brought = list(zip(step.destination.tolist(), step.block.tolist(), strict=True))
        brought += [(call.rank, block) for call, added in zip(step.calls, adds, strict=True) for block in added]
        for rank, block in brought:
            self._places[rank][block] = targets[rank]
        self._filled.append((targets, brought))

    def _forget_oldest(self) -> None:
        """What the next step brings takes the place of the oldest: this is nowhere any more."""
        if len(self._filled) == self._schedule.rooms:
            targets, brought = self._filled.popleft()
            for rank, block in brought:
                if self._places[rank].get(block) is targets[rank]:
                    del self._places[rank][block]
