"""The actions of a rank's plan as functions without arguments, made once and called in every run.

    post = actions.post(receives, sends, channel)    # looks up tensors, peers and tags
    post()                                           # in each run: posts them

An action names the peer that is lost; other errors, such as exhausted memory, are passed on. `Actions` refers to none
of the functions that it makes: without a cycle, the memory of an executor that is dropped is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from runtime.executor.copies import Action, Copies
from runtime.executor.messages import LostPeer, LostRankError, Message, Post, Transport, Wait, lost_peer, no_wait
from runtime.executor.plans import PlannedMessage
from runtime.executor.streams import Mark, Streams
from runtime.protocol.heartbeat import WORKING
from runtime.protocol.records import Computed, Moved
from tasp_lab.schedule.rank_part import CallRow, Join

Progress = Callable[[int], None]
"""Called when a rank progresses or begins to wait, with the awaited rank or a state of `runtime.protocol.heartbeat`."""

_WAITS = {"in": "waiting for {} from it", "out": "waiting until it takes {}"}


def no_progress(_: int) -> None:
    """No-op progress callback."""


class Actions:
    """Makes the actions of one rank, and has what they share in a run: waits, streams and, if it is `timed`, records.

    `waits` are by node. They are kept until the next run replaces them (`messages.Wait`), on a GPU until they are over,
    as they hold tensors. Actions are made in the order in which they run.
    """

    def __init__(self, rank: int, transport: Transport, copies: Copies, progress: Progress) -> None:
        self._rank, self.transport, self.copies = rank, transport, copies
        self._progress = None if progress is no_progress else progress
        self.waits: dict[int, Wait] = {}
        self._take = self.waits.pop if copies.memory.is_cuda else self.waits.__getitem__
        self._batches: dict[int, list[int]] = {}  # by node: that of the one wait of its batch, nothing once it is over
        self._gathered: dict[int, torch.Tensor] = {}
        self._waiting_for: dict[tuple[str, int], int] = {}
        self._computing: dict[int, CallRow] = {}
        self.begin(Streams(), timed=False)

    def begin(self, streams: Streams, timed: bool) -> None:
        """Begin a run: nothing has happened yet. Actions are for runs that are all timed, or all not."""
        self.streams, self.timed = streams, timed
        if timed:
            self._sent: list[tuple[PlannedMessage, Mark]] = []
            self._received: list[tuple[PlannedMessage, Mark]] = []
            self._computed: list[tuple[CallRow, Mark, Mark]] = []

    def post(self, receives: Sequence[PlannedMessage], sends: Sequence[PlannedMessage], channel: int = 0) -> Action:
        """Post messages together; those that are gathered first are bound to new bytes in every run."""
        planned, count, waits = (*receives, *sends), len(receives), self.waits
        nodes, timed, transport = [each.node for each in planned], self.timed, self.transport
        fixed = [None if each.is_gathered else self._message(each, channel) for each in planned]
        if transport.waits_once:
            nodes = nodes[:1]
            self._batches |= dict.fromkeys([each.node for each in planned], nodes.copy())
        known = [each for each in fixed if each is not None]
        bound = transport.bind(known[:count], known[count:]) if len(known) == len(planned) else None

        def bind() -> Post:
            made = [each or self._message(plan, channel) for each, plan in zip(fixed, planned, strict=True)]
            return transport.bind(made[:count], made[count:])

        def post() -> None:
            if timed:
                posted = self.streams.mark()
                self._sent += [(each, posted) for each in sends]
            try:
                waits.update(zip(nodes, (bound or bind())()))  # noqa: B905  # strict costs as much as a wait
            except LostPeer as error:
                if not planned:
                    raise LostRankError(f"rank {self._rank}: lost a rank ({error})", error.is_late) from None
                lost = planned[error.number]
                how = "posting the receive of {} from it" if error.number < count else "sending it {}"
                self._raise_lost(lost, how, error)

        return post

    def _message(self, planned: PlannedMessage, channel: int) -> Message:
        data = self.copies.message(planned)
        if planned.is_gathered:
            self._gathered[planned.node] = data
        return Message(planned.peer, planned.tag, data, channel, planned)

    def wait(self, direction: str, messages: Sequence[PlannedMessage]) -> Action:
        """Wait until messages have arrived (``in``) or may be overwritten (``out``), in their order.

        `no_wait` if nothing is left to do, as each was posted together with one that is awaited before.
        """
        waits, take, on_gpu = self.waits, self._take, self.copies.memory.is_cuda
        given = [block for each in messages for block in each.given] if direction == "out" else []
        gathered = [each.node for each in messages if each.is_gathered and direction == "out"]
        awaited = [(self._awaited(each.node), each) for each in messages]
        one = self._wait_for_one(direction) if self._progress is not None or self.timed else None
        if one is None:
            awaited = [(node, each) for node, each in awaited if node is not None]
            if not (awaited or given or gathered):
                return no_wait

        def wait() -> None:
            try:
                for node, message in awaited:
                    if one is not None:
                        one(node, message)
                    else:
                        take(node)()  # type: ignore[arg-type]
            except (LostPeer, RuntimeError) as error:
                if lost := lost_peer(error, on_gpu):
                    self._raise_lost(message, _WAITS[direction], lost)
                raise
            if given:
                self.copies.given(given)
            for each in gathered:  # with its bytes
                del self._gathered[each]
                waits.pop(each, None)

        return wait

    def _awaited(self, node: int) -> int | None:
        """The node whose wait is that of a message; None if it has been awaited."""
        batch = self._batches.get(node)
        if batch is None:
            return node
        return batch.pop() if batch else None

    def _wait_for_one(self, direction: str) -> Callable[[int | None, PlannedMessage], None]:
        """Wait for a message, and report that, and note its time."""
        take, reports, notes_arrivals = self._take, self._progress is not None, self.timed and direction == "in"

        def wait(node: int | None, message: PlannedMessage) -> None:
            if reports:
                self._waiting_for[direction, message.lane] = message.peer
                self._report()
            if node is not None:
                take(node)()
            if reports:
                del self._waiting_for[direction, message.lane]
                self._report()
            if notes_arrivals:
                self._received.append((message, self.streams.mark()))

        return wait

    def compute(self, rows: Sequence[CallRow]) -> Action:
        """Make kernel calls."""
        calls, timed = [(row, self.copies.call(row)) for row in rows], self.timed
        if not timed and self._progress is None:
            return calls[0][1] if len(calls) == 1 else lambda: [call() for _, call in calls]

        def compute() -> None:
            for row, call in calls:
                began = self.streams.mark() if timed else None
                self._computing[row.lane] = row
                self._report()
                call()
                del self._computing[row.lane]
                self._report()
                if began is not None:
                    self._computed.append((row, began, self.streams.mark()))

        return compute

    def join(self, joins: Sequence[Join]) -> Action:
        """Join all that came to some copies."""
        return self.copies.join(joins)

    def records(self) -> tuple[tuple[Moved, ...], tuple[Moved, ...], tuple[Computed, ...]]:
        """What was sent, received and computed in a timed run."""
        sent, received = (
            tuple(Moved(each.step, each.lane, each.peer, each.block_numbers, mark()) for each, mark in moved)
            for moved in (self._sent, self._received)
        )
        calls = [(row, began(), ended()) for row, began, ended in self._computed]
        computed = [Computed(row.step, row.kernel, row.block, row.flops, *times_s) for row, *times_s in calls]
        return sent, received, tuple(computed)

    def _report(self) -> None:
        """Report progress. A rank that computes is reported as working, even if its lanes wait for a peer."""
        if self._progress is not None:
            waiting_for = list(self._waiting_for.values())
            self._progress(WORKING if self._computing or not waiting_for else waiting_for[0])

    def _raise_lost(self, message: PlannedMessage, how: str, error: LostPeer) -> NoReturn:
        what = f"lost rank {message.peer} {how.format(message.blocks)}"
        raise LostRankError(f"rank {self._rank}, step {message.step}: {what} ({error})", error.is_late) from None
