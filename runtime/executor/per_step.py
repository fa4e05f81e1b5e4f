"""The per-step executor, for transports of whole steps.

The messages of a step are posted together, when all that they wait for has happened. Its kernel calls are made while
its messages are in flight. On a GPU nothing is waited for by the host: what happens is queued on two streams, and one
waits for the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.executor.message_io import MessageIO
from runtime.executor.streams import Mark
from runtime.executor.transports import Wait
from tasp_lab.schedule.dependencies import ARRIVED, RESIDENT, SENT
from tasp_lab.schedule.rank_part import CallRow, Row
from tasp_lab.schedule.rank_waits import Condition


class PerStep:
    """Posts the receives and sends of a step together."""

    def __init__(self, message_io: MessageIO, steps: int) -> None:
        part = message_io.part
        self._message_io, self._part, self._streams = message_io, part, message_io.streams
        self._sends, self._receives = _by_step(part.sends, steps), _by_step(part.receives, steps)
        self._calls: list[list[CallRow]] = [[] for _ in range(steps)]
        for call in part.calls:
            self._calls[call.step].append(call)
        self._joins = {each.operation: each for each in part.joins}
        self._outstanding: dict[Condition, tuple[Row, Wait]] = {}
        self._computed: dict[int, Mark] = {}
        self._added: dict[int, Mark] = {}  # the last calls that added to a resident copy, by block
        self._reached: set[Condition] = set()

    def prepare(self) -> None:
        """No-op: the receives of a step are posted with its sends."""

    def run(self) -> None:
        for step in range(len(self._sends)):
            with self._streams.communicating():
                self._post(step)
            if self._calls[step]:
                self._compute(self._calls[step])
        with self._streams.communicating():
            for row in self._part.receives:
                self._await((row.operation, ARRIVED))
            for join in self._part.joins:
                self._await((join.operation, ARRIVED))
            for row in self._part.sends:
                self._await((row.operation, SENT))

    def _post(self, step: int) -> None:
        sends, receives = self._sends[step], self._receives[step]
        for row in (*sends, *receives):
            self._await_all(row.operation)
        posted = self._message_io.post_receives(receives), self._message_io.post_sends(sends)
        for rows, waits, event in zip((receives, sends), posted, (ARRIVED, SENT), strict=True):
            for row, wait in zip(rows, waits, strict=True):
                self._outstanding[row.operation, event] = row, wait

    def _compute(self, calls: Sequence[CallRow]) -> None:
        with self._streams.communicating():
            for call in calls:
                for condition in self._part.waits.get(call.operation, ()):
                    if not self._is_call(condition[0]):  # calls are in order on their stream
                        self._await(condition)
            ready = self._streams.mark()
        self._streams.wait(ready)
        for call in calls:
            self._message_io.compute(call)
        ended = self._streams.mark()
        for call in calls:
            self._computed[call.operation] = ended
            self._added |= {place.block: ended for place in call.adds if place.since == RESIDENT}

    def _is_call(self, operation: int) -> bool:
        return self._part.first_call <= operation < self._part.first_buffer

    def _await_all(self, operation: int) -> None:
        for condition in self._part.waits.get(operation, ()):
            self._await(condition)

    def _await(self, condition: Condition) -> None:
        """Make communication wait until something has happened; if it is a join, make it."""
        if condition in self._reached:
            return
        self._reached.add(condition)
        operation, event = condition
        if operation >= self._part.first_buffer:
            self._await_all(operation)
            if operation in self._joins:
                self._join(operation)
        elif self._is_call(operation):
            self._streams.wait(self._computed[operation])
        elif event == ARRIVED:
            self._message_io.receive(*self._outstanding.pop(condition))
        else:
            self._message_io.finish_send(*self._outstanding.pop(condition))

    def _join(self, operation: int) -> None:
        place = self._joins[operation].place
        if place.since == RESIDENT and place.block in self._added:
            self._streams.wait(self._added[place.block])
        self._message_io.join(self._joins[operation])


def _by_step(rows: Iterable[Row], steps: int) -> list[list[Row]]:
    found: list[list[Row]] = [[] for _ in range(steps)]
    for row in rows:
        found[row.step].append(row)
    return found
