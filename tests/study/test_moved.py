"""Points at other values of an axis, and the values that an axis may have."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import StudyError, TaspLabError, WorkloadError
from tasp_lab.machines.overrides.override import parse_override
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.study.find.lattice import TOLERANCE, lattice
from tasp_lab.study.find.moved import apart_from, factor_text, moved, value_of
from tasp_lab.study.point import Point
from tasp_lab.workload.layer import Workload

LABELS = (("machine", "h100-2x8"), ("seq", 8192), ("schedule", "tasp"))
POINT = Point("h100-2x8", "tasp", Workload(8192, heads=32, kv_heads=8), AttentionOptions("both"), labels=LABELS)
VALUES = {"seq": 16384, "batch": 4, "heads": 64, "kv_heads": 4, "head_dim": 64, "buffers": 5, "stages": 3,
          "tail_chunks": 2, "nodes": 7, "nic.bandwidth": 1.5, "link.0-1": 0.25, "cached_keys": 128}  # fmt: skip


@pytest.mark.parametrize("axis", VALUES)
def test_a_moved_point_has_the_value_and_nothing_else_changes(axis: str) -> None:
    there = moved(POINT, axis, VALUES[axis])
    assert value_of(there, axis) == VALUES[axis]
    before = value_of(POINT, axis)
    assert before is not None
    assert moved(there, axis, before).inputs() == POINT.inputs()
    assert apart_from(there, axis) == apart_from(POINT, axis)
    assert all(apart_from(there, other) != apart_from(POINT, other) for other in VALUES if other != axis)


def test_the_label_of_the_axis_moves_too() -> None:
    assert dict(moved(POINT, "seq", 16384.0).labels) == dict(LABELS) | {"seq": 16384}


def test_kv_heads_follow_where_there_are_as_many() -> None:
    every = Point("h100-8", "tasp", Workload(8192, heads=32))
    assert moved(every, "heads", 48).layer.kv_heads == 48
    assert moved(POINT, "heads", 48).layer.kv_heads == 8


@pytest.mark.parametrize(
    ("machine", "there"),
    [
        ("h100-8", "h100-3x8"),
        ("h100-2x8-rails", "h100-3x8-rails"),
        ("nodes:2x4:switch:rails", "nodes:3x4:switch:rails"),
        ("folder/a-1x2/mine.toml:2x8", "folder/a-1x2/mine.toml:3x8"),
    ],
)
def test_nodes_are_in_the_name_of_a_machine(machine: str, there: str) -> None:
    assert moved(Point(machine, "tasp", Workload(8192)), "nodes", 3).machine == there


@pytest.mark.parametrize("machine", ["torus:4x4", "gb200-nvl72", "full-mesh:8", "mine.toml"])
def test_other_machines_have_no_number_of_nodes(machine: str) -> None:
    with pytest.raises(StudyError, match="has no number of nodes"):
        moved(Point(machine, "tasp", Workload(8192)), "nodes", 3)


def test_factors_replace_factors_and_leave_other_overrides() -> None:
    point = Point("h100-8", "tasp", Workload(8192), overrides=("nic.bandwidth=x2", "link.latency=+1us"))
    assert moved(point, "nic.bandwidth", 3).overrides == ("link.latency=+1us", "nic.bandwidth=x3")
    assert moved(point, "nic.bandwidth", 1).overrides == ("link.latency=+1us",)


@given(st.floats(1e-4, 1e4))
def test_texts_of_factors_are_overrides(value: float) -> None:
    assert float(parse_override(f"nic.bandwidth=x{factor_text(value)}").factor) == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize(
    ("axis", "reason"),
    [
        ("mask", "is not numeric"),
        ("schedule", "is not numeric"),
        ("sq", "unknown axis 'sq', did you mean 'seq'"),
        ("bufers", "did you mean 'buffers'"),
    ],
)
def test_an_axis_that_is_no_number_is_refused(axis: str, reason: str) -> None:
    with pytest.raises(StudyError, match=reason) as found:
        moved(POINT, axis, 2)
    assert "\n" not in str(found.value)


def test_impossible_values_are_refused_by_the_layer() -> None:
    with pytest.raises(WorkloadError, match="not a multiple"):
        moved(POINT, "heads", 33)
    with pytest.raises(TaspLabError):
        moved(POINT, "buffers", 1)


@given(st.integers(4, 12), st.integers(1, 6), st.sampled_from([1, 2, 6, 8, 16]))
def test_lengths_are_multiples_and_close_to_each_other(low: int, octaves: int, ranks: int) -> None:
    scan = [2 * ranks * 2**power for power in range(low, low + octaves + 1)]
    values = lattice("seq", scan, multiple=2 * ranks)
    assert set(scan) <= set(values)
    assert list(values) == sorted(set(values))
    assert all(value % (2 * ranks) == 0 for value in values)
    close = [high <= low * (1 + TOLERANCE) or high - low == 2 * ranks for low, high in pairwise(values)]
    assert all(close)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5, unique_by=lambda value: round(value, 3)))
def test_factors_are_close_to_each_other(scan: list[float]) -> None:
    values = lattice("nic.bandwidth", scan)
    assert set(scan) <= set(values)
    assert all(1 < high / low <= (1 + TOLERANCE) * 1.0001 for low, high in pairwise(values))


def test_kv_heads_divide_heads_and_other_counts_are_all_tried() -> None:
    assert lattice("kv_heads", [2, 32], heads=32) == [2, 4, 8, 16, 32]
    assert lattice("nodes", [1, 5]) == [1, 2, 3, 4, 5]
    assert lattice("heads", [32, 64], multiple=8) == [32, 40, 48, 56, 64]


def test_an_empty_interval_is_refused() -> None:
    with pytest.raises(StudyError, match="is empty"):
        lattice("seq", [8192, 8192])
