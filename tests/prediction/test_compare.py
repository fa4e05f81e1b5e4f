"""Every schedule of attention on one machine: the numbers of predictions, ranked, and why some do not apply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_lab
from runtime.calibration import expected_duration_s, route_classes
from sim.bounds.schedules import busiest_link_bytes, link_bytes
from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import QuantityError, ScheduleError, TaspLabError
from tasp_lab.core.units import format_time
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.compare import SINGLE_RINGS, compare
from tasp_lab.prediction.predict import predict
from tasp_lab.prediction.uncertainty import Uncertainty
from tasp_lab.rings.decompose import decompose
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import attention_names_on
from tasp_lab.topology.builders import bidirectional_ring, full_mesh, nodes, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.validation import fabric_runs
from tasp_lab.validation.fabric_runs import run_best
from tasp_lab.validation.fabrics import default_scale
from tasp_lab.validation.validate import Comparison
from tasp_lab.workload.layer import Workload
from tests.support.links import without_links

LAYER = Workload(4096, heads=8, kv_heads=4, mask="causal")


@pytest.mark.parametrize(
    ("machine", "passes"), [("h100-2x4", "both"), ("full-mesh:6", "forward"), ("switch:4", "backward")]
)
def test_times_are_those_of_predictions_best_first(machine: str, passes: Pass) -> None:
    found = compare(machine, LAYER, passes=passes)
    applying = [each for each in found.candidates if each.applies]
    assert [each.time_s for each in applying] == sorted(each.time_s for each in applying)
    assert {each.schedule for each in found.candidates} == set(attention_names_on(found.machine.topology.world_size))
    for each in applying:
        predicted = next(p for p in predict(machine, each.schedule, LAYER, passes=passes) if p.is_all)
        assert float(each.time_s) == pytest.approx(float(predicted.time_s), rel=1e-9)
        assert each.bytes_sent == predicted.bytes_sent
    assert found.single_ring_s == min(each.time_s for each in applying if each.schedule in SINGLE_RINGS)


def test_schedules_that_do_not_apply_say_why() -> None:
    few = Workload(4096, heads=4, mask="causal")
    found = {each.schedule: each for each in compare("bidirectional-ring:5", few, routes="direct").candidates}
    assert "has no such link" in found["token-ring"].reason
    assert found["ulysses"].reason == "4 heads for 5 ranks, expected as many heads or more, as for usp:1x5"
    assert all((not each.applies) == bool(each.reason) for each in found.values())
    assert found["ring-attention"].reason == ""


def test_options_apply_to_the_schedules_that_have_them() -> None:
    options = {"passes": "both", "dataflow": "rotate-kv", "result_dtype": "fp32", "buffers": 4}
    found = {each.schedule: each for each in compare("full-mesh:4", LAYER, **options).candidates}  # type: ignore[arg-type]
    for name, kept in {
        "ulysses": {"result_dtype": "fp32"},
        "tasp": {"dataflow": "rotate-kv", "buffers": 4},
        "token-ring": {"result_dtype": "fp32", "buffers": 4},
    }.items():
        predicted = next(p for p in predict("full-mesh:4", name, LAYER, passes="both", **kept) if p.is_all)  # type: ignore[arg-type]
        assert float(found[name].time_s) == pytest.approx(float(predicted.time_s), rel=1e-9)


def test_rings_that_do_not_exist_are_a_reason() -> None:
    path = without_links(bidirectional_ring(4), ["0-1"])
    found = compare(path, LAYER, routes="direct").candidates
    assert [each.schedule for each in found if each.applies] == ["trees-kv-all-gather"]
    assert all(each.reason for each in found[1:])
    assert all(each.applies for each in compare(path, LAYER).candidates)


@pytest.mark.parametrize("topology", [full_mesh(4), switch(4), nodes(2, 2, "switch")])
@settings(max_examples=20)
@given(st.data())
def test_the_busiest_link_carries_what_the_routes_say(topology: Topology, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(attention_names_on(4)))
    schedules = build_schedules(name, topology, LAYER, options=AttentionOptions("both"))
    load: dict[int, int] = {}
    for schedule in schedules:
        for step in schedule.steps:
            for source, destination, block in zip(step.source, step.destination, step.block, strict=True):
                for each in topology.route(int(source), int(destination)).constraints:
                    load[each] = load.get(each, 0) + int(schedule.block_bytes[block])
    busy = {
        each: Fraction(size) / Fraction(topology.constraints[each].bandwidth_bytes_per_s) for each, size in load.items()
    }
    longest = {load[each] for each, time_s in busy.items() if time_s == max(busy.values())}
    assert busiest_link_bytes([link_bytes(each, topology) for each in schedules], topology) in longest


def test_the_bytes_of_one_ring_on_a_mesh_are_all_on_its_links() -> None:
    (ring,) = compare("full-mesh:8", Workload(8192, heads=8, mask="full"), ["ring-attention"]).candidates
    assert ring.bytes_per_rank == ring.link_bytes == 7 * 8192 // 8 * 2 * 8 * 128 * 2


def test_the_frame_has_all_schedules() -> None:
    frame = tasp_lab.compare("full-mesh:4", LAYER).to_pandas()
    assert set(frame["schedule"]) == set(attention_names_on(4))
    assert np.isfinite(frame["time_s"]).all()


@dataclass
class NoFabric:
    """In place of `validate`: what it was asked for, and what had been said by then."""

    said: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, machine: Machine, **asked: Any) -> Comparison:
        self.asked.append({"machine": machine, "said": list(self.said), **asked})
        return Comparison("emulated", 1.0, cast(Any, None), ())


@pytest.fixture
def no_fabric(monkeypatch: pytest.MonkeyPatch) -> NoFabric:
    instead = NoFabric()
    monkeypatch.setattr(fabric_runs, "validate", instead)
    return instead


def ran(no_fabric: NoFabric) -> dict[str, AttentionOptions]:
    """The schedules that were run, with their options."""
    return {name: each["options"] for each in no_fabric.asked for name in each["schedules"]}


@pytest.mark.parametrize("scale", [1e-4, None])
def test_how_long_runs_take_is_said_before_the_first(no_fabric: NoFabric, scale: float | None) -> None:
    """Each of two sets of options has a fabric: its start, its calibration, and its schedules six times."""
    names = ["ring-attention", "tasp", "ulysses", "kv-all-gather"]
    said = no_fabric.said.append
    found = run_best(compare("full-mesh:4", LAYER, names, buffers=4), 20, scale=scale, progress=said)
    assert set(ran(no_fabric)) == set(names)
    times = {each.schedule: each.time_s for each in found.candidates}
    seconds = 0.0
    groups = [each["schedules"] for each in no_fabric.asked]
    for group in groups:
        full_speed_s = 6 * sum(times[name] for name in group)
        used = default_scale(full_mesh(4), full_speed_s) if scale is None else scale
        seconds += 5 + expected_duration_s(route_classes(full_mesh(4).scaled(used))) + full_speed_s / used
    line = f"running 4 schedules on the emulated fabric, 6 times each: about {seconds:.0f} s"
    assert len(groups) == 2
    assert all(each["said"][-1] == line for each in no_fabric.asked)


def test_the_fabric_has_the_rate_and_the_rings_of_the_prediction(no_fabric: NoFabric) -> None:
    """Emulated: the rate of the machine, which is scaled there, and no library."""
    found = run_best(compare("h100-8", LAYER, ["tasp", "ulysses"], lanes=2, compute="timed:5TFLOP/s"), 1)
    machine = no_fabric.asked[0]["machine"]
    assert (machine.compute, machine.comm_library.name) == (found.machine.compute, "ideal")
    assert machine.compute == ComputeRate(5e12)
    assert all(each["compute"] is None for each in no_fabric.asked)
    ranking = compare("full-mesh:4", LAYER, ["tasp", "ulysses"], lanes=2, compute="timed:5TFLOP/s", buffers=4)
    run_best(ranking, 9, "local")
    given = {name: each for each in no_fabric.asked[-2:] for name in each["schedules"]}
    assert (given["tasp"]["lanes"], given["tasp"]["compute"]) == (2, "timed:5TFLOP/s")
    assert "lanes" not in given["ulysses"]


def test_tuned_schedules_are_run_with_their_options(no_fabric: NoFabric) -> None:
    found = run_best(compare("full-mesh:4", LAYER, ["token-ring", "zigzag-ring-attention"], tune=True), 2)
    options = {each.schedule: each.options for each in found.candidates}
    assert ran(no_fabric) == options
    assert options["token-ring"].tail_chunks > 1


def test_rings_of_another_world_are_an_error_and_those_of_other_links_a_reason() -> None:
    with pytest.raises(ScheduleError, match=r"^decomposition: rings of 5 ranks, full-mesh:4 has 4$"):
        compare("full-mesh:4", LAYER, decomposition=decompose(full_mesh(5)))
    found = compare("bidirectional-ring:4", LAYER, ["tasp", "ring-attention"], decomposition=decompose(full_mesh(4)),
                    routes="direct")  # fmt: skip
    reasons = {each.schedule: each.reason for each in found.candidates}
    assert "has no such link" in reasons["tasp"]
    assert reasons["ring-attention"] == ""


def test_what_python_is_refused() -> None:
    with pytest.raises(QuantityError, match="measure: -2, expected 0 or more"):
        run_best(compare("full-mesh:4", LAYER, "tasp"), -2)
    with pytest.raises(ScheduleError, match="unknown schedule 'tsap', did you mean 'tasp'"):
        compare("full-mesh:4", LAYER, "tsap")
    with pytest.raises(TaspLabError):
        compare("no-such-machine", LAYER)


@pytest.mark.distributed
def test_the_best_and_a_ring_are_run_on_a_fabric() -> None:
    layer = Workload(512, heads=4, head_dim=16, mask="causal")
    names = ["ring-attention", "zigzag-ring-attention", "tasp", "ulysses"]
    found = run_best(compare("full-mesh:4", layer, names, compute=1e9, buffers=4), 1, "local", repeats=1)
    run = [each.schedule for each in found.candidates if each.measured_s is not None]
    best = found.best.schedule
    assert best in run
    assert len(run) == (1 if best in SINGLE_RINGS else 2)
    assert any(name in SINGLE_RINGS for name in run)
    assert all((each.measured_s is None) == (each.measured_prediction_s is None) for each in found.candidates)
    assert all(format_time(each.measured_s) in str(found) for each in found.candidates if each.measured_s)


@pytest.mark.distributed
def test_tuned_options_are_measured() -> None:
    layer = Workload(512, heads=4, head_dim=16, mask="full")
    ranking = compare("full-mesh:3", layer, ["token-ring", "ring-attention"], tune=True, compute=1e9)
    found = run_best(ranking, 2, "local", repeats=1)
    assert all(each.measured_s for each in found.candidates)
    run = [(run.prediction.schedule, run.prediction.options) for each in found.fabric for run in each.runs]  # type: ignore[union-attr]
    assert sorted(run, key=str) == sorted(((each.schedule, each.options) for each in found.candidates), key=str)


def test_no_schedule_is_sampled_unless_samples_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order follows from errors that schedules do not share; intervals alone need samples."""
    sampled = list[str]()
    samples_s = Uncertainty.samples_s

    def counted(self: Uncertainty, schedules: Sequence[Schedule], transfers: int = 0) -> list[FloatArray]:
        sampled.extend(schedule.name for schedule in schedules)
        return samples_s(self, schedules, transfers)

    monkeypatch.setattr(Uncertainty, "samples_s", counted)
    names = ["ulysses", "zigzag-ring-attention"]
    rows: Any = compare("h100-4", LAYER, names, passes="both").to_dict()["results"]
    assert sampled == []
    assert all(row["time_low_s"] <= row["time_s"] <= row["time_high_s"] for row in rows)
    found = compare("h100-4", LAYER, names, passes="both", samples=8)
    assert [row["first_is_faster"] for row in found.to_dict()["results"]] == [row["first_is_faster"] for row in rows]
    assert sorted(sampled) == sorted(2 * names), "each pass once"
