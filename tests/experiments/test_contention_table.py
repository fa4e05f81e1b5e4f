"""The table of published slowdowns: the model by hand, and the committed result."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import common
from experiments.tables import contention


def test_slowdowns_by_hand() -> None:
    """24 of 132, 108 and 80 multiprocessors; 8 of 304."""
    found = {each.gpu: each.predicted for each in contention.slowdowns()}
    assert found == {
        "h100": pytest.approx(132 / 108),
        "a100": pytest.approx(108 / 84),
        "v100": pytest.approx(80 / 56),
        "mi300x": pytest.approx(304 / 296),
    }


def test_the_result_is_the_present_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written: list[tuple[Path, bytes]] = []
    monkeypatch.setattr(common, "write_whole", lambda path, data: written.append((path, data)))
    contention.main()
    path = common.RESULTS / "contention.md"
    assert written == [(path, path.read_bytes())]
    assert capsys.readouterr().out == path.read_text() + "\n"
