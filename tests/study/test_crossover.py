"""Crossovers of two formulas are where they are equal, with the interval that their spread gives."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.study.find.crossover import crossover
from tasp_lab.study.find.lattice import TOLERANCE, lattice
from tests.support.contests import by_ratio, contest

SCAN = [2**power for power in range(10, 21)]
VALUES = lattice("seq", SCAN, multiple=16)
INDICES = [VALUES.index(each) for each in SCAN]
ROOT_2 = math.sqrt(2)
NORMAL_95 = 1.6448536269514722


@given(st.floats(1100, 1e6), st.floats(0.1, 2))
def test_one_crossing_is_found_to_two_percent(crossing: float, power: float) -> None:
    """Times whose ratio is a power of the length: the first schedule wins above."""
    one = contest(*by_ratio(lambda seq: power * math.log(seq / crossing)), VALUES)
    found = crossover(one, INDICES)
    assert [(each.before, each.after) for each in found.crossings] == [("second", "first")]
    at = found.crossings[0]
    assert at.last <= crossing <= at.value
    assert at.value <= at.last * (1 + TOLERANCE)
    between = VALUES.index(524288 * 2) - VALUES.index(524288)
    assert found.evaluated <= 2 * (len(SCAN) + math.ceil(math.log2(between)))


@given(st.floats(0, 2 * math.pi))
def test_all_crossings_of_a_wave_are_found(phase: float) -> None:
    """sin(pi / 2 log2(seq) + phase) has its zeros two octaves apart, so that every one lies between scanned values."""
    one = contest(*by_ratio(lambda seq: math.sin(math.pi / 2 * math.log2(seq) + phase)), VALUES)
    zeros = [2 ** ((number * math.pi - phase) / (math.pi / 2)) for number in range(-2, 20)]
    inside = [zero for zero in zeros if SCAN[0] * 1.001 < zero < SCAN[-1] / 1.001]
    if any(abs(math.log2(zero) - round(math.log2(zero))) < 1e-3 for zero in zeros):
        return  # a zero on a scanned value is a tie there
    found = crossover(one, INDICES).crossings
    assert len(found) == len(inside)
    assert all(each.last <= zero <= each.value for each, zero in zip(found, inside, strict=True))


@given(st.floats(0.01, 0.3))
def test_a_margin_is_where_the_lead_falls_below_it(margin: float) -> None:
    """A lead that shrinks like 1 / length ends at the margin, and the other schedule never leads."""
    one = contest(*by_ratio(lambda seq: math.log1p(2048 / seq)), VALUES, margin)
    found = crossover(one, INDICES)
    assert [(each.before, each.after) for each in found.crossings] == [("first", "neither")]
    at = found.crossings[0]
    assert at.last * (1 - 1e-9) <= 2048 / margin <= at.value * (1 + 1e-9)


@given(st.floats(5000, 200_000), st.floats(0.02, 0.2))
def test_the_interval_is_where_the_spread_may_turn_the_order(crossing: float, own: float) -> None:
    """Of a ratio seq / crossing with normal errors of its logarithm: the crossing times exp(1.645 sqrt(2) own)."""
    one = contest(*by_ratio(lambda seq: math.log(seq / crossing)), VALUES, own=own)
    found = crossover(one, INDICES)
    factor = math.exp(NORMAL_95 * ROOT_2 * own)
    at = found.crossings[0]
    assert at.low is not None
    assert at.high is not None
    assert at.low <= crossing / factor * 1.0001 <= at.low * (1 + TOLERANCE) * 1.0002
    assert at.high >= crossing * factor * 0.9999 >= at.high / (1 + TOLERANCE) * 0.9998


def test_an_interval_beyond_the_axis_is_open() -> None:
    one = contest(*by_ratio(lambda seq: math.log(seq / 1500)), VALUES, own=0.3)
    at = crossover(one, INDICES).crossings[0]
    assert at.low is None
    assert at.high is not None
    everywhere = contest(*by_ratio(lambda seq: math.log(seq / 32768) / 20), VALUES, own=0.3)
    at = crossover(everywhere, INDICES).crossings[0]
    assert at.low is at.high is None


@pytest.mark.parametrize(
    ("ratio", "own", "verdict"),
    [
        (1.5, None, "first"),
        (1 / 1.5, None, "second"),
        (1.0, None, "neither"),
        (1.1, 0.3, "too close"),
        (4.0, 0.3, "first"),
    ],
)
def test_what_does_not_cross_has_a_verdict(ratio: float, own: float | None, verdict: str) -> None:
    found = crossover(contest(*by_ratio(lambda seq: math.log(ratio)), VALUES, own=own), INDICES)
    assert (found.verdict, found.crossings) == (verdict, ())
    assert found.speedups == pytest.approx((ratio, ratio))
    assert found.evaluated == 2 * len(SCAN)


def test_what_binds_is_told_on_both_sides() -> None:
    at = crossover(contest(*by_ratio(lambda seq: math.log(seq / 4096.5)), VALUES), INDICES).crossings[0]
    assert at.binds_below == ("latency of one", "latency of two")
    assert at.binds_above == ("compute of one", "compute of two")


def test_a_schedule_that_applies_nowhere_says_why() -> None:
    nowhere = contest(*by_ratio(lambda seq: 0.0), VALUES)
    nowhere.evaluate = lambda point: {"status": "does not apply", "error": "32 heads, expected a multiple of 5"}
    found = crossover(nowhere, INDICES)
    assert (found.verdict, found.reason) == ("does not apply", "one: 32 heads, expected a multiple of 5")
