"""Message I/O of one rank: posts messages, waits for them, makes kernel calls and joins, and records times.

It is shared by the per-lane and the per-step executor. When a peer is lost, it is named.
Other errors, such as exhausted memory, are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from runtime.executor.copies import Copies
from runtime.executor.messages import LostPeer, LostRankError, Message, Transport, Wait
from runtime.executor.plans import PlannedMessage
from runtime.executor.streams import Mark, Streams
from runtime.protocol.heartbeat import WORKING
from runtime.protocol.records import Computed, Moved
from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.rank_part import CallRow

Progress = Callable[[int], None]
"""Called when a rank progresses or begins to wait, with the awaited rank or a state of `runtime.protocol.heartbeat`."""


_WAITS = {"in": "waiting for {} from it", "out": "waiting until it takes {}"}


def no_progress(_: int) -> None:
    """No-op progress callback."""


class Strategy(Protocol):
    """An order in which one rank executes its part: `prepare` before the common start of all ranks, then `run`."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


class MessageIO:
    """Posts messages, waits for them, makes kernel calls, and reports lost ranks; records times if it is `timed`.

    It serves all runs of an executor, as its messages are the same in each.
    """

    def __init__(self, rank: int, transport: Transport, copies: Copies, progress: Progress) -> None:
        self._rank, self.copies = rank, copies
        self.transport, self._progress = transport, None if progress is no_progress else progress
        self._posted: dict[int, tuple[object, list[Message]]] = {}
        self._gathered: dict[int, torch.Tensor] = {}
        self._waiting_for: dict[tuple[str, int], int] = {}
        self._computing: dict[int, CallRow] = {}
        self.begin(Streams(), timed=False)

    def begin(self, streams: Streams, timed: bool) -> None:
        """Begin a run: nothing has happened yet."""
        self.streams, self.timed = streams, timed
        self._is_silent = not timed and self._progress is None
        if timed:
            self._sent: list[tuple[PlannedMessage, Mark]] = []
            self._received: list[tuple[PlannedMessage, Mark]] = []
            self._computed: list[tuple[CallRow, Mark, Mark]] = []

    def post_receives(self, messages: Sequence[PlannedMessage], channel: int = 0) -> list[Wait]:
        kept = self._posted.get(id(messages))
        try:
            return self.transport.receive(kept[1] if kept else self._messages(messages, channel))
        except LostPeer as error:
            lost = messages[error.number]
            raise self._lost(lost, f"posting the receive of {lost.blocks} from it", error) from None

    def post_sends(self, messages: Sequence[PlannedMessage], channel: int = 0) -> list[Wait]:
        if self.timed:
            posted = self.streams.mark()
            self._sent += [(each, posted) for each in messages]
        kept = self._posted.get(id(messages))
        try:
            return self.transport.send(kept[1] if kept else self._messages(messages, channel))
        except LostPeer as error:
            if not messages:
                raise LostRankError(f"rank {self._rank}: lost a rank ({error})", error.is_late) from None
            lost = messages[error.number]
            raise self._lost(lost, f"sending it {lost.blocks}", error) from None

    def wait_for_all(self, direction: str, waits: Mapping[int, Wait], messages: Sequence[PlannedMessage]) -> None:
        """Wait until messages have arrived (``in``) or may be overwritten (``out``), in their order.

        `waits` are by node.
        """
        before, progress, notes_arrivals = None, self._progress, self.timed and direction == "in"
        for each in messages:
            wait = waits[each.node]
            if progress is not None:
                self._waiting_for[direction, each.lane] = each.peer
                self._report()
            if wait is not before:  # messages of a batch have one
                try:
                    wait()
                except LostPeer as error:
                    raise self._lost(each, _WAITS[direction].format(each.blocks), error) from None
                before = wait
            if progress is not None:
                del self._waiting_for[direction, each.lane]
                self._report()
            if notes_arrivals:
                self._received.append((each, self.streams.mark()))
            if direction == "out" and (each.given or each.offset == OUTSIDE):
                self._finished(each)

    def _finished(self, message: PlannedMessage) -> None:
        if message.offset == OUTSIDE:
            self._gathered.pop(message.node, None)
        if message.given:
            self.copies.given(message.given)

    def compute_all(self, rows: Sequence[CallRow]) -> None:
        """Make several kernel calls."""
        if self._is_silent:
            for row in rows:
                self.copies.compute(row)
            return
        for row in rows:
            began = self.streams.mark() if self.timed else None
            self._computing[row.lane] = row
            self._report()
            self.copies.compute(row)
            del self._computing[row.lane]
            self._report()
            if began is not None:
                self._computed.append((row, began, self.streams.mark()))

    def records(self) -> tuple[tuple[Moved, ...], tuple[Moved, ...], tuple[Computed, ...]]:
        """What was sent, received and computed in a timed run."""
        sent, received = (
            tuple(Moved(each.step, each.lane, each.peer, each.block_numbers, mark()) for each, mark in moved)
            for moved in (self._sent, self._received)
        )
        calls = [(row, began(), ended()) for row, began, ended in self._computed]
        computed = [Computed(row.step, row.kernel, row.block, row.flops, *times_s) for row, *times_s in calls]
        return sent, received, tuple(computed)

    def _messages(self, messages: Sequence[PlannedMessage], channel: int) -> list[Message]:
        """Messages that are posted together; they are kept for later runs unless one is gathered in each.

        They are kept with what they are made from, whose number is then that of nothing else.
        """
        found = [Message(each.peer, each.tag, self.copies.message(each), channel, each) for each in messages]
        gathered = {each.node: made.data for each, made in zip(messages, found, strict=True) if each.is_gathered}
        self._gathered |= gathered
        if not gathered:
            self._posted[id(messages)] = messages, found
        return found

    def _report(self) -> None:
        """Report progress. A rank that computes is reported as working, even if its lanes wait for a peer."""
        if self._progress is not None:
            waiting_for = list(self._waiting_for.values())
            self._progress(WORKING if self._computing or not waiting_for else waiting_for[0])

    def _lost(self, message: PlannedMessage, what: str, error: LostPeer) -> LostRankError:
        text = f"rank {self._rank}, step {message.step}: lost rank {message.peer} {what} ({error})"
        return LostRankError(text, error.is_late)
