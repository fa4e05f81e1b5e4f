"""The executor: runs one rank's part of a schedule over a transport and records a timeline.

All copies of a rank lie in one contiguous memory (see `tasp_lab.schedule.buffer_layout`), except those of bound kinds;
after an AllGather it holds the gathered result. Steps are executed by `runtime.executor.per_lane` or
`runtime.executor.per_step`, which wait for exactly the dependencies of `tasp_lab.schedule.dependencies`. Parts of sums
are joined as their kind defines (`runtime.executor.copies`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch

from runtime.executor.actions import Actions, Progress, no_progress
from runtime.executor.copies import Action, Copies, Work
from runtime.executor.messages import Transport
from runtime.executor.per_lane import PerLane
from runtime.executor.per_step import PerStep, step_plan
from runtime.executor.plans import Plan, lanes_are_alike, plan_of
from runtime.executor.streams import Streams, streams_for
from runtime.linux import BusyShare, clock_name
from runtime.protocol.records import RankRecord
from tasp_lab.schedule.dependencies import channels
from tasp_lab.schedule.rank_part import RankPart, rank_part
from tasp_lab.schedule.schedule import Schedule


class Executor:
    """Runs a schedule as one rank. Raises `RunError` that names the rank that was lost, the step and the block.

    Parameters
    ----------
    schedule, rank : the schedule, and the rank to run.
    transport : how messages are sent.
    work : makes the kernel calls and has the tensors of bound kinds; required if the schedule has any.
    device : device of the memory.
    progress : called with the rank that this rank waits for.
    part : the rank's part of the schedule; derived from the schedule if None.
    as_bytes : whether blocks of all kinds are plain bytes, and sums are added byte by byte modulo 256.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        work: Work | None = None,
        device: torch.device | str = "cpu",
        progress: Progress = no_progress,
        part: RankPart | None = None,
        as_bytes: bool = False,
    ) -> None:
        self.part = part or rank_part(schedule, rank)
        self.memory = transport.take(schedule, self.part, torch.device(device))
        self.schedule, self._transport = schedule, transport
        self.copies = Copies(schedule, self.part, self.memory, work or Work(), as_bytes)
        self._progress = progress
        self._made_for: tuple[bool, bool, bool] | None = None

    def reuse(self, transport: Transport, work: Work | None) -> None:
        """Run from now on for another transport of the same `key`, and with other tensors; None: with none at all."""
        self._transport.renew(transport)
        self.copies.work = work or Work()

    def give_back(self) -> None:
        """Give the memory back to the transport; there are no further runs."""
        self._transport.give_back(self.memory)

    def prepare(self, streams: Streams | None = None, timed: bool = False) -> None:
        """Post the first receives. Once all ranks have done so, every first send has a receiver ready.

        `timed`: prepare also what `run_timed` needs, so that nothing is left to do between a barrier and the start.
        """
        self.streams = streams or streams_for(self.memory.device)
        self.copies.begin()
        self.actions.begin(self.streams, timed)
        if self._transport.whole_steps:
            self._transport.open(self._channel_count, self.memory, self.streams)
        kind = timed, self.streams.queues, torch.are_deterministic_algorithms_enabled()
        if self._made_for != kind:
            self.strategy, self._made_for = self._made(), kind
        self.strategy.prepare()
        if timed:
            self._busy, self._clock = BusyShare(), clock_name()

    def run(self) -> None:
        """Execute the rank's part once, after `prepare`; times are relative to this call.

        Kernels compute in the dtypes of their tensors, with `torch.autocast` off: states stay in float32.
        """
        self.streams.begin()
        kind = self.memory.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                self.strategy.run()
        else:
            self.strategy.run()
        self.streams.finish()

    def run_timed(self) -> RankRecord:
        """As `run`, after ``prepare(timed=True)``; returns the record of all messages and kernel calls.

        On a GPU the end is marked in its stream before the host waits for it.
        """
        began_s = time.monotonic()
        self.run()
        return self.record(began_s)

    def record(self, began_s: float) -> RankRecord:
        """The record of a run that has ended, which began at `began_s` of `time.monotonic`."""
        time_s, busy_share = self.streams.mark()(), self._busy.so_far()
        return RankRecord(self.part.rank, self._clock, began_s, time_s, busy_share, *self.actions.records())

    @cached_property
    def actions(self) -> Actions:
        """What makes the actions of this rank."""
        return Actions(self.part.rank, self._transport, self.copies, self._progress)

    @cached_property
    def calls(self) -> Sequence[Action]:
        """All kernel calls, on whatever is in the memory."""
        return [self.copies.call(row) for row in self.part.calls]

    def _made(self) -> PerStep | PerLane:
        """One for all runs, as they are alike.

        Lanes add parts in the order in which these arrive, so deterministic algorithms go by steps.
        """
        plan, transport = plan_of(self.schedule, self.part), self._transport
        by_steps = transport.whole_steps or torch.are_deterministic_algorithms_enabled()
        ahead = 0 if transport.whole_steps else transport.receives_ahead
        if not by_steps and not _one_thread_does(plan, transport.short_bytes):
            return PerLane(self.actions, plan, ahead, bool(transport.short_bytes) and lanes_are_alike(plan))
        every_step, prompt = transport.whole_steps and not transport.channels, self.streams.queues
        steps = len(self.schedule.steps)
        return PerStep(self.actions, step_plan(plan, steps, self._channels, every_step, prompt, ahead))

    @cached_property
    def _channel_count(self) -> int:
        return max(self._channels, default=0) + 1

    @cached_property
    def _channels(self) -> tuple[int, ...]:
        """The channel of each lane."""
        return channels(self.schedule) if self._transport.channels else (0,) * self.schedule.lanes


@lru_cache(maxsize=16)
def _one_thread_does(plan: Plan, short_bytes: int) -> bool:
    """Whether one thread executes a rank's part as fast as a thread per lane, and one for calls.

    No call may be longer than handing over to another thread, as its thread does not wait for messages meanwhile. Then
    lanes delay each other only if they are unlike, by no more than handing over if their messages are short.
    """
    if not short_bytes or max((row.flops for row in plan.calls), default=0) > SHORT_FLOPS:
        return False
    return lanes_are_alike(plan) or max(each.size_bytes for each in plan.sends + plan.receives) <= short_bytes


SHORT_FLOPS = 1 << 18
"""A kernel call that takes a core some 10 us at most."""
