"""What factors do to answers: exact ends, and indices of Sobol of additive answers."""

from __future__ import annotations

import math

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.study.find.effects import Logs, Outcome, one_at_a_time, sobol
from tasp_lab.study.find.factors import Factor


def _factors(*widths: float) -> list[Factor]:
    return [Factor(f"c{number}", -width, width, "", "a table", False) for number, width in enumerate(widths)]


def test_one_at_a_time_has_both_ends_and_all_others_as_they_are() -> None:
    def outcome_of(logs: Logs) -> Outcome:
        first = math.exp(2 * logs.get("c0", 0.0) - logs.get("c1", 0.0))
        return Outcome({"one": first, "two": 1.2})

    base = outcome_of({})
    effects = one_at_a_time(_factors(0.1, 0.3), outcome_of)
    assert [(each.at_low.times_s["one"], each.at_high.times_s["one"]) for each in effects] == [
        (math.exp(-0.2), math.exp(0.2)),
        (math.exp(0.3), math.exp(-0.3)),
    ]
    assert [each.size(base, "one", None) for each in effects] == pytest.approx([0.2, 0.3])
    assert [each.size(base, "one", "two") for each in effects] == pytest.approx([0.2, 0.3])
    assert [each.changes_winner(base) for each in effects] == [True, True]  # exp(0.2) and exp(0.3) are more than 1.2


def test_sobol_indices_of_a_linear_answer() -> None:
    """Of a1 x1 + a2 x2 + a3 x3 with independent x of standard deviation s: shares of the variance are (a s)^2."""
    factors, weights = _factors(0.1, 0.2, 0.05), (1.0, 2.0, -3.0)
    found, _ = sobol(factors, lambda logs: sum(a * logs[f"c{k}"] for k, a in enumerate(weights)), 1024, 7)
    variances = [(weight * each.high) ** 2 for weight, each in zip(weights, factors, strict=True)]
    shares = [each / sum(variances) for each in variances]
    assert [each.first for each in found] == pytest.approx(shares, abs=0.02)
    assert [each.total for each in found] == pytest.approx(shares, abs=0.02)


def test_sobol_tells_an_interaction_from_what_a_factor_does_alone() -> None:
    """Of a product of two symmetric factors neither does anything alone, and both do all together."""
    found, _ = sobol(_factors(0.1, 0.1), lambda logs: logs["c0"] * logs["c1"], 1024, 7)
    assert [each.first for each in found] == pytest.approx([0, 0], abs=0.1)
    assert [each.total for each in found] == pytest.approx([1, 1], abs=0.1)


def test_equal_seeds_give_equal_indices() -> None:
    first, second, other = (
        sobol(_factors(0.1, 0.2), lambda logs: logs["c0"] + logs["c1"] ** 2, 16, seed)[0] for seed in (3, 3, 4)
    )
    assert first == second != other


def test_an_answer_that_nothing_moves_has_indices_of_zero() -> None:
    found, answers = sobol(_factors(0.1), lambda logs: 2.0, 8, 0)
    assert [(each.first, each.total) for each in found] == [(0.0, 0.0)]
    assert set(answers) == {2.0}
    assert sobol([], lambda logs: 2.0, 8, 0)[0] == []


@pytest.mark.parametrize("samples", [0, 1, 48])
def test_a_design_needs_a_power_of_two(samples: int) -> None:
    with pytest.raises(StudyError, match="power of two"):
        sobol(_factors(0.1), lambda logs: 1.0, samples, 0)
