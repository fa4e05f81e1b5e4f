"""A placement: which positions of a sequence each rank holds, and in what order.

A rank's **shard** is one or more *spans*, stretches of positions with a constant distance between neighbours, in
ascending order. Any sequence length will do: spans that cannot be equal differ by one position at most, and a rank may
hold none.

- `contiguous`: rank r holds the r-th of n stretches.
- `zigzag`: rank r holds stretches r and 2n-1-r of 2n, so that under a causal mask all ranks have the same work.
- `striped`: rank r holds every n-th position from r on (arXiv:2311.09431).

**Documents.** Where a sequence is packed (see `tasp_lab.workload`), each document is placed by itself, and no span
crosses its borders. A document whose length is no multiple of the number of stretches leaves *odd positions*, which
make some stretches one longer. They are dealt out in turn, each document going on where that before it ended. So:

- Lengths. Every rank holds as many positions as without documents: ranks differ by one at most.
- Causal work of `zigzag`, in (query, key) pairs. It is equal where all lengths are multiples of 2n, and for 2n
  documents of one length, since every way in which they are cut occurs as often as its mirror image. For any
  documents, two ranks differ by less than two pairs per position of the sequence.
- Causal work of `striped`. Ranks with more of it get earlier positions. For any documents, two ranks differ by at
  most one pair per position of the sequence; where all lengths are multiples of n, by less than the longest of them.
- Causal work of `contiguous` is not balanced: later stretches of a document have more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import attrgetter
from typing import Protocol

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import WorkloadError
from tasp_lab.workload import check_documents


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
        for span in sorted(spans, key=attrgetter("start")):
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


class PlacementFunction(Protocol):
    """Places a sequence on ranks; `WorkloadError` if the documents are not those of the sequence."""

    def __call__(self, sequence: int, world_size: int, documents: Sequence[int] | None = None) -> Placement: ...


def contiguous(sequence: int, world_size: int, documents: Sequence[int] | None = None) -> Placement:
    """Stretch r of n is rank r's.

    >>> [contiguous(7, 3).positions(rank).tolist() for rank in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    >>> [contiguous(7, 3, documents=(4, 3)).positions(rank).tolist() for rank in range(3)]
    [[0, 1, 4], [2, 5], [3, 6]]
    """
    cuts = _stretches(sequence, world_size, documents)
    return _placement("contiguous", sequence, list(zip(*cuts, strict=True)))


def zigzag(sequence: int, world_size: int, documents: Sequence[int] | None = None) -> Placement:
    """Stretches r and 2n-1-r of 2n are rank r's: one from the front of the document, one from the back.

    >>> zigzag(12, 2, documents=(4, 8)).positions(0).tolist()
    [0, 3, 4, 5, 10, 11]
    """
    cuts = list(_stretches(sequence, 2 * world_size, documents))
    shards = [[cut[stretch] for cut in cuts for stretch in (rank, -1 - rank)] for rank in range(world_size)]
    return _placement("zigzag", sequence, shards)


def striped(sequence: int, world_size: int, documents: Sequence[int] | None = None) -> Placement:
    """Positions r, r + n, r + 2n, ... are rank r's. In documents after the first, ranks start in another order.

    >>> striped(7, 3).positions(1).tolist()
    [1, 4]
    >>> striped(6, 3, documents=(3, 3)).positions(0).tolist()
    [0, 5]
    """
    shards: list[list[Span]] = [[] for _ in range(world_size)]
    pairs = [0] * world_size
    for start, length in _starts_and_lengths(sequence, documents):
        longer = _in_turn(start, length, world_size)
        # The odd positions are the last, so ranks that get one come first; among equals, the busiest.
        order = sorted(range(world_size), key=lambda rank: (rank not in longer, -pairs[rank]))
        for offset, rank in enumerate(order):
            count = len(range(offset, length, world_size))
            shards[rank].append(Span(start + offset, world_size, count))
            pairs[rank] += count * (offset + 1) + world_size * count * (count - 1) // 2
    return _placement("striped", sequence, shards)


PLACEMENTS: Mapping[str, PlacementFunction] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}
"""Every placement by its name: a function of the sequence length, the world size and the documents' lengths, if any."""


def _starts_and_lengths(sequence: int, documents: Sequence[int] | None) -> list[tuple[int, int]]:
    """The first position and the length of each document."""
    lengths = (sequence,) if documents is None else check_documents(documents, sequence)
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _stretches(sequence: int, count: int, documents: Sequence[int] | None) -> Iterator[list[Span]]:
    """Each document cut into contiguous stretches of about equal length."""
    for start, length in _starts_and_lengths(sequence, documents):
        longer = _in_turn(start, length, count)
        lengths = [length // count + (stretch in longer) for stretch in range(count)]
        starts = accumulate(lengths, initial=start)
        yield [Span(*stretch) for stretch in zip(starts, repeat(1), lengths, strict=False)]


def _in_turn(start: int, length: int, count: int) -> set[int]:
    """Which of `count` stretches get an odd position. All documents before have dealt out `start`, modulo `count`."""
    return {(start + odd) % count for odd in range(length % count)}


def _placement(name: str, sequence: int, shards: Sequence[Sequence[Span]]) -> Placement:
    return Placement(name, sequence, tuple(tuple(span for span in each if span.count) for each in shards))
