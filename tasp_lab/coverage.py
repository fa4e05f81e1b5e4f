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
    """Parts on their way: the index of the travelling block of each, the place of its staying one, where it goes."""

    travelling: IntArray
    staying: IntArray
    destination: IntArray


class Coverage:
    """Follows the parts of all tiles. Every method raises `ScheduleError` at what breaks the rule.

    Tiles are an array (travelling blocks, staying blocks of one document): no others see anything of each other.
    """

    def __init__(self, task: AttentionTask) -> None:
        self._task = task
        self._travelling = task.travelling
        self._owner = task.owner[self._travelling]
        staying = task.by_document(task.staying)
        self._staying = staying[task.document[self._travelling]]
        self._place = np.zeros(task.first_gradient, dtype=np.int64)
        documents, places = np.nonzero(staying >= 0)
        self._place[staying[documents, places]] = places
        self._where = np.full(self._staying.shape, _NOWHERE, dtype=np.int32)
        self._away = 0

    def add(self, index: int, call: Call) -> None:
        """Take note of a call at step `index`."""
        task = self._task
        travelling, staying = task.sides(call)
        self._check_blocks(index, call, travelling, staying)
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
        travels, stays = (keys, queries) if task.travellers == "keys" else (queries, keys)
        tiles = travels - self._travelling[0], self._place[stays]
        doubled = self._where[tiles] != _NOWHERE
        if doubled.any():
            at = int(doubled.argmax())
            raise ScheduleError(f"step {index}: {self._tile(call.rank, int(queries[at]), int(keys[at]))} twice")
        self._where[tiles] = call.rank
        if task.is_backward:
            self._away += int((task.owner[travels] != call.rank).sum())

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
        for rank, verb in ((source, "sends"), (destination, "gets")):
            self._check_once(index, rank, verb, block)
        at_home = self._owner[travelling] == source
        if at_home.any():
            at = int(at_home.argmax())
            raise ScheduleError(f"step {index}: rank {source[at]} sends gradient block {block[at]}, which is its own")
        taken = self._where[travelling] == source[:, None]
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

    def _check_once(self, index: int, rank: IntArray, verb: str, block: IntArray) -> None:
        """Check that no rank sends, or gets, a gradient block twice in a step."""
        order = np.lexsort((block, rank))
        doubled = np.flatnonzero((np.diff(rank[order]) == 0) & (np.diff(block[order]) == 0))
        if len(doubled):
            at = int(order[doubled[0]])
            raise ScheduleError(f"step {index}: rank {rank[at]} {verb} gradient block {block[at]} twice in this step")

    def move(self, leaving: Leaving) -> None:
        """These parts have arrived."""
        self._where[leaving.travelling, leaving.staying] = leaving.destination
        gone, still = len(leaving.travelling), self._owner[leaving.travelling] != leaving.destination
        self._away += int(still.sum()) - gone

    def finish(self) -> None:
        """Check that nothing is missing after the last step."""
        task = self._task
        travels, places = np.nonzero((self._where == _NOWHERE) & (self._staying >= 0))
        stays = self._staying[travels, places]
        queries, keys = self._travelling[travels], stays
        if task.travellers == "keys":
            queries, keys = keys, queries
        low, high = task.tile_bands(queries, keys)
        if (low <= high).any():
            at = int((low <= high).argmax())
            tile = self._tile(int(task.owner[stays[at]]), int(queries[at]), int(keys[at]))
            raise ScheduleError(f"after the last step: {tile} never")
        if self._away:
            nothing = np.zeros(0, dtype=np.int64)
            self._name_left("after the last step", "has", Leaving(nothing, nothing, nothing))

    def _name_left(self, when: str, verb: str, leaving: Leaving) -> None:
        """Find a part that is away from its owner and not among those that leave."""
        left = (self._where != _NOWHERE) & (self._where != self._owner[:, None])
        left[leaving.travelling, leaving.staying] = False
        traveller, staying = (int(values[0]) for values in np.nonzero(left))
        rank, block = self._where[traveller, staying], traveller + self._task.first_gradient
        raise ScheduleError(f"{when}: rank {rank} {verb} a part of gradient block {block}, which is not its own")

    def _tile(self, rank: int, query: int, key: int) -> str:
        return f"rank {rank} attends with queries {query} to keys {key}"
