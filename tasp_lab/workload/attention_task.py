"""The work of an attention layer: blocks of positions, and the masks of their tiles.

A block is a run of positions of keys (with their values) or of queries. A **tile** is a query block against a key
block; its mask is a band (see `tasp_lab.workload.kernel_calls`).

One side *circulates* among the ranks, the other is *stationary* at its owner; keys circulate in every forward pass. In
a **backward pass** each tile contributes to both gradients. The gradient of the stationary side is accumulated at its
owner. The gradient of the circulating side follows it as a separate block, the *gradient block*, to which every rank
adds its contribution. If queries circulate in the backward pass, a query block holds all inputs of the gradients: the
queries, the gradient of their output, its log-sum-exp, and the row sums of output times gradient (the last two in
float32).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.workload.kernel_calls import Call, clip_band, pairs_in_band
from tasp_lab.workload.layer import ELEMENT_BYTES, Workload
from tasp_lab.workload.sequence_layout import SequenceLayout

Side = Literal["keys", "queries"]


@dataclass(frozen=True, eq=False)
class AttentionTask:
    """The blocks of a layer: int arrays with an entry per block. Blocks from `first_query` on are query blocks.

    The key blocks of a rank, ordered by number, must form its shard, and so must its query blocks; else
    `ScheduleError`. In a backward pass one gradient block per circulating block follows after all others.

    Parameters
    ----------
    workload, layout : the layer, and the distribution of its positions over ranks.
    first_query : the number of key blocks.
    owner : the rank that holds the block at the start, and its result or gradient at the end.
    start, count : the positions of a block are start, start + stride, ...; `stride` is that of the layout.
    circulating_side : ``keys`` or ``queries``.
    gradient_dtype : dtype of gradient blocks, a key of `tasp_lab.workload.layer.ELEMENT_BYTES`; None in a forward pass.
    """

    workload: Workload
    layout: SequenceLayout
    first_query: int
    owner: IntArray
    start: IntArray
    count: IntArray
    circulating_side: Side = "keys"
    gradient_dtype: str | None = None

    def __post_init__(self) -> None:
        for values in (self.owner, self.start, self.count):
            values.flags.writeable = False
        shards = [(rank, span.start, span.count) for rank, each in enumerate(self.layout.spans) for span in each]
        expected = self._merged(*np.array(shards, dtype=np.int64).reshape(-1, 3).T)
        for kind, blocks in (("keys", slice(self.first_query)), ("queries", slice(self.first_query, None))):
            found = self._merged(self.owner[blocks], self.start[blocks], self.count[blocks])
            if (self.count[blocks] < 1).any() or not np.array_equal(found, expected):
                raise ScheduleError(f"the blocks of {kind} are not the shards of layout {self.layout.name!r}")

    def _merged(self, owner: IntArray, start: IntArray, count: IntArray) -> IntArray:
        """Owner, start and count of blocks, an array (3, runs); adjacent blocks are merged into one run."""
        order = np.argsort(owner, kind="stable")
        owner, start, count = owner[order], start[order], count[order]
        ends = start + self.layout.stride * count
        follows = (owner[1:] == owner[:-1]) & (start[1:] == ends[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~follows])[: len(owner)])
        return np.stack([owner[first], start[first], np.add.reduceat(count, first) if len(first) else count])

    @cached_property
    def document(self) -> IntArray:
        """The document number of each key and query block."""
        numbers: IntArray = np.searchsorted(self.workload.document_starts, self.start, side="right") - 1
        return numbers

    @property
    def content(self) -> tuple[object, ...]:
        """All that tells this task from others, as plain values."""
        blocks = tuple(tuple(values.tolist()) for values in (self.owner, self.start, self.count))
        return self.workload, self.layout, self.first_query, blocks, self.circulating_side, self.gradient_dtype

    @property
    def is_backward(self) -> bool:
        return self.gradient_dtype is not None

    @property
    def passing(self) -> Literal["forward", "backward"]:
        """The pass of the kernel calls."""
        return "backward" if self.is_backward else "forward"

    @property
    def circulating(self) -> IntArray:
        """The blocks of the circulating side."""
        return self.blocks_of(self.circulating_side)

    @property
    def stationary(self) -> IntArray:
        """The blocks of the stationary side."""
        return self.blocks_of("queries" if self.circulating_side == "keys" else "keys")

    def blocks_of(self, side: Side) -> IntArray:
        return np.arange(self.first_query) if side == "keys" else np.arange(self.first_query, self.first_gradient)

    @property
    def first_gradient(self) -> int:
        """The number of key and query blocks."""
        return len(self.count)

    def gradient_blocks(self, circulating: IntArray) -> IntArray:
        """The gradient blocks of circulating blocks."""
        first = 0 if self.circulating_side == "keys" else self.first_query
        return circulating - first + self.first_gradient

    def gradients_away(self, call: Call) -> list[int]:
        """The gradient blocks of other ranks to which a call adds; none in a forward pass."""
        if not self.is_backward:
            return []
        circulating = self.sides(call)[0]
        others: list[int] = self.gradient_blocks(circulating[self.owner[circulating] != call.rank]).tolist()
        return others

    @property
    def block_bytes(self) -> IntArray:
        """The size of each block."""
        counts = self.count[: self.first_query], self.count[self.first_query :]
        sizes = [counts[0] * self.workload.kv_bytes_per_position, counts[1] * self.query_bytes_per_position]
        if self.is_backward:
            sizes.append(self.count[self.circulating] * self.gradient_bytes_per_position)
        return np.concatenate(sizes)

    @property
    def query_bytes_per_position(self) -> int:
        """Bytes of a query block per position; in a backward pass, of all inputs of the gradients."""
        layer = self.workload
        scalars = 2 * layer.batch * layer.heads * ELEMENT_BYTES["fp32"]
        return 2 * layer.query_bytes_per_position + scalars if self.is_backward else layer.query_bytes_per_position

    @property
    def gradient_bytes_per_position(self) -> int:
        """Bytes of a gradient block per position."""
        assert self.gradient_dtype is not None, "a forward pass has no gradients"
        layer = self.workload
        values = layer.kv_bytes_per_position if self.circulating_side == "keys" else layer.query_bytes_per_position
        return values // ELEMENT_BYTES[layer.dtype] * ELEMENT_BYTES[self.gradient_dtype]

    @property
    def flops_per_pair(self) -> int:
        """FLOPs per (query, key) pair: two products forward, five backward (scores are recomputed)."""
        forward = self.workload.flops_per_pair
        return forward // 2 * 5 if self.is_backward else forward

    @property
    def owned(self) -> BoolArray:
        """Bool array (world_size, blocks): the owner of each block. Gradient blocks initially have no owner."""
        held = np.zeros((self.layout.world_size, len(self.block_bytes)), dtype=np.bool_)
        held[self.owner, np.arange(self.first_gradient)] = True
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

    def bands(self, queries: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The clipped bands of tiles, low and high, as arrays (queries, keys)."""
        return self.tile_bands(queries[:, None], keys[None, :])

    def tile_bands(self, queries: IntArray, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The clipped bands of the tiles of query and key blocks, two arrays that broadcast together."""
        ahead = (self.start[queries] - self.start[keys]).astype(np.int64)
        counts = self.count[queries], self.count[keys]
        low = np.broadcast_to(1 - counts[1], ahead.shape)
        high = np.broadcast_to(counts[0] - 1, ahead.shape)
        if self.workload.mask == "causal":
            low = -(ahead // self.layout.stride)
        if self.workload.keys_seen is not None:
            high = (self.workload.keys_seen - 1 - ahead) // self.layout.stride
        unrelated = self.document[queries] != self.document[keys]
        return clip_band(np.where(unrelated, counts[0], low), np.where(unrelated, -counts[1], high), *counts)

    def call_bands(self, call: Call) -> tuple[IntArray, IntArray]:
        """The clipped bands with which a call computes its tiles, as arrays (queries, keys)."""
        first_query = np.cumsum(self.count[call.queries]) - self.count[call.queries]
        first_key = np.cumsum(self.count[call.keys]) - self.count[call.keys]
        shift = first_key[None, :] - first_query[:, None]
        counts = self.count[call.queries][:, None], self.count[call.keys][None, :]
        return clip_band(call.low + shift, call.high + shift, *counts)

    def sides(self, call: Call) -> tuple[IntArray, IntArray]:
        """The circulating and the stationary blocks of a call."""
        return (call.keys, call.queries) if self.circulating_side == "keys" else (call.queries, call.keys)

    def flops(self, call: Call) -> int:
        """What a kernel call computes, in FLOPs."""
        sizes = int(self.count[call.queries].sum()), int(self.count[call.keys].sum())
        return int(pairs_in_band(call.low, call.high, *sizes)) * self.flops_per_pair
