"""A placement: which positions of a sequence each rank holds, and in what order.

A rank's **shard** is one or more *spans*, stretches of positions with a constant distance between neighbours, in
ascending order. Any sequence length will do: spans that cannot be equal differ by one position at most, and a rank may
hold none.

- `contiguous`: rank r holds the r-th of n stretches.
- `zigzag`: rank r holds stretches r and 2n-1-r of 2n, so that under a causal mask all ranks have the same work.
- `striped`: rank r holds every n-th position from r on (arXiv:2311.09431).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import WorkloadError
from tasp_lab.pieces import split_bytes


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """The positions start, start + stride, ... (count of them)."""

    start: int
    stride: int
    count: int

    @property
    def positions(self) -> IntArray:
        return self.start + self.stride * np.arange(self.count, dtype=np.int64)

    @property
    def positions_end(self) -> int:
        """One more than the last position."""
        return self.start + (self.count - 1) * self.stride + 1

    def part(self, first: int, count: int) -> Span:
        """The `count` positions from index `first` on."""
        return Span(self.start + first * self.stride, self.stride, count)


@dataclass(frozen=True)
class Placement:
    """Where the positions of a sequence are: for each rank its spans, none of them empty, in ascending order.

    All spans of a placement have one stride. Every position is in exactly one span; else `WorkloadError`.

    >>> zigzag(16, 2).positions(0).tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    """

    name: str
    sequence: int
    spans: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        spans = [span for each in self.spans for span in each]
        strides = {span.stride for span in spans}
        if len(strides) > 1 or any(span.count < 1 or span.stride < 1 for span in spans):
            raise WorkloadError(f"placement {self.name!r}: spans have strides {sorted(strides)} or no positions")
        stride = min(strides, default=1)
        for rank, each in enumerate(self.spans):
            if any(span.positions_end > after.start for span, after in pairwise(each)):
                raise WorkloadError(f"placement {self.name!r}: the positions of rank {rank} are not in ascending order")
        next_of = {start: start for start in range(min(stride, self.sequence))}
        for span in sorted(spans):
            if next_of.get(span.start % stride) != span.start:
                raise WorkloadError(f"placement {self.name!r} does not hold position {span.start} exactly once")
            next_of[span.start % stride] += stride * span.count
        if any(end < self.sequence or end - stride >= self.sequence for end in next_of.values()):
            raise WorkloadError(f"placement {self.name!r} does not hold each of {self.sequence} positions once")

    @property
    def stride(self) -> int:
        """The distance between neighbours in every span."""
        return next((span.stride for each in self.spans for span in each), 1)

    @property
    def world_size(self) -> int:
        return len(self.spans)

    def length(self, rank: int) -> int:
        """How many positions a rank holds."""
        return sum(span.count for span in self.spans[rank])

    def positions(self, rank: int) -> IntArray:
        """The positions that a rank holds, in the order of its shard; also what rotary embeddings need."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(span.positions for span in self.spans[rank])])


def contiguous(sequence: int, world_size: int) -> Placement:
    """Stretch r of n is rank r's.

    >>> [contiguous(7, 3).positions(rank).tolist() for rank in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    stretches = _stretches(sequence, world_size)
    return _placement("contiguous", sequence, [[stretch] for stretch in stretches])


def zigzag(sequence: int, world_size: int) -> Placement:
    """Stretches r and 2n-1-r of 2n are rank r's: one from the front of the sequence, one from the back."""
    stretches = _stretches(sequence, 2 * world_size)
    pairs = [[stretches[rank], stretches[-1 - rank]] for rank in range(world_size)]
    return _placement("zigzag", sequence, pairs)


def striped(sequence: int, world_size: int) -> Placement:
    """Positions r, r + n, r + 2n, ... are rank r's.

    >>> striped(7, 3).positions(1).tolist()
    [1, 4]
    """
    counts = [len(range(rank, sequence, world_size)) for rank in range(world_size)]
    return _placement("striped", sequence, [[Span(rank, world_size, count)] for rank, count in enumerate(counts)])


PLACEMENTS: Mapping[str, Callable[[int, int], Placement]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}
"""Every placement by its name: a function of the sequence length and the world size."""


def _stretches(sequence: int, count: int) -> list[Span]:
    """The sequence cut into contiguous stretches of about equal length, the longer ones first."""
    lengths = split_bytes(sequence, [Fraction(1, count)] * count)
    starts = np.cumsum([0, *lengths]).tolist()
    return [Span(start, 1, length) for start, length in zip(starts, lengths, strict=False)]


def _placement(name: str, sequence: int, spans: Sequence[Sequence[Span]]) -> Placement:
    return Placement(name, sequence, tuple(tuple(span for span in each if span.count) for each in spans))
