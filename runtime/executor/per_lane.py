"""The per-lane executor, for transports of single messages.

One thread per lane waits for its messages, in the order of steps; lanes that are alike may share a thread. Receives are
posted several steps ahead, sends in turn, as soon as the previous message of the lane is posted and what they wait for
has happened. Unlike lanes do not wait for each other. Kernel calls of the first compute lane are made by the calling
thread, those of each further one by a thread of its own, in the order of the schedule.

What a message or a call of one step waits for belongs to earlier steps of any rank, so there is no deadlock.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple

import torch

from runtime.executor.actions import Actions
from runtime.executor.plans import Plan, PlannedMessage

Wake = queue.SimpleQueue[None]
"""Wakes a thread that sleeps until its next message is posted, or its next call may be made."""


class _Lanes(NamedTuple):
    """The messages of a plan by lane, and the nodes that each thread waits for or computes, in their order.

    If anything waits for sends, which use memory that is reused, the threads wait for those, too. The calling thread
    is the first one if `is_here`: if it makes calls, or is the only one. Else it must be free to see the first error.
    `unmet` is the number of others for which each node waits.
    """

    outgoing: dict[int, tuple[PlannedMessage, ...]]
    incoming: dict[int, tuple[PlannedMessage, ...]]
    threads: tuple[tuple[int, ...], ...]
    is_here: bool
    sends_are_awaited: bool
    unmet: tuple[int, ...]


@lru_cache(maxsize=16)
def _lanes_of(plan: Plan, together: bool) -> _Lanes:
    awaited = any(plan.releases[each.node] for each in plan.sends)
    threads = _threads(plan, plan.receives + plan.sends * awaited, together)
    unmet = tuple(len(each) for each in plan.waits)
    is_here = bool(plan.calls) or len(threads) == 1
    return _Lanes(_by_lane(plan.sends), _by_lane(plan.receives), threads, is_here, awaited, unmet)


def _by_lane(messages: Sequence[PlannedMessage]) -> dict[int, tuple[PlannedMessage, ...]]:
    lanes = dict.fromkeys(each.lane for each in messages)
    return {lane: tuple(each for each in messages if each.lane == lane) for lane in lanes}


def _threads(plan: Plan, awaited: Sequence[PlannedMessage], together: bool) -> tuple[tuple[int, ...], ...]:
    """The nodes of each thread by step: the calls of each compute lane, then the messages of each lane, or of all."""
    calls = [(row.lane, row.step, node) for node, row in enumerate(plan.calls, plan.first_call)]
    messages = [(0 if together else each.lane, each.step, each.node) for each in awaited]
    return tuple(
        tuple(node for of, _, node in sorted(found, key=lambda each: each[1]) if of == lane)
        for found in (calls, messages)
        for lane in sorted({of for of, *_ in found})
    )


class PerLane:
    """One thread per lane, or one for all `together`, waits for arrivals, which release messages and calls of any lane.

    If nothing waits for sends, all are waited for at the end. Waits are kept until the next run (`messages.Wait`).
    """

    def __init__(self, actions: Actions, plan: Plan, steps_ahead: int, together: bool = False) -> None:
        self._plan, self._ahead, self._lanes = plan, steps_ahead, _lanes_of(plan, together)
        self._waits = actions.waits
        self._post = [actions.post((), (each,)) for each in plan.sends]
        self._post += [actions.post((each,), ()) for each in plan.receives]
        self._does = [actions.wait("out", (each,)) for each in plan.sends]
        self._does += [actions.wait("in", (each,)) for each in plan.receives]
        self._does += [actions.compute((row,)) for row in plan.calls]
        self._joins = [actions.join((join,)) for join in plan.joins]

    def prepare(self) -> None:
        self._waits.clear()
        self._unmet = list(self._lanes.unmet)
        self._outgoing = {lane: deque(messages) for lane, messages in self._lanes.outgoing.items()}
        self._incoming = {lane: deque(messages) for lane, messages in self._lanes.incoming.items()}
        self._post_until = dict.fromkeys(self._incoming, self._ahead)
        self._unreceived = dict.fromkeys(self._incoming, 0)
        self._happened: deque[int] = deque()
        self._advancing = threading.Lock()
        self._wakes: tuple[Wake, ...] = tuple(queue.SimpleQueue() for _ in self._lanes.threads)
        self._asleep: dict[int, Wake] = {}
        self._failed = False
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._running = count(1 - len(self._lanes.threads))
        for lane in self._incoming:
            self._post_receives(lane)

    def run(self) -> None:
        """Execute the part; the calling thread is the first one that has calls, or the only one."""
        for lane in self._outgoing:
            self._post_sends(lane)
        if self._lanes.threads:
            modes = _modes()
            threads = [
                partial(self._guarded, *each, modes) for each in zip(self._lanes.threads, self._wakes, strict=True)
            ]
            for thread in threads[self._lanes.is_here :]:
                run_beside(thread)
            if self._lanes.is_here:
                threads[0]()
            if (error := self._ended.get()) is not None:
                raise error
        if not self._lanes.sends_are_awaited:
            for each in self._plan.sends:
                self._does[each.node]()

    def _guarded(self, nodes: Sequence[int], wake: Wake, modes: tuple[bool, bool]) -> None:
        """Do the work of a thread in torch's modes of the calling one, which are those of its tensors.

        The run ends with the first error, or else with the last thread.
        """
        error: Exception | None = None
        try:
            with contextlib.ExitStack() as stack:
                if _modes() != modes:  # to set them takes as long as a message
                    stack.enter_context(torch.inference_mode(modes[0]))
                    stack.enter_context(torch.set_grad_enabled(modes[1]))
                self._do(nodes, wake)
        except Exception as raised:
            error = raised
            self._failed = True
            for each in self._wakes:
                each.put(None)
        if error is not None or next(self._running) == 0:
            self._ended.put(error)

    def _do(self, nodes: Sequence[int], wake: Wake) -> None:
        """Wait for messages and make kernel calls in their order; stop when another thread has failed."""
        plan, unmet, waits = self._plan, self._unmet, self._waits
        for node in nodes:
            if node >= plan.first_call:
                if unmet[node]:
                    self._sleep(node, wake, lambda node=node: not unmet[node])  # type: ignore[misc]
            elif node not in waits:
                self._sleep(node, wake, lambda node=node: node in waits)  # type: ignore[misc]
            if self._failed:
                return
            self._does[node]()
            is_received = plan.first_receive <= node < plan.first_call
            if plan.releases[node] or (is_received and self._incoming[plan.receives[node - plan.first_receive].lane]):
                self._record(node)

    def _sleep(self, node: int, wake: Wake, is_over: Callable[[], bool]) -> None:
        """Sleep until a message is posted, or a call may be made, or a thread has failed."""
        self._asleep[node] = wake
        while not is_over() and not self._failed:
            wake.get()
        del self._asleep[node]

    def _record(self, node: int) -> None:
        """Record that something has happened; post and join whatever has waited for it.

        If another thread is at it, that one does it, and this one goes on waiting for its own messages. Threads are
        woken once messages are posted, as two then want to run.
        """
        happened, advancing, asleep = self._happened, self._advancing, self._asleep
        happened.append(node)
        while happened and advancing.acquire(blocking=False):
            joins: list[int] = []
            try:
                while happened:
                    for ready in self._release(happened.popleft(), joins):
                        if (wake := asleep.get(ready)) is not None:
                            wake.put(None)
            finally:
                advancing.release()
            for join in joins:
                self._joins[join - self._plan.first_join]()
            happened.extend(joins)

    def _release(self, happened: int, joins: list[int]) -> list[int]:
        """Post the messages that may now be sent or received; returns them and the calls that may now be made.

        Adds the joins that may now be made to `joins`. No other thread releases anything meanwhile.
        """
        plan, unmet, ready = self._plan, self._unmet, list[int]()
        waiting, incoming = [happened], list[int]()
        if plan.first_receive <= happened < plan.first_call:
            received = plan.receives[happened - plan.first_receive]
            self._unreceived[received.lane] -= 1
            self._post_until[received.lane] = received.step + 1 + self._ahead
            incoming.append(received.lane)
        for before in waiting:
            for node in plan.releases[before]:
                unmet[node] -= 1
                if unmet[node]:
                    continue
                if node < plan.first_receive:
                    ready += self._post_sends(plan.sends[node].lane)
                elif node < plan.first_call:
                    incoming.append(plan.receives[node - plan.first_receive].lane)
                elif node < plan.first_buffer:
                    ready.append(node)
                elif node < plan.first_join:
                    waiting.append(node)
                else:
                    joins.append(node)
        for lane in incoming:
            ready += self._post_receives(lane)
        return ready

    def _post_sends(self, lane: int) -> list[int]:
        """Post the messages of a lane that are ready; returns their nodes."""
        messages, unmet, posted = self._outgoing[lane], self._unmet, list[int]()
        while messages and not unmet[messages[0].node]:
            message = messages.popleft()
            self._post[message.node]()
            posted.append(message.node)
        return posted

    def _post_receives(self, lane: int) -> list[int]:
        """As `_post_sends`: up to `steps_ahead` steps ahead of the lane's last message or, if none is left to come, of
        its next one, while their memory is free."""
        messages, unmet, posted = self._incoming[lane], self._unmet, list[int]()
        while messages and not unmet[messages[0].node]:
            message = messages[0]
            if not self._unreceived[lane]:
                self._post_until[lane] = max(self._post_until[lane], message.step + self._ahead)
            if message.step > self._post_until[lane]:
                break
            messages.popleft()
            self._unreceived[lane] += 1
            self._post[message.node]()
            posted.append(message.node)
        return posted


def _modes() -> tuple[bool, bool]:
    """torch's modes of this thread: whether inference and gradients are enabled."""
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


# Threads that are kept for the next run: to start one takes as long as a step.


Task = Callable[[], None]

_IDLE: list[queue.SimpleQueue[Task]] = []
"""The tasks of threads that have none."""

os.register_at_fork(after_in_child=_IDLE.clear)  # threads do not survive a fork


def run_beside(task: Task) -> None:
    """Run a task, which must not raise, in a thread that does not keep the process alive."""
    try:
        tasks = _IDLE.pop()
    except IndexError:
        tasks = queue.SimpleQueue()
        threading.Thread(target=_work, args=(tasks,), daemon=True).start()
    tasks.put(task)


def _work(tasks: queue.SimpleQueue[Task]) -> None:
    while True:
        task = tasks.get()
        task()
        del task  # it refers to the memory of a run
        _IDLE.append(tasks)
