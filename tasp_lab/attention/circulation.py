"""Circulation: the route of each circulating block around its ring, and the kernel calls at every hop.

Each circulating block is at its owner at hop 0, at the next rank of its ring at hop 1, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tasp_lab.arrays import IntArray
from tasp_lab.decomposition.shares import split_bytes
from tasp_lab.workload.attention_task import AttentionTask, Side
from tasp_lab.workload.kernel_calls import Call
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span

_FULL, _PARTIAL = 1, 2
"""Mask coverage of a tile: full or partial; 0 if the mask is empty."""

_MAX_SPANS = 5
"""Five digits to base 3 fit into a byte."""


def cut_blocks(
    workload: Workload,
    layout: SequenceLayout,
    shares: Sequence[Fraction],
    circulating_side: Side = "keys",
    gradient_dtype: str | None = None,
) -> tuple[AttentionTask, IntArray]:
    """Cut each span of the circulating side into one block per ring, by shares; stationary spans stay whole.

    The blocks of a rank have consecutive numbers in the order of its shard; blocks without positions are omitted.
    Returns the task and an int array, the ring of each circulating block.
    """
    spans = [(rank, span) for rank, each in enumerate(layout.spans) for span in each]
    whole = [(rank, span, 0) for rank, span in spans]
    cut = [(rank, *part) for rank, span in spans for part in _parts(span, shares)]
    keys, queries = (cut, whole) if circulating_side == "keys" else (whole, cut)
    task = AttentionTask(
        workload=workload,
        layout=layout,
        first_query=len(keys),
        owner=np.array([rank for rank, *_ in keys + queries], dtype=np.int64),
        start=np.array([block.start for _, block, _ in keys + queries], dtype=np.int64),
        count=np.array([block.count for _, block, _ in keys + queries], dtype=np.int64),
        circulating_side=circulating_side,
        gradient_dtype=gradient_dtype,
    )
    return task, np.array([ring for *_, ring in cut], dtype=np.int64)


def _parts(span: Span, shares: Sequence[Fraction]) -> Iterator[tuple[Span, int]]:
    """The nonempty parts of a span, one per ring, each with its ring."""
    first = 0
    for ring, count in enumerate(split_bytes(span.count, shares)):
        if count:
            yield span.part(first, count), ring
            first += count


class Circulation:
    """The routes of all circulating blocks, indexed from 0 here, and the kernel calls on them.

    `rings` is an int array (rings, world_size), `ring_of` the ring of each circulating block. `first` and `last` are
    int arrays (circulating blocks,): the first and the last hop at which the mask needs a block; 0 if none does.
    """

    def __init__(self, task: AttentionTask, rings: IntArray, ring_of: IntArray) -> None:
        self.task, self.rings, self.ring_of = task, rings, ring_of
        self.world_size: int = rings.shape[1]
        self.blocks = task.circulating
        self._document = task.document[self.blocks]
        place = np.argsort(rings, axis=1)
        self._start = place[ring_of, task.owner[self.blocks]]
        self._stationary = [
            task.by_document(task.stationary[task.owner[task.stationary] == rank]) for rank in range(self.world_size)
        ]
        self._coverage = np.stack([self._coverage_at(rank) for rank in range(self.world_size)])
        self.first, self.last = self._needed_hops()

    def _coverage_at(self, rank: int) -> npt.NDArray[np.uint8]:
        """The mask coverage of each circulating block at a rank: one base-3 digit per stationary block.

        The mask between documents is empty, so the digits are those of the stationary blocks of the same document.
        """
        stationary = self._stationary[rank][self._document]
        assert stationary.shape[1] <= _MAX_SPANS, "five digits to base 3 fit into a byte"
        queries, keys = stationary, self.blocks[:, None]
        if self.task.circulating_side == "queries":
            queries, keys = keys, queries
        low, high = self.task.tile_bands(queries, keys)
        full = (low == 1 - self.task.count[keys]) & (high == self.task.count[queries] - 1)
        coverage = np.where(full, _FULL, np.where(low <= high, _PARTIAL, 0)) * (stationary >= 0)
        digits: npt.NDArray[np.uint8] = (coverage * 3 ** np.arange(stationary.shape[1])).sum(axis=1).astype(np.uint8)
        return digits

    def _needed_hops(self) -> tuple[IntArray, IntArray]:
        """The first and the last hop at which the mask needs each block."""
        circulating = np.arange(len(self.blocks))
        first, last = np.zeros((2, len(circulating)), dtype=np.int64)
        for hop in range(1, self.world_size):
            needed = self._coverage[self.at(hop), circulating] > 0
            first[needed & (first == 0)] = hop
            last[needed] = hop
        return first, last

    def hops(self, trim: bool) -> IntArray:
        """The number of hops of each block: to the last rank whose mask needs it, or without `trim` n - 1."""
        return self.last if trim else np.full(len(self.blocks), self.world_size - 1)

    def at(self, hop: int | IntArray, circulating: IntArray | slice = slice(None)) -> IntArray:
        """The rank of each selected circulating block at a hop."""
        place = (self._start[circulating] + hop) % self.world_size
        ranks: IntArray = self.rings[self.ring_of[circulating], place]
        return ranks

    def order(self, circulating: IntArray, ranks: IntArray) -> IntArray:
        """The order of circulating blocks by destination rank, document and mask coverage there.

        Blocks with the same mask coverage are contiguous, so one kernel call covers them.
        """
        order: IntArray = np.lexsort(
            (circulating, self._coverage[ranks, circulating], self._document[circulating], ranks)
        )
        return order

    def calls_at(self, hop: int, circulating: IntArray) -> Iterator[Call]:
        """The calls on circulating blocks at a hop; at hop 0, on all blocks at their owners."""
        if hop == 0:
            yield from self._calls_at_owners()
            return
        if not len(circulating):
            return
        ranks = self.at(hop, circulating)
        order = self.order(circulating, ranks)
        circulating, ranks = circulating[order], ranks[order]
        coverage = self._coverage[ranks, circulating]
        same_call = (np.diff(ranks) == 0) & (np.diff(coverage) == 0) & (np.diff(self._document[circulating]) == 0)
        starts = np.flatnonzero(np.concatenate([[True], ~same_call])).tolist()
        for first, end in zip(starts, [*starts[1:], len(circulating)], strict=True):
            yield from self._coverage_calls(
                int(ranks[first]), self.blocks[circulating[first:end]], int(coverage[first])
            )

    def _coverage_calls(self, rank: int, circulating: IntArray, coverage: int) -> Iterator[Call]:
        """The calls on contiguous circulating blocks that have the same mask coverage."""
        stationary = self._stationary[rank][self.task.document[circulating[0]]]
        digits = coverage // 3 ** np.arange(len(stationary)) % 3
        full = stationary[digits == _FULL]
        if len(full):
            queries, keys = (full, circulating) if self.task.circulating_side == "keys" else (circulating, full)
            sizes = self.task.count[queries].sum(), self.task.count[keys].sum()
            yield Call(rank, queries, keys, 1 - int(sizes[1]), int(sizes[0]) - 1)
        for fixed in stationary[digits == _PARTIAL]:
            for moving in circulating:
                queries, keys = (fixed, moving) if self.task.circulating_side == "keys" else (moving, fixed)
                yield from self._tile(rank, queries, keys)

    def _calls_at_owners(self) -> Iterator[Call]:
        """Every rank's calls to its own blocks, document by document."""
        task = self.task
        for rank, stationary in enumerate(self._stationary):
            own = task.by_document(self.blocks[task.owner[self.blocks] == rank])
            for document in np.flatnonzero((stationary >= 0).any(axis=1)):
                fixed, moving = (each[document][each[document] >= 0] for each in (stationary, own))
                queries, keys = (fixed, moving) if task.circulating_side == "keys" else (moving, fixed)
                yield from self._calls_within(rank, queries, keys)

    def _calls_within(self, rank: int, queries: IntArray, keys: IntArray) -> Iterator[Call]:
        """The calls of a rank's own queries and keys of one document.

        Both are in ascending order, so the causal mask between them equals that of their indices.
        """
        workload, count = self.task.workload, int(self.task.count[queries].sum())
        if workload.keys_seen is None:
            yield Call(rank, queries, keys, 0 if workload.mask == "causal" else 1 - count, count - 1)
            return
        for key in keys:
            for query in queries:
                yield from self._tile(rank, query, key)

    def _tile(self, rank: int, query: np.int64, key: np.int64) -> Iterator[Call]:
        """The call of one query block and one key block, unless its mask is empty."""
        queries, keys = np.array([query]), np.array([key])
        low, high = self.task.bands(queries, keys)
        if low.item() <= high.item():
            yield Call(rank, queries, keys, low.item(), high.item())
