"""The segments of packed documents, against the mask pair by pair."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.workload.mask import CAUSAL, FULL, Mask
from tasp_lab.workload.packing import Rows, document_segments

limits = st.none() | st.integers(-7, 7)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    low, high = draw(limits), draw(limits)
    if low is not None and high is not None:
        low, high = sorted((low, high))
    return draw(st.sampled_from([FULL, CAUSAL, CAUSAL.within(3), Mask("drawn", low, high)]))


@st.composite
def runs(draw: st.DrawFn, stride: int) -> list[Rows]:
    """Runs of positions of one document: each begins behind the last position of the one before."""
    found: list[Rows] = []
    position = draw(st.integers(0, 9))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    firsts = draw(st.permutations(list(pairwise(accumulate(lengths, initial=0)))))
    for first, end in firsts:
        found.append(Rows(position, first, end - first))
        position += stride * (end - first) + draw(st.integers(0, 4))
    return found


def positions_of(rows: list[Rows], stride: int) -> IntArray:
    found = np.zeros(sum(each.length for each in rows), dtype=np.int64)
    for position, first, count in rows:
        found[first : first + count] = position + stride * np.arange(count)
    return found


def pairs_of(rows: list[Rows], keys: list[Rows], mask: Mask, stride: int) -> IntArray:
    """How often each pair of rows is in a segment."""
    seen = np.zeros([sum(each.length for each in side) for side in (rows, keys)], dtype=np.int64)
    queries_used = np.zeros(len(seen), dtype=np.int64)
    for segment in document_segments(rows, keys, mask, stride):
        of_queries, of_keys = ([at for each in ranges for at in each] for ranges in segment[:2])
        queries, count, low, high = segment.shape
        assert (len(of_queries), len(of_keys)) == (queries, count)
        assert 1 - count <= low <= high <= queries - 1
        distance = np.arange(queries)[:, None] - np.arange(count)
        inside = (low <= distance) & (distance <= high)
        assert inside.any(axis=1).all()
        assert inside.any(axis=0).all()
        seen[np.ix_(of_queries, of_keys)] += inside
        queries_used[of_queries] += 1
    assert queries_used.max() <= 1
    return seen


def visible(rows: list[Rows], keys: list[Rows], mask: Mask, stride: int) -> BoolArray:
    ahead = positions_of(rows, stride)[:, None] - positions_of(keys, stride)
    found: BoolArray = np.ones_like(ahead, dtype=np.bool_)
    found &= True if mask.low is None else ahead >= mask.low
    found &= True if mask.high is None else ahead <= mask.high
    return found


@given(masks(), st.integers(1, 3), st.data())
def test_segments_have_each_visible_pair_once_and_no_other(mask: Mask, stride: int, data: st.DataObject) -> None:
    rows, keys = data.draw(runs(stride)), data.draw(runs(stride))
    assert (pairs_of(rows, keys, mask, stride) == visible(rows, keys, mask, stride)).all()


@given(st.integers(1, 3), st.data())
def test_a_shard_attends_to_itself_in_one_causal_segment(stride: int, data: st.DataObject) -> None:
    rows = data.draw(runs(stride))
    count = sum(each.length for each in rows)
    found = document_segments(rows, rows, CAUSAL, stride)
    assert [each.shape for each in found] == [(count, count, 0, count - 1)]


@given(st.integers(1, 3), st.data())
def test_without_a_limit_there_is_one_segment(stride: int, data: st.DataObject) -> None:
    rows, keys = data.draw(runs(stride)), data.draw(runs(stride))
    assert len(document_segments(rows, keys, FULL, stride)) == 1
