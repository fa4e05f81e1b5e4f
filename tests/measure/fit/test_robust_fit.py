"""Fits to data whose truth is known: what is found, how sure it is, and what is said to be unknown."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError
from tasp_lab.measure.fit.robust_fit import WIDEST_INTERVAL, Estimate, fit
from tests.support.selection import fifth

SIZES = np.geomspace(1e3, 1e10, 15)
TRUTH = np.array([2e-5, 4e11])
START = {"latency_s": 1e-6, "bandwidth": 1e10}


def line(parameters: FloatArray, sizes: FloatArray = SIZES) -> FloatArray:
    """A latency and a bandwidth: the time of one message."""
    times: FloatArray = parameters[0] + sizes / parameters[1]
    return times


def noisy(times: FloatArray, seed: int, deviation: float = 0.05) -> FloatArray:
    noise: FloatArray = np.exp(deviation * np.random.default_rng(seed).standard_normal(len(times)))
    return times * noise


def values(found: dict[str, Estimate]) -> list[float]:
    return [parameter.value for parameter in found.values()]


def whys(found: dict[str, Estimate]) -> dict[str, str]:
    return {name: parameter.why for name, parameter in found.items() if not parameter.identifiable}


times_of = st.tuples(st.floats(1e-6, 1e-4), st.floats(1e10, 1e12))


@settings(max_examples=20)
@given(truth=times_of, start=times_of)
def test_exact_data_give_the_parameters_exactly_from_anywhere(
    truth: tuple[float, float], start: tuple[float, float]
) -> None:
    found = fit(line, line(np.array(truth)), dict(zip(START, start, strict=True)))
    assert values(found) == pytest.approx(truth, rel=1e-6)
    assert not whys(found)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), unit=st.floats(1e-3, 1e3), order=st.permutations(range(15)))
def test_units_and_the_order_of_points_and_parameters_do_not_matter(seed: int, unit: float, order: list[int]) -> None:
    measured = noisy(line(TRUTH), seed)
    plain = fit(line, measured, START)
    other = fit(
        lambda parameters: unit * line(parameters[::-1], SIZES[order]),
        unit * measured[order],
        dict(reversed(START.items())),
    )
    for name in START:
        one, two = plain[name], other[name]
        assert (two.value, two.low, two.high) == pytest.approx((one.value, one.low, one.high), rel=1e-3)


@pytest.mark.parametrize(("points", "deviation"), [(5, 0.05), (15, 0.02), (15, 0.2)])
def test_intervals_hold_the_truth_as_often_as_they_say(points: int, deviation: float) -> None:
    """Of 200 fits about 190 hold the truth, of 40 about 38.

    Fewer or more than chance allows once in 10,000 would be a wrong claim.
    """
    sizes, fits = np.geomspace(1e3, 1e10, points), fifth(200)
    model = lambda parameters: line(parameters, sizes)  # noqa: E731
    found = [fit(model, noisy(model(TRUTH), seed, deviation), START) for seed in range(fits)]
    least, most = binom.ppf([1e-4, 1 - 1e-4], fits, 0.95)
    for index, name in enumerate(START):
        held = sum(one[name].low <= TRUTH[index] <= one[name].high for one in found)
        assert least <= held <= most


def test_outliers_pull_little_and_are_covered() -> None:
    """Every seventh time three times too long: the fit stays within the noise, where least squares is 15 % off."""
    held, fits = 0, 60
    for seed in range(fits):
        measured = noisy(line(TRUTH), seed)
        measured[seed % 7 :: 7] *= 3
        found = fit(line, measured, START)
        assert values(found) == pytest.approx(TRUTH, rel=0.15)
        held += sum(
            parameter.low <= truth <= parameter.high for parameter, truth in zip(found.values(), TRUTH, strict=True)
        )
    assert held >= 0.85 * 2 * fits


def test_a_parameter_without_effect_is_named_and_the_others_are_as_without_it() -> None:
    measured = noisy(line(TRUTH), 2)
    plain = fit(line, measured, START)
    found = fit(lambda parameters: line(parameters[:2]), measured, START | {"idle": 3.0})
    assert whys(found) == {"idle": "no predicted time depends on it"}
    assert (found["idle"].low, found["idle"].high) == (0, np.inf)
    assert values(found)[:2] == pytest.approx(values(plain), rel=1e-2)


def test_parameters_that_only_act_together_name_each_other_and_no_others() -> None:
    model: Callable[[FloatArray], FloatArray] = lambda p: p[0] / p[1] + SIZES / (p[2] * p[3])  # noqa: E731
    start = {"steps": 1e-6, "rate": 1.0, "channels": 2.0, "channel_bandwidth": 1e10, "idle": 1.0}
    found = fit(model, noisy(line(TRUTH), 3), start)
    assert whys(found) == {
        "steps": "predicted times depend only on a combination of it with 'rate'",
        "rate": "predicted times depend only on a combination of it with 'steps'",
        "channels": "predicted times depend only on a combination of it with 'channel_bandwidth'",
        "channel_bandwidth": "predicted times depend only on a combination of it with 'channels'",
        "idle": "no predicted time depends on it",
    }
    steps, rate, channels, bandwidth, _ = values(found)
    assert (steps / rate, channels * bandwidth) == pytest.approx(TRUTH, rel=0.15)


def test_a_latency_is_not_known_from_large_messages_alone() -> None:
    sizes = np.geomspace(1e9, 1e10, 15)
    found = fit(lambda parameters: line(parameters, sizes), noisy(line(TRUTH, sizes), 4), START)
    assert list(whys(found)) == ["latency_s"]
    latency = found["latency_s"]
    assert not latency.low <= latency.high <= WIDEST_INTERVAL * latency.low


def test_what_makes_up_for_an_error_is_named() -> None:
    """Two latencies of which one hardly shrinks with the size: their sum is known, not the share of each."""
    model: Callable[[FloatArray], FloatArray] = lambda p: p[0] * SIZES**-0.02 + p[1] + SIZES / p[2]  # noqa: E731
    found = fit(model, noisy(model(np.array([1e-5, 1e-5, 4e11])), 5), {"a": 3e-6, "b": 3e-6, "bandwidth": 1e10})
    assert set(whys(found)) == {"a", "b"}
    assert re.fullmatch(r"its 95 % interval spans a factor of \S+; 'b' can compensate for it", whys(found)["a"])
    assert found["bandwidth"].identifiable


def test_a_parameter_that_runs_away_is_named() -> None:
    found = fit(lambda p: p[0] ** 0.01 * SIZES, 10 * SIZES, {"exponent": 1.0})
    assert whys(found) == {"exponent": "it reached the limit of the search, a factor of 1e+06 from its start"}


def test_too_few_points_are_refused_in_one_line() -> None:
    message = "2 points cannot determine 2 parameters (latency_s, bandwidth), expected 3 or more"
    with pytest.raises(FitError, match=re.escape(message)):
        fit(line, np.array([1.0, 2.0]), START)
