"""The time of a study is estimated from timed points; here a formula stands for the clock."""

from __future__ import annotations

from typing import Any

import pytest

from tasp_lab import load_study
from tasp_lab.study.check import MOST_TIMED, check_study, estimate_of
from tasp_lab.study.point import Point
from tests.support.studies import study_of

BASE = {"baseline": "ulysses"}
SCHEDULES = ["ring-attention", "ulysses", "tasp", "token-ring", "kv-all-gather"]
STUDY = study_of(
    machine={"name": "nodes:{n}x2", "n": [2, 3]},
    layer={"seq": "geom(1Ki, 512Ki, 2)", "batch": [1, 2, 3]},
    what_if={"fast": {"set": {"nic.bandwidth": "x2"}}, "slow": {"set": {"nic.bandwidth": "x0.5"}}},
    schedule={"name": SCHEDULES},
)
"""2 machines x 3 variants x 5 schedules, 30 layers each."""


class Clock:
    """Times by a formula; a machine takes `first_s` more the first time."""

    def __init__(self, first_s: float = 0.0) -> None:
        self.timed: list[Point] = []
        self._first_s, self._machines = first_s, set[tuple[str, tuple[str, ...]]]()

    def __call__(self, point: Point) -> float:
        self.timed.append(point)
        machine = point.machine, point.overrides
        first_s = 0.0 if machine in self._machines else self._first_s
        self._machines.add(machine)
        return self.of(point) + first_s

    @staticmethod
    def of(point: Point) -> float:
        """Schedules differ by powers of ten."""
        return 10.0 ** SCHEDULES.index(point.schedule)


def points_of(document: dict[str, Any]) -> list[Point]:
    return list(load_study(document).points())


def test_the_estimate_is_exact_where_points_of_a_schedule_take_equally_long() -> None:
    points, clock = points_of(STUDY), Clock(first_s=7.0)
    timed, seconds = estimate_of(points, clock)
    assert seconds == pytest.approx(sum(map(Clock.of, points)), rel=1e-12)
    assert timed <= MOST_TIMED + len(SCHEDULES)
    assert {point.schedule for point in clock.timed} == set(SCHEDULES)
    assert len({point.layer for point in clock.timed}) > 15, "not always the same layer"


def test_all_of_a_few_points_are_timed() -> None:
    points = points_of(study_of(machine={"n": 2}, schedule={"name": ["ulysses"]} | BASE))
    assert estimate_of(points, Clock()) == (len(points), pytest.approx(10.0 * len(points)))


def test_the_estimate_of_a_study_of_thousands_of_points_times_few() -> None:
    what_if = {f"x{number}": {"set": {"link.bandwidth": f"x1.{number:03}"}} for number in range(1, 300)}
    machine = {"name": "full-mesh:{n}", "n": [2]}
    points = points_of(
        study_of(machine=machine, what_if=what_if, layer={"seq": 1024}, schedule={"name": SCHEDULES} | BASE)
    )
    timed, seconds = estimate_of(points, Clock(first_s=1.0))
    assert (len(points), timed) == (1500, 65)
    assert seconds == pytest.approx(sum(map(Clock.of, points)), rel=1e-12)


def test_a_check_says_processor_time_and_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasp_lab.study.check.usable_cores", lambda: 4)
    monkeypatch.setattr("tasp_lab.study.check.estimate_of", lambda points, progress: (20, 600.0))
    found = check_study(load_study(study_of()))
    assert found.to_dict()["estimate"] == {"timed": 20, "processor_s": 600.0, "wall_s": {"1": 600.0, "4": 150.0}}
    line = "about 10 min of processor time: 10 min with 1 worker, 2 min with 4 workers (20 of 24 points timed)"
    assert line in str(found)
