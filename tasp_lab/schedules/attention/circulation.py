"""Circulation: the route of each circulating block around its ring, and the kernel calls at every hop.

Each circulating block is at its owner at hop 0, at the next rank of its ring at hop 1, and so on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tasp_lab.core.arrays import BoolArray, IntArray, frozen, lock, stable_order
from tasp_lab.rings.rings import split_count
from tasp_lab.schedule.calls import BlockLists, Calls, ranges
from tasp_lab.schedules.attention.layer_blocks import query_spans
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS, AttentionTask
from tasp_lab.workload.kernel_shapes import clip_band
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import SequenceLayout, Span

T = TypeVar("T")

Side = Literal["keys", "queries"]
"""The side that circulates."""

_FULL, _PARTIAL = 1, 2
"""Mask coverage of a tile: full or partial; 0 if the mask is empty."""

_MAX_SPANS = 5
"""Five digits to base 3 fit into a byte."""

_TILES_AT_ONCE = 2**16
"""Blocks times ranks whose mask coverage is found together."""


def cut_blocks(
    workload: Workload,
    layout: SequenceLayout,
    shares: Sequence[Fraction],
    circulating_side: Side = "keys",
    gradient_dtype: str | None = None,
) -> tuple[AttentionTask, IntArray]:
    """The task in which one side is cut by these shares and the other one is whole, and the ring of each cut block."""
    whole = (Fraction(1),)
    keys, queries = (shares, whole) if circulating_side == "keys" else (whole, shares)
    n = layout.world_size
    cut = cut_spans(workload, layout, [keys] * n, [queries] * n, gradient_dtype, circulating_side)
    return cut.task, (cut.keys if circulating_side == "keys" else cut.queries).ring


class Places(NamedTuple):
    """The ring and the span of each block of a side, int arrays."""

    ring: IntArray
    span: IntArray


class Cut(NamedTuple):
    """A task, and where its blocks of keys and of queries are."""

    task: AttentionTask
    keys: Places
    queries: Places


def cut_spans(
    workload: Workload,
    layout: SequenceLayout,
    keys: Sequence[Sequence[Fraction]],
    queries: Sequence[Sequence[Fraction]],
    gradient_dtype: str | None = None,
    first_gradients: Side = "keys",
) -> Cut:
    """Cut each span of a side into one block per ring, by the shares of its rank.

    The blocks of a rank have consecutive numbers in the order of its shard; blocks without positions are omitted. Keys
    come first, then queries, then what is computed: results, or gradients, first those of one side.
    """
    key_pieces, query_pieces = _cut(layout.spans, keys), _cut(query_spans(workload, layout), queries)
    tensors = [(KEYS, key_pieces), (QUERIES, query_pieces)]
    if gradient_dtype is None:
        tensors.append((RESULTS, query_pieces))
    else:
        gradients = [(KEY_GRADIENTS, key_pieces), (QUERY_GRADIENTS, query_pieces)]
        tensors += gradients if first_gradients == "keys" else gradients[::-1]
    tensor = np.repeat([each for each, _ in tensors], [pieces.shape[1] for _, pieces in tensors])
    owner, start, count, _, _ = np.concatenate([pieces for _, pieces in tensors], axis=1)
    task = AttentionTask(workload, layout, tensor, owner, start, count, gradient_dtype=gradient_dtype)
    return Cut(task, Places(*key_pieces[3:]), Places(*query_pieces[3:]))


def _cut(spans: Sequence[Sequence[Span]], shares: Sequence[Sequence[Fraction]]) -> IntArray:
    """The nonempty parts of all spans, one per ring, an int array (5, parts): the rank, the start and the count of each
    part, its ring, and the number of the span that it is cut from."""
    rows = list[tuple[int, ...]]()
    for number, (rank, span) in enumerate((rank, span) for rank, each in enumerate(spans) for span in each):
        start = span.start
        for ring, count in enumerate(_counts(span.count, tuple(shares[rank]))):
            if count:
                rows.append((rank, start, count, ring, number))
                start += count * span.stride
    return np.array(rows, dtype=np.int64).reshape(-1, 5).T


_counts = lru_cache(split_count)
"""Most spans have one of a few lengths."""


class Hops(ABC):
    """Blocks that visit ranks in the order of rings, indexed from 0 here: at hop 0 each is at its owner.

    `rings` is an int array (rings, world_size); `ring_of` and `owner` are int arrays (blocks,), `start` is the place of
    the owner on the ring. `blocks` and `gradients` are the numbers of the blocks and of what calls yield of them in the
    task, -1 for nothing. `used`: bool array (hops, blocks), whether another rank than the owner needs a block there;
    `first` and `last` are int arrays (blocks,): the first and the last such hop, 0 if there is none.
    """

    task: Any  # of softmax or of linear attention: `tensor`, `block_bytes` and `is_backward` are what they share
    side: Side = "keys"
    blocks: IntArray
    gradients: IntArray

    def __init__(self, rings: IntArray, ring_of: IntArray, owner: IntArray) -> None:
        self.rings = rings = frozen("rings", rings, np.int64, 2, "an array of shape (rings, ranks)")
        self.ring_of = ring_of = frozen("rings of blocks", ring_of, np.int64, 1, "an array of shape (blocks,)")
        self.world_size: int = rings.shape[1]
        self.owner, self.start = owner, np.argsort(rings, axis=1)[ring_of, owner]
        # All rings twice around, and where each block starts there: its rank at a hop is so many places on.
        self._twice, self._from = np.tile(rings, 2).ravel(), 2 * self.world_size * ring_of + self.start

    def _use(self, used: BoolArray) -> None:
        used[0] = False
        self.used = used
        self.first: IntArray = used.argmax(axis=0)
        self.last: IntArray = np.where(self.first, self.world_size - 1 - used[::-1].argmax(axis=0), 0)

    def at(self, hop: int | IntArray, blocks: IntArray | slice = slice(None)) -> IntArray:
        """The rank of each selected block at a hop."""
        ranks: IntArray = self._twice[self._from[blocks] + hop % self.world_size]
        return ranks

    @abstractmethod
    def order(self, blocks: IntArray, ranks: IntArray, *before: IntArray) -> IntArray:
        """The order in which blocks are sent to ranks; by what is `before` these first."""

    @abstractmethod
    def calls_with(self, blocks: IntArray, ranks: IntArray) -> tuple[Calls, ...]:
        """The calls on blocks at other ranks, two int arrays: each pair is a block and a rank."""

    @abstractmethod
    def calls_at_owners(self) -> tuple[Calls, ...]:
        """Every rank's calls to its own blocks."""


class Circulation(Hops):
    """The blocks of one side of softmax attention around rings, and the kernel calls on them.

    `side` circulates: `blocks` are its blocks, `stationary` those of the other side.

    `span_of`: the span of each stationary block, if spans are cut; mask coverage is per span. `travels`: bool array
    (world_size, world_size), whether the blocks of a rank are needed at another one, for those of which the other side
    does not come instead; all are if not given.
    """

    task: AttentionTask

    def __init__(
        self,
        task: AttentionTask,
        rings: IntArray,
        ring_of: IntArray,
        side: Side = "keys",
        span_of: IntArray | None = None,
        travels: BoolArray | None = None,
    ) -> None:
        circulating, stationary = (KEYS, QUERIES) if side == "keys" else (QUERIES, KEYS)
        self.is_whole = span_of is None and travels is None
        """Whether blocks are needed wherever the mask needs them, and covered one by one, as theorems presume."""
        of_side, array = (task.blocks_of(each) for each in (circulating, stationary)), "an array of shape (blocks,)"
        self.blocks, self.stationary = (frozen("blocks", each, np.int64, 1, array) for each in of_side)
        super().__init__(rings, ring_of, task.owner[self.blocks])
        self.task, self.side, self.gradients = task, side, task.output_of[self.blocks]
        self._spans = self._stationary_spans(span_of)
        self._are_single = bool((self._spans.sizes == 1).all())
        self._span_first, self._span_count = self._spans.first, _positions(task, self._spans)
        self._lists = self._stationary_lists()
        at_once = 1 + _TILES_AT_ONCE // max(len(self.blocks), 1)
        first_ranks = range(0, self.world_size, at_once)
        self._coverage = np.concatenate([self._coverage_at(each, each + at_once) for each in first_ranks])
        if travels is not None:
            self._coverage *= travels[task.owner[self.blocks]].T
        everywhere = np.arange(len(self.blocks))
        self._use(np.stack([self._coverage[self.at(hop), everywhere] > 0 for hop in range(self.world_size)]))
        lock(self)

    def _stationary_spans(self, span_of: IntArray | None) -> BlockLists:
        """The stationary blocks of each span, adjacent ones."""
        sizes = np.ones(len(self.stationary), dtype=np.int64) if span_of is None else np.bincount(span_of)
        return BlockLists.of_sizes(sizes, self.stationary)

    def _stationary_lists(self) -> BlockLists:
        """The stationary spans of each rank, in ascending order."""
        owner = self.task.owner[self._span_first]
        sizes = np.bincount(owner, minlength=self.world_size)
        assert sizes.max(initial=0) <= _MAX_SPANS, "five digits to base 3 fit into a byte"
        return BlockLists.of_sizes(sizes, np.argsort(owner, kind="stable"))

    def _stationary_blocks(self, lists: BlockLists) -> BlockLists:
        """The blocks of lists of stationary spans."""
        if self._are_single:
            return BlockLists(lists.offset, self._spans.block[lists.block])
        sizes = np.bincount(lists.owner, weights=self._spans.sizes[lists.block], minlength=len(lists)).astype(np.int64)
        return BlockLists.of_sizes(sizes, self._spans.select(lists.block).block)

    def _coverage_at(self, first: int, end: int) -> npt.NDArray[np.uint8]:
        """The mask coverage of each circulating block at ranks, (ranks, blocks): a base-3 digit per stationary span."""
        of_rank = self._lists.offset[first : end + 1] - self._lists.offset[first]
        spans = self._lists.block[self._lists.offset[first] :][: of_rank[-1]]
        place = np.arange(len(spans)) - np.repeat(of_rank[:-1], np.diff(of_rank))
        low, high = self._bands(self.blocks[:, None], spans)
        queries, keys = self._sides(self.task.count[self.blocks][:, None], self._span_count[spans])
        full = (low == 1 - keys) & (high == queries - 1)
        seen = self._seen_by_document(spans) if self.task.is_packed else low <= high
        coverage = np.where(seen, np.where(full, _FULL, _PARTIAL), 0)
        sums = np.zeros((len(spans) + 1, len(coverage)), dtype=np.int64)
        np.cumsum((coverage * 3**place).T, axis=0, out=sums[1:])
        digits: npt.NDArray[np.uint8] = np.diff(sums[of_rank], axis=0).astype(np.uint8)
        return digits

    def _seen_by_document(self, spans: IntArray) -> BoolArray:
        """Whether circulating blocks have a document in common with a visible block of spans, (blocks, spans)."""
        stationary = self._spans.select(spans)
        low, high = self.task.tile_bands(*self._sides(self.blocks[:, None], stationary.block))
        found: BoolArray = np.logical_or.reduceat(low <= high, stationary.offset[:-1], axis=1)
        return found

    def _bands(self, circulating: IntArray, spans: IntArray) -> tuple[IntArray, IntArray]:
        """The clipped bands of circulating blocks and stationary spans, which broadcast together, of any documents."""
        task = self.task
        block = task.start[circulating], task.count[circulating]
        span = task.start[self._span_first[spans]], self._span_count[spans]
        queries, keys = self._sides(block, span)
        low, high = task.run_bands(*queries, *keys)
        return clip_band(low, high, queries[1], keys[1])

    def _sides(self, circulating: T, stationary: T) -> tuple[T, T]:
        """What there is of both sides, that of queries first."""
        return (stationary, circulating) if self.side == "keys" else (circulating, stationary)

    def order(self, blocks: IntArray, ranks: IntArray, *before: IntArray) -> IntArray:
        """The order of blocks by destination rank and mask coverage there; by what is `before` these first.

        Blocks with the same mask coverage are contiguous, so one kernel call covers them.
        """
        return stable_order(*before, self._alike(blocks, ranks), blocks)

    def _alike(self, blocks: IntArray, ranks: IntArray) -> IntArray:
        """A number for the rank and the mask coverage there."""
        number: IntArray = ranks * 3**_MAX_SPANS + self._coverage[ranks, blocks]
        return number

    def calls_with(self, blocks: IntArray, ranks: IntArray) -> tuple[Calls, ...]:
        """The calls on blocks at other ranks, two int arrays: each pair is a block and a rank."""
        alike = self._alike(blocks, ranks)
        order = stable_order(alike, blocks)
        blocks, ranks, alike = blocks[order], ranks[order], alike[order]
        coverage = self._coverage[ranks, blocks]
        starts = np.flatnonzero(np.concatenate([[True], alike[1:] != alike[:-1]]))[: len(blocks)]
        moving = BlockLists.of_sizes(np.diff(np.append(starts, len(blocks))), self.blocks[blocks])
        return self._coverage_calls(ranks[starts], coverage[starts], moving)

    def _coverage_calls(self, rank: IntArray, coverage: npt.NDArray[np.uint8], moving: BlockLists) -> tuple[Calls, ...]:
        """The calls on runs of circulating blocks that have the same mask coverage at a rank.

        One call covers a run and all stationary spans with a full mask; each tile with a partial mask is a call.
        """
        run, position = ranges(self._lists.offset[rank], self._lists.offset[rank + 1])
        span, place = self._lists.block[position], position - self._lists.offset[rank[run]]
        digit = coverage[run] // 3**place % 3
        full, partial = digit == _FULL, np.flatnonzero(digit == _PARTIAL)
        sizes = np.bincount(run[full], minlength=len(rank))
        runs = np.flatnonzero(sizes)
        if not len(partial):  # as most often around rings
            fixed = self._stationary_blocks(BlockLists.of_sizes(sizes[runs], span[full]))
            queries, keys = self._sides(moving.select(runs), fixed)
            low, high = 1 - _positions(self.task, keys), _positions(self.task, queries) - 1
            return _calls(self.task, rank[runs], queries, keys, low, high)
        entry, tile = ranges(moving.offset[run[partial]], moving.offset[run[partial] + 1])
        fixed = BlockLists.of_sizes(
            np.concatenate([sizes[runs], np.ones(len(tile), dtype=np.int64)]),
            np.concatenate([span[full], span[partial][entry]]),
        )
        used = moving.select(runs)
        moved = BlockLists.of_sizes(
            np.concatenate([used.sizes, np.ones(len(tile), dtype=np.int64)]),
            np.concatenate([used.block, moving.block[tile]]),
        )
        calls_run = np.concatenate([runs, run[partial][entry]])
        order = np.argsort(calls_run, kind="stable")  # a run's full call, then its tiles
        fixed, moved, is_tile = fixed.select(order), moved.select(order), order >= len(runs)
        low, high = self._bands(moved.first, fixed.first)
        fixed = self._stationary_blocks(fixed)
        queries, keys = self._sides(moved, fixed)
        low = np.where(is_tile, low, 1 - _positions(self.task, keys))
        high = np.where(is_tile, high, _positions(self.task, queries) - 1)
        return _calls(self.task, rank[calls_run[order]], queries, keys, low, high)

    def calls_at_owners(self) -> tuple[Calls, ...]:
        """Every rank's calls to its own blocks.

        Both sides are in ascending order, so a mask of order between them equals that of their indices, counted from
        the first query; other masks have a call per run of places.
        """
        task = self.task
        owner = task.owner[self.blocks]
        own = BlockLists.of_sizes(
            np.bincount(owner, minlength=len(self._lists)), self.blocks[np.argsort(owner, kind="stable")]
        )
        staying = self._stationary_blocks(self._lists)
        queries, keys = self._sides(own, staying)
        rank = np.flatnonzero(queries.sizes)
        queries, keys = queries.select(rank), keys.select(rank)
        if task.visible.is_of_order:
            count, key_count = _positions(task, queries), _positions(task, keys)
            # Without cached keys as many of either side; with them, the last query is at the last key.
            low, high = task.visible.band(key_count - count, count, key_count)
            return _calls(task, rank, queries, keys, low, high)
        (queries, queries_of), (keys, keys_of) = (_runs(task, each) for each in (queries, keys))
        query, key = ranges(*(np.searchsorted(keys_of, queries_of, side) for side in ("left", "right")))
        queries, keys = queries.select(query), keys.select(key)
        counts = _positions(task, queries), _positions(task, keys)
        low, high = task.run_bands(task.start[queries.first], counts[0], task.start[keys.first], counts[1])
        low, high = clip_band(low, high, *counts)
        seen = np.flatnonzero(low <= high)
        owner = rank[queries_of[query[seen]]]
        return _calls(task, owner, queries.select(seen), keys.select(seen), low[seen], high[seen])


def _runs(task: AttentionTask, lists: BlockLists) -> tuple[BlockLists, IntArray]:
    """The runs of adjacent blocks in each list, as lists, and the list that each is of."""
    block, of = lists.block, lists.owner
    follows = task.start[block][1:] == (task.start + task.layout.stride * task.count)[block][:-1]
    starts = np.flatnonzero(np.concatenate([[True], ~follows | (np.diff(of) != 0)])[: len(block)])
    return BlockLists.of_sizes(np.diff(np.append(starts, len(block))), block), of[starts]


def _positions(task: AttentionTask, lists: BlockLists) -> IntArray:
    """The number of positions of each list, none of which is empty."""
    if not len(lists):
        return np.zeros(0, dtype=np.int64)
    counts: IntArray = np.add.reduceat(task.count[lists.block], lists.offset[:-1])
    return counts


def _calls(
    task: AttentionTask, rank: IntArray, queries: BlockLists, keys: BlockLists, low: IntArray, high: IntArray
) -> tuple[Calls, ...]:
    if not len(rank):
        return ()
    return (Calls(task.kernel, rank, (queries, keys), np.stack([low, high], axis=1)),)
