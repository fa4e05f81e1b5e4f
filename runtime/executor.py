"""The executor: runs one rank's part of a schedule over a transport and records what happened.

All blocks of a rank lie in one buffer (see `tasp_lab.rooms`); for AllGather it ends as the gathered result. Where
blocks are sums, their bytes are numbers modulo 256, which add up to the same in any order. How the steps are walked is
in `runtime.walk_by_lanes` and `runtime.walk_by_steps`, what kernel calls do in `runtime.layer` and `runtime.trials`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.host import BusyShare
from runtime.records import RankRecord
from runtime.streams import Streams, streams_for
from runtime.traffic import Compute, Join, Progress, Traffic, Walk
from runtime.transport import Message, Transport
from runtime.walk_by_lanes import WalkByLanes
from runtime.walk_by_steps import WalkBySteps
from tasp_lab.errors import RunError
from tasp_lab.rooms import CallRow, RankPart, Row, Sum, rank_part
from tasp_lab.schedule import Schedule


def no_progress(_: int) -> None:
    """Tell nobody."""


class Executor:
    """Runs a schedule as one rank. Raises `RunError` that names the rank that was lost, the step and the block.

    Parameters
    ----------
    schedule, rank : what to run, and as whom.
    transport : how messages are sent.
    compute : makes the kernel calls, if there are any.
    join : adds up what comes together of a gradient, or of a block that is a sum, if not its bytes.
    device : where the buffer lives.
    progress : told whom the rank waits for.
    part : the rank's part of the schedule, if it is known already.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        compute: Compute | None = None,
        join: Join | None = None,
        device: torch.device | str = "cpu",
        progress: Progress = no_progress,
        part: RankPart | None = None,
    ) -> None:
        self.part = part or rank_part(schedule, rank)
        self.buffer = torch.empty(self.part.buffer_bytes, dtype=torch.uint8, device=device)
        self.schedule, self._transport, self._progress = schedule, transport, progress
        self._sizes: list[int] = schedule.block_bytes.tolist()
        usual = _join_nothing if schedule.reduction is None else self._adding()
        self._compute, self._join = compute or _compute_nothing, join or usual

    def block(self, block: int, offset: int) -> torch.Tensor:
        """The bytes of a block that lies at an offset of the buffer."""
        return self.buffer[offset : offset + self._sizes[block]]

    def reads(self, row: CallRow) -> torch.Tensor:
        """The bytes of all blocks in the buffer that a kernel call reads."""
        return self.buffer[row.offset : row.offset + row.size_bytes]

    def prepare(self, streams: Streams | None = None) -> None:
        """Post the receives that come first; when all ranks have, each finds a receiver ready for what it sends."""
        self._streams = streams or streams_for(self.buffer.device)
        work = self._messages(), self._compute, self._join
        self._traffic = Traffic(self.part, self._transport, *work, self._progress, self._streams)
        self._walk = self._new_walk()
        self._walk.prepare()

    def run(self) -> None:
        """Execute the rank's part once, after `prepare`; times count from the call."""
        self._streams.begin()
        self._walk.run()
        self._streams.finish()

    def run_timed(self) -> RankRecord:
        """As `run`, and say what happened when."""
        busy = BusyShare()
        self.run()
        traffic, time_s = self._traffic, self._streams.mark()()
        sent, received, computed = traffic.sent(), traffic.received(), traffic.computed()
        return RankRecord(self.part.rank, time_s, busy.so_far(), sent, received, computed)

    def _new_walk(self) -> Walk:
        schedule, transport = self.schedule, self._transport
        if transport.whole_steps:
            return WalkBySteps(self._traffic, schedule.rooms, len(schedule.steps))
        return WalkByLanes(self._traffic, schedule.rooms, transport.receives_ahead)

    def _messages(self) -> Callable[[Row], Message]:
        """How a row becomes a message; holds the buffer, not the executor, so that no cycle keeps its memory."""
        lanes, buffer, sizes = self.schedule.lanes, self.buffer, self._sizes

        def message(row: Row) -> Message:
            return Message(row.peer, row.step * lanes + row.lane, buffer[row.offset : row.offset + sizes[row.block]])

        return message

    def _adding(self) -> Join:
        """How what has landed is added to its block; holds the buffer only, as `_messages` does."""
        buffer, sizes = self.buffer, self._sizes

        def add(each: Sum) -> None:
            size = sizes[each.block]
            for landing in each.landings:
                buffer[each.offset : each.offset + size].add_(buffer[landing : landing + size])

        return add


def _join_nothing(each: Sum) -> None:
    raise RunError(f"step {each.since}: was given nothing to add up gradient block {each.block} with")


def _compute_nothing(row: CallRow) -> None:
    raise RunError(f"step {row.step}: rank {row.call.rank} was given nothing to compute with")
