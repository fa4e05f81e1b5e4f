"""Collectives ranked by size: the predictions of `predict`, the fastest first, also of schedules of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasp_lab.core.errors import TaspLabError
from tasp_lab.formats.export import export
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction.predict import compare_collectives, predict
from tasp_lab.schedules.registry import COLLECTIVES
from tests.conftest import Command, Tell


@pytest.mark.parametrize("machine", ["h100-8", "full-mesh:4"])
def test_every_collective_has_its_predictions_the_fastest_first(machine: str) -> None:
    rankings = compare_collectives(machine, "4MiB", samples=0)
    assert [each[0].collective for each in rankings] == ["AllGather", "ReduceScatter", "AllReduce"]
    for ranking in rankings:
        times = [each.time_s for each in ranking]
        assert times == sorted(times)
        names = [name for name, spec in COLLECTIVES.items() if spec.kind == ranking[0].collective]
        assert {each.schedule for each in (*ranking, *ranking.refused)} == set(names)
        alone = {each.schedule: each.time_s for each in predict(machine, names, "4MiB", samples=0)}
        assert {each.schedule: each.time_s for each in ranking} == alone
    assert len(rankings.records()) == len(COLLECTIVES) - 2  # an AllToAll and a SendRecv have one schedule each


def test_a_schedule_of_others_is_ranked_beside_ours(tmp_path: Path, tell: Tell) -> None:
    (text,) = export(load_machine("full-mesh:4"), "direct", 2**20, "msccl-xml").values()
    theirs = tmp_path / "theirs.xml"
    theirs.write_bytes(text)
    code, out, err = tell(
        "compare", "full-mesh:4", "--shard-bytes", "1MiB", "--schedule", str(theirs), "--schedule", "ring", "--json"
    )
    assert code == 0, err
    (part,) = json.loads(out)["parts"]
    assert part["collective"] == "AllGather"
    assert part["fastest"] == part["predictions"][0]["schedule"] != "ring"
    assert [each["schedule"] for each in part["predictions"]][1] == "ring"


def test_the_line_names_the_fastest_and_the_next(tell: Tell) -> None:
    code, out, _ = tell(
        "compare", "full-mesh:4", "--shard-bytes", "1MiB", "--schedule", "ring", "--schedule", "multi-ring"
    )
    assert code == 0
    one, two = (float(each.time_s) for each in predict("full-mesh:4", ["multi-ring", "ring"], "1MiB"))
    assert f"AllGather: multi-ring is {two / one:.1f}x as fast as the next, ring." in out


def test_rows_are_written(command: Command) -> None:
    done = command("compare", "full-mesh:4", "--shard-bytes", "1MiB", "--csv", "rows.csv")
    assert done.returncode == 0, done.stderr
    assert "multi-ring-all-reduce" in (command.folder / "rows.csv").read_text()


def test_where_nothing_applies_it_is_refused() -> None:
    with pytest.raises(TaspLabError, match="no schedule applies"):
        compare_collectives("torus:3x3", "1MiB", ["library-switch-all-reduce", "library-tree-all-reduce"],
                            routes="direct")  # fmt: skip
