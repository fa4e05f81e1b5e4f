"""Which operations have been sent and have arrived, which calls have been handed out, and who waits for that."""

from __future__ import annotations

import simpy

from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.dependencies import (
    ARRIVED,
    BLOCK,
    BUFFER,
    HANDED_OUT,
    LANE,
    SENT,
)
from tasp_lab.schedule.messages import MessageDependencies

Condition = tuple[int, int]
"""An operation and its event."""


class Progress:
    """The state of all operations (`tasp_lab.schedule.messages`); buffers are released as their uses end.

    `handed_out` are the calls that others wait for until they have been handed out.
    """

    def __init__(self, env: simpy.Environment, derived: MessageDependencies) -> None:
        self._env = env
        self._happened = tuple(bytearray(len(derived)) for _ in (SENT, ARRIVED, HANDED_OUT))
        self._awaited: dict[Condition, simpy.Event] = {}
        self.handed_out = frozenset(derived.edges.before[derived.edges.event == HANDED_OUT].tolist())
        edges, releases = derived.edges, derived.edges.after >= derived.first_buffer
        self._conditions: dict[int, dict[int, list[Condition]]] = {BLOCK: {}, BUFFER: {}}
        waits = ~releases & (edges.cause != LANE)
        for before, after, event, cause in _rows(*(column[waits] for column in edges)):
            self._conditions[cause].setdefault(after, []).append((before, event))
        self._pending_uses: dict[int, int] = {}
        self._used: dict[Condition, list[int]] = {}
        for before, buffer, event, _ in _rows(*(column[releases] for column in edges)):
            self._pending_uses[buffer] = self._pending_uses.get(buffer, 0) + 1
            self._used.setdefault((before, event), []).append(buffer)

    def conditions(self, operation: int, cause: int) -> list[Condition]:
        """What an operation waits for, by cause: for blocks, or for memory."""
        return self._conditions[cause].get(operation, [])

    def has(self, condition: Condition) -> bool:
        operation, event = condition
        return bool(self._happened[event][operation])

    def wait(self, condition: Condition) -> simpy.Event:
        """The event that fires when a condition that does not hold yet does."""
        if condition not in self._awaited:
            self._awaited[condition] = simpy.Event(self._env)
        return self._awaited[condition]

    def record(self, operation: int, event: int) -> None:
        """Record an event of an operation."""
        self._happened[event][operation] = True
        if (awaited := self._awaited.pop((operation, event), None)) is not None:
            awaited.succeed()
        for buffer in self._used.pop((operation, event), ()):
            self._pending_uses[buffer] -= 1
            if not self._pending_uses[buffer]:
                self.record(buffer, SENT)
                self.record(buffer, ARRIVED)


def _rows(*columns: IntArray) -> zip[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)
