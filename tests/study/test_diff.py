"""What differs between two studies is found, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasp_lab.study.diff import CHANGES, diff
from tasp_lab.study.folder import StudyFolder
from tests.support.study_folders import BASELINE, CONSTANTS, MACHINES, not_applicable, row, write_study

ROWS = [row(machine, "llama-3-8b", seq, name) for machine in MACHINES for seq in (8192, 16384)
        for name in (BASELINE, "tasp")]  # fmt: skip


def study(folder: Path, rows: list[dict[str, Any]] = ROWS, **told: Any) -> StudyFolder:
    return StudyFolder(write_study(folder, rows, **told))


def only(found: dict[str, Any], *names: str) -> None:
    """Check that nothing but these entries of a difference has something."""
    assert [name for name in (*CHANGES, "changed_constants", "changed_inputs") if found[name]] == list(names)


def changed(folder: Path, rows: list[dict[str, Any]], **told: Any) -> dict[str, Any]:
    return diff(study(folder / "a"), study(folder / "b", rows, **told)).to_dict()


def test_a_study_does_not_differ_from_itself(tmp_path: Path) -> None:
    one = study(tmp_path)
    only(diff(one, one).to_dict())
    assert str(diff(one, one)).endswith("the same points with the same times and winners")


def test_a_difference_is_symmetric(tmp_path: Path) -> None:
    """From b to a it is what it is from a to b with the sides exchanged."""
    rows = [each | {"time_s": each["time_s"] * (1.1 if each["schedule"] == "tasp" else 1)} for each in ROWS[2:]]
    a, b = study(tmp_path / "a"), study(tmp_path / "b", rows, constants=CONSTANTS[:1])
    there: dict[str, Any] = diff(a, b).to_dict()
    back: dict[str, Any] = diff(b, a).to_dict()
    assert (there["only_a"], there["only_b"]) == (back["only_b"], back["only_a"])
    assert [each["seq"] for each in there["only_a"]] == [8192, 8192]
    assert str(diff(a, b)).count("only in a") == 2
    for one, two in zip(*(sorted(each["changed_times"], key=str) for each in (there, back)), strict=True):
        assert (1 + one["change"]) * (1 + two["change"]) == pytest.approx(1)
        assert (one["time_s_a"], one["time_s_b"]) == (two["time_s_b"], two["time_s_a"])
    for one, two in zip(there["changed_constants"], back["changed_constants"], strict=True):
        assert (one["a"], one["b"]) == (two["b"], two["a"])


def test_times_that_changed_are_relative_and_the_largest_is_first(tmp_path: Path) -> None:
    factors = {8192: 1.0001, 16384: 0.9}
    rows = [each | {"time_s": each["time_s"] * factors[each["seq"]]} for each in ROWS]
    found = changed(tmp_path, rows)
    assert [each["change"] for each in found["changed_times"]] == pytest.approx([-0.1] * 6 + [0.0001] * 6)
    for each in found["changed_times"]:
        assert each["time_s_b"] / each["time_s_a"] - 1 == pytest.approx(each["change"])


def test_winners_that_changed(tmp_path: Path) -> None:
    hit = next(n for n, each in enumerate(ROWS) if (each["machine"], each["schedule"]) == ("h100-4x8", "tasp"))
    found = changed(tmp_path, [each | ({"time_s": 1e3} if n == hit else {}) for n, each in enumerate(ROWS)])
    only(found, "changed_times", "changed_winners")
    (winner,) = found["changed_winners"]
    assert (winner["machine"], winner["seq"], winner["too_close"]) == ("h100-4x8", 8192, False)
    assert (winner["schedule_a"], winner["schedule_b"]) == ("tasp", BASELINE)


def test_statuses_that_changed(tmp_path: Path) -> None:
    slowest = max(range(len(ROWS)), key=lambda n: ROWS[n]["time_s"] * (ROWS[n]["schedule"] == BASELINE))
    found = changed(
        tmp_path, [not_applicable(each, "too long") if n == slowest else each for n, each in enumerate(ROWS)]
    )
    only(found, "changed_statuses")
    (status,) = found["changed_statuses"]
    assert (status["status_a"], status["status_b"], status["error_b"]) == ("ok", "does not apply", "too long")


def test_inputs_constants_and_versions(tmp_path: Path) -> None:
    rows = [
        each
        | {"version": "9.9", "constants": "1" * 64, "inputs": json.dumps(json.loads(each["inputs"]) | {"heads": 7})}
        for each in ROWS
    ]
    found = changed(tmp_path, rows, constants=[CONSTANTS[0], CONSTANTS[1] | {"value": 1.4e10}])
    only(found, "changed_constants", "changed_inputs")
    assert found["changed_inputs"] == {"heads": len(ROWS)}
    assert found["versions"]["b"] == ["9.9"]
    assert found["points_with_other_constants"] == len(ROWS)
    rate, gone = found["changed_constants"]
    assert (rate["name"], rate["a"]["value"], rate["b"]["value"]) == ("nic_channel_rate", 1.3e10, 1.4e10)
    assert (gone["name"], gone["b"]) == ("compute_rate", None)


def test_a_constant_column_that_differs_is_told_once(tmp_path: Path) -> None:
    found = changed(tmp_path, [each | {"mask": "full"} for each in ROWS])
    only(found, "held")
    assert found["held"] == {"mask": {"a": "causal", "b": "full"}}
    assert found["points"]["both"] == len(ROWS)


def test_axes_are_what_varies_in_either_study(tmp_path: Path) -> None:
    """Of one machine `nodes` is 1; of three it varies with the machine, so it is no constant of both studies."""
    one = study(tmp_path / "one", [row("h100-8", "llama-3-8b", 8192, "tasp")], asked={})
    three = study(tmp_path / "three", [row(machine, "llama-3-8b", 8192, "tasp") for machine in MACHINES], asked={})
    found: dict[str, Any] = diff(one, three).to_dict()
    only(found, "only_b")
    assert len(found["only_b"]) == 2
    rows = [row("h100-8", "llama-3-8b", seq, "tasp") for seq in (8192, 16384)]
    plain = study(tmp_path / "plain", rows, asked={})
    buffers = study(tmp_path / "buffers", [each | {"buffers": b} for each in rows for b in (2, 3)], asked={})
    found = diff(plain, buffers).to_dict()
    assert found["axes"] == ["seq", "buffers"]
    assert (len(found["only_a"]), len(found["only_b"])) == (2, 4)
