"""The steps of a forward pass around rings: keys move on, queries attend to what came the step before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.calls import Call
from tasp_lab.journeys import Journeys
from tasp_lab.schedule import LazySteps, Step


class JourneySteps(LazySteps):
    """Steps in which blocks go along their journeys; a lane per ring, unless a kind of steps needs more."""

    def __init__(self, journeys: Journeys) -> None:
        self.journeys = journeys

    @property
    def lanes(self) -> int:
        return len(self.journeys.rings)

    @abstractmethod
    def transfers(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Sources, destinations, lanes and blocks of what moves at a step."""

    @abstractmethod
    def _calls(self, index: int) -> Iterator[Call]: ...

    def step(self, index: int) -> Step:
        return Step(*self.transfers(index), tuple(self._calls(index)))


class AttentionSteps(JourneySteps):
    """Key block b starts at its owner and makes `hops[b]` hops along its ring, one per step.

    `trim`: a block stops at the last rank that sees any of it.
    """

    def __init__(self, journeys: Journeys, trim: bool) -> None:
        super().__init__(journeys)
        self._hops = journeys.hops(trim)

    @property
    def bytes_sent(self) -> int:
        """What all ranks send in all."""
        return int((self._hops * self.journeys.task.block_bytes[self.journeys.blocks]).sum())

    def __len__(self) -> int:
        return 1 + int(self._hops.max(initial=0))

    def transfers(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        journeys, moving = self.journeys, np.flatnonzero(self._hops > index)
        moving = moving[journeys.order(moving, journeys.at(index + 1, moving))]
        source, destination = journeys.at(index, moving), journeys.at(index + 1, moving)
        return source, destination, journeys.ring_of[moving], journeys.blocks[moving]

    def _calls(self, index: int) -> Iterator[Call]:
        """The calls of a step: at the first each rank attends to its own keys, later to what came the step before."""
        return self.journeys.calls_at(index, np.flatnonzero(self._hops >= index))
