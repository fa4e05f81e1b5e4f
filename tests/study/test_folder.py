"""The folder of a study: what it says of itself, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from tasp_lab.core.errors import MissingPackageError, StudyError
from tasp_lab.study.folder import FORMAT, POINTS, PROVENANCE, STUDY, StudyFolder
from tasp_lab.study.needed import needed
from tests.support.study_folders import (
    BASELINE,
    MACHINES,
    MODELS,
    SCHEDULES,
    SEQUENCES,
    not_applicable,
    row,
    study_rows,
    write_study,
)


def test_rows_with_and_without_an_answer_are_all_that_was_written(tmp_path: Path) -> None:
    found, written = StudyFolder(write_study(tmp_path / "longctx")), list(study_rows())
    assert len(found.rows()) + len(found.unanswered()) == len(written)
    assert set(found.unanswered()["error"]) == {each["error"] for each in written if each["status"] == "does not apply"}
    times = {each["key"]: each["time_s"] for each in written if each["status"] == "ok"}
    done = found.rows().query("status == 'ok'")
    assert dict(zip(done["key"], done["time_s"], strict=True)) == times


def test_the_outline_has_name_baseline_axes_and_what_is_sought(tmp_path: Path) -> None:
    study = StudyFolder(write_study(tmp_path)).study
    assert (study.name, study.seed, study.baseline) == ("long-context-training", 0, BASELINE)
    assert study.axes == ("machine", "model", "seq", "schedule")
    assert study.find["crossover"]["along"] == "seq"


def test_columns_that_follow_from_no_other_are_axes(tmp_path: Path) -> None:
    """`ranks` follows the machine; `kv_heads` is free where there is one model; `buffers` is an axis of its own."""
    rows = [
        row(machine, "llama-3-8b", 8192, "tasp", kv_heads=kv_heads, buffers=buffers)
        for machine in MACHINES
        for kv_heads in (1, 8)
        for buffers in (2, 3)
    ]
    assert StudyFolder(write_study(tmp_path, rows)).study.axes == ("machine", "kv_heads", "buffers")


def test_a_column_that_refused_rows_lack_still_follows(tmp_path: Path) -> None:
    """Of a machine that was refused nobody knows the nodes."""
    rows = [row(machine, "llama-3-8b", 8192, name) for machine in MACHINES for name in SCHEDULES]
    rows += [
        not_applicable(row(machine, "llama-3-8b", 16384, "tasp"), "no") | {"nodes": None, "ranks": None}
        for machine in MACHINES
    ]
    assert StudyFolder(write_study(tmp_path, rows)).study.axes == ("machine", "seq", "schedule")


def test_what_an_override_changes_follows_its_variant(tmp_path: Path) -> None:
    variants = {"as is": "", "nic-x2": "nic.bandwidth=x2"}
    rows = [
        row("h100-4x8", "llama-3-8b", 8192, "tasp", variant=each, overrides=text) for each, text in variants.items()
    ]
    assert StudyFolder(write_study(tmp_path, rows)).study.axes == ("variant",)


def test_a_study_without_a_baseline(tmp_path: Path) -> None:
    found = StudyFolder(write_study(tmp_path, asked={"study": {"name": "one"}}))
    assert (found.study.baseline, found.study.find) == (None, {})


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
        ("toml", "study.toml: cannot be read"),
        ("columns", "points.parquet: no column 'schedule', expected the rows of a study"),
    ],
)
def test_what_is_no_study_is_refused_in_one_line(tmp_path: Path, broken: str, telling: str) -> None:
    folder = tmp_path / "study"
    with pytest.raises(StudyError) as refused:
        StudyFolder(spoilt(folder, broken)).study  # noqa: B018
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


def test_the_synthetic_study_covers_its_axes() -> None:
    assert len(list(study_rows())) == len(MACHINES) * len(MODELS) * len(SEQUENCES) * len(SCHEDULES)
