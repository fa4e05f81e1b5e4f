"""The per-lane executor, for transports of single messages.

One thread per lane waits for its messages, in the order of steps. Receives are posted several steps ahead, sends in
turn, as soon as the previous message of the lane is posted and what they wait for has happened. Lanes do not wait for
each other. Kernel calls of the first compute lane are made by the calling thread, those of each further one by a thread
of its own, in the order of the schedule.

What a message or a call of one step waits for belongs to earlier steps of any rank, so there is no deadlock.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from runtime.executor.message_io import MessageIO
from runtime.executor.plans import Plan, PlannedMessage
from runtime.executor.threads import run_beside
from runtime.executor.transports import Wait
from tasp_lab.schedule.rank_part import CallRow

Posted = queue.SimpleQueue[tuple[PlannedMessage, Wait]]
"""Posted messages in their order, each with its wait."""


class _Lanes(NamedTuple):
    """The messages of a plan by lane. `waits` are those that each lane's thread waits for, in their order.

    If anything waits for sends, which use memory that is reused, the threads wait for those, too. `calls` are those of
    each compute lane, with their nodes.
    """

    outgoing: dict[int, tuple[PlannedMessage, ...]]
    incoming: dict[int, tuple[PlannedMessage, ...]]
    waits: tuple[tuple[PlannedMessage, ...], ...]
    sends_are_awaited: bool
    calls: tuple[tuple[tuple[int, CallRow], ...], ...]


@lru_cache(maxsize=16)
def _lanes_of(plan: Plan) -> _Lanes:
    awaited = any(plan.releases[each.node] for each in plan.sends)
    waits = sorted(plan.receives + plan.sends * awaited, key=lambda each: each.step)
    calls = tuple(enumerate(plan.calls, plan.first_call))
    of_lanes = tuple(
        tuple((node, row) for node, row in calls if row.lane == lane)
        for lane in sorted({row.lane for row in plan.calls})
    )
    return _Lanes(_by_lane(plan.sends), _by_lane(plan.receives), tuple(_by_lane(waits).values()), awaited, of_lanes)


def _by_lane(messages: Sequence[PlannedMessage]) -> dict[int, tuple[PlannedMessage, ...]]:
    lanes = dict.fromkeys(each.lane for each in messages)
    return {lane: tuple(each for each in messages if each.lane == lane) for lane in lanes}


class PerLane:
    """One thread per lane waits for arrivals; each arrival may release messages and kernel calls of any lane.

    If nothing waits for sends, all are waited for at the end.
    """

    def __init__(self, message_io: MessageIO, plan: Plan, steps_ahead: int) -> None:
        self._message_io, self._plan, self._ahead, self._lanes = message_io, plan, steps_ahead, _lanes_of(plan)
        self._unmet = [len(each) for each in plan.waits]
        self._outgoing = {lane: deque(messages) for lane, messages in self._lanes.outgoing.items()}
        self._incoming = {lane: deque(messages) for lane, messages in self._lanes.incoming.items()}
        self._post_until = dict.fromkeys(self._incoming, steps_ahead)
        self._unreceived = dict.fromkeys(self._incoming, 0)
        self._posted: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._incoming}
        self._outstanding_sends: dict[int, Posted] = {lane: queue.SimpleQueue() for lane in self._outgoing}
        self._happened: deque[tuple[int, PlannedMessage | None]] = deque()
        self._advancing = threading.Lock()
        self._next_calls: dict[int, queue.SimpleQueue[None]] = {}
        self._calls_are_free = [queue.SimpleQueue[None]() for _ in self._lanes.calls]
        self._failed = False
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def prepare(self) -> None:
        self._post((), self._incoming)

    def run(self) -> None:
        """Execute the part; kernel calls of the first compute lane are made by the calling thread."""
        self._post(self._outgoing, self._incoming)
        self._modes = _modes()
        lanes = zip(self._lanes.calls, self._calls_are_free, strict=True)
        computing = [partial(self._compute, calls, is_free) for calls, is_free in lanes]
        receiving = [partial(self._run_lane, messages) for messages in self._lanes.waits]
        here = computing[:1] or receiving * (len(receiving) == 1)
        work = [*here, *computing[1:], *(receiving if computing or not here else ())]
        for lane in work[len(here) :]:
            run_beside(partial(self._guarded, lane))
        for lane in here:
            self._guarded(lane)
        for _ in work:
            if (error := self._ended.get()) is not None:
                raise error
        if not self._lanes.sends_are_awaited:
            for each in self._plan.sends:
                self._message_io.finish_send(*self._outstanding_sends[each.lane].get())

    def _run_lane(self, messages: Sequence[PlannedMessage]) -> None:
        for message in messages:
            if message.node < self._plan.first_receive:
                self._message_io.finish_send(*self._outstanding_sends[message.lane].get())
                if self._plan.releases[message.node]:
                    self._record(message.node)
            else:
                self._message_io.receive(*self._posted[message.lane].get())
                if self._plan.releases[message.node] or self._incoming[message.lane]:
                    self._record(message.node, message)

    def _guarded(self, run_lane: Callable[[], None]) -> None:
        """Run a lane in torch's modes of the calling thread, which are those of its tensors."""
        error: Exception | None = None
        try:
            with _in_modes(*self._modes):
                run_lane()
        except Exception as raised:
            error = raised
            self._failed = True
            for is_free in self._calls_are_free:
                is_free.put(None)
        self._ended.put(error)

    def _compute(self, calls: Sequence[tuple[int, CallRow]], is_free: queue.SimpleQueue[None]) -> None:
        """Make the kernel calls of a compute lane in order; stop when a lane has failed."""
        for node, row in calls:
            self._next_calls[node] = is_free
            while self._unmet[node] and not self._failed:
                is_free.get()
            del self._next_calls[node]
            if self._failed:
                return
            self._message_io.compute(row)
            self._record(node)

    def _record(self, node: int, received: PlannedMessage | None = None) -> None:
        """Record that something has happened; post and join whatever has waited for it."""
        self._happened.append((node, received))
        while joins := self._advance():
            for join in joins:
                self._message_io.join(self._plan.joins[join - self._plan.first_join])
            self._happened.extend((join, None) for join in joins)

    def _advance(self) -> list[int]:
        """Post whatever has waited for what has happened; returns the joins that this thread is to make.

        If another thread is at it, that one does it, and this one goes on waiting for its own messages.
        """
        joins: list[int] = []
        while self._happened and self._advancing.acquire(blocking=False):
            try:
                while self._happened:
                    node, received = self._happened.popleft()
                    outgoing, incoming, free, computing = self._released([node])
                    joins += free
                    if received is not None:
                        self._unreceived[received.lane] -= 1
                        self._post_until[received.lane] = received.step + 1 + self._ahead
                        incoming.add(received.lane)
                    self._post(outgoing, incoming)
                    for is_free in computing:
                        is_free.put(None)
            finally:
                self._advancing.release()
        return joins

    def _released(self, happened: Sequence[int]) -> tuple[set[int], set[int], list[int], list[queue.SimpleQueue[None]]]:
        """The lanes with messages that may now be sent or received, the joins that may now be made, and the compute
        lanes whose next call may be: they are told once messages are posted, as two threads then want to run."""
        plan, unmet = self._plan, self._unmet
        outgoing, incoming, joins = set[int](), set[int](), list[int]()
        computing: list[queue.SimpleQueue[None]] = []
        waiting = list(happened)
        while waiting:
            for node in plan.releases[waiting.pop()]:
                unmet[node] -= 1
                if unmet[node]:
                    continue
                if node < plan.first_receive:
                    outgoing.add(plan.sends[node].lane)
                elif node < plan.first_call:
                    incoming.add(plan.receives[node - plan.first_receive].lane)
                elif node >= plan.first_join:
                    joins.append(node)
                elif node >= plan.first_buffer:
                    waiting.append(node)
                elif (is_free := self._next_calls.get(node)) is not None:
                    computing.append(is_free)
        return outgoing, incoming, joins, computing

    def _post(self, outgoing: Collection[int], incoming: Collection[int]) -> None:
        """Post the messages of these lanes that are ready; no other thread posts any meanwhile.

        Receives are posted up to `steps_ahead` steps ahead of the lane's last one or, if none is left to come, of its
        next one, while their memory is free.
        """
        unmet = self._unmet
        for lane in outgoing:
            messages = self._outgoing[lane]
            while messages and not unmet[messages[0].node]:
                message = messages.popleft()
                self._outstanding_sends[lane].put((message, self._message_io.post_sends([message])[0]))
        for lane in incoming:
            messages = self._incoming[lane]
            while messages and not unmet[messages[0].node]:
                if not self._unreceived[lane]:
                    self._post_until[lane] = max(self._post_until[lane], messages[0].step + self._ahead)
                if messages[0].step > self._post_until[lane]:
                    break
                message = messages.popleft()
                self._unreceived[lane] += 1
                self._posted[lane].put((message, self._message_io.post_receives([message])[0]))


def _modes() -> tuple[bool, bool]:
    """torch's modes of this thread: whether inference and gradients are enabled."""
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@contextlib.contextmanager
def _changed_modes(inference: bool, gradients: bool) -> Iterator[None]:
    with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
        yield


def _in_modes(inference: bool, gradients: bool) -> AbstractContextManager[None]:
    """A context in these modes; to set them takes as long as a message, so nothing is set that is so already."""
    is_so = _modes() == (inference, gradients)
    return contextlib.nullcontext() if is_so else _changed_modes(inference, gradients)
