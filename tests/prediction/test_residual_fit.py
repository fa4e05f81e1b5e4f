"""The width of an interval: fewer machines never make it narrower, and however few there are it says something."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.host import busy_s
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import NetworkKind
from tasp_lab.machines.sampling import NORMAL_95
from tasp_lab.prediction.interval import residual_interval
from tasp_lab.prediction.residuals import (
    ASSUMED_VARIANCE,
    ENOUGH_FREEDOM,
    HIDDEN,
    HIDDEN_SHARE,
    T_95,
    Group,
    Modelled,
    Reach,
    Regime,
    Size,
    Variance,
    between,
    fit,
    groups,
    layer_regime,
    regime_of,
)
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS
from tasp_lab.schedules.build import build_schedules
from tasp_lab.workload.layer import Workload

INSIDE = Regime("collective", "intra", "large", "documented", "modelled")
BETWEEN = replace(INSIDE, reach="inter")
LAYERS = Regime("layer", "intra", "exposed", "documented", "ideal")
SIZES: tuple[Size, ...] = ("small", "middle", "large")
NETWORKS, LIBRARIES = get_args(NetworkKind), get_args(Modelled)
WIDEST = {"modelled": 25, "ideal": 150}
"""The most that the high end may be over the low one, whatever source is left out; links alone say least. Of clouds
only one machine is left without Google's, and its all-to-all between racks takes four times as long as predicted."""

distances = st.floats(0.0, 1.5)
variances = st.floats(0.0, 0.5)


def _pairs(regime: Regime, pairs: int, distance: float, variance: float) -> list[Group]:
    """Machines that are as far above as below what was predicted."""
    means = [sign * distance for sign in (-1, 1) for _ in range(pairs)]
    return [Group(regime, f"source {number}", "machine", 10, mean, variance, 0.0) for number, mean in enumerate(means)]


def test_machines_that_agree_leave_the_spread_of_their_rows() -> None:
    """Student's t is for what few machines do not tell; rows there are many of."""
    found = fit([Group(INSIDE, key, "a", 10, 0.1, 0.04, 0.0) for key in "abc"], INSIDE)
    within = math.sqrt(30 * 0.04 / 27)
    assert found.middle == pytest.approx(math.exp(0.1))
    assert found.own == found.spread == pytest.approx(within)


@given(st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=8), st.integers(1, 4))
def test_few_machines_that_disagree_move_the_middle_less(means: list[float], times: int) -> None:
    """The middle has the sign of their mean and lies between it and 0; as many times the machines draw it less."""
    known = [Group(INSIDE, str(number), "machine", 10, mean, 0.01, 0.0) for number, mean in enumerate(means)]
    mean = sum(means) / len(means)
    once, often = (math.log(fit(known * count, INSIDE).middle) for count in (1, times))
    assert abs(once) <= abs(mean) + 1e-9
    assert once * mean >= -1e-12
    assert len(means) < ENOUGH_FREEDOM or abs(often) >= abs(once) - 1e-9


@given(st.integers(2, 8), distances, variances)
def test_fewer_machines_that_differ_as_much_never_make_it_narrower(
    pairs: int, distance: float, variance: float
) -> None:
    more, fewer = (fit(_pairs(INSIDE, count, distance, variance), INSIDE) for count in (pairs, pairs - 1))
    assert fewer.spread >= more.spread * (1 - 1e-12)


@given(distances, variances, st.integers(1, 4))
def test_one_machine_borrows_the_width_of_others(distance: float, variance: float, pairs: int) -> None:
    """Alone it says nothing about how machines differ: the variance is that of others, with four degrees of freedom."""
    others = _pairs(BETWEEN, pairs, distance, variance)
    alone = Group(INSIDE, "alone", "a", 10, 0.3, variance, 0.0)
    found = fit([*others, alone], INSIDE)
    lent, t_95 = between(others).value, T_95[ENOUGH_FREEDOM - 1] / NORMAL_95
    assert found.spread**2 == pytest.approx(2 * t_95**2 * lent + found.own**2)
    assert found.borrowed.startswith("a part of the width from all collectives")


def test_a_single_machine_in_all_has_an_assumed_width() -> None:
    found = fit([Group(INSIDE, "alone", "a", 1, 0.0, 0.0, 0.0)], INSIDE)
    assert found.spread == pytest.approx(math.sqrt(2 * ASSUMED_VARIANCE) * T_95[ENOUGH_FREEDOM - 1] / NORMAL_95)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-2, 2), variances), min_size=1, max_size=6))
def test_the_width_is_finite_and_bounded_by_what_was_measured(drawn: list[tuple[str, float, float]]) -> None:
    """At most 1.3 times the standard deviation between machines, twice in squares for the middle, beside rows."""
    known = [Group(INSIDE, key, key, 2, mean, variance, 0.0) for key, mean, variance in drawn]
    found, most = fit(known, INSIDE), T_95[ENOUGH_FREEDOM - 1] / NORMAL_95
    machines = max(between(known).value, ASSUMED_VARIANCE)
    rows = max(2 * variance for _, _, variance in drawn)
    assert found.spread**2 <= (most**2 * machines * 2 + rows) * (1 + 1e-9)


@given(variances, st.integers(0, 9), variances)
def test_a_variance_is_filled_up_to_enough_freedom(value: float, freedom: int, other: float) -> None:
    found = Variance(value, freedom).filled(other)
    assert found.freedom == max(freedom, ENOUGH_FREEDOM)
    assert min(value, other) * (1 - 1e-12) <= found.value <= max(value, other) * (1 + 1e-12)
    assert freedom < ENOUGH_FREEDOM or found.value == pytest.approx(value)


def test_every_interval_says_something_whatever_source_is_left_out() -> None:
    """Student's t for one degree of freedom made 27,000 of some; no regime is so unsure."""
    regimes = [
        *(
            Regime("collective", *rest)
            for rest in product(get_args(Reach), ("small", "middle", "large"), NETWORKS, LIBRARIES)
        ),
        *(Regime("layer", *rest) for rest in product(get_args(Reach), ("exposed",), NETWORKS, LIBRARIES)),
        HIDDEN,
        *{each.regime for each in groups() if each.regime.work in ("kernel", "eager call")},
    ]
    asked = [each for each in regimes if each.reach == "inter" or each.network == "documented"]  # others never are
    for regime, key in product(asked, ["", *{each.key for each in groups()}]):
        found = residual_interval(1.0, regime, key)
        assert 0 < found.low_s <= 1.0 <= found.high_s
        assert found.high_s / found.low_s < WIDEST[regime.library], f"{regime} without {key}"


@given(st.floats(1e-6, 10), st.lists(st.floats(0.5, 2.0), max_size=8), st.sampled_from(["", "Google Cloud"]))
@settings(max_examples=50)
def test_an_interval_holds_its_prediction_and_grows_with_it(time_s: float, factors: list[float], key: str) -> None:
    one, two = (residual_interval(t, INSIDE, key, np.array(factors) * t) for t in (time_s, 2 * time_s))
    assert one.low_s <= time_s <= one.high_s
    assert two.low_s == pytest.approx(2 * one.low_s)
    assert two.high_s == pytest.approx(2 * one.high_s)


def test_what_is_borrowed_is_said() -> None:
    """Layers by links alone were measured inside domains only, on three machines."""
    found = residual_interval(1.0, replace(LAYERS, reach="inter"), "")
    said = found.record["borrowed"]
    assert isinstance(said, str)
    assert f"{replace(LAYERS, reach='inter')} were not measured" in said
    assert residual_interval(1.0, INSIDE, "").record["borrowed"] is None


@pytest.mark.parametrize("name", ["h100-8", "h100-2x8", "b200-2x8", "l20-8-pcie"])
def test_layers_that_computing_bounds_are_one_regime_on_all_links(name: str) -> None:
    machine = load_machine(name)
    assert layer_regime(machine, HIDDEN_SHARE) == HIDDEN
    exposed = layer_regime(machine, math.nextafter(HIDDEN_SHARE, 1))
    assert (exposed.size, exposed.network) == ("exposed", machine.network)
    assert exposed.library == ("ideal" if machine.comm_library.is_of_links else "modelled")


def test_the_regime_of_a_layer_follows_from_its_time_beside_that_of_its_calls() -> None:
    machine = load_machine("h100-8")
    (schedule,) = build_schedules(
        "ring-attention", machine.topology, Workload(65536, heads=32, mask="full"), None, DEFAULT_OPTIONS
    )
    compute_s = max(map(float, busy_s(schedule, machine.compute)))
    shares = (0.0, 0.09, 0.11, 0.9)
    found = [regime_of(machine, schedule, compute_s / (1 - share)).size for share in shares]
    assert found == ["hidden", "hidden", "exposed", "exposed"]


def test_both_passes_have_the_regime_of_the_longer_one() -> None:
    passes = residual_interval(1.0, HIDDEN, ""), residual_interval(3.0, LAYERS, "")
    both = passes[0] + passes[1]
    assert both.time_s == 4.0
    assert both.residual == passes[1].residual == (passes[1] + passes[0]).residual
