"""Steps of backward passes around rings: blocks circulate, their gradients follow one step behind.

`RotationSteps`: blocks start at their owners, as in the forward pass, and are computed with at hop h in step h. The
gradient leaves that rank at step h + 1 for the next rank of the ring, which has computed its own part meanwhile. From
the last contributing rank the gradient returns to its owner: directly, on a lane per distance, or along the rest of the
ring.

`RotationBackSteps`: blocks start at the last rank of their ring, where an untrimmed forward pass left them, and
circulate back. They need not reach their owners, which hold them; their gradients do. n steps, with compute in each.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.theorems import Paths
from tasp_lab.schedules.attention.circulation import Circulation
from tasp_lab.schedules.attention.forward_steps import CirculationSteps, Transfers


class BackwardSteps(CirculationSteps):
    """Base of both kinds of steps. All hops are those of `circulation`."""

    @abstractmethod
    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        """The blocks that move at a step, their hop before and their hop after it."""

    @abstractmethod
    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The blocks whose gradients move at a step; sources, destinations and lanes."""

    def transfers(self, index: int) -> Transfers:
        circulation = self.circulation
        moving, here, there = self._moving(index)
        moving = moving[circulation.order(moving, circulation.at(there, moving))]
        following, source, destination, lane = self._following(index)
        order = circulation.order(following, destination)
        return Transfers(
            np.concatenate([circulation.at(here, moving), source[order]]),
            np.concatenate([circulation.at(there, moving), destination[order]]),
            np.concatenate([circulation.ring_of[moving], lane[order]]),
            np.concatenate([circulation.blocks[moving], circulation.gradients[following[order]]]),
            np.repeat([False, True], [len(moving), len(following)]),
        )


class RotationSteps(BackwardSteps):
    """Blocks start at their owners.

    `direct`: gradients return to their owners in one hop, on a lane per distance on the ring, so that what a rank sends
    on a lane has one destination. `trim`: a block is dropped after the last rank whose mask needs it.
    """

    def __init__(self, circulation: Circulation, trim: bool, direct: bool) -> None:
        super().__init__(circulation)
        last = circulation.world_size - 1
        self._hops = circulation.hops(trim)
        self._return_hop = np.where(direct & (circulation.last < last), circulation.last, last)
        self._distances = np.unique(self._return_hop[(self._return_hop < last) & (circulation.last > 0)])

    @property
    def lanes(self) -> int:
        return super().lanes + len(self._distances)

    def __len__(self) -> int:
        needed = self.circulation.last > 0
        return max(1 + int(self._hops.max(initial=0)), 2 + int(self._return_hop[needed].max(initial=-1)))

    def paths(self) -> Paths:
        return self.circulation.paths(self.lanes, self._hops, self._return_hop)

    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        return np.flatnonzero(self._hops > index), index, index + 1

    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        circulation, hop = self.circulation, index - 1
        following = np.flatnonzero((circulation.first > 0) & (circulation.first <= hop) & (hop <= self._return_hop))
        returns = self._return_hop[following] == hop
        source = circulation.at(hop, following)
        destination = circulation.at(np.where(returns, 0, hop + 1), following)
        direct = returns & (hop < circulation.world_size - 1)
        return_lane = len(circulation.rings) + np.searchsorted(self._distances, hop)
        return following, source, destination, np.where(direct, return_lane, circulation.ring_of[following])

    def _calls(self, index: int) -> tuple[Calls, ...]:
        return self.circulation.calls_at(index, np.flatnonzero(self._hops >= index))


class RotationBackSteps(BackwardSteps):
    """Blocks start at the last rank of their ring. `trim`: they stop at the first hop whose mask needs them."""

    def __init__(self, circulation: Circulation, trim: bool) -> None:
        super().__init__(circulation)
        first_needed = np.where(circulation.first > 0, circulation.first, circulation.world_size)
        self._until = first_needed if trim else np.ones(len(circulation.blocks), dtype=np.int64)

    @property
    def start(self) -> IntArray:
        """The rank at which each circulating block starts."""
        return self.circulation.at(self.circulation.world_size - 1)

    def __len__(self) -> int:
        return self.circulation.world_size

    def _hop(self, index: int) -> int:
        """The hop of all blocks at the beginning of a step."""
        return self.circulation.world_size - 1 - index

    def paths(self) -> Paths:
        return self.circulation.paths_back(self.lanes, self._until)

    def _moving(self, index: int) -> tuple[IntArray, int, int]:
        hop = self._hop(index)
        return np.flatnonzero(hop - 1 >= self._until), hop, hop - 1

    def _following(self, index: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        circulation, hop = self.circulation, self._hop(index) + 1
        following = np.flatnonzero(hop <= circulation.last)
        there = circulation.at(hop - 1, following)
        return following, circulation.at(hop, following), there, circulation.ring_of[following]

    def _calls(self, index: int) -> tuple[Calls, ...]:
        hop = self._hop(index)
        return self.circulation.calls_at(hop, np.flatnonzero(hop >= self._until))
