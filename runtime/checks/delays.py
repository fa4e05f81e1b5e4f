"""Runs of a schedule in which every message and kernel call is delayed at random, checked bit for bit.

On a GPU a delay is a kernel that spins (`torch.cuda._sleep`) in the stream that is current when the message is posted
or the call is made: streams of communication and of computation get their own. A missing dependency between streams
then shows as wrong bytes. On a host a delay is a sleep of the rank, so ranks and lanes overtake each other.

Contents are test patterns (`runtime.trials.patterns`). What a kernel call reads is copied in its stream and compared
after the run, so that the host does not wait in between.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Sequence

import torch

from runtime.checks.watch import CheckedGroup
from runtime.executor.executor import Executor
from runtime.executor.messages import Message, Transport, Wait
from runtime.executor.streams import Streams, streams_for
from runtime.executor.sums import Parts
from runtime.executor.views import Views
from runtime.trials.patterns import PatternWork, fill, verify, verify_reads
from tasp_lab.schedule.rank_part import CallRow, RankPart
from tasp_lab.schedule.schedule import Schedule

LONGEST_CYCLES = 400_000
"""About 0.2 ms on a GPU of 2 GHz, as long as a message of 64 MiB."""

LONGEST_S = 0.001
"""On a host."""

SHARE = 0.5
"""The share of operations that are delayed."""

Delay = Callable[[], None]


def random_delays(seed: int, device: torch.device) -> Delay:
    """A function that delays the current stream, or the host, at random."""
    drawn = random.Random(seed)

    def delay() -> None:
        if drawn.random() >= SHARE:
            return
        if device.type == "cuda":
            torch.cuda._sleep(drawn.randrange(LONGEST_CYCLES))  # type: ignore[no-untyped-call]
        else:
            time.sleep(drawn.random() * LONGEST_S)

    return delay


def no_delay() -> None:
    """No-op delay."""


class DelayedTransport:
    """A transport whose calls and waits are delayed; see `runtime.executor.messages.Transport`."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.delay = transport, no_delay
        self.receives_ahead, self.whole_steps = transport.receives_ahead, transport.whole_steps
        self.channels, self.short_bytes = transport.channels, transport.short_bytes
        self.waited_on_gpu = transport.waited_on_gpu

    def take(self, schedule: Schedule, part: RankPart, device: torch.device) -> torch.Tensor:
        return self._transport.take(schedule, part, device)

    @property
    def key(self) -> Hashable:
        return self._transport.key

    def give_back(self, memory: torch.Tensor) -> None:
        self._transport.give_back(memory)

    def open(self, channels: int, memory: torch.Tensor, streams: Streams) -> None:
        self._transport.open(channels, memory, streams)

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        self.delay()
        return [self._delayed(each) for each in self._transport.receive(messages)]

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        self.delay()
        return [self._delayed(each) for each in self._transport.send(messages)]

    def _delayed(self, wait: Wait) -> Wait:
        def delayed() -> None:
            wait()
            self.delay()

        return delayed


class DelayedWork(PatternWork):
    """Kernel calls that copy what they read, late, and add the parts that the task says."""

    def __init__(self, schedule: Schedule, rank: int, device: torch.device) -> None:
        super().__init__(schedule, rank, str(device))
        self.delay: Delay = no_delay
        self._own_rank = rank
        self._adds: dict[int, list[Parts]] = {}
        self._reads: list[tuple[CallRow, list[Views]]] = []

    def expect(self, rows: Sequence[CallRow], device: torch.device) -> None:
        """Prepare what the calls of a run add, and forget what was read before."""
        self._reads = []
        if not self._adds:
            for row in rows:
                parts = zip(row.adds, self.patterns.added(self._own_rank, row), strict=True)
                self._adds[row.operation] = [Parts((place.block,), [each.to(device)]) for place, each in parts]

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        self.delay()
        self._reads.append((row, [[each.clone() for each in operand] for operand in operands]))
        return self._adds[row.operation]

    def verify_reads(self) -> None:
        """Check what all calls of the run have read. Raises `RunError`."""
        for row, operands in self._reads:
            verify_reads(self._own_rank, self.patterns, row, operands)


class DelayedRuns:
    """Runs of a schedule over a transport on this rank."""

    def __init__(self, group: CheckedGroup, schedule: Schedule, transport: Transport) -> None:
        self._group, self._transport = group, DelayedTransport(transport)
        self._work = DelayedWork(schedule, group.rank, group.device)
        self._executor = Executor(
            schedule, group.rank, self._transport, self._work, group.device, as_bytes=True
        )  # fmt: skip

    def run(self, seed: int | None) -> None:
        """One run, with random delays unless the seed is None, and its check. Raises `RunError`."""
        device = self._group.device
        seeded = None if seed is None else random_delays(seed * self._group.world_size + self._group.rank, device)
        delay = seeded or no_delay
        fill(self._executor, self._work)
        self._work.expect(self._executor.part.calls, device)
        self._work.delay = self._transport.delay = delay
        self._executor.prepare(streams_for(device, timed=True))
        self._group.barrier()
        delay()
        self._executor.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        self._work.verify_reads()
        verify(self._executor, self._work)
