"""The folder of a study: what it says of itself, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from tasp_lab.core.errors import MissingPackageError, StudyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.prediction.predict_step import predict_step
from tasp_lab.prediction.training_step.layout import Layout
from tasp_lab.study.file import load_study
from tasp_lab.study.folder import FORMAT, POINTS, PROVENANCE, STUDY, StudyFolder, provenance
from tasp_lab.study.frames import needed
from tasp_lab.study.table import selected
from tests.conftest import Command
from tests.support.studies import plans_of
from tests.support.study_folders import BASELINE, row, study_rows, write_study


def test_rows_with_and_without_an_answer_are_all_that_was_written(tmp_path: Path) -> None:
    found, written = StudyFolder(write_study(tmp_path / "longctx")), list(study_rows())
    assert len(found.rows()) + len(found.unanswered()) == len(written)
    assert set(found.unanswered()["error"]) == {each["error"] for each in written if each["status"] == "does not apply"}
    times = {each["key"]: each["time_s"] for each in written if each["status"] == "ok"}
    done = found.rows().query("status == 'ok'")
    assert dict(zip(done["key"], done["time_s"], strict=True)) == times


def test_a_folder_has_name_baseline_and_axes(tmp_path: Path) -> None:
    study = StudyFolder(write_study(tmp_path / "longctx"))
    assert (study.name, study.baseline) == ("long-context-training", BASELINE)
    assert study.axes == ("machine", "model", "seq", "schedule")
    assert StudyFolder(write_study(tmp_path / "bare", asked={"study": {"name": "one"}})).baseline is None


@pytest.mark.parametrize(
    ("broken", "telling"),
    [
        ("none", "no such folder"),
        ("file", "expected the folder of a study, not a file"),
        ("empty", "no study there, expected study.toml"),
        ("asked", "nothing was run yet, expected points.parquet"),
        ("no rows", "nothing was run yet"),
        ("format", "was written in format 99, expected format 2"),
        ("no format", "was written in format None, expected format 2"),
        ("provenance", "provenance.json: cannot be read"),
        ("list", "provenance.json: cannot be read"),
        ("points", "points.parquet: cannot be read"),
        ("toml", "study.toml: invalid TOML"),
        ("columns", "points.parquet: no column 'schedule', expected the rows of a study"),
    ],
)
def test_what_is_no_study_is_refused_in_one_line(tmp_path: Path, broken: str, telling: str) -> None:
    folder = tmp_path / "study"
    with pytest.raises(StudyError) as refused:
        selected(StudyFolder(spoilt(folder, broken)))
    assert telling in str(refused.value)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def spoilt(folder: Path, how: str) -> Path:
    """A folder that lacks something."""
    if how == "none":
        return folder
    if how == "file":
        folder.write_text("")
        return folder
    rows = [] if how == "no rows" else [row("h100-8", "llama-3-8b", 8192, "tasp")]
    write_study(folder, rows, format=99 if how == "format" else FORMAT)
    removed = {"empty": (STUDY, PROVENANCE), "asked": (POINTS, PROVENANCE)}
    for name in removed.get(how, ()):
        (folder / name).unlink()
    texts = {"no format": (PROVENANCE, "{}"), "provenance": (PROVENANCE, "{"), "list": (PROVENANCE, "[]"),
             "points": (POINTS, "no parquet"), "toml": (STUDY, "[")}  # fmt: skip
    if how in texts:
        name, text = texts[how]
        (folder / name).write_text(text)
    if how == "columns":
        pd.DataFrame({"machine": ["h100-8"]}).to_parquet(folder / POINTS)
    return folder


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StudyFolder(write_study(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tasp-lab\[studies\]'"):
        folder.rows()
    with pytest.raises(MissingPackageError, match="a plot needs no_such_package"):
        needed("no_such_package.part", "a plot")


# --------------------------------------------------------------------------------------------------- provenance

TWO_MACHINES = {
    "study": {"name": "two machines", "seed": 3},
    "machine": {"name": ["h100-2x8", "mi300x-8"]},
    "layer": {"seq": 65536, "heads": 32},
    "schedule": {"name": ["tasp", "ulysses"]},
}


def test_each_constant_has_its_source_and_interval(command: Command) -> None:
    study = load_study(TWO_MACHINES)
    told = provenance(study, list(study.points()), "tasp-lab study run two.toml")
    assert (told["study"], told["seed"], told["command"]) == ("two machines", 3, "tasp-lab study run two.toml")
    found = {(each["machine"], each["name"]): each for each in told["constants"]}
    assert {machine for machine, _ in found} == {"h100-2x8", "mi300x-8"}
    shown = {each["name"]: each for each in command.json("profile", "show", "h100-2x8")["constants"]}
    own = {name: each for (machine, name), each in found.items() if machine == "h100-2x8" and name in shown}
    assert len(own) > 10
    for name, each in own.items():
        assert each["source"] == shown[name]["source"]
        assert (each["low"] is None) == (shown[name]["low"] == shown[name]["high"])
    rates = [name for name in own if name.endswith("_rate") and own[name]["low"]]
    assert rates
    for name in rates:
        ends = [parse_bandwidth_bytes_per_s(own[name][end]) for end in ("low", "high")]
        assert ends == pytest.approx([shown[name]["low"], shown[name]["high"]], rel=1e-3)
    assert all(each["source"] for each in found.values())


def test_plans_have_the_constants_of_whole_steps() -> None:
    """As `plan` shows them for its recommended step, and those of each setting of matrices and hosts once."""
    study = load_study(plans_of(machine={"name": "h100-8"}, plan={"offload": [False, True]}))
    points = list(study.points())
    told = provenance(study, points, "")
    found = {each["name"]: each for each in told["constants"]}
    assert len(found) == len(told["constants"])
    step = predict_step("h100-8", "llama-3-8b", 8192, "ulysses", layout=Layout(offload=True, zero=1))
    for each in step.provenance.constants:
        assert (found[each.name]["value"], found[each.name]["source"]) == (each.value, each.source)
    assert {"matrix_rate_bf16", "memory", "host_link"} <= {*found}
    assert any("host_link" in text for text in told["assumptions"])


def test_what_is_assumed_is_an_assumption() -> None:
    study = load_study(TWO_MACHINES)
    told = provenance(study, list(study.points()), "")
    assumed = [each for each in told["constants"] if each["assumed"]]
    assert assumed
    for each in assumed:
        assert any(each["name"] in text and each["machine"] in text for text in told["assumptions"])
