"""The blocks of an attention layer: runs of places of one tensor and of some heads.

Places are positions, except in packed documents (`tasp_lab.workload.sequence_layout`): there a block has a part of
every document, so blocks do not depend on documents.

Backward, a query block holds all inputs of the gradients: the queries, the gradient of their output, its log-sum-exp,
and the row sums of output times gradient (the last two in float32).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, distinct, first_true, freeze, numbered
from tasp_lab.core.choices import WHAT_IF_DTYPE
from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Field
from tasp_lab.schedule.proof import no_copies
from tasp_lab.schedules.attention.heads import head_cuts
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import Mask
from tasp_lab.workload.sequence_layout import SequenceLayout, Span

KEYS, QUERIES, RESULTS, KEY_GRADIENTS, QUERY_GRADIENTS, SCALES = range(6)
"""Tensors of blocks: keys with values, queries (backward: with all inputs of the gradients), what they yield. Scales
are the log-sum-exps of all heads over the keys of a rank: a decode layer that has them adds results that are scaled."""

TENSORS = ("keys", "queries", "results", "key gradients", "query gradients", "log-sum-exps")
"""Names of kinds."""


def query_spans(workload: Workload, layout: SequenceLayout) -> tuple[tuple[Span, ...], ...]:
    """The spans of the queries of each rank: all but the cached positions, of a decode layer the last one."""
    if workload.decode:  # every rank has some heads of it
        return ((Span(workload.sequence - 1, layout.stride, 1),),) * layout.world_size
    return layout.spans_from(workload.cached_keys) if workload.cached_keys else layout.spans


@dataclass(frozen=True, eq=False)
class LayerBlocks:
    """The blocks of an attention layer, int arrays with an entry per block.

    Parameters
    ----------
    workload, layout : the layer, and the distribution of its positions over ranks.
    tensor : `KEYS`, `QUERIES`, and `RESULTS` or both gradients.
    owner : the rank whose shard the positions are of.
    start, count : the places of a block are start, start + stride, ...; `stride` is that of the layout.
    first_head, heads : the heads of a block, KV heads of keys and their gradients; all heads if None.
    gradient_dtype : dtype of gradients on the wire, a key of `tasp_lab.workload.layer.ELEMENT_BYTES`; None forward.
    result_dtype : dtype of results on the wire, ``fp32`` unless given.
    home_dtype : dtype of resident results and gradients; as on the wire if None.
    keys_by_heads : whether keys are owned by heads, too, as queries of decode layers are: all positions by one rank.

    Raises `ScheduleError` unless the blocks of keys are exactly the shards of the layout, once for every head, those of
    queries the same without the cached positions, and each has one block that its calls add to; and for a backward pass
    of a layer with cached positions.
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
    home_dtype: str | None = None
    keys_by_heads: bool = False

    def __post_init__(self) -> None:
        given = [] if self.first_head is None or self.heads is None else ["first_head", "heads"]
        self._freeze("tensor", "owner", "start", "count", *given)  # before numbers of theirs are multiplied
        layer, keys = self.workload, np.isin(self.tensor, (KEYS, KEY_GRADIENTS))
        if layer.cached_keys and self.is_backward:
            raise ScheduleError(f"{layer.cached_keys} cached keys, which have no gradients: expected the pass forward")
        if layer.dtype == WHAT_IF_DTYPE and self.is_backward:
            raise ScheduleError(f"dtype {layer.dtype!r} of a backward pass, expected the pass forward")
        if self.first_head is None or self.heads is None:
            object.__setattr__(self, "first_head", np.zeros_like(self.start))
            object.__setattr__(self, "heads", np.where(keys, layer.kv_head_count, layer.heads))
            self._freeze("first_head", "heads")
        self._check_heads()
        for tensor in (KEYS, QUERIES):
            self._check_shards(tensor)
        outputs = ((QUERIES, QUERY_GRADIENTS), (KEYS, KEY_GRADIENTS)) if self.is_backward else ((QUERIES, RESULTS),)
        output_of = np.full(len(self.tensor), -1, dtype=np.int64)
        for source, target in outputs:
            blocks, results = self._in_order(source), self._in_order(target)
            if not np.array_equal(self.columns_of(blocks), self.columns_of(results)):
                raise ScheduleError(f"the blocks of {TENSORS[target]} are not those of {TENSORS[source]}")
            output_of[blocks] = results
        object.__setattr__(self, "output_of", output_of)
        self._freeze("output_of")

    def _freeze(self, *names: str) -> None:
        freeze(self, names, "blocks of a layer: ", np.int64, 1, "an int array of shape (blocks,)")

    @cached_property
    def visible(self) -> Mask:
        """The mask between places: for pairs of one document that of the layer, or a wider one.

        If only the order of positions decides, it is the same. Else it is as wide as positions within its limits are
        apart: documents lie between them, in other layouts less. What calls compute is `workload.visible` all the same.
        """
        mask, layout = self.workload.visible, self.layout
        if mask.is_of_order or not layout.pieces:
            return mask
        low, high = (
            None if limit is None else _widest(self.workload, layout, limit) for limit in (mask.low, mask.high)
        )
        return replace(mask, low=low, high=high)

    @property
    def result_layout(self) -> SequenceLayout:
        """Where results and gradients lie: at the owners of their positions."""
        return self.layout

    output_of: IntArray = field(init=False)
    """Int array (blocks,): the block of the result or gradient of queries and of the gradient of keys; else -1."""

    def _check_heads(self) -> None:
        """Check that the heads of each block of queries use whole KV heads or part of one."""
        ratio = self.workload.heads // self.workload.kv_head_count
        first, heads = self._head_columns
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
        """Check that for each group of heads the blocks of a tensor are its shards."""
        first, heads = self._head_columns
        blocks = self.blocks_of(tensor)
        one = blocks[numbered(first[blocks], heads[blocks])[0]]  # of each group of heads
        one = one[np.lexsort((heads[one], first[one]))]
        groups, ends = first[one], first[one] + heads[one]
        total = self.workload.kv_head_count if tensor == KEYS else self.workload.heads
        spans = [(rank, span.start, span.count) for rank, each in enumerate(self.spans_of(tensor)) for span in each]
        shards = self._merged(*np.array(spans, dtype=np.int64).reshape(-1, 3).T)
        if len(blocks) and not np.array_equal(np.append(groups, total), np.append(0, ends)):
            raise ScheduleError(f"the blocks of {TENSORS[tensor]} have not each of {total} heads once")
        for group in groups.tolist() or [0]:
            own = blocks[first[blocks] == group]
            expected = (
                shards[:, shards[0] == group * self.layout.world_size // total] if self.is_by_heads(tensor) else shards
            )
            found = self._merged(self.owner[own], self.start[own], self.count[own])
            if (self.count[own] < 1).any() or not np.array_equal(found, expected):
                raise ScheduleError(
                    f"the blocks of {TENSORS[tensor]} are not the shards of layout {self.layout.name!r}"
                )

    def is_by_heads(self, tensor: int) -> bool:
        """Whether ranks own heads of a tensor, not positions."""
        return self.keys_by_heads if tensor in (KEYS, KEY_GRADIENTS) else self.workload.decode

    def heads_at(self, tensor: int, rank: int) -> slice:
        """The heads of a tensor that a rank owns."""
        if not self.is_by_heads(tensor):
            return slice(0, self.workload.kv_head_count if tensor in (KEYS, KEY_GRADIENTS) else self.workload.heads)
        own = np.flatnonzero((self.tensor == tensor) & (self.owner == rank))
        first, heads = (each[own] for each in self._head_columns)
        return slice(int(first.min()), int((first + heads).max())) if len(own) else slice(0, 0)

    def spans_of(self, tensor: int) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank that a tensor has: all of keys, those of queries from the first query on."""
        if tensor in (KEYS, KEY_GRADIENTS) and self.is_by_heads(tensor):
            return ((Span(0, 1, self.workload.sequence),),) * self.layout.world_size
        return self.layout.spans if tensor in (KEYS, KEY_GRADIENTS) else query_spans(self.workload, self.layout)

    def lengths_of(self, tensor: int) -> list[int]:
        """The number of positions of each rank that a tensor has."""
        return [sum(span.count for span in each) for each in self.spans_of(tensor)]

    def places_of(self, tensor: int, rank: int) -> IntArray:
        """The places of a rank that a tensor has, ascending."""
        spans = self.spans_of(tensor)[rank]
        return np.concatenate([np.zeros(0, dtype=np.int64), *(span.positions for span in spans)])

    def positions_of(self, tensor: int, rank: int) -> IntArray:
        """The positions of a rank that a tensor has, in the order of its shard."""
        return np.sort(self.layout.positions_at(self.places_of(tensor, rank)))

    def _merged(self, owner: IntArray, start: IntArray, count: IntArray) -> IntArray:
        """Owner, start and count of blocks, an array (3, runs); adjacent blocks are merged into one run."""
        order = np.argsort(owner, kind="stable")
        owner, start, count = owner[order], start[order], count[order]
        ends = start + self.layout.stride * count
        follows = (owner[1:] == owner[:-1]) & (start[1:] == ends[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(owner)])
        return np.stack([owner[first], start[first], np.add.reduceat(count, first) if len(first) else count])

    def columns_of(self, blocks: IntArray) -> IntArray:
        """Owner, start, count, first head and heads of blocks, an int array (5, blocks)."""
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
    def is_scaled(self) -> bool:
        """Whether results are scaled by the log-sum-exps of all ranks, and then added."""
        return bool((self.tensor == SCALES).any())

    @property
    def is_backward(self) -> bool:
        return self.gradient_dtype is not None

    def documents_at(self, start: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
        """The first and the last document of runs of places; all between them, if they have positions there."""
        starts, layout = self.workload.document_starts, self.layout
        last = start + layout.stride * (count - 1)
        if not layout.pieces:
            return np.searchsorted(starts, start, side="right") - 1, np.searchsorted(starts, last, side="right") - 1
        place, position, _ = layout.piece_columns
        document = np.append(np.searchsorted(starts, position, side="right") - 1, 0)
        first_piece, end_piece = (np.searchsorted(place, each, side="right") for each in (start, last))
        pieces = np.stack([first_piece - 1, end_piece], axis=1).ravel()
        return np.minimum.reduceat(document, pieces)[::2], np.maximum.reduceat(document, pieces)[::2]

    @cached_property
    def documents(self) -> tuple[IntArray, IntArray]:
        """The first and the last document of each block."""
        return self.documents_at(self.start, self.count)

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
        """The group of each block: equal for keys of the same KV heads and what uses some of these."""
        first = self._kv_heads[0]
        groups: IntArray = np.searchsorted(distinct(first[self.blocks_of(KEYS)]), first, side="right") - 1
        return groups

    @cached_property
    def block_bytes(self) -> IntArray:
        """The size of each block, int array (blocks,)."""
        kinds, kind = self.kinds
        sizes = [sum(field.size_bytes for field in self.fields_of(*each)) for each in kinds]
        position_bytes: IntArray = np.array(sizes, dtype=np.int64)[kind]
        return self.count * position_bytes

    @cached_property
    def kinds(self) -> tuple[list[tuple[int, int]], IntArray]:
        """The tensors and numbers of heads that blocks have, ascending, and which of them each block has."""
        heads = self._head_columns[1]
        width = int(heads.max(initial=0)) + 1
        kinds, kind = np.unique(self.tensor * width + heads, return_inverse=True)
        return [divmod(each, width) for each in kinds.tolist()], kind

    def fields_of(self, tensor: int, heads: int) -> tuple[Field, ...]:
        """The tensors of a block, elements per position: [batch, heads, head_dim] of queries and keys, [batch, heads,
        value_dim] of values and results, or [batch, heads] for row sums.
        """
        layer = self.workload
        rows, values = ((layer.batch, heads, size) for size in (layer.head_dim, layer.value_size))
        scalars = (layer.batch, heads)
        gradient = layer.dtype if self.gradient_dtype is None else self.gradient_dtype

        def sum_of(name: str, dtype: str, shape: tuple[int, ...]) -> Field:
            return Field(name, dtype, shape, home_dtype=None if self.home_dtype == dtype else self.home_dtype)

        if tensor == KEYS:
            return (Field("k", layer.dtype, rows), Field("v", layer.dtype, values))[: 2 - layer.values_in_keys]
        if tensor == KEY_GRADIENTS:
            return sum_of("k", gradient, rows), sum_of("v", gradient, values)
        if tensor == QUERY_GRADIENTS:
            return (sum_of("q", gradient, rows),)
        out, lse = sum_of("out", self.result_dtype, values), Field("lse", "fp32", scalars)
        if tensor == SCALES:
            return (lse,)
        if tensor == RESULTS:
            return (out,) if self.is_scaled else (out, lse)
        queries = (Field("q", layer.dtype, rows),)
        if not self.is_backward:
            return queries
        return (
            *queries,
            Field("dout", layer.dtype, values),
            Field("lse", "fp32", scalars),
            Field("delta", "fp32", scalars),
        )

    def in_head_groups(self, groups: int) -> tuple[Self, IntArray]:
        """The layer with the heads of each block cut into groups, group by group in the order of blocks.

        Groups have equally many heads, or as equally many as groups can that use whole KV heads each or a part of one;
        keys that several groups use are one block. Also returns the number of each group of the heads of each block, an
        int array (blocks, groups). Raises `ScheduleError` for blocks of queries with fewer heads than groups.
        """
        (first, heads), of_keys = self._head_columns, np.isin(self.tensor, (KEYS, KEY_GRADIENTS))
        kv_heads = self._kv_heads[1] - self._kv_heads[0] + 1
        if (at := first_true(~of_keys & (heads < groups))) is not None:
            raise ScheduleError(
                f"block {at} ({TENSORS[int(self.tensor[at])]}) has {heads[at]} heads, expected {groups} or more"
            )
        alike, shape = np.unique(np.stack([of_keys, heads, kv_heads]), axis=1, return_inverse=True)
        cuts = [head_cuts(own * groups, own, groups) // groups if is_keys else head_cuts(width, own, groups)
                for is_keys, width, own in alike.T.tolist()]  # fmt: skip
        begin = np.array(cuts)[shape.ravel()]  # of each group of each block; of keys also several times
        is_new = np.diff(begin[:, :-1], prepend=-1, axis=1) > 0
        block, group = np.nonzero(is_new)
        order = np.lexsort((block, (is_new.cumsum(axis=1) - 1)[block, group]))
        block, group = block[order], group[order]
        place = np.zeros_like(is_new, dtype=np.int64)
        place[block, group] = np.arange(len(block))
        since = np.maximum.accumulate(np.where(is_new, np.arange(groups), 0), axis=1)
        cut = replace(
            self,
            tensor=self.tensor[block],
            owner=self.owner[block],
            start=self.start[block],
            count=self.count[block],
            first_head=first[block] + begin[block, group],
            heads=np.maximum(np.diff(begin, axis=1)[block, group], 1),
        )
        return cut, np.take_along_axis(place, since, axis=1)

    def owned(self, *tensors: int) -> BoolArray:
        """Bool array (world_size, blocks): the owner of each block of these tensors."""
        held = no_copies(self.layout.world_size, len(self.tensor))
        blocks = np.flatnonzero(np.isin(self.tensor, tensors))
        held[self.owner[blocks], blocks] = True
        return held


def _widest(workload: Workload, layout: SequenceLayout, limit: int) -> int:
    """How far apart the places of a query and of a key can be whose positions differ by `limit` in one document.

    Both move by one place from one position to the next, except at the ends of pieces, so these are looked at.
    """
    place, position, length = layout.piece_columns
    order = np.argsort(position)
    place, position = place[order], position[order]
    ends = np.concatenate([position, position + length[order] - 1])
    query = np.concatenate([ends, ends + limit])
    query = query[(query >= 0) & (query < workload.sequence)]
    starts = np.append(workload.document_starts, workload.sequence)
    document = np.searchsorted(starts, query, side="right") - 1
    key = np.clip(query - limit, starts[document], starts[document + 1] - 1)

    def places(at: IntArray) -> IntArray:
        piece = np.searchsorted(position, at, side="right") - 1
        found: IntArray = at + (place - position)[piece]
        return found

    apart = places(query) - places(key)
    return int(apart.max() if limit >= 0 else apart.min())
