"""What failures cost: closed forms, every part of a machine on its own, the best of all schedules, and words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import tasp_lab
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.core.tables import Table
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.prediction import failures as module
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.failures import failures, parts_of
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.workload.layer import Workload

Row = Mapping[str, Any]

LAYER = Workload(24576, heads=8, kv_heads=4, mask="causal")


def row_of(rows: tuple[Row, ...] | list[Row], kind: str) -> Row:
    [found] = [row for row in rows if row["kind"] == kind]
    return found


def test_kernels_alone_take_longer_by_the_work_that_is_left_for_the_busiest_rank() -> None:
    """Ranks have equal parts of a full mask, and messages take next to no time."""
    machine = full_mesh(4, 1e18, 0)
    rows = failures(machine, Workload(12000, heads=4, mask="full"), ["ring-attention"]).rows
    assert [row["factor"] for row in rows] == pytest.approx([2, 4 / 3, 1, 1], rel=1e-6)
    assert [row["lost"] for row in rows[:2]] == ["1 of 4 GPUs, at half speed", "1 of 4 GPUs"]


def test_messages_alone_take_twice_as_long_over_half_of_a_nic_or_one_that_two_ranks_share() -> None:
    """All-to-all over two nodes of two ranks: each NIC carries all that a rank sends to the other node."""
    topology = nodes(2, 2, link_bandwidth_bytes_per_s=1e15, nic_bandwidth_bytes_per_s=1e9, nic_latency_s=0)
    found = failures(topology, Workload(65536, heads=4, mask="full"), ["ulysses"], compute=1e21)
    assert row_of(found.rows, "NIC")["factor"] == pytest.approx(2, rel=1e-3)
    assert row_of(found.rows, "slow NIC")["factor"] == pytest.approx(2, rel=1e-3)


SMALL = [
    ("nodes:2x3", "zigzag-ring-attention"),  # two of six NICs are in the ring
    ("nodes:2x2:rails", "ring-attention"),  # ranks compute for unequal times
    ("h100-2x2", "usp:2x2"),
    ("h100-2x4", "double-ring:4x2"),
    ("mi300x-8", "direct-attention"),
    ("torus:2x3", "tasp"),
    ("gb200-4", "kv-all-gather"),
]


@pytest.mark.parametrize(("name", "schedule"), SMALL)
def test_each_row_has_the_time_of_the_dearest_part_and_every_part_is_in_one(name: str, schedule: str) -> None:
    found = failures(name, LAYER, [schedule])
    options = compare(name, LAYER, [schedule]).best.options
    times: dict[str, list[float | None]] = {}
    for part in parts_of(load_machine(name).topology):
        changed = {"without": part.without, "overrides": part.overrides}
        own = tasp_lab.answer(tasp_lab.Question(name, schedule, LAYER, options, **changed))
        times.setdefault(part.kind, []).append(float(own.time_s) if own.applies else None)
    assert {row["kind"] for row in found.rows} == times.keys()
    base_s = found.document["time_s"]
    for kind, of_kind in times.items():
        rows = [row for row in found.rows if row["kind"] == kind]
        assert sum(row["alike"] for row in rows) == len(of_kind) == rows[0]["of"]
        if None in of_kind:
            assert {row["time_s"] for row in rows} == {None}
            assert all(row["reason"] for row in rows)
            continue
        assert max(row["time_s"] for row in rows) == pytest.approx(max(filter(None, of_kind)), rel=1e-9)
        assert min(row["least_factor"] for row in rows) * base_s == pytest.approx(min(filter(None, of_kind)), rel=1e-9)


def test_a_ring_over_two_nodes_needs_two_of_six_nics() -> None:
    nics = row_of(failures("nodes:2x3", LAYER, ["zigzag-ring-attention"]).rows, "slow NIC")
    assert (nics["simulated"], nics["alike"], nics["of"]) == (6, 6, 6)
    assert nics["least_factor"] == pytest.approx(1)
    assert nics["factor"] > 1.01


@pytest.mark.parametrize("name", ["h100-2x2", "full-mesh:4"])
def test_the_best_schedule_is_the_fastest_of_all_that_are_compared_there(name: str) -> None:
    found = failures(name, LAYER)
    for row in found.rows:
        changed = {"without": row["without"], "overrides": row["overrides"]}
        best = compare(name, LAYER, **changed).best
        assert row["best_time_s"] == pytest.approx(float(best.time_s), rel=1e-9), row
        assert row["time_s"] is None or row["best_time_s"] <= row["time_s"]


def test_a_symmetric_machine_is_not_faster_with_a_failure_and_the_dearest_is_first() -> None:
    names = ["double-ring:4x2", "usp:2x4", "zigzag-ring-attention"]
    found = failures("h100-2x4", LAYER, names, jobs=2)
    costs = [row["factor"] or row["best_factor"] for row in found.rows]
    assert costs == sorted(costs, reverse=True)
    assert min(costs) >= 1 - 1e-9
    assert found.rows == failures("h100-2x4", LAYER, names).rows


def test_rows_are_those_of_the_object_and_of_the_table() -> None:
    found = failures("h100-2x2", LAYER, ["usp:2x2", "ring-attention"])
    assert found.records() == found.to_dict()["failures"]
    [table] = [part for part in found.parts() if isinstance(part, Table)]
    assert [row[0] for row in table.rows] == [row["lost"] for row in found.rows]
    first = found.rows[0]
    assert str(found).startswith(f"Replace a {first['kind']} first: with")
    assert f"{first['factor']:.2f}x" in str(found).splitlines()[0]


def test_what_stops_every_schedule_comes_first() -> None:
    found = failures(nodes(2, 2, ranks_per_nic=2), LAYER, ["usp:2x2"])
    nic = row_of(found.rows, "NIC")
    assert (nic["time_s"], nic["best"]) == (None, None)
    assert "has no other NIC" in nic["reason"]
    assert found.rows[0]["best"] is None
    assert "does not run; nor does another schedule." in str(found).splitlines()[0]
    assert f"without nic.0: {nic['reason']}" in str(found).splitlines()


def test_where_nothing_costs_anything_no_part_is_named() -> None:
    """A ring over two nodes of two ranks that compute for longer than they send: one NIC is enough for a node."""
    names = ["zigzag-ring-attention"]
    nic = row_of(failures("nodes:2x2", LAYER, names).rows, "NIC")
    assert nic["factor"] == pytest.approx(1)
    text = module._answer([nic], compare("nodes:2x2", LAYER, names).best)
    assert text == "No single failure makes zigzag-ring-attention more than 0.5% slower."


def test_more_parts_than_most_are_simulated_as_far_as_they_carry_most(monkeypatch: pytest.MonkeyPatch) -> None:
    every = row_of(failures("mi300x-8", LAYER, ["direct-attention"]).rows, "slow GPU")
    monkeypatch.setattr(module, "MOST", 2)
    some = row_of(failures("mi300x-8", LAYER, ["direct-attention"]).rows, "slow GPU")
    assert (every["simulated"], some["simulated"]) == (8, 2)
    assert (some["alike"], some["of"]) == (8, 8)
    assert some["time_s"] <= every["time_s"]
    assert some["least_factor"] >= every["least_factor"]


@pytest.mark.parametrize("kind", [{"kind": "linear"}, {"kind": "hybrid", "layers": "LS"}])
def test_linear_layers_and_hybrids_have_failures_too(kind: dict[str, Any]) -> None:
    found = failures("full-mesh:2", Workload(4096, heads=4, mask="causal", **kind))
    assert row_of(found.rows, "slow GPU")["factor"] > 1


def test_overrides_of_the_question_stay() -> None:
    """A GPU at half of half its speed, for a layer with twice the KV heads."""
    overrides = ["rank.1.compute=x0.5", "layer.kv_heads=x2"]
    rows = failures("full-mesh:4", LAYER, ["zigzag-ring-attention"], overrides=overrides).rows
    [twice] = [row for row in rows if (row["kind"], row["part"]) == ("slow GPU", "gpu.1")]
    layer, slow = replace(LAYER, kv_heads=8), ("rank.1.compute=x0.25",)
    alone = tasp_lab.answer(tasp_lab.Question("full-mesh:4", "zigzag-ring-attention", layer, overrides=slow))
    assert twice["time_s"] == pytest.approx(float(alone.time_s))


def test_machines_that_are_not_whole_and_layers_without_a_schedule_are_refused() -> None:
    with pytest.raises(QuantityError, match=r"failures: h100-2x4 without nic\.0, expected a whole machine"):
        failures("h100-2x4", LAYER, without=["nic.0"])
    with pytest.raises(QuantityError, match=r"failures: mi300x-8 without gpu\.2, expected a whole machine"):
        failures(load_machine("mi300x-8").without(["gpu.2"]), LAYER)
    with pytest.raises(ScheduleError, match="failures: no schedule applies: "):
        failures("full-mesh:4", Workload(4096, heads=3), ["ulysses"])
