"""The part of a test of many combinations that `make test` runs."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.selection import least_covering

Cases = list[tuple[int, int, int]]


def values_of(cases: Cases, together: int) -> set[tuple[tuple[int, int], ...]]:
    """The values, or pairs of values, each with its position."""
    return {values for case in cases for values in combinations(enumerate(case), together)}


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), unique=True, min_size=1), st.integers(1, 2))
def test_everything_occurs_and_no_case_is_without_need(cases: Cases, together: int) -> None:
    """In the order of all cases; each case has something that those chosen before it lack, so there are not more."""
    chosen = least_covering(cases, together)
    assert chosen == [case for case in cases if case in chosen]
    assert values_of(chosen, together) == values_of(cases, together)
    assert len(chosen) <= len(values_of(cases, together))
    assert chosen == least_covering(cases, together)


def test_of_a_product_there_are_as_many_as_its_longest_side_or_its_largest_pair() -> None:
    every = [(a, b, c) for a in range(5) for b in range(7) for c in range(3)]
    assert len(least_covering(every, 1)) == 7
    assert len(least_covering(every, 2)) == 35
