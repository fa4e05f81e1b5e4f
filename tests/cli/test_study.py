"""``tasp-lab study`` as a user types it: views of a study, crossovers, sensitivities, and runs on the fabric."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sqlite3
from pathlib import Path

import pytest

from tasp_lab import Workload, predict
from tests.conftest import Command
from tests.support.study_folders import row, write_study


@pytest.fixture
def folder(command: Command) -> Path:
    return write_study(command.folder / "longctx")


def test_show_prints_tables_json_and_csv(command: Command, folder: Path) -> None:
    done = command("study", "show", "longctx", "--rows", "machine,model", "--columns", "seq", "--csv", "out.csv")
    assert done.returncode == 0, done.stderr
    assert "long-context-training: winner over length" in done.stdout
    assert len(list(csv.DictReader((command.folder / "out.csv").read_text().splitlines()))) == 72
    found = command.json("study", "show", "longctx", "--sort=-speedup", "--limit", "2")
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
    cells = command.json("study", "show", "longctx", *pivot)
    assert (cells["rows"], cells["columns"], cells["value"], len(cells["cells"])) == (
        ["schedule"],
        ["seq"],
        "speedup",
        24,
    )
    assert cells["held"]["model"] == "llama-3-8b"


def test_plot_writes_a_picture_and_its_data(command: Command, folder: Path) -> None:
    found = command.json("study", "plot", "longctx", "--x", "seq", "--y", "machine")
    assert found["output"] == str(Path("longctx") / "plots" / "machine-seq.svg")
    assert (command.folder / found["output"]).read_bytes().startswith(b"<?xml")
    assert len(found["points"]) == 72
    one = ("--where", "model == 'llama-3-8b' and machine == 'h100-8'")
    assert command("study", "plot", "longctx", *one, "--output", "times.png").returncode == 0
    assert (command.folder / "times.png").read_bytes().startswith(b"\x89PNG")


def test_report_writes_one_page(command: Command, folder: Path) -> None:
    found = command.json("study", "report", "longctx", "--where", "seq <= 16Ki")
    assert found["output"] == str(Path("longctx") / "report.html")
    assert found["questions"] == found["tables"]["winners"] == 18
    assert found["figures"] == {"ratios": 9}
    assert (command.folder / found["output"]).read_text().startswith("<!DOCTYPE html>")


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


# ------------------------------------------------------------------------- crossovers, sensitivities, the fabric

STUDY = """
[study]
name = "mesh"

[layer]
mask = "full"
heads = 8
seq = "geom(4Ki, 64Ki, 4)"

[machine]
name = "full-mesh:4"

[schedule]
name = ["ring-attention", "tasp", "ulysses"]
baseline = "ring-attention"

[find]
crossover = { along = "seq", between = ["ulysses", "ring-attention"] }
sensitivity = { of = "speedup", by = "source interval, else 20%", top = 5 }
"""

TINY = STUDY.replace("heads = 8", "heads = 4").replace("geom(4Ki, 64Ki, 4)", "geom(32, 64, 2)")


@pytest.fixture
def study(command: Command) -> str:
    (command.folder / "mesh.toml").write_text(STUDY)
    return "mesh.toml"


def _times(seq: int, machine: str = "full-mesh:4") -> list[float]:
    found = predict(machine, ["ulysses", "ring-attention"], Workload(seq, heads=8, mask="full"), samples=0)
    return [float(each.time_s) for each in found]


def test_a_crossover_is_where_predictions_cross(command: Command, study: str) -> None:
    found = command.json("study", "crossover", study)
    assert set(found) == {"along", "between", "margin", "groups"}
    group = found["groups"][0]
    assert set(group) == {"labels", "from", "to", "verdict", "crossings", "speedup_from", "speedup_to", "refused",
                          "points"}  # fmt: skip
    crossing = group["crossings"][0]
    assert set(crossing) == {"value", "last", "low", "high", "is_tie", "faster_below", "faster_above",
                             "binds_below", "binds_above"}  # fmt: skip
    ulysses_s, ring_s = _times(crossing["last"])
    assert (ulysses_s < ring_s) == (crossing["faster_below"] == "ulysses")
    ulysses_s, ring_s = _times(crossing["value"])
    assert (ulysses_s < ring_s) == (crossing["faster_above"] == "ulysses")
    assert crossing["faster_below"] != crossing["faster_above"]
    assert crossing["last"] < crossing["value"] <= crossing["last"] * 1.02


def test_a_crossover_along_an_override(command: Command, study: str) -> None:
    given = ("--along", "link.bandwidth", "--from", "x0.5", "--to", "x4", "--json")
    found = json.loads(command("study", "crossover", study, *given).stdout)
    at = next(each for each in found["groups"] if each["labels"]["seq"] == 16384)["crossings"][0]
    for factor, name in ((at["last"], at["faster_below"]), (at["value"], at["faster_above"])):
        pair = predict("full-mesh:4", ["ulysses", "ring-attention"], Workload(16384, heads=8, mask="full"), samples=0,
                       overrides=[f"link.bandwidth=x{factor:.9g}"])  # fmt: skip
        assert min(pair, key=lambda each: each.time_s).schedule == name


def test_values_choose_points_and_variants(command: Command) -> None:
    """Where a variant is not chosen, sensitivity is of the one in which nothing is changed."""
    (command.folder / "two.toml").write_text(STUDY + '[what-if]\nslow = { set = { "link.bandwidth" = "x0.1" } }\n')
    both = command.json("study", "crossover", "two.toml")
    assert [each["labels"]["variant"] for each in both["groups"]] == ["as is", "slow"]
    one = command.json("study", "crossover", "two.toml", "--at", "slow")
    assert [each["crossings"] for each in one["groups"]] == [both["groups"][1]["crossings"]]
    as_is, slow = (
        command.json("study", "sensitivity", "two.toml", "--at", at, "--of", "time")
        for at in ("4Ki", "4Ki,variant=slow")
    )
    assert (as_is["at"]["variant"], slow["at"]["variant"]) == ("as is", "slow")
    assert as_is["times_s"]["ulysses"] < slow["times_s"]["ulysses"]


def test_tables_name_what_was_asked(command: Command, study: str) -> None:
    done = command("study", "crossover", study, "--margin", "5%")
    assert "crossovers of ulysses and ring-attention along seq, by more than 0.05" in done.stdout
    done = command("study", "sensitivity", study, "--at", "16Ki")
    assert "speed-up of tasp over ring-attention" in done.stdout
    assert "compute.rate" in done.stdout
    assert "ASSUMED" in done.stdout


def test_a_folder_that_was_run_is_not_predicted_again(command: Command, study: str) -> None:
    """Rows of the folder are taken as they are: with other times in them the crossover moves."""
    assert command("study", "run", study, "--output", "mesh").returncode == 0
    once = command.json("study", "crossover", "mesh")
    assert once == command.json("study", "crossover", study)
    with contextlib.closing(sqlite3.connect(command.folder / "mesh" / "results.sqlite")) as store, store:
        ulysses = "json_extract(cells, '$.schedule') = 'ulysses'"
        store.execute(f"UPDATE rows SET cells = json_set(cells, '$.time_s', 1e9) WHERE {ulysses}")
    moved = command.json("study", "crossover", "mesh")
    assert moved["groups"][0]["verdict"] == "always ring-attention"


def test_sensitivity_as_an_object(command: Command, study: str) -> None:
    found = command.json("study", "sensitivity", study, "--at", "machine=full-mesh:4,seq=16Ki")
    assert set(found) == {"at", "of", "schedules", "value", "times_s", "fastest", "constants", "refused"}
    assert set(found["constants"][0]) == {
        *("constant", "range", "factor_low", "factor_high", "source", "assumed", "settled_by"),
        *("value_at_low", "value_at_high", "effect", "fastest_at_low", "fastest_at_high", "changes_fastest"),
    }
