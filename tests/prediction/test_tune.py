"""Tuned options: what is tried, and the times of schedules with them."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import ScheduleError
from tasp_lab.prediction import evaluate
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.columns import fields_of
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.evaluate import SEARCHED, tried_options, tuned
from tasp_lab.prediction.predict import predict
from tasp_lab.prediction.question import Question
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, OPTIONS, AttentionOptions
from tasp_lab.schedules.registry import ATTENTION, LINEAR, attention_names_on
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.workload.layer import Workload
from tests.support.strategies import attention_layers

LAYER = Workload(4096, heads=8, kv_heads=4, mask="causal")


def test_the_default_of_an_option_is_among_the_values_that_are_tried() -> None:
    assert all(getattr(DEFAULT_OPTIONS, field) in values for field, values in SEARCHED.items())
    assert all(len(set(values)) == len(values) > 1 for values in SEARCHED.values())


def tried(name: str, options: AttentionOptions) -> list[AttentionOptions]:
    return tried_options(Question("full-mesh:8", name, LAYER, options))


def test_what_is_tried_of_a_schedule() -> None:
    """Its own options, without those that were given, and those that every prediction chooses."""
    for name, options, varied in (
        ("token-ring", DEFAULT_OPTIONS, {"buffers", "tail_chunks"}),
        ("tasp", AttentionOptions("both"), {"trim", "buffers"}),
        ("tasp", AttentionOptions("both", buffers=2, dataflow="rotate-q"), {"trim"}),
        ("ulysses", AttentionOptions("both"), set()),
    ):
        found = tried(name, options)
        assert found[0] == options
        assert len(found) == len(set(found))
        assert {field for each in found for field in SEARCHED if getattr(each, field) != getattr(options, field)} == (
            varied
        )
        for field in varied:
            assert {getattr(each, field) for each in found} == set(SEARCHED[field])


def test_those_with_the_fewest_changes_are_tried_first() -> None:
    changes = [sum(getattr(each, field) != getattr(DEFAULT_OPTIONS, field) for field in SEARCHED)
               for each in tried("token-ring", DEFAULT_OPTIONS)]  # fmt: skip
    assert changes == sorted(changes)


def test_equal_times_keep_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other options are faster by rounding; and the least time of all is taken."""
    least = AttentionOptions(buffers=6, tail_chunks=2)
    question = Question("full-mesh:4", "token-ring", LAYER, DEFAULT_OPTIONS)
    plain_s = float(evaluate.answer(question).time_s)
    for share, expected in ((1e-12, DEFAULT_OPTIONS), (0.5, least)):
        with monkeypatch.context() as patched:
            answered = evaluate.Built._simulated

            def faster(built: Any, *given: Any, share: float = share, answered: Any = answered) -> Answer:
                found: Answer = answered(built, *given)
                found.__dict__["time_s"] = plain_s * (1 - share * (built.question.options == least))
                return found

            patched.setattr(evaluate.Built, "_simulated", faster)
            patched.setattr(evaluate.Candidate, "least_s", 0.0)
            found = tuned(question)
        assert found.question.options == expected
        assert found.untuned_s == plain_s


# Schedules


def tuned_answers(machine: Any, layer: Workload, names: Any = None, **options: Any) -> dict[str, Answer]:
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
    found = tuned_answers(machine, LAYER, [name], passes=passes)[name]
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
    found = tuned_answers(machine, layer, names, passes=passes, compute=rate)
    plain = {each.schedule: each for each in compare(machine, layer, names, passes=passes, compute=rate).candidates}
    for name, each in found.items():
        assert each.applies == plain[name].applies
        if each.applies:
            assert each.time_s <= plain[name].time_s == each.untuned_s
            assert each.time_s < plain[name].time_s or each.options == plain[name].options
            kept = each.options.passes, each.options.gradient_dtype, each.options.result_dtype, each.options.direction
            assert kept == (passes, "auto", "auto", "auto")
    again = tuned_answers(machine, layer, names, passes=passes, compute=rate)
    assert {name: fields_of(each, "ranking") for name, each in again.items()} == {
        name: fields_of(each, "ranking") for name, each in found.items()
    }


def test_no_schedule_has_so_many_combinations_that_trying_all_takes_long() -> None:
    softmax = attention_names_on(8, variants=True)
    names = [*softmax, *LINEAR, *(f"{one}+{other}" for one in LINEAR for other in attention_names_on(8))]
    assert max(len(tried(name, AttentionOptions("both"))) for name in names) <= 60


def test_what_is_given_is_kept() -> None:
    found = tuned_answers(
        "full-mesh:4", LAYER, ["token-ring", "tasp"], buffers=2, passes="both", gradient_dtype="input"
    )
    assert all(each.options.buffers == 2 and each.options.gradient_dtype == "input" for each in found.values())
    assert found["token-ring"].options.tail_chunks > 1


def test_a_ranking_that_is_not_tuned_says_which_options_were_used() -> None:
    found = compare("full-mesh:4", LAYER, ["tasp", "ulysses"], buffers=4, passes="both").to_dict()
    rows: Any = found["results"]
    options = {row["schedule"]: row["options"] for row in rows}
    assert options == {
        "tasp": {"trim": True, "buffers": 4, "dataflow": "rotate-kv-back", "gradient_dtype": "auto"},
        "ulysses": {"gradient_dtype": "auto", "result_dtype": "auto", "padded_heads": False},
    }
    assert all(row["untuned_time_s"] is None for row in rows)


def test_tuning_says_how_much_it_tries() -> None:
    said: list[str] = []
    found = tuned_answers("full-mesh:4", LAYER, ["token-ring", "ulysses"], progress=said.append)
    assert said == [
        "tuning 2 schedules: combinations of options to simulate: at most 13", "1 of 2: token-ring", "2 of 2: ulysses"
    ]  # fmt: skip
    assert found["token-ring"].options.arguments
