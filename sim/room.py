"""A room: blocks that lie at one rank, and what has still to happen with them."""

from __future__ import annotations

from collections.abc import Iterable

import simpy


class Room:
    """What a rank has from the start, or what arrives there at one step; without rooms all that it ever has.

    `blocks` are those that are there. `users` counts the arrivals, sends and kernel calls that have not ended yet.
    """

    __slots__ = ("_awaited", "_env", "_freed", "blocks", "users")

    def __init__(self, env: simpy.Environment, blocks: Iterable[int] = ()) -> None:
        self._env = env
        self._awaited: dict[int, simpy.Event] = {}
        self._freed: simpy.Event | None = None
        self.blocks = set(blocks)
        self.users = 0

    def arrival(self, block: int) -> simpy.Event:
        """The event that fires when a block, which is not here yet, arrives."""
        if block not in self._awaited:
            self._awaited[block] = simpy.Event(self._env)
        return self._awaited[block]

    def freed(self) -> simpy.Event:
        """The event that fires when the last user, of which there are some, has ended."""
        if self._freed is None:
            self._freed = simpy.Event(self._env)
        return self._freed

    def take_in(self, block: int) -> None:
        """A block has arrived."""
        self.blocks.add(block)
        if (awaited := self._awaited.pop(block, None)) is not None:
            awaited.succeed()
        self.end_use()

    def end_use(self) -> None:
        """One of the users has ended."""
        self.users -= 1
        if not self.users and self._freed is not None:
            self._freed.succeed()
