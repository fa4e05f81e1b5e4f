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

from tasp_lab.core.arrays import IntArray
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
        rows = [range(each.first, each.first + each.length) for each in queries]
        return [_segment(rows, 0, all_keys, (False, False), keys)]  # every query sees every key
    # Stretches of queries: their rows, and the keys that the first one sees, from `begin` to `end`, either of which
    # moves on by a key per query if it `moves`.
    stretches: list[tuple[list[range], int, int, tuple[bool, bool]]] = []
    for run in queries:
        # Query i sees of a run of keys those from i - high to i - low, counted from the first of the run.
        bands = [(*mask.band(run.position - each.position, 1, 1, stride), each.length) for each in keys]
        lows = [(low, count) for low, _, count in bands] if mask.low is not None else []
        highs = [(high + 1, count) for _, high, count in bands] if mask.high is not None else []
        breaks = {0, run.length}
        for limit, count in lows + highs:
            breaks |= {at for at in (limit, limit + count - 1, limit + count) if 0 < at < run.length}
        for first, last in pairwise(sorted(breaks)):
            (begin, end), (last_begin, last_end) = (
                (_passed(query, highs), _passed(query, lows) if lows else all_keys) for query in (first, last - 1)
            )
            if begin >= end:
                continue
            alone = last - first == 1  # then either is right: take what lets it join others
            moves = bool(highs) and (alone or last_begin > begin), bool(lows) and (alone or last_end > end)
            rows = [range(run.first + first, run.first + last)]
            if stretches:
                before, *seen, moved = stretches[-1]
                count = sum(map(len, before))
                if moves == moved and (begin, end) == (seen[0] + count * moves[0], seen[1] + count * moves[1]):
                    before += rows
                    continue
            stretches.append((rows, begin, end, moves))
    return [_segment(*each, keys) for each in stretches]


def range_segments(
    queries: Sequence[Rows], keys: Sequence[Rows], slices: IntArray, stride: int = 1
) -> list[PackedSegment]:
    """As `document_segments`, of slices (`tasp_lab.workload.ranges`) instead of a mask; a query may be in several."""
    found: list[PackedSegment] = []
    for column, rows in ((0, queries), (2, keys)):
        last = max(each.position + stride * (each.length - 1) for each in rows)
        slices = slices[(slices[:, column] <= last) & (slices[:, column + 1] > rows[0].position)]
    for first, end, first_key, end_key, low, high in slices.tolist():
        own, others = (
            [part for each in rows if (part := _part(each, *ends, stride)).length]
            for rows, ends in ((queries, (first, end)), (keys, (first_key, end_key)))
        )
        mask = Mask("", low, high)
        if stride == 1 and own and others:
            found += document_segments(own, others, mask)
        elif stride > 1:  # runs interleave
            found += [each for one in own for other in others
                      for each in document_segments([one], [other], mask, stride)]  # fmt: skip
    return found


def _part(rows: Rows, first: int, end: int, stride: int) -> Rows:
    """The rows at positions from `first` to `end`."""
    begin, stop = (min(max(-((rows.position - limit) // stride), 0), rows.length) for limit in (first, end))
    return Rows(rows.position + begin * stride, rows.first + begin, stop - begin)


def _passed(query: int, limits: Sequence[tuple[int, int]]) -> int:
    """The number of keys of all runs that a limit of the mask has passed at a query."""
    return sum(min(max(query - limit + 1, 0), count) for limit, count in limits)


def _segment(
    rows: Sequence[range], begin: int, end: int, moves: tuple[bool, bool], keys: Sequence[Rows]
) -> PackedSegment:
    """The segment of the queries of a stretch and all keys that they see."""
    queries = sum(map(len, rows))
    last = end + (queries - 1) * moves[1]
    count = last - begin
    low = max(begin - end, -count) + 1 if moves[1] else 1 - count
    high = 0 if moves[0] else queries - 1
    ranges, before = list[range](), 0
    for run in keys:
        first, stop = max(begin - before, 0), min(last - before, run.length)
        if first < stop:
            ranges.append(range(run.first + first, run.first + stop))
        before += run.length
    return PackedSegment(_joined(rows), _joined(ranges), Segment(queries, count, low, high))


def _joined(rows: Sequence[range]) -> tuple[range, ...]:
    """Ranges, with those that follow one another as one."""
    found: list[range] = []
    for each in rows:
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return tuple(found)
