"""A rank's host: posts one message at a time, which costs its launch time."""

from __future__ import annotations

import heapq
from typing import cast

import simpy

from sim.instants import after_everything
from tasp_lab.quantities import Number


class Host:
    """Launches messages first come, first served; those that come at one instant go in the order of lanes."""

    def __init__(self, env: simpy.Environment, launch_s: Number) -> None:
        self._env, self._launch_s = env, launch_s
        self._queue: list[tuple[Number, int, simpy.Event]] = []
        self._busy = False

    def launch(self, lane: int) -> simpy.Event:
        """Ask for a launch; the event fires when it is done. A lane asks again only after that."""
        done = simpy.Event(self._env)
        heapq.heappush(self._queue, (self._env.now, lane, done))
        if not self._busy:
            self._busy = True
            after_everything(self._env, self._launch_first)
        return done

    def _launch_first(self, _: simpy.Event) -> None:
        done = heapq.heappop(self._queue)[2]
        launched = self._env.timeout(self._launch_s, done)  # type: ignore[arg-type]
        launched.callbacks.append(self._launched)

    def _launched(self, launched: simpy.Event) -> None:
        cast(simpy.Event, launched.value).succeed()
        self._busy = bool(self._queue)
        if self._busy:
            after_everything(self._env, self._launch_first)
