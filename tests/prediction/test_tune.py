"""Tuned options: the search itself against all combinations, and the times of schedules with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import ScheduleError
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.columns import fields_of
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.predict import predict
from tasp_lab.prediction.tune import SEARCHED, Axes, Tuned, axes_of, search, trials
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, OPTIONS, AttentionOptions
from tasp_lab.schedules.registry import ATTENTION, LINEAR, attention_names_on
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.workload.layer import Workload
from tests.support.strategies import attention_layers

LAYER = Workload(4096, heads=8, kv_heads=4, mask="causal")
SMALL: Axes = {"trim": (True, False), "buffers": (2, 3, 4, 6), "tail_chunks": (1, 2, 4)}

Times = Callable[[AttentionOptions], float]


def place(options: AttentionOptions) -> tuple[bool, int, int]:
    return options.trim, options.buffers, options.tail_chunks


def counted(times: Times) -> tuple[Times, list[AttentionOptions]]:
    asked: list[AttentionOptions] = []

    def time_s(options: AttentionOptions) -> float:
        asked.append(options)
        return times(options)

    return time_s, asked


def test_the_default_of_an_option_is_among_the_values_that_are_tried() -> None:
    assert all(getattr(DEFAULT_OPTIONS, field) in values for field, values in SEARCHED.items())
    assert all(len(set(values)) == len(values) > 1 for values in SEARCHED.values())


# The search


@given(st.lists(st.integers(1, 6), min_size=24, max_size=24))
def test_where_there_are_few_combinations_the_best_of_all_is_found(drawn: list[int]) -> None:
    times = dict(zip(product(*SMALL.values()), drawn, strict=True))
    time_s, asked = counted(lambda options: times[place(options)])
    found = search(time_s, DEFAULT_OPTIONS, SMALL)
    assert found.time_s == min(drawn) == times[place(found.options)]
    assert found.untuned_s == times[place(DEFAULT_OPTIONS)]
    assert len(asked) == len(set(asked)) == trials(SMALL) == 24
    changes = [
        sum(value != given for value, given in zip(key, place(DEFAULT_OPTIONS), strict=True))
        for key, seconds in times.items()
        if seconds == min(drawn)
    ]
    changed = sum(value != given for value, given in zip(place(found.options), place(DEFAULT_OPTIONS), strict=True))
    assert changed == min(changes)


def test_equal_times_keep_the_default() -> None:
    for less in (0.0, 1e-12):
        found = search(lambda options, less=less: 1.0 - less * options.buffers, DEFAULT_OPTIONS, SMALL)  # type: ignore[misc]
        assert found == Tuned(DEFAULT_OPTIONS, found.untuned_s, found.untuned_s)
    least = search(lambda options: 1.0 - 0.1 * (options.buffers == 2), DEFAULT_OPTIONS, SMALL)
    assert least.options == AttentionOptions(buffers=2)


def test_options_that_do_not_apply_are_no_candidates_and_a_start_that_does_not_is_an_error() -> None:
    def time_s(options: AttentionOptions) -> float:
        if options.buffers < 4:
            raise ScheduleError("too few")
        return 1 / options.buffers + 0.1 * options.trim

    start = AttentionOptions(buffers=4)
    found = search(time_s, start, {"trim": (True, False), "buffers": (2, 3, 4)})
    assert found.options == AttentionOptions(trim=False, buffers=4)
    assert found.time_s < inf
    with pytest.raises(ScheduleError, match="too few"):
        search(time_s, DEFAULT_OPTIONS, {"buffers": (2, 3, 4)})


def test_what_is_searched_for_a_schedule() -> None:
    """Its own options, without those that were given, and those that every prediction chooses."""
    assert set(axes_of("token-ring", DEFAULT_OPTIONS)) == {"buffers", "tail_chunks"}
    assert set(axes_of("tasp", DEFAULT_OPTIONS)) == {"trim", "buffers"}
    assert set(axes_of("tasp", AttentionOptions("both"))) == {"trim", "buffers"}
    assert set(axes_of("tasp", AttentionOptions("both", buffers=2, dataflow="rotate-q"))) == {"trim"}
    assert axes_of("ulysses", AttentionOptions("both")) == {}
    assert trials({}) == 1


# Schedules


def tuned(machine: Any, layer: Workload, names: Any = None, **options: Any) -> dict[str, Answer]:
    return {each.schedule: each for each in compare(machine, layer, names, tune=True, **options).candidates}


@pytest.mark.parametrize(
    ("name", "passes"),
    [("tasp", "both"), ("zigzag-token-ring", "forward"), ("kv-and-q-rings", "backward"), ("usp:2x2", "both")],
)
def test_no_combination_of_options_is_faster(name: str, passes: Pass) -> None:
    """All that a schedule has, by `predict`."""
    machine = nodes(2, 2, "switch")
    known = ATTENTION[name.partition(":")[0]].options
    axes = {field: values for field in known if (values := OPTIONS[field].tried or OPTIONS[field].open)}
    times = []
    for values in product(*axes.values()):
        chosen: dict[str, Any] = dict(zip(axes, values, strict=True))
        with contextlib.suppress(ScheduleError):
            times.append(float(predict(machine, name, LAYER, passes=passes, **chosen)[-1].time_s))
    found = tuned(machine, LAYER, [name], passes=passes)[name]
    assert len(times) > 10
    assert found.time_s == pytest.approx(min(times), rel=2e-9, abs=0)
    assert found.untuned_s is not None
    plain_s = float(predict(machine, name, LAYER, passes=passes)[-1].time_s)
    assert found.untuned_s == pytest.approx(plain_s, rel=1e-9)
    assert found.time_s <= found.untuned_s


@settings(max_examples=2)
@given(
    attention_layers(),
    st.sampled_from([full_mesh(3), switch(3), nodes(2, 2)]),
    st.sampled_from(["forward", "backward", "both"]),
    st.sampled_from([1e9, 1e13]),
)
def test_tuned_is_never_slower_and_the_same_each_time(layer: Workload, machine: Any, passes: Pass, rate: float) -> None:
    names = ["striped-ring-attention", "token-ring", "kv-and-q-rings", "kv-all-gather"]
    found = tuned(machine, layer, names, passes=passes, compute=rate)
    plain = {each.schedule: each for each in compare(machine, layer, names, passes=passes, compute=rate).candidates}
    for name, each in found.items():
        assert each.applies == plain[name].applies
        if each.applies:
            assert each.time_s <= plain[name].time_s == each.untuned_s
            assert each.time_s < plain[name].time_s or each.options == plain[name].options
            kept = each.options.passes, each.options.gradient_dtype, each.options.result_dtype, each.options.direction
            assert kept == (passes, "auto", "auto", "auto")
    again = tuned(machine, layer, names, passes=passes, compute=rate)
    assert {name: fields_of(each, "ranking") for name, each in again.items()} == {
        name: fields_of(each, "ranking") for name, each in found.items()
    }


def test_no_schedule_has_so_many_combinations_that_trying_all_takes_long() -> None:
    softmax = attention_names_on(8, variants=True)
    names = [*softmax, *LINEAR, *(f"{one}+{other}" for one in LINEAR for other in attention_names_on(8))]
    assert max(trials(axes_of(name, AttentionOptions("both"))) for name in names) <= 60


def test_what_is_given_is_kept() -> None:
    found = tuned("full-mesh:4", LAYER, ["token-ring", "tasp"], buffers=2, passes="both", gradient_dtype="input")
    assert all(each.options.buffers == 2 and each.options.gradient_dtype == "input" for each in found.values())
    assert found["token-ring"].options.tail_chunks > 1


def test_a_ranking_that_is_not_tuned_says_which_options_were_used() -> None:
    found = compare("full-mesh:4", LAYER, ["tasp", "ulysses"], buffers=4, passes="both").to_dict()
    rows: Any = found["results"]
    options = {row["schedule"]: row["options"] for row in rows}
    assert options == {
        "tasp": {"trim": True, "buffers": 4, "dataflow": "rotate-kv-back", "gradient_dtype": "auto"},
        "ulysses": {"gradient_dtype": "auto", "result_dtype": "auto"},
    }
    assert all(row["untuned_time_s"] is None for row in rows)


def test_tuning_says_how_much_it_tries() -> None:
    said: list[str] = []
    found = tuned("full-mesh:4", LAYER, ["token-ring", "ulysses"], progress=said.append)
    assert said == [
        "tuning 2 schedules: combinations of options to simulate: at most 13", "1 of 2: token-ring", "2 of 2: ulysses"
    ]  # fmt: skip
    assert found["token-ring"].options.arguments
