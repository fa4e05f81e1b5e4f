"""The work of each step: transfers by lane, kernel calls by rank, each with the buffers it depends on.

Every lane of every rank, and the compute process of every rank, requests its work of each step in the order of steps. A
step is opened at the first request and dropped after the last one.

At a request for step t all steps up to t have been opened. Therefore pending uses can be counted while steps are
opened: with b buffers, those of the arrivals of step t - b are complete when a transfer of step t overwrites them.

Without buffers a transfer of step t waits for exactly the transfers of its block to its rank at earlier steps. This
holds in reductions, too (`tasp_lab.schedule.reduction`). There a rank either sends its part once, after all
contributions to it have arrived, or holds the complete sum at the end; only a rank that sent its part receives a copy.
So contributions are delivered to the resident buffer and copies to a separate one, and a send from either waits for all
deliveries to it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import simpy

from sim.event.buffer import Buffer
from sim.messages import Messages
from tasp_lab.libraries.library import Message
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import Step
from tasp_lab.units import Number
from tasp_lab.workload.kernel_calls import Call


class Transfer:
    """A transfer of a block from a buffer of its rank to a buffer of a peer, after the uses of `overwritten` end.

    The start and launch times, what it waited for, and the seconds it waited (for its block, then for the buffer) are
    set when it starts.
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
        self, rank: int, lane: int, step: int, peer: int, block: int, message: Message, source: Buffer, target: Buffer,
        overwritten: Buffer | None,
    ) -> None:  # fmt: skip
        self.rank, self.lane, self.step, self.peer, self.block = rank, lane, step, peer, block
        self.message, self.source, self.target, self.overwritten = message, source, target, overwritten


class Computation:
    """A kernel call: the buffer of each block that it reads, and the gradients in buffer `target` that it adds to.

    `target` is None if it adds to no circulating gradient.
    """

    __slots__ = ("adds", "call", "overwritten", "reads", "step", "target")

    def __init__(
        self, step: int, call: Call, reads: dict[int, Buffer], adds: Sequence[int], target: Buffer | None,
        overwritten: Buffer | None,
    ) -> None:  # fmt: skip
        self.step, self.call, self.reads = step, call, reads
        self.adds, self.target, self.overwritten = adds, target, overwritten

    @property
    def buffers(self) -> list[Buffer]:
        """The distinct buffers that the call reads."""
        return list(dict.fromkeys(self.reads.values()))


class _OpenStep:
    """The work of one step, by (rank, lane) and by rank, and the number of outstanding requests."""

    def __init__(self, requests: int) -> None:
        self.transfers: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self.computations: defaultdict[int, list[Computation]] = defaultdict(list)
        self.requests = requests


class Work:
    """The work of all ranks."""

    def __init__(self, env: simpy.Environment, schedule: Schedule, messages: Messages) -> None:
        self._env, self._schedule, self._messages = env, schedule, messages
        self._requests = schedule.world_size * (schedule.lanes + (schedule.task is not None))
        self._open: dict[int, _OpenStep] = {}
        self._resident = {rank: Buffer(env) for rank in range(schedule.world_size)}
        self._copies = {rank: Buffer(env) for rank in self._resident}
        self._first_copy_step = [] if schedule.reduction is None else schedule.reduction.first_copy_step.tolist()
        self._current: list[dict[int, Buffer]] = [{} for _ in self._resident]
        self._filled: deque[tuple[Mapping[int, Buffer], list[tuple[int, int]]]] = deque()
        self._buffer_at: dict[tuple[int, int], Buffer] = {}

    def transfers(self, step: int, rank: int, lane: int) -> list[Transfer]:
        """The transfers of a lane of a rank at a step. Call once per lane and step, in the order of steps."""
        return self._take(step).transfers.get((rank, lane), [])

    def computations(self, step: int, rank: int) -> list[Computation]:
        """The kernel calls of a rank at a step. Call once per rank and step, in the order of steps."""
        return self._take(step).computations.get(rank, [])

    def _take(self, index: int) -> _OpenStep:
        if index not in self._open:
            self._open[index] = self._opened(index)
        opened = self._open[index]
        opened.requests -= 1
        if not opened.requests:
            del self._open[index]
        return opened

    def _opened(self, index: int) -> _OpenStep:
        """The work of a step. Its arrivals are placed last, since its sends and calls use earlier ones."""
        step, opened = self._schedule.steps[index], _OpenStep(self._requests)
        self._drop_oldest()
        task = self._schedule.task
        adds = [] if task is None else [task.gradients_away(call) for call in step.calls]
        targets = self._targets(step, adds)
        messages = self._messages.of_step(index, step)
        for (rank, peer, lane, block), message in zip(step.rows(), messages, strict=True):
            source, target = self._buffer_of(rank, block), targets[peer]
            if self._first_copy_step and index >= self._first_copy_step[block]:
                target = self._current[peer][block] = self._copies[peer]
            source.pending_uses += 1
            target.expect(block)
            overwritten = self._buffer_at.get((peer, self._buffer(index)))
            transfer = Transfer(rank, lane, index, peer, block, message, source, target, overwritten)
            opened.transfers[rank, lane].append(transfer)
        for call, added in zip(step.calls, adds, strict=True):
            opened.computations[call.rank].append(self._computation(index, call, added, targets))
        if self._schedule.buffers is not None:
            self._place(index, step, adds, targets)
        return opened

    def _computation(self, index: int, call: Call, added: Sequence[int], targets: Mapping[int, Buffer]) -> Computation:
        """A call with its buffers; registers its pending uses."""
        assert self._schedule.task is not None, "a schedule with calls has a task"
        reads = {block: self._buffer_of(call.rank, block) for block in self._schedule.task.sides(call)[0].tolist()}
        target = targets[call.rank] if added else None
        overwritten = self._buffer_at.get((call.rank, self._buffer(index))) if added else None
        computation = Computation(index, call, reads, added, target, overwritten)
        for buffer in computation.buffers:
            buffer.pending_uses += 1
        for block in added:
            targets[call.rank].expect(block)
        return computation

    def _buffer(self, index: int) -> int:
        """The index of the buffer for the arrivals of a step."""
        return index % self._schedule.buffers if self._schedule.buffers else -1

    def _buffer_of(self, rank: int, block: int) -> Buffer:
        """The buffer that holds a block at a rank."""
        return self._current[rank].get(block) or self._resident[rank]

    def _targets(self, step: Step, adds: Sequence[Sequence[int]]) -> Mapping[int, Buffer]:
        """The buffers for the arrivals and new gradients of a step, by rank; without buffers the resident ones."""
        if self._schedule.buffers is None:
            return self._resident
        adding = [call.rank for call, added in zip(step.calls, adds, strict=True) if added]
        return {rank: Buffer(self._env) for rank in dict.fromkeys(step.destination.tolist() + adding)}

    def _place(self, index: int, step: Step, adds: Sequence[Sequence[int]], targets: Mapping[int, Buffer]) -> None:
        """Make the buffers of a step current for the blocks that arrive or are computed at it."""
        self._buffer_at |= {(rank, self._buffer(index)): buffer for rank, buffer in targets.items()}
        placed = list(zip(step.destination.tolist(), step.block.tolist(), strict=True))
        placed += [(call.rank, block) for call, added in zip(step.calls, adds, strict=True) for block in added]
        for rank, block in placed:
            self._current[rank][block] = targets[rank]
        self._filled.append((targets, placed))

    def _drop_oldest(self) -> None:
        """Drop the blocks of the oldest buffers, which the next step overwrites."""
        if len(self._filled) == self._schedule.buffers:
            targets, placed = self._filled.popleft()
            for rank, block in placed:
                if self._current[rank].get(block) is targets[rank]:
                    del self._current[rank][block]
