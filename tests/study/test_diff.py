"""What differs between two studies is found, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasp_lab.study.diff import StudyDiff
from tasp_lab.study.folder import StudyFolder
from tests.support.study_folders import CONSTANTS, MACHINES, not_applicable, row, study_rows, write_study

Change = Callable[[dict[str, Any]], dict[str, Any] | None]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return StudyFolder(write_study(tmp_path_factory.mktemp("studies") / "a"))


def changed(first: StudyFolder, folder: Path, change: Change, **told: Any) -> StudyDiff:
    """The difference to a study whose rows are changed; a row that becomes None is left out."""
    rows = [found for each in study_rows() if (found := change(each)) is not None]
    return first.diff(StudyFolder(write_study(folder, rows, **told)))


LISTS = ("only_a", "only_b", "changed_constants", "changed_times", "changed_statuses", "changed_winners")


def only(found: StudyDiff, *names: str) -> dict[str, Any]:
    """The object of a difference that has only these entries."""
    told: dict[str, Any] = found.to_dict()
    assert [name for name in (*LISTS, "held", "changed_inputs") if told[name]] == list(names)
    return told


def test_a_study_does_not_differ_from_itself(first: StudyFolder) -> None:
    found = first.diff(first)
    only(found)
    assert found.is_same
    assert str(found).endswith("the same points with the same times and winners")


def test_points_of_one_study_only(first: StudyFolder, tmp_path: Path) -> None:
    found = changed(first, tmp_path, lambda each: None if each["seq"] == 8192 else each)
    assert {each["seq"] for each in only(found, "only_a")["only_a"]} == {8192}
    assert len(found.only("left_only")) == 27
    back = found.b.diff(first)
    assert only(back, "only_b")["only_b"] == found.only("left_only")


def test_times_that_changed_are_relative_and_the_largest_is_first(first: StudyFolder, tmp_path: Path) -> None:
    def slower(each: dict[str, Any]) -> dict[str, Any]:
        factor = {8192: 1.0001, 16384: 0.9}.get(each["seq"], 1) if each["schedule"] == "tasp" else 1
        return each | {"time_s": each["time_s"] and each["time_s"] * factor}

    times = changed(first, tmp_path, slower).changed_times()
    assert [each["change"] for each in times] == pytest.approx([-0.1] * 9 + [0.0001] * 9)
    assert all(each["time_s_b"] / each["time_s_a"] - 1 == pytest.approx(each["change"]) for each in times)


def test_winners_that_changed(first: StudyFolder, tmp_path: Path) -> None:
    def slow(each: dict[str, Any]) -> dict[str, Any]:
        hit = (each["machine"], each["model"], each["seq"], each["schedule"])
        return each | ({"time_s": 1e3} if hit == ("h100-4x8", "llama-3-70b", 16384, "tasp") else {})

    (winner,) = only(changed(first, tmp_path, slow), "changed_times", "changed_winners")["changed_winners"]
    assert (winner["machine"], winner["seq"]) == ("h100-4x8", 16384)
    assert (winner["schedule_a"], winner["schedule_b"]) == ("tasp", "zigzag-ring-attention")
    assert winner["too_close"] is False


def test_statuses_that_changed(first: StudyFolder, tmp_path: Path) -> None:
    hit = ("h100-8", "llama-3-8b", 8192, "ulysses")

    def refused(each: dict[str, Any]) -> dict[str, Any]:
        same = (each["machine"], each["model"], each["seq"], each["schedule"]) == hit
        return not_applicable(each, "too long") if same else each

    (found,) = only(changed(first, tmp_path, refused), "changed_statuses")["changed_statuses"]
    assert (found["status_a"], found["status_b"], found["error_b"]) == ("ok", "does not apply", "too long")


def test_inputs_constants_and_versions(first: StudyFolder, tmp_path: Path) -> None:
    def moved(each: dict[str, Any]) -> dict[str, Any]:
        inputs = json.loads(each["inputs"]) | {"heads": 7}
        return each | {"version": "9.9", "inputs": json.dumps(inputs), "constants": "1" * 64}

    constants = [CONSTANTS[0], CONSTANTS[1] | {"value": 1.4e10}]
    told = only(changed(first, tmp_path, moved, constants=constants), "changed_constants", "changed_inputs")
    assert told["changed_inputs"] == {"heads": 216}
    assert told["versions"]["b"] == ["9.9"]
    assert told["points_with_other_constants"] == 216
    rate, gone = told["changed_constants"]
    assert (rate["name"], rate["a"]["value"], rate["b"]["value"]) == ("nic_channel_rate", 1.3e10, 1.4e10)
    assert (gone["name"], gone["b"]) == ("compute_rate", None)


def test_a_constant_column_that_differs_is_told_once(first: StudyFolder, tmp_path: Path) -> None:
    told = only(changed(first, tmp_path, lambda each: each | {"mask": "full"}), "held")
    assert told["held"] == {"mask": {"a": "causal", "b": "full"}}
    assert told["points"]["both"] == 216


def test_a_column_that_varies_in_one_study_is_no_constant_of_both(tmp_path: Path) -> None:
    """Of one machine `nodes` is 1; of three it varies with the machine."""
    one = StudyFolder(write_study(tmp_path / "a", [row("h100-8", "llama-3-8b", 8192, "tasp")], asked={}))
    three = [row(machine, "llama-3-8b", 8192, "tasp") for machine in MACHINES]
    found = one.diff(StudyFolder(write_study(tmp_path / "b", three, asked={})))
    assert len(only(found, "only_b")["only_b"]) == 2


def test_an_axis_of_one_study_only(tmp_path: Path) -> None:
    rows = [row("h100-8", "llama-3-8b", seq, "tasp") for seq in (8192, 16384)]
    one = StudyFolder(write_study(tmp_path / "a", rows, asked={}))
    two = StudyFolder(write_study(tmp_path / "b", [each | {"buffers": b} for each in rows for b in (2, 3)], asked={}))
    found = one.diff(two)
    assert found.axes == ["seq", "buffers"]
    assert (len(found.only("left_only")), len(found.only("right_only"))) == (2, 4)
    assert "only in b" in str(found)
