"""Softmax attention as a task: its blocks, the parts of results and gradients, and what kernel calls yield.

A block is a run of positions of one tensor and of some heads. Forward, ``attend`` reads queries and keys (with their
values) and adds to the results of these queries one part per key block: the tiles of its rows. Backward,
``differentiate`` adds one part per key block to the gradient of the queries, and one per query block to that of the
keys. A query block then holds all inputs of the gradients: the queries, the gradient of their output, its log-sum-exp,
and the row sums of output times gradient (the last two in float32).

A **tile** is a query block against a key block; its mask is a band (`tasp_lab.workload.kernel_calls`). Parts are
numbered among the blocks of the same document and the same KV heads; a tile with an empty mask is no part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks, Field, Join, Kind, Pool
from tasp_lab.schedule.calls import BlockLists, Calls, Effects, check_blocks
from tasp_lab.workload.kernel_calls import clip_band, pairs_in_band
from tasp_lab.workload.layer import ELEMENT_BYTES, Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

KEYS, QUERIES, RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS = range(5)
"""Tensors of blocks: keys with values, queries (backward: with all inputs of the gradients), what they yield."""

TENSORS = ("keys", "queries", "results", "key gradients", "query gradients")
"""Names of kinds."""

ATTEND, DIFFERENTIATE = "attend", "differentiate"
"""Names of kernels, which take queries and keys, and a band as parameters (low, high)."""


@dataclass(frozen=True, eq=False)
class AttentionTask:
    """The blocks of an attention layer, int arrays with an entry per block.

    Parameters
    ----------
    workload, layout : the layer, and the distribution of its positions over ranks.
    tensor : `KEYS`, `QUERIES`, and `RESULTS` or both gradients.
    owner : the rank whose shard the positions are of.
    start, count : the positions of a block are start, start + stride, ...; `stride` is that of the layout.
    first_head, heads : the heads of a block, KV heads of keys and their gradients; all heads if None.
    gradient_dtype : dtype of gradients on the wire, a key of `tasp_lab.workload.layer.ELEMENT_BYTES`; None forward.
    result_dtype : dtype of results on the wire, ``fp32`` unless given.

    Raises `ScheduleError` unless the blocks of queries, and those of keys, are exactly the shards of the layout, once
    for every head, and each has one block that its calls add to.
    """

    workload: Workload
    layout: SequenceLayout
    tensor: IntArray
    owner: IntArray
    start: IntArray
    count: IntArray
    first_head: IntArray | None = None
    heads: IntArray | None = None
    gradient_dtype: str | None = None
    result_dtype: str = "fp32"

    def __post_init__(self) -> None:
        layer, keys = self.workload, np.isin(self.tensor, (KEYS, KEY_GRADIENTS))
        if self.first_head is None or self.heads is None:
            object.__setattr__(self, "first_head", np.zeros_like(self.start))
            object.__setattr__(self, "heads", np.where(keys, layer.kv_head_count, layer.heads))
        for values in (self.tensor, self.owner, self.start, self.count, self.first_head, self.heads):
            assert values is not None, "heads are known by now"
            values.flags.writeable = False
        self._check_heads()
        for tensor in (KEYS, QUERIES):
            self._check_shards(tensor)
        outputs = ((QUERIES, QUERY_GRADIENTS), (KEYS, KEY_GRADIENTS)) if self.is_backward else ((QUERIES, RESULTS),)
        output_of = np.full(len(self.tensor), -1, dtype=np.int64)
        for source, target in outputs:
            blocks, results = self._in_order(source), self._in_order(target)
            if not np.array_equal(self._columns(blocks), self._columns(results)):
                raise ScheduleError(f"the blocks of {TENSORS[target]} are not those of {TENSORS[source]}")
            output_of[blocks] = results
        object.__setattr__(self, "output_of", output_of)

    output_of: IntArray = field(init=False)
    """Int array (blocks,): the block of the result or gradient of queries and of the gradient of keys; else -1."""

    def _check_heads(self) -> None:
        """Check that all blocks of a tensor have equally many heads, which use whole KV heads or part of one."""
        ratio = self.workload.heads // self.workload.kv_head_count
        first, heads = self._head_columns
        for tensor in np.unique(self.tensor).tolist():
            widths = np.unique(heads[self.tensor == tensor])
            if len(widths) > 1:
                raise ScheduleError(f"blocks of {TENSORS[tensor]} have {widths.tolist()} heads, expected one number")
        queries = self.tensor == QUERIES
        whole = (first % ratio == 0) & (heads % ratio == 0)
        within = first % ratio + heads <= ratio
        if (queries & ~whole & ~within).any():
            block = int((queries & ~whole & ~within).argmax())
            raise ScheduleError(
                f"block {block}: query heads {first[block]} to {first[block] + heads[block] - 1} use part of one KV "
                f"head and another one, of {ratio} query heads each"
            )

    @property
    def _head_columns(self) -> tuple[IntArray, IntArray]:
        assert self.first_head is not None, "known since construction"
        assert self.heads is not None, "known since construction"
        return self.first_head, self.heads

    def heads_of(self, block: int) -> tuple[int, int]:
        """The first head of a block, and the end of its heads."""
        first, heads = self._head_columns
        return int(first[block]), int(first[block] + heads[block])

    def _check_shards(self, tensor: int) -> None:
        """Check that for each group of heads the blocks of a tensor are the shards of the layout."""
        first, heads = self._head_columns
        blocks = self.blocks_of(tensor)
        groups = np.unique(first[blocks])
        total = self.workload.kv_head_count if tensor == KEYS else self.workload.heads
        spans = [(rank, span.start, span.count) for rank, each in enumerate(self.layout.spans) for span in each]
        expected = self._merged(*np.array(spans, dtype=np.int64).reshape(-1, 3).T)
        if len(blocks) and not np.array_equal(groups, np.arange(0, total, heads[blocks[0]])):
            raise ScheduleError(f"the blocks of {TENSORS[tensor]} have not each of {total} heads once")
        for group in groups.tolist() or [0]:
            own = blocks[first[blocks] == group]
            found = self._merged(self.owner[own], self.start[own], self.count[own])
            if (self.count[own] < 1).any() or not np.array_equal(found, expected):
                raise ScheduleError(
                    f"the blocks of {TENSORS[tensor]} are not the shards of layout {self.layout.name!r}"
                )

    def _merged(self, owner: IntArray, start: IntArray, count: IntArray) -> IntArray:
        """Owner, start and count of blocks, an array (3, runs); adjacent blocks are merged into one run."""
        order = np.argsort(owner, kind="stable")
        owner, start, count = owner[order], start[order], count[order]
        ends = start + self.layout.stride * count
        follows = (owner[1:] == owner[:-1]) & (start[1:] == ends[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(owner)])
        return np.stack([owner[first], start[first], np.add.reduceat(count, first) if len(first) else count])

    def _columns(self, blocks: IntArray) -> IntArray:
        first, heads = self._head_columns
        return np.stack([self.owner[blocks], self.start[blocks], self.count[blocks], first[blocks], heads[blocks]])

    def _in_order(self, tensor: int) -> IntArray:
        """The blocks of a tensor in the order of positions and heads."""
        blocks = self.blocks_of(tensor)
        ordered: IntArray = blocks[np.lexsort((self._head_columns[0][blocks], self.start[blocks]))]
        return ordered

    def blocks_of(self, tensor: int) -> IntArray:
        """The blocks of a tensor, ascending."""
        return np.flatnonzero(self.tensor == tensor)

    @property
    def is_backward(self) -> bool:
        return self.gradient_dtype is not None

    @property
    def passing(self) -> Literal["forward", "backward"]:
        """The pass of the kernel calls."""
        return "backward" if self.is_backward else "forward"

    @property
    def kernel(self) -> str:
        """The kernel of all calls."""
        return DIFFERENTIATE if self.is_backward else ATTEND

    @property
    def dtype(self) -> str:
        return self.workload.dtype

    @property
    def content(self) -> tuple[object, ...]:
        """All that distinguishes tasks, as plain values."""
        columns = (self.tensor, self.owner, self.start, self.count, *self._head_columns)
        blocks = tuple(tuple(values.tolist()) for values in columns)
        return self.workload, self.layout, blocks, self.gradient_dtype, self.result_dtype

    @cached_property
    def document(self) -> IntArray:
        """The document number of each block."""
        numbers: IntArray = np.searchsorted(self.workload.document_starts, self.start, side="right") - 1
        return numbers

    @cached_property
    def _kv_heads(self) -> tuple[IntArray, IntArray]:
        """The first KV head that each block has or uses, and the last."""
        first, heads = self._head_columns
        ratio = np.where(
            np.isin(self.tensor, (KEYS, KEY_GRADIENTS)), 1, self.workload.heads // self.workload.kv_head_count
        )
        return first // ratio, (first + heads - 1) // ratio

    @cached_property
    def group(self) -> IntArray:
        """The group of each block: equal for blocks of one document and the same KV heads."""
        columns = np.stack([self.document, *self._kv_heads])
        groups: IntArray = np.unique(columns, axis=1, return_inverse=True)[1].ravel()
        return groups

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

    def check(self, sizes_bytes: IntArray, parts: IntArray) -> None:
        """Raise `ScheduleError` unless blocks have these sizes and numbers of parts."""
        check_blocks(sizes_bytes, parts, self.block_bytes, self.parts)

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """Which parts of results or gradients exist: the tiles whose mask is not empty; all parts of data."""
        source = self._source_of[blocks]
        found = np.zeros((len(blocks), int(self.parts[blocks].max(initial=1))), dtype=bool)
        found[source < 0, 0] = True
        for own, other in ((QUERIES, KEYS), (KEYS, QUERIES)):
            rows = np.flatnonzero((source >= 0) & (self.tensor[source] == own))
            if not len(rows):
                continue
            others = self._members(other)[self.group[source[rows]]]
            mine = np.broadcast_to(source[rows][:, None], others.shape)
            queries, keys = (mine, others) if own == QUERIES else (others, mine)
            low, high = self.tile_bands(queries, keys)
            width = min(others.shape[1], found.shape[1])
            found[rows, :width] = ((low <= high) & (others >= 0))[:, :width]
        return found

    def blocks(self, pools: Mapping[int, Pool], bound: Collection[int]) -> Blocks:
        """The blocks of a schedule of this task; `pools` by tensor; resident copies of `bound` are the caller's."""
        present = np.unique(self.tensor).tolist()
        joins: Mapping[int, Join] = {RESULTS: "merge", KEY_GRADIENTS: "add", QUERY_GRADIENTS: "add"}
        kinds = [
            Kind(TENSORS[each], joins.get(each, ""), pools.get(each), self.fields_of(each), each in bound)
            for each in present
        ]
        return Blocks(kinds, np.searchsorted(present, self.tensor), self.block_bytes, self.parts)

    @cached_property
    def block_bytes(self) -> IntArray:
        """The size of each block, int array (blocks,)."""
        position_bytes = np.zeros(len(TENSORS), dtype=np.int64)
        for tensor in np.unique(self.tensor).tolist():
            position_bytes[tensor] = sum(ELEMENT_BYTES[f.dtype] * prod(f.shape) for f in self.fields_of(tensor))
        return self.count * position_bytes[self.tensor]

    def fields_of(self, tensor: int) -> tuple[Field, ...]:
        """The tensors of a block, elements per position: [batch, heads, head_dim], or [batch, heads] for row sums."""
        layer, heads = self.workload, int(self._head_columns[1][self.blocks_of(tensor)[0]])
        rows, scalars = (layer.batch, heads, layer.head_dim), (layer.batch, heads)
        gradient = layer.dtype if self.gradient_dtype is None else self.gradient_dtype
        if tensor in (KEYS, KEY_GRADIENTS):
            dtype = layer.dtype if tensor == KEYS else gradient
            return Field("k", dtype, rows), Field("v", dtype, rows)
        if tensor == QUERY_GRADIENTS:
            return (Field("q", gradient, rows),)
        if tensor == RESULTS:
            return Field("out", self.result_dtype, rows), Field("lse", "fp32", scalars)
        queries = (Field("q", layer.dtype, rows),)
        if not self.is_backward:
            return queries
        return (
            *queries,
            Field("dout", layer.dtype, rows),
            Field("lse", "fp32", scalars),
            Field("delta", "fp32", scalars),
        )

    def owned(self, *tensors: int) -> BoolArray:
        """Bool array (world_size, blocks): the owner of each block of these tensors."""
        held = np.zeros((self.layout.world_size, len(self.tensor)), dtype=np.bool_)
        blocks = np.flatnonzero(np.isin(self.tensor, tensors))
        held[self.owner[blocks], blocks] = True
        return held

    def by_document(self, blocks: IntArray) -> IntArray:
        """Blocks grouped by document, an array (documents, max blocks per document) in order, padded with -1."""
        document = self.document[blocks]
        order = np.argsort(document, kind="stable")
        sizes = np.bincount(document, minlength=len(self.workload.document_starts))
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        table = np.full((len(sizes), int(sizes.max(initial=0))), -1, dtype=np.int64)
        table[document[order], np.arange(len(blocks)) - first] = blocks[order]
        return table

    def tile_bands(self, queries: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The clipped bands of the tiles of query and key blocks, two arrays that broadcast together."""
        counts = self.count[queries], self.count[keys]
        low, high = self.run_bands(self.start[queries], counts[0], self.start[keys], counts[1])
        unrelated = self.document[queries] != self.document[keys]
        return clip_band(np.where(unrelated, counts[0], low), np.where(unrelated, -counts[1], high), *counts)

    def run_bands(self, query: IntArray, queries: IntArray, key: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The bands of runs of a document: `queries` positions from `query` on, `keys` from `key` on. Not clipped."""
        ahead = (query - key).astype(np.int64)
        low = np.broadcast_to(1 - keys, ahead.shape)
        high = np.broadcast_to(queries - 1, ahead.shape)
        if self.workload.mask == "causal":
            low = -(ahead // self.layout.stride)
        if self.workload.keys_seen is not None:
            high = (self.workload.keys_seen - 1 - ahead) // self.layout.stride
        return low, high

    def effects(self, calls: Calls) -> Effects:
        """One part per tile. Raises `ScheduleError` for other operands than queries and their keys, or another mask."""
        queries, keys = self._operands(calls)
        call, query, key = _tiles(queries, keys)
        query_block, key_block = queries.block[query], keys.block[key]
        self._check_same_heads(calls, queries, call, query_block, key_block)
        shift = _first_positions(keys, self.count)[key] - _first_positions(queries, self.count)[query]
        counts = self.count[query_block], self.count[key_block]
        low, high = clip_band(calls.params[call, 0] + shift, calls.params[call, 1] + shift, *counts)
        wanted_low, wanted_high = self.tile_bands(query_block, key_block)
        seen, wanted = low <= high, wanted_low <= wanted_high
        wrong = (seen != wanted) | (seen & ((low != wanted_low) | (high != wanted_high)))
        if wrong.any():
            at = int(wrong.argmax())
            raise ScheduleError(
                f"rank {calls.rank[call[at]]} attends with queries {query_block[at]} to keys {key_block[at]} "
                f"in the band {low[at]} to {high[at]}, the mask is {wanted_low[at]} to {wanted_high[at]}"
            )
        call, query_block, key_block = call[seen], query_block[seen], key_block[seen]
        block, part = self.output_of[query_block], self._number[key_block]
        if not self.is_backward:
            return Effects(call, block, part)
        return Effects(
            np.concatenate([call, call]),
            np.concatenate([block, self.output_of[key_block]]),
            np.concatenate([part, self._number[query_block]]),
        )

    def _operands(self, calls: Calls) -> tuple[BlockLists, BlockLists]:
        if calls.kernel != self.kernel:
            raise ScheduleError(f"unknown kernel {calls.kernel!r}, expected {self.kernel!r}")
        if len(calls.operands) != 2 or calls.params.shape[1] != 2:
            raise ScheduleError(f"{calls.kernel} takes queries, keys and a band of two parameters")
        for operand, tensor in zip(calls.operands, (QUERIES, KEYS), strict=True):
            empty = operand.sizes == 0
            if empty.any():
                raise ScheduleError(f"rank {calls.rank[int(empty.argmax())]} {calls.kernel}s without {TENSORS[tensor]}")
            wrong = self.tensor[operand.block] != tensor
            if wrong.any():
                at = int(wrong.argmax())
                raise ScheduleError(
                    f"rank {calls.rank[operand.owner[at]]} {calls.kernel}s with block {operand.block[at]} "
                    f"({TENSORS[int(self.tensor[operand.block[at]])]}), expected {TENSORS[tensor]}"
                )
        return calls.operands[0], calls.operands[1]

    def _check_same_heads(
        self, calls: Calls, queries: BlockLists, call: IntArray, query: IntArray, key: IntArray
    ) -> None:
        """Check that the queries of a call have the same heads, and that its keys are of the KV heads that they use."""
        first_kv, last_kv = self._kv_heads
        wrong = (first_kv[query] != first_kv[key]) | (last_kv[query] != last_kv[key])
        wrong |= self._head_columns[0][query] != self._head_columns[0][queries.first][call]
        if wrong.any():
            at = int(wrong.argmax())
            raise ScheduleError(
                f"rank {calls.rank[call[at]]} attends with queries {query[at]} to keys {key[at]}, "
                "which are of other heads"
            )

    @property
    def flops_per_pair_and_head(self) -> int:
        """FLOPs per pair of query and key: two products forward, five backward (scores are recomputed)."""
        return 2 * self.workload.batch * self.workload.head_dim * (5 if self.is_backward else 2)

    @cached_property
    def total_flops(self) -> int:
        """The FLOPs of all pairs of a query and a key that it attends to, over all heads."""
        layer, pairs = self.workload, 0
        for length in layer.documents or (layer.sequence,):
            low = 0 if layer.mask == "causal" else 1 - length
            high = length - 1 if layer.keys_seen is None else min(length, layer.keys_seen) - 1
            pairs += int(pairs_in_band(low, high, length, length)) if length else 0
        return pairs * layer.heads * self.flops_per_pair_and_head

    def least_output_bytes_per_position(self, tensor: int) -> int:
        """The bytes of results or gradients of queries, or of gradients of keys, per position and block.

        In the dtype of the layer, or that on the wire if it is narrower; without the log-sum-exp of results.
        """
        on_wire = self.result_dtype if self.gradient_dtype is None else self.gradient_dtype
        rows = 1 if tensor == QUERIES else 2
        heads = int(self._head_columns[1][self.blocks_of(tensor)[0]])
        element_bytes = min(ELEMENT_BYTES[self.dtype], ELEMENT_BYTES[on_wire])
        return rows * self.workload.batch * heads * self.workload.head_dim * element_bytes

    def flops(self, calls: Calls) -> IntArray:
        """The FLOPs of each call, int array (calls,)."""
        sizes = [np.add.reduceat(self.count[each.block], each.offset[:-1]) for each in calls.operands]
        heads = self._head_columns[1][calls.operands[0].first]
        return pairs_in_band(calls.params[:, 0], calls.params[:, 1], *sizes) * heads * self.flops_per_pair_and_head


def _tiles(queries: BlockLists, keys: BlockLists) -> tuple[IntArray, IntArray, IntArray]:
    """All pairs of queries and keys of one call: the call, and the indices in ``queries.block`` and ``keys.block``."""
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
