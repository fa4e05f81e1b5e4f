"""The per-step executor, for transports of whole steps.

A step is posted when all blocks that it sends have arrived and, if the schedule reuses buffers, the previous content of
its buffer has no pending uses. Its kernel calls are made while its messages are in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from runtime.executor.message_io import MessageIO
from runtime.executor.streams import Mark
from runtime.executor.transports import Wait
from tasp_lab.schedule.buffer_layout import INITIAL, CallRow, Row


class PerStep:
    """Posts the receives and sends of a step together, once every block that it sends has arrived."""

    def __init__(self, message_io: MessageIO, buffers: int | None, steps: int) -> None:
        part = message_io.part
        self._message_io, self._streams, self._buffers = message_io, message_io.streams, buffers
        self._sends, self._receives = _by_step(part.sends, steps), _by_step(part.receives, steps)
        self._calls: list[list[CallRow]] = [[] for _ in range(steps)]
        for call in part.calls:
            self._calls[call.step].append(call)
        self._pending: defaultdict[tuple[int, int], list[tuple[Row, Wait]]] = defaultdict(list)
        self._outstanding_sends: list[tuple[Row, Wait]] = []
        self._read_until: dict[int, Mark] = {}
        self._computed: dict[int, Mark] = {}  # end of the calls of a step; INITIAL: of those that add to own gradients
        self._unjoined = dict(part.sums)

    def prepare(self) -> None:
        """No-op: the receives of a step are posted with its sends."""

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
        if self._buffers is not None:
            for since in range(step - self._buffers, -1, -self._buffers):
                self._clear_buffer(since)
        receives = self._receives[step]
        waits = self._message_io.post_receives(receives)
        for row, wait in zip(receives, waits, strict=True):
            self._pending[row.block, row.since].append((row, wait))
        self._outstanding_sends += zip(self._sends[step], self._message_io.post_sends(self._sends[step]), strict=True)

    def _clear_buffer(self, since: int) -> None:
        """Wait for all pending uses of the blocks that arrive at a step: arrivals, sends and kernel calls."""
        for key in [key for key in self._pending if key[1] == since]:
            self._await(key)
        self._finish_sends(lambda row: row.since == since)
        if since in self._read_until:
            self._streams.wait(self._read_until.pop(since))

    def _finish_sends(self, selected: Callable[[Row], bool]) -> None:
        outstanding, self._outstanding_sends = self._outstanding_sends, []
        for row, wait in outstanding:
            if selected(row):
                self._message_io.finish_send(row, wait)
            else:
                self._outstanding_sends.append((row, wait))

    def _compute(self, step: int) -> None:
        with self._streams.communicating():
            for call in self._calls[step]:
                for key in call.reads:
                    self._await(key)
            arrived = self._streams.mark()
        self._streams.wait(arrived)
        for call in self._calls[step]:
            self._message_io.compute(call)
        self._computed[step] = read = self._streams.mark()
        if any(place.since == INITIAL for call in self._calls[step] for place in call.adds):
            self._computed[INITIAL] = read
        for call in self._calls[step]:
            self._read_until |= dict.fromkeys(call.since, read)

    def _await(self, key: tuple[int, int]) -> None:
        """Wait until a block has arrived; if it is a gradient or a sum, join its contributions."""
        for row, wait in self._pending.pop(key, []):
            self._message_io.receive(row, wait)
        if key in self._unjoined:
            for added in (key[1], INITIAL):  # a gradient that returns to its owner joins what any step's calls added
                if added in self._computed:
                    self._streams.wait(self._computed[added])
            self._message_io.join(self._unjoined.pop(key))


def _by_step(rows: Iterable[Row], steps: int) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(steps)]
    for row in rows:
        found[row.step].append(row)
    return found
