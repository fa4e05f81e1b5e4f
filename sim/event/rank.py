"""What a rank has: a host, which launches messages one at a time, and the multiprocessors that its calls share."""

from __future__ import annotations

import heapq
from typing import cast

import simpy

from sim.event.network import after_everything
from tasp_lab.core.units import Number
from tasp_lab.machines.contention import Contention


class Host:
    """A first-come, first-served queue of launches; simultaneous requests are served in the order of lanes."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._queue: list[tuple[Number, int, Number, simpy.Event]] = []
        self._busy = False

    def launch(self, lane: int, launch_s: Number) -> simpy.Event:
        """Request a launch; the event fires when it is done. A lane has one request at a time."""
        done = simpy.Event(self._env)
        heapq.heappush(self._queue, (self._env.now, lane, launch_s, done))
        if not self._busy:
            self._busy = True
            after_everything(self._env, self._launch_first)
        return done

    def _launch_first(self, _: simpy.Event) -> None:
        launch_s, done = heapq.heappop(self._queue)[2:]
        launched = self._env.timeout(launch_s, done)  # type: ignore[arg-type]
        launched.callbacks.append(self._launched)

    def _launched(self, launched: simpy.Event) -> None:
        cast(simpy.Event, launched.value).succeed()
        self._busy = bool(self._queue)
        if self._busy:
            after_everything(self._env, self._launch_first)


class _Call:
    """A kernel call in progress: `left_s` of its time alone at `since_s`, and what it has lost until then."""

    __slots__ = ("done", "left_s", "lost_s", "since_s", "wake")

    def __init__(self, time_s: Number, now_s: Number, done: simpy.Event) -> None:
        self.left_s, self.since_s, self.done = time_s, now_s, done
        self.lost_s: Number = 0
        self.wake: simpy.Event | None = None

    def advance(self, share: Number, now_s: Number) -> None:
        """Account for the time since `since_s`, in which messages took this share."""
        elapsed_s = now_s - self.since_s
        self.left_s -= (1 - share) * elapsed_s
        self.lost_s += share * elapsed_s
        self.since_s = now_s


class Gpu:
    """The kernel calls in progress at a rank, slowed by the channels of its messages (`tasp_lab.machines.contention`).

    The share of the messages is updated once per instant, after all its other events.
    """

    def __init__(self, env: simpy.Environment, contention: Contention) -> None:
        self._env, self._contention = env, contention
        self._sending: Number = 0
        self._receiving: Number = 0
        self._share: Number = 0
        self._calls: dict[_Call, None] = {}
        self._settle_is_due = False

    def run(self, time_s: Number) -> simpy.Event:
        """Begin a call that takes `time_s` alone. When it ends, the event fires with the seconds that it lost."""
        call = _Call(time_s, self._env.now, simpy.Event(self._env))
        self._calls[call] = None
        self._plan(call)
        return call.done

    def send(self, channels: Number) -> None:
        """Count channels of sends; a negative number takes them away."""
        self._sending += channels
        self._settle_soon()

    def receive(self, channels: Number) -> None:
        """Count channels of receives; a negative number takes them away."""
        self._receiving += channels
        self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._settle_is_due:
            self._settle_is_due = True
            after_everything(self._env, self._settle)

    def _settle(self, _: simpy.Event) -> None:
        self._settle_is_due = False
        before, self._share = self._share, self._contention.share(self._sending, self._receiving)
        if self._share != before:
            for call in self._calls:
                call.advance(before, self._env.now)
                self._plan(call)

    def _plan(self, call: _Call) -> None:
        """Schedule the end of a call, if the share remains as it is; an earlier plan is void."""
        call.wake = self._env.timeout(call.left_s / (1 - self._share), call)
        call.wake.callbacks.append(self._end)

    def _end(self, wake: simpy.Event) -> None:
        call = wake.value
        assert isinstance(call, _Call), "made by `_plan`"
        if call.wake is wake:
            del self._calls[call]
            call.advance(self._share, self._env.now)
            call.done.succeed(call.lost_s)
