"""Loopback: a transport between ranks of one process, and the loop that runs them, one action of one rank at a time.

::

    board = Board()
    executors = [Executor(schedule, rank, Loopback(board, rank)) for rank in range(schedule.world_size)]
    for each in executors:
        each.prepare(QueuedStreams())
    run_together(executors, board, seed=0)

Messages meet as in NCCL: the messages that a rank posts together are a batch; the batches of one rank and channel run
one after another; the k-th send to a rank on a channel meets the k-th receive from the sender. A message begins when
both ends are posted, and a wait ends with its batch.

The board is strict. What is sent must not change between its post and its wait, what is received must not be touched
(it is filled with `GARBAGE` meanwhile), and both ends of a message must be the same blocks. `run_together` checks that
all that an action depends on has happened. So an executor that uses memory too early is found, with the message's name.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from runtime.executor.executor import Executor
from runtime.executor.messages import LostPeer, Message, Transport, Wait
from runtime.executor.per_step import (
    AFTER,
    CALLS,
    COMPUTING,
    FINISH,
    JOIN,
    MARK,
    POST,
    RECEIVE,
    PerStep,
)
from runtime.executor.plans import PlannedMessage, plan_of
from runtime.executor.streams import CudaStreams, Streams
from tasp_lab.core.errors import RunError

GARBAGE = 0xFF
"""The bytes of a memory that receives; as floating-point numbers of any width they are NaN."""

_Pair = tuple[int, int, int]
"""Source, destination, and channel or tag."""


class QueuedStreams(Streams):
    """Streams of a host on which work is queued as on a GPU; `run_together` executes each in its own order."""

    queues = True


class _End:
    """One end of a message, and its wait."""

    def __init__(self, board: Board, rank: int, message: Message, sends: bool) -> None:
        self.board, self.rank, self.message, self.sends = board, rank, message, sends
        self.batch = _Batch()
        self.other: _End | None = None
        self.is_done = False

    def __str__(self) -> str:
        if self.message.planned is None:
            return f"a message with tag {self.message.tag} {'to' if self.sends else 'from'} rank {self.message.peer}"
        return _message_text(self.message.planned, self.sends)

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

    def __init__(self, ends: Sequence[_End] = ()) -> None:
        self.ends, self.left = ends, len(ends) or 1


class Board:
    """The messages that are posted. Ranks may also be threads, which then wait for each other up to `timeout_s`.

    All methods raise `RunError` for a message that is wrong; on a GPU `check` does so for what it has found.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s, self._changed = timeout_s, threading.Condition()
        self._posted: dict[_Pair, tuple[deque[_End], deque[_End]]] = defaultdict(lambda: (deque(), deque()))
        self._batches: dict[tuple[int, int], deque[_Batch]] = defaultdict(deque)
        self._expected: list[tuple[torch.Tensor, str]] = []
        self._failed: RunError | None = None

    def post(self, ends: Sequence[_End], channel: int | None) -> None:
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

    def _meet(self, received: _End, sent: _End) -> None:
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

    def wait(self, end: _End) -> None:
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

    def missing(self, rank: int) -> _End | None:
        """The first end of a rank that has not met its other one, though its batch has begun."""
        begun = [queue[0] for (of, _), queue in self._batches.items() if of == rank and queue]
        return next((end for batch in begun for end in batch.ends if end.other is None), None)

    def is_queued(self, end: _End) -> bool:
        """Whether the other end of a message is in a batch that has not begun."""
        return any(
            of == end.message.peer and other.message.peer == end.rank and other.message.tag == end.message.tag
            for (of, _), queue in self._batches.items() for batch in list(queue)[1:] for other in batch.ends
            if other.sends != end.sends
        )  # fmt: skip

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
        self._receives: list[_End] = []

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        ends = [_End(self._board, self.rank, each, sends=False) for each in messages]
        if self.whole_steps:
            self._receives = ends
        else:  # by several threads
            self._post_each(ends)
        return list(ends)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        ends = [_End(self._board, self.rank, each, sends=True) for each in messages]
        if self.whole_steps:
            together = self._receives + ends
            self._board.post(together, together[0].message.channel if together else 0)
        else:
            self._post_each(ends)
        return list(ends)

    def _post_each(self, ends: Sequence[_End]) -> None:
        for each in ends:
            self._board.post([each], None)


_Actions = deque[tuple[int, int, Any]]
"""Stream, kind and what it is done with."""


class _Rank:
    """A rank that `run_together` runs: what is left to do, in queues whose actions follow each other."""

    def __init__(self, executor: Executor, stream: torch.cuda.Stream | None) -> None:
        assert isinstance(executor.strategy, PerStep), "the transport is one of whole steps"
        self.number, self.strategy, self.streams = executor.part.rank, executor.strategy, executor.streams
        self._stream = stream
        plan = self.plan = plan_of(executor.schedule, executor.part)
        self._happened, shift = set[int](), plan.first_call - executor.part.first_call
        self._node_of = {each.operation: each.operation + shift for each in plan.calls} | {
            each.operation: each.operation + shift for each in plan.joins
        }
        self._handlers, self._marks = self.strategy.handlers(), set[int]()
        actions = self.strategy.plan
        if not self.streams.queues:
            self.queues: list[_Actions] = [deque((0, *action) for action in actions.on_host)]
        else:
            every = [(stream, *action) for stream, run in actions.runs for action in run]
            # a GPU orders what is in its streams, and has all that is issued; on a host we do both
            names = [0] if stream is not None else sorted({number for number, *_ in every})
            self.queues = [deque(each for each in every if stream is not None or each[0] == name) for name in names]

    def is_ready(self, queue: _Actions) -> bool:
        if not queue:
            return False
        _, kind, what = queue[0]
        if kind == AFTER:
            return what in self._marks
        ends: Mapping[int, Any] = self.strategy.waits
        return kind not in (RECEIVE, FINISH) or all(ends[each.node].is_over for each in what)

    def advance(self, queue: _Actions) -> None:
        stream, kind, what = queue.popleft()
        self._check_dependencies(kind, what)
        with self.current(), self.strategy.context(stream) if self.streams.queues else nullcontext():
            self._handlers[kind](what)
        self._note(kind, what)

    def _check_dependencies(self, kind: int, what: Any) -> None:
        """Raise `RunError` unless all that the plan puts before an action has happened."""
        nodes = self._nodes(kind, what)
        for number, node in enumerate(nodes):
            open_ = (each for each in self.plan.waits[node] if each not in nodes[:number])
            if early := next((each for each in open_ if not self._has_happened(each)), None):
                raise RunError(f"rank {self.number} comes to {self._text(node)} before {self._text(early)}")

    def _nodes(self, kind: int, what: Any) -> Sequence[int]:
        """The nodes that begin with an action."""
        if kind == POST:
            return [each.node for each in (*what.sends, *what.receives)]
        if kind == JOIN:
            return [self._node_of[join.operation] for join in what]
        return [self._node_of[row.operation] for row in what] if kind == CALLS else []

    def _note(self, kind: int, what: Any) -> None:
        """Note what has happened with an action."""
        if kind == MARK:
            self._marks.add(what)
        elif kind in (RECEIVE, FINISH):
            self._happened.update(each.node for each in what)
        elif kind != POST:
            self._happened.update(self._nodes(kind, what))

    def _has_happened(self, node: int) -> bool:
        """A buffer is free when all that it waits for has happened."""
        is_buffer = self.plan.first_buffer <= node < self.plan.first_join
        return node in self._happened or (is_buffer and all(map(self._has_happened, self.plan.waits[node])))

    def _text(self, node: int) -> str:
        plan = self.plan
        if node < plan.first_receive:
            return f"the send of {_message_text(plan.sends[node], True)}"
        if node < plan.first_call:
            return f"the receive of {_message_text(plan.receives[node - plan.first_receive], False)}"
        if node < plan.first_buffer:
            return f"a call of step {plan.calls[node - plan.first_call].step}"
        if node < plan.first_join:
            return self._text(next(each for each in plan.waits[node] if not self._has_happened(each)))
        join = plan.joins[node - plan.first_join]
        return f"the join of block {join.place.block} at step {join.step}"

    def current(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def will_post(self, end: _End) -> bool:
        """Whether the other end of a message is still to be posted."""
        for _, kind, what in (action for queue in self.queues for action in queue):
            if kind == POST:
                for message in what.receives if end.sends else what.sends:
                    if message.peer == end.rank and message.tag == end.message.tag:
                        return True
        return False


def _message_text(message: PlannedMessage, sends: bool) -> str:
    return f"{message.blocks} of step {message.step} {'to' if sends else 'from'} rank {message.peer}"


def run_together(
    executors: Sequence[Executor], board: Board, seed: int = 0, streams: Mapping[int, torch.cuda.Stream] | None = None
) -> None:
    """Run ranks whose executors are prepared, one action of one rank at a time, in an order drawn from the seed.

    On a host the streams of each rank are executed side by side, too. On a GPU, `streams` are the current streams of
    the ranks (`prepare_on`), and each rank issues its actions in its own order until it waits for a message.

    Raises `RunError`: of ranks that wait for each other, the cycle; else what the board or an executor raises.
    """
    drawn = random.Random(seed)
    ranks = [_Rank(each, streams[each.part.rank] if streams else None) for each in executors]
    # Whatever the order, one is likely in which all messages, or all calls, or those of one rank, are late.
    of_kind = drawn.choice(((1, 1), (1, 100), (100, 1)))
    speeds = {
        id(queue): of_kind[queue[0][0] > COMPUTING] * drawn.choice((1, 10))
        for rank in ranks for queue in rank.queues if queue
    }  # fmt: skip
    for rank in ranks:
        with rank.current():
            rank.streams.begin()
    while any(any(rank.queues) for rank in ranks):
        ready = [(rank, queue) for rank in ranks for queue in rank.queues if rank.is_ready(queue)]
        if not ready:
            raise RunError(_deadlock({rank.number: rank for rank in ranks}, board))
        rank, queue = drawn.choices(ready, [speeds[id(queue)] for _, queue in ready])[0]
        rank.advance(queue)
    for rank in ranks:
        with rank.current():
            rank.streams.finish()


def prepare_on(executors: Sequence[Executor], device: torch.device) -> dict[int, torch.cuda.Stream]:
    """Prepare ranks that share a device; on a GPU each has streams of its own, whose current ones are returned."""
    found: dict[int, torch.cuda.Stream] = {}
    for each in executors:
        if device.type != "cuda":
            each.prepare(QueuedStreams())
            continue
        stream = found[each.part.rank] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            each.prepare(CudaStreams(device, owner=1 + each.part.rank))
    return found


def _deadlock(ranks: Mapping[int, _Rank], board: Board) -> str:
    """The cycle of ranks that wait for each other, or the chain to a message that never comes."""
    waits = {number: board.missing(number) for number, rank in ranks.items() if any(rank.queues)}
    at = next((number for number, end in waits.items() if end is not None), None)
    if at is None:
        return f"deadlock: ranks {', '.join(map(str, waits))} wait for marks that nobody sets"
    path, comes = list[int](), True
    while at not in path and (end := waits.get(at)) is not None:
        path.append(at)
        if not (comes := board.is_queued(end) or ranks[end.message.peer].will_post(end)):
            break
        at = end.message.peer
    else:
        path = path[path.index(at) :] if at in path else path
    told = "; ".join(f"rank {number} waits for {waits[number]}" for number in path)
    return f"deadlock: {told}" + ", which has passed that step without it" * (not comes)
