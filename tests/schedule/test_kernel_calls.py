"""Bands against brute force over their pairs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasp_lab.schedule.calls import Calls
from tasp_lab.workload.kernel_shapes import clip_band, pairs_in_band

sizes = st.integers(1, 9)
limits = st.integers(-12, 12)
Band = tuple[int, int, int, int]
bands = st.tuples(limits, limits, sizes, sizes)


def pairs(low: int, high: int, queries: int, keys: int) -> set[tuple[int, int]]:
    return {(i, j) for i in range(queries) for j in range(keys) if low <= i - j <= high}


@given(bands)
@example((-(10**9), 10**9, 9, 1))
@example((3, 2, 9, 9))
def test_a_band_holds_as_many_pairs_as_can_be_counted(band: Band) -> None:
    assert pairs_in_band(*band).item() == len(pairs(*band))


@given(limits, limits, st.integers(0, 5), st.integers(0, 5))
def test_without_queries_or_keys_there_are_no_pairs(low: int, high: int, queries: int, keys: int) -> None:
    assert pairs_in_band(low, high, queries, keys).item() == len(pairs(low, high, queries, keys))


@given(bands)
def test_clipping_keeps_every_pair(band: Band) -> None:
    low, high, queries, keys = band
    clipped_low, clipped_high = (limit.item() for limit in clip_band(low, high, queries, keys))
    assert pairs(clipped_low, clipped_high, queries, keys) == pairs(low, high, queries, keys)


@given(bands)
def test_a_clipped_band_is_empty_exactly_when_low_exceeds_high(band: Band) -> None:
    low, high = clip_band(*band)
    assert (low > high) == (not pairs(*band))


@given(sizes, sizes, limits, limits, limits, limits)
def test_clipped_bands_are_equal_exactly_when_their_pairs_are(
    queries: int, keys: int, low: int, high: int, other_low: int, other_high: int
) -> None:
    """So comparing limits compares masks; of empty bands there are many."""
    one, other = (low, high, queries, keys), (other_low, other_high, queries, keys)
    if pairs(*one):
        same = [limit.item() for limit in clip_band(*one)] == [limit.item() for limit in clip_band(*other)]
        assert same == (pairs(*one) == pairs(*other))


@given(st.lists(bands, min_size=1, max_size=20))
def test_arrays_are_taken_element_by_element(drawn: list[Band]) -> None:
    columns = [np.array(column) for column in zip(*drawn, strict=True)]
    assert pairs_in_band(*columns).tolist() == [len(pairs(*band)) for band in drawn]
    clipped = np.stack(clip_band(*columns), axis=1)
    assert clipped.tolist() == [[limit.item() for limit in clip_band(*band)] for band in drawn]


@given(st.integers(1, 2**31), st.integers(1, 2**31))
def test_the_longest_sequences_fit_into_64_bits(queries: int, keys: int) -> None:
    """All pairs, and the causal ones: queries x keys, and of a square half of it with the diagonal."""
    assert pairs_in_band(-keys, queries, queries, keys).item() == queries * keys
    assert pairs_in_band(0, queries, queries, queries).item() == Fraction(queries * (queries + 1), 2)


def test_the_arrays_of_calls_cannot_be_changed() -> None:
    calls = Calls.of("attend", [(0, [[4], [0, 1]], [0, 1])])
    for values in (calls.rank, calls.params, *(operand.block for operand in calls.operands)):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 9
