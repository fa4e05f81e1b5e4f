"""The steps of attention around rings: blocks of keys move on, queries attend to what came the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tasp_lab.arrays import IntArray
from tasp_lab.calls import Call
from tasp_lab.coverage import AttentionTask
from tasp_lab.pieces import split_bytes
from tasp_lab.placement import Placement, Span
from tasp_lab.schedule import LazySteps, Step
from tasp_lab.workload import Workload

_FULL, _PARTIAL = 1, 2
"""What a query block sees of a key block: all of it or some. Nothing is 0."""


def cut_blocks(workload: Workload, placement: Placement, shares: Sequence[Fraction]) -> tuple[AttentionTask, IntArray]:
    """Cut each span of keys into one block per ring by the shares, and no span of queries.

    The blocks of a rank have consecutive numbers in the order of its shard; blocks without positions are left out.
    Returns the task, and the ring of each key block.
    """
    spans = [(rank, span) for rank, each in enumerate(placement.spans) for span in each]
    keys = [(rank, *part) for rank, span in spans for part in _parts(span, shares)]
    owner = [rank for rank, *_ in keys] + [rank for rank, _ in spans]
    blocks = [block for _, block, _ in keys] + [span for _, span in spans]
    task = AttentionTask(
        workload=workload,
        placement=placement,
        first_query=len(keys),
        owner=np.array(owner, dtype=np.int64),
        start=np.array([block.start for block in blocks], dtype=np.int64),
        count=np.array([block.count for block in blocks], dtype=np.int64),
    )
    return task, np.array([ring for *_, ring in keys], dtype=np.int64)


def _parts(span: Span, shares: Sequence[Fraction]) -> Iterator[tuple[Span, int]]:
    """The parts of a span that rings carry, each with its ring."""
    first = 0
    for ring, count in enumerate(split_bytes(span.count, shares)):
        if count:
            yield span.part(first, count), ring
            first += count


class AttentionSteps(LazySteps):
    """Key block b starts at its owner and makes `hops[b]` hops along its ring, one per step.

    `rings` is an int array (rings, world_size), `ring_of` the ring of each key block. What arrives at a rank in a
    step is ordered by what the rank's queries see of it, so that what is seen alike lies together: one kernel call.
    """

    def __init__(self, task: AttentionTask, rings: IntArray, ring_of: IntArray, trim: bool) -> None:
        self._task, self._rings, self._ring_of = task, rings, ring_of
        n = rings.shape[1]
        place = np.argsort(rings, axis=1)
        self._start = place[ring_of, task.owner[: task.first_query]]
        assert max(map(len, task.placement.spans)) <= 5, "five digits to base 3 fit into a byte"
        self._queries = [np.flatnonzero(task.owner[task.first_query :] == rank) + task.first_query for rank in range(n)]
        self._seen = np.stack([self._seen_by(rank) for rank in range(n)])
        self._hops = self._last_hops() if trim else np.full(task.first_query, n - 1)

    def _seen_by(self, rank: int) -> npt.NDArray[np.uint8]:
        """What a rank's query blocks see of each key block, one digit to base 3 per query block."""
        task, queries = self._task, self._queries[rank]
        counts = task.count[queries][:, None], task.count[: task.first_query][None, :]
        low, high = task.bands(queries, np.arange(task.first_query))
        full = (low == 1 - counts[1]) & (high == counts[0] - 1)
        seen = np.where(full, _FULL, np.where(low <= high, _PARTIAL, 0))
        digits: npt.NDArray[np.uint8] = (seen * 3 ** np.arange(len(queries))[:, None]).sum(axis=0).astype(np.uint8)
        return digits

    def _last_hops(self) -> IntArray:
        """After how many hops each key block reaches the last rank that sees any of it."""
        hops = np.zeros(self._task.first_query, dtype=np.int64)
        blocks = np.arange(self._task.first_query)
        for hop in range(1, self._rings.shape[1]):
            hops[self._seen[self._after(hop), blocks] > 0] = hop
        return hops

    def _after(self, hop: int) -> IntArray:
        """The rank that each key block would be at after so many hops."""
        ranks: IntArray = self._rings[self._ring_of, (self._start + hop) % self._rings.shape[1]]
        return ranks

    @property
    def lanes(self) -> int:
        return len(self._rings)

    @property
    def bytes_sent(self) -> int:
        """What all ranks send in all."""
        return int((self._hops * self._task.block_bytes[: self._task.first_query]).sum())

    def __len__(self) -> int:
        return 1 + int(self._hops.max(initial=0))

    def step(self, index: int) -> Step:
        blocks = self._arriving(index)
        source, destination = self._after(index)[blocks], self._after(index + 1)[blocks]
        return Step(source, destination, self._ring_of[blocks], blocks, tuple(self._calls(index)))

    def _arriving(self, index: int) -> IntArray:
        """The blocks that move at a step, by where they arrive and by what is seen of them there."""
        blocks = np.flatnonzero(self._hops > index)
        destination = self._after(index + 1)[blocks]
        order = np.lexsort((blocks, self._seen[destination, blocks], destination))
        return blocks[order]

    def _calls(self, index: int) -> Iterator[Call]:
        """The calls of a step: at the first each rank attends to its own keys, later to what came the step before."""
        if index == 0:
            for rank in range(len(self._queries)):
                yield from self._calls_at_home(rank)
            return
        blocks = self._arriving(index - 1)
        ranks = self._after(index)[blocks]
        seen = self._seen[ranks, blocks]
        alike = (np.diff(ranks) == 0) & (np.diff(seen) == 0)
        starts = np.flatnonzero(np.concatenate([[True], ~alike])[: len(blocks)]).tolist()
        for first, last in zip(starts, [*starts[1:], len(blocks)], strict=True):
            yield from self._calls_to(int(ranks[first]), blocks[first:last], int(seen[first]))

    def _calls_at_home(self, rank: int) -> Iterator[Call]:
        """A shard is in ascending order, so the causal mask within it is the one of its indices."""
        task, queries = self._task, self._queries[rank]
        keys = np.flatnonzero(task.owner[: task.first_query] == rank)
        if not len(queries):
            return
        count = int(task.count[queries].sum())
        if task.workload.keys_seen is None:
            yield Call(rank, queries, keys, 0 if task.workload.mask == "causal" else 1 - count, count - 1)
            return
        for key in keys.tolist():
            for query in queries.tolist():
                yield from self._tile(rank, query, key)

    def _calls_to(self, rank: int, keys: IntArray, seen: int) -> Iterator[Call]:
        """The calls to keys that lie together and of which each query block sees alike."""
        queries = self._queries[rank]
        digits = seen // 3 ** np.arange(len(queries)) % 3
        full = queries[digits == _FULL]
        if len(full):
            sizes = self._task.count[full].sum(), self._task.count[keys].sum()
            yield Call(rank, full, keys, 1 - int(sizes[1]), int(sizes[0]) - 1)
        for query in queries[digits == _PARTIAL].tolist():
            for key in keys.tolist():
                yield from self._tile(rank, query, key)

    def _tile(self, rank: int, query: int, key: int) -> Iterator[Call]:
        """A query block against one key block, if it sees any of it."""
        queries, keys = np.array([query]), np.array([key])
        low, high = self._task.bands(queries, keys)
        if low.item() <= high.item():
            yield Call(rank, queries, keys, low.item(), high.item())
