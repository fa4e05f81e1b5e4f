"""The executor: runs one rank's part of a schedule over a transport and records a timeline.

All blocks of a rank share one contiguous memory (see `tasp_lab.schedule.buffer_layout`); after an AllGather it holds
the gathered result. Blocks that are sums are added byte by byte modulo 256, so the result does not depend on the order.
Steps are executed by `runtime.executor.per_lane` or `runtime.executor.per_step`; kernel calls are implemented in
`runtime.sequence_parallel.forward` and `runtime.trials.workloads`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.executor.message_io import Compute, Join, MessageIO, Progress, Strategy
from runtime.executor.per_lane import PerLane
from runtime.executor.per_step import PerStep
from runtime.executor.streams import Streams, streams_for
from runtime.executor.transports import Message, Transport
from runtime.linux.host import BusyShare
from runtime.protocol.records import RankRecord
from tasp_lab.errors import RunError
from tasp_lab.schedule.buffer_layout import CallRow, RankPart, Row, Sum, rank_part
from tasp_lab.schedule.schedule import Schedule


def no_progress(_: int) -> None:
    """No-op progress callback."""


class Executor:
    """Runs a schedule as one rank. Raises `RunError` that names the rank that was lost, the step and the block.

    Parameters
    ----------
    schedule, rank : the schedule, and the rank to run.
    transport : how messages are sent.
    compute : makes the kernel calls; required if the schedule has any.
    join : accumulates the contributions to a gradient or to a block that is a sum; the default adds bytes.
    device : device of the memory.
    progress : called with the rank that this rank waits for.
    part : the rank's part of the schedule; derived from the schedule if None.
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
        self.memory = torch.empty(self.part.memory_bytes, dtype=torch.uint8, device=device)
        self.schedule, self._transport, self._progress = schedule, transport, progress
        self._sizes: list[int] = schedule.block_bytes.tolist()
        default_join = _no_join if schedule.reduction is None else self._byte_sum()
        self._compute, self._join = compute or _no_compute, join or default_join

    def block(self, block: int, offset: int) -> torch.Tensor:
        """The bytes of a block at an offset in the memory."""
        return self.memory[offset : offset + self._sizes[block]]

    def reads(self, row: CallRow) -> torch.Tensor:
        """The bytes of all blocks that a kernel call reads, which are contiguous."""
        return self.memory[row.offset : row.offset + row.size_bytes]

    def prepare(self, streams: Streams | None = None) -> None:
        """Post the first receives. Once all ranks have done so, every first send has a receiver ready."""
        self._streams = streams or streams_for(self.memory.device)
        work = self._messages(), self._compute, self._join
        self._message_io = MessageIO(self.part, self._transport, *work, self._progress, self._streams)
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
        self.run()
        message_io, time_s = self._message_io, self._streams.mark()()
        sent, received, computed = message_io.sent(), message_io.received(), message_io.computed()
        return RankRecord(self.part.rank, time_s, busy.so_far(), sent, received, computed)

    def _new_strategy(self) -> Strategy:
        schedule, transport = self.schedule, self._transport
        if transport.whole_steps:
            return PerStep(self._message_io, schedule.buffers, len(schedule.steps))
        return PerLane(self._message_io, schedule.buffers, transport.receives_ahead)

    def _messages(self) -> Callable[[Row], Message]:
        """The function from a row to its message. It references the memory only: a cycle would delay freeing it."""
        lanes, memory, sizes = self.schedule.lanes, self.memory, self._sizes

        def message(row: Row) -> Message:
            return Message(row.peer, row.step * lanes + row.lane, memory[row.offset : row.offset + sizes[row.block]])

        return message

    def _byte_sum(self) -> Join:
        """A join that adds staging buffers to their block; references the memory only, as `_messages` does."""
        memory, sizes = self.memory, self._sizes

        def add(each: Sum) -> None:
            size = sizes[each.block]
            for staging in each.staging_offsets:
                memory[each.offset : each.offset + size].add_(memory[staging : staging + size])

        return add


def _no_join(each: Sum) -> None:
    raise RunError(f"step {each.since}: gradient block {each.block} must be summed, but no join function was given")


def _no_compute(row: CallRow) -> None:
    raise RunError(f"step {row.step}: rank {row.call.rank} has a kernel call, but no compute function was given")
