"""What an attention layer must compute, and the proof that a schedule's calls compute it.

Blocks are stretches of positions, of keys (with their values) or of queries. A **tile** is a query block against a key
block; under the mask its queries see a band of its keys (see `tasp_lab.calls`). A schedule is right when every tile
whose band is not empty is computed exactly once, with exactly its band, by the rank that owns the query block and at
a step at which it holds the keys. Since the blocks are all positions, each query then meets each key of its mask once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.calls import Call, clip_band
from tasp_lab.errors import ScheduleError
from tasp_lab.placement import Placement
from tasp_lab.workload import Workload


@dataclass(frozen=True, eq=False)
class AttentionTask:
    """The blocks of a layer: int arrays with an entry per block. Blocks from `first_query` on are query blocks.

    The key blocks of a rank, in the order of their numbers, are its shard, and so are its query blocks; else
    `ScheduleError`.

    Parameters
    ----------
    workload, placement : the layer, and where its positions are.
    first_query : the number of key blocks.
    owner : the rank that holds the block at the start, and the result of a query block at the end.
    start, count : the positions of a block are start, start + stride, ...; `stride` is that of the placement.
    """

    workload: Workload
    placement: Placement
    first_query: int
    owner: IntArray
    start: IntArray
    count: IntArray

    def __post_init__(self) -> None:
        for values in (self.owner, self.start, self.count):
            values.flags.writeable = False
        shards = [(rank, span.start, span.count) for rank, each in enumerate(self.placement.spans) for span in each]
        expected = self._stretches(*np.array(shards, dtype=np.int64).reshape(-1, 3).T)
        for kind, blocks in (("keys", slice(self.first_query)), ("queries", slice(self.first_query, None))):
            found = self._stretches(self.owner[blocks], self.start[blocks], self.count[blocks])
            if (self.count[blocks] < 1).any() or not np.array_equal(found, expected):
                raise ScheduleError(f"the blocks of {kind} are not the shards of placement {self.placement.name!r}")

    def _stretches(self, owner: IntArray, start: IntArray, count: IntArray) -> IntArray:
        """Owner, start and count of blocks, as an array (3, stretches); those that follow on one another are joined."""
        order = np.argsort(owner, kind="stable")
        owner, start, count = owner[order], start[order], count[order]
        ends = start + self.placement.stride * count
        follows = (owner[1:] == owner[:-1]) & (start[1:] == ends[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(owner)])
        return np.stack([owner[first], start[first], np.add.reduceat(count, first) if len(first) else count])

    @property
    def block_bytes(self) -> IntArray:
        """The size of each block."""
        is_key = np.arange(len(self.count)) < self.first_query
        layer = self.workload
        return self.count * np.where(is_key, layer.kv_bytes_per_position, layer.query_bytes_per_position)

    @property
    def initial(self) -> BoolArray:
        """What each rank holds at the start, as an array (world_size, blocks)."""
        held: BoolArray = self.owner == np.arange(self.placement.world_size)[:, None]
        return held

    def bands(self, queries: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The clipped bands of tiles, low and high, as arrays (queries, keys)."""
        ahead = (self.start[queries][:, None] - self.start[keys][None, :]).astype(np.int64)
        counts = self.count[queries][:, None], self.count[keys][None, :]
        low = np.broadcast_to(1 - counts[1], ahead.shape)
        high = np.broadcast_to(counts[0] - 1, ahead.shape)
        if self.workload.mask == "causal":
            low = -(ahead // self.placement.stride)
        if self.workload.keys_seen is not None:
            high = (self.workload.keys_seen - 1 - ahead) // self.placement.stride
        return clip_band(low, high, *counts)

    def call_bands(self, call: Call) -> tuple[IntArray, IntArray]:
        """The clipped bands with which a call computes its tiles, as arrays (queries, keys)."""
        first_query = np.cumsum(self.count[call.queries]) - self.count[call.queries]
        first_key = np.cumsum(self.count[call.keys]) - self.count[call.keys]
        shift = first_key[None, :] - first_query[:, None]
        counts = self.count[call.queries][:, None], self.count[call.keys][None, :]
        return clip_band(call.low + shift, call.high + shift, *counts)

    def sizes(self, call: Call) -> tuple[int, int]:
        """The number of queries and of keys of a call."""
        return int(self.count[call.queries].sum()), int(self.count[call.keys].sum())


class Coverage:
    """Counts the tiles that calls compute. Every method raises `ScheduleError` at what breaks the rule."""

    def __init__(self, task: AttentionTask) -> None:
        self._task = task
        self._keys = np.arange(task.first_query)
        self._queries = np.arange(task.first_query, len(task.owner))
        self._computed = np.zeros((len(self._queries), len(self._keys)), dtype=np.bool_)

    def add(self, index: int, call: Call) -> None:
        """Take note of a call at step `index`."""
        task = self._task
        strangers = call.queries[task.owner[call.queries] != call.rank]
        if len(strangers):
            raise ScheduleError(f"step {index}: rank {call.rank} attends for queries {strangers[0]}, which it has not")
        if (np.diff(call.queries) != 1).any():
            raise ScheduleError(
                f"step {index}: rank {call.rank} attends for queries {call.queries.tolist()}, "
                "expected blocks that lie side by side in its shard, in that order"
            )
        if len(np.unique(call.keys)) < len(call.keys):
            raise ScheduleError(f"step {index}: rank {call.rank} names a block of keys twice in one call")
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
        rows, columns = (call.queries - task.first_query)[:, None], call.keys[None, :]
        doubled = self._computed[rows, columns] & ~empty
        if doubled.any():
            query, key = (int(values[0]) for values in np.nonzero(doubled))
            raise ScheduleError(f"step {index}: {self._tile(int(call.queries[query]), int(call.keys[key]))} twice")
        self._computed[rows, columns] |= ~empty

    def finish(self) -> None:
        """Check that nothing is missing after the last step."""
        for row, query in enumerate(self._queries):
            low, high = self._task.bands(self._queries[row : row + 1], self._keys)
            missing = (low <= high)[0] & ~self._computed[row]
            if missing.any():
                raise ScheduleError(f"after the last step: {self._tile(int(query), int(missing.argmax()))} never")

    def _tile(self, query: int, key: int) -> str:
        return f"rank {self._task.owner[query]} attends with queries {query} to keys {key}"
