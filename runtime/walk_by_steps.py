"""The walk by steps, for transports of whole steps.

A step is posted when all blocks that it sends have arrived and, where the schedule has rooms, what lay in its room has
been used; then its kernel calls are made, while it is under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from runtime.streams import Mark
from runtime.traffic import Traffic
from runtime.transport import Wait
from tasp_lab.rooms import HOME, CallRow, Row


class WalkBySteps:
    """Receives and sends of a step are posted together, when every block that it sends is there."""

    def __init__(self, traffic: Traffic, rooms: int | None, steps: int) -> None:
        part = traffic.part
        self._traffic, self._streams, self._rooms = traffic, traffic.streams, rooms
        self._sends, self._receives = _by_step(part.sends, steps), _by_step(part.receives, steps)
        self._calls: list[list[CallRow]] = [[] for _ in range(steps)]
        for call in part.calls:
            self._calls[call.step].append(call)
        self._pending: defaultdict[tuple[int, int], list[tuple[Row, Wait]]] = defaultdict(list)
        self._leaving: list[tuple[Row, Wait]] = []
        self._read_until: dict[int, Mark] = {}
        self._computed: dict[int, Mark] = {}  # the calls of a step, or with HOME those that add to gradients there
        self._unjoined = dict(part.sums)

    def prepare(self) -> None:
        """Nothing: the receives of a step are posted with its sends."""

    def run(self) -> None:
        for step in range(len(self._sends)):
            with self._streams.communicating():
                self._post(step)
            if self._calls[step]:
                self._compute(step)
        with self._streams.communicating():
            for key in [*self._pending, *self._unjoined]:
                self._await(key)
            self._finish_sends(lambda row: True)

    def _post(self, step: int) -> None:
        for row in self._sends[step]:
            self._await((row.block, row.since))
        if self._rooms is not None:
            for since in range(step - self._rooms, -1, -self._rooms):
                self._clear_room(since)
        receives = self._receives[step]
        waits = self._traffic.post_receives(receives)
        for row, wait in zip(receives, waits, strict=True):
            self._pending[row.block, row.since].append((row, wait))
        self._leaving += zip(self._sends[step], self._traffic.post_sends(self._sends[step]), strict=True)

    def _clear_room(self, since: int) -> None:
        """Wait for all that has to do with what arrived at a step: its arrival, its sends, its kernel calls."""
        for key in [key for key in self._pending if key[1] == since]:
            self._await(key)
        self._finish_sends(lambda row: row.since == since)
        if since in self._read_until:
            self._streams.wait(self._read_until.pop(since))

    def _finish_sends(self, concerned: Callable[[Row], bool]) -> None:
        leaving, self._leaving = self._leaving, []
        for row, wait in leaving:
            if concerned(row):
                self._traffic.finish_send(row, wait)
            else:
                self._leaving.append((row, wait))

    def _compute(self, step: int) -> None:
        with self._streams.communicating():
            for call in self._calls[step]:
                for key in call.reads:
                    self._await(key)
            arrived = self._streams.mark()
        self._streams.wait(arrived)
        for call in self._calls[step]:
            self._traffic.compute(call)
        self._computed[step] = read = self._streams.mark()
        if any(place.since == HOME for call in self._calls[step] for place in call.adds):
            self._computed[HOME] = read
        for call in self._calls[step]:
            self._read_until |= dict.fromkeys(call.since, read)

    def _await(self, key: tuple[int, int]) -> None:
        """Wait until a block is there; add up all that came together of a gradient, or of one that is a sum."""
        for row, wait in self._pending.pop(key, []):
            self._traffic.receive(row, wait)
        if key in self._unjoined:
            for added in (key[1], HOME):  # what comes home is added to what calls of any step may add to
                if added in self._computed:
                    self._streams.wait(self._computed[added])
            self._traffic.join(self._unjoined.pop(key))


def _by_step(rows: Iterable[Row], steps: int) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(steps)]
    for row in rows:
        found[row.step].append(row)
    return found
