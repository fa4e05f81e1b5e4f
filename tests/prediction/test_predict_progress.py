"""What a prediction reports while it lasts, and which events it keeps."""

from __future__ import annotations

import pytest

import tasp_lab
from sim.simulate import Engine
from tasp_lab.prediction import answer as evaluator

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
