"""Decisions beside measurements: regrets, pairs and simple rules of hand-made questions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.measure.accuracy.decisions import RULES, Question, decision_figures
from tasp_lab.measure.accuracy.table_accuracy import Costs, MeasuredRow
from tasp_lab.measure.scores import regret_of
from tasp_lab.prediction.paired import PairedErrors

ERRORS = PairedErrors(own=0.05, family=0.02, exposed=0.2, steps=0.05, links_alone=4.0, pairs=0, sources=0)


def row(
    line: int, schedule: str, measured_s: float, predicted_s: float, sent: float = 1.0, steps: float = 1
) -> MeasuredRow:
    costs = Costs(0.1, sent, steps, 1e9, "library")
    return MeasuredRow(measured_s, predicted_s, shape={"line": line}, work=("h100-8",), schedule=schedule, costs=costs)


def question(*rows: MeasuredRow) -> Question:
    return Question("h100-8", "someone", rows, ERRORS)


THREE = question(
    row(3, "zigzag-ring-attention", 1.0, 1.2, sent=9),
    row(4, "ulysses", 1.5, 1.0, sent=2, steps=4),
    row(5, "usp:2x4", 1.2, 2.0, sent=5),
)


def test_the_regret_is_that_of_the_pick() -> None:
    assert THREE.pick == 1
    assert THREE.decision.regret == pytest.approx(0.5)
    assert decision_figures([THREE])["mean_regret"] == pytest.approx(0.5)


def test_simple_rules_pick_by_name_or_by_bytes() -> None:
    picks = {name: rule(THREE.ways) for name, rule in RULES.items()}
    assert picks == {"always ring": 0, "always Ulysses": 1, "always USP": 2, "least bytes": 1, "alpha-beta": 2}
    assert RULES["always USP"](THREE.ways[:2]) is None


def test_pairs_have_the_lines_of_their_rows() -> None:
    pairs = THREE.pairs
    assert [(pair.first, pair.second) for pair in pairs] == [(3, 4), (3, 5), (4, 5)]
    first = pairs[0]
    assert first.predicted_ratio == pytest.approx(1.2)
    assert first.measured_ratio == pytest.approx(1 / 1.5)
    assert first.probability_first_faster < 0.5
    assert not first.is_right


times = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=6)


@given(times)
def test_regrets_are_not_negative_and_someone_has_none(found: list[tuple[float, float]]) -> None:
    asked = question(*(row(line, f"s{line}", *each) for line, each in enumerate(found)))
    regrets = [regret_of(asked.measured_s, number) for number in range(len(found))]
    assert min(regrets) == 0
    assert asked.decision.regret in regrets


@given(times)
def test_perfect_predictions_have_no_regret_to_speak_of(found: list[tuple[float, float]]) -> None:
    exact = [row(line, f"s{line}", measured, measured) for line, (measured, _) in enumerate(found)]
    asked = question(*exact)
    # the shorter time has the smaller expected regret, so only rows that are alike may be confused
    assert asked.decision.regret <= 0.02
    assert all(pair.is_right or math.isclose(pair.measured_ratio, 1) for pair in asked.pairs)


def test_figures_of_no_questions_are_null() -> None:
    found = decision_figures([])
    assert (found["questions"], found["mean_regret"], found["brier"]) == (0, None, None)
