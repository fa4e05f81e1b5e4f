"""Journeys: how the blocks of the side that travels pass around rings, and whom they meet there.

Each travelling block has a ring and is at its owner at hop 0, at the next rank of the ring at hop 1, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tasp_lab.arrays import IntArray
from tasp_lab.attention_task import AttentionTask, Side
from tasp_lab.calls import Call
from tasp_lab.pieces import split_bytes
from tasp_lab.placement import Placement, Span
from tasp_lab.workload import Workload

_FULL, _PARTIAL = 1, 2
"""What of a tile is seen: all or some. Nothing is 0."""

_MOST_SPANS = 5
"""Five digits to base 3 fit into a byte."""


def cut_blocks(
    workload: Workload,
    placement: Placement,
    shares: Sequence[Fraction],
    travellers: Side = "keys",
    gradient_dtype: str | None = None,
) -> tuple[AttentionTask, IntArray]:
    """Cut each span of the side that travels into one block per ring by the shares, and none of the side that stays.

    The blocks of a rank have consecutive numbers in the order of its shard; blocks without positions are left out.
    Returns the task, and the ring of each travelling block.
    """
    spans = [(rank, span) for rank, each in enumerate(placement.spans) for span in each]
    whole = [(rank, span, 0) for rank, span in spans]
    cut = [(rank, *part) for rank, span in spans for part in _parts(span, shares)]
    keys, queries = (cut, whole) if travellers == "keys" else (whole, cut)
    task = AttentionTask(
        workload=workload,
        placement=placement,
        first_query=len(keys),
        owner=np.array([rank for rank, *_ in keys + queries], dtype=np.int64),
        start=np.array([block.start for _, block, _ in keys + queries], dtype=np.int64),
        count=np.array([block.count for _, block, _ in keys + queries], dtype=np.int64),
        travellers=travellers,
        gradient_dtype=gradient_dtype,
    )
    return task, np.array([ring for *_, ring in cut], dtype=np.int64)


def _parts(span: Span, shares: Sequence[Fraction]) -> Iterator[tuple[Span, int]]:
    """The parts of a span that rings carry, each with its ring."""
    first = 0
    for ring, count in enumerate(split_bytes(span.count, shares)):
        if count:
            yield span.part(first, count), ring
            first += count


class Journeys:
    """The ways of all travelling blocks, which are counted from 0 here, and the kernel calls on them.

    `rings` is an int array (rings, world_size), `ring_of` the ring of each travelling block. `first` and `last` are
    int arrays, the first and the last hop at which a block meets a rank that has something to do with it; 0 if none.
    """

    def __init__(self, task: AttentionTask, rings: IntArray, ring_of: IntArray) -> None:
        self.task, self.rings, self.ring_of = task, rings, ring_of
        self.world_size: int = rings.shape[1]
        self.blocks = task.travelling
        self._document = task.document[self.blocks]
        place = np.argsort(rings, axis=1)
        self._start = place[ring_of, task.owner[self.blocks]]
        self._staying = [
            task.by_document(task.staying[task.owner[task.staying] == rank]) for rank in range(self.world_size)
        ]
        self._seen = np.stack([self._seen_at(rank) for rank in range(self.world_size)])
        self.first, self.last = self._hops_seen()

    def _seen_at(self, rank: int) -> npt.NDArray[np.uint8]:
        """What is seen between a rank's staying blocks and each travelling block: a digit to base 3 for each of them.

        Blocks of other documents see nothing of each other, so the digits are those of one document's blocks.
        """
        staying = self._staying[rank][self._document]
        assert staying.shape[1] <= _MOST_SPANS, "five digits to base 3 fit into a byte"
        queries, keys = staying, self.blocks[:, None]
        if self.task.travellers == "queries":
            queries, keys = keys, queries
        low, high = self.task.tile_bands(queries, keys)
        full = (low == 1 - self.task.count[keys]) & (high == self.task.count[queries] - 1)
        seen = np.where(full, _FULL, np.where(low <= high, _PARTIAL, 0)) * (staying >= 0)
        digits: npt.NDArray[np.uint8] = (seen * 3 ** np.arange(staying.shape[1])).sum(axis=1).astype(np.uint8)
        return digits

    def _hops_seen(self) -> tuple[IntArray, IntArray]:
        """The first and the last hop at which each block is seen."""
        travellers = np.arange(len(self.blocks))
        first, last = np.zeros((2, len(travellers)), dtype=np.int64)
        for hop in range(1, self.world_size):
            seen = self._seen[self.at(hop), travellers] > 0
            first[seen & (first == 0)] = hop
            last[seen] = hop
        return first, last

    def hops(self, trim: bool) -> IntArray:
        """How many hops each block makes: to the last rank that it meets, or without `trim` to the end of its ring."""
        return self.last if trim else np.full(len(self.blocks), self.world_size - 1)

    def at(self, hop: int | IntArray, travellers: IntArray | slice = slice(None)) -> IntArray:
        """The rank that each travelling block, or each of some, is at after so many hops."""
        place = (self._start[travellers] + hop) % self.world_size
        ranks: IntArray = self.rings[self.ring_of[travellers], place]
        return ranks

    def order(self, travellers: IntArray, ranks: IntArray) -> IntArray:
        """The order of some travelling blocks by the ranks that they come to, and by what is seen of them there.

        What is seen alike of a document then lies together: one kernel call.
        """
        order: IntArray = np.lexsort((travellers, self._seen[ranks, travellers], self._document[travellers], ranks))
        return order

    def calls_at(self, hop: int, travellers: IntArray) -> Iterator[Call]:
        """The calls to travelling blocks that are at a hop; at hop 0 all blocks are, at home."""
        if hop == 0:
            yield from self._calls_at_home()
            return
        if not len(travellers):
            return
        ranks = self.at(hop, travellers)
        order = self.order(travellers, ranks)
        travellers, ranks = travellers[order], ranks[order]
        seen = self._seen[ranks, travellers]
        alike = (np.diff(ranks) == 0) & (np.diff(seen) == 0) & (np.diff(self._document[travellers]) == 0)
        starts = np.flatnonzero(np.concatenate([[True], ~alike])).tolist()
        for first, end in zip(starts, [*starts[1:], len(travellers)], strict=True):
            yield from self._calls_alike(int(ranks[first]), self.blocks[travellers[first:end]], int(seen[first]))

    def _calls_alike(self, rank: int, travelling: IntArray, seen: int) -> Iterator[Call]:
        """The calls to blocks that lie together and of which each staying block sees alike."""
        staying = self._staying[rank][self.task.document[travelling[0]]]
        digits = seen // 3 ** np.arange(len(staying)) % 3
        full = staying[digits == _FULL]
        if len(full):
            queries, keys = (full, travelling) if self.task.travellers == "keys" else (travelling, full)
            sizes = self.task.count[queries].sum(), self.task.count[keys].sum()
            yield Call(rank, queries, keys, 1 - int(sizes[1]), int(sizes[0]) - 1)
        for stays in staying[digits == _PARTIAL]:
            for travels in travelling:
                queries, keys = (stays, travels) if self.task.travellers == "keys" else (travels, stays)
                yield from self._tile(rank, queries, keys)

    def _calls_at_home(self) -> Iterator[Call]:
        """Every rank's calls to its own blocks, document by document."""
        task = self.task
        for rank, staying in enumerate(self._staying):
            own = task.by_document(self.blocks[task.owner[self.blocks] == rank])
            for document in np.flatnonzero((staying >= 0).any(axis=1)):
                stays, travels = (each[document][each[document] >= 0] for each in (staying, own))
                queries, keys = (stays, travels) if task.travellers == "keys" else (travels, stays)
                yield from self._calls_within(rank, queries, keys)

    def _calls_within(self, rank: int, queries: IntArray, keys: IntArray) -> Iterator[Call]:
        """The calls of a rank's queries in a document to its keys there.

        They are in ascending order, so the causal mask among them is the one of their indices.
        """
        workload, count = self.task.workload, int(self.task.count[queries].sum())
        if workload.keys_seen is None:
            yield Call(rank, queries, keys, 0 if workload.mask == "causal" else 1 - count, count - 1)
            return
        for key in keys:
            for query in queries:
                yield from self._tile(rank, query, key)

    def _tile(self, rank: int, query: np.int64, key: np.int64) -> Iterator[Call]:
        """A query block against a key block, if it sees any of it."""
        queries, keys = np.array([query]), np.array([key])
        low, high = self.task.bands(queries, keys)
        if low.item() <= high.item():
            yield Call(rank, queries, keys, low.item(), high.item())
