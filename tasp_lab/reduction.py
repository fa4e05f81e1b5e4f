"""Reductions: blocks that are sums, and the proof that every sum gets complete and where it belongs.

Every rank that holds a block at the start holds its own *part* of it; the block is the sum of all parts. A transfer
*adds* at first: its source gives away all that it has of the sum, and its destination joins this to what it has. From a
step on that `Reduction` names for each block, its transfers *copy*: the source has the complete sum and keeps it.

The rules, beside those of every schedule (`tasp_lab.schedule`):

- what is added comes from a rank that has a part of the sum when the step begins, and gives it away once;
- it comes to a rank that has a part, too, and does not give it away at this step;
- what is copied comes from a rank that has the complete sum when the step begins, to one that has nothing of it;
- in the end, ranks have the complete sums that the collective promises, and nothing of any other.

So each part is at one rank at a time while parts are added: what two ranks have of a sum is disjoint, however it got
there. That is why parts need not be told apart: who has as many as there are has each of them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasp_lab.arrays import BoolArray, Int32Array, IntArray
from tasp_lab.errors import ScheduleError

if TYPE_CHECKING:
    from tasp_lab.schedule import Step


@dataclass(frozen=True, eq=False)
class Reduction:
    """Which transfers add and which copy.

    `copied_from` is an int array (blocks,): transfers of a block add at the steps before, and copy from this step on.
    """

    copied_from: IntArray

    def __post_init__(self) -> None:
        self.copied_from.flags.writeable = False

    def adds(self, index: int, block: IntArray | int) -> BoolArray:
        """Whether transfers of a block, or of each of several, add at step `index`."""
        added: BoolArray = index < self.copied_from[block]
        return added


class Parts:
    """How many parts of each sum every rank has, step by step. Its methods raise `ScheduleError` at what breaks a rule.

    `initial` is a bool array (world_size, blocks): who has a part at the start. `held` says of how many
    blocks each rank has anything, an int array (world_size,).
    """

    def __init__(self, reduction: Reduction, initial: BoolArray) -> None:
        blocks = initial.shape[1]
        if reduction.copied_from.shape != (blocks,):
            raise ScheduleError(f"a reduction of {len(reduction.copied_from)} blocks in a schedule that has {blocks}")
        self._reduction = reduction
        self._parts: Int32Array = initial.astype(np.int32)
        self._all = self._parts.sum(axis=0)
        self.held: IntArray = initial.sum(axis=1)
        if (self._all == 0).any():
            raise ScheduleError(f"no rank has a part of block {self._all.argmin()} at the start, which is to be a sum")

    def move(self, index: int, step: Step) -> None:
        """The transfers of step `index` take place."""
        added = self._reduction.adds(index, step.block)
        transfers = _Transfers(index, step.source, step.destination, step.lane, step.block)
        copies = transfers.those(~added)
        self._check_copies(copies)
        self._add(transfers.those(added))
        self._copy(copies)

    def _add(self, transfers: _Transfers) -> None:
        parts, given_by = self._parts, (transfers.source, transfers.block)
        given = parts[given_by]
        transfers.refuse(given == 0, "rank {source} has nothing of this sum when the step begins")
        transfers.refuse(self._doubled(given_by), "rank {source} gives this sum away twice at this step")
        parts[given_by] = 0
        taken_by = transfers.destination, transfers.block
        transfers.refuse(parts[taken_by] == 0, "rank {destination} keeps nothing of this sum to add it to")
        np.add.at(parts, taken_by, given)
        np.subtract.at(self.held, transfers.source, 1)

    def _check_copies(self, transfers: _Transfers) -> None:
        complete = self._parts[transfers.source, transfers.block] == self._all[transfers.block]
        transfers.refuse(~complete, "rank {source} does not have the complete sum when the step begins")
        present = self._parts[transfers.destination, transfers.block] > 0
        transfers.refuse(present, "rank {destination} has something of this sum already")

    def _copy(self, transfers: _Transfers) -> None:
        taken_by = transfers.destination, transfers.block
        transfers.refuse(self._doubled(taken_by), "rank {destination} gets this sum twice at this step")
        self._parts[taken_by] = self._all[transfers.block]
        np.add.at(self.held, transfers.destination, 1)

    def _doubled(self, held_by: tuple[IntArray, IntArray]) -> BoolArray:
        """Which pairs (rank, block) come again later in the arrays: what they leave in the parts is not theirs."""
        marks = np.arange(len(held_by[0]), dtype=np.int32)
        self._parts[held_by] = marks
        doubled: BoolArray = self._parts[held_by] != marks
        return doubled

    def finish(self, final: BoolArray) -> None:
        """Check that in the end ranks have complete sums where `final` says so, and nothing elsewhere."""
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

    def those(self, chosen: BoolArray) -> _Transfers:
        columns = (self.source, self.destination, self.lane, self.block)
        return _Transfers(self.index, *(values[chosen] for values in columns))

    def refuse(self, wrong: BoolArray, reason: str) -> None:
        """Raise for the first transfer that is wrong."""
        if wrong.any():
            at = int(wrong.argmax())
            source, destination = int(self.source[at]), int(self.destination[at])
            raise ScheduleError(
                f"step {self.index}: rank {source} sends block {self.block[at]} to rank {destination} "
                f"on lane {self.lane[at]}: {reason.format(source=source, destination=destination)}"
            )
