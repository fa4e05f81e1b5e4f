"""The FLOPs of kernels of linear attention: two per multiplication and addition; masked pairs are not counted.

Kernels that attend within a chunk work in blocks of 64 positions: pairs of positions within a block, and a state
between blocks, so they are linear in the sequence, as those of flash-linear-attention are (``chunk_size`` 64). With a
full mask, a chunk has one block or one state, whichever is less. Gates cost nothing that is counted, as softmax does
not: their work is linear in the elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tasp_lab.core.arrays import IntArray

if TYPE_CHECKING:
    from tasp_lab.schedules.linear.chunks import LinearBlocks

BLOCK = 64
"""Positions of a block of a kernel."""


@dataclass(frozen=True)
class FlopCounts:
    """The FLOPs of the kernels of a layer; methods take chunks and return int arrays, one entry per call."""

    layer: LinearBlocks

    @property
    def per_pair(self) -> int:
        """Two products of positions, of all heads of a group; backward five, as scores are recomputed."""
        layer = self.layer.workload
        each = layer.backward_flops_per_pair if self.layer.is_backward else layer.flops_per_pair
        return each // self.layer.head_groups

    @property
    def per_kv_state(self) -> int:
        """One product of a position with a state, of all KV heads of a group."""
        layer = self.layer.workload
        return 2 * layer.batch * layer.kv_head_count * layer.head_dim * layer.value_size // self.layer.head_groups

    @property
    def per_state(self) -> int:
        """One product of a position with a state, of all query heads of a group."""
        layer = self.layer.workload
        return 2 * layer.batch * layer.heads * layer.head_dim * layer.value_size // self.layer.head_groups

    @cached_property
    def leading(self) -> IntArray:
        """The positions of each chunk that belong to a document of chunks before; with a full mask all."""
        chunk, length = self.layer.runs
        first = np.flatnonzero(np.diff(chunk, prepend=-1))
        return np.where(self.layer.has_prefix | self.layer.is_full, length[first], 0)

    @cached_property
    def trailing(self) -> IntArray:
        """The positions of the last document of each chunk."""
        chunk, length = self.layer.runs
        last = np.flatnonzero(np.diff(chunk, append=len(self.layer.owner)))
        found: IntArray = length[last]
        return found

    @cached_property
    def within(self) -> IntArray:
        """The FLOPs of attention within each chunk, or backward of its gradients."""
        to_states, from_states = self.per_kv_state, self.per_state
        if self.layer.is_backward:  # states again, and the gradients of states; dk and dv, and dq
            to_states, from_states = 3 * self.per_kv_state, 2 * self.per_state
        if self.layer.is_full:
            count = self.layer.count
            return np.minimum(count**2 * self.per_pair, count * (to_states + from_states))
        chunk, length = self.layer.runs
        blocks, rest = np.divmod(length, BLOCK)
        pairs = blocks * (BLOCK * (BLOCK + 1) // 2) + rest * (rest + 1) // 2
        behind = length - np.minimum(length, BLOCK)
        before = length - np.where(rest > 0, rest, np.minimum(length, BLOCK))
        flops = pairs * self.per_pair + before * to_states + behind * from_states
        found = np.zeros_like(self.layer.count)
        np.add.at(found, chunk, flops)
        return found

    def of_chunks(self, kernel: str, chunk: IntArray) -> IntArray:
        """The FLOPs of kernels of one chunk, of the positions that a state is made of or applied to."""
        if kernel == "differentiate":
            return self.within[chunk] + self.leading[chunk] * self.per_state
        if kernel == "make_state":
            return self.trailing[chunk] * self.per_kv_state
        if kernel == "apply_gradient_state":
            return self.trailing[chunk] * 2 * self.per_kv_state
        return self.leading[chunk] * self.per_state

    def of_tiles(self, kernel: str, query: IntArray, key: IntArray) -> IntArray:
        """The FLOPs of queries of one chunk with keys of one, of all pairs, or by the state of the keys."""
        queries, keys = self.leading[query], self.trailing[key]
        if kernel.endswith("by_state"):
            to_state, from_state = (3, 2) if self.layer.is_backward else (1, 1)
            return keys * to_state * self.per_kv_state + queries * from_state * self.per_state
        return np.where(query == key, self.within[query], queries * keys * self.per_pair)

    def of_states(self, count: IntArray) -> IntArray:
        """The FLOPs of adding up so many pieces of states."""
        return count * (self.per_kv_state // self.layer.pieces)


def least_flops(layer: LinearBlocks) -> int:
    """The least FLOPs of a pass by any schedule, over all ranks.

    All ranks together attend within all chunks, and compute what other chunks contribute to each chunk: by applying a
    state to its positions, or from all their pairs.
    """
    counts = FlopCounts(layer)
    chunks = np.flatnonzero(layer.has_prefix)
    call, other = layer.others(chunks, back=False)
    pairs = np.zeros(len(chunks), dtype=np.int64)
    np.add.at(pairs, call, counts.leading[chunks[call]] * counts.trailing[other] * counts.per_pair)
    by_state = counts.leading[chunks] * counts.per_state
    return int(counts.within.sum() + np.minimum(pairs, by_state).sum())
