"""Message I/O of one rank: posts messages, waits for them, makes kernel calls and joins, and records times.

It is shared by the per-lane and the per-step executor. When a peer is lost, it is named.
Other errors, such as exhausted memory, are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from runtime.executor.copies import Copies
from runtime.executor.plans import PlannedMessage
from runtime.executor.streams import HostStreams, Mark, Streams
from runtime.executor.transports import LostPeer, Message, Transport, Wait
from runtime.protocol.heartbeat import WORKING
from runtime.protocol.records import Computed, Received, Sent
from tasp_lab.errors import RunError
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import CallRow, Join

Progress = Callable[[int], None]
"""Called when a rank progresses or begins to wait, with the awaited rank or a state of `runtime.protocol.heartbeat`."""


def no_progress(_: int) -> None:
    """No-op progress callback."""


class Strategy(Protocol):
    """An order in which one rank executes its part: `prepare` before the common start of all ranks, then `run`."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


class MessageIO:
    """Posts messages, waits for them, makes kernel calls, and reports lost ranks; records times if it is `timed`."""

    def __init__(
        self,
        rank: int,
        transport: Transport,
        copies: Copies,
        progress: Progress,
        streams: Streams | None = None,
    ) -> None:
        self._rank, self._copies = rank, copies
        self.streams, self.timed = streams or HostStreams(), False
        self._transport, self._progress = transport, None if progress is no_progress else progress
        self._sent: list[tuple[PlannedMessage, Mark]] = []
        self._received: list[tuple[PlannedMessage, Mark]] = []
        self._computed: list[tuple[CallRow, Mark, Mark]] = []
        self._gathered: dict[int, torch.Tensor] = {}
        self._waiting_for: dict[tuple[str, int], int] = {}
        self._computing: dict[int, CallRow] = {}

    def post_receives(self, messages: Sequence[PlannedMessage], channel: int = 0) -> list[Wait]:
        received = [self._message(each, channel) for each in messages]
        try:
            return self._transport.receive(received)
        except LostPeer as error:
            raise self._lost(messages[0], f"posting the receive of {messages[0].blocks} from it", error) from None

    def post_sends(self, messages: Sequence[PlannedMessage], channel: int = 0) -> list[Wait]:
        if self.timed:
            posted = self.streams.mark()
            self._sent += [(each, posted) for each in messages]
        sent = [self._message(each, channel) for each in messages]
        for each, message in zip(messages, sent, strict=True):
            if each.offset == OUTSIDE:
                self._gathered[each.node] = message.data
        try:
            return self._transport.send(sent)
        except LostPeer as error:
            if not messages:
                raise RunError(f"rank {self._rank}: lost a rank ({error})") from None
            raise self._lost(messages[0], f"sending it {messages[0].blocks}", error) from None

    def receive(self, message: PlannedMessage, wait: Wait) -> None:
        """Wait until a message has arrived."""
        self._wait_for("in", message, wait)
        if self.timed:
            self._received.append((message, self.streams.mark()))

    def finish_send(self, message: PlannedMessage, wait: Wait) -> None:
        """Wait until what is sent may be overwritten."""
        self._wait_for("out", message, wait)
        self._gathered.pop(message.node, None)
        if message.given:
            self._copies.given(message.given)

    def join(self, each: Join) -> None:
        """Join what came to a copy at a step."""
        self._copies.join(each)

    def compute(self, row: CallRow) -> None:
        began = self.streams.mark() if self.timed else None
        self._computing[row.lane] = row
        self._report()
        self._copies.compute(row)
        del self._computing[row.lane]
        self._report()
        if began is not None:
            self._computed.append((row, began, self.streams.mark()))

    def sent(self) -> tuple[Sent, ...]:
        return tuple(
            Sent(row.step, row.lane, row.peer, row.block, start_s)
            for message, posted in self._sent
            for start_s in [posted()]
            for row in message.rows
        )

    def received(self) -> tuple[Received, ...]:
        return tuple(
            Received(row.step, row.lane, row.peer, row.block, end_s)
            for message, noticed in self._received
            for end_s in [noticed()]
            for row in message.rows
        )

    def computed(self) -> tuple[Computed, ...]:
        return tuple(
            Computed(row.step, row.kernel, row.block, row.flops, began(), ended())
            for row, began, ended in self._computed
        )

    def _message(self, message: PlannedMessage, channel: int) -> Message:
        return Message(message.peer, message.tag, self._copies.message(message), channel)

    def _wait_for(self, direction: str, message: PlannedMessage, wait: Wait) -> None:
        if self._progress is not None:
            self._waiting_for[direction, message.lane] = message.peer
            self._report()
        try:
            wait()
        except LostPeer as error:
            what = "waiting for {} from it" if direction == "in" else "waiting until it takes {}"
            raise self._lost(message, what.format(message.blocks), error) from None
        if self._progress is not None:
            del self._waiting_for[direction, message.lane]
            self._report()

    def _report(self) -> None:
        """Report progress. A rank that computes is reported as working, even if its lanes wait for a peer."""
        if self._progress is not None:
            waiting_for = list(self._waiting_for.values())
            self._progress(WORKING if self._computing or not waiting_for else waiting_for[0])

    def _lost(self, message: PlannedMessage, what: str, error: LostPeer) -> RunError:
        return RunError(f"rank {self._rank}, step {message.step}: lost rank {message.peer} {what} ({error})")
