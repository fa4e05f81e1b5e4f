"""Schedules that a prediction is given: by name or as objects; those that do not apply cost the others nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tasp_lab
from tasp_lab.core.errors import NoLinkError, ScheduleError, TaspLabError
from tasp_lab.prediction.columns import fields_of
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules, check_schedules
from tasp_lab.schedules.registry import COLLECTIVES
from tasp_lab.topology.builders import full_mesh, torus
from tasp_lab.validation.fabric_runs import run_best
from tasp_lab.workload.layer import Workload
from tests.conftest import Tell

LAYER = Workload(4096, heads=4, mask="causal")
PREDICT: Callable[..., Any] = tasp_lab.predict
COMPARE: Callable[..., Any] = tasp_lab.compare


def doubling(shard_bytes: int) -> Schedule:
    """AllGather by recursive doubling among four ranks: each step exchanges all that a rank has."""
    steps = [
        [(rank, rank ^ 1, 0, rank) for rank in range(4)],
        [(rank, rank ^ 2, 0, block) for rank in range(4) for block in (rank, rank ^ 1)],
    ]
    own = np.eye(4, dtype=bool)
    return Schedule("doubling", 4, 1, Blocks.of_data(np.full(4, shard_bytes)), own, np.ones_like(own),
                    [Step.of(each) for each in steps])  # fmt: skip


# Schedules that do not apply


def test_the_others_are_predicted_and_the_reason_is_a_row(tell: Tell) -> None:
    arguments = (
        "predict",
        "torus:4x4",
        "--routes",
        "direct",
        "--schedule",
        "direct",
        "--schedule",
        "ring",
        "--shard-bytes",
        "1MiB",
    )
    code, out, err = tell(*arguments)
    assert (code, "Traceback" in err) == (0, False)
    assert "step 0: rank 3 sends to rank 4, but torus:4x4 has no such link" in " ".join(out.split())
    code, out, _ = tell(*arguments, "--json")
    ring, direct = json.loads(out)["predictions"]
    assert code == 0
    assert (ring["schedule"], ring["status"], ring["reason"]) == ("ring", "ok", None)
    assert (direct["schedule"], direct["status"], direct["time_s"]) == ("direct", "does not apply", None)
    assert "no such link" in direct["reason"]


def test_times_are_those_of_the_schedules_alone() -> None:
    alone, beside = (
        tasp_lab.predict("torus:4x4", given, 2**20, routes="direct") for given in ("ring", ["direct", "ring"])
    )
    assert [each.time_s for each in beside] == [each.time_s for each in alone]
    assert [each.schedule for each in beside.refused] == ["direct"]
    assert beside.to_pandas()["status"].tolist() == ["ok", "does not apply"]
    assert tasp_lab.predict("full-mesh:4", ["direct", "ring"], 64).refused == ()


def test_layers_and_rings_that_do_not_exist_are_rows_too() -> None:
    found = tasp_lab.predict("full-mesh:6", ["ulysses", "ring-attention"], LAYER, passes="both")
    assert [each.passing for each in found] == ["forward", "backward", "both"]  # type: ignore[attr-defined]
    assert [each.schedule for each in found.refused] == ["ulysses"]
    found = tasp_lab.predict("full-mesh:4", ["tasp", "ring-attention"], LAYER, fold=1)
    assert [each.schedule for each in found] == ["ring-attention"]
    assert "at most 2" in found.refused[0].reason


def test_a_prediction_without_a_time_is_refused() -> None:
    with pytest.raises(NoLinkError, match=r"^schedule 'direct', step 0: .* no such link, and routes 'direct' forw"):
        tasp_lab.predict("torus:4x4", "direct", 2**20, routes="direct")
    with pytest.raises(ScheduleError, match=r"^no schedule applies: ulysses: .*; usp:2x4: is for 8 ranks") as refused:
        tasp_lab.predict("full-mesh:6", ["ulysses", "usp:2x4"], LAYER)
    assert "\n" not in str(refused.value)


# Schedules as objects


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("shard_bytes", [1, 600, 4096])
def test_a_built_collective_is_predicted_as_by_its_name(name: str, shard_bytes: int) -> None:
    (built,) = build_schedules(name, full_mesh(4), shard_bytes)
    renamed = replace(built, name="mine")
    by_name, by_object = tasp_lab.predict(full_mesh(4), [name, renamed], shard_bytes, samples=0)
    assert by_object.schedule == "mine"
    fields = fields_of(by_object, "collective")
    assert fields == fields_of(by_name, "collective") | {"schedule": "mine"}


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("name", ["tasp", "ulysses", "usp:2x2", "token-ring", "grid:2x2", "double-ring:2x2", "burst"])
def test_a_built_layer_is_predicted_as_by_its_name(name: str, passes: Any) -> None:
    (built,) = build_schedules(name, full_mesh(4), LAYER, options=AttentionOptions(passes))
    by_name, by_object = tasp_lab.predict("full-mesh:4", [name, replace(built, name="mine")], LAYER, passes=passes)
    assert by_object.time_s == by_name.time_s
    assert by_object.bound_s == by_name.bound_s
    assert (by_object.time_low_s, by_object.time_high_s) == (by_name.time_low_s, by_name.time_high_s)


@pytest.mark.parametrize(
    ("layer", "name"),
    [(Workload(4096, heads=4, mask="causal", kind="linear", decay="head"), "lasp-2"),
     (Workload(4096, heads=4, mask="causal", kind="hybrid", layers="LLS"), "lasp-2+ulysses")],
)  # fmt: skip
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_layers_of_other_kinds_fit_as_objects(layer: Workload, name: str, passes: Any) -> None:
    built = build_schedules(name, full_mesh(4), layer, options=AttentionOptions(passes))
    assert check_schedules(built, layer, passes) is None
    by_name, by_object = tasp_lab.predict("full-mesh:4", [name, *built], layer, passes=passes, samples=0)
    assert by_object.time_s == by_name.time_s


def test_a_schedule_of_ones_own_stands_beside_those_by_name() -> None:
    """At 1 B/s and without latency: the ring takes three steps of 30 B; doubling sends 30 B, then 60 B."""
    ring, own = tasp_lab.predict(full_mesh(4, 1.0, 0.0), ["ring", doubling(30)], 30, samples=0)
    assert (float(ring.time_s), float(own.time_s)) == (90, 90)
    assert own.bound_s == ring.bound_s
    found = tasp_lab.predict("bidirectional-ring:4", ["ring", doubling(30)], 30, routes="direct")
    assert [each.schedule for each in found.refused] == ["doubling"]


def test_compare_ranks_objects_among_names(tell: Tell) -> None:
    (built,) = build_schedules("ulysses", full_mesh(4), LAYER)
    found = tasp_lab.compare("full-mesh:4", LAYER, ["ring-attention", replace(built, name="mine")], tune=True)
    plain = tasp_lab.compare("full-mesh:4", LAYER, ["ring-attention", "ulysses"], tune=True)
    assert [each.schedule for each in found.candidates] == ["mine", "ring-attention"]
    assert [each.time_s for each in found.candidates] == [each.time_s for each in plain.candidates]
    assert json.loads(json.dumps(found.to_dict()))["results"][0]["options"] == {}
    assert found.single_ring_s == plain.single_ring_s
    (on_six,) = build_schedules("ring-attention", torus((2, 3)), LAYER)
    refused = tasp_lab.compare("full-mesh:4", LAYER, ["ulysses", on_six]).candidates[-1]
    assert "is for 6 ranks, full-mesh:4 has 4" in refused.reason


(FORWARD,) = build_schedules("ulysses", full_mesh(4), LAYER)
(REDUCTION,) = build_schedules("ring-all-reduce", full_mesh(4), 64)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: PREDICT("full-mesh:4", FORWARD, 64), "'ulysses' computes with AttentionTask, expected a collective"),
        (lambda: PREDICT("full-mesh:4", REDUCTION, LAYER), "computes nothing, expected one for softmax attention"),
        (lambda: PREDICT("full-mesh:4", REDUCTION, 65), "is an AllReduce of 64 B per rank, expected 65 B"),
        (lambda: PREDICT("full-mesh:4", ["ring", REDUCTION], 64), "is an AllReduce, expected an AllGather as the oth"),
        (lambda: PREDICT("full-mesh:4", FORWARD, replace(LAYER, heads=8)), "for a layer with heads 4, expected 8"),
        (lambda: PREDICT("full-mesh:4", FORWARD, LAYER, passes="both"), "is a forward pass, requested is 'both'"),
        (lambda: PREDICT("full-mesh:4", FORWARD, replace(LAYER, kind="linear")), "AttentionTask, expected LinearTask"),
        (lambda: PREDICT("full-mesh:8", FORWARD, LAYER), "is for 4 ranks, full-mesh:8 has 8"),
        (lambda: PREDICT("full-mesh:4", [3], 64), "3 of type int, expected names of schedules"),
        (lambda: PREDICT("full-mesh:4", None, 64), "schedules: None of type NoneType, expected names"),
        (lambda: PREDICT("full-mesh:4", [], 64), "schedules: none, expected names of schedules"),
        (lambda: COMPARE("full-mesh:4", LAYER, [REDUCTION]), "computes nothing, expected one for softmax attention"),
        (lambda: run_best(COMPARE("full-mesh:4", LAYER, [FORWARD]), 1), "only schedules by name run on a fabric"),
    ],
)  # fmt: skip
def test_an_object_of_other_work_is_refused_in_one_line(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(TaspLabError, match=message) as refused:
        ask()
    assert "\n" not in str(refused.value)
