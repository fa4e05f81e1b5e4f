"""The provenance of a study: the constants of every machine with the intervals that ``profile show`` states."""

from __future__ import annotations

import json

import pytest

from tasp_lab.core.units import parse_bandwidth_bytes_per_s
from tasp_lab.study.export import provenance
from tasp_lab.study.file import load_study
from tests.conftest import Command

STUDY = {
    "study": {"name": "two machines", "seed": 3},
    "machine": {"name": ["h100-2x8", "mi300x-8"]},
    "layer": {"seq": 65536, "heads": 32},
    "schedule": {"name": ["tasp", "ulysses"]},
}


def test_each_constant_has_its_source_and_interval(command: Command) -> None:
    study = load_study(STUDY)
    told = provenance(study, list(study.points()), "tasp-lab study run two.toml")
    assert (told["study"], told["seed"], told["command"]) == ("two machines", 3, "tasp-lab study run two.toml")
    found = {(each["machine"], each["name"]): each for each in told["constants"]}
    assert {machine for machine, _ in found} == {"h100-2x8", "mi300x-8"}
    shown = {
        each["name"]: each for each in json.loads(command("profile", "show", "h100-2x8", "--json").stdout)["constants"]
    }
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


def test_what_is_assumed_is_an_assumption() -> None:
    study = load_study(STUDY)
    told = provenance(study, list(study.points()), "")
    assumed = [each for each in told["constants"] if each["assumed"]]
    assert assumed
    for each in assumed:
        assert any(each["name"] in text and each["machine"] in text for text in told["assumptions"])
