from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from sim.max_min import max_min_rates


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[Fraction]]:
    constraints = draw(st.integers(1, 6))
    capacity = draw(
        st.lists(
            st.fractions(Fraction(1, 4), Fraction(20), max_denominator=8), min_size=constraints, max_size=constraints
        )
    )
    paths = st.lists(st.integers(0, constraints - 1), min_size=1, max_size=3, unique=True).map(tuple)
    return draw(st.lists(paths, min_size=1, max_size=8)), capacity


@given(problems())
def test_every_flow_has_a_bottleneck(problem: tuple[list[tuple[int, ...]], list[Fraction]]) -> None:
    """The defining property: a full constraint under which no flow is faster; and no constraint is exceeded."""
    flows, capacity = problem
    rates, bottleneck = max_min_rates(flows, capacity)
    load = [sum(r for r, f in zip(rates, flows, strict=True) if c in f) for c in range(len(capacity))]
    assert all(used <= limit for used, limit in zip(load, capacity, strict=True))
    for flow, constraints in enumerate(flows):
        at = bottleneck[flow]
        assert at in constraints
        assert load[at] == capacity[at]
        assert rates[flow] == max(r for r, f in zip(rates, flows, strict=True) if at in f)


@given(problems())
def test_the_slowest_flows_are_as_fast_as_a_linear_program_can_make_them(
    problem: tuple[list[tuple[int, ...]], list[Fraction]],
) -> None:
    """maximise t subject to: the rates under each constraint sum to at most its capacity, every rate at least t."""
    flows, capacity = problem
    uses = np.array([[float(c in flow) for flow in flows] for c in range(len(capacity))])
    floor = np.hstack([-np.eye(len(flows)), np.ones((len(flows), 1))])
    found = linprog(
        c=[0.0] * len(flows) + [-1.0],
        A_ub=np.vstack([np.hstack([uses, np.zeros((len(capacity), 1))]), floor]),
        b_ub=[float(limit) for limit in capacity] + [0.0] * len(flows),
    )
    assert min(float(rate) for rate in max_min_rates(flows, capacity)[0]) == pytest.approx(found.x[-1], rel=1e-6)


def test_a_line_of_links() -> None:
    # One flow over links 0, 1, 2 and one flow on each: r0 + r1 <= 1, r0 + r2 <= 2, r0 + r3 <= 3, so
    # r0 = r1 = 1/2 by link 0, then r2 = 3/2 and r3 = 5/2 by what is left.
    rates, bottleneck = max_min_rates([(0, 1, 2), (0,), (1,), (2,)], [Fraction(1), Fraction(2), Fraction(3)])
    assert rates == [Fraction(1, 2), Fraction(1, 2), Fraction(3, 2), Fraction(5, 2)]
    assert bottleneck == [0, 0, 1, 2]


def test_ties_go_to_the_first_constraint() -> None:
    assert max_min_rates([(1, 0), (0, 1)], [Fraction(2), Fraction(2)])[1] == [0, 0]


def test_nothing_moves_without_flows() -> None:
    assert max_min_rates([], [Fraction(1)]) == ([], [])
