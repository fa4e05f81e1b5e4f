"""Contention in predictions: its share, on and off, and what a collective or a machine without it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasp_lab import predict
from tasp_lab.cli.app import app_of
from tasp_lab.core.errors import QuantityError
from tasp_lab.prediction.columns import fields_of
from tasp_lab.prediction.compare import compare
from tasp_lab.workload.layer import Workload

LAYER = Workload(16384, heads=64, kv_heads=8, mask="causal")
ARGUMENTS = ["h100-8", "--schedule", "tasp", "--seq", "16Ki", "--heads", "64", "--kv-heads", "8", "--mask", "causal",
             "--samples", "0"]  # fmt: skip


@pytest.mark.parametrize("engine", ["simpy", "array"])
def test_its_share_is_the_time_less_the_time_without(engine: Any) -> None:
    on = fields_of(predict("h100-8", "tasp", LAYER, engine=engine, samples=0)[0], "layer", explain=True)
    off = fields_of(
        predict("h100-8", "tasp", LAYER, engine=engine, contention=False, samples=0)[0], "layer", explain=True
    )
    assert on["contention_s"] == on["time_s"] - off["time_s"] > 0
    assert off["contention_s"] is None
    for field in ("communication_s", "compute_s", "bound_s", "bytes_sent"):
        assert on[field] == off[field]
    assert off["bound_s"] <= off["time_s"] < on["time_s"]


def test_of_both_passes_it_is_the_sum() -> None:
    found = predict("h100-8", "tasp", LAYER, passes="both", samples=0)
    *passes, both = (fields_of(each, "layer", explain=True) for each in found)
    for name in ("contention_s", "communication_s", "compute_s"):
        assert both[name] == pytest.approx(sum(each[name] for each in passes))


def test_what_computes_while_nothing_is_in_flight_loses_nothing() -> None:
    assert predict("h100-8", "ulysses", LAYER, samples=0)[0].contention_s == 0


def test_its_inputs_are_part_of_the_hash_only_if_it_is_on() -> None:
    on, off = (predict("h100-8", "tasp", LAYER, contention=given) for given in (None, False))
    ideal = predict("h100-8", "tasp", LAYER, library="ideal")
    assert "contention" in on.provenance.inputs["machine"]
    assert "contention" not in off.provenance.inputs["machine"]
    assert "contention" not in ideal.provenance.inputs["machine"]


def test_compare_has_it_on_and_off() -> None:
    on, off = (
        compare("h100-8", LAYER, ["tasp", "ulysses"], contention=each, samples=0).candidates for each in (None, False)
    )
    lost = {each.schedule: each.contention_s for each in on}
    assert lost["tasp"] > 0 == lost["ulysses"]
    assert {each.contention_s for each in off} == {None}


@pytest.mark.parametrize(("machine", "library"), [("full-mesh:8", "auto"), ("h100-8", "ideal"), ("h100-8", "gloo")])
def test_it_is_refused_where_there_are_no_constants(machine: str, library: str) -> None:
    with pytest.raises(QuantityError, match=f"contention: {machine} with the library .* has no constants of it"):
        predict(machine, "tasp", LAYER, library=library, contention=True)


@pytest.mark.parametrize("contention", [True, False])
def test_collectives_have_none(contention: bool) -> None:
    with pytest.raises(QuantityError, match="contention: applies to attention layers only"):
        predict("h100-8", "ring", "1MiB", contention=contention)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app_of()(["predict", *ARGUMENTS, *arguments], exit_on_error=False, result_action="return_value")
    return capsys.readouterr().out


def test_the_command_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    on, off = run(capsys, "--explain"), run(capsys, "--explain", "--contention", "off")
    assert "kernel calls lose" in on
    assert "│ contention" in on
    assert "contention" not in off


def test_every_call_says_what_it_loses(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--explain", "--json"))["predictions"][0]
    lost = [call["contention_s"] for call in found["calls"]]
    assert min(lost) >= 0
    assert max(lost) > 0
    assert {"contention"} <= {part["kind"] for part in found["explanation"]}
