"""A sequence layout: the positions that each rank holds, and their order.

A rank's **shard** is one or more *spans*, arithmetic progressions of positions, in ascending order. Any sequence length
is supported: spans that cannot be equal differ by at most one position, and a shard may be empty.

- `contiguous`: rank r holds chunk r of n.
- `zigzag`: rank r holds chunks r and 2n-1-r of 2n, which balances the work of a causal mask.
- `striped`: rank r holds positions r, r + n, r + 2n, ... (arXiv:2311.09431).

**Documents.** In a packed sequence (see `tasp_lab.workload.layer`) the spans are those of the same sequence without
documents, so schedules do not depend on documents. They count *places*: chunk c of a layout has the c-th part of each
document, one document after the other, and `pieces` tell the positions. Within a document, places and positions have
the same order. Without documents, and in the striped layout, places are positions. If the number of chunks does not
divide the length of a document, some parts are one position longer: chunk c has the positions p with p mod chunks = c
as far as lengths go, which adds up to its length without documents. Hence:

- Lengths. Every rank holds as many positions as without documents: ranks differ by at most one.
- Causal work of `zigzag`, in (query, key) pairs. It is equal if all lengths are multiples of 2n, and for 2n documents
  of one length, since every split occurs as often as its mirror image. For any documents, two ranks differ by less than
  two pairs per position of the sequence.
- Causal work of `striped`. For any documents, two ranks differ by at most one pair per position of the sequence.
- Causal work of `contiguous` is not balanced: later parts of a document have more.

**Ranges** (`tasp_lab.workload.ranges`) are balanced by counting: the spans stay as they are, and chunks of the sequence
are dealt to them so that ranks have about as many pairs (`layout_named`).

**A cached prefix** is distributed by itself, in spans of its own: its keys lie where a pass over the prefix
alone has them, and the positions with queries are balanced whatever the length of the prefix.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tasp_lab.core.arrays import IntArray, whole
from tasp_lab.core.errors import WorkloadError
from tasp_lab.workload.layer import Workload, check_documents
from tasp_lab.workload.ranges import pairs_of_runs


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """`count` positions: start, start + stride, ..."""

    start: int
    stride: int
    count: int

    def __post_init__(self) -> None:
        for name in ("start", "stride", "count"):
            object.__setattr__(self, name, whole(f"{name} of a span", getattr(self, name), WorkloadError))

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


class Piece(NamedTuple):
    """Adjacent positions of a document at adjacent places."""

    place: int
    position: int
    length: int


@dataclass(frozen=True)
class SequenceLayout:
    """The distribution of a sequence over ranks: per rank its non-empty spans, in ascending order.

    All spans of a layout have one stride. Every place is in exactly one span; else `WorkloadError`. `pieces` are the
    positions at all places, in the order of places; without them places are positions.

    >>> zigzag(16, 2).positions(0).tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    >>> packed = zigzag(12, 2, documents=(4, 8))
    >>> packed.spans == zigzag(12, 2).spans, packed.positions_at(packed.places(0)).tolist()
    (True, [0, 4, 5, 3, 10, 11])
    """

    name: str
    sequence: int
    spans: tuple[tuple[Span, ...], ...]
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        what = f"layout {self.name!r}"
        pieces = (Piece(*(whole(f"{what}: pieces", each, WorkloadError) for each in piece)) for piece in self.pieces)
        object.__setattr__(self, "pieces", tuple(pieces))
        object.__setattr__(self, "spans", tuple(map(tuple, self.spans)))
        object.__setattr__(self, "sequence", whole(f"{what}: sequence", self.sequence, WorkloadError))
        spans = [span for each in self.spans for span in each]
        strides = {span.stride for span in spans}
        if len(strides) > 1 or any(span.count < 1 or span.stride < 1 for span in spans):
            raise WorkloadError(f"{what}: strides {sorted(strides)}, expected spans of one stride, not empty")
        for rank, each in enumerate(self.spans):
            if any(span.positions_end > after.start for span, after in pairwise(each)):
                raise WorkloadError(f"{what}: the positions of rank {rank} are not in ascending order")
        # Of each residue modulo the stride, a span begins where the one before it ends, and the last ends the sequence.
        next_of = {start: start for start in range(min(self.stride, self.sequence))}
        for span in sorted(spans, key=attrgetter("start")):
            if next_of.get(span.start % self.stride) != span.start:
                raise WorkloadError(f"{what} does not hold position {span.start} exactly once")
            next_of[span.start % self.stride] += self.stride * span.count
        if any(end < self.sequence or end - self.stride >= self.sequence for end in next_of.values()):
            raise WorkloadError(f"{what} does not hold each of {self.sequence} positions once")
        for number in (0, 1) if self.pieces else ():
            ends = sorted((piece[number], piece[number] + piece.length) for piece in self.pieces)
            if [0, *(end for _, end in ends)] != [*(first for first, _ in ends), self.sequence] or self.stride > 1:
                raise WorkloadError(f"{what}: pieces do not hold each of {self.sequence} positions once")

    @property
    def stride(self) -> int:
        """The distance between neighbouring positions of a span."""
        return next((span.stride for each in self.spans for span in each), 1)

    @property
    def world_size(self) -> int:
        return len(self.spans)

    def spans_from(self, first: int) -> tuple[tuple[Span, ...], ...]:
        """The spans of the positions from `first` on, per rank; spans that begin before it are cut.

        >>> zigzag(12, 2).spans_from(8)
        ((Span(start=9, stride=1, count=3),), (Span(start=8, stride=1, count=1),))
        """
        return tuple(
            tuple(
                span.part(skipped, span.count - skipped)
                for span in each
                if (skipped := max(0, -((span.start - first) // span.stride))) < span.count
            )
            for each in self.spans
        )

    def after(self, first: int) -> SequenceLayout:
        """The layout of the positions from `first` on, counted from there: that of new positions after a prefix.

        >>> zigzag(12, 2).after(8).positions(0).tolist()
        [1, 2, 3]
        """
        shards = ((Span(span.start - first, span.stride, span.count) for span in each)
                  for each in self.spans_from(first))  # fmt: skip
        return _layout(f"{self.name} after {first}" if first else self.name, self.sequence - first, shards)

    def length(self, rank: int) -> int:
        """The number of positions of a rank."""
        return sum(span.count for span in self.spans[rank])

    def places(self, rank: int) -> IntArray:
        """The places of a rank, ascending."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(span.positions for span in self.spans[rank])])

    def positions(self, rank: int) -> IntArray:
        """The positions of a rank, ascending, which is the order of its shard, e.g. for rotary embeddings."""
        places = self.places(rank)
        return np.sort(self.positions_at(places)) if self.pieces else places

    def positions_at(self, places: IntArray) -> IntArray:
        """The positions at these places."""
        if not self.pieces:
            return places
        place, position, _ = self.piece_columns
        number = np.searchsorted(place, places, side="right") - 1
        found: IntArray = places + (position - place)[number]
        return found

    @cached_property
    def piece_columns(self) -> IntArray:
        """Place, position and length of all pieces, an int array (3, pieces)."""
        return np.array(self.pieces, dtype=np.int64).reshape(-1, 3).T

    @cached_property
    def position_spans(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of positions, per rank, ascending: `spans`, cut at the ends of pieces."""
        if not self.pieces:
            return self.spans
        shards = []
        for positions in map(self.positions, range(self.world_size)):
            first = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
            counts = np.diff(np.append(first, len(positions)))
            shards.append(tuple(map(Span, positions[first].tolist(), [1] * len(first), counts.tolist())))
        return tuple(shards)

    def on_ranks(self, order: IntArray) -> SequenceLayout:
        """The layout in which rank ``order[i]`` holds what rank i holds here; `order` has each rank once.

        >>> contiguous(6, 3).on_ranks(np.array([0, 2, 1])).positions(1).tolist()
        [4, 5]
        """
        if np.array_equal(order, np.arange(self.world_size)):
            return self
        spans = tuple(self.spans[place] for place in np.argsort(order))
        return SequenceLayout(f"{self.name} in another order", self.sequence, spans, self.pieces)


LayoutFunction = Callable[..., SequenceLayout]
"""Distributes a sequence over ranks, as `contiguous` does with its parameters.

The first `cached_keys` positions are distributed by themselves. Raises `WorkloadError` if the documents do not match
the sequence.
"""


def contiguous(
    sequence: int, world_size: int, documents: Sequence[int] | None = None, cached_keys: int = 0
) -> SequenceLayout:
    """Rank r holds chunk r of n.

    >>> [contiguous(7, 3).positions(rank).tolist() for rank in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    >>> [contiguous(7, 3, documents=(4, 3)).positions(rank).tolist() for rank in range(3)]
    [[0, 1, 4], [2, 5], [3, 6]]
    """
    shards = zip(*_chunks(sequence, world_size, cached_keys), strict=True)
    return _layout("contiguous", sequence, shards, _dealt(sequence, world_size, documents))


def zigzag(
    sequence: int, world_size: int, documents: Sequence[int] | None = None, cached_keys: int = 0
) -> SequenceLayout:
    """Rank r holds chunks r and 2n-1-r of 2n: one from the front of each document, one from the back.

    >>> zigzag(12, 2, documents=(4, 8)).positions(0).tolist()
    [0, 3, 4, 5, 10, 11]
    """
    parts_chunks = _chunks(sequence, 2 * world_size, cached_keys)
    shards = [[chunks[at] for chunks in parts_chunks for at in (rank, -1 - rank)] for rank in range(world_size)]
    return _layout("zigzag", sequence, shards, _dealt(sequence, 2 * world_size, documents))


def striped(
    sequence: int, world_size: int, documents: Sequence[int] | None = None, cached_keys: int = 0
) -> SequenceLayout:
    """Rank r holds positions r, r + n, r + 2n, ..., whatever the documents. What is cached may be in another order.

    >>> striped(7, 3).positions(1).tolist()
    [1, 4]
    """
    if documents is not None:
        check_documents(documents, sequence)
    shards: list[list[Span]] = [[] for _ in range(world_size)]
    for start, length, longer in _parts(sequence, world_size, cached_keys):
        # The remainder positions are the last, so ranks with one come first.
        for offset, rank in enumerate(sorted(range(world_size), key=lambda rank: rank not in longer)):
            shards[rank].append(Span(start + offset, world_size, len(range(offset, length, world_size))))
    return _layout("striped", sequence, shards)


LAYOUTS: Mapping[str, LayoutFunction] = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
"""All layouts by name; masks name the one that balances their work (`tasp_lab.workload.mask`)."""


def layout_named(name: str, workload: Workload, world_size: int) -> SequenceLayout:
    """The layout of a layer. Raises `KeyError` for a name that is not in `LAYOUTS`."""
    found = LAYOUTS[name](workload.sequence, world_size, workload.documents, workload.cached_keys)
    return found if workload.ranges is None else _dealt_by_pairs(found, workload.slices)


_CHUNKS = 8
"""In how many chunks a span is cut where pairs are counted: runs that are long enough for kernels, and work of ranks
that differs by a few percent."""


def _dealt_by_pairs(layout: SequenceLayout, slices: IntArray) -> SequenceLayout:
    """The same spans with other positions, which have about as many pairs on all ranks.

    Chunks of the sequence are dealt to the rank that has the fewest pairs so far, those with most pairs first. Layouts
    with a stride stay as they are: neighbours are on all ranks.
    """
    if layout.stride > 1:
        return layout
    slots = [(span.start, rank, length) for rank, each in enumerate(layout.spans) for span in each
             for length in _lengths(span.count)]  # fmt: skip
    lengths = np.array(sorted((length for *_, length in slots), reverse=True), dtype=np.int64)
    begin = np.cumsum(lengths) - lengths
    whole = np.array([0]), np.array([layout.sequence])
    pairs = pairs_of_runs(slices, (begin, lengths), whole)[:, 0]
    total, open_slots = [0] * layout.world_size, Counter((rank, length) for _, rank, length in slots)
    chunks = defaultdict[tuple[int, int], list[int]](list)
    for chunk in np.lexsort((begin, -pairs)).tolist():
        length = int(lengths[chunk])
        rank = min((rank for rank in range(len(total)) if open_slots[rank, length]), key=lambda rank: total[rank])
        total[rank] += int(pairs[chunk])
        open_slots[rank, length] -= 1
        chunks[rank, length].append(int(begin[chunk]))
    for each in chunks.values():
        each.sort(reverse=True)
    pieces, ends = list[Piece](), dict[int, int]()
    for start, rank, length in slots:
        place, position = ends.get(start, start), chunks[rank, length].pop()
        ends[start] = place + length
        if pieces and pieces[-1].place + pieces[-1].length == place and sum(pieces[-1][1:]) == position:
            pieces[-1] = pieces[-1]._replace(length=pieces[-1].length + length)
        else:
            pieces.append(Piece(place, position, length))
    return replace(layout, pieces=tuple(sorted(pieces)))


def _lengths(count: int) -> list[int]:
    """The lengths of the chunks of a span."""
    chunks = min(_CHUNKS, count)
    return [count // chunks + (chunk < count % chunks) for chunk in range(chunks)]


def _parts(sequence: int, count: int, cached_keys: int) -> Iterator[tuple[int, int, set[int]]]:
    """The cached prefix and the rest, each distributed by itself: first position, length, and the longer chunks.

    Those have a remainder position, of `count` chunks; the prefix used as many of them as it has positions.
    """
    for start, end in ((0, cached_keys), (cached_keys, sequence)) if cached_keys else ((0, sequence),):
        yield start, end - start, {(start + index) % count for index in range((end - start) % count)}


def _chunks(sequence: int, count: int, cached_keys: int) -> list[list[Span]]:
    """The cached prefix and the rest, each split into contiguous chunks of about equal length."""
    parts = []
    for start, length, longer in _parts(sequence, count, cached_keys):
        lengths = [length // count + (chunk in longer) for chunk in range(count)]
        starts = list(accumulate(lengths, initial=start))[:-1]
        parts.append([Span(*each) for each in zip(starts, [1] * count, lengths, strict=True)])
    return parts


def _dealt(sequence: int, count: int, documents: Sequence[int] | None) -> tuple[Piece, ...]:
    """The pieces of documents in `count` chunks: each chunk has a part of every document, one after the other.

    Of a document from position s to e, chunk c has as many positions as there are p in [s, e) with p mod count = c.
    """
    if documents is None:
        return ()
    ends = np.cumsum([0, *(length for length in check_documents(documents, sequence) if length)])
    if len(ends) < 3:
        return ()  # one document
    before = ends[:, None] // count + (ends[:, None] % count > np.arange(count))  # positions of each chunk before ends
    lengths = np.diff(before, axis=0)
    positions = ends[:-1, None] + np.cumsum(lengths, axis=1) - lengths
    lengths, positions = lengths.T.ravel(), positions.T.ravel()  # chunk by chunk
    places = np.cumsum(lengths) - lengths
    columns = (column[lengths > 0].tolist() for column in (places, positions, lengths))
    return tuple(Piece(*row) for row in zip(*columns, strict=True))


def _layout(
    name: str, sequence: int, shards: Iterable[Iterable[Span]], pieces: tuple[Piece, ...] = ()
) -> SequenceLayout:
    return SequenceLayout(name, sequence, tuple(tuple(span for span in each if span.count) for each in shards), pieces)
