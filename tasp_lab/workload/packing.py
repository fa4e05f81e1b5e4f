"""What a kernel call on packed documents computes: for each document, bands between its queries and its keys.

    document_segments([Rows(0, 0, 4)], [Rows(0, 0, 4)], CAUSAL)      # four positions that attend to themselves

The rows of a document may lie in several runs: of four ranks, a zigzag shard has its first and its last eighth. With
the keys in the order of positions, each query sees a range of them. The ends of this range stay the same from one query
to the next or move on by one key, so a few *segments* cover all queries, each with a band as its mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tasp_lab.workload.kernel_shapes import Segment
from tasp_lab.workload.mask import Mask


class Rows(NamedTuple):
    """A run of rows of a tensor: `length` of them from `first` on, at positions from `position` on."""

    position: int
    first: int
    length: int


class PackedSegment(NamedTuple):
    """Queries and keys of one document, each a list of ranges of rows of their tensors, and the band of their mask."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    shape: Segment


def document_segments(
    queries: Sequence[Rows], keys: Sequence[Rows], mask: Mask, stride: int = 1
) -> list[PackedSegment]:
    """The segments of a document; a query is in one of them, or in none if it sees none of the keys.

    `queries` and `keys` are in the order of first positions; `stride` is the distance of neighbours in a run. Runs of
    keys do not interleave, as those of striped shards would, unless every query sees every key.

    The back of a document attends to itself and to the front, the front to itself alone:

    >>> from tasp_lab.workload.mask import CAUSAL
    >>> shard = [Rows(0, 0, 2), Rows(6, 2, 2)]
    >>> [each.shape for each in document_segments(shard, shard, CAUSAL)]
    [Segment(queries=4, keys=4, low=0, high=3)]
    >>> [each.shape for each in document_segments(shard, shard[:1], CAUSAL)]
    [Segment(queries=2, keys=2, low=0, high=1), Segment(queries=2, keys=2, low=-1, high=1)]
    """
    all_keys = sum(each.length for each in keys)
    last_query, last_key = (
        max(each.position + stride * (each.length - 1) for each in rows) for rows in (queries, keys)
    )
    nearest, farthest = queries[0].position - last_key, last_query - keys[0].position
    if (mask.low is None or nearest >= mask.low) and (mask.high is None or farthest <= mask.high):
        count = sum(each.length for each in queries)  # every query sees every key
        stretch = _Stretch([range(each.first, each.first + each.length) for each in queries], count, 0, all_keys)
        return [stretch.segment(keys)]
    found: list[_Stretch] = []
    for run in queries:
        # Query i sees of a run of keys those from i - high to i - low, counted from the first of the run.
        bands = [(*mask.band(run.position - each.position, 1, 1, stride), each.length) for each in keys]
        lows = [(low, count) for low, _, count in bands] if mask.low is not None else None
        highs = [(high + 1, count) for _, high, count in bands] if mask.high is not None else None
        breaks = {0, run.length}
        for limit, count in (lows or []) + (highs or []):
            breaks |= {at for at in (limit, limit + count - 1, limit + count) if 0 < at < run.length}
        for first, last in pairwise(sorted(breaks)):
            (begin, end), (last_begin, last_end) = (
                (_passed(query, highs) if highs else 0, _passed(query, lows) if lows is not None else all_keys)
                for query in (first, last - 1)
            )
            if begin >= end:
                continue
            alone = last - first == 1  # then either is right: take what lets it join others
            moves = (
                highs is not None and (alone or last_begin > begin),
                lows is not None and (alone or last_end > end),
            )
            stretch = _Stretch([range(run.first + first, run.first + last)], last - first, begin, end, *moves)
            if not (found and found[-1].takes(stretch)):
                found.append(stretch)
    return [each.segment(keys) for each in found]


def _passed(query: int, limits: Sequence[tuple[int, int]]) -> int:
    """The number of keys of all runs that a limit of the mask has passed at a query."""
    return sum(min(max(query - limit + 1, 0), count) for limit, count in limits)


class _Stretch:
    """Queries that see the keys from `begin` to `end`, either of which moves on by a key per query if it `moves`."""

    def __init__(
        self, rows: list[range], count: int, begin: int, end: int, begin_moves: bool = False, end_moves: bool = False
    ) -> None:
        self.rows, self.count, self.begin, self.end = rows, count, begin, end
        self.moves = begin_moves, end_moves

    def at(self, query: int) -> tuple[int, int]:
        """The keys that a query sees, counted from the first query of the stretch."""
        return self.begin + query * self.moves[0], self.end + query * self.moves[1]

    def takes(self, other: _Stretch) -> bool:
        """Take in the queries that follow, if the keys that they see move on in the same way."""
        follows = self.moves == other.moves and self.at(self.count) == (other.begin, other.end)
        if follows:
            self.rows, self.count = self.rows + other.rows, self.count + other.count
        return follows

    def segment(self, keys: Sequence[Rows]) -> PackedSegment:
        """The segment of these queries and all keys that they see."""
        end = self.at(self.count - 1)[1]
        count = end - self.begin
        low = max(1 - (self.end - self.begin), 1 - count) if self.moves[1] else 1 - count
        high = 0 if self.moves[0] else self.count - 1
        ranges, before = list[range](), 0
        for run in keys:
            first, last = max(self.begin - before, 0), min(end - before, run.length)
            if first < last:
                ranges.append(range(run.first + first, run.first + last))
            before += run.length
        return PackedSegment(_joined(self.rows), _joined(ranges), Segment(self.count, count, low, high))


def _joined(rows: Sequence[range]) -> tuple[range, ...]:
    """Ranges, with those that follow one another as one."""
    found: list[range] = []
    for each in rows:
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return tuple(found)
