"""Crossovers of two formulas are where they are equal, with the interval that their spread gives; one per group."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import StudyError
from tasp_lab.prediction.paired import Rival, Setting, paired_errors
from tasp_lab.study.axis import TOLERANCE, lattice
from tasp_lab.study.crossover import crossover, find_crossovers
from tasp_lab.study.point import Point, Row
from tasp_lab.workload.layer import Workload
from tests.support.comparisons import by_ratio, comparison

SCAN = [2**power for power in range(10, 21)]
VALUES = lattice("seq", SCAN, multiple=16)
INDICES = [VALUES.index(each) for each in SCAN]


@given(st.floats(1100, 1e6), st.floats(0.1, 2))
def test_one_crossing_is_found_to_two_percent(crossing: float, power: float) -> None:
    """Times whose ratio is a power of the length: the first schedule wins above."""
    one = comparison(*by_ratio(lambda seq: power * math.log(seq / crossing)), VALUES)
    found = crossover(one, INDICES)
    assert [(each["faster_below"], each["faster_above"]) for each in found["crossings"]] == [("two", "one")]
    at = found["crossings"][0]
    assert at["last"] <= crossing <= at["value"]
    assert at["value"] <= at["last"] * (1 + TOLERANCE)
    between = VALUES.index(524288 * 2) - VALUES.index(524288)
    assert one.evaluated <= 2 * (len(SCAN) + math.ceil(math.log2(between)))


@given(st.floats(0, 2 * math.pi))
def test_all_crossings_of_a_wave_are_found(phase: float) -> None:
    """sin(pi / 2 log2(seq) + phase) has its zeros two octaves apart, so that every one lies between scanned values."""
    one = comparison(*by_ratio(lambda seq: math.sin(math.pi / 2 * math.log2(seq) + phase)), VALUES)
    zeros = [2 ** ((number * math.pi - phase) / (math.pi / 2)) for number in range(-2, 20)]
    inside = [zero for zero in zeros if SCAN[0] * 1.001 < zero < SCAN[-1] / 1.001]
    if any(abs(math.log2(zero) - round(math.log2(zero))) < 1e-3 for zero in zeros):
        return  # a zero on a scanned value is a tie there
    found = crossover(one, INDICES)["crossings"]
    assert len(found) == len(inside)
    assert all(each["last"] <= zero <= each["value"] for each, zero in zip(found, inside, strict=True))


@given(st.floats(0.01, 0.3))
def test_a_margin_is_where_the_lead_falls_below_it(margin: float) -> None:
    """A lead that shrinks like 1 / length ends at the margin, and the other schedule never leads."""
    one = comparison(*by_ratio(lambda seq: math.log1p(2048 / seq)), VALUES, margin)
    found = crossover(one, INDICES)
    assert [(each["faster_below"], each["faster_above"]) for each in found["crossings"]] == [("one", None)]
    at = found["crossings"][0]
    assert at["last"] * (1 - 1e-9) <= 2048 / margin <= at["value"] * (1 + 1e-9)


@given(st.floats(5000, 200_000), st.sampled_from(["library", "links alone"]))
def test_the_interval_is_where_the_spread_may_turn_the_order(crossing: float, setting: Setting) -> None:
    """Of a ratio seq / crossing: the crossing times the ends of the interval of a ratio of equal times."""
    one = comparison(*by_ratio(lambda seq: math.log(seq / crossing)), VALUES, setting=setting)
    found = crossover(one, INDICES)
    _, factor = paired_errors().ratio(Rival("one", 1.0, 0.0), Rival("two", 1.0, 0.0), setting)
    at = found["crossings"][0]
    assert at["low"] is not None
    assert at["high"] is not None
    assert at["low"] <= crossing / factor * 1.0001 <= at["low"] * (1 + TOLERANCE) * 1.0002
    assert at["high"] >= crossing * factor * 0.9999 >= at["high"] / (1 + TOLERANCE) * 0.9998


def test_an_interval_beyond_the_axis_is_open() -> None:
    one = comparison(*by_ratio(lambda seq: math.log(seq / 1200)), VALUES, setting="links alone")
    at = crossover(one, INDICES)["crossings"][0]
    assert at["low"] is None
    assert at["high"] is not None
    everywhere = comparison(*by_ratio(lambda seq: math.log(seq / 32768) / 20), VALUES, setting="links alone")
    at = crossover(everywhere, INDICES)["crossings"][0]
    assert at["low"] is at["high"] is None


@pytest.mark.parametrize(
    ("ratio", "setting", "verdict"),
    [
        (1.5, "exact", "always one"),
        (1 / 1.5, "exact", "always two"),
        (1.0, "exact", "equal throughout"),
        (1.1, "links alone", "a tie throughout, one by prediction"),
        (1 / 1.1, "links alone", "a tie throughout, two by prediction"),
        (4.0, "links alone", "always one"),
    ],
)
def test_what_does_not_cross_has_a_verdict(ratio: float, setting: Setting, verdict: str) -> None:
    one = comparison(*by_ratio(lambda seq: math.log(ratio)), VALUES, setting=setting)
    found = crossover(one, INDICES)
    assert (found["verdict"], found["crossings"]) == (verdict, [])
    assert [found["speedup_from"], found["speedup_to"]] == pytest.approx([ratio, ratio])
    assert one.evaluated == 2 * len(SCAN)


def test_a_schedule_that_applies_nowhere_says_why() -> None:
    nowhere = comparison(*by_ratio(lambda seq: 0.0), VALUES)
    nowhere.evaluate = lambda point: {"status": "does not apply", "error": "32 heads, expected a multiple of 5"}
    found = crossover(nowhere, INDICES)
    assert found["verdict"] == "does not apply: one: 32 heads, expected a multiple of 5"


# ------------------------------------------------------------------------------------------ the groups of a study

SEQUENCES = [2**power for power in range(13, 21)]
CROSSING = {"h100-8": 24_000.0, "h100-2x8": 300_000.0, "mi300x-8": 5_000.0}
"""Where TASP and zigzag take equally long in these tests; the last one is below the study."""

BETWEEN = ("tasp", "zigzag-ring-attention")
FIND = {"along": "seq", "between": BETWEEN}


def _points(schedules: tuple[str, ...] = (*BETWEEN, "ulysses")) -> list[Point]:
    return [
        Point(machine, schedule, Workload(seq, heads=32, mask="full"), labels=(
            ("machine", machine), ("model", "llama-3-8b"), ("seq", seq), ("schedule", schedule)))
        for machine in CROSSING for seq in SEQUENCES for schedule in schedules
    ]  # fmt: skip


def _evaluate(point: Point) -> Row:
    """TASP gains below the crossing: its time is constant there and that of zigzag is not."""
    if point.schedule == "usp:5x5":
        return {"status": "does not apply", "error": "32 heads, expected a multiple of 5"}
    crossing = CROSSING[point.machine]
    time_s = 1.0 if point.schedule == "tasp" else (point.layer.sequence / crossing) ** -0.5
    return exact(time_s) | {"bottleneck": "compute" if point.layer.sequence > crossing else "link"}


def exact(time_s: float) -> Row:
    """A row on ideal links."""
    return {"status": "ok", "time_s": time_s, "exposed_s": 0.0, "setting": "exact"}


def groups(
    evaluate: Callable[[Point], Row] = _evaluate, points: Sequence[Point] | None = None, **find: object
) -> list[dict[str, Any]]:
    found: Any = find_crossovers(_points() if points is None else points, evaluate, {**FIND, **find})
    return list(found.to_dict()["groups"])


def test_every_group_has_its_own_crossing() -> None:
    """With only the labels that tell groups apart, and what binds below and above."""
    found = {group["labels"]["machine"]: group for group in groups()}
    assert [list(group["labels"]) for group in found.values()] == [["machine"]] * 3
    for machine in ("h100-8", "h100-2x8"):
        (crossing,) = found[machine]["crossings"]
        assert crossing["last"] <= CROSSING[machine] <= crossing["value"] <= crossing["last"] * 1.02
        assert (crossing["faster_below"], crossing["faster_above"]) == BETWEEN
        assert crossing["binds_below"] == dict.fromkeys(BETWEEN, "link")
        assert crossing["binds_above"] == dict.fromkeys(BETWEEN, "compute")
    assert [group["verdict"] for group in found.values()] == ["crosses", "crosses", "always zigzag-ring-attention"]


def test_the_table_has_what_json_has() -> None:
    found = find_crossovers(_points(), _evaluate, FIND)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()
    text = str(found)
    assert "always zigzag-ring-attention" in text
    assert "Ki" in text
    assert len(found.to_pandas()) == 3


def test_ends_that_are_given_replace_those_of_the_study() -> None:
    found = groups(**{"from": "1Ki", "to": 8192})
    assert [(group["from"], group["to"]) for group in found] == [(1024, 8192)] * 3
    assert [len(group["crossings"]) for group in found] == [0, 0, 1]


def test_a_factor_of_an_override_is_an_axis() -> None:
    """A machine whose time is 1 / factor of its NIC crosses another at the factor that their times give."""

    def evaluate(point: Point) -> Row:
        factor = float(dict(text.split("=x") for text in point.overrides).get("nic.bandwidth", 1))
        return exact(3.0 if point.schedule == "tasp" else 4.0 / factor)

    at = groups(evaluate, _points()[:3], along="nic.bandwidth", **{"from": "x0.25", "to": 4})[0]["crossings"][0]
    assert at["last"] <= 4 / 3 <= at["value"] <= at["last"] * 1.021


def test_an_override_that_a_machine_lacks_does_not_apply() -> None:
    """At factor 1 nothing is overridden, so that one value has times; one value is no axis."""

    def evaluate(point: Point) -> Row:
        if point.overrides:
            return {"status": "does not apply", "error": "full-mesh:4 has no NICs"}
        return exact(1.0 if point.schedule == "tasp" else 2.0)

    (found,) = groups(evaluate, _points()[:3], along="nic.bandwidth", **{"from": 0.5, "to": 2.0})
    assert found["verdict"] == "does not apply: tasp: full-mesh:4 has no NICs"


def test_a_schedule_with_the_values_of_axes_in_its_name() -> None:
    points = [
        Point(f"h100-{nodes}x8", f"usp:8x{nodes}" if split else "tasp", Workload(8192, heads=32, mask="full"),
              labels=(("machine", f"h100-{nodes}x8"), ("nodes", nodes)))
        for nodes in (1, 2, 4, 8) for split in (True, False)
    ]  # fmt: skip

    def evaluate(point: Point) -> Row:
        nodes = int(point.machine.removeprefix("h100-").removesuffix("x8"))
        assert point.schedule in ("tasp", f"usp:8x{nodes}")
        return exact(nodes if point.schedule == "tasp" else 4.5)

    at = groups(evaluate, points, along="nodes", between=("tasp", "usp:8x{nodes}"))[0]["crossings"][0]
    assert (at["last"], at["value"]) == (4, 5)


def test_a_schedule_that_applies_nowhere_is_told_with_its_reason() -> None:
    found = find_crossovers(_points(("tasp", "usp:5x5")), _evaluate, {"between": ("tasp", "usp:5x5")})
    assert "does not apply: usp:5x5: 32 heads, expected a multiple of 5" in str(found)
    assert found.to_dict()["groups"][0]["verdict"].startswith("does not apply")  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"along": "mask", "between": ["a", "b"]}, "'mask' is not numeric"),
        ({"along": "sek", "between": ["a", "b"]}, "unknown axis 'sek', did you mean 'seq'"),
        ({"between": ["tasp", "tasp"]}, "between 'tasp' and itself"),
        ({"between": ["tasp"]}, "1 given, expected two schedules"),
        ({}, "expected two schedules"),
        ({"between": "tasp"}, "'tasp', expected two schedules"),
        ({"between": ["a", "b"], "margin": "150%"}, "margin '150%': expected 0 or more and less than 1"),
        ({"between": ["a", "b"], "margin": -0.1}, "margin -0.1"),
        ({"between": ["a", "b"], "margin": "five"}, "margin 'five'"),
        ({"between": ["a", "b"], "from": "64Ki", "to": "8Ki"}, "the interval 65536 to 8192 is empty"),
        ({"between": ["a", "b"], "from": "8k"}, "ambiguous"),
        ({"along": "nic.bandwidth", "between": ["a", "b"], "from": "x0"}, "expected a factor more than 0"),
        ({"between": ["a", "b"], "margn": "5%"}, "unknown field 'margn', did you mean 'margin'"),
    ],
)
def test_an_impossible_question_is_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(StudyError, match=reason) as found:
        find_crossovers(_points(), _evaluate, given)
    assert "\n" not in str(found.value)


def test_a_schedule_that_the_study_lacks_and_an_axis_of_one_value() -> None:
    with pytest.raises(StudyError, match="unknown schedule 'tsap', did you mean 'tasp'"):
        groups(between=("tsap", "ulysses"))
    with pytest.raises(StudyError, match="one value at most, the study has 1, expected two or more"):
        groups(along="batch")
