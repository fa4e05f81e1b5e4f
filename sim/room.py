"""A room: blocks that lie at one rank, and what has still to happen with them."""

from __future__ import annotations

import simpy


class Room:
    """What a rank has from the start, or what comes there at one step; without rooms all that it ever has.

    A block is there when all its parts are: its arrival, and going backward what the rank adds to a gradient. `users`
    counts the arrivals, sends and kernel calls that have not ended yet.
    """

    __slots__ = ("_awaited", "_env", "_freed", "_missing", "users")

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._awaited: dict[int, simpy.Event] = {}
        self._freed: simpy.Event | None = None
        self._missing: dict[int, int] = {}
        self.users = 0

    def expect(self, block: int) -> None:
        """One more part of a block is to come; it is a user until then."""
        self._missing[block] = self._missing.get(block, 0) + 1
        self.users += 1

    def has(self, block: int) -> bool:
        return block not in self._missing

    def arrival(self, block: int) -> simpy.Event:
        """The event that fires when a block, which is not here yet, is."""
        if block not in self._awaited:
            self._awaited[block] = simpy.Event(self._env)
        return self._awaited[block]

    def freed(self) -> simpy.Event:
        """The event that fires when the last user, of which there are some, has ended."""
        if self._freed is None:
            self._freed = simpy.Event(self._env)
        return self._freed

    def take_in(self, block: int) -> None:
        """A part of a block has come."""
        self._missing[block] -= 1
        if not self._missing[block]:
            del self._missing[block]
            if (awaited := self._awaited.pop(block, None)) is not None:
                awaited.succeed()
        self.end_use()

    def end_use(self) -> None:
        """One of the users has ended."""
        self.users -= 1
        if not self.users and self._freed is not None:
            self._freed.succeed()
