"""All ranks of a schedule in this process on one device, one action of one rank at a time, in an order that is drawn.

The board of `tests.support.loopback` is strict with memory; `run_together` also checks that all that an action
depends on has happened, and reports ranks that wait for each other as the cycle, with the messages.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from runtime.executor.copies import Action
from runtime.executor.executor import Executor
from runtime.executor.per_step import AFTER, CALLS, COMPUTING, FINISH, JOIN, MARK, POST, RECEIVE, PerStep
from runtime.executor.plans import plan_of
from runtime.executor.streams import CudaStreams, Streams
from runtime.protocol.records import merge_records
from runtime.trials.in_process import TIMEOUT_S, make_trials, run_threads
from tasp_lab.core.errors import RunError
from tasp_lab.machines.machine import Compute
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.timeline.events import Timeline
from tests.support.loopback import Board, End, Loopback, message_text


def run_in_process(
    schedule: Schedule, receives_ahead: int = 0, whole_steps: bool = False, compute: Compute | None = None
) -> Timeline:
    """Execute a schedule once on this host, and check it: by lanes, each rank a thread, or by whole steps, in turns.

    `compute` is as in `runtime.protocol.jobs.RunSchedule`. Raises `RunError`.
    """
    board, ranks = Board(TIMEOUT_S), range(schedule.world_size)
    transports = [Loopback(board, each, receives_ahead, whole_steps, channels=False) for each in ranks]
    if not whole_steps:
        return run_threads(schedule, transports, compute)
    trials = make_trials(schedule, transports, compute)
    for each in trials:
        each.set_up(checked=True)
    for each in trials:
        each.executor.prepare(Streams(), timed=True)
    began_s = time.monotonic()
    run_together([each.executor for each in trials], board)
    records = [each.executor.record(began_s) for each in trials]
    for each in trials:
        each.check()
    return merge_records(records, schedule, "in-process")


def run_on_one_device(
    schedule: Schedule,
    device: torch.device,
    seed: int = 0,
    transports: type[Loopback] = Loopback,
    change: Callable[[Executor], None] = lambda executor: None,
) -> None:
    """Execute a schedule once as on a GPU, all ranks on this device, in an order of ranks and of streams that is drawn.

    `transports` and `change`, which is called with each executor before it runs, are for planted faults.

    Raises `RunError` if ranks wait for each other, use memory that is in use, or have a wrong result.
    """
    board = Board(TIMEOUT_S)
    trials = make_trials(schedule, [transports(board, rank) for rank in range(schedule.world_size)], None, str(device))
    for each in trials:
        each.set_up(checked=True)
    executors = [each.executor for each in trials]
    streams = prepare_on(executors, device)
    for executor in executors:
        change(executor)
    run_together(executors, board, seed, streams)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    board.check()
    for each in trials:
        each.check()


class QueuedStreams(Streams):
    """Streams of a host on which work is queued as on a GPU; `run_together` executes each in its own order."""

    queues = True


_Actions = deque[tuple[int, int, Any, Action]]
"""Stream, kind, what it is done with, and what does it."""


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
        self._waits, self._marks = executor.actions.waits, set[int]()
        actions, do = self.strategy.plan, self.strategy.action
        if not self.streams.queues:
            self.queues: list[_Actions] = [deque((0, *action, do(*action)) for action in actions.on_host)]
        else:
            every = [(stream, *action, do(*action)) for stream, run in actions.runs for action in run]
            # a GPU orders what is in its streams, and has all that is issued; on a host we do both
            names = [0] if stream is not None else sorted({number for number, *_ in every})
            self.queues = [deque(each for each in every if stream is not None or each[0] == name) for name in names]

    def is_ready(self, queue: _Actions) -> bool:
        if not queue:
            return False
        _, kind, what, _ = queue[0]
        if kind == AFTER:
            return what in self._marks
        ends: Mapping[int, Any] = self._waits
        return kind not in (RECEIVE, FINISH) or all(ends[each.node].is_over for each in what)

    def advance(self, queue: _Actions) -> None:
        stream, kind, what, action = queue.popleft()
        self._check_dependencies(kind, what)
        with self.current(), self.strategy.context(stream) if self.streams.queues else nullcontext():
            action()
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
            return f"the send of {message_text(plan.sends[node], True)}"
        if node < plan.first_call:
            return f"the receive of {message_text(plan.receives[node - plan.first_receive], False)}"
        if node < plan.first_buffer:
            return f"a call of step {plan.calls[node - plan.first_call].step}"
        if node < plan.first_join:
            return self._text(next(each for each in plan.waits[node] if not self._has_happened(each)))
        join = plan.joins[node - plan.first_join]
        return f"the join of block {join.place.block} at step {join.step}"

    def current(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def will_post(self, end: End) -> bool:
        """Whether the other end of a message is still to be posted."""
        for _, kind, what, _ in (action for queue in self.queues for action in queue):
            if kind == POST:
                for message in what.receives if end.sends else what.sends:
                    if message.peer == end.rank and message.tag == end.message.tag:
                        return True
        return False


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
            each.prepare(_StreamsOfRank(device, each.part.rank))
    return found


class _StreamsOfRank(CudaStreams):
    """Streams of a rank that shares the device with others: their numbers begin behind those of other ranks."""

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device)
        self._first = 1000 * (1 + rank)

    def _stream(self, kind: str, number: int) -> torch.cuda.Stream:
        return super()._stream(kind, self._first + number)


def _deadlock(ranks: Mapping[int, _Rank], board: Board) -> str:
    """The cycle of ranks that wait for each other, or the chain to a message that never comes."""
    waits = {number: _missing(board, number) for number, rank in ranks.items() if any(rank.queues)}
    at = next((number for number, end in waits.items() if end is not None), None)
    if at is None:
        return f"deadlock: ranks {', '.join(map(str, waits))} wait for marks that nobody sets"
    path, comes = list[int](), True
    while at not in path and (end := waits.get(at)) is not None:
        path.append(at)
        if not (comes := _is_queued(board, end) or ranks[end.message.peer].will_post(end)):
            break
        at = end.message.peer
    else:
        path = path[path.index(at) :] if at in path else path
    told = "; ".join(f"rank {number} waits for {waits[number]}" for number in path)
    return f"deadlock: {told}" + ", which has passed that step without it" * (not comes)


def _missing(board: Board, rank: int) -> End | None:
    """The first end of a rank that has not met its other one, though its batch has begun."""
    begun = [queue[0] for (of, _), queue in board._batches.items() if of == rank and queue]
    return next((end for batch in begun for end in batch.ends if end.other is None), None)


def _is_queued(board: Board, end: End) -> bool:
    """Whether the other end of a message is in a batch that has not begun."""
    return any(
        of == end.message.peer and other.message.peer == end.rank and other.message.tag == end.message.tag
        for (of, _), queue in board._batches.items() for batch in list(queue)[1:] for other in batch.ends
        if other.sends != end.sends
    )  # fmt: skip
