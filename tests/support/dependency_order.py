"""Execution of numbers in orders that respect `tasp_lab.schedule.dependencies`, and nothing else.

A sum that arrives at a resident copy lands in the buffer of its step, or at a place of its own without a pool. It is
added from there as soon as all that reads the copy at this step or before has been sent or computed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.schedule.dependencies import SENT, Edges, dependencies
from tests.support.numeric_executor import BEGIN, READ, WRITE, Copy, Execution, Numbers, Operation, Place
from tests.support.world import World


def edges_of(world: World) -> Edges:
    """What waits for what in a valid world."""
    return dependencies(world.schedule()).edges


def is_right_whenever(world: World, numbers: Numbers, edges: Edges, order: random.Random) -> bool:
    """Whether every promised block is right after a random order that respects the edges."""
    return _Ordered(world, numbers, edges).run(order)


@dataclass(eq=False)
class _Landed:
    """A sum beside its resident copy; NaN when its buffer has been overwritten."""

    operation: Operation
    place: Place | None
    value: FloatArray


class _Ordered(Execution):
    def __init__(self, world: World, numbers: Numbers, edges: Edges) -> None:
        super().__init__(world, numbers)
        self.edges, self.landed = edges, defaultdict[Copy, list[_Landed]](list)
        self.reading: dict[Copy, list[Operation]] = defaultdict(list)
        for each in self.operations:
            for copy in self._copies(each):
                self.reading[copy].append(each)

    @staticmethod
    def _copies(operation: Operation) -> Iterator[Copy]:
        return (copy for each in operation.reads for copy in each)

    def waits(self) -> list[set[int]]:
        """As the edges say; releases of buffers, numbered after all operations, are operations without memory."""
        count = max(len(self.operations), int(self.edges.after.max(initial=0)) + 1)
        found = [{3 * at + event - 1} if event else set() for at in range(count) for event in (BEGIN, READ, WRITE)]
        for before, after, event in zip(*(x.tolist() for x in self.edges[:3]), strict=True):
            found[3 * after].add(3 * before + (READ if event == SENT else WRITE))
        return found

    def happens(self, operation: Operation, event: int) -> None:
        super().happens(operation, event)
        if event == READ:
            for copy in self._copies(operation):
                if operation in self.reading[copy]:
                    self.reading[copy].remove(operation)
                self._join(copy)

    def write(self, operation: Operation, copy: Copy, value: FloatArray) -> None:
        kind = self.world.blocks.kinds[self.kind[copy[1]]]
        resident = self.resident[copy[0]][copy[1]]
        place = None
        if kind.pool is not None and not (resident and operation.is_call):
            place = (copy[0], self.pools.index(kind.pool), operation.step % kind.pool.buffers)
            self._overwrite(place, operation.step)
        if resident and kind.join and not operation.is_call:
            self.landed[copy].append(_Landed(operation, place, value))
            self._join(copy)
        else:
            super().write(operation, copy, value)

    def _overwrite(self, place: Place, step: int) -> None:
        for each in (each for landed in self.landed.values() for each in landed):
            if each.place == place and each.operation.step != step:
                each.value = np.full_like(each.value, np.nan)

    def _join(self, copy: Copy) -> None:
        """Add what has landed and is no longer waited for."""
        for each in list(self.landed[copy]):
            if all(reader.step > each.operation.step for reader in self.reading[copy]):
                self.landed[copy].remove(each)
                super().write(each.operation, copy, each.value)
