"""Values of axes, and filters."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import StudyError
from tasp_lab.study.axis import axis_values
from tasp_lab.study.where import Expression, Where


@given(st.integers(1, 10**6), st.integers(1, 10**9), st.integers(2, 9))
def test_a_geometric_axis_has_every_term_up_to_its_end(first: int, more: int, ratio: int) -> None:
    last = first + more
    values = axis_values("seq", f"geom({first}, {last}, {ratio})")
    assert values[0] == first
    assert values[-1] <= last < values[-1] * ratio
    assert all(after == before * ratio for before, after in itertools.pairwise(values))


def test_a_geometric_axis_of_fractions_has_its_end() -> None:
    values = axis_values("factor", "geom(1, 11.390625, 1.5)")
    assert values == tuple(float(Fraction(3, 2) ** power) for power in range(7))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "axis 'seq' is empty"),
        ("geom(8Ki, 1Mi, 1)", "never ends"),
        ("geom(8Ki, 1Mi, 0.5)", "never ends"),
        ("geom(8Ki, 1Mi, -2)", "never ends"),
        ("geom(0, 1Mi, 2)", "never ends"),
        ("geom(1Mi, 8Ki, 2)", "never ends"),
        ("geom(1, 10000000000, 1.0001)", "has 230,271 terms, expected at most 10,000"),
        ("geom(8Ki, 1Mi)", "expected geom(FIRST, LAST, RATIO)"),
        ("geom(8Ki, soon, 2)", "'soon', expected a number"),
        ("8k", "ambiguous"),
        ([[1]], "expected a text, a number"),
        ({"a": 1}, "expected a text, a number"),
    ],
)
def test_a_bad_axis_is_refused(values: object, said: str) -> None:
    with pytest.raises(StudyError, match=re.escape(said)):
        axis_values("seq", values)


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 10**4))
def test_a_filter_is_what_python_makes_of_it(seq: int, ranks: int, least: int) -> None:
    names = {"seq": seq, "ranks": ranks, "machine": "h100-8"}
    text = f"seq / ranks < {least} and not seq % 2 or machine in ['mi300x-8'] or -seq > 5"
    assert Expression.parse(text).value(names) == bool(seq / ranks < least and not seq % 2)


def test_a_point_is_kept_by_all_filters() -> None:
    where = Where.parse({"skip": "seq / ranks < 1Ki", "keep": ["seq > 1", "ranks < 99"]})
    where.check(["seq", "ranks"])
    assert not where.keeps({"seq": 8000, "ranks": 8})
    assert where.keeps({"seq": 8192, "ranks": 8})
    assert not where.keeps({"seq": 2**20, "ranks": 99})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"skp": "seq < 1"}, "unknown name 'skp', did you mean 'skip'?"),
        ({"skip": "seq <"}, "filter 'seq <'"),
        ({"skip": "__import__('os').system('true')"}, "expected names, numbers"),
        ({"skip": "seq.bit_length"}, "expected names, numbers"),
        ({"skip": "[x for x in seq]"}, "expected names, numbers"),
        ({"skip": ""}, "expected an expression"),
        ({"skip": 3}, "expected a filter"),
        ({"skip": "(" * 500 + "1" + ")" * 500}, "filter '((("),
    ],
)
def test_a_bad_filter_is_refused(section: dict[str, object], said: str) -> None:
    with pytest.raises(StudyError, match=re.escape(said)):
        Where.parse(section)


def test_values_that_do_not_fit_together_are_named() -> None:
    with pytest.raises(StudyError, match="filter 'machine < 3'"):
        Where.parse({"skip": "machine < 3"}).keeps({"machine": "h100-8"})
    with pytest.raises(StudyError, match="filter 'seq / ranks'"):
        Where.parse({"keep": "seq / ranks"}).keeps({"seq": 1, "ranks": 0})
