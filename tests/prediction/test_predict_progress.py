"""What a prediction reports while it lasts, and which events it keeps."""

from __future__ import annotations

import threading

import pytest

import tasp_lab
from sim.simulate import Engine
from tasp_lab.core import process, workers
from tasp_lab.core.errors import ScheduleError
from tasp_lab.prediction import evaluate as evaluator
from tasp_lab.prediction.passes import PassAnswer
from tasp_lab.schedules.attention.options import AttentionOptions

LAYER = tasp_lab.Workload(sequence=4096, heads=4, kv_heads=2, head_dim=8, mask="causal")


@pytest.mark.parametrize("engine", ["array", "simpy"])
def test_a_word_before_a_long_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    tasp_lab.predict("full-mesh:4", "tasp", LAYER, engine=engine, progress=said.append)
    assert not said
    monkeypatch.setitem(evaluator.MANY_TRANSFERS, engine, 1)
    tasp_lab.predict("full-mesh:4", "tasp", LAYER, engine=engine, progress=said.append)
    assert any("simulating" in line and "this may take a while" in line for line in said)


def test_a_long_simulation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(evaluator.MANY_TRANSFERS, "array", 1)
    found = tasp_lab.predict("full-mesh:6", "token-ring", LAYER, engine="array", progress=said.append)
    shares = [int(line.split(": ")[1].split("%")[0]) for line in said if line.endswith("% simulated")]
    assert shares == sorted(shares)
    assert min(shares) < 10
    assert max(shares) > 90
    assert found[0].time_s == tasp_lab.predict("full-mesh:6", "token-ring", LAYER, engine="array")[0].time_s


def test_symmetric_rings_are_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(evaluator.MANY_TRANSFERS, "array", 1)
    tasp_lab.predict("full-mesh:8", "ring", "1MiB", engine="array", progress=said.append)
    assert not said


def test_events_are_kept_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(events: bool | None) -> int:
        return len(tasp_lab.predict("full-mesh:4", "tasp", LAYER, engine="array", events=events)[0].timeline.events)

    assert kept(None) == kept(True) > kept(False) == 0
    monkeypatch.setattr(evaluator, "MANY_EVENTS", 1)
    assert kept(True) > kept(None) == 0


def _threads_of_passes(monkeypatch: pytest.MonkeyPatch, cores: int) -> list[str]:
    """Let every pass take long, on so many cores; the list gets the thread in which each pass is simulated."""
    threads: list[str] = []
    simulated = PassAnswer._simulated

    def recorded(one: PassAnswer) -> tasp_lab.Timeline:
        threads.append(threading.current_thread().name)
        return simulated(one)

    monkeypatch.setattr(PassAnswer, "_simulated", recorded)
    monkeypatch.setattr(process, "usable_cores", lambda: cores)
    monkeypatch.setitem(evaluator.MANY_TRANSFERS, "array", 1)
    return threads


def _answer() -> tasp_lab.Answer:
    question = tasp_lab.Question("h100-8", "tasp", LAYER, AttentionOptions("both", dataflow="rotate-q"))
    return tasp_lab.answer(question, progress=lambda line: None)


def _both_passes() -> list[float]:
    return [each.timeline.time_s for each in _answer().passes]


def test_passes_take_no_cores_that_workers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.current_thread().name
    threads = _threads_of_passes(monkeypatch, 2)
    with process.beside_workers():
        _both_passes()
    assert threads == [main, main]

    def where(_: int) -> list[str]:
        threads.clear()
        _both_passes()
        return list(threads)

    assert workers.deal(where, range(2), 2) == [[main, main]] * 2
    assert workers.deal(where, range(2), 1) != [[main, main]] * 2
    threads.clear()
    monkeypatch.setattr(process, "usable_cores", lambda: 1)
    _both_passes()
    assert threads == [main, main]


def test_an_error_in_a_thread_is_that_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = _threads_of_passes(monkeypatch, 2)

    def fails(one: PassAnswer) -> tasp_lab.Timeline:
        threads.append(threading.current_thread().name)
        raise ScheduleError("no such time")

    monkeypatch.setattr(PassAnswer, "_simulated", fails)
    found = _answer()
    assert (found.status, found.reason) == ("does not apply", "no such time")
    assert len(set(threads)) == 3
