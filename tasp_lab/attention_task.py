"""What an attention layer must compute: blocks of positions, and which of their tiles see what.

Blocks are stretches of positions, of keys (with their values) or of queries. A **tile** is a query block against a key
block; under the mask its queries see a band of its keys (see `tasp_lab.calls`).

One side *travels* from rank to rank and meets the other, which stays with its owner: keys travel in every forward pass.
In a **backward pass** a tile yields a part of both gradients. That of the side that stays is at home at once. That of
the side that travels follows it as a block of its own, its *gradient block*, to which ranks add their parts. Where
queries travel backward, a block of them is all that their gradients need: the queries, the gradient of their result,
its log-sum-exp, and the sum of the products of result and gradient (both of these in float32).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.calls import Call, clip_band, pairs_in_band
from tasp_lab.errors import ScheduleError
from tasp_lab.placement import Placement
from tasp_lab.workload import ELEMENT_BYTES, Workload

Side = Literal["keys", "queries"]


@dataclass(frozen=True, eq=False)
class AttentionTask:
    """The blocks of a layer: int arrays with an entry per block. Blocks from `first_query` on are query blocks.

    The key blocks of a rank, in the order of their numbers, are its shard, and so are its query blocks; else
    `ScheduleError`. In a backward pass one gradient block per block of the travelling side comes after all of them.

    Parameters
    ----------
    workload, placement : the layer, and where its positions are.
    first_query : the number of key blocks.
    owner : the rank that holds the block at the start, and its result or gradient at the end.
    start, count : the positions of a block are start, start + stride, ...; `stride` is that of the placement.
    travellers : the side that travels.
    gradient_dtype : of gradient blocks, a name of `tasp_lab.workload.ELEMENT_BYTES`; None in a forward pass.
    """

    workload: Workload
    placement: Placement
    first_query: int
    owner: IntArray
    start: IntArray
    count: IntArray
    travellers: Side = "keys"
    gradient_dtype: str | None = None

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

    @cached_property
    def document(self) -> IntArray:
        """The number of the document that each block of positions belongs to."""
        numbers: IntArray = np.searchsorted(self.workload.document_starts, self.start, side="right") - 1
        return numbers

    @property
    def is_backward(self) -> bool:
        return self.gradient_dtype is not None

    @property
    def travelling(self) -> IntArray:
        """The blocks of the side that travels."""
        return self.blocks_of(self.travellers)

    @property
    def staying(self) -> IntArray:
        """The blocks of the side that stays."""
        return self.blocks_of("queries" if self.travellers == "keys" else "keys")

    def blocks_of(self, side: Side) -> IntArray:
        return np.arange(self.first_query) if side == "keys" else np.arange(self.first_query, self.first_gradient)

    @property
    def first_gradient(self) -> int:
        """The number of keys' and queries' blocks together."""
        return len(self.count)

    def gradient_blocks(self, travelling: IntArray) -> IntArray:
        """The gradient blocks of blocks of the side that travels."""
        first = 0 if self.travellers == "keys" else self.first_query
        return travelling - first + self.first_gradient

    def gradients_away(self, call: Call) -> list[int]:
        """The gradient blocks of others to which a call adds; none in a forward pass."""
        if not self.is_backward:
            return []
        travelling = self.sides(call)[0]
        others: list[int] = self.gradient_blocks(travelling[self.owner[travelling] != call.rank]).tolist()
        return others

    @property
    def block_bytes(self) -> IntArray:
        """The size of each block."""
        counts = self.count[: self.first_query], self.count[self.first_query :]
        sizes = [counts[0] * self.workload.kv_bytes_per_position, counts[1] * self.query_bytes_per_position]
        if self.is_backward:
            sizes.append(self.count[self.travelling] * self.gradient_bytes_per_position)
        return np.concatenate(sizes)

    @property
    def query_bytes_per_position(self) -> int:
        """Bytes of a block of queries at one position; going backward, of all that their gradients need."""
        layer = self.workload
        scalars = 2 * layer.batch * layer.heads * ELEMENT_BYTES["fp32"]
        return 2 * layer.query_bytes_per_position + scalars if self.is_backward else layer.query_bytes_per_position

    @property
    def gradient_bytes_per_position(self) -> int:
        """Bytes of a gradient block at one position."""
        assert self.gradient_dtype is not None, "a forward pass has no gradients"
        layer = self.workload
        values = layer.kv_bytes_per_position if self.travellers == "keys" else layer.query_bytes_per_position
        return values // ELEMENT_BYTES[layer.dtype] * ELEMENT_BYTES[self.gradient_dtype]

    @property
    def flops_per_pair(self) -> int:
        """FLOPs per (query, key) pair: two products forward, and backward five, for scores are computed anew."""
        forward = self.workload.flops_per_pair
        return forward // 2 * 5 if self.is_backward else forward

    @property
    def owned(self) -> BoolArray:
        """Whose each block is, as an array (world_size, blocks). Gradient blocks are nobody's at first."""
        held = np.zeros((self.placement.world_size, len(self.block_bytes)), dtype=np.bool_)
        held[self.owner, np.arange(self.first_gradient)] = True
        return held

    def by_document(self, blocks: IntArray) -> IntArray:
        """Some blocks of positions as an array (documents, most of one document), in their order; -1 where none is."""
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
        """The clipped bands of one tile per query block and key block of two arrays that broadcast together."""
        ahead = (self.start[queries] - self.start[keys]).astype(np.int64)
        counts = self.count[queries], self.count[keys]
        low = np.broadcast_to(1 - counts[1], ahead.shape)
        high = np.broadcast_to(counts[0] - 1, ahead.shape)
        if self.workload.mask == "causal":
            low = -(ahead // self.placement.stride)
        if self.workload.keys_seen is not None:
            high = (self.workload.keys_seen - 1 - ahead) // self.placement.stride
        strangers = self.document[queries] != self.document[keys]
        return clip_band(np.where(strangers, counts[0], low), np.where(strangers, -counts[1], high), *counts)

    def call_bands(self, call: Call) -> tuple[IntArray, IntArray]:
        """The clipped bands with which a call computes its tiles, as arrays (queries, keys)."""
        first_query = np.cumsum(self.count[call.queries]) - self.count[call.queries]
        first_key = np.cumsum(self.count[call.keys]) - self.count[call.keys]
        shift = first_key[None, :] - first_query[:, None]
        counts = self.count[call.queries][:, None], self.count[call.keys][None, :]
        return clip_band(call.low + shift, call.high + shift, *counts)

    def sides(self, call: Call) -> tuple[IntArray, IntArray]:
        """The travelling and the staying blocks of a call."""
        return (call.keys, call.queries) if self.travellers == "keys" else (call.queries, call.keys)

    def flops(self, call: Call) -> int:
        """What a kernel call computes, in FLOPs."""
        sizes = int(self.count[call.queries].sum()), int(self.count[call.keys].sum())
        return int(pairs_in_band(call.low, call.high, *sizes)) * self.flops_per_pair
