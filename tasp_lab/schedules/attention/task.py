"""Softmax attention as a task: the parts of results and gradients, and what kernel calls yield.

Forward, ``attend`` reads queries and keys (with their values) and adds to the results of these queries one part per key
block: the tiles of its rows. Backward, ``differentiate`` adds one part per key block to the gradient of the queries,
and one per query block to that of the keys. Blocks are those of `tasp_lab.schedules.attention.layer_blocks`.

A **tile** is a query block against a key block; its mask is a band (`tasp_lab.workload.kernel_shapes`). Parts are
numbered among the blocks of the same KV heads; a tile with an empty mask is no part.

**Packed documents.** Blocks and bands are between places, which do not depend on documents. A call computes of its band
the pairs of one document that the mask lets see each other, and `segments` lists them.

Theorem. If the calls of a schedule compute each pair of the band between places exactly once, they compute each pair of
a query and a key that it attends to exactly once, and no other pair.
Proof. A pair is computed by the calls that have it in their band, of which there is one if it is in the band between
places, else none. So only this is left: a query attends to no key outside that band. If only the order of positions
decides, then because places have the order of positions within a document. Else because the band is that wide
(`LayerBlocks.visible`). []
Tiles of blocks without a common document are no parts, whatever their band. If the mask is given as ranges, the band is
every pair of places, and tiles without a pair that the ranges let attend are no parts.

**Decode layers.** A call takes the query heads of several ranks, stacked like rows, to keys with all their KV heads; no
pair is masked. Keys may be left anywhere by earlier passes, as they are the KV cache. With `SCALES` it yields the
log-sum-exps of its rank alone; ``scale`` takes queries and those of all ranks, and yields the parts of results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, first_true, numbered
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Join, Kind, Pool
from tasp_lab.schedule.calls import BlockLists, Calls, Contract, Effects, Passing, Task, check_blocks, ranges
from tasp_lab.schedules.attention.layer_blocks import KEY_GRADIENTS as KEY_GRADIENTS
from tasp_lab.schedules.attention.layer_blocks import KEYS as KEYS
from tasp_lab.schedules.attention.layer_blocks import QUERIES as QUERIES
from tasp_lab.schedules.attention.layer_blocks import QUERY_GRADIENTS as QUERY_GRADIENTS
from tasp_lab.schedules.attention.layer_blocks import RESULTS as RESULTS
from tasp_lab.schedules.attention.layer_blocks import SCALES as SCALES
from tasp_lab.schedules.attention.layer_blocks import TENSORS as TENSORS
from tasp_lab.schedules.attention.layer_blocks import LayerBlocks
from tasp_lab.workload.kernel_shapes import Segment, ShapeRows, clip_band, pairs_in_band
from tasp_lab.workload.layer import ELEMENT_BYTES
from tasp_lab.workload.packing import PackedSegment, Rows, document_segments, range_segments
from tasp_lab.workload.ranges import pairs_of_runs

ATTEND, DIFFERENTIATE, SCALE = "attend", "differentiate", "scale"
"""Names of kernels, which take queries and keys, and a band as parameters (low, high); the last queries and scales."""


@dataclass(frozen=True, eq=False)
class AttentionTask(LayerBlocks):
    """What the calls of a layer compute; parameters are those of `LayerBlocks`."""

    @property
    def passing(self) -> Passing:
        """The pass of the kernel calls."""
        return "backward" if self.is_backward else "forward"

    @property
    def kernel(self) -> str:
        """The kernel of all calls."""
        return DIFFERENTIATE if self.is_backward else ATTEND

    @property
    def kernels(self) -> Mapping[str, Passing]:
        """The pass of the kernel."""
        return {self.kernel: self.passing} | ({SCALE: "forward"} if self.is_scaled else {})

    @cached_property
    def contract(self) -> Contract:
        """Ranks start with their keys and queries and end with what these yield.

        Backward, the blocks of queries hold the inputs of the gradients, and a forward pass may leave keys anywhere.
        """
        inputs = np.isin(self.tensor, (KEYS, QUERIES))
        left = self.is_backward or self.workload.decode
        return Contract.of(self.owner, inputs, ~inputs & (self.tensor != SCALES), (self.tensor == KEYS) & left)

    def saved(self, forward: Task) -> tuple[IntArray, IntArray]:
        """The blocks that a backward pass has from its forward pass, its keys; and these blocks there, int arrays."""
        if self.is_backward and isinstance(forward, AttentionTask):
            own, same = self._in_order(KEYS), forward._in_order(KEYS)
            if np.array_equal(self.columns_of(own), forward.columns_of(same)):
                return own, same
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    @property
    def dtype(self) -> str:
        return self.workload.dtype

    @property
    def content(self) -> tuple[object, ...]:
        """All that distinguishes tasks, as plain values."""
        columns = (self.tensor, self.owner, self.start, self.count, *self._head_columns)
        blocks = tuple(tuple(values.tolist()) for values in columns)
        own = [blocks, "keys by heads"] if self.keys_by_heads else [blocks]
        content = self.workload, self.layout, *own, self.gradient_dtype, self.result_dtype
        return content if self.home_dtype is None else (*content, self.home_dtype)

    @cached_property
    def _number(self) -> IntArray:
        """The number of each block of keys, and of queries, among those of its group: its part of the other side."""
        number = np.full(len(self.tensor), -1, dtype=np.int64)
        for tensor in (KEYS, QUERIES):
            blocks = self.blocks_of(tensor)
            order = np.argsort(self.group[blocks], kind="stable")
            groups = self.group[blocks][order]
            number[blocks[order]] = np.arange(len(blocks)) - np.searchsorted(groups, groups)
        return number

    def _members(self, tensor: int) -> IntArray:
        """The blocks of a tensor by group and number, an array (groups, most blocks of a group) padded with -1."""
        blocks = self.blocks_of(tensor)
        table = np.full((int(self.group.max(initial=-1)) + 1, int(self._number[blocks].max(initial=-1)) + 1), -1)
        table[self.group[blocks], self._number[blocks]] = blocks
        return table

    @cached_property
    def parts(self) -> IntArray:
        """The number of parts of each block, those that do not exist included."""
        found = np.ones(len(self.tensor), dtype=np.int64)
        for tensor, targets in ((KEYS, (RESULTS, QUERY_GRADIENTS)), (QUERIES, (KEY_GRADIENTS,))):
            size = np.bincount(self.group[self.blocks_of(tensor)], minlength=int(self.group.max(initial=-1)) + 1)
            sums = np.isin(self.tensor, targets)
            found[sums] = size[self.group[sums]]
        return found

    @cached_property
    def _source_of(self) -> IntArray:
        """The block of queries or keys whose result or gradient a block is."""
        source = np.full(len(self.tensor), -1, dtype=np.int64)
        has = np.flatnonzero(self.output_of >= 0)
        source[self.output_of[has]] = has
        return source

    @cached_property
    def _spans(self) -> tuple[IntArray, IntArray]:
        """The first block of each start and count, and for each block the number of its own."""
        return numbered(self.start, self.count)

    def check(self, blocks: Blocks) -> None:
        """Raise `ScheduleError` unless these are the blocks of the task, up to their pools."""
        check_blocks(blocks, self.blocks({}, ()))

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of results or gradients exist: the tiles whose mask is not empty; all parts of data."""
        source, (first, span) = self._source_of[blocks], self._spans
        found = np.zeros((len(blocks), int(self.parts[blocks].max(initial=1))), dtype=bool)
        found[source < 0, 0] = True
        for own, other in ((QUERIES, KEYS), (KEYS, QUERIES)):
            rows = np.flatnonzero((source >= 0) & (self.tensor[source] == own))
            if not len(rows):
                continue
            # Whether a tile is empty follows from its spans, which groups of heads have in common.
            members, group = self._members(other), self.group[source[rows]]
            of_rows, row = np.unique(span[source[rows]], return_inverse=True)
            of_others, column = np.unique(span[members], return_inverse=True)
            mine, others = np.broadcast_arrays(first[of_rows][:, None], first[of_others])
            low, high = self.tile_bands(*(mine, others) if own == QUERIES else (others, mine))
            seen = (low <= high)[row[:, None], column.reshape(members.shape)[group]] & (members[group] >= 0)
            width = min(seen.shape[1], found.shape[1])
            found[rows, :width] = seen[:, :width]
        return found

    def blocks(self, pools: Mapping[int, Pool | None], bound: Collection[int]) -> Blocks:
        """The blocks of a schedule of this task; `pools` by tensor; resident copies of `bound` are the caller's."""
        joins: Mapping[int, Join] = {
            RESULTS: "add" if self.is_scaled else "merge",
            KEY_GRADIENTS: "add",
            QUERY_GRADIENTS: "add",
        }
        kinds = [
            Kind(TENSORS[each], joins.get(each, ""), pools.get(each), self.fields_of(each, heads), each in bound)
            for each, heads in self.kinds[0]
        ]
        return Blocks(kinds, self.kinds[1], self.block_bytes, self.parts)

    def tile_bands(self, queries: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The clipped bands of the tiles of query and key blocks, two arrays that broadcast together.

        Empty of blocks none of whose pairs attend, and of those without a common document.
        """
        counts = self.count[queries], self.count[keys]
        low, high = self.run_bands(self.start[queries], counts[0], self.start[keys], counts[1])
        apart = ~self._see(queries, keys)
        return clip_band(np.where(apart, counts[0], low), np.where(apart, -counts[1], high), *counts)

    def _see(self, queries: IntArray, keys: IntArray) -> BoolArray:
        """Whether query and key blocks have a document in common, or a pair that ranges let attend.

        Keys to which no query attends are seen by those of their owner, whose calls find that their gradients are 0.
        """
        if self.workload.ranges is not None:
            number, (seen, alone) = self._spans[1], self._seen_spans
            by_owner: BoolArray = alone[number[keys]] & (self.owner[queries] == self.owner[keys])
            return seen[number[queries], number[keys]] | by_owner
        first, last = self.documents
        together: BoolArray = (last[queries] >= first[keys]) & (first[queries] <= last[keys])
        return together

    @cached_property
    def _seen_spans(self) -> tuple[BoolArray, BoolArray]:
        """Whether ranges let a pair attend between spans of `_spans`, (spans, spans); and which keys no query sees."""
        first, number = self._spans
        entry, _, position, count = self.pieces_of(self.start[first], self.count[first])
        pairs = pairs_of_runs(self.workload.slices, (position, count), (position, count), self.layout.stride)
        begin = np.searchsorted(entry, np.arange(len(first)))
        seen: BoolArray = np.add.reduceat(np.add.reduceat(pairs, begin, axis=0), begin, axis=1) > 0
        of_queries = seen[np.unique(number[self.blocks_of(QUERIES)])]
        return seen, np.logical_not(np.logical_or.reduce(of_queries, axis=0))

    def run_bands(self, query: IntArray, queries: IntArray, key: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The bands of runs of places: `queries` places from `query` on, `keys` from `key` on. Not clipped."""
        ahead = (query - key).astype(np.int64)
        low, high = self.visible.band(ahead, queries, keys, self.layout.stride)
        if low.shape == high.shape == ahead.shape:
            return low, high
        return np.broadcast_to(low, ahead.shape), np.broadcast_to(high, ahead.shape)

    def effects(self, calls: Calls) -> Effects:
        """One part per tile. Raises `ScheduleError` for other operands than queries and their keys, or another mask."""
        if self.is_scaled:
            self._check_whole(calls)
        if self.is_scaled and calls.kernel == SCALE:
            call, part = calls.operands[0].owner, self._number[self.blocks_of(KEYS)]
            return Effects(call, self.output_of[calls.operands[0].block], part[calls.rank[call]])
        queries, keys = self._operands(calls)
        call, query, key = tiles(queries, keys)
        query_block, key_block = queries.block[query], keys.block[key]
        self._check_same_heads(calls, queries, call, query_block, key_block)
        shift = _first_positions(keys, self.count)[key] - _first_positions(queries, self.count)[query]
        counts = self.count[query_block], self.count[key_block]
        low, high = clip_band(calls.params[call, 0] + shift, calls.params[call, 1] + shift, *counts)
        wanted_low, wanted_high = clip_band(
            *self.run_bands(self.start[query_block], counts[0], self.start[key_block], counts[1]), *counts
        )
        seen, wanted = low <= high, wanted_low <= wanted_high
        wrong = (seen != wanted) | (seen & ((low != wanted_low) | (high != wanted_high)))
        if (at := first_true(wrong)) is not None:
            raise ScheduleError(
                f"rank {calls.rank[call[at]]} attends with queries {query_block[at]} to keys {key_block[at]} "
                f"in the band {low[at]} to {high[at]}, the mask is {wanted_low[at]} to {wanted_high[at]}"
            )
        if self.is_packed:
            seen &= self._see(query_block, key_block)
        if not seen.all():
            call, query_block, key_block = call[seen], query_block[seen], key_block[seen]
        if self.is_scaled:
            return Effects(np.arange(len(calls)), self.blocks_of(SCALES)[calls.rank], np.zeros_like(calls.rank))
        block, part = self.output_of[query_block], self._number[key_block]
        if not self.is_backward:
            return Effects(call, block, part)
        return Effects(
            np.concatenate([call, call]),
            np.concatenate([block, self.output_of[key_block]]),
            np.concatenate([part, self._number[query_block]]),
        )

    def _check_whole(self, calls: Calls) -> None:
        """Raise `ScheduleError` unless calls take all queries, with the keys of their rank or to scale all scales."""
        scales = calls.kernel == SCALE
        others = [self.blocks_of(SCALES)] * len(calls) if scales else self.blocks_of(KEYS)[calls.rank][:, None]
        wanted = BlockLists.of([self.blocks_of(QUERIES)] * len(calls)), BlockLists.of([*others])
        for found, expected in zip(calls.operands, wanted, strict=True):
            if not (np.array_equal(found.offset, expected.offset) and np.array_equal(found.block, expected.block)):
                what = f"all {TENSORS[SCALES]}" if scales else "the keys of its rank"
                raise ScheduleError(f"rank {calls.rank[0]} {calls.kernel}s: expected all queries, and {what}")

    def _operands(self, calls: Calls) -> tuple[BlockLists, BlockLists]:
        if calls.kernel != self.kernel:
            raise ScheduleError(f"unknown kernel {calls.kernel!r}, expected {self.kernel!r}")
        if len(calls.operands) != 2 or calls.params.shape[1] != 2:
            raise ScheduleError(f"{calls.kernel} takes queries, keys and a band of two parameters")
        for operand, tensor in zip(calls.operands, (QUERIES, KEYS), strict=True):
            empty = operand.sizes == 0
            if empty.any():
                raise ScheduleError(f"rank {calls.rank[int(empty.argmax())]} {calls.kernel}s without {TENSORS[tensor]}")
            if (at := first_true(self.tensor[operand.block] != tensor)) is not None:
                raise ScheduleError(
                    f"rank {calls.rank[operand.owner[at]]} {calls.kernel}s with block {operand.block[at]} "
                    f"({TENSORS[int(self.tensor[operand.block[at]])]}), expected {TENSORS[tensor]}"
                )
        return calls.operands[0], calls.operands[1]

    def _check_same_heads(
        self, calls: Calls, queries: BlockLists, call: IntArray, query: IntArray, key: IntArray
    ) -> None:
        """Check that the queries of a call have the same heads, and that its keys are of the KV heads that they use."""
        if self._are_heads_alike:
            return
        first_kv, last_kv = self._kv_heads
        if self.workload.decode:
            wrong = (first_kv[query] < first_kv[key]) | (last_kv[query] > last_kv[key])
        else:
            wrong = (first_kv[query] != first_kv[key]) | (last_kv[query] != last_kv[key])
            wrong |= self._head_columns[0][query] != self._head_columns[0][queries.first][call]
        if (at := first_true(wrong)) is not None:
            raise ScheduleError(
                f"rank {calls.rank[call[at]]} attends with queries {query[at]} to keys {key[at]}, "
                "which are of other heads"
            )

    @cached_property
    def _are_heads_alike(self) -> bool:
        """Whether all blocks are of the same heads, those of all ranks."""
        columns = (*self._kv_heads, self._head_columns[0])
        return all((column == column[:1]).all() for column in columns)

    @property
    def flops_per_pair_and_head(self) -> int:
        """FLOPs per pair of query and key: two products forward, five backward (scores are recomputed)."""
        layer = self.workload
        return (layer.backward_flops_per_pair if self.is_backward else layer.flops_per_pair) // layer.heads

    @cached_property
    def total_flops(self) -> int:
        """The FLOPs of all pairs of a query and a key that it attends to, over all heads."""
        first, end, first_key, end_key, low, high = self.workload.slices.T
        ahead = first - first_key
        pairs = int(pairs_in_band(low - ahead, high - ahead, end - first, end_key - first_key).sum())
        return pairs * self.workload.heads * self.flops_per_pair_and_head

    def least_output_bytes_per_position(self, tensor: int, heads: int) -> int:
        """The bytes of results or gradients of queries, or of gradients of keys, per position and block of some heads.

        In the dtype of the layer, or that on the wire if it is narrower; without the log-sum-exp of results.
        """
        on_wire = self.result_dtype if self.gradient_dtype is None else self.gradient_dtype
        layer = self.workload
        elements = layer.head_dim if self.is_backward else layer.value_size  # of gradients of queries, or of results
        if tensor == KEYS:
            elements = layer.head_dim + layer.value_size
        return layer.batch * heads * elements * min(ELEMENT_BYTES[self.dtype], ELEMENT_BYTES[on_wire])

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call, int array (calls,)."""
        if calls.kernel == SCALE:
            return np.zeros(len(calls), dtype=np.int64)
        heads = self._head_columns[1][calls.operands[0].first]
        pairs = pairs_in_band(calls.params[:, 0], calls.params[:, 1], *self._lengths(calls))
        if self.is_packed:
            packings = self._packings(calls)
            bands = np.array([each for packing in packings for each in packing], dtype=np.int64).reshape(-1, 4)
            before = np.cumsum([0, *pairs_in_band(*bands.T[[2, 3, 0, 1]])])
            pairs = np.diff(before[np.cumsum([0, *map(len, packings)])])
        return pairs * heads * self.flops_per_pair_and_head

    @cached_property
    def is_packed(self) -> bool:
        """Whether there are several documents, or ranges."""
        return self.workload.ranges is not None or len(self.workload.document_starts) > 1

    def _packings(self, calls: Calls) -> list[tuple[Segment, ...]]:
        """The sequences of each call on packed documents."""
        operands = zip(*(each.lists() for each in calls.operands), strict=True)
        return [self._packing(tuple(queries), tuple(keys)) for queries, keys in operands]

    def _packing(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[Segment, ...]:
        if (queries, keys) not in self._known_packings:
            self._known_packings[queries, keys] = tuple(each.shape for each in self.segments(queries, keys))
        return self._known_packings[queries, keys]

    @cached_property
    def _known_packings(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Segment, ...]]:
        """Those that have been asked for: FLOPs and shapes of calls are, one after the other."""
        return {}

    def segments(self, queries: Sequence[int], keys: Sequence[int]) -> list[PackedSegment]:
        """What a call with these blocks computes, document by document; the rows are those of its operands.

        A pair of a query and a key is in one segment at most; without ranges a query is, and in none if it sees none of
        the keys.
        """
        rows = [self._document_rows(blocks) for blocks in (queries, keys)]
        layer, stride = self.workload, self.layout.stride
        if layer.ranges is not None:
            return range_segments(rows[0][0], rows[1][0], layer.slices, stride)
        found: list[PackedSegment] = []
        for document, of_queries in rows[0].items():
            if document in rows[1]:
                found += document_segments(of_queries, rows[1][document], layer.visible, stride)
        return found

    def _document_rows(self, blocks: Sequence[int]) -> dict[int, list[Rows]]:
        """By document, the rows of a tensor of these blocks, in the order of positions."""
        found: dict[int, list[Rows]] = {}
        first = 0
        for block in blocks:
            for document, position, count in self._pieces[block]:
                found.setdefault(document, []).append(Rows(position, first, count))
                first += count
        for rows in found.values():
            rows.sort()
        return found

    @cached_property
    def _pieces(self) -> dict[int, list[tuple[int, int, int]]]:
        """By block of queries and keys: document, first position and count of each of its parts, in order."""
        blocks = np.flatnonzero(np.isin(self.tensor, (QUERIES, KEYS)))
        columns = (each.tolist() for each in self.pieces_of(self.start[blocks], self.count[blocks]))
        found: dict[int, list[tuple[int, int, int]]] = {block: [] for block in blocks.tolist()}
        for entry, document, position, count in zip(*columns, strict=True):
            found[int(blocks[entry])].append((document, position, count))
        return found

    def pieces_of(self, start: IntArray, count: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The parts of runs of places, one of each document: the number of the run, document, first position, count."""
        stride, starts = self.layout.stride, self.workload.document_starts
        # A part ends where a piece of the layout or a document does.
        cuts = self.layout.piece_columns[0] if self.layout.pieces else starts
        first, last = start, start + stride * (count - 1)
        entry, number = ranges(
            np.searchsorted(cuts, first, side="right") - 1, np.searchsorted(cuts, last, side="right")
        )
        begin = np.maximum(first[entry], first[entry] - (first[entry] - cuts[number]) // stride * stride)
        end = np.minimum(last[entry] + 1, np.append(cuts, self.layout.sequence)[number + 1])
        count = -((begin - end) // stride)
        entry, begin, count = (each[count > 0] for each in (entry, begin, count))
        position = self.layout.positions_at(begin)
        return entry, np.searchsorted(starts, position, side="right") - 1, position, count

    def shapes(self, calls: Calls) -> ShapeRows:
        """The shape of each call: the positions of its operands, their heads and its clipped band."""
        if calls.kernel == SCALE:
            return ShapeRows.of("dense", self.flops(calls))
        queries, keys = self._lengths(calls)
        low, high = clip_band(calls.params[:, 0], calls.params[:, 1], queries, keys)
        heads, kv_heads = (self._head_columns[1][each.first] for each in calls.operands)
        rows = ShapeRows.of(
            "softmax",
            self.flops(calls),
            batch=self.workload.batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.workload.head_dim,
            value_dim=self.workload.value_dim or 0,
            queries=queries,
            keys=keys,
            low=low,
            high=high,
            values_in_keys=int(self.workload.values_in_keys),
        )
        if self.workload.decode:  # stacked heads are heads of one query
            rows = rows._replace(heads=heads * queries, queries=np.ones_like(queries), high=np.zeros_like(high))
        return rows.with_packings(self._packings(calls)) if self.is_packed else rows

    def _lengths(self, calls: Calls) -> tuple[IntArray, IntArray]:
        """The positions of the queries and of the keys of each call."""
        queries, keys = (np.add.reduceat(self.count[each.block], each.offset[:-1]) for each in calls.operands)
        return queries, keys


def tiles(queries: BlockLists, keys: BlockLists) -> tuple[IntArray, IntArray, IntArray]:
    """All pairs of queries and keys of each call: the call, and the indices in ``queries.block`` and ``keys.block``."""
    widths = keys.sizes
    sizes = queries.sizes * widths
    call = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(call)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    width = widths[call]
    return call, queries.offset[call] + within // width, keys.offset[call] + within % width


def _first_positions(lists: BlockLists, count: IntArray) -> IntArray:
    """The index of the first position of each listed block among all positions of its list."""
    counts = count[lists.block]
    before = np.cumsum(counts) - counts
    found: IntArray = before - np.repeat(before[lists.offset[:-1]], lists.sizes)
    return found
