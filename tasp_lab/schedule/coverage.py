"""Verifies that a schedule's calls compute its attention task exactly once and that gradients reach their owners.

Every tile with a nonempty band is computed exactly once, with exactly its band, by the rank that owns the stationary
block. Since the blocks cover all positions, each query attends to each key of its mask once.

In a backward pass each tile yields one *part* of the circulating gradient. A part is at one rank at a time: first where
it was computed, then wherever the gradient block goes. Unless a rank owns the gradient block, all the parts that it
holds (received or computed at one step) leave at the next step; at the end every part is at the owner. So each part is
accumulated once, one step behind the block that it belongs to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.workload.attention_task import AttentionTask
from tasp_lab.workload.kernel_calls import Call

_NOWHERE = -1


class Leaving(NamedTuple):
    """Parts in transit: circulating block, place of the stationary block, destination. Int arrays (parts,)."""

    circulating: IntArray
    stationary: IntArray
    destination: IntArray


class Coverage:
    """Tracks the location of every part. Methods raise `ScheduleError` if a rule is broken.

    Tiles form an array (circulating blocks, stationary blocks of one document); the mask of other pairs is empty.
    """

    def __init__(self, task: AttentionTask) -> None:
        self._task = task
        self._circulating = task.circulating
        self._owner = task.owner[self._circulating]
        stationary = task.by_document(task.stationary)
        self._stationary = stationary[task.document[self._circulating]]
        self._place = np.zeros(task.first_gradient, dtype=np.int64)
        documents, places = np.nonzero(stationary >= 0)
        self._place[stationary[documents, places]] = places
        self._where = np.full(self._stationary.shape, _NOWHERE, dtype=np.int32)
        self._away = 0

    def add(self, index: int, call: Call) -> None:
        """Record a call at step `index`."""
        task = self._task
        circulating, stationary = task.sides(call)
        self._check_blocks(index, call, circulating, stationary)
        low, high = task.call_bands(call)
        wanted_low, wanted_high = task.bands(call.queries, call.keys)
        wrong = np.where(low > high, wanted_low <= wanted_high, (low != wanted_low) | (high != wanted_high))
        if wrong.any():
            query, key = (int(values[0]) for values in np.nonzero(wrong))
            raise ScheduleError(
                f"step {index}: rank {call.rank} attends with queries {call.queries[query]} to keys {call.keys[key]} "
                f"in the band {low[query, key]} to {high[query, key]}, "
                f"the mask is {wanted_low[query, key]} to {wanted_high[query, key]}"
            )
        queries, keys = (
            blocks[at] for blocks, at in zip((call.queries, call.keys), np.nonzero(low <= high), strict=True)
        )
        circulating, stationary = (keys, queries) if task.circulating_side == "keys" else (queries, keys)
        tiles = circulating - self._circulating[0], self._place[stationary]
        doubled = self._where[tiles] != _NOWHERE
        if doubled.any():
            at = int(doubled.argmax())
            raise ScheduleError(f"step {index}: {self._tile(call.rank, int(queries[at]), int(keys[at]))} twice")
        self._where[tiles] = call.rank
        if task.is_backward:
            self._away += int((task.owner[circulating] != call.rank).sum())

    def _check_blocks(self, index: int, call: Call, circulating: IntArray, stationary: IntArray) -> None:
        task = self._task
        kind = "keys" if task.circulating_side == "queries" else "queries"
        not_owned = stationary[task.owner[stationary] != call.rank]
        if len(not_owned):
            raise ScheduleError(
                f"step {index}: rank {call.rank} attends for {kind} {not_owned[0]}, which it does not own"
            )
        if (np.diff(stationary) != 1).any():
            raise ScheduleError(
                f"step {index}: rank {call.rank} attends for {kind} {stationary.tolist()}, "
                "expected contiguous blocks of its shard, in ascending order"
            )
        if len(np.unique(circulating)) < len(circulating):
            raise ScheduleError(
                f"step {index}: rank {call.rank} uses a block of {task.circulating_side} twice in one call"
            )

    def leaving(self, index: int, source: IntArray, destination: IntArray, block: IntArray) -> Leaving:
        """The parts that the gradient transfers of step `index` carry, before the step takes place."""
        circulating = block - self._task.first_gradient
        for rank, verb in ((source, "sends"), (destination, "receives")):
            self._check_once(index, rank, verb, block)
        owned = self._owner[circulating] == source
        if owned.any():
            at = int(owned.argmax())
            raise ScheduleError(f"step {index}: rank {source[at]} sends gradient block {block[at]}, which is its own")
        taken = self._where[circulating] == source[:, None]
        without = ~taken.any(axis=1)
        if without.any():
            at = int(without.argmax())
            raise ScheduleError(
                f"step {index}: rank {source[at]} sends gradient block {block[at]}, of which it holds no part"
            )
        rows, stationary = np.nonzero(taken)
        leaving = Leaving(circulating[rows], stationary, destination[rows])
        if len(rows) < self._away:
            self._name_left(f"step {index}", "keeps", leaving)
        return leaving

    def _check_once(self, index: int, rank: IntArray, verb: str, block: IntArray) -> None:
        """Check that no rank sends, or receives, a gradient block twice in a step."""
        order = np.lexsort((block, rank))
        doubled = np.flatnonzero((np.diff(rank[order]) == 0) & (np.diff(block[order]) == 0))
        if len(doubled):
            at = int(order[doubled[0]])
            raise ScheduleError(f"step {index}: rank {rank[at]} {verb} gradient block {block[at]} twice in this step")

    def move(self, leaving: Leaving) -> None:
        """Record the arrival of these parts."""
        self._where[leaving.circulating, leaving.stationary] = leaving.destination
        gone, still = len(leaving.circulating), self._owner[leaving.circulating] != leaving.destination
        self._away += int(still.sum()) - gone

    def finish(self) -> None:
        """Check that nothing is missing after the last step."""
        task = self._task
        circulating, places = np.nonzero((self._where == _NOWHERE) & (self._stationary >= 0))
        stationary = self._stationary[circulating, places]
        queries, keys = self._circulating[circulating], stationary
        if task.circulating_side == "keys":
            queries, keys = keys, queries
        low, high = task.tile_bands(queries, keys)
        if (low <= high).any():
            at = int((low <= high).argmax())
            tile = self._tile(int(task.owner[stationary[at]]), int(queries[at]), int(keys[at]))
            raise ScheduleError(f"after the last step: {tile} never")
        if self._away:
            nothing = np.zeros(0, dtype=np.int64)
            self._name_left("after the last step", "has", Leaving(nothing, nothing, nothing))

    def _name_left(self, when: str, verb: str, leaving: Leaving) -> None:
        """Raise for the first part that is neither at its owner nor leaving."""
        left = (self._where != _NOWHERE) & (self._where != self._owner[:, None])
        left[leaving.circulating, leaving.stationary] = False
        circulating_block, stationary = (int(values[0]) for values in np.nonzero(left))
        rank, block = self._where[circulating_block, stationary], circulating_block + self._task.first_gradient
        raise ScheduleError(f"{when}: rank {rank} {verb} a part of gradient block {block}, which is not its own")

    def _tile(self, rank: int, query: int, key: int) -> str:
        return f"rank {rank} attends with queries {query} to keys {key}"
