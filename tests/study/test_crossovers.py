"""Crossovers of a study: one per group, as tables and as JSON; what cannot be asked is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.machines.sampling import NO_SAMPLES
from tasp_lab.study.find.crossover_question import CrossoverQuestion, crossover_question
from tasp_lab.study.find.crossovers import find_crossovers, searched
from tasp_lab.study.find.crossovers_report import Crossovers
from tasp_lab.study.find.nearest import nearest
from tasp_lab.study.point import Point
from tasp_lab.study.rows import Row
from tasp_lab.workload.layer import Workload

SEQUENCES = [2**power for power in range(13, 21)]
CROSSING = {"h100-8": 24_000.0, "h100-2x8": 300_000.0, "mi300x-8": 5_000.0}
"""Where TASP and zigzag take equally long in these tests; the last one is below the study."""

QUESTION = CrossoverQuestion("seq", ("tasp", "zigzag-ring-attention"), sampling=NO_SAMPLES)


def _points(schedules: tuple[str, ...] = ("tasp", "zigzag-ring-attention", "ulysses")) -> list[Point]:
    return [
        Point(machine, schedule, Workload(seq, heads=32), labels=(
            ("machine", machine), ("model", "llama-3-8b"), ("seq", seq), ("schedule", schedule)))
        for machine in CROSSING for seq in SEQUENCES for schedule in schedules
    ]  # fmt: skip


def _evaluate(point: Point) -> Row:
    """TASP gains below the crossing: its time is constant there and that of zigzag is not."""
    if point.schedule == "usp:5x5":
        return {"status": "does not apply", "error": "32 heads, expected a multiple of 5"}
    crossing = CROSSING[point.machine]
    time_s = 1.0 if point.schedule == "tasp" else (point.layer.sequence / crossing) ** -0.5
    return {"status": "ok", "time_s": time_s, "bottleneck": "compute" if point.layer.sequence > crossing else "link"}


def _found(question: CrossoverQuestion = QUESTION) -> Crossovers:
    return find_crossovers(_points(), question, _evaluate)


def test_every_group_has_its_own_crossing() -> None:
    by_machine = {dict(each.labels)["machine"]: each.found for each in _found().groups}
    for machine in ("h100-8", "h100-2x8"):
        at = by_machine[machine].crossings[0]
        assert at.last <= CROSSING[machine] <= at.value <= at.last * 1.02
        assert (at.binds_below, at.binds_above) == (("link", "link"), ("compute", "compute"))
    assert by_machine["mi300x-8"].verdict == "second"


def test_labels_that_tell_no_group_from_another_are_not_shown() -> None:
    assert [[name for name, _ in each.labels] for each in _found().groups] == [["machine"]] * 3


def test_the_object_of_json_has_what_the_table_shows() -> None:
    found = _found()
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [each["verdict"] for each in document["groups"]] == ["crosses", "crosses", "always zigzag-ring-attention"]
    crossing = document["groups"][0]["crossings"][0]
    assert (crossing["faster_below"], crossing["faster_above"]) == ("tasp", "zigzag-ring-attention")
    assert crossing["binds_below"] == {"tasp": "link", "zigzag-ring-attention": "link"}
    text = str(found)
    assert "always zigzag-ring-attention" in text
    assert "Ki" in text
    assert len(found.to_pandas()) == 3


def test_ends_that_are_given_replace_those_of_the_study() -> None:
    found = _found(replace(QUESTION, start=1024.0, end=8192.0)).groups
    assert [each.ends for each in found] == [(1024, 8192)] * 3
    assert [len(each.found.crossings) for each in found] == [0, 0, 1]


def test_a_factor_of_an_override_is_an_axis() -> None:
    """A machine whose time is 1 / factor of its NIC crosses another at the factor that their times give."""

    def evaluate(point: Point) -> Row:
        factor = float(dict(text.split("=x") for text in point.overrides).get("nic.bandwidth", 1))
        return {"status": "ok", "time_s": 3.0 if point.schedule == "tasp" else 4.0 / factor, "bottleneck": "NIC"}

    question = CrossoverQuestion("nic.bandwidth", QUESTION.between, start=0.25, end=4.0, sampling=NO_SAMPLES)
    at = find_crossovers(_points()[:3], question, evaluate).groups[0].found.crossings[0]
    assert at.last <= 4 / 3 <= at.value <= at.last * 1.021


def test_an_override_that_a_machine_lacks_does_not_apply() -> None:
    """At factor 1 nothing is overridden, so that one value has times; one value is no axis."""

    def evaluate(point: Point) -> Row:
        if point.overrides:
            return {"status": "does not apply", "error": "full-mesh:4 has no NICs"}
        return {"status": "ok", "time_s": 1.0 if point.schedule == "tasp" else 2.0}

    question = CrossoverQuestion("nic.bandwidth", QUESTION.between, start=0.5, end=2.0, sampling=NO_SAMPLES)
    found = find_crossovers(_points()[:3], question, evaluate).groups[0].found
    assert (found.verdict, found.reason) == ("does not apply", "tasp: full-mesh:4 has no NICs")


def test_a_schedule_with_the_values_of_axes_in_its_name() -> None:
    points = [
        Point(f"h100-{nodes}x8", f"usp:8x{nodes}" if split else "tasp", Workload(8192, heads=32),
              labels=(("machine", f"h100-{nodes}x8"), ("nodes", nodes)))
        for nodes in (1, 2, 4, 8) for split in (True, False)
    ]  # fmt: skip

    def evaluate(point: Point) -> Row:
        nodes = int(point.machine.removeprefix("h100-").removesuffix("x8"))
        assert point.schedule in ("tasp", f"usp:8x{nodes}")
        return {"status": "ok", "time_s": nodes if point.schedule == "tasp" else 4.5}

    question = CrossoverQuestion("nodes", ("tasp", "usp:8x{nodes}"), sampling=NO_SAMPLES)
    at = find_crossovers(points, question, evaluate).groups[0].found.crossings[0]
    assert (at.last, at.value) == (4, 5)


def test_a_schedule_that_applies_nowhere_is_told_with_its_reason() -> None:
    question = CrossoverQuestion("seq", ("tasp", "usp:5x5"), sampling=NO_SAMPLES)
    found = find_crossovers(_points(("tasp", "usp:5x5")), question, _evaluate)
    assert "does not apply: usp:5x5: 32 heads, expected a multiple of 5" in str(found)
    assert found.to_dict()["groups"][0]["verdict"].startswith("does not apply")  # type: ignore[index]


def test_the_nearest_points_are_nearest_to_a_crossing() -> None:
    found = nearest(searched(_points(), QUESTION, _evaluate), 5)
    assert [each.distance for each in found] == sorted(each.distance for each in found)
    values = [(each.points[0].machine, each.value) for each in found]
    assert values[:3] == [("h100-2x8", 262144), ("h100-8", 32768), ("h100-8", 16384)]
    every = nearest(searched(_points(), QUESTION, _evaluate), 1000)
    assert len(every) == 24
    assert all(math.isinf(each.distance) == (each.points[0].machine == "mi300x-8") for each in every)
    assert all(each.points[0].schedule == "tasp" for each in every)


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
        crossover_question(given)
    assert "\n" not in str(found.value)


def test_a_schedule_that_the_study_lacks_and_an_axis_of_one_value() -> None:
    with pytest.raises(StudyError, match="unknown schedule 'tsap', did you mean 'tasp'"):
        find_crossovers(_points(), CrossoverQuestion("seq", ("tsap", "ulysses")), _evaluate)
    with pytest.raises(StudyError, match="one value at most, the study has 1, expected two or more"):
        find_crossovers(_points(), CrossoverQuestion("batch", QUESTION.between), _evaluate)
