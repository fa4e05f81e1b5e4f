"""``tasp-lab study show``, ``plot``, ``diff`` and ``report`` as a user types them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.support.study_folders import row, study_rows, write_study


@pytest.fixture
def folder(command: Command) -> Path:
    return write_study(command.folder / "longctx")


def test_show_prints_tables_json_and_csv(command: Command, folder: Path) -> None:
    done = command("study", "show", "longctx", "--rows", "machine,model", "--columns", "seq", "--csv", "out.csv")
    assert done.returncode == 0, done.stderr
    assert "long-context-training: winner over length" in done.stdout
    assert len(list(csv.DictReader((command.folder / "out.csv").read_text().splitlines()))) == 72
    found = json.loads(command("study", "show", "longctx", "--sort=-speedup", "--limit", "2", "--json").stdout)
    assert (found["study"], found["baseline"], len(found["rows"])) == (
        "long-context-training",
        "zigzag-ring-attention",
        2,
    )
    assert found["rows"][0]["speedup"] > found["rows"][1]["speedup"] > 1
    assert found["counts"] == {"ok": 202, "settled": 6, "does not apply": 8, "failed": 0}
    pivot = (
        "--rows",
        "schedule",
        "--columns",
        "seq",
        "--value",
        "speedup",
        "--where",
        "machine == 'h100-8' and heads == 32",
    )
    cells = json.loads(command("study", "show", "longctx", *pivot, "--json").stdout)
    assert (cells["rows"], cells["columns"], cells["value"], len(cells["cells"])) == (
        ["schedule"],
        ["seq"],
        "speedup",
        24,
    )
    assert cells["held"]["model"] == "llama-3-8b"


def test_plot_writes_a_picture_and_its_data(command: Command, folder: Path) -> None:
    done = command("study", "plot", "longctx", "--x", "seq", "--y", "machine", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["output"] == str(Path("longctx") / "plots" / "machine-seq.svg")
    assert (command.folder / found["output"]).read_bytes().startswith(b"<?xml")
    assert len(found["points"]) == 72
    one = ("--where", "model == 'llama-3-8b' and machine == 'h100-8'")
    assert command("study", "plot", "longctx", *one, "--output", "times.png").returncode == 0
    assert (command.folder / "times.png").read_bytes().startswith(b"\x89PNG")


def test_diff_exits_with_0_whether_or_not_there_is_one(command: Command, folder: Path) -> None:
    write_study(command.folder / "other", [each for each in study_rows() if each["seq"] > 8192])
    for other, count in (("longctx", 0), ("other", 27)):
        done = command("study", "diff", "longctx", other, "--json")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["only_a"]) == count
        assert command("study", "diff", "longctx", other).returncode == 0


def test_report_writes_one_page(command: Command, folder: Path) -> None:
    done = command("study", "report", "longctx", "--where", "seq <= 16Ki", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["output"] == str(Path("longctx") / "report.html")
    assert found["questions"] == found["tables"]["winners"] == 18
    assert found["figures"] == {"map": 3, "curves": 9}
    assert (command.folder / found["output"]).read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (("show", "nowhere"), "nowhere: no such folder"),
        (("show", "."), ".: no study there, expected study.toml"),
        (("diff", "longctx", "."), ".: no study there"),
        (("show", "longctx", "--rows", "machin"), "unknown column 'machin', did you mean 'machine'?"),
        (("show", "longctx", "--rows", "machine", "--value", "time_s"), "several rows in one place: 'model'"),
        (("show", "longctx", "--where", "seq > 1Mi"), "none of 208 rows is left"),
        (("show", "longctx", "--limit", "x"), "--limit: 'x', expected a whole number"),
        (("show", "longctx", "--csv", "no/out.csv"), "cannot write no/out.csv: its folder does not exist"),
        (("plot", "longctx", "--y", "tim_s"), "unknown column 'tim_s', did you mean 'time_s'?"),
        (("plot", "longctx", "--output", "out.bmp"), "expected a name that ends in .png, .svg or .pdf"),
        (("plot", "longctx", "--panels", "machine"), "'model' has 3 values there"),
        (("report", "longctx", "--output", "out.pdf"), "cannot write out.pdf: expected a name that ends in .html"),
        (("report", "longctx", "--output", "no/out.html"), "its folder does not exist"),
        (("report", "longctx", "--baseline", "tas"), "unknown baseline 'tas', did you mean 'tasp'?"),
    ],
)
def test_what_cannot_be_told_is_one_line(
    command: Command, folder: Path, arguments: tuple[str, ...], telling: str
) -> None:
    before = sorted(command.folder.rglob("*"))
    assert telling in command.refused("study", *arguments)
    assert sorted(command.folder.rglob("*")) == before


@pytest.mark.parametrize("verb", ["plot", "report"])
def test_a_folder_that_cannot_be_written(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The superuser may write anywhere, so the system refuses for it."""
    real, real_mkdir = os.open, Path.mkdir

    def refuse(path: object, flags: int, *rest: int, **more: int) -> int:
        if "longctx" in str(path) and flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *rest, **more)  # type: ignore[call-overload, no-any-return]

    def refuse_folder(self: Path, *rest: int, **more: bool) -> None:
        if "longctx" in str(self):
            raise PermissionError(13, "Permission denied", str(self))
        real_mkdir(self, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse_folder)
    before = sorted(folder.rglob("*"))
    assert "Permission denied" in command.refused("study", verb, "longctx")
    assert sorted(folder.rglob("*")) == before


def test_a_study_of_one_row_has_everything(command: Command) -> None:
    write_study(command.folder / "one", [row("h100-8", "llama-3-8b", 8192, "tasp")], asked={})
    for line in (("show",), ("report",), ("plot", "--x", "seq")):
        done = command("study", line[0], "one", *line[1:])
        assert done.returncode == 0, done.stderr
