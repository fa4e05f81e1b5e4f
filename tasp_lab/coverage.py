"""The proof that a schedule's calls compute what its attention task asks for, and that all of it gets where it belongs.

Every tile whose band is not empty is computed exactly once, with exactly its band, by a rank that owns the block of the
side that stays. Since the blocks are all positions, each query then meets each key of its mask once.

Going backward, what a tile yields for the gradient that travels is a *part* that is at one rank at a time: first where
it was computed, then wherever the gradient block goes. What a rank has of a gradient block - parts that arrived and
parts that it computed at one step - leaves at the step after it, unless the rank is the owner; in the end every part is
with the owner. So a gradient is added up once, one step behind the block that it belongs to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.attention_task import AttentionTask
from tasp_lab.calls import Call
from tasp_lab.errors import ScheduleError

_NOWHERE = -1


class Leaving(NamedTuple):
    """Parts on their way: for each the indices of its travelling and its staying block, and where it goes."""

    travelling: IntArray
    staying: IntArray
    destination: IntArray


class Coverage:
    """Follows the parts of all tiles. Every method raises `ScheduleError` at what breaks the rule."""

    def __init__(self, task: AttentionTask) -> None:
        self._task = task
        self._where = np.full((task.first_gradient - task.first_query, task.first_query), _NOWHERE, dtype=np.int32)
        self._by_traveller = self._where.T if task.travellers == "keys" else self._where
        self._owner = task.owner[task.travelling]
        self._away = 0

    def add(self, index: int, call: Call) -> None:
        """Take note of a call at step `index`."""
        task = self._task
        travelling, staying = task.sides(call)
        self._check_blocks(index, call, travelling, staying)
        low, high = task.call_bands(call)
        wanted_low, wanted_high = task.bands(call.queries, call.keys)
        empty = low > high
        wrong = np.where(empty, wanted_low <= wanted_high, (low != wanted_low) | (high != wanted_high))
        if wrong.any():
            query, key = (int(values[0]) for values in np.nonzero(wrong))
            raise ScheduleError(
                f"step {index}: rank {call.rank} attends with queries {call.queries[query]} to keys {call.keys[key]} "
                f"in the band {low[query, key]} to {high[query, key]}, "
                f"the mask is {wanted_low[query, key]} to {wanted_high[query, key]}"
            )
        tiles = np.ix_(call.queries - task.first_query, call.keys)
        where = self._where[tiles]
        doubled = (where != _NOWHERE) & ~empty
        if doubled.any():
            query, key = (int(values[0]) for values in np.nonzero(doubled))
            raise ScheduleError(
                f"step {index}: {self._tile(call.rank, int(call.queries[query]), int(call.keys[key]))} twice"
            )
        self._where[tiles] = np.where(empty, where, call.rank)
        if task.is_backward:
            axis = 0 if task.travellers == "keys" else 1
            self._away += int((~empty).sum(axis=axis)[task.owner[travelling] != call.rank].sum())

    def _check_blocks(self, index: int, call: Call, travelling: IntArray, staying: IntArray) -> None:
        task = self._task
        kind = "keys" if task.travellers == "queries" else "queries"
        strangers = staying[task.owner[staying] != call.rank]
        if len(strangers):
            raise ScheduleError(f"step {index}: rank {call.rank} attends for {kind} {strangers[0]}, which it has not")
        if (np.diff(staying) != 1).any():
            raise ScheduleError(
                f"step {index}: rank {call.rank} attends for {kind} {staying.tolist()}, "
                "expected blocks that lie side by side in its shard, in that order"
            )
        if len(np.unique(travelling)) < len(travelling):
            raise ScheduleError(f"step {index}: rank {call.rank} names a block of {task.travellers} twice in one call")

    def leaving(self, index: int, source: IntArray, destination: IntArray, block: IntArray) -> Leaving:
        """The parts that transfers of gradient blocks take along at step `index`, which is to come."""
        travelling = block - self._task.first_gradient
        arrivals = destination * len(self._owner) + travelling
        if len(np.unique(arrivals)) < len(arrivals):
            raise ScheduleError(f"step {index}: a rank gets a gradient block twice in this step")
        at_home = self._owner[travelling] == source
        if at_home.any():
            at = int(at_home.argmax())
            raise ScheduleError(f"step {index}: rank {source[at]} sends gradient block {block[at]}, which is its own")
        taken = self._by_traveller[travelling] == source[:, None]
        without = ~taken.any(axis=1)
        if without.any():
            at = int(without.argmax())
            raise ScheduleError(
                f"step {index}: rank {source[at]} sends gradient block {block[at]}, of which it has nothing"
            )
        rows, staying = np.nonzero(taken)
        leaving = Leaving(travelling[rows], staying, destination[rows])
        if len(rows) < self._away:
            self._name_left(f"step {index}", "keeps", leaving)
        return leaving

    def move(self, leaving: Leaving) -> None:
        """These parts have arrived."""
        self._by_traveller[leaving.travelling, leaving.staying] = leaving.destination
        gone, still = len(leaving.travelling), self._owner[leaving.travelling] != leaving.destination
        self._away += int(still.sum()) - gone

    def finish(self) -> None:
        """Check that nothing is missing after the last step."""
        task = self._task
        for row, query in enumerate(task.blocks_of("queries")):
            low, high = task.bands(np.array([query]), np.arange(task.first_query))
            missing = (low <= high)[0] & (self._where[row] == _NOWHERE)
            if missing.any():
                key = int(missing.argmax())
                owner = int(task.owner[query if task.travellers == "keys" else key])
                raise ScheduleError(f"after the last step: {self._tile(owner, int(query), key)} never")
        if self._away:
            nothing = np.zeros(0, dtype=np.int64)
            self._name_left("after the last step", "has", Leaving(nothing, nothing, nothing))

    def _name_left(self, when: str, verb: str, leaving: Leaving) -> None:
        """Find a part that is away from its owner and not among those that leave."""
        left = (self._by_traveller != _NOWHERE) & (self._by_traveller != self._owner[:, None])
        left[leaving.travelling, leaving.staying] = False
        traveller, staying = (int(values[0]) for values in np.nonzero(left))
        rank, block = self._by_traveller[traveller, staying], traveller + self._task.first_gradient
        raise ScheduleError(f"{when}: rank {rank} {verb} a part of gradient block {block}, which is not its own")

    def _tile(self, rank: int, query: int, key: int) -> str:
        return f"rank {rank} attends with queries {query} to keys {key}"
