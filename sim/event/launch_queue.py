"""A rank's host, which launches messages one at a time; each takes its launch time."""

from __future__ import annotations

import heapq
from typing import cast

import simpy

from sim.event.end_of_instant import after_everything
from tasp_lab.core.units import Number


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
