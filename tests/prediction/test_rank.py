"""Ranking: no bound excludes what may win; neither the order of candidates nor who answers them changes a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.choices import Preference
from tasp_lab.core.workers import deal
from tasp_lab.prediction.paired import Rival, paired_errors
from tasp_lab.prediction.rank import TIE, Bar, CostsOf, Odds, Outcome, by_costs, choose, rank, ties


class Racer(NamedTuple):
    """A candidate with its bound, its time, and whether its time counts."""

    name: int
    bound_s: float
    time_s: float
    fits: bool = True


TIMES = st.floats(1e-6, 1e3)


@st.composite
def racers(draw: st.DrawFn) -> list[Racer]:
    found = []
    for name in range(draw(st.integers(0, 12))):
        time_s = draw(TIMES)
        found.append(Racer(name, time_s * draw(st.floats(0, 1)), time_s, draw(st.booleans())))
    return found


def lazily(chosen: Sequence[Racer], bar: Bar) -> Iterator[Outcome[Racer]]:
    """Bounds are known with the answer only, which is left out if its bound is above the bar already."""
    for each in chosen:
        if bar.excludes(each.bound_s):
            yield Outcome(each, bound_s=each.bound_s)
        else:
            yield Outcome(each, each.time_s if each.fits else inf, each.bound_s)


def simply(chosen: Sequence[Racer], _: Bar) -> list[Outcome[Racer]]:
    return [Outcome(each, each.time_s if each.fits else inf) for each in chosen]


def may_win(found: Sequence[Racer], margin: float) -> set[Racer]:
    least_s = min((each.time_s for each in found if each.fits), default=inf)
    return {each for each in found if each.bound_s <= margin * least_s}


@given(racers(), st.floats(1, 3), st.data())
def test_late_bounds_leave_exactly_what_may_win_in_any_order(
    found: list[Racer], margin: float, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(found))))
    size = data.draw(st.none() | st.integers(1, 5))
    ranked = rank(found, lazily, margin=margin, order=lambda each: order[each.name], size=size)
    assert set(ranked.answers) == may_win(found, margin)
    assert {*ranked.answers, *ranked.excluded} == set(found)
    assert (ranked.beyond, ranked.left) == ([], [])


@given(racers(), st.floats(1, 3), st.none() | st.integers(1, 5))
def test_early_bounds_never_prune_what_may_win(found: list[Racer], margin: float, size: int | None) -> None:
    ranked = rank(found, simply, margin=margin, bound=lambda each: each.bound_s, size=size)
    assert may_win(found, margin) <= set(ranked.answers)
    assert sorted([*ranked.answers, *ranked.beyond]) == sorted(found)
    fitting = [each for each in found if each.fits]
    if fitting:
        assert min(fitting, key=lambda each: each.time_s) in ranked.answers


@given(racers(), st.integers(1, 4), st.integers(1, 3))
def test_no_more_are_answered_than_asked_for_and_the_first_in_order_come_first(
    found: list[Racer], most: int, size: int
) -> None:
    rounds: list[int] = []

    def answer(chosen: Sequence[Racer], bar: Bar) -> list[Outcome[Racer]]:
        rounds.append(len(chosen))
        return simply(chosen, bar)

    ranked = rank(found, answer, order=lambda each: -each.time_s, most=most, size=size)
    assert ranked.answers == sorted(found, key=lambda each: -each.time_s)[:most]
    assert len(ranked.left) == max(0, len(found) - most)
    assert all(each <= size for each in rounds)


@given(racers(), TIMES)
def test_a_time_that_is_known_excludes_from_the_beginning(found: list[Racer], least_s: float) -> None:
    ranked = rank(found, simply, margin=1, bound=lambda each: each.bound_s, least_s=least_s)
    assert all(each.bound_s <= least_s for each in ranked.answers)


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_processes_change_nothing(jobs: int) -> None:
    found = [Racer(name, time_s / 2, time_s) for name, time_s in enumerate([9.0, 3.0, 8.0, 1.0, 5.0, 1.5, 2.5])]

    def one(racer: Racer, bar: Bar) -> Outcome[Racer]:
        (outcome,) = lazily([racer], bar)
        bar.lower(outcome.time_s)
        return outcome

    ranked = rank(found, lambda chosen, bar: deal(lambda each: one(each, bar), chosen, jobs), margin=1.1,
                  shared=jobs > 1)  # fmt: skip
    assert set(ranked.answers) == may_win(found, 1.1)


def test_an_exact_bound_at_the_margin_excludes_nothing() -> None:
    found = [Racer(0, 1.0, 1.0), Racer(1, 1.5, 2.0), Racer(2, 1.6, 2.0)]
    assert rank(found, lazily, margin=1.5).answers == found[:2]


@given(st.lists(st.floats(0, 0.05), min_size=1, max_size=8), st.data())
def test_the_chosen_is_the_preferred_of_those_within_the_tie_in_any_order(
    regrets: list[float], data: st.DataObject
) -> None:
    numbers = st.integers(0, 3).map(float)
    costs = [
        CostsOf(data.draw(numbers), data.draw(numbers), data.draw(st.booleans()), data.draw(numbers), f"{number}")
        for number in range(len(regrets))
    ]
    order = data.draw(st.permutations(range(len(regrets))))
    for prefer in get_args(Preference):
        number = choose(regrets, costs.__getitem__, prefer)
        assert regrets[number] <= min(regrets) + TIE
        tied = [place for place, tie in enumerate(ties(regrets)) if tie]
        assert by_costs(costs[number], prefer) == min(by_costs(costs[place], prefer) for place in tied)
        again = choose([regrets[place] for place in order], lambda each: costs[order[each]], prefer)
        assert order[again] == number


RIVALS = st.lists(
    st.builds(Rival, st.sampled_from(["tasp", "ulysses", "ring-attention", "usp:2x4"]), st.floats(0.5, 2),
              st.floats(0, 1), st.integers(1, 64).map(float)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(RIVALS)
def test_regrets_are_means_over_common_samples(rivals: list[Rival]) -> None:
    odds = Odds(rivals, "library", list(range(len(rivals))))
    assert odds.expected_regrets == pytest.approx(list(paired_errors().expected_regrets(rivals, "library")))
    assert odds.relative.min(axis=1) == pytest.approx(0)
    assert (odds.relative >= 0).all()
    for chosen in range(len(rivals)):
        assert odds.regret_beyond(0, chosen) == pytest.approx(odds.expected_regrets[chosen])
        assert all(after <= odds.expected_regrets[chosen] + 1e-12 for after, number in odds.measured(chosen)
                   if number is not None)  # fmt: skip


@given(RIVALS, st.integers(0, 3))
def test_rivals_that_are_alike_have_the_same_regret(rivals: list[Rival], copies: int) -> None:
    every = [*rivals, *[rivals[0]] * copies]
    odds = Odds(every, "library", [*range(len(rivals)), *[0] * copies])
    assert np.array_equal(odds.relative[:, len(rivals) :], odds.relative[:, :1].repeat(copies, axis=1))
    assert odds.relative[:, : len(rivals)] == pytest.approx(Odds(rivals, "library").relative)


def test_on_ideal_links_nothing_ties() -> None:
    rivals = [Rival("tasp", 1.0, 0.0), Rival("ulysses", 1.0, 0.0)]
    assert Odds(rivals, "exact").tied == [False, False]
    assert Odds(rivals, "exact").expected_regrets == [0.0, 0.0]
    assert Odds(rivals, "library", ["same", "same"]).tied == [True, True]
    assert Odds(rivals, "library", bounds=1).expected_regrets == Odds(rivals, "library").expected_regrets[:1]
