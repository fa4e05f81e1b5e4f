"""The time of a study is estimated from timed points; here a formula stands for the clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tasp_lab import load_study
from tasp_lab.study.check import FEWEST_TIMED, MOST_TIMED, Estimate, check_study, estimate_of
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

Kind = tuple[str, tuple[str, ...], str]


def kind(point: Point) -> Kind:
    return point.machine, point.overrides, point.schedule


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
        """Schedules differ by powers of ten, machines and variants by less."""
        return (
            10.0 ** SCHEDULES.index(point.schedule)
            * (2.0 if "3x2" in point.machine else 1.0)
            * (1.5 if point.overrides else 1.0)
        )


def points_of(document: dict[str, Any]) -> list[Point]:
    return list(load_study(document).points())


def test_each_machine_schedule_and_variant_is_timed_once() -> None:
    points, clock = points_of(STUDY), Clock()
    found = estimate_of(points, clock)
    firsts = 2 * 3  # the first point of each machine and variant is timed twice
    assert Counter(map(kind, clock.timed)).keys() == set(map(kind, points))
    assert len(clock.timed) == found.timed + firsts == 30 + firsts
    assert len({point.layer for point in clock.timed}) > 15  # not always the same layer


def test_the_estimate_is_exact_where_layers_take_equally_long() -> None:
    points = points_of(STUDY)
    found = estimate_of(points, Clock(first_s=7.0))
    assert found.points_s == pytest.approx(sum(map(Clock.of, points)), rel=1e-12)
    assert found.prepared == ((pytest.approx(7.0), 30),) * 6
    assert found.processor_s(1) == pytest.approx(found.points_s + 6 * 7)
    assert found.processor_s(4) == pytest.approx(found.points_s + 6 * 4 * 7)
    assert all(seconds == found.processor_s(workers) / workers for workers, seconds in found.wall_s.items())


def test_a_worker_prepares_only_machines_that_it_gets() -> None:
    assert Estimate(1, 10.0, ((5.0, 2), (5.0, 100))).processor_s(8) == 10.0 + 5.0 * 2 + 5.0 * 8


def test_few_kinds_are_timed_at_several_layers() -> None:
    few = points_of(
        study_of(layer={"batch": list(range(1, 20))}, machine={"n": 2}, schedule={"name": ["ulysses"]} | BASE)
    )
    clock = Clock()
    assert estimate_of(few, clock).timed == FEWEST_TIMED == len(set(clock.timed))


def test_of_many_kinds_some_are_timed_and_stand_for_the_others() -> None:
    what_if = {f"x{number}": {"set": {"link.bandwidth": f"x1.{number:03}"}} for number in range(1, 300)}
    machine = {"name": "full-mesh:{n}", "n": [2]}
    points = points_of(
        study_of(machine=machine, what_if=what_if, layer={"seq": 1024}, schedule={"name": SCHEDULES} | BASE)
    )
    clock = Clock(first_s=1.0)
    found = estimate_of(points, clock)
    assert (len(points), found.timed) == (1500, MOST_TIMED)
    assert {point.schedule for point in clock.timed} == set(SCHEDULES)
    assert found.points_s == pytest.approx(sum(map(Clock.of, points)), rel=0.01)
    assert found.processor_s(1) - found.points_s == pytest.approx(300)


def test_points_that_are_asked_twice_count_once() -> None:
    document = study_of(points={"again": {"seq": 1024}})
    found: dict[str, Any] = check_study(load_study(document), estimate=True).to_dict()
    assert (found["points"], found["questions"], found["estimate"]["timed"]) == (30, 24, 24)


def test_a_check_says_processor_time_and_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasp_lab.study.check.usable_cores", lambda: 4)
    found = Estimate(40, 600.0, ((10.0, 2),))
    assert found.text(800) == (
        "about 10 min of processor time: 10 min with 1 worker, 3 min with 4 workers (40 of 800 points timed)"
    )
