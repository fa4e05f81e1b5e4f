"""Steps of a forward pass around rings: keys circulate, queries attend to the arrivals of the step before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.attention.circulation import Circulation
from tasp_lab.schedule.step import LazySteps, Step
from tasp_lab.workload.kernel_calls import Call


class CirculationSteps(LazySteps):
    """Base of steps in which blocks circulate; one lane per ring, unless a subclass needs more."""

    def __init__(self, circulation: Circulation) -> None:
        self.circulation = circulation

    @property
    def lanes(self) -> int:
        return len(self.circulation.rings)

    @abstractmethod
    def transfers(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Sources, destinations, lanes and blocks of the transfers of a step; int arrays (transfers,)."""

    @abstractmethod
    def _calls(self, index: int) -> Iterator[Call]: ...

    def step(self, index: int) -> Step:
        return Step(*self.transfers(index), tuple(self._calls(index)))


class AttentionSteps(CirculationSteps):
    """Key block b starts at its owner and makes `hops[b]` hops along its ring, one per step.

    `trim`: a block is dropped after the last rank whose mask needs it.
    """

    def __init__(self, circulation: Circulation, trim: bool) -> None:
        super().__init__(circulation)
        self._hops = circulation.hops(trim)

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send in total."""
        return int((self._hops * self.circulation.task.block_bytes[self.circulation.blocks]).sum())

    def __len__(self) -> int:
        return 1 + int(self._hops.max(initial=0))

    def transfers(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        circulation, moving = self.circulation, np.flatnonzero(self._hops > index)
        moving = moving[circulation.order(moving, circulation.at(index + 1, moving))]
        source, destination = circulation.at(index, moving), circulation.at(index + 1, moving)
        return source, destination, circulation.ring_of[moving], circulation.blocks[moving]

    def _calls(self, index: int) -> Iterator[Call]:
        """The calls of a step: on own keys at the first step, later on the arrivals of the step before."""
        return self.circulation.calls_at(index, np.flatnonzero(self._hops >= index))
