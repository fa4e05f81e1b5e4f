"""A strict transport between ranks of one process, which are threads or take turns::

    board = Board()
    executors = [Executor(schedule, rank, Loopback(board, rank, whole_steps=False)) for rank in range(4)]

Driven by whole steps, messages meet as in NCCL: the messages that a rank posts together are a batch; the batches of one
rank and channel run one after another; the k-th send to a rank on a channel meets the k-th receive from the sender. A
message begins when both ends are posted, and a wait ends with its batch.

What is sent must not change between its post and its wait, what is received must not be touched (it is filled with
`GARBAGE` meanwhile), and both ends of a message must be the same blocks.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NoReturn

import torch

from runtime.executor.messages import LostPeer, Message, Transport, Wait
from runtime.executor.plans import PlannedMessage
from tasp_lab.core.errors import RunError

GARBAGE = 0xFF
"""The bytes of a memory that receives; as floating-point numbers of any width they are NaN."""

_Pair = tuple[int, int, int]
"""Source, destination, and channel or tag."""


class End:
    """One end of a message, and its wait."""

    def __init__(self, board: Board, rank: int, message: Message, sends: bool) -> None:
        self.board, self.rank, self.message, self.sends = board, rank, message, sends
        self.batch = _Batch()
        self.other: End | None = None
        self.is_done = False

    def __str__(self) -> str:
        if self.message.planned is None:
            return f"a message with tag {self.message.tag} {'to' if self.sends else 'from'} rank {self.message.peer}"
        return message_text(self.message.planned, self.sends)

    @property
    def is_over(self) -> bool:
        """Whether all messages of its batch have met their other ends."""
        return not self.batch.left

    def post(self) -> None:
        """Keep what is sent; fill what receives with garbage."""
        data = self.message.data
        self.kept = data.clone() if self.sends else data.fill_(GARBAGE)[:0]
        self.posted = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None

    def __call__(self) -> None:
        if self.is_done:
            return
        self.board.wait(self)
        other, data = self.other, self.message.data
        assert other is not None, "its batch is over"
        if other.posted is not None:
            torch.cuda.current_stream(data.device).wait_event(other.posted)
        expected = self.kept if self.sends else torch.full((1,), GARBAGE, dtype=torch.uint8, device=data.device)
        how = "what rank {} sends, {}, has changed" if self.sends else "where rank {} receives {}, it wrote"
        self.board.expect((data == expected).all(), f"{how.format(self.rank, self)} before the wait for it")
        if not self.sends:
            data.copy_(other.kept)
            if data.is_cuda:
                other.kept.record_stream(torch.cuda.current_stream(data.device))
        self.is_done = True  # after the copy: the other end may be in another thread
        if other.is_done:  # without cycles, the memory of a run is free as soon as nothing uses it
            self.kept = other.kept = data[:0]
            self.other = other.other = None


class _Batch:
    """Messages that are posted together."""

    def __init__(self, ends: Sequence[End] = ()) -> None:
        self.ends, self.left = ends, len(ends) or 1


class Board:
    """The messages that are posted. Ranks may also be threads, which then wait for each other up to `timeout_s`.

    All methods raise `RunError` for a message that is wrong; on a GPU `check` does so for what it has found.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s, self._changed = timeout_s, threading.Condition()
        self._posted: dict[_Pair, tuple[deque[End], deque[End]]] = defaultdict(lambda: (deque(), deque()))
        self._batches: dict[tuple[int, int], deque[_Batch]] = defaultdict(deque)
        self._expected: list[tuple[torch.Tensor, str]] = []
        self._failed: RunError | None = None

    def post(self, ends: Sequence[End], channel: int | None) -> None:
        """Post the ends of a rank together; they begin after its earlier ones, or at once without a channel."""
        if not ends:
            return
        batch = _Batch(ends)
        for end in ends:
            end.batch = batch
            end.post()
        with self._changed:
            if channel is None:
                self._begin(batch, None)
            else:
                queue = self._batches[ends[0].rank, channel]
                queue.append(batch)
                if len(queue) == 1:
                    self._begin(batch, channel)
            self._changed.notify_all()

    def _begin(self, batch: _Batch, channel: int | None) -> None:
        """Let the messages of a batch meet their other ends; batches that end let the next ones begin."""
        ranks = {batch.ends[0].rank, *(end.message.peer for end in batch.ends)}
        for end in batch.ends:
            source, destination = (end.rank, end.message.peer) if end.sends else (end.message.peer, end.rank)
            pair = source, destination, end.message.tag if channel is None else channel
            ends = self._posted[pair]
            ends[end.sends].append(end)
            if all(ends):
                self._meet(*(each.popleft() for each in ends))
        if channel is None:
            return
        for queue in [self._batches[rank, channel] for rank in ranks]:
            if queue and not queue[0].left:
                queue.popleft()
                if queue:
                    self._begin(queue[0], channel)

    def _meet(self, received: End, sent: End) -> None:
        ours, theirs = received.message.planned, sent.message.planned
        differ = ours and theirs and ours.block_numbers != theirs.block_numbers
        if differ or received.message.data.numel() != sent.message.data.numel():
            self._fail(
                f"rank {sent.rank} sends {sent}, which meets the receive of {received} ({sent.message.data.numel()} "
                f"and {received.message.data.numel()} bytes): expected the same message"
            )
        received.other, sent.other = sent, received
        for batch in (received.batch, sent.batch):
            batch.left -= 1
            if not batch.left:
                batch.ends = ()

    def wait(self, end: End) -> None:
        """Block until the batch of an end is over. Raises `LostPeer`."""
        if not end.is_over:
            with self._changed:
                if not self._changed.wait_for(lambda: end.is_over or self._failed, self._timeout_s):
                    raise LostPeer(f"nothing arrived within {self._timeout_s} s")
        if self._failed is not None:
            raise self._failed

    def _fail(self, why: str) -> NoReturn:
        """Raise `RunError`, also in the threads of ranks that wait."""
        with self._changed:
            self._failed = self._failed or RunError(why)
            self._changed.notify_all()
        raise self._failed

    def expect(self, holds: torch.Tensor, otherwise: str) -> None:
        """Raise `RunError` unless a condition holds; on a GPU it is kept for `check`, as the host does not wait."""
        if holds.is_cuda:
            self._expected.append((holds, otherwise))
        elif not holds:
            self._fail(otherwise)

    def check(self) -> None:
        """Raise `RunError` for what has not held on a GPU, whose work has ended."""
        expected, self._expected = self._expected, []
        for holds, otherwise in expected:
            if not holds:
                raise RunError(otherwise)


class Loopback(Transport):
    """The transport of one rank. With `whole_steps` it is driven as NCCL is, else as gloo: message by message."""

    def __init__(
        self, board: Board, rank: int, receives_ahead: int = 0, whole_steps: bool = True, channels: bool = True
    ) -> None:
        self.receives_ahead, self.whole_steps = receives_ahead, whole_steps
        self.channels = whole_steps and channels
        self._board, self.rank = board, rank
        self._receives: list[End] = []

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        ends = [End(self._board, self.rank, each, sends=False) for each in messages]
        if self.whole_steps:
            self._receives = ends
        else:  # by several threads
            self._post_each(ends)
        return list(ends)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        ends = [End(self._board, self.rank, each, sends=True) for each in messages]
        if self.whole_steps:
            together = self._receives + ends
            self._board.post(together, together[0].message.channel if together else 0)
        else:
            self._post_each(ends)
        return list(ends)

    def _post_each(self, ends: Sequence[End]) -> None:
        for each in ends:
            self._board.post([each], None)


def message_text(message: PlannedMessage, sends: bool) -> str:
    return f"{message.blocks} of step {message.step} {'to' if sends else 'from'} rank {message.peer}"
