"""Masks as ranges, against their definition pair by pair."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasp_lab.core.errors import TaspLabError, WorkloadError
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.packing import Rows, range_segments
from tasp_lab.workload.ranges import MaskRange, check_ranges, pairs_of_runs, parse_ranges
from tasp_lab.workload.sequence_layout import LAYOUTS, layout_named
from tests.support.masks import ONE_OF_EACH, range_masks, seen_in
from tests.workload.test_packing import positions_of, runs

drawn = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), range_masks(n)))


def test_causal_ends_at_the_last_query_and_key_and_inverse_causal_begins_at_the_first() -> None:
    """Two queries of three keys, written out."""
    shown = {kind: seen_in([((0, 2), (0, 3), kind)], 3)[:2].astype(int).tolist()
             for kind in ("full", "causal", "inverse-causal", "bi-causal")}  # fmt: skip
    assert shown == {
        "full": [[1, 1, 1], [1, 1, 1]],
        "causal": [[1, 1, 0], [1, 1, 1]],
        "inverse-causal": [[1, 1, 1], [0, 1, 1]],
        "bi-causal": [[1, 1, 0], [0, 1, 1]],
    }


@given(drawn)
def test_keys_of_a_query_and_queries_of_a_key(mask: tuple[int, tuple[MaskRange, ...]]) -> None:
    n, ranges = mask
    layer, seen = Workload(n, heads=1, ranges=ranges), seen_in(ranges, n)
    assert layer.ranges == ranges
    for at in range(n):
        assert sorted(layer.keys_of(at).tolist()) == np.flatnonzero(seen[at]).tolist()
        assert sorted(layer.queries_of(at).tolist()) == np.flatnonzero(seen[:, at]).tolist()


@given(drawn, st.integers(1, 3), st.data())
def test_segments_have_each_pair_once_and_no_other(
    mask: tuple[int, tuple[MaskRange, ...]], stride: int, data: st.DataObject
) -> None:
    n, ranges = mask
    rows, keys = (
        [each for each in data.draw(runs(stride)) if each.position + stride * (each.length - 1) < n] for _ in range(2)
    )
    assume(rows and keys)
    slices = Workload(n, heads=1, ranges=ranges).slices
    sides = [_renumbered(each) for each in (rows, keys)]
    seen = np.zeros([sum(each.length for each in side) for side in sides], dtype=np.int64)
    for of_queries, of_keys, (queries, count, low, high) in range_segments(*sides, slices, stride):
        distance = np.arange(queries)[:, None] - np.arange(count)
        places = [[at for each in ranges for at in each] for ranges in (of_queries, of_keys)]
        seen[np.ix_(*places)] += (low <= distance) & (distance <= high)
    expected = seen_in(ranges, n)[np.ix_(*(positions_of(each, stride) for each in sides))]
    assert (seen == expected).all()


def _renumbered(rows: list[Rows]) -> list[Rows]:
    """The same runs, of which each begins at the row where the one before it ends."""
    first = np.cumsum([0, *(each.length for each in rows)]).tolist()
    return [each._replace(first=at) for each, at in zip(rows, first, strict=False)]


@given(drawn, st.integers(1, 3), st.data())
def test_pairs_of_runs_are_counted(mask: tuple[int, tuple[MaskRange, ...]], stride: int, data: st.DataObject) -> None:
    n, ranges = mask
    run = st.integers(0, n - 1).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(1, 1 + (n - 1 - start) // stride))
    )
    queries, keys = (data.draw(st.lists(run, min_size=1, max_size=4)) for _ in range(2))
    slices, seen = Workload(n, heads=1, ranges=ranges).slices, seen_in(ranges, n)
    columns = [tuple(np.array(side).T) for side in (queries, keys)]
    found = pairs_of_runs(slices, columns[0], columns[1], stride)
    for row, column in np.ndindex(found.shape):
        at = [start + stride * np.arange(count) for start, count in (queries[row], keys[column])]
        assert found[row, column] == seen[np.ix_(*at)].sum()


@given(st.integers(1, 10), st.data())
def test_what_is_refused_has_a_pair_twice_or_a_query_without_keys(n: int, data: st.DataObject) -> None:
    ends = st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda each: each[0] < each[1])
    kinds = st.sampled_from(["full", "causal", "inverse-causal", "bi-causal"])
    ranges = data.draw(st.lists(st.builds(MaskRange, ends, ends, kinds), min_size=1, max_size=4))
    times = sum(seen_in([each], n).astype(int) for each in ranges)
    wrong = "attends to no key" if not times.any(axis=1).all() else ""
    wrong = "pairs of queries and keys in common" if times.max() > 1 else wrong
    with pytest.raises(WorkloadError, match=wrong) if wrong else nullcontext():
        check_ranges(ranges, n)


@given(drawn, st.integers(1, 4), st.sampled_from(sorted(LAYOUTS)))
def test_layouts_have_the_lengths_of_a_layer_without_ranges(
    mask: tuple[int, tuple[MaskRange, ...]], world_size: int, name: str
) -> None:
    n, ranges = mask
    layer = Workload(n, heads=1, ranges=ranges)
    layout, plain = (layout_named(name, each, world_size) for each in (layer, Workload(n, heads=1, mask="full")))
    assert layout.spans == plain.spans
    held = np.concatenate([layout.positions(rank) for rank in range(world_size)])
    assert sorted(held.tolist()) == list(range(n))


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_have_about_as_many_pairs(world_size: int, name: str) -> None:
    """The busiest rank has at most 3 % more than the mean, where chunks of the sequence in order have up to 120 %."""
    scale = 64
    ranges = [MaskRange((scale * q[0], scale * q[1]), (scale * k[0], scale * k[1]), kind) for q, k, kind in ONE_OF_EACH]
    n = 70 * scale
    layer = Workload(n, heads=1, ranges=ranges)
    layout, of_query = layout_named(name, layer, world_size), seen_in(ranges, n).sum(axis=1)
    pairs = [of_query[layout.positions(rank)].sum() for rank in range(world_size)]
    assert max(pairs) <= 1.03 * np.mean(pairs)


def test_ranges_are_a_text_or_tuples() -> None:
    text = ", ".join(map(str, ONE_OF_EACH))
    assert parse_ranges(text) == ONE_OF_EACH
    given_as = [text, ONE_OF_EACH, [(list(each.queries), list(each.keys), each.kind) for each in ONE_OF_EACH]]
    assert len({Workload(70, heads=1, ranges=each) for each in given_as}) == 1
    assert Workload(4, heads=1, ranges="0:4/0:4").ranges == (((0, 4), (0, 4), "full"),)
    assert Workload(4, heads=1, ranges="0:4/0:4").mask == "ranges"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranges": "0:8/0:8,4:5/2:3"}, "ranges 0 and 1: 0:8/0:8/full and 4:5/2:3/full have pairs"),
        ({"ranges": "0:6/0:8"}, "ranges: query 6 attends to no key"),
        ({"ranges": "0:8/0:4/causal"}, "ranges: query 0 attends to no key"),
        ({"ranges": "0:9/0:8"}, "range 0: 0:9/0:8/full, expected positions within 0:8"),
        ({"ranges": "0:8/3:3"}, "range 0: keys 3:3, expected a start of 0 or more and a later end"),
        ({"ranges": [((-1, 8), (0, 8))]}, "range 0: queries -1:8, expected a start of 0 or more"),
        ({"ranges": "-1:8/0:8"}, "position of range 0 '-1': expected a whole number, 0 or more"),
        ({"ranges": "0:8/0:8/casual"}, "range 0: unknown kind 'casual', did you mean 'causal'?"),
        ({"ranges": "0-8"}, "range 0: '0-8', expected QUERIES/KEYS"),
        ({"ranges": []}, "0 ranges, expected 1 to 4096"),
        ({"ranges": [(0, 8)]}, "range 0: queries 0, expected two whole numbers"),
        ({"ranges": [((0, 8.0), (0, 8))]}, "range 0: queries (0, 8.0), expected two whole numbers"),
        ({"ranges": "0:8/0:8", "mask": "full"}, "ranges beside the mask full"),
        ({"ranges": "0:8/0:8", "window": 3}, "ranges beside window"),
        ({"ranges": "0:8/0:8", "documents": (4, 4)}, "ranges beside documents"),
        ({"ranges": "0:8/0:8", "cached_keys": 2}, "ranges beside cached keys"),
        ({"ranges": "0:8/0:8", "kind": "linear"}, "ranges of linear attention"),
        ({"mask": "ranges"}, "mask 'ranges' without ranges"),
    ],
)
def test_what_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TaspLabError, match="^" + re.escape(message)):
        replace(Workload(8, heads=1), **fields)  # type: ignore[arg-type]
