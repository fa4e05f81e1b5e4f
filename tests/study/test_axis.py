"""Points at other values of an axis, and the values that an axis may have."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.errors import StudyError, TaspLabError, WorkloadError
from tasp_lab.machines.overrides import parse_override
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.study.axis import TOLERANCE, apart_from, bisected, changes, factor_text, lattice, moved, value_of
from tasp_lab.study.point import Point
from tasp_lab.workload.layer import Workload

LABELS = (("machine", "h100-2x8"), ("seq", 8192), ("schedule", "tasp"))
POINT = Point(
    "h100-2x8",
    "tasp",
    Workload(8192, heads=32, kv_heads=8, mask="full"),
    AttentionOptions("both", stages=4),
    labels=LABELS,
)
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
    every = Point("h100-8", "tasp", Workload(8192, heads=32, mask="full"))
    assert moved(every, "heads", 48).layer.kv_heads == 48
    assert moved(POINT, "heads", 48).layer.kv_heads == 8


@pytest.mark.parametrize(
    ("machine", "there"),
    [
        ("h100-8", "h100-3x8"),
        ("h100-2x8-rails", "h100-3x8-rails"),
        ("gb200-2x1x4-rails", "gb200-3x1x4-rails"),
        ("nodes:2x4:switch:rails", "nodes:3x4:switch:rails"),
        ("folder/a-1x2/mine.toml:2x8", "folder/a-1x2/mine.toml:3x8"),
    ],
)
def test_nodes_are_in_the_name_of_a_machine(machine: str, there: str) -> None:
    assert moved(Point(machine, "tasp", Workload(8192, mask="full")), "nodes", 3).machine == there


@pytest.mark.parametrize("machine", ["torus:4x4", "gb200-nvl72", "gb200-2x2x4", "full-mesh:8", "mine.toml"])
def test_other_machines_have_no_number_of_nodes(machine: str) -> None:
    with pytest.raises(StudyError, match="has no number of nodes"):
        moved(Point(machine, "tasp", Workload(8192, mask="full")), "nodes", 3)


def test_factors_replace_factors_and_leave_other_overrides() -> None:
    point = Point("h100-8", "tasp", Workload(8192, mask="full"), overrides=("nic.bandwidth=x2", "link.latency=+1us"))
    assert moved(point, "nic.bandwidth", 3).overrides == ("link.latency=+1us", "nic.bandwidth=x3")
    assert moved(point, "nic.bandwidth", 1).overrides == ("link.latency=+1us",)


@given(st.floats(1e-4, 1e4))
def test_texts_of_factors_are_overrides(value: float) -> None:
    assert float(parse_override(f"nic.bandwidth=x{factor_text(value)}").times) == pytest.approx(value, rel=1e-7)


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


# ---------------------------------------------------------------------------------------------------- bisection


@given(st.integers(2, 10_000), st.data())
def test_the_one_change_of_a_threshold_is_found_exactly(count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count - 1))
    called: list[int] = []

    def state(index: int) -> bool:
        called.append(index)
        return index >= threshold

    found = changes(range(1, count + 1), [0, count - 1], state)
    assert [(each.low, each.high, each.before, each.after) for each in found] == [
        (threshold - 1, threshold, False, True)
    ]
    assert len(called) == len(set(called)) <= 2 + math.ceil(math.log2(count))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_all_changes_are_found_where_each_piece_is_scanned(lengths: list[int], states: list[int]) -> None:
    """Of a state that is constant over pieces, whatever their order, if each of them has a scanned index."""
    pieces = [state for state, length in zip(states, lengths, strict=False) for _ in range(length)]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    scan = sorted({*starts, len(pieces) - 1})
    found = changes(range(1, len(pieces) + 1), scan, lambda index: pieces[index])
    expected = [(low, high, pieces[low], pieces[high]) for low, high in pairwise(range(len(pieces)))
                if pieces[low] != pieces[high]]  # fmt: skip
    assert [(each.low, each.high, each.before, each.after) for each in found] == expected


@given(st.integers(1, 200), st.integers(1, 200))
def test_two_changes_between_neighbours_are_both_found(first: int, second: int) -> None:
    """From one state to a third, through a second one that was not scanned."""
    low, high = sorted((first, first + second))
    found = changes(range(1, high + 3), [0, high + 1], lambda index: (index >= low) + (index >= high))
    assert [(each.low, each.high) for each in found] == [(low - 1, low), (high - 1, high)]
    assert [(each.before, each.after) for each in found] == [(0, 1), (1, 2)]


@given(st.integers(2, 500), st.floats(0.001, 0.5))
def test_a_tolerance_ends_the_bisection(threshold: int, tolerance: float) -> None:
    values = [1.01**index for index in range(501)]
    low, high = bisected(values, 0, 500, lambda index: index < threshold, tolerance)
    assert low < threshold <= high
    assert high - low == 1 or values[high] <= values[low] * (1 + tolerance)


def test_what_has_no_state_is_left_out() -> None:
    """A schedule that does not apply everywhere: the change is between the values at which it does."""
    states = [0, 0, None, None, 1, 1]
    found = changes(range(1, 7), [0, 1, 2, 3, 4, 5], lambda index: states[index])
    assert [(each.low, each.high) for each in found] == [(1, 4)]
    assert changes(range(1, 7), range(6), lambda index: None) == []
