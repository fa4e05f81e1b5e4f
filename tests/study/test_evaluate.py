"""Points and their rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab import predict
from tasp_lab.core.errors import StudyError
from tasp_lab.core.version import MODEL_VERSION, VERSION
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.overrides import overridden
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.question import constants_of, key_of
from tasp_lab.prediction.ring_choice import ring_candidates
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.study.evaluate import batches, evaluate, group_rows
from tasp_lab.study.frames import first_is_faster
from tasp_lab.study.point import Point, Row
from tasp_lab.workload.layer import Workload

MACHINES = st.sampled_from(["full-mesh:4", "h100-4", "mi300x-4", "nodes:2x2"])
SCHEDULES = st.sampled_from(["zigzag-ring-attention", "tasp", "ulysses", "token-ring", "kv-all-gather", "usp:2x2"])


@st.composite
def points(draw: st.DrawFn) -> Point:
    layer = Workload(
        draw(st.integers(16, 64)) * 64,
        heads=draw(st.sampled_from([4, 8])),
        kv_heads=4,
        head_dim=64,
        mask=draw(st.sampled_from(["full", "causal"])),
    )
    options = AttentionOptions(draw(st.sampled_from(["forward", "backward", "both"])))
    return Point(draw(MACHINES), draw(SCHEDULES), layer, options)


def rows_of(asked: list[Point], screen: bool = False) -> list[Row]:
    """Answers without known keys are rows."""
    return [row for row in group_rows(asked, screen) if not isinstance(row, str)]


@settings(max_examples=25)
@given(points())
def test_a_row_has_the_numbers_of_predict(point: Point) -> None:
    row = evaluate(point)
    found = predict(point.machine, point.schedule, point.layer, options=point.options, samples=0)[-1]
    assert row["status"] == "ok"
    for name in ("time_s", "compute_s", "exposed_s", "bound_s"):
        assert row[name] == pytest.approx(float(getattr(found, name)), rel=1e-9), name
    assert row["buffer_bytes"] == found.buffer_bytes
    assert float(row["time_low_s"] or 0) <= float(row["time_s"] or 0) <= float(row["time_high_s"] or 0)


@settings(max_examples=15)
@given(st.lists(points(), min_size=2, max_size=6))
def test_screening_settles_only_what_is_slower(drawn: list[Point]) -> None:
    like = [replace(each, machine=drawn[0].machine, work=drawn[0].layer, options=drawn[0].options) for each in drawn]
    exact, screened = rows_of(like), rows_of(like, screen=True)
    best_s = min(float(row["time_s"] or 0) for row in exact)
    for mine, other in zip(exact, screened, strict=True):
        if other["status"] == "settled":
            assert best_s < float(other["bound_s"] or 0) <= float(mine["time_s"] or 0) * (1 + 1e-9)
        else:
            assert other == mine


def test_the_fastest_is_never_settled() -> None:
    layer = Workload(2**16, heads=8, mask="causal")
    names = ("zigzag-ring-attention", "ring-attention", "striped-ring-attention")
    rows = rows_of([Point("h100-8", name, layer) for name in names], screen=True)
    assert [row["status"] for row in rows][:2] == ["ok", "settled"]  # whole blocks: one rank computes twice as much


def test_a_refused_point_says_why() -> None:
    row = evaluate(Point("full-mesh:4", "ulysses", Workload(4096, heads=3, mask="full")))
    assert row["status"] == "does not apply"
    assert "3 heads" in str(row["error"])
    assert row["time_s"] is None
    missing = evaluate(Point("h100-9", "ulysses", Workload(4096, mask="full")))
    assert (missing["status"], missing["constants"]) == ("does not apply", "")


def test_overrides_are_in_the_row_and_in_its_key() -> None:
    point = Point("h100-8", "zigzag-ring-attention", Workload(4096, heads=8, mask="full"))
    faster, fewer = replace(point, overrides=("compute.rate=x2",)), replace(point, overrides=("layer.kv_heads=1",))
    rows = [evaluate(each) for each in (point, faster, fewer)]
    assert len({row["key"] for row in rows}) == 3
    assert rows[1]["compute_s"] < rows[0]["compute_s"]  # type: ignore[operator]
    assert (rows[2]["kv_heads"], rows[2]["overrides"]) == (1, "layer.kv_heads=1")
    assert rows[2]["bytes_per_rank"] * 8 == rows[0]["bytes_per_rank"]  # type: ignore[operator]
    assert constants_of(fewer) == constants_of(point) != constants_of(faster)


def test_a_row_repeats_the_point() -> None:
    point = Point("full-mesh:2", "tasp", Workload(4096, heads=4, mask="full"), AttentionOptions("both", buffers=4))
    row = evaluate(point)
    assert json.loads(str(row["inputs"])) == json.loads(json.dumps(point.inputs()))
    assert row["key"] == key_of(point.key(), str(row["digest"]))
    assert (row["version"], row["models"]) == (VERSION, MODEL_VERSION)


def test_labels_are_no_inputs() -> None:
    point = Point("full-mesh:2", "tasp", Workload(4096, heads=4, mask="full"))
    named = replace(point, labels=(("seq", 4096), ("colour", "red")))
    assert evaluate(named) == {**evaluate(point), "colour": "red"}


def test_a_batch_has_one_layer_and_its_points_schedule_by_schedule() -> None:
    layer = Workload(4096, heads=4, mask="full")
    asked = [Point(machine, name, layer) for machine in ("full-mesh:2", "full-mesh:4") for name in ("tasp", "ulysses")]
    other = [replace(point, work=Workload(8192, heads=4, mask="full")) for point in asked]
    found = [[each.schedule for each in batch] for batch in batches([*asked, *other])]
    assert found == [["tasp", "tasp", "ulysses", "ulysses"]] * 2


def test_a_worker_of_another_version_refuses() -> None:
    with pytest.raises(StudyError, match=r"the study was started by 0\.0\.1: expected one version"):
        group_rows([], code="0.0.1")


@pytest.mark.parametrize("sequence", [4096, 65536])
def test_of_several_rings_a_row_has_those_of_predict(sequence: int) -> None:
    """With faster NICs there are two candidates; the one that its bound settles is not simulated."""
    point = Point(
        "h100-2x8", "tasp", Workload(sequence, heads=16, head_dim=128, mask="full"), overrides=("nic.bandwidth=x2",)
    )
    row, machine = evaluate(point), overridden(load_machine("h100-2x8"), ["nic.bandwidth=x2"])
    assert len(ring_candidates(machine)) == 2
    found = predict(machine, "tasp", point.layer, samples=0)[-1]
    assert row["time_s"] == pytest.approx(float(found.time_s), rel=1e-9)


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(8)])
def test_rows_on_ideal_links_are_exact(sampling: Sampling) -> None:
    row = evaluate(Point("torus:2x2", "zigzag-ring-attention", Workload(8192, mask="full"), sampling=sampling))
    assert row["time_low_s"] == row["time_high_s"] == row["time_s"]
    assert row["setting"] == "exact"
    assert first_is_faster(row, {**row, "time_s": float(str(row["time_s"])) * 1.001}) == 1
    assert first_is_faster(row, {**row, "time_s": float(str(row["time_s"])) * (1 + 1e-13)}) == 0.5
