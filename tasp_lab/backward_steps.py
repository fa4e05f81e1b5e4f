"""The steps of backward passes around rings: blocks move, gradients of them follow one step behind.

*Onward*: blocks start at their owners, as forward, and meet at hop h whatever they meet at step h. What a rank has to
add to their gradient leaves it at step h + 1, for the next rank of the ring, which has met the block meanwhile. From
the last rank that adds something the gradient goes home: straight on a lane of its own, or along the rest of the ring.

*Reversed*: blocks start at the last rank of their ring, where an untrimmed forward pass has left them, and go back.
They need not reach their owners, which have them; the gradient does. n steps in all, with compute in each of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.attention_steps import JourneySteps
from tasp_lab.calls import Call
from tasp_lab.journeys import Journeys


class BackwardSteps(JourneySteps):
    """What both ways have in common. All hops are those of `journeys`."""

    @abstractmethod
    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        """The blocks that move at a step, and from which hop to which."""

    @abstractmethod
    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The blocks whose gradients move at a step, from where to where, and on which lanes."""

    def transfers(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        journeys = self.journeys
        moving, here, there = self._moving(index)
        moving = moving[journeys.order(moving, journeys.at(there, moving))]
        following, source, destination, lane = self._following(index)
        order = journeys.order(following, destination)
        return (
            np.concatenate([journeys.at(here, moving), source[order]]),
            np.concatenate([journeys.at(there, moving), destination[order]]),
            np.concatenate([journeys.ring_of[moving], lane[order]]),
            np.concatenate([journeys.blocks[moving], journeys.task.gradient_blocks(journeys.blocks[following[order]])]),
        )


class OnwardSteps(BackwardSteps):
    """Blocks start at their owners. `direct`: gradients go home straight, on a lane of their own.

    `trim`: a block stops at the last rank that it meets.
    """

    def __init__(self, journeys: Journeys, trim: bool, direct: bool) -> None:
        super().__init__(journeys)
        last = journeys.world_size - 1
        self._hops = journeys.hops(trim)
        self._homeward = np.where(direct & (journeys.last < last), journeys.last, last)
        self._returning = bool((self._homeward < last)[journeys.last > 0].any())

    @property
    def lanes(self) -> int:
        return super().lanes + self._returning

    def __len__(self) -> int:
        meets = self.journeys.last > 0
        return max(1 + int(self._hops.max(initial=0)), 2 + int(self._homeward[meets].max(initial=-1)))

    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        return np.flatnonzero(self._hops > index), index, index + 1

    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        journeys, hop = self.journeys, index - 1
        following = np.flatnonzero((journeys.first > 0) & (journeys.first <= hop) & (hop <= self._homeward))
        goes_home = self._homeward[following] == hop
        source = journeys.at(hop, following)
        destination = journeys.at(np.where(goes_home, 0, hop + 1), following)
        straight = goes_home & (hop < journeys.world_size - 1)
        return following, source, destination, np.where(straight, len(journeys.rings), journeys.ring_of[following])

    def _calls(self, index: int) -> Iterator[Call]:
        return self.journeys.calls_at(index, np.flatnonzero(self._hops >= index))


class ReversedSteps(BackwardSteps):
    """Blocks start at the last rank of their ring. `trim`: they stop at the last rank that they meet, coming back."""

    def __init__(self, journeys: Journeys, trim: bool) -> None:
        super().__init__(journeys)
        wanted = np.where(journeys.first > 0, journeys.first, journeys.world_size)
        self._until = wanted if trim else np.ones(len(journeys.blocks), dtype=np.int64)

    @property
    def start(self) -> IntArray:
        """The rank at which each travelling block starts."""
        return self.journeys.at(self.journeys.world_size - 1)

    def __len__(self) -> int:
        return self.journeys.world_size

    def _hop(self, index: int) -> int:
        """The hop at which blocks are when a step begins."""
        return self.journeys.world_size - 1 - index

    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        hop = self._hop(index)
        return np.flatnonzero(hop - 1 >= self._until), hop, hop - 1

    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        journeys, hop = self.journeys, self._hop(index) + 1
        following = np.flatnonzero(hop <= journeys.last)
        there = journeys.at(hop - 1, following)
        return following, journeys.at(hop, following), there, journeys.ring_of[following]

    def _calls(self, index: int) -> Iterator[Call]:
        hop = self._hop(index)
        return self.journeys.calls_at(hop, np.flatnonzero(hop >= self._until))
