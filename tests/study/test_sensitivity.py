"""Sensitivity of layers whose times are formulas of two constants: exact at both ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasp_lab.core.errors import StudyError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.machine import Machine
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.study.lookup import one_point_at
from tasp_lab.study.point import Point
from tasp_lab.study.sensitivity import (
    COMPUTE,
    Factor,
    Times,
    Width,
    factors_of,
    find_sensitivity,
    one_at_a_time,
)
from tests.support.uncertain_machine import ring_point, ring_time_s, uncertain_machine

TIME = {"of": "time"}
ENDS = {"link_bandwidth": (0.8, 1.2), COMPUTE: (0.8, 1.1)}


@pytest.mark.parametrize("seq", [1024, 65536, 1048576])
def test_the_ends_are_those_of_the_formula(tmp_path: Path, seq: int) -> None:
    """Bound by its link, between, and by compute: T = K / 2 + max(K / 2, C) at every end."""
    point = ring_point(uncertain_machine(tmp_path), seq)
    found: dict[str, Any] = find_sensitivity([point], TIME).to_dict()
    assert found["value"] == pytest.approx(ring_time_s(seq), rel=1e-9)
    assert {constant["constant"] for constant in found["constants"]} == set(ENDS)
    for constant in found["constants"]:
        keyword = "compute" if constant["constant"] == COMPUTE else "link"
        expected = [ring_time_s(seq, **{keyword: end}) for end in ENDS[constant["constant"]]]
        assert [constant["value_at_low"], constant["value_at_high"]] == pytest.approx(expected, rel=1e-9)
    sizes = [constant["effect"] for constant in found["constants"]]
    assert sizes == sorted(sizes, reverse=True)


def test_origins_are_told(tmp_path: Path) -> None:
    found = find_sensitivity([ring_point(uncertain_machine(tmp_path), 1024)], TIME)
    by_name = {each["constant"]: each for each in found.records()}
    assert by_name[COMPUTE]["assumed"]
    assert not by_name["link_bandwidth"]["assumed"]
    assert by_name["link_bandwidth"]["source"] == "a data sheet"
    assert by_name["link_bandwidth"]["range"] == "0.8GB/s to 1.2GB/s"
    text = str(found)
    assert "ASSUMED: assumed" not in text
    assert "calibrate --kernels" in text


def test_the_winner_changes_where_the_order_does(tmp_path: Path) -> None:
    """KV all-gather waits for all keys, ring attention for the first half of its work: who wins hangs on the link."""
    machine = uncertain_machine(tmp_path)
    ring = ring_point(machine, 65536)
    points = [ring, replace(ring, schedule="kv-all-gather")]
    between = ("ring-attention", "kv-all-gather")
    found: dict[str, Any] = find_sensitivity(points, {"between": between}).to_dict()
    assert set(found["times_s"]) == {"ring-attention", "kv-all-gather"}
    for constant in found["constants"]:
        winners = {constant["fastest_at_low"], constant["fastest_at_high"]}
        assert constant["changes_fastest"] == (winners != {found["fastest"]})


def test_constants_that_a_machine_does_not_use_are_left_out() -> None:
    """One node uses no constant of the network; those that are exact have no interval to move in."""
    point = Point("h100-8", "tasp", ring_point("h100-8", 8192).layer, AttentionOptions("both"))
    names = {each["constant"] for each in factors_of(load_machine("h100-8"), point.layer, "both")}
    assert COMPUTE in names
    assert "message_launch" in names
    assert not {name for name in names if name.startswith(("nic_", "lone_", "channels"))}
    two = {each["constant"] for each in factors_of(load_machine("h100-2x8"), point.layer, "both")}
    assert {"nic_payload", "nic_channel_rate"} <= two


def test_a_width_in_place_of_intervals(tmp_path: Path) -> None:

    def highs(machine: Machine, by: str) -> dict[str, float]:
        found = factors_of(machine, ring_point("", 8).layer, "forward", Width.parse(by))
        return {factor["constant"]: factor["factor_high"] for factor in found}

    machine = load_machine(uncertain_machine(tmp_path))
    stated = highs(machine, "source interval")
    assert stated == pytest.approx({"link_bandwidth": 1.2, COMPUTE: 1.1})
    assert highs(machine, "source interval, else 30%") == pytest.approx(stated)
    assert highs(machine, "30%") == pytest.approx({"link_bandwidth": 1.3, COMPUTE: 1.3})
    assert highs(load_machine("h100-8"), "source interval, else 30%")["message_launch"] == pytest.approx(1.3)


def _points(machine: str) -> list[Point]:
    return [
        replace(
            ring_point(machine, seq), schedule=name, labels=(("machine", machine), ("seq", seq), ("schedule", name))
        )
        for seq in (8192, 16384)
        for name in ("ring-attention", "ulysses")
    ]


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        ("sek=8Ki", "unknown axis 'sek', did you mean 'seq'"),
        ("seq=9Ki", "no such point, seq is 8192, 16384"),
        ("h100-9", "unknown value 'h100-9'"),
        ("", "no point is chosen: seq is 8192, 16384, expected one: --at seq="),
    ],
)
def test_a_point_that_does_not_exist_is_refused(at: str, reason: str) -> None:
    with pytest.raises(StudyError, match=reason) as found:
        one_point_at(_points("h100-8"), at)
    assert "\n" not in str(found.value)


def test_a_schedule_that_does_not_apply_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Ulysses needs a head for each rank; of another schedule it is only left out."""
    points = one_point_at(_points(uncertain_machine(tmp_path)), "seq=8Ki")
    with pytest.raises(StudyError, match=r"'ulysses' does not apply at .*1 head"):
        find_sensitivity(points, {"between": ("ring-attention", "ulysses")})
    found = find_sensitivity(points, TIME)
    assert list(found.to_dict()["refused"]) == ["ulysses"]  # type: ignore[call-overload]
    assert "ulysses does not apply" in str(found)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"off": "time"}, "unknown field 'off'"),
        ({"of": "latency"}, "unknown of 'latency'"),
        ({"by": "a guess"}, "by 'a guess': expected"),
        ({"by": "120%"}, "by '120%'"),
        ({"top": 0}, "top: 0, expected 1 or more"),
        ({"between": ["tasp", "tasp"]}, "'tasp' and itself"),
        ({"between": "tasp"}, "expected one schedule, or two"),
    ],
)
def test_an_impossible_question_is_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(StudyError, match=reason):
        find_sensitivity([ring_point("h100-8", 8192)], given)


def test_a_speedup_needs_two_schedules(tmp_path: Path) -> None:
    point = ring_point(uncertain_machine(tmp_path), 8192)
    with pytest.raises(StudyError, match="needs two schedules"):
        find_sensitivity([point], {})
    with pytest.raises(StudyError, match="unknown schedule 'tsap'"):
        find_sensitivity([point], {"between": ("tsap", "ring-attention")})


# ------------------------------------------------------------------------------------------- effects of factors


def _factors(*widths: float) -> list[Factor]:
    return [
        {"constant": f"c{number}", "factor_low": math.exp(-width), "factor_high": math.exp(width)}
        for number, width in enumerate(widths)
    ]


def test_one_at_a_time_has_both_ends_and_all_others_as_they_are() -> None:
    def times_of(factors: Mapping[str, float]) -> Times:
        return {"one": factors.get("c0", 1.0) ** 2 / factors.get("c1", 1.0), "two": 1.2}

    def both(schedules: list[str], *widths: float) -> list[dict[str, Any]]:
        found = one_at_a_time(_factors(*widths), times_of, times_of({}), schedules)
        return sorted(found, key=lambda each: each["constant"])

    ends = [each[end] for each in both(["one"], 0.1, 0.3) for end in ("value_at_low", "value_at_high")]
    assert ends == pytest.approx([math.exp(power) for power in (-0.2, 0.2, 0.3, -0.3)], rel=1e-12)
    for schedules in (["one"], ["one", "two"]):
        assert [each["effect"] for each in both(schedules, 0.1, 0.3)] == pytest.approx([0.2, 0.3])
    # exp(0.2) and exp(0.3) are more than 1.2, exp(0.1) is less
    assert [each["changes_fastest"] for each in both(["one"], 0.1, 0.3)] == [True, True]
    assert not both(["one"], 0.05)[0]["changes_fastest"]
