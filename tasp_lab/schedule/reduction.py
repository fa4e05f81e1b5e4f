"""Reductions: blocks that are sums, and the verification that every sum is completed and reaches its destinations.

Every rank that holds a block at the start holds its own *part* of it; the block is the sum of all parts. Each block has
a step, given by `Reduction`, before which its transfers *add* and from which on they *copy*. An adding transfer moves
all parts that its source holds to its destination, which adds them to its own. A copying transfer copies a complete
sum, which the source keeps.

The rules, in addition to those of every schedule (`tasp_lab.schedule.schedule`):

- the source of an adding transfer holds a part when the step begins, and sends it once;
- its destination holds a part, too, and does not send it at the same step;
- the source of a copying transfer holds the complete sum when the step begins, its destination no part of it;
- at the end, ranks hold the complete sums that the collective promises, and no part of any other.

While parts are added, each is at one rank at a time, so the parts of two ranks are disjoint. Counting parts is
therefore enough: a rank whose count equals the total holds every part once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasp_lab.arrays import BoolArray, Int32Array, IntArray
from tasp_lab.errors import ScheduleError

if TYPE_CHECKING:
    from tasp_lab.schedule.step import Step


@dataclass(frozen=True, eq=False)
class Reduction:
    """Which transfers add and which copy.

    `first_copy_step` is an int array (blocks,): transfers of a block add before this step and copy from it on.
    """

    first_copy_step: IntArray

    def __post_init__(self) -> None:
        self.first_copy_step.flags.writeable = False

    def adds(self, index: int, block: IntArray | int) -> BoolArray:
        """Whether transfers of a block, or of each of several, add at step `index`."""
        added: BoolArray = index < self.first_copy_step[block]
        return added


class Parts:
    """Counts the parts of each sum at every rank, step by step. Methods raise `ScheduleError` if a rule is broken.

    `initial` is a bool array (world_size, blocks): which ranks hold a part at the start. `held` is an int array
    (world_size,): of how many blocks each rank holds any part.
    """

    def __init__(self, reduction: Reduction, initial: BoolArray) -> None:
        blocks = initial.shape[1]
        if reduction.first_copy_step.shape != (blocks,):
            raise ScheduleError(
                f"a reduction of {len(reduction.first_copy_step)} blocks in a schedule that has {blocks}"
            )
        self._reduction = reduction
        self._parts: Int32Array = initial.astype(np.int32)
        self._all = self._parts.sum(axis=0)
        self.held: IntArray = initial.sum(axis=1)
        if (self._all == 0).any():
            raise ScheduleError(f"no rank holds a part of block {self._all.argmin()} at the start")

    def move(self, index: int, step: Step) -> None:
        """Apply the transfers of step `index`."""
        added = self._reduction.adds(index, step.block)
        transfers = _Transfers(index, step.source, step.destination, step.lane, step.block)
        copies = transfers.select(~added)
        self._check_copies(copies)
        self._add(transfers.select(added))
        self._copy(copies)

    def _add(self, transfers: _Transfers) -> None:
        parts, given_by = self._parts, (transfers.source, transfers.block)
        given = parts[given_by]
        transfers.refuse(given == 0, "rank {source} holds no part of this sum when the step begins")
        transfers.refuse(self._doubled(given_by), "rank {source} sends this sum twice at this step")
        parts[given_by] = 0
        taken_by = transfers.destination, transfers.block
        transfers.refuse(parts[taken_by] == 0, "rank {destination} holds no part of this sum to add to")
        np.add.at(parts, taken_by, given)
        np.subtract.at(self.held, transfers.source, 1)

    def _check_copies(self, transfers: _Transfers) -> None:
        complete = self._parts[transfers.source, transfers.block] == self._all[transfers.block]
        transfers.refuse(~complete, "rank {source} does not have the complete sum when the step begins")
        present = self._parts[transfers.destination, transfers.block] > 0
        transfers.refuse(present, "rank {destination} already holds a part of this sum")

    def _copy(self, transfers: _Transfers) -> None:
        taken_by = transfers.destination, transfers.block
        transfers.refuse(self._doubled(taken_by), "rank {destination} receives this sum twice at this step")
        self._parts[taken_by] = self._all[transfers.block]
        np.add.at(self.held, transfers.destination, 1)

    def _doubled(self, held_by: tuple[IntArray, IntArray]) -> BoolArray:
        """Which (rank, block) pairs occur again later in the arrays. Overwrites their parts."""
        marks = np.arange(len(held_by[0]), dtype=np.int32)
        self._parts[held_by] = marks
        doubled: BoolArray = self._parts[held_by] != marks
        return doubled

    def finish(self, final: BoolArray) -> None:
        """Check that ranks hold the complete sums that `final` requires, and no other parts."""
        wrong = np.argwhere(self._parts != np.where(final, self._all, 0))
        if len(wrong):
            rank, block = (int(value) for value in wrong[0])
            expected = "all of them" if final[rank, block] else "none"
            raise ScheduleError(
                f"after the last step: rank {rank} has {self._parts[rank, block]} of the {self._all[block]} parts of "
                f"block {block}, expected {expected}"
            )


@dataclass(frozen=True, eq=False)
class _Transfers:
    """Transfers of one step."""

    index: int
    source: IntArray
    destination: IntArray
    lane: IntArray
    block: IntArray

    def select(self, chosen: BoolArray) -> _Transfers:
        columns = (self.source, self.destination, self.lane, self.block)
        return _Transfers(self.index, *(values[chosen] for values in columns))

    def refuse(self, wrong: BoolArray, reason: str) -> None:
        """Raise `ScheduleError` for the first transfer that is wrong."""
        if wrong.any():
            at = int(wrong.argmax())
            source, destination = int(self.source[at]), int(self.destination[at])
            raise ScheduleError(
                f"step {self.index}: rank {source} sends block {self.block[at]} to rank {destination} "
                f"on lane {self.lane[at]}: {reason.format(source=source, destination=destination)}"
            )
