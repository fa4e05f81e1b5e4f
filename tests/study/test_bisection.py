"""Bisection finds where a state ends, on any lattice, with a logarithm of evaluations."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.study.find.bisection import bisected, changes


@given(st.integers(2, 10_000), st.data())
def test_the_one_change_of_a_threshold_is_found_exactly(count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count - 1))
    called: list[int] = []

    def state(index: int) -> bool:
        called.append(index)
        return index >= threshold

    found = changes(range(1, count + 1), [0, count - 1], state)
    assert [(each.low, each.high, each.before, each.after) for each in found] == [
        (threshold - 1, threshold, False, True)
    ]
    assert len(called) == len(set(called)) <= 2 + math.ceil(math.log2(count))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_all_changes_are_found_where_each_piece_is_scanned(lengths: list[int], states: list[int]) -> None:
    """Of a state that is constant over pieces, whatever their order, if each of them has a scanned index."""
    pieces = [state for state, length in zip(states, lengths, strict=False) for _ in range(length)]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    scan = sorted({*starts, len(pieces) - 1})
    found = changes(range(1, len(pieces) + 1), scan, lambda index: pieces[index])
    expected = [(low, high, pieces[low], pieces[high]) for low, high in pairwise(range(len(pieces)))
                if pieces[low] != pieces[high]]  # fmt: skip
    assert [(each.low, each.high, each.before, each.after) for each in found] == expected


@given(st.integers(1, 200), st.integers(1, 200))
def test_two_changes_between_neighbours_are_both_found(first: int, second: int) -> None:
    """From one state to a third, through a second one that was not scanned."""
    low, high = sorted((first, first + second))
    found = changes(range(1, high + 3), [0, high + 1], lambda index: (index >= low) + (index >= high))
    assert [(each.low, each.high) for each in found] == [(low - 1, low), (high - 1, high)]
    assert [(each.before, each.after) for each in found] == [(0, 1), (1, 2)]


@given(st.integers(2, 500), st.floats(0.001, 0.5))
def test_a_tolerance_ends_the_bisection(threshold: int, tolerance: float) -> None:
    values = [1.01**index for index in range(501)]
    low, high = bisected(values, 0, 500, lambda index: index < threshold, tolerance)
    assert low < threshold <= high
    assert high - low == 1 or values[high] <= values[low] * (1 + tolerance)


def test_what_has_no_state_is_left_out() -> None:
    """A schedule that does not apply everywhere: the change is between the values at which it does."""
    states = [0, 0, None, None, 1, 1]
    found = changes(range(1, 7), [0, 1, 2, 3, 4, 5], lambda index: states[index])
    assert [(each.low, each.high) for each in found] == [(1, 4)]
    assert changes(range(1, 7), range(6), lambda index: None) == []
