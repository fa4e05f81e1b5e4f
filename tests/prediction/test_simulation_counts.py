"""How often commands simulate: once per pass, unless an option asks for numbers that need more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import tasp_lab
from tasp_lab.prediction import evaluate as evaluator
from tasp_lab.prediction import passes
from tasp_lab.schedules.attention.backward import DATAFLOWS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.study.evaluate import evaluate
from tasp_lab.study.point import Point

LAYER = tasp_lab.Workload(262144, heads=32, kv_heads=8, mask="causal")
NAMES = ["tasp", "zigzag-ring-attention", "ulysses"]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schedule of each simulation."""
    schedules: list[str] = []
    simulate = passes.simulate

    def count(schedule: Any, *arguments: Any, **settings: Any) -> Any:
        schedules.append(schedule.name)
        return simulate(schedule, *arguments, **settings)

    monkeypatch.setattr(passes, "simulate", count)
    return schedules


@contextmanager
def simulations(schedules: list[str], expected: list[str]) -> Iterator[None]:
    schedules.clear()
    yield
    assert schedules == expected


def test_a_prediction_simulates_each_pass_once(simulated: list[str]) -> None:
    with simulations(simulated, [name for name in NAMES[:2] for _ in range(2)]):
        found = tasp_lab.predict("h100-8", NAMES[:2], LAYER, passes="both", dataflow="rotate-q", samples=0)
        assert "exposed" in str(found)
        found.to_dict()
        found.to_pandas()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 3)])
def test_long_passes_are_simulated_at_once(
    simulated: list[str], cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several cores each has a thread of its own; the answer is the same, and each is simulated once."""
    asked: dict[str, Any] = {"passes": "both", "dataflow": "rotate-q", "samples": 0}
    expected = [each.time_s for each in tasp_lab.predict("h100-8", "tasp", LAYER, **asked)]
    used = {threading.get_ident()}
    simulate = passes.simulate

    def noted(*arguments: Any, **settings: Any) -> Any:
        used.add(threading.get_ident())
        time.sleep(0.05)  # as threads that have ended give their numbers back
        return simulate(*arguments, **settings)

    monkeypatch.setattr(passes, "simulate", noted)
    monkeypatch.setattr(evaluator, "spare_cores", lambda: cores)
    monkeypatch.setitem(evaluator.MANY_TRANSFERS, "array", 1)
    with simulations(simulated, 2 * ["tasp"]):
        found = tasp_lab.predict("h100-8", "tasp", LAYER, **asked)
        assert [each.time_s for each in found] == expected
    assert len(used) == threads


def test_what_explains_a_time_is_simulated_on_request(simulated: list[str]) -> None:
    # also without kernel calls, and without contention
    with simulations(simulated, ["tasp", "tasp", "tasp"]):
        found = tasp_lab.predict("h100-8", "tasp", LAYER, samples=0, explain=True)
        (row,) = found.to_dict()["predictions"]  # type: ignore[misc]
        assert row["ccr"] == row["compute_s"] / row["communication_s"]  # type: ignore[index]
        for title in ("CCR", "communication", "contention"):
            assert title in str(found)


def test_a_ranking_of_layers_that_compute_simulates_each_pass_once(simulated: list[str]) -> None:
    with simulations(simulated, [name for name in NAMES for _ in range(2)]):
        found = tasp_lab.compare("h100-8", LAYER, NAMES, passes="both", dataflow="rotate-q", samples=0)
        assert {answer.bottleneck for answer in found.candidates} == {"compute"}
        found.to_pandas()


def test_a_row_of_a_study_simulates_each_pass_once(simulated: list[str]) -> None:
    with simulations(simulated, 2 * ["tasp"]):
        evaluate(Point("h100-8", "tasp", LAYER, AttentionOptions("both", dataflow="rotate-q")))


def test_each_dataflow_whose_bound_is_below_the_least_time_is_simulated(simulated: list[str]) -> None:
    """One of those that are left open is the fastest; no bound of another one that was simulated is above its time."""
    simulated.clear()
    found = tasp_lab.answer(tasp_lab.Question("h100-8", "tasp", LAYER, AttentionOptions("both")))
    times_s = [
        float(tasp_lab.answer(replace(found.question, options=AttentionOptions("both", dataflow=flow))).time_s)
        for flow in DATAFLOWS
    ]
    assert float(found.time_s) == min(times_s)
    assert found.options.dataflow == DATAFLOWS[times_s.index(min(times_s))]
    assert 2 <= len(simulated) - 2 * len(DATAFLOWS) <= 2 * len(DATAFLOWS)
