"""Which stacks of a hybrid are compared, and rankings of several kinds of attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.choices import AttentionKind
from tasp_lab.core.errors import ScheduleError
from tasp_lab.prediction.compare import FASTEST, StackChoice, choose_stacks, compare, compare_kinds
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS
from tasp_lab.schedules.registry import LASP_2H, LINEAR, attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

HYBRID = Workload(64, heads=4, head_dim=2, mask="causal", kind="hybrid", layers="LLS")
NAMES: dict[AttentionKind, list[str]] = {"linear": list(LINEAR), "softmax": attention_names_on(4)}

CONTIGUOUS = {"ring-attention", "token-ring", "ulysses", "staged-ulysses"}
"""The schedules that need no re-layout under a causal mask."""


def chosen(layers: str, time_of: Callable[[str], float | None]) -> StackChoice:
    layer = Workload(64, heads=4, head_dim=2, mask="causal", kind="hybrid", layers=layers)
    names = {kind: each for kind, each in NAMES.items() if {"linear": "L", "softmax": "S"}[kind] in layers}
    return choose_stacks(layer, full_mesh(4), names, DEFAULT_OPTIONS, lambda _, name: time_of(name))


@given(st.data())
def test_the_fastest_of_each_kind_are_stacked_each_with_each(data: st.DataObject) -> None:
    """The slowest layer alone takes longer than any that is stacked, but for those that are added."""
    every = [*NAMES["linear"], *NAMES["softmax"]]
    order = data.draw(st.permutations(every))
    times_s = {name: data.draw(st.sampled_from([float(place), None])) for place, name in enumerate(order)}
    found = chosen("LLS", times_s.get)
    fastest = {
        kind: [name for name in order if name in names and times_s[name] is not None][:FASTEST]
        for kind, names in NAMES.items()
    }
    without_moving = [name for name in order if name in CONTIGUOUS and times_s[name] is not None][:1]
    softmax = {*fastest["softmax"], *without_moving}
    expected = {f"{linear}+{each}" for linear in fastest["linear"] for each in softmax} | {LASP_2H}
    assert len(found.names) == len(set(found.names))
    assert set(found.names) == expected
    for kind, rows in found.alone.items():
        assert {name for name, _ in rows} == set(NAMES[kind])
        times = [time_s for _, time_s in rows if time_s is not None]
        assert times == sorted(times)
        assert all(time_s is None for _, time_s in rows[len(times) :])


def test_a_kind_without_layers_has_the_published_schedule() -> None:
    times_s = {name: float(place) for place, name in enumerate([*NAMES["linear"], *NAMES["softmax"]])}
    assert chosen("LL", times_s.get).names == (*(f"{name}+kv-all-gather" for name in list(LINEAR)[:3]),)
    softmax = [f"lasp-2+{name}" for name in NAMES["softmax"][:3]]
    assert chosen("SS", times_s.get).names == (*softmax, LASP_2H)
    assert set(chosen("SS", times_s.get).alone) == {"softmax"}


def test_where_nothing_applies_the_published_stack_says_why() -> None:
    assert chosen("LS", lambda _: None).names == (LASP_2H,)


def test_one_ranking_per_kind_with_the_times_of_each_alone() -> None:
    names = ["lasp-2", "tasp", "lasp-2+ulysses", "ulysses"]
    kinds = [HYBRID.of("S"), HYBRID.of("L"), HYBRID]
    found = compare_kinds("full-mesh:2", kinds, names, passes="both")
    assert [each.kind for each in found] == ["softmax", "linear", "hybrid"]
    assert [len(each.candidates) for each in found] == [2, 1, 1]
    for ranking, layer in zip(found, kinds, strict=True):
        own = [each.schedule for each in ranking.candidates]
        alone = compare("full-mesh:2", layer, own, passes="both")
        assert [each.time_s for each in ranking.candidates] == [each.time_s for each in alone.candidates]
    assert found.to_dict() == {"parts": [each.to_dict() for each in found]}
    assert {row["computes"] for row in found.records()} == {"softmax", "linear", "hybrid"}
    assert len(compare_kinds("full-mesh:2", kinds, ["tasp"])) == 1


def test_kinds_are_given_once_and_names_have_one_of_them() -> None:
    with pytest.raises(ScheduleError, match="layers of the kinds linear, linear, expected each kind once"):
        compare_kinds("full-mesh:2", [HYBRID.of("L"), HYBRID.of("L")])
    with pytest.raises(ScheduleError, match="schedule 'tasp' is for softmax attention, expected one for linear"):
        compare_kinds("full-mesh:2", [HYBRID.of("L")], ["tasp"])
