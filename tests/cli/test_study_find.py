"""``tasp-lab study crossover``, ``sensitivity`` and ``validate`` as a user types them."""

from __future__ import annotations

import contextlib
import csv
import json
import sqlite3
from pathlib import Path

import pytest

from tasp_lab import Workload, predict
from tests.conftest import Command

STUDY = """
[study]
name = "mesh"

[layer]
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
    found = predict(machine, ["ulysses", "ring-attention"], Workload(seq, heads=8), samples=0)
    return [float(each.time_s) for each in found]


def test_a_crossover_is_where_predictions_cross(command: Command, study: str) -> None:
    done = command("study", "crossover", study, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"along", "between", "margin", "samples", "seed", "groups"}
    group = found["groups"][0]
    assert set(group) == {"labels", "from", "to", "verdict", "crossings", "speedup_from", "speedup_to", "refused",
                          "points", "pairs_with_samples"}  # fmt: skip
    crossing = group["crossings"][0]
    assert set(crossing) == {"value", "last", "low", "high", "too_close_to_call", "faster_below", "faster_above",
                             "binds_below", "binds_above"}  # fmt: skip
    ulysses_s, ring_s = _times(crossing["last"])
    assert (ulysses_s < ring_s) == (crossing["faster_below"] == "ulysses")
    ulysses_s, ring_s = _times(crossing["value"])
    assert (ulysses_s < ring_s) == (crossing["faster_above"] == "ulysses")
    assert crossing["faster_below"] != crossing["faster_above"]
    assert crossing["last"] < crossing["value"] <= crossing["last"] * 1.02


def test_a_crossover_along_an_override(command: Command, study: str) -> None:
    given = ("--along", "link.bandwidth", "--from", "x0.5", "--to", "x4", "--samples", "0", "--json")
    found = json.loads(command("study", "crossover", study, *given).stdout)
    at = next(each for each in found["groups"] if each["labels"]["seq"] == 16384)["crossings"][0]
    for factor, name in ((at["last"], at["faster_below"]), (at["value"], at["faster_above"])):
        pair = predict("full-mesh:4", ["ulysses", "ring-attention"], Workload(16384, heads=8), samples=0,
                       overrides=[f"link.bandwidth=x{factor:.9g}"])  # fmt: skip
        assert min(pair, key=lambda each: each.time_s).schedule == name


def test_values_choose_points_and_variants(command: Command) -> None:
    """Where a variant is not chosen, sensitivity is of the one in which nothing is changed."""
    (command.folder / "two.toml").write_text(STUDY + '[what-if]\nslow = { set = { "link.bandwidth" = "x0.1" } }\n')
    both = json.loads(command("study", "crossover", "two.toml", "--samples", "0", "--json").stdout)
    assert [each["labels"]["variant"] for each in both["groups"]] == ["as is", "slow"]
    one = json.loads(command("study", "crossover", "two.toml", "--at", "slow", "--samples", "0", "--json").stdout)
    assert [each["crossings"] for each in one["groups"]] == [both["groups"][1]["crossings"]]
    as_is, slow = (
        json.loads(command("study", "sensitivity", "two.toml", "--at", at, "--of", "time", "--json").stdout)
        for at in ("4Ki", "4Ki,variant=slow")
    )
    assert (as_is["at"]["variant"], slow["at"]["variant"]) == ("as is", "slow")
    assert as_is["times_s"]["ulysses"] < slow["times_s"]["ulysses"]


def test_tables_name_what_was_asked(command: Command, study: str) -> None:
    done = command("study", "crossover", study, "--samples", "0", "--margin", "5%")
    assert "crossovers of ulysses and ring-attention along seq, by more than 0.05" in done.stdout
    done = command("study", "sensitivity", study, "--at", "16Ki")
    assert "speed-up of tasp over ring-attention" in done.stdout
    assert "compute.rate" in done.stdout
    assert "ASSUMED" in done.stdout


def test_a_folder_that_was_run_is_not_predicted_again(command: Command, study: str) -> None:
    """Rows of the folder are taken as they are: with other times in them the crossover moves."""
    assert command("study", "run", study, "--output", "mesh").returncode == 0
    once = json.loads(command("study", "crossover", "mesh", "--samples", "0", "--json").stdout)
    assert once == json.loads(command("study", "crossover", study, "--samples", "0", "--json").stdout)
    with contextlib.closing(sqlite3.connect(command.folder / "mesh" / "results.sqlite")) as store, store:
        ulysses = "json_extract(cells, '$.schedule') = 'ulysses'"
        store.execute(f"UPDATE rows SET cells = json_set(cells, '$.time_s', 1e9) WHERE {ulysses}")
    moved = json.loads(command("study", "crossover", "mesh", "--samples", "0", "--json").stdout)
    assert moved["groups"][0]["verdict"] == "always ring-attention"


def test_sensitivity_as_an_object(command: Command, study: str) -> None:
    done = command("study", "sensitivity", study, "--at", "machine=full-mesh:4,seq=16Ki", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"at", "of", "schedules", "value", "times_s", "fastest", "method", "constants", "refused"}
    assert set(found["constants"][0]) == {
        *("constant", "range", "factor_low", "factor_high", "source", "assumed", "settled_by"),
        *("value_at_low", "value_at_high", "effect", "fastest_at_low", "fastest_at_high", "changes_fastest"),
    }
    by_sobol = json.loads(command("study", "sensitivity", study, "--at", "16Ki", "--method", "sobol", "--samples", "8",
                                  "--json").stdout)  # fmt: skip
    assert by_sobol["constants"][0]["total"] == pytest.approx(1, abs=0.5)
    assert by_sobol["value_low"] <= by_sobol["value_high"]


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (("crossover", "mesh.toml", "--along", "mask"), "'mask' is not numeric"),
        (("crossover", "mesh.toml", "--along", "sek"), "did you mean 'seq'"),
        (("crossover", "mesh.toml", "--between", "tasp"), "expected two schedules"),
        (("crossover", "mesh.toml", "--between", "tasp", "--between", "tasp"), "and itself"),
        (("crossover", "mesh.toml", "--between", "tasp", "--between", "tsap"), "did you mean 'tasp'"),
        (("crossover", "mesh.toml", "--margin", "100%"), "expected 0 or more and less than 1"),
        (("crossover", "mesh.toml", "--margin", "-5%"), "expected 0 or more and less than 1"),
        (("crossover", "mesh.toml", "--from", "64Ki", "--to", "8Ki"), "is empty"),
        (("crossover", "mesh.toml", "--along", "batch"), "the interval has one value at most"),
        (("crossover", "mesh.toml", "--samples", "-1"), "samples: -1"),
        (("crossover", "mesh.toml", "--at", "machin=h100-8"), "did you mean 'machine'"),
        (("crossover", "mesh.toml", "--at", "seq=4Ki"), "the interval has one value at most"),
        (("crossover", "nowhere.toml"), "nowhere.toml"),
        (("crossover", "."), "no study there"),
        (("sensitivity", "mesh.toml"), "no point is chosen"),
        (("sensitivity", "mesh.toml", "--at", "sek=8Ki"), "did you mean 'seq'"),
        (("sensitivity", "mesh.toml", "--at", "seq=9Ki"), "no such point"),
        (("sensitivity", "mesh.toml", "--at", "16Ki", "--of", "speed"), "did you mean 'speedup'"),
        (("sensitivity", "mesh.toml", "--at", "16Ki", "--method", "sobol", "--samples", "48"), "a power of two"),
        (("sensitivity", "mesh.toml", "--at", "16Ki", "--between", "tsap"), "did you mean 'tasp'"),
        (("sensitivity", "mesh.toml", "--at", "16Ki", "--seed", "-1"), "seed: -1"),
        (("sensitivity", "mesh.toml", "--at", "16Ki", "--top", "0"), "expected 1 or more"),
        (("validate", "mesh.toml"), "expected the folder that a study was run in"),
        (("validate", "nowhere"), "no such folder"),
        (("validate", ".", "--top", "0"), "top: 0, expected 1 or more"),
    ],
)
def test_what_cannot_be_asked(command: Command, study: str, arguments: tuple[str, ...], telling: str) -> None:
    assert telling in command.refused("study", *arguments)


@pytest.mark.fabric
def test_points_nearest_to_a_crossover_are_measured(command: Command) -> None:
    (command.folder / "tiny").mkdir()
    (command.folder / "tiny" / "study.toml").write_text(TINY)
    done = command("study", "validate", "tiny", "--top", "1", "--repeat", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "measuring 1 points on the emulated fabric takes about" in done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((command.folder / "tiny" / "validated.json").read_text())
    rows = list(csv.DictReader((command.folder / "tiny" / "validated.csv").read_text().splitlines()))
    assert [row["schedule"] for row in rows] == ["ulysses", "ring-attention"]
    for row, point in zip(rows, found["points"], strict=True):
        assert float(row["measured_s"]) == point["measured_s"] > 0
        assert point["error"] == pytest.approx(point["predicted_s"] / point["measured_s"] - 1)
        assert point["time_s"] == pytest.approx(_tiny_time_s(point["schedule"], point["seq"]))


def _tiny_time_s(schedule: str, seq: int) -> float:
    return float(predict("full-mesh:4", schedule, Workload(seq, heads=4), samples=0)[0].time_s)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(command: Command, tmp_path: Path) -> None:
    (command.folder / "tiny").mkdir()
    (command.folder / "tiny" / "study.toml").write_text(TINY)
    (command.folder / "tiny" / "validated.csv").mkdir()
    assert "it is a folder" in command.refused("study", "validate", "tiny")
