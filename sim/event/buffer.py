"""A buffer: blocks at one rank and their pending uses."""

from __future__ import annotations

import simpy


class Buffer:
    """The resident blocks of a rank, or the blocks that arrive at one step; without buffers all blocks of the rank.

    A block is available once all its parts are: its arrival and, in a backward pass, the rank's own contributions to a
    gradient. `pending_uses` counts the arrivals, sends and kernel calls that have not ended.
    """

    __slots__ = ("_arrivals", "_env", "_freed", "_missing", "pending_uses")

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._arrivals: dict[int, simpy.Event] = {}
        self._freed: simpy.Event | None = None
        self._missing: dict[int, int] = {}
        self.pending_uses = 0

    def expect(self, block: int) -> None:
        """Register one more part of a block, a pending use until it is delivered."""
        self._missing[block] = self._missing.get(block, 0) + 1
        self.pending_uses += 1

    def has(self, block: int) -> bool:
        return block not in self._missing

    def arrival(self, block: int) -> simpy.Event:
        """The event that fires when a block that is not yet available becomes so."""
        if block not in self._arrivals:
            self._arrivals[block] = simpy.Event(self._env)
        return self._arrivals[block]

    def freed(self) -> simpy.Event:
        """The event that fires when the last pending use ends; there must be one."""
        if self._freed is None:
            self._freed = simpy.Event(self._env)
        return self._freed

    def deliver(self, block: int) -> None:
        """Record the delivery of a part of a block."""
        self._missing[block] -= 1
        if not self._missing[block]:
            del self._missing[block]
            if (awaited := self._arrivals.pop(block, None)) is not None:
                awaited.succeed()
        self.end_use()

    def end_use(self) -> None:
        """Record the end of a pending use."""
        self.pending_uses -= 1
        if not self.pending_uses and self._freed is not None:
            self._freed.succeed()
