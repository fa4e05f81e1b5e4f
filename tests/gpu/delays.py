"""Runs of a schedule in which every message and kernel call is delayed at random, checked bit for bit.

On a GPU a delay is a kernel that spins (`torch.cuda._sleep`) in the stream that is current when the message is posted
or the call is made: streams of communication and of computation get their own. A missing dependency between streams
then shows as wrong bytes. On a host a delay is a sleep of the rank, so ranks and lanes overtake each other.

Contents are test patterns (`runtime.trials.patterns`). The operands of a kernel call are copied in its stream and
compared after the run, so that the host does not wait in between.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from runtime.executor.executor import Executor
from runtime.executor.messages import Message, Post, Transport, Wait
from runtime.executor.streams import streams_for
from runtime.executor.sums import Parts
from runtime.executor.views import Views
from runtime.ranks.watch import CheckedGroup
from runtime.trials.patterns import PatternTrial, PatternWork
from tasp_lab.schedule.rank_part import CallRow
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


def delay_messages(transport: Transport, delay: Delay) -> None:
    """From now on delay the calls and waits of a transport."""

    bind = transport.bind

    def bind_late(receives: Sequence[Message], sends: Sequence[Message]) -> Post:
        post = bind(receives, sends)

        def post_late() -> Sequence[Wait]:
            delay()
            return [partial(wait_longer, wait) for wait in post()]

        return post_late

    def wait_longer(wait: Wait) -> None:
        wait()
        delay()

    transport.bind = bind_late  # type: ignore[method-assign]


class DelayedWork(PatternWork):
    """Delayed kernel calls that copy their operands and add the parts that the task defines."""

    def __init__(self, schedule: Schedule, rank: int, device: torch.device, delay: Delay) -> None:
        super().__init__(schedule, rank, str(device))
        self._delay = delay
        self._adds: dict[int, list[Parts]] = {}
        self._reads: list[tuple[CallRow, list[Views]]] = []

    def expect(self, rows: Sequence[CallRow]) -> None:
        """Prepare what the calls of a run add, and forget what was read before."""
        self._reads = []
        self._adds = self._adds or {row.operation: self.added(row) for row in rows}

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        self._delay()
        self._reads.append((row, [[each.clone() for each in operand] for operand in operands]))
        return self._adds[row.operation]

    def verify_all_reads(self) -> None:
        """Check what all calls of the run have read. Raises `RunError`."""
        for row, operands in self._reads:
            self.verify_reads(row, operands)


class DelayedTrial(PatternTrial):
    """A trial of one rank whose calls are delayed, and its checks after the run."""

    def __init__(self, schedule: Schedule, rank: int, transport: Transport, device: torch.device, delay: Delay) -> None:
        delay_messages(transport, delay)
        self.work = DelayedWork(schedule, rank, device, delay)
        self.executor = Executor(schedule, rank, transport, self.work, device, as_bytes=True)

    def set_up(self, checked: bool = True) -> None:
        super().set_up(checked)
        self.work.expect(self.executor.part.calls)

    def check(self) -> None:
        self.work.verify_all_reads()
        super().check()


class DelayedRuns:
    """Runs of a schedule over a transport on this rank."""

    def __init__(self, group: CheckedGroup, schedule: Schedule, transport: Transport) -> None:
        self._group, self._delay = group, _no_delay
        self._trial = DelayedTrial(schedule, group.rank, transport, group.device, lambda: self._delay())

    def run(self, seed: int | None) -> None:
        """One run, with random delays unless the seed is None, and its check. Raises `RunError`."""
        device, executor = self._group.device, self._trial.executor
        self._delay = _no_delay
        self._trial.set_up()
        if seed is not None:
            self._delay = random_delays(seed * self._group.world_size + self._group.rank, device)
        executor.prepare(streams_for(device, timed=True))
        self._group.barrier()
        self._delay()
        executor.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        self._trial.check()


def _no_delay() -> None:
    """No-op."""
