"""Which columns tell rows apart, which schedule wins, and how sure that is: as probable as `compare` finds it."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import StudyError
from tasp_lab.prediction.interval import TIE
from tasp_lab.prediction.paired import Rival, paired_errors
from tasp_lab.study.frames import first_is_faster, varying, winners, with_derived
from tasp_lab.study.point import COLUMNS
from tests.support.study_folders import BASELINE, MACHINES, SCHEDULES, not_applicable, row, settled

times = st.floats(1e-5, 1e2)
shares = st.floats(0, 1)
kinds = st.sampled_from(["exact", "library", "links alone"])


def cells_of(time_s: float, share: float, setting: str, schedule: str = "tasp") -> dict[str, Any]:
    return {"schedule": schedule, "time_s": time_s, "exposed_s": share * time_s, "setting": setting}


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


@given(times, times, shares, shares, kinds)
def test_an_order_is_as_probable_as_compare_finds_it(
    one_s: float, two_s: float, one: float, two: float, setting: Any
) -> None:
    found = first_is_faster(cells_of(one_s, one, setting), cells_of(two_s, two, setting, "ulysses"))
    expected = paired_errors().first_is_faster(Rival("tasp", one_s, one), Rival("ulysses", two_s, two), setting)
    assert found == pytest.approx(expected, abs=1e-6)


@given(times, times, shares, kinds)
def test_either_of_two_is_the_faster_one(one_s: float, two_s: float, share: float, setting: str) -> None:
    one, two = (cells_of(time_s, share, setting) for time_s in (one_s, two_s))
    assert first_is_faster(one, two) + first_is_faster(two, one) == pytest.approx(1)


@settings(max_examples=10)
@given(times, shares, shares, times)
def test_a_speed_up_has_the_interval_of_compare(time_s: float, own: float, base: float, base_s: float) -> None:
    rows = [
        row("h100-8", "llama-3-8b", 8192, "tasp") | cells_of(time_s, own, "library"),
        row("h100-8", "llama-3-8b", 8192, BASELINE) | cells_of(base_s, base, "library", BASELINE),
    ]
    found = with_derived(table(rows), BASELINE).iloc[0]
    low, high = paired_errors().ratio(Rival(BASELINE, base_s, base), Rival("tasp", time_s, own), "library")
    shown = [found[each] for each in ("speedup_low", "speedup", "speedup_high")]
    assert shown == pytest.approx([low, base_s / time_s, high], rel=1e-6)


def test_a_time_without_a_setting_is_of_another_version() -> None:
    with pytest.raises(StudyError, match="has no setting, expected rows of this version") as refused:
        first_is_faster({"schedule": "tasp", "time_s": 1.0}, {"schedule": "ulysses", "time_s": 2.0})
    assert len(str(refused.value).splitlines()) == 1


def question(cells: dict[str, Any]) -> tuple[object, ...]:
    return cells["seq"], cells["machine"], cells["schedule"]


cells = st.fixed_dictionaries({
    "seq": st.sampled_from([8192, 16384]), "machine": st.sampled_from(["h100-8", "mi300x-8"]),
    "schedule": st.sampled_from(SCHEDULES), "time_s": st.sampled_from([1.0, 1.2, 2.0, 5.0]),
    "fits": st.sampled_from([True, False, None]), "setting": st.sampled_from(["library", "links alone"]),
})  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(cells, min_size=1, max_size=12, unique_by=lambda each: (each["seq"], each["machine"], each["schedule"]))
)
def test_winners_are_the_fastest_that_fit(drawn: list[dict[str, Any]]) -> None:
    rows = [row(each["machine"], "llama-3-8b", each["seq"], each["schedule"]) | each for each in drawn]
    found = winners(with_derived(table(rows), None))
    fitting: dict[tuple[object, object], list[dict[str, Any]]] = {}
    for each in rows:
        if each["fits"] is not False:
            fitting.setdefault((each["machine"], each["seq"]), []).append(each)
    assert len(found) == len(fitting)
    for _, winner in found.iterrows():
        others = fitting[winner["machine"], winner["seq"]]
        assert winner["time_s"] == min(each["time_s"] for each in others)
        assert winner["schedules"] == len(others)
        first = next(each for each in others if each["schedule"] == winner["schedule"])
        close = {each["schedule"] for each in others if first_is_faster(first, each) < TIE}
        assert set(winner["too_close"]) == close - {winner["schedule"]}
        slower = sorted(each["time_s"] for each in others if each["schedule"] != winner["schedule"])
        assert not slower or winner["margin"] == slower[0] / winner["time_s"]


def test_a_row_settled_by_a_bound_wins_nothing_and_is_at_most_so_fast() -> None:
    slow = settled(row("h100-8", "llama-3-8b", 8192, "ulysses"))
    rows = with_derived(table([slow, row("h100-8", "llama-3-8b", 8192, BASELINE)]), BASELINE)
    assert winners(rows)["schedule"].tolist() == [BASELINE]
    assert rows.iloc[0]["speedup"] == rows.iloc[1]["time_s"] / slow["bound_s"]


def test_a_bound_that_is_a_little_slower_settles_no_order() -> None:
    first = row("h100-8", "llama-3-8b", 8192, BASELINE, time_s=1.0) | {"exposed_s": 0.1}
    for bound_s, close in ((1.02, ["ulysses"]), (1.5, [])):
        slow = settled(row("h100-8", "llama-3-8b", 8192, "ulysses", time_s=bound_s)) | {"setting": None}
        (found,) = winners(with_derived(table([slow, first]), None)).to_dict("records")
        assert (found["schedule"], found["too_close"], found["schedules"]) == (BASELINE, close, 2)
        assert found["second"] is None


def test_a_question_without_its_baseline_has_no_speed_up() -> None:
    rows = [row("h100-8", "llama-3-8b", 8192, "tasp"), row("mi300x-8", "llama-3-8b", 8192, BASELINE)]
    found = with_derived(table(rows), BASELINE)["speedup"]
    assert [math.isnan(each) for each in found] == [True, False]


def test_columns_that_follow_from_no_other_tell_points_apart() -> None:
    """`ranks` follows the machine; `kv_heads` is free where there is one model; `buffers` is an axis of its own."""
    rows = [
        row(machine, "llama-3-8b", 8192, "tasp", kv_heads=kv_heads, buffers=buffers)
        for machine in MACHINES
        for kv_heads in (1, 8)
        for buffers in (2, 3)
    ]
    assert varying(pd.DataFrame(rows)) == ("machine", "kv_heads", "buffers")


def test_a_column_that_refused_rows_lack_still_follows() -> None:
    """Of a machine that was refused nobody knows the nodes."""
    rows = [row(machine, "llama-3-8b", 8192, name) for machine in MACHINES for name in SCHEDULES]
    rows += [
        not_applicable(row(machine, "llama-3-8b", 16384, "tasp"), "no") | {"nodes": None, "ranks": None}
        for machine in MACHINES
    ]
    assert varying(pd.DataFrame(rows)) == ("machine", "seq", "schedule")


def test_what_an_override_changes_follows_its_variant() -> None:
    variants = {"as is": "", "nic-x2": "nic.bandwidth=x2"}
    rows = [row("h100-4x8", "llama-3-8b", 8192, "tasp", variant=v, overrides=text) for v, text in variants.items()]
    assert varying(pd.DataFrame(rows)) == ("variant",)


def test_a_baseline_may_be_a_variant_or_a_machine() -> None:
    """Speed-ups over ``COLUMN=VALUE`` are those over the row that differs in the column alone."""
    times_s = {("h100-8", "as is"): 2.0, ("h100-8", "fast"): 1.0, ("mi300x-8", "as is"): 3.0, ("mi300x-8", "fast"): 6.0}
    rows = [
        row(machine, "llama-3-8b", 8192, schedule)
        | cells_of(scale * time_s, 0.2, "library", schedule)
        | {"variant": variant, "time_low_s": 0.8 * scale * time_s, "time_high_s": 1.2 * scale * time_s}
        for schedule, scale in (("tasp", 1.0), (BASELINE, 10.0))
        for (machine, variant), time_s in times_s.items()
    ]
    of_variants = with_derived(table(rows), "variant=as is")
    expected = [times_s[each["machine"], "as is"] / times_s[each["machine"], each["variant"]] for each in rows]
    assert of_variants["speedup"].tolist() == pytest.approx(expected)
    of_machines = with_derived(table(rows), "machine=h100-8")
    expected = [times_s["h100-8", each["variant"]] / times_s[each["machine"], each["variant"]] for each in rows]
    assert of_machines["speedup"].tolist() == pytest.approx(expected)
    # two machines share no error: the logarithms of both intervals add as those of independent ones
    other = of_machines.iloc[2]
    assert math.log(other["speedup"] / other["speedup_low"]) == pytest.approx(
        math.hypot(math.log(1 / 0.8), math.log(1.2)), rel=1e-9
    )


@pytest.mark.parametrize("baseline", ["variant=slow", "varient=as is", "machine="])
def test_unknown_baselines_are_one_line(baseline: str) -> None:
    with pytest.raises(StudyError) as caught:
        with_derived(table([row("h100-8", "llama-3-8b", 8192, "tasp")]), baseline)
    assert len(str(caught.value).splitlines()) == 1


def test_a_row_that_nobody_measured_has_a_larger_error() -> None:
    one, two = row("h100-8", "llama-3-8b", 8192, BASELINE), row("h100-8", "llama-3-8b", 8192, "ulysses")
    new = [each | {"time_s": time_s, "measured": False} for each, time_s in ((one, 1.0), (two, 1.1))]
    known = [each | {"measured": True} for each in new]
    assert 0.5 < first_is_faster(*new) < first_is_faster(*known)
