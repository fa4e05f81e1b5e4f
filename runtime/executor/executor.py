"""The executor: runs one rank's part of a schedule over a transport and records a timeline.

All copies of a rank lie in one contiguous memory (see `tasp_lab.schedule.buffer_layout`), except those of bound kinds;
after an AllGather it holds the gathered result. Steps are executed by `runtime.executor.per_lane` or
`runtime.executor.per_step`, which wait for exactly what `tasp_lab.schedule.dependencies` says. Parts of sums are joined
as their kind says (`runtime.executor.joins`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.executor.copies import Copies, Work
from runtime.executor.message_io import MessageIO, Progress, Strategy, no_progress
from runtime.executor.per_lane import PerLane
from runtime.executor.per_step import PerStep
from runtime.executor.plans import plan_of
from runtime.executor.step_plans import step_plan
from runtime.executor.streams import Streams, streams_for
from runtime.executor.transports import Transport
from runtime.executor.views import Views
from runtime.linux.host import BusyShare
from runtime.protocol.records import RankRecord
from tasp_lab.errors import RunError
from tasp_lab.schedule.channels import channels
from tasp_lab.schedule.rank_part import CallRow, RankPart, rank_part
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
        self.memory = torch.empty(self.part.memory_bytes, dtype=torch.uint8, device=device)
        self.schedule, self._transport, self._progress = schedule, transport, progress
        self.copies = Copies(schedule, self.part, self.memory, work or _NoWork(), as_bytes)

    def prepare(self, streams: Streams | None = None) -> None:
        """Post the first receives. Once all ranks have done so, every first send has a receiver ready."""
        self._streams = streams or streams_for(self.memory.device)
        self.copies.begin()
        self._message_io = MessageIO(self.part.rank, self._transport, self.copies, self._progress, self._streams)
        self._strategy = self._new_strategy()
        self._strategy.prepare()

    def run(self) -> None:
        """Execute the rank's part once, after `prepare`; times are relative to this call."""
        self._streams.begin()
        self._strategy.run()
        self._streams.finish()

    def run_timed(self) -> RankRecord:
        """As `run`; returns the record of all messages and kernel calls."""
        busy = BusyShare()
        self._message_io.timed = True
        self.run()
        message_io, time_s = self._message_io, self._streams.mark()()
        sent, received, computed = message_io.sent(), message_io.received(), message_io.computed()
        return RankRecord(self.part.rank, time_s, busy.so_far(), sent, received, computed)

    def _new_strategy(self) -> Strategy:
        plan, transport, schedule = plan_of(self.schedule, self.part), self._transport, self.schedule
        if not transport.whole_steps:
            return PerLane(self._message_io, plan, transport.receives_ahead)
        channel_of = channels(schedule) if transport.channels else (0,) * schedule.lanes
        if transport.channels:
            transport.open(max(channel_of, default=0) + 1)
        return PerStep(self._message_io, step_plan(plan, len(schedule.steps), channel_of, not transport.channels))


class _NoWork:
    """For schedules without kernel calls."""

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Views]:
        raise RunError(f"step {row.step}: kernel {row.kernel} is to be called, but no work was given")

    def bound(self, blocks: Sequence[int]) -> Views:
        raise RunError(f"block {blocks[0]} is bound to a tensor of the caller, but no work was given")

    def sent(self, block: int) -> Views:
        return self.bound([block])
