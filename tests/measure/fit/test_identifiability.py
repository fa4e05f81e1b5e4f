"""Identifiability of parameters from effects whose combinations are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.measure.fit.robust_fit import COLLINEAR, directions, effects_at, not_identifiable, reason

NAMES = ("a", "b", "c")


def orthogonal(seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Three orthogonal columns of length 1."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(8, 3)))[0]


@given(st.integers(0, 10**6), st.lists(st.floats(0.01, 100), min_size=3, max_size=3))
def test_independent_effects_are_identifiable_whatever_their_size(seed: int, sizes: list[float]) -> None:
    assert not not_identifiable(NAMES, orthogonal(seed) * np.array(sizes))


@given(st.integers(0, 10**6), st.permutations(range(3)), st.floats(0.5, 2), st.floats(0.5, 2))
def test_of_parameters_that_act_together_the_last_is_named_with_the_others(
    seed: int, order: list[int], one: float, two: float
) -> None:
    effects = orthogonal(seed)
    effects[:, 2] = one * effects[:, 0] + two * effects[:, 1]
    names = [NAMES[index] for index in order]
    (name, why), *others = not_identifiable(names, effects[:, order]).items()
    assert not others
    assert name == names[-1]
    assert why == f"predicted times depend only on a combination of it with {names[0]!r} and {names[1]!r}"


@pytest.mark.parametrize(("distance", "is_identifiable"), [(5 * COLLINEAR, True), (COLLINEAR / 5, False)])
def test_the_fit_and_the_choice_before_it_decide_alike(distance: float, is_identifiable: bool) -> None:
    """Two columns at an angle above or below the tolerance."""
    effects = np.array([[1.0, 1.0], [0.0, distance]])
    assert bool(not_identifiable("ab", effects)) != is_identifiable
    assert [bool(reason("ab", index, directions(effects))) for index in (0, 1)] == [not is_identifiable] * 2


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=2))
def test_effects_are_the_exponents_of_a_power_law(exponents: list[float]) -> None:
    effects = effects_at(lambda logarithms: np.array([logarithms @ exponents]), np.zeros(2))
    assert effects[0] == pytest.approx(exponents, abs=1e-9)
