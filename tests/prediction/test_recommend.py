"""A recommendation: of the schedules that are expected to be equally fast, the one that is preferred."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from tasp_lab.core.choices import Preference
from tasp_lab.prediction.compare import Ranking, compare
from tasp_lab.prediction.evaluate import answer
from tasp_lab.prediction.interval import DECIDED
from tasp_lab.prediction.question import Question
from tasp_lab.prediction.rank import TIE
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.workload.layer import Workload

LAYER = Workload(16384, heads=16, kv_heads=8, mask="causal")
NAMES = ["ulysses", "zigzag-ring-attention", "direct-attention", "kv-all-gather", "tasp", "usp:2x4"]


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return compare("h100-8", LAYER, NAMES)


@pytest.mark.parametrize("prefer", get_args(Preference))
def test_the_preferred_of_those_that_tie(ranking: Ranking, prefer: Preference) -> None:
    found = Recommendation(tuple(each for each in ranking.candidates if each.applies), prefer)
    least = min(found.expected_regrets)
    tied = [
        answer
        for answer, regret in zip(found.answers, found.expected_regrets, strict=True)
        if regret <= least + TIE
    ]  # fmt: skip
    assert found.answer in tied
    costs = {
        "memory": lambda answer: answer.buffer_bytes,
        "bytes": lambda answer: answer.link_bytes,
        "library": lambda answer: not found.shipped(answer),
        "time": lambda answer: answer.time_s,
    }
    assert costs[prefer](found.answer) == min(map(costs[prefer], tied))


def test_it_is_decided_by_the_expected_regret(ranking: Ranking) -> None:
    found = ranking.recommendation
    assert found is not None
    assert found.is_decided == (found.expected_regret <= DECIDED and not found.overturned)
    assert found.margin >= 0
    assert found.schedule in [each.schedule for each in found.answers]


def test_a_tie_is_open_only_if_others_may_be_faster(ranking: Ranking) -> None:
    """Of copies of one answer none is faster; one that is 10 % slower changes nothing beyond the errors of a pair."""
    found = ranking.recommendation
    assert found is not None
    copies = Recommendation(tuple(replace(found.answer) for _ in range(2)))
    assert copies.verdict == "decided"
    assert copies.odds.tied == [True, True]
    assert Recommendation(found.answers[:1]).odds.tied == [False]
    assert found.regret_beyond_near <= found.expected_regret
    ties = found.regret_beyond_near <= DECIDED and not found.overturned
    assert found.verdict == ("decided" if found.is_decided else "tie" if ties else "open")


def test_json_has_the_decision_and_the_regret_of_each_row(ranking: Ranking) -> None:
    document = json.loads(json.dumps(ranking.to_dict(), default=str))
    assert document["recommended"] == ranking.recommendation.schedule  # type: ignore[union-attr]
    regrets = {row["schedule"]: row["expected_regret"] for row in document["results"]}
    assert document["expected_regret"] == regrets[document["recommended"]]
    assert document["expected_regret"] <= min(regrets.values()) + TIE
    assert {"why", "margin", "is_decided", "switches", "network_share"} <= set(document)


def test_the_recommendation_comes_first(ranking: Ranking) -> None:
    assert ranking.parts()[0].startswith(f"Use {ranking.recommendation.schedule}: ")  # type: ignore


@pytest.mark.parametrize("sequence", [8192, 65536])
def test_other_kernels_that_stacks_run_are_tried(sequence: int) -> None:
    layer = Workload(sequence, heads=32, kv_heads=8, mask="causal")
    names = ["ulysses", "zigzag-ring-attention", "direct-kv-all-gather"]
    found = compare("h100-8", layer, names, passes="both").recommendation
    assert found is not None
    tried = {each.condition.removeprefix("--kernel "): each for each in found.otherwise}
    assert {"flash-attention-2", "triton"} <= set(tried)
    assert "cudnn" not in tried
    for kernel, other in tried.items():
        times_s = {each.schedule: float(answer(replace(each.question, kernel=kernel)).time_s) for each in found.answers}
        assert other.time_s == pytest.approx(times_s[found.schedule])
        assert other.fastest_s == pytest.approx(min(times_s.values()))
        assert times_s[other.schedule] == pytest.approx(other.fastest_s)
    assert not (found.is_decided and found.overturned)


def test_a_kernel_or_a_stack_that_is_named_is_not_doubted() -> None:
    for settings in ({"kernel": "cudnn"}, {"stack": "tasp-lab"}):
        found = compare("h100-8", LAYER, ["ulysses", "zigzag-ring-attention"], **settings).recommendation  # type: ignore
        assert found is not None
        assert found.otherwise == ()


def test_slower_networks_favour_who_sends_less() -> None:
    found = compare("h100-8", LAYER, ["ulysses", "zigzag-ring-attention"]).recommendation
    assert found is not None
    share, rival = found.slower
    assert share is not None
    assert 0 <= share <= 1
    if rival:
        (other,) = (each for each in found.answers if each.schedule == rival)
        assert other.link_bytes < found.answer.link_bytes


def test_it_holds_down_to_a_length_and_not_at_the_next_one() -> None:
    """Asked again at those lengths, `compare` finds the same times."""
    names = ["ulysses", "zigzag-ring-attention"]
    found = compare("h100-8", replace(LAYER, sequence=262144), names).recommendation
    assert found is not None
    length, below, faster = found.shorter
    assert length in (16384, 65536, 262144)

    def times(sequence: int) -> dict[str, float]:
        return {
            each.schedule: float(each.time_s)
            for each in compare("h100-8", replace(LAYER, sequence=sequence), names).candidates
        }

    at_length = times(length)
    assert at_length[found.schedule] <= (1 + DECIDED) * min(at_length.values())
    assert bool(faster) == (length > 16384)
    if faster:
        assert below == length // 4
        at_below = times(below)
        assert at_below[found.schedule] > (1 + DECIDED) * at_below[faster]


def test_a_schedule_object_is_not_built_for_other_lengths() -> None:
    built = answer(Question("h100-8", "ulysses", LAYER)).passes[0].schedule
    found = compare("h100-8", LAYER, [built, "zigzag-ring-attention"]).recommendation
    assert found is not None
    assert found.shorter == (None, 0, "")


def test_a_measurement_lowers_the_regret_of_an_open_question(ranking: Ranking) -> None:
    what, after = ranking.recommendation.to_measure  # type: ignore[union-attr]
    assert what
    assert 0 <= after <= ranking.recommendation.expected_regret  # type: ignore[union-attr]


def test_a_layer_of_one_position_is_recommended_a_schedule() -> None:
    """No shorter one is asked for."""
    found = compare("full-mesh:4", Workload(1, heads=4, mask="full"), ["ring-attention", "direct-attention", "ulysses"])
    assert found.recommendation is not None
    assert found.recommendation.shorter[0] == 1
