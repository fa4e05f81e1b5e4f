"""Steps of a forward pass around rings: keys circulate, queries attend to the arrivals of the step before."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import LazySteps, ScheduleModel, Step
from tasp_lab.schedule.theorems import Paths, paths_prove
from tasp_lab.schedules.attention.circulation import Circulation
from tasp_lab.schedules.attention.task import AttentionTask


class Transfers(NamedTuple):
    """The transfers of a step, arrays (transfers,)."""

    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray
    gives: BoolArray


class CirculationSteps(LazySteps):
    """Base of steps in which blocks circulate; one lane per ring, unless a subclass needs more."""

    def __init__(self, circulation: Circulation) -> None:
        self.circulation = circulation

    @property
    def task(self) -> AttentionTask:
        return self.circulation.task

    @property
    def lanes(self) -> int:
        return len(self.circulation.rings)

    @abstractmethod
    def transfers(self, index: int) -> Transfers:
        """The transfers of a step."""

    @abstractmethod
    def _calls(self, index: int) -> tuple[Calls, ...]: ...

    @abstractmethod
    def paths(self) -> Paths:
        """The paths of all circulating blocks and their gradients."""

    def step(self, index: int) -> Step:
        return Step(*self.transfers(index), self._calls(index))

    def prove(self, schedule: ScheduleModel) -> int | None:
        """By induction along the paths (`tasp_lab.schedule.theorems`)."""
        task, staying, paths = self.task, self.circulation.stationary, self.paths()
        owner, results = task.owner[staying], task.output_of[staying]
        fits = schedule.task is task and np.array_equal(schedule.blocks.parts, task.parts)
        return paths.transfers if fits and paths_prove(paths, staying, owner, results, owner, schedule) else None


class AttentionSteps(CirculationSteps):
    """Key block b starts at its owner and makes `hops[b]` hops along its ring, one per step.

    `trim`: a block is dropped after the last rank whose mask needs it.
    """

    def __init__(self, circulation: Circulation, trim: bool) -> None:
        super().__init__(circulation)
        self._hops = circulation.hops(trim)

    def paths(self) -> Paths:
        return self.circulation.paths(self.lanes, self._hops)

    @property
    def bytes_sent(self) -> int:
        """The bytes that all ranks send in total."""
        return int((self._hops * self.task.block_bytes[self.circulation.blocks]).sum())

    def __len__(self) -> int:
        return 1 + int(self._hops.max(initial=0))

    def transfers(self, index: int) -> Transfers:
        circulation, moving = self.circulation, np.flatnonzero(self._hops > index)
        moving = moving[circulation.order(moving, circulation.at(index + 1, moving))]
        source, destination = circulation.at(index, moving), circulation.at(index + 1, moving)
        copied = np.zeros(len(moving), dtype=bool)
        return Transfers(source, destination, circulation.ring_of[moving], circulation.blocks[moving], copied)

    def _calls(self, index: int) -> tuple[Calls, ...]:
        """The calls of a step: on own keys at the first step, later on the arrivals of the step before."""
        return self.circulation.calls_at(index, np.flatnonzero(self._hops >= index))
