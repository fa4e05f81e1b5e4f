"""Rates that are balanced from change to change are those of progressive filling from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sim.array import max_min
from sim.array.event_queue import EventQueue
from sim.array.flows import LOGGED, Flows, begin, end, settle
from sim.array.max_min import LIMITED, Sharing, accept, fill, join, leave, rate_of
from sim.max_min import max_min_rates
from tasp_lab.core.arrays import Table
from tasp_lab.core.compiled import call, table

SLOTS, CONSTRAINTS, WIDTH = 8, 5, 3


class Demand(NamedTuple):
    """A class of flows: which constraints it passes, each so many times, and its limit."""

    path: dict[int, int]
    limit: Fraction | None


Change = tuple[int, Demand | None]
"""A slot, and the flow that joins there, or none: its flow leaves."""

few_numbers = st.integers(1, 4).map(Fraction) | st.fractions(Fraction(1, 2), Fraction(20), max_denominator=9)
paths = st.dictionaries(st.integers(0, CONSTRAINTS - 1), st.integers(1, 3), min_size=1, max_size=WIDTH)
demands = st.builds(Demand, paths, st.none() | few_numbers)
changes = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.none() | demands), min_size=1, max_size=4)


def passes_of(demand: Demand) -> Table:
    passes: Table = table(len(demand.path), constraint="i4", count="i4")
    passes[:] = list(demand.path.items())
    return passes


def limit_of(demand: Demand) -> float:
    return math.inf if demand.limit is None else float(demand.limit)


def sharing_of(capacity: Sequence[Fraction]) -> Sharing:
    bandwidths = np.array([float(each) for each in capacity])
    return Sharing.of(SLOTS, WIDTH, np.full(len(capacity), SLOTS), bandwidths)


def rates_of(sharing: Sharing, slots: Iterable[int]) -> list[float]:
    return [call(rate_of, sharing, slot, fast=False) for slot in slots]


def run(function: Callable[..., object], *arguments: object) -> None:
    call(function, *arguments, fast=False)


def change(sharing: Sharing, flows: dict[int, Demand], changed: Sequence[Change]) -> None:
    """Let flows leave and join, among those there are, and find the rates."""
    for slot, demand in dict(changed).items():
        if flows.pop(slot, None) is not None:
            run(leave, sharing, slot)
        if demand is not None:
            flows[slot] = demand
            run(join, sharing, slot, passes_of(demand), 0, len(demand.path), limit_of(demand))
    run(fill, sharing)
    run(accept, sharing)


def filled_from_scratch(flows: Sequence[Demand], capacity: Sequence[Fraction]) -> list[Fraction]:
    """The exact rates. A flow that passes a constraint n times is as n flows there, which must be as fast elsewhere.

    So there are as many copies of each constraint and flow as the least common multiple of all counts, in which each
    copy of a flow passes as many copies of a constraint as needed: a class, as `sim.array.symmetry` defines it.
    """
    copies = math.lcm(*(count for flow in flows for count in flow.path.values()))
    one_by_one = []
    for flow in flows:
        for copy in range(copies):
            used = [each * copies + (copy * n + k) % copies for each, n in flow.path.items() for k in range(n)]
            one_by_one.append(used)
    limits = [flow.limit for flow in flows for _ in range(copies)]
    rates, _ = max_min_rates(one_by_one, [each for each in capacity for _ in range(copies)], limits)
    return [Fraction(rate) for rate in rates[::copies]]


TWO_FOR_ONE = [[(2, Demand({0: 6}, None))], [(2, None), (0, Demand({0: 1}, Fraction(6))), (1, Demand({0: 1}, None))]]
"""Of 8, one flow has 6 x 4/3. Two come instead; the first alone could have its limit, beside the second each has 4."""


@example([Fraction(8)] * CONSTRAINTS, TWO_FOR_ONE)
@given(st.lists(few_numbers, min_size=CONSTRAINTS, max_size=CONSTRAINTS), st.lists(changes, min_size=1, max_size=12))
def test_rates_are_those_of_progressive_filling(capacity: list[Fraction], rounds: list[list[Change]]) -> None:
    sharing, flows = sharing_of(capacity), dict[int, Demand]()
    for changed in rounds:
        change(sharing, flows, changed)
        expected = filled_from_scratch(list(flows.values()), capacity) if flows else []
        assert rates_of(sharing, flows) == pytest.approx([float(each) for each in expected])
        _check_groups(sharing, flows, capacity)


@given(st.lists(few_numbers, min_size=CONSTRAINTS, max_size=CONSTRAINTS), st.lists(changes, min_size=1, max_size=12))
def test_rates_are_nearly_fair_where_many_share(capacity: list[Fraction], rounds: list[list[Change]]) -> None:
    sharing, flows, nearly = sharing_of(capacity), dict[int, Demand](), 0.1
    with patch.multiple(max_min, MANY=2, NEARLY=nearly):
        for changed in rounds:
            change(sharing, flows, changed)
            rates = dict(zip(flows, rates_of(sharing, flows), strict=True))
            load, fastest = [0.0] * CONSTRAINTS, [0.0] * CONSTRAINTS
            for slot, demand in flows.items():
                for each, count in demand.path.items():
                    load[each] += count * rates[slot]
                    fastest[each] = max(fastest[each], rates[slot])
            full = [float(most) for most in capacity]
            assert all(load[each] <= full[each] * (1 + nearly + 1e-9) for each in range(CONSTRAINTS))
            for slot, demand in flows.items():
                assert rates[slot] == limit_of(demand) or any(
                    load[each] >= full[each] * (1 - nearly - 1e-9)
                    and rates[slot] * (1 + nearly + 1e-9) >= fastest[each]
                    for each in demand.path
                )


def test_a_constraint_of_many_flows_is_balanced_once_it_is_off_by_a_thousandth() -> None:
    """101 flows share 101; one of them is held back elsewhere, where it has at first 0.9, then 0.88 and 1.76 / 3."""
    sharing = Sharing.of(110, 2, np.full(2, 110), np.array([101.0, 1.8]))
    for slot in range(max_min.MANY):
        run(join, sharing, slot, passes_of(Demand({0: 1}, None)), 0, 1, math.inf)
    run(join, sharing, 100, passes_of(Demand({0: 1, 1: 1}, None)), 0, 2, math.inf)
    found = []
    for slot, limit in ((101, math.inf), (102, 0.04), (103, math.inf)):
        run(join, sharing, slot, passes_of(Demand({1: 1}, None)), 0, 1, limit)
        run(fill, sharing)
        run(accept, sharing)
        found.append(rates_of(sharing, (0, 100)))
    expected = [1.001, 0.9], [1.001, 0.88], [(101 - 1.76 / 3) / 100, 1.76 / 3]
    assert found == [pytest.approx(each) for each in expected]


def _check_groups(sharing: Sharing, flows: dict[int, Demand], capacity: Sequence[Fraction]) -> None:
    """The group of a flow is a bottleneck: full, and no flow there is faster; or its own limit."""
    rates = dict(zip(flows, rates_of(sharing, flows), strict=True))
    for slot, demand in flows.items():
        group = int(sharing.flows["group"][slot])
        if group == LIMITED:
            assert rates[slot] == limit_of(demand)
            continue
        users = {each: other.path[group] for each, other in flows.items() if group in other.path}
        assert group in demand.path
        assert sum(rates[each] * count for each, count in users.items()) == pytest.approx(float(capacity[group]))
        assert rates[slot] == pytest.approx(max(rates[each] for each in users))


def test_a_constraint_that_no_change_reaches_is_not_looked_at() -> None:
    sharing = sharing_of([Fraction(4)] * CONSTRAINTS)
    for slot, number in enumerate([0, 0, 1, 1, 2]):
        run(join, sharing, slot, passes_of(Demand({number: 1}, None)), 0, 1, math.inf)
    run(fill, sharing)
    run(accept, sharing)
    run(leave, sharing, 0)
    run(fill, sharing)
    assert sharing.changed[: sharing.sizes[0]].tolist() == [0]
    assert rates_of(sharing, range(1, 5)) == [4, 2, 2, 4]


def test_numbers_that_are_equal_but_for_rounding_are_one_bottleneck() -> None:
    """1 flow fills a constraint of 0.1 + 0.2, and 3 of its class one of 0.9, so both are bottlenecks."""
    sharing = Sharing.of(1, 2, np.ones(2, dtype=np.int64), np.array([0.1 + 0.2, 0.9]))
    operations = table(1, due="f8", place="i4")
    operations["place"] = -1
    flows, queue = Flows.of(sharing, 4), EventQueue.of(operations)
    run(begin, flows, 0, passes_of(Demand({0: 1, 1: 3}, None)), 0, 2, math.inf, 0.3, 0.0)
    run(settle, flows, queue, 0.0)
    assert operations["due"].tolist() == pytest.approx([1.0])
    run(end, flows, 0, 1.0)
    assert flows.log[: flows.sizes[LOGGED]].tolist() == [(0, 0b11, 1.0)]
