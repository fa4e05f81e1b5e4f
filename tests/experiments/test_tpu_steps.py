"""MaxText's strategies on TPU v5p: the ring loses as it did when measured, with constants from elsewhere."""

from __future__ import annotations

import pytest

from experiments.tables.tpu_steps import STRATEGIES

MEASURED = {each.name: each for each in STRATEGIES if each.measured_s is not None}


@pytest.fixture(scope="module")
def predicted_s() -> dict[str, float]:
    """Steps by name, of two simulated layers; more change them by less than 1 %."""
    return {name: float(each.predict(layers=2).time_s) for name, each in MEASURED.items()}


@pytest.mark.parametrize("other", ["Ulysses", "all-gather"])
def test_the_ring_loses_to_the_others_by_a_factor_of_1_5_to_2_2(predicted_s: dict[str, float], other: str) -> None:
    """1.84 and 1.86 in AI-Hypercomputer/maxtext#4687. Which of the others is faster, by 0.8 % there, is a tie."""
    assert 1.5 <= predicted_s["ring"] / predicted_s[other] <= 2.2


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_steps_take_about_as_long_as_measured(predicted_s: dict[str, float], name: str) -> None:
    """Most published steps are within 15 % (docs/whole_steps.md)."""
    assert predicted_s[name] == pytest.approx(MEASURED[name].measured_s, rel=0.15)


def test_a_step_has_the_tokens_of_the_table(predicted_s: dict[str, float]) -> None:
    assert MEASURED["ring"].predict(layers=2).tokens == 2 * 2**20
