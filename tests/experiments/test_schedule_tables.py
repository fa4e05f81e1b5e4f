"""The tables of schedules: theory against the simulator, records that are replaced in part."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tables import ranking_on_the_fabric, schedules_on_the_fabric
from experiments.tables.on_the_fabric import Variant, one_pass
from experiments.tables.ranking_on_the_fabric import TIE, out_of_order
from experiments.tables.schedules_on_the_fabric import ALIKE, Part, applying, busiest_link_s, shard_s
from sim.simulate import simulate
from tasp_lab.machines.machine import Machine
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import ATTENTION, options_for
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

LAYER = Workload(8 * 28, heads=8, head_dim=128, mask="full")
TOPOLOGIES = {"mesh": full_mesh(8), "switch": switch(8), "nodes": nodes(2, 4)}


def tensors(name: str, topology: Topology, chunks: int = 1, layer: Workload = LAYER) -> Fraction:
    options = options_for(name, AttentionOptions(buffers=5, tail_chunks=chunks))
    schedule = one_pass(Variant(name, options), topology, layer)
    return busiest_link_s(schedule, topology) / shard_s(layer, topology)


@pytest.mark.parametrize(
    ("where", "name", "expected"),
    [
        # A link of a mesh: 7 shards of keys and values around the ring; queries and, at last, the results of one shard.
        ("mesh", "ring-attention", Fraction(14)),
        ("mesh", "token-ring", Fraction(8)),
        # One shard of keys and values, or of queries and results, on each link.
        ("mesh", "tasp", Fraction(2)),
        ("mesh", "token-multi-ring", Fraction(2)),
        ("mesh", "direct-kv-all-gather", Fraction(2)),
        # An eighth of three tensors there and of one back; in grids keys and values, or queries, and then results.
        ("mesh", "ulysses", Fraction(4, 8)),
        ("mesh", "grid:2x4", Fraction(2 + 1)),
        # A port: all that a rank sends.
        ("switch", "ring-attention", Fraction(14)),
        ("switch", "token-ring", Fraction(14)),
        ("switch", "tasp", Fraction(14)),
        ("switch", "token-multi-ring", Fraction(14)),
        ("switch", "ulysses", Fraction(4 * 7, 8)),
        ("switch", "grid:2x4", Fraction(3 + 2 + 3)),
        # A NIC: one hop of the ring in eight, or a quarter of it; keys and values, or heads, for four ranks.
        ("nodes", "ring-attention", Fraction(14)),
        ("nodes", "tasp", Fraction(14, 4)),
        ("nodes", "direct-kv-all-gather", Fraction(2 * 4)),
        ("nodes", "ulysses", Fraction(4 * 4, 8)),
    ],
)
def test_the_busiest_link_carries_what_the_schedule_says(where: str, name: str, expected: Fraction) -> None:
    assert tensors(name, TOPOLOGIES[where]) == expected


@pytest.mark.parametrize("chunks", [2, 4])
def test_with_chunks_the_link_of_queries_carries_a_block_less(chunks: int) -> None:
    """6 of the 7 blocks of queries go around the ring; the last goes straight, and results have its place."""
    assert tensors("token-ring", full_mesh(8), chunks) == 7


def test_with_few_kv_heads_queries_are_heavier_than_keys() -> None:
    layer = replace(LAYER, kv_heads=1)
    assert tensors("ring-attention", full_mesh(8), layer=layer) == Fraction(14, 8)
    assert tensors("token-ring", full_mesh(8), layer=layer) == 8


ALWAYS_BUSY = (
    "ring-attention", "tasp", "token-ring", "token-multi-ring", "kv-and-q-rings", "ulysses", "direct-kv-all-gather",
    "grid:2x4",
)  # fmt: skip


@pytest.mark.parametrize("where", TOPOLOGIES)
def test_no_schedule_is_predicted_to_beat_the_theory_and_on_a_mesh_it_is_reached(where: str) -> None:
    """Log-sum-exps apart, which are 1/64 of the results, by schedules that leave no link waiting."""
    part = next(each for each in schedules_on_the_fabric.PARTS.values() if each.topology == load_name(where))
    topology = TOPOLOGIES[where].map_links(lambda _, link: replace(link, latency_s=0.0))
    for variant in applying(replace(part, layer=LAYER))[0]:
        schedule = one_pass(variant, topology, LAYER)
        theory_s = float(busiest_link_s(schedule, topology))
        time_s = float(simulate(schedule, Machine(topology)).time_s)
        assert time_s >= theory_s * (1 - 1e-9)
        if where == "mesh" and variant.name in ALWAYS_BUSY:
            assert time_s <= theory_s * (1 + 1 / 64) * (1 + 1e-9)


def load_name(where: str) -> str:
    return {"mesh": "full-mesh:8", "switch": "switch:8", "nodes": "nodes:2x4"}[where]


def test_what_is_left_out_sends_the_same_as_its_like() -> None:
    """The busiest link carries as much; where a schedule is not known, nothing is left out."""
    assert ALIKE.keys() | set(ALIKE.values()) <= ATTENTION.keys()
    for name, other in ALIKE.items():
        assert tensors(name, full_mesh(8)) == tensors(other, full_mesh(8))


TIMES = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), max_size=6)


@given(TIMES)
def test_pairs_out_of_order_are_those_that_differ_and_cross(times: list[tuple[float, float]]) -> None:
    rows = [{"schedule": str(i), "predicted_s": p, "measured_s": m} for i, (p, m) in enumerate(times)]
    expected = {
        frozenset((str(i), str(j)))
        for (i, a), (j, b) in combinations(enumerate(times), 2)
        if all(abs(x - y) > TIE * max(x, y) for x, y in zip(a, b, strict=True)) and (a[0] < b[0]) != (a[1] < b[1])
    }
    assert {frozenset(pair) for pair in out_of_order(rows)} == expected
    for row in rows:
        row["measured_s"] = row["predicted_s"]
    assert out_of_order(rows) == []


@pytest.mark.fabric
@pytest.mark.distributed
@pytest.mark.slow
def test_small_layers_run_on_the_fabric_and_are_written(tmp_path: Path) -> None:
    part = Part(
        "full-mesh:3", Workload(3 * 24, heads=2, head_dim=128, mask="full"), names=("ring-attention", "tasp", "ulysses")
    )
    schedules_on_the_fabric.measure("mesh", part, 1, tmp_path)
    schedules_on_the_fabric.publish(tmp_path)
    rows = json.loads((tmp_path / "schedules_on_the_fabric.json").read_text())["parts"]["mesh"]["rows"]
    assert [(row["schedule"], row["tensors"]) for row in rows] == [("ring-attention", "4"), ("tasp", "2")]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)
    assert "Verdict: " in (tmp_path / "schedules_on_the_fabric.md").read_text()
    causal = replace(part, layer=replace(part.layer, mask="causal"), names=("zigzag-ring-attention", "tasp"))
    ranking_on_the_fabric.measure("mesh", causal, 1, tmp_path)
    ranking_on_the_fabric.publish(tmp_path)
    ranked = json.loads((tmp_path / "ranking_on_the_fabric.json").read_text())["parts"]["mesh"]
    assert sorted(row["schedule"] for row in ranked["rows"]) == ["tasp", "zigzag-ring-attention"]
    assert "of 1 pairs are in the wrong order" in (tmp_path / "ranking_on_the_fabric.md").read_text()
