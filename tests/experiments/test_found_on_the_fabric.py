"""Found schedules on the emulated fabric: what is committed is right and saves what the record has."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.common import RESULTS
from experiments.tables.fabric import Case
from experiments.tables.found_on_the_fabric import PARTS, TARGET, measure, publish, saved
from sim.simulate import simulate
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules

RECORD = json.loads((RESULTS / "found_on_the_fabric.json").read_text())["parts"]


@pytest.mark.parametrize("key", PARTS)
def test_a_committed_schedule_is_faster_than_the_named_one_by_the_recorded_share(key: str) -> None:
    """On links of the nominal bandwidth, which calibrated ones are within a few percent of."""
    part, row = PARTS[key], RECORD[key]
    links = part.links.scaled(part.scale).map_links(lambda _, link: replace(link, latency_s=0.0))
    machine = Machine(links, compute=ComputeRate(row["flops_per_s"]))
    times = [
        sum(float(simulate(each, machine, "array", events=False).time_s)
            for each in build_schedules(name, links, part.layer, None, AttentionOptions("both")))
        for name in (row["named"], str(RESULTS / "found_on_the_fabric" / f"{key}.json"))
    ]  # fmt: skip
    assert 1 - times[1] / times[0] == pytest.approx(saved(row)[0], abs=0.02)


def test_the_page_has_the_verdict_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "found_on_the_fabric.json").write_text((RESULTS / "found_on_the_fabric.json").read_text())
    publish(tmp_path)
    text = (tmp_path / "found_on_the_fabric.md").read_text()
    assert text == (RESULTS / "found_on_the_fabric.md").read_text()
    near = sum(abs(predicted - measured) <= TARGET for predicted, measured in map(saved, RECORD.values()))
    assert re.search(rf"on {near} of\s+{len(PARTS)} layers", text)


@pytest.mark.fabric
@pytest.mark.distributed
@pytest.mark.slow
def test_a_small_layer_is_searched_run_and_written(tmp_path: Path) -> None:
    measure("nodes", Case("full-mesh:3", sequence=96, ccr=0.25), 1, 10, tmp_path)
    row = json.loads((tmp_path / "found_on_the_fabric.json").read_text())["parts"]["nodes"]
    assert len(row["named_measured_s"]) == len(row["found_measured_s"]) == 1
    publish(tmp_path)
